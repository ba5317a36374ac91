"""The version and the extension mpicoll._shm; pyproject.toml has all the rest."""

# setuptools, because after an editable installation by meson-python each start of a rank calls ninja; here the
# extension lies beside the modules, and `optional` is all that an installation without a compiler needs.

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

# The limited API of Python 3.10 lacks the buffer protocol, and a Python without the GIL has no limited API.
abi3 = sys.version_info >= (3, 11) and not sysconfig.get_config_var("Py_GIL_DISABLED")
sources = Path("mpicoll/csrc")

# Written here, and part of the source distribution, where there is no git.
version_file = Path("mpicoll/_version.py")


def find_version() -> str:
    """Return the version: that of the tag of this commit, or else one before the next. Without git it is the one that
    was found before."""
    if Path(".git").exists():  # not that of a checkout around this folder
        tagged = git("describe", "--tags", "--long", "--dirty", "--match", "v[0-9]*")
        if match := re.fullmatch(r"v(.*)-(\d+)-g(\w+)(-dirty)?", tagged):
            tag, count, commit, changed = match.groups()
            if count == "0" and not changed:
                return tag
            # The last number of the tag, plus 1.
            following = re.sub(r"\d+$", lambda number: str(int(number[0]) + 1), tag)
            return f"{following}.dev{count}+g{commit}"
        if count := git("rev-list", "--count", "HEAD"):
            return f"0.1.0.dev{count}+g{git('rev-parse', '--short', 'HEAD')}"
    if version_file.exists() and (match := re.search(r'__version__ = "(.*)"', version_file.read_text())):
        return match[1]
    return "0+unknown"


def git(*arguments: str) -> str:
    """Return what a command of git prints; "" if it fails, as without git or a tag."""
    try:
        return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


version = find_version()
text = f'"""Written by setup.py."""\n\n__version__ = "{version}"\n'
if not version_file.exists() or version_file.read_text() != text:
    version_file.write_text(text)

setup(
    version=version,
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
