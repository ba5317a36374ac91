#!/usr/bin/env bash
# The tests of the extension in C on aarch64, with ranks that are threads:
#   ci/aarch64.sh [FOLDER]   what is downloaded stays in FOLDER
# On another machine qemu runs them, as root, with Debian's Python and without torch, which few of the files can do
# without. There a missing memory barrier is not found: x86-64 orders the loads and stores of what qemu translates.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source ci/setup.sh

files=(tests/engine/core/test_{arena,threads,shared_writes}.py tests/buffers/test_host_kernels.py
    tests/collectives/test_functions.py)
options=(-q --tier default -m "not mpi and not slow" -p no:cacheprovider)
if [[ $(uname -m) == aarch64 ]]; then
    exec timeout --kill-after=10 1800 python -m pytest "${options[@]}" "${files[@]}" \
        tests/engine/executors/test_shared_memory.py tests/buffers tests/collectives/test_{call,repeated_calls}.py
fi

for command in qemu-aarch64-static aarch64-linux-gnu-gcc debootstrap; do
    command -v "$command" >/dev/null ||
        die "mpicoll: no $command here: apt-get install qemu-user-static gcc-aarch64-linux-gnu debootstrap"
done
folder=$(realpath "${1:-$(mktemp -d)}")
[[ $# -gt 0 ]] || trap 'rm -rf "$folder"' EXIT
mkdir -p "$folder"
root=$folder/root

if [[ ! -e $folder/complete ]]; then
    # Packages are verified, but not installed, for which qemu would have to be registered with the kernel.
    debootstrap --arch=arm64 --variant=minbase --download-only --include=python3.11,libpython3.11-dev bookworm \
        "$folder/packages" http://deb.debian.org/debian >"$folder/debootstrap.log" ||
        die "$(tail "$folder/debootstrap.log")"
    for package in "$folder"/packages/var/cache/apt/archives/*.deb; do
        dpkg-deb --extract "$package" "$root"
    done
    wanted="cloudpickle|hypothesis|iniconfig|ml-dtypes|numpy|packaging|pluggy|pygments|pytest|pytest-mpi|pytest-timeout"
    awk -v wanted="^($wanted|sortedcontainers)==" '/^[^ ]/ { taken = $0 ~ wanted } taken' ci/requirements.txt \
        >"$folder/requirements.txt"
    install_verified --requirement "$folder/requirements.txt" --target "$folder/site" --implementation cp \
        --python-version 3.11 --abi cp311 --platform={manylinux_2_{28,27,17},manylinux2014}_aarch64
    touch "$folder/complete"
fi

rm -rf "$folder"/{mpicoll,tests}
cp -r mpicoll tests pyproject.toml "$folder"
rm -f "$folder"/mpicoll/_shm.*.so
aarch64-linux-gnu-gcc -std=c11 -O3 -ffp-contract=off -fvisibility=hidden -fPIC -shared -pthread \
    -DPy_LIMITED_API=0x030B0000 -isystem "$root/usr/include/python3.11" -idirafter "$root/usr/include" \
    mpicoll/csrc/*.c -o "$folder/mpicoll/_shm.abi3.so" -lm

# In a copy of the tests, from where the programs that they start import the package: these run in qemu too.
cat >"$folder/python" <<END
#!/bin/sh
exec qemu-aarch64-static -L "$root" "$root/usr/bin/python3.11" "\$@"
END
chmod +x "$folder/python"
cat >"$folder/run.py" <<'END'
import contextlib
import os
import sys
import types

import pytest

sys.executable = os.path.abspath("python")
# Modules that the tests share import torch.
torch = sys.modules["torch"] = types.ModuleType("torch")
torch.Tensor = type("Tensor", (), {})
sys.path.insert(0, "tests")
from support import warm

warm.serving = contextlib.nullcontext  # it would start the program that has imported torch
sys.exit(pytest.main(sys.argv[1:]))
END
cd "$folder"
PYTHONPATH=$folder:$folder/site timeout --kill-after=10 1800 ./python run.py "${options[@]}" "${files[@]}"
