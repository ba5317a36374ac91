"""Kernels in CUDA C++, compiled by g++ for the host."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from pathlib import Path

PRELUDE = Path(__file__).with_name("prelude.hpp")

# No contraction to fma where the source doesn't say so, and a crash where an element is not at a multiple of its
# alignment. A kernel takes longer to compile than to run, which optimization only adds to.
_OPTIONS = (
    *("-O0", "-std=c++17", "-ffp-contract=off", "-fPIC", "-w"),
    *("-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"),
    *("-pipe", "-nostartfiles"),
)


def compiler() -> str:
    """g++. Raises RuntimeError where there is none."""
    found = shutil.which("g++")
    if found is None:
        raise RuntimeError("kernels of the fake CUDA need g++, which isn't installed")
    return found


def _folder() -> Path:
    made = Path(tempfile.gettempdir()) / f"fakecuda-kernels-{os.getuid()}"
    made.mkdir(mode=0o700, exist_ok=True)
    return made


@contextmanager
def _alone(key: str) -> Iterator[None]:
    """A block for one thread of one process at a time: ranks come to a new kernel together."""
    with (_folder() / f"{key[:2]}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _key(*parts: str) -> str:
    return sha256("\0".join(parts).encode()).hexdigest()[:32]


def _compile(*arguments: str | Path) -> None:
    done = subprocess.run([compiler(), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the kernel does not compile:\n{done.stderr}")


def _kept(name: str, make: Callable[[Path], None]) -> Path:
    """A file of that name, which `make` writes if no process has done so before."""
    target = _folder() / name
    if not target.exists():
        with _alone(name), tempfile.TemporaryDirectory(dir=_folder()) as work:
            if not target.exists():
                made = Path(work) / "made"
                make(made)
                made.replace(target)
    return target


def _prelude() -> Path:
    """A folder with the prelude, and what it is after parsing."""
    text = PRELUDE.read_text()

    def make(folder: Path) -> None:
        folder.mkdir()
        header = folder / PRELUDE.name
        header.write_text(text)
        _compile(*_OPTIONS, "-x", "c++-header", "-o", f"{header}.gch", header)

    return _kept(f"{_key(text, *_OPTIONS)}.prelude", make)


def library(source: str, *options: str) -> Path:
    """The shared object of a C++ source, which is compiled once for all processes."""

    def make(made: Path) -> None:
        code = made.with_suffix(".cpp")
        code.write_text(source)
        _compile(*options, "-shared", "-o", made, code)

    return _kept(f"{_key(source, *options)}.so", make)


def build(source: str, *options: str) -> Path:
    """The same of a kernel, which finds the prelude."""
    try:
        return library(source, *_OPTIONS, f"-I{_prelude()}", *options)
    except RuntimeError as error:
        raise RuntimeError(f"{error}\n{source}") from None


@cache
def load(code: str, name: str, parameters: int) -> Callable[..., None]:
    """The compiled kernel of that name, as a function that runs all of its threads."""
    values = ", ".join(f"FakecudaValue{{values[{place}]}}" for place in range(parameters))
    source = f"""#include "{PRELUDE.name}"
{code}
extern "C" void fakecuda_run(unsigned blocks, unsigned threads, const unsigned long long* values) {{
    gridDim.x = blocks;
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++) {name}({values});
}}
"""
    function = ctypes.CDLL(str(build(source))).fakecuda_run
    function.restype = None
    return function  # type: ignore[no-any-return]


def call(function: Callable[..., None], blocks: int, threads: int, values: Sequence[int]) -> None:
    """Run it now, on addresses that the host may touch."""
    function(blocks, threads, (ctypes.c_ulonglong * max(1, len(values)))(*values))
