"""Checks of the argument ``compression``, before any message is sent."""

from __future__ import annotations

from typing import Any

from mpicoll.buffers.buffer import Buffer
from mpicoll.buffers.compression import NAMES
from mpicoll.buffers.device import device_of
from mpicoll.engine.core.compression_memory import CompressionMemory
from mpicoll.errors import ArgumentError, DeviceError, DTypeError

_OPS = ("sum", "avg")


def check_compression_name(operation: str, compression: Any) -> str:
    """Return the name of a compression. Raises ArgumentError for another value."""
    if isinstance(compression, str) and compression in NAMES:
        return compression
    raise ArgumentError(
        f"{operation}: compression must be {' or '.join(map(repr, NAMES))}, or None for none, got {compression!r}"
    )


def make_compression(
    operation: str, compression: Any, op: Any, algorithm: str | None, *, feedback: bool
) -> CompressionMemory:
    """Return the memory for messages with `compression`, a name, or `compression` itself if it is such a memory.

    Raises ArgumentError for another name, and for another `op` than sum and avg; AlgorithmError if an `algorithm` is
    named too.
    """
    memory = compression
    if not isinstance(memory, CompressionMemory):
        memory = CompressionMemory(check_compression_name(operation, compression), feedback=feedback)
    if not (isinstance(op, str) and op in _OPS):
        raise ArgumentError(
            f"{operation}: compression={memory.name!r} serves op {' and '.join(_OPS)}, got {op!r}; leave compression="
            " out"
        )
    if algorithm is not None:
        raise ArgumentError(
            f"{operation}: compression={memory.name!r} has an algorithm of its own, got algorithm={algorithm!r}; leave"
            " one of both out"
        )
    return memory


def check_compressible(operation: str, name: str, buffer: Buffer) -> None:
    """Raise DTypeError if `buffer` is not of float32, and DeviceError if it is on a device."""
    if buffer.dtype.name != "float32":
        raise DTypeError(
            f"{operation}: compression={name!r} serves float32 arrays, got {buffer.dtype.name}; convert the array to"
            " float32, or leave compression= out"
        )
    if device_of(buffer.array) is not None:
        raise DeviceError(
            f"{operation}: compression={name!r} serves arrays on the host, got one on a device; copy it to the host, or"
            " leave compression= out"
        )
