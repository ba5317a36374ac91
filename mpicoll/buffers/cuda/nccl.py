"""NCCL by cupy, whatever its version. Imported when NCCL is to be used."""

from __future__ import annotations

import warnings
from typing import Any

from mpicoll.errors import DeviceError

with warnings.catch_warnings():
    # cupy warns where it finds no NCCL, which library() says in an error.
    warnings.simplefilter("ignore")
    from cupy.cuda import nccl


def library() -> Any:
    """Return cupy's module. Raises DeviceError where cupy has no NCCL."""
    if not getattr(nccl, "available", False):
        raise DeviceError("cupy finds no NCCL; pip install nvidia-nccl-cu12, or -cu13, as cupy is")
    return nccl


def version() -> str:
    """Return the version, such as 2.21.5. Raises DeviceError where there is no NCCL."""
    number = int(library().get_version())
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def new_key() -> bytes:
    """Make the unique id of a new communicator, which one rank passes to the others."""
    # cupy 13 has a tuple of C's chars, which are signed.
    return bytes(byte & 0xFF for byte in library().get_unique_id())


def create_communicator(size: int, key: bytes, rank: int) -> Any:
    """Create this rank's communicator on the current device. Returns when all ranks have called it."""
    make = library().NcclCommunicator
    try:
        return make(size, key, rank)
    except TypeError:
        return make(size, tuple(byte - 256 if byte > 127 else byte for byte in key), rank)
