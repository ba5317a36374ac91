"""Compile the kernels of mpicoll by NVRTC, which needs no GPU: python ci/cuda_kernels.py [--every N] [ARCHITECTURE...]

``--every N`` takes one kernel of N. NVRTC is that of the wheel nvidia-cuda-nvrtc, the architectures are such as sm_90
(default: sm_80, sm_90 and sm_100). Prints what was compiled; fails with NVRTC's words if a kernel does not compile.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import site
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mpicoll.buffers import kernels

OPS = ("sum", "avg", "prod", "min", "max", "band", "bor", "bxor", "land", "lor", "lxor")

OPTIONS = (b"--std=c++17", b"-ftz=true")
"""Those of cupy's that change the code."""


def list_kernels() -> Iterator[kernels.Source]:
    """Yield every kind of kernel: each dtype, operation and width, for a part of one rank and for shares of four."""
    for dtype, itemsize in kernels.ITEMSIZE.items():
        wides = [(False, False)]
        if dtype in kernels.HALVES:
            wides += [(True, False), (False, True), (True, True)]
        widths = sorted({kernels.width(dtype, addresses) for addresses in (0, 4, itemsize)})
        for op in OPS:
            if not kernels.known(op, dtype):
                continue
            for first, last in wides:
                for width in widths:
                    for parts, outs in ((2, 1), (4, 4)):
                        yield kernels.fold(op, dtype, parts, outs, width, wide_first=first, wide_last=last)


def find_nvrtc() -> Path:
    """Return NVRTC of the installed wheel. Raises FileNotFoundError if there is none."""
    folders = [*site.getsitepackages(), *sys.path]
    found = [one for folder in folders for one in Path(folder).glob("nvidia/*/lib/libnvrtc.so.*")]
    if not found:
        raise FileNotFoundError("there is no NVRTC: pip install nvidia-cuda-nvrtc")
    return found[0]


class Compiler:
    """NVRTC, for one architecture. Safe for several threads."""

    def __init__(self, architecture: str) -> None:
        library = find_nvrtc()
        for builtins in library.parent.glob("libnvrtc-builtins.so.*"):
            ctypes.CDLL(str(builtins))  # by its path, since NVRTC looks for it by name
        self._nvrtc: Any = ctypes.CDLL(str(library))
        self._options = (*OPTIONS, b"--gpu-architecture=" + architecture.encode())

    def compile(self, source: kernels.Source) -> str | None:
        """Compile a kernel. Return what NVRTC says if that fails."""
        nvrtc, program = self._nvrtc, ctypes.c_void_p()
        text, name = source.program.encode(), source.name.encode()
        if nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, name, 0, None, None):
            return f"{source.name}: NVRTC takes no program"
        options = (ctypes.c_char_p * len(self._options))(*self._options)
        failed = nvrtc.nvrtcCompileProgram(program, len(self._options), options)
        size = ctypes.c_size_t()
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        code = ctypes.c_size_t()
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(code))
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
        if failed or not code.value:
            return f"{source.name}: {log.value.decode() or 'no code'}"
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", default=["sm_80", "sm_90", "sm_100"])
    parser.add_argument("--every", type=int, default=1, metavar="N", help="take one kernel of N")
    given = parser.parse_args()
    sources = list(list_kernels())[:: given.every]
    for architecture in given.architectures:
        begin = time.monotonic()
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            failures = [one for one in threads.map(Compiler(architecture).compile, sources) if one is not None]
        if failures:
            sys.exit(f"{architecture}: {len(failures)} of {len(sources)} kernels do not compile, first\n{failures[0]}")
        print(f"{architecture}: {len(sources)} kernels compiled in {time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
