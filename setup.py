"""The extension mpicoll._shm; pyproject.toml has all the rest."""

# setuptools, because after an editable installation by meson-python each start of a rank calls ninja; here the
# extension lies beside the modules, and `optional` is all that an installation without a compiler needs.

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

# The limited API of Python 3.10 lacks the buffer protocol, and a Python without the GIL has no limited API.
abi3 = sys.version_info >= (3, 11) and not sysconfig.get_config_var("Py_GIL_DISABLED")
sources = Path("mpicoll/csrc")

setup(
    ext_modules=[
        Extension(
            "mpicoll._shm",
            sources=sorted(str(file) for file in sources.glob("*.c")),
            depends=sorted(str(file) for file in sources.glob("*.h")),
            define_macros=[("Py_LIMITED_API", "0x030B0000")] if abi3 else [],
            # Without contraction each compiler, and each version of a kernel for a processor, rounds alike.
            extra_compile_args=["-std=c11", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-pthread"],
            extra_link_args=["-pthread"],
            libraries=["m"],
            py_limited_api=abi3,
            optional="REQUIRE_EXTENSION" not in os.environ,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if abi3 else {},
)
