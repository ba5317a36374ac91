#!/usr/bin/env bash
# What the code for CUDA can show without a GPU: the real cupy imports mpicoll's modules, NVRTC is found from an
# environment inside of another as ci/gpu.sh makes it, and every kernel compiles: ci/cuda_kernels.sh [ARCHITECTURE...]
#
# Makes .venv-kernels first, if it is absent, with cupy, NVRTC and what finds it, by their hashes: 160 MB.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

env=.venv-kernels
if [[ ! -e $env/installed ]]; then
    rm -rf "$env"
    "${PYTHON:-python3}" -m venv "$env"
    # requirements NAMES FILE: the requirements of these packages, with their hashes.
    requirements() { awk -v names="$1" '/^[^ ]/ { taken = match($0, "^(" names ")==") } taken' "$2"; }
    {
        requirements "numpy|setuptools" ci/requirements.txt
        requirements "nvidia-cuda-nvrtc|cuda-pathfinder" ci/requirements-cuda.txt
        requirements "cupy-cuda13x" ci/requirements-cupy.txt
    } >"$env/requirements.txt"
    "$env/bin/python" -m pip --disable-pip-version-check install --quiet --require-hashes --no-deps \
        --requirement "$env/requirements.txt"
    touch "$env/installed"
fi
python=$PWD/$env/bin/python
export PYTHONPATH=$PWD

echo "=== the real cupy"
"$python" - <<'END'
import pkgutil
from importlib import import_module

import cupy

from mpicoll.buffers import cuda
from mpicoll.errors import DeviceError

names = [one.name for one in pkgutil.iter_modules(cuda.__path__)]
for name in names:
    import_module(f"mpicoll.buffers.cuda.{name}")
try:
    print(import_module("mpicoll.buffers.cuda.device").count_devices(), "devices")
except DeviceError as error:
    print(error)
print(f"cupy {cupy.__version__}: imported by {', '.join(names)}")
END

echo "=== an environment inside of this one"
inner=$(mktemp -d)
trap 'rm -rf "$inner"' EXIT
"$python" -m venv --without-pip "$inner"
"$python" ci/gpu.py outer >"$("$inner/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz_outer.pth"
"$inner/bin/python" -c 'from cuda.pathfinder import load_nvidia_dynamic_lib as load; print(load("nvrtc").abs_path)'

echo "=== every kernel"
"$python" ci/cuda_kernels.py "$@"
