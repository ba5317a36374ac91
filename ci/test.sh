#!/usr/bin/env bash
# Every check of the project: ci/test.sh
# One of them:                ci/test.sh lint|types|layers|unit|suite|mpi [ranks]
# Makes .venv first, if it is absent. pytest also reads PYTEST_ADDOPTS.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage="usage: $0 [lint|types|layers|unit|suite|mpi [ranks]]"
only=${1:-all}
case $#,$only in
    0,*) ;;
    1,lint | 1,types | 1,layers | 1,unit | 1,suite | 1,mpi) ;;
    2,mpi) [[ $2 =~ ^[1-9][0-9]*$ ]] || { echo "$usage" >&2; exit 2; } ;;
    *) echo "$usage" >&2; exit 2 ;;
esac
ranks=${2:-1 2 3 4}

source ci/setup.sh
source ci/stages.sh

# wanted STAGE: is it to run?
wanted() { [[ $only == all || $only == "$1" ]]; }

if wanted lint; then
    check lint 60 ruff check .
    check format 60 ruff format --check .
    check spelling 60 codespell
    check prose 60 codespell --dictionary ci/words.txt README.md CONTRIBUTING.md CHANGELOG.md SECURITY.md docs
fi
if wanted types; then
    check types 300 mypy
fi
if wanted layers; then
    # import-linter finds the contract of ci/layers.py from here.
    check layers 60 env PYTHONPATH=. lint-imports
fi
if wanted unit; then
    tests unit 3600 python -m pytest -m "not mpi" -q "$color" --durations=5
fi
if wanted suite; then
    tests suite 400 python ci/torch_suite.py
fi
if wanted mpi; then
    for np in $ranks; do
        # Ranks share no cache directory: they would write to it at once.
        tests "mpi-$np" 1500 mpirun -np "$np" python -m pytest --with-mpi -m mpi -q "$color" -p no:cacheprovider
    done
fi

sum_up
