"""Device memory: recognised here, so that it is refused by name until it can be staged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpicoll.errors import DeviceError, DTypeError

_DLPACK_HOST = frozenset({1, 3, 11})
"""DLPack's device types whose memory the CPU may read: CPU, CUDA-pinned, ROCm-pinned."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A CUDA array as its ``__cuda_array_interface__`` (version 2 or 3) describes it.

    `strides` are in bytes, or None for C order; `stream` is the interface's: None if nothing needs to be waited for.
    """

    pointer: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    strides: tuple[int, ...] | None
    readonly: bool
    stream: int | None


def describe(x: Any) -> DeviceMemory:
    """Read the CUDA array interface of `x`. Raises DTypeError if it is malformed or has a mask."""
    interface = x.__cuda_array_interface__
    try:
        pointer, readonly = interface["data"]
        strides = interface.get("strides")
        memory = DeviceMemory(
            pointer=int(pointer),
            shape=tuple(int(extent) for extent in interface["shape"]),
            dtype=np.dtype(interface["typestr"]),
            strides=None if strides is None else tuple(int(stride) for stride in strides),
            readonly=bool(readonly),
            stream=interface.get("stream"),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DTypeError(f"{type(x).__name__}: malformed __cuda_array_interface__ {interface!r}: {error}") from error
    if interface.get("mask") is not None:
        raise DTypeError(f"{type(x).__name__}: a CUDA array with a mask can't be sent; fill it first")
    return memory


def refuse_device_memory(operation: str, x: Any, argument: str) -> None:
    """Raise DeviceError if the memory of `x` lies on a device."""
    if hasattr(x, "__cuda_array_interface__"):
        memory = describe(x)
        raise DeviceError(
            f"{operation}: {argument} is a {type(x).__name__} of shape {memory.shape} and dtype {memory.dtype} in CUDA"
            f" memory at {memory.pointer:#x}; device memory is not supported yet: copy it to the host"
            " (cupy.asnumpy, .cpu())"
        )
    device = getattr(x, "__dlpack_device__", None)
    if device is not None:
        kind, index = device()
        if int(kind) not in _DLPACK_HOST:
            raise DeviceError(
                f"{operation}: {argument} is a {type(x).__name__} on DLPack device type {int(kind)}, index {index};"
                " device memory is not supported yet: copy it to the host first"
            )
