#!/usr/bin/env bash
# Every check of the project:          ci/test.sh
# A sample, in two minutes:            ci/test.sh quick
# All there is, in hours:              ci/test.sh long
# One stage:                           ci/test.sh lint|types|layers|unit|suite|mpi [ranks]
# How much of the tests each of the three takes is in tests/support/tiers.py.
# Makes .venv first, if it is absent. pytest also reads PYTEST_ADDOPTS.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage="usage: $0 [quick|long|lint|types|layers|unit|suite|mpi [ranks]]"
only=all tier=default
case $#,${1:-} in
    0,) ;;
    1,quick | 1,long) tier=$1 ;;
    1,lint | 1,types | 1,layers | 1,unit | 1,suite | 1,mpi) only=$1 ;;
    2,mpi) only=$1; [[ $2 =~ ^[1-9][0-9]*$ ]] || { echo "$usage" >&2; exit 2; } ;;
    *) echo "$usage" >&2; exit 2 ;;
esac
ranks=${2:-}

source ci/setup.sh
source ci/stages.sh

# Without the cache of compiled modules each of hundreds of processes would compile mpicoll and the tests again.
unset PYTHONDONTWRITEBYTECODE

# Several jobs share the cores, though none of them has more ranks than there are cores.
export OMPI_MCA_mpi_yield_when_idle=${OMPI_MCA_mpi_yield_when_idle:-1}

# nproc would take OMP_NUM_THREADS for the answer.
workers=$(env -u OMP_NUM_THREADS nproc)
if [[ $tier != quick ]]; then
    # Slow tests wait part of their time: for ranks that start, or that fail.
    workers=$((workers * 3 / 2))
fi
workers=$((workers > 8 ? 8 : workers)) # each takes up to 2 GB

# wanted STAGE: is it to run?
wanted() { [[ $only == all || $only == "$1" ]]; }

# mpi NP SELECTION...: the tests marked mpi at so many ranks, which share no cache directory: they would write to it at
# once.
mpi() {
    local np=$1
    shift
    tests "mpi-$np" 3600 mpirun -np "$np" python -m pytest --with-mpi -q "$color" -p no:cacheprovider --tier "$tier" -- "$@"
}

if wanted lint; then
    check lint 60 ruff check .
    check format 60 ruff format --check .
    check spelling 60 codespell
    check prose 60 codespell --dictionary ci/words.txt README.md CONTRIBUTING.md CHANGELOG.md SECURITY.md docs mpicoll examples ci
    check analysis 300 ci/analyse.sh
fi
# Compiles all tests, and lists the files that have any for mpirun.
compilation=(compilation 300 python -m pytest --collect-only -qq -p no:cacheprovider -m mpi)
if [[ $only$tier == alldefault ]]; then
    # Beside mypy, which uses one core. Otherwise each worker of the next stage would compile all tests.
    beside "${compilation[@]}"
fi
if wanted types; then
    check types 300 mypy
fi
if [[ $only$tier == alldefault ]]; then
    check "${compilation[@]}"
fi
if wanted layers; then
    # import-linter finds the contract of ci/layers.py from here.
    check layers 60 env PYTHONPATH=. lint-imports
fi
suite=(suite 900 python ci/torch_suite.py)
bare=(without-extension 300 ci/without_extension.sh python -m pytest -m "not mpi" -q "$color" -p no:cacheprovider
    --tier quick tests/collectives)
if [[ $only$tier == alldefault ]]; then
    # Both wait most of the time, or take one core for a short one.
    beside "${suite[@]}"
    beside "${bare[@]}"
fi
if wanted unit; then
    limit=5400
    if [[ $tier == long ]]; then
        limit=14400 # with an hour of random input to parsers
    fi
    tests unit "$limit" python -m pytest -q "$color" --tier "$tier" -- -m "not mpi" --durations=5 \
        --numprocesses "$workers" --dist loadfile --no-loadscope-reorder
fi
if [[ $only$tier == alldefault ]]; then
    tests "${bare[@]}"
fi
if wanted suite && [[ $tier != quick ]]; then
    tests "${suite[@]}"
fi
if wanted mpi; then
    if [[ -n $ranks ]]; then
        mpi "$ranks" -m mpi
    elif [[ $tier == quick ]]; then
        mpi 3 -m mpi tests/transport tests/collectives
    elif [[ $tier == long ]]; then
        for np in 1 2 3 4; do mpi "$np" -m mpi; done
    else
        # Ranks that collected the other files too would take longer for that than for many tests.
        mapfile -t files < <(sed -n 's/^\(tests\/.*\.py\): [0-9]*$/\1/p' "$results/compilation.log" 2>/dev/null)
        mpi 3 -m mpi ${files[@]+"${files[@]}"}
        mapfile -t files < <(grep -rl --include='test_*.py' 'pytest\.mark\.every_size' tests)
        for np in 2 4; do mpi "$np" -m "mpi and every_size" "${files[@]}"; done
    fi
fi
if [[ $tier == long ]]; then
    tests without-extension 5400 ci/without_extension.sh python -m pytest -m "not mpi" -q "$color" -p no:cacheprovider \
        --tier default --numprocesses "$workers" --dist loadfile --no-loadscope-reorder
    for np in 2 3 4; do
        tests "without-extension-mpi-$np" 3600 ci/without_extension.sh mpirun -np "$np" python -m pytest --with-mpi -m mpi \
            -q "$color" -p no:cacheprovider --tier default
    done
    check tidy 600 ci/analyse.sh tidy
    check sanitize-address 3600 ci/sanitize.sh address
    check sanitize-thread 3600 ci/sanitize.sh thread
    check soak 1800 mpirun -np 2 python ci/soak.py --operations 100000
    check soak-torch 1800 mpirun -np 3 python ci/soak.py --operations 100000 --torch
    check programs 1800 python ci/random_operations.py --operations 10000
    check programs-mpi 1800 mpirun -np 4 python ci/random_operations.py --operations 10000
    check programs-torch 1800 mpirun -np 4 python ci/random_operations.py --operations 5000 --torch
    check programs-hosts 1800 python ci/hosts.py 2 2 python ci/random_operations.py --operations 5000
    check programs-hosts-torch 1800 python ci/hosts.py 2 2 python ci/random_operations.py --operations 5000 --torch
    check mismatches 3600 python ci/mismatches.py
    check deaths 7200 python ci/deaths.py
    check deaths-hosts 3600 python ci/deaths.py --hosts 2,1
    check survivors 14400 python ci/deaths.py --ulfm --times 20
    check survivors-hosts 3600 python ci/deaths.py --ulfm --hosts 2,2
    check partition 1200 python ci/partition.py
    check torch 7200 ci/torch.sh
fi

sum_up
