"""What ci/gpu.sh needs of Python.

``gpu.py outer`` prints the lines of a .pth file by which an environment inside of this Python's finds its packages;
``gpu.py versions`` prints what there is; ``gpu.py join TARGET PART...`` makes one file of what runs of
``mpicoll bench --json`` wrote.
"""

from __future__ import annotations

import json
import platform
import site
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def outer() -> None:
    # Where this Python is in a virtual environment itself, its packages are not the system's.
    print(*site.getsitepackages(), sep="\n")
    # cupy looks for NVRTC and CUDA's headers where site says that packages are, and not in sys.path.
    print(f"import site; site.PREFIXES.append({sys.prefix!r})")


def versions() -> None:
    import cupy
    from mpi4py import MPI

    print("python", platform.python_version())
    for name in ("mpicoll", "numpy", "mpi4py", "torch", "pytest", "pytest-mpi"):
        try:
            print(name, version(name))
        except PackageNotFoundError:
            print(name, "is not installed")
    print(MPI.Get_library_version().splitlines()[0].strip("\0"))
    runtime = cupy.cuda.runtime
    print(f"cupy {cupy.__version__} with CUDA {runtime.runtimeGetVersion()}, driver for {runtime.driverGetVersion()}")
    for index in range(runtime.getDeviceCount()):
        properties = runtime.getDeviceProperties(index)
        print(f"device {index}: {properties['name'].decode()}, {properties['totalGlobalMem'] >> 30} GiB")


def join(target: Path, *parts: Path) -> None:
    runs = [json.loads(part.read_text()) for part in parts if part.exists()]
    if not runs:
        sys.exit("nothing was measured, so there is nothing to write")
    target.write_text(json.dumps({"runs": runs}, indent=1) + "\n")
    print(f"{target}: {sum(len(run['points']) for run in runs)} points of {len(runs)} runs")


if sys.argv[1] == "outer":
    outer()
elif sys.argv[1] == "versions":
    versions()
else:
    join(*map(Path, sys.argv[2:]))
