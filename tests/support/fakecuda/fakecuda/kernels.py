"""Elementwise kernels in CUDA C++, compiled by g++ for the host."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

PRELUDE = Path(__file__).with_name("prelude.hpp")

# No contraction to fma where the source doesn't say so, complex products without a look for NaN, and a crash where an
# element is not at a multiple of its alignment.
_OPTIONS = (
    *("-O2", "-std=c++17", "-ffp-contract=off", "-fcx-limited-range", "-fPIC", "-w"),
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


def _prelude(options: Sequence[str]) -> Path:
    """A folder with the prelude, and what it is after parsing, for kernels that are compiled with these options."""
    text = PRELUDE.read_text()

    def make(folder: Path) -> None:
        folder.mkdir()
        header = folder / PRELUDE.name
        header.write_text(text)
        _compile(*options, "-x", "c++-header", "-o", f"{header}.gch", header)

    return _kept(f"{_key(text, *options)}.prelude", make)


def library(source: str, *options: str) -> Path:
    """The shared object of a C++ source, which is compiled once for all processes."""

    def make(made: Path) -> None:
        code = made.with_suffix(".cpp")
        code.write_text(source)
        _compile(*options, "-shared", "-o", made, code)

    return _kept(f"{_key(source, *options)}.so", make)


def build(source: str, *options: str) -> Path:
    """The same of a kernel, which finds the prelude."""
    # The header of complex numbers takes a compiler longer than most kernels, parsed before or not.
    shared = (*_OPTIONS, "-DFAKECUDA_COMPLEX") if "complex<" in source else _OPTIONS
    try:
        return library(source, *shared, f"-I{_prelude(shared)}", *options)
    except RuntimeError as error:
        raise RuntimeError(f"{error}\n{source}") from None


@dataclass(frozen=True, slots=True)
class Parameter:
    """Of a kernel. `form` is ``scalar``, ``array`` or ``raw`` (an array that the kernel indexes itself)."""

    name: str
    ctype: str
    form: str
    const: bool

    def outside(self, number: int) -> str:
        """Return the declaration of the parameter before the loop."""
        if self.form == "scalar":
            return f"const {self.ctype} {self.name} = *(const {self.ctype}*)data[{number}];\n"
        if self.form == "raw":
            return f"CArray<{self._type()}> {self.name}(data[{number}], sizes[{number}]);\n"
        return ""

    def inside(self, number: int) -> str:
        """And within it."""
        if self.form != "array":
            return ""
        kind = self._type()
        return f"{kind}& {self.name} = *({kind}*)(data[{number}] + at(_i, ndim, shape, strides[{number}]));\n"

    def _type(self) -> str:
        return f"const {self.ctype}" if self.const else self.ctype


def elementwise_source(
    parameters: Sequence[Parameter],
    operation: str,
    preamble: str,
    types: Sequence[tuple[str, str]],
    loop_prep: str = "",
    after_loop: str = "",
) -> str:
    """C++ of a kernel. `types` are typedefs, as (name, C++ type)."""
    outside = "".join(one.outside(number) for number, one in enumerate(parameters))
    inside = "".join(one.inside(number) for number, one in enumerate(parameters))
    return (
        f'#include "{PRELUDE.name}"\n'
        + "".join(f"typedef {ctype} {name};\n" for name, ctype in types)
        + preamble
        + '\nextern "C" void kernel(long long size_, int ndim, const long long* shape, char* const* data,'
        " const long long* const* strides, const long long* sizes) {\n"
        f"Indexer _ind(size_);\n{outside}{loop_prep};\n"
        f"for (long long _i = 0; _i < size_; ++_i) {{ const ptrdiff_t i = _i; _ind.set(_i);\n{inside}{operation};\n}}\n"
        f"{after_loop};\n}}\n"
    )


@cache
def load(source: str) -> Callable[..., None]:
    """The compiled function."""
    function = ctypes.CDLL(str(build(source))).kernel
    function.restype = None
    return function  # type: ignore[no-any-return]


def call(
    function: Callable[..., None],
    shape: tuple[int, ...],
    addresses: Sequence[int],
    strides: Sequence[tuple[int, ...]],
    sizes: Sequence[int],
) -> None:
    """Run it now, on addresses that the host may touch."""

    def words(values: Sequence[int]) -> Any:
        return (ctypes.c_longlong * max(1, len(values)))(*values)

    n = 1
    for extent in shape:
        n *= extent
    rows = [words(one) for one in strides]
    function(
        ctypes.c_longlong(n),
        len(shape),
        words(shape),
        (ctypes.c_void_p * len(addresses))(*addresses),
        (ctypes.c_void_p * len(rows))(*map(ctypes.addressof, rows)),
        words(sizes),
    )
