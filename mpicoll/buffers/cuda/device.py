"""The CUDA devices of this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import cupy
from cupy.cuda import runtime

from mpicoll.buffers.cuda import copies, folds, ipc_handles, pinned
from mpicoll.buffers.cuda.streams import DeviceStreams
from mpicoll.buffers.cuda.words import StreamWords
from mpicoll.buffers.device import DeviceArray, Export
from mpicoll.buffers.dtypes import Array
from mpicoll.errors import DeviceError


class CudaDevice(DeviceStreams):
    """A GPU; see :class:`mpicoll.buffers.device.Device`. Each thread has a separate stream there, for which no
    default stream waits. Created by :func:`cuda_device`."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        # The bus distinguishes the GPUs of a machine; the UUID the parts of a divided GPU. cupy's ends at its first
        # zero byte, or runs on into the bytes behind its 16.
        properties = runtime.getDeviceProperties(index)
        uuid = bytes(properties["uuid"])[:16].hex()
        self.identity = f"{_machine()}/{cupy.cuda.Device(index).pci_bus_id}/{uuid}"
        self.model = bytes(properties["name"]).decode()

    def register_host_memory(self, memory: Array) -> None:
        pinned.register_host_memory(self.index, memory)

    def copy(self, target: Array, source: Any) -> None:
        copies.copy(self, target, source)

    def apply(self, ufunc: str, inputs: Sequence[Any], out: DeviceArray) -> None:
        folds.apply(self, ufunc, inputs, out)

    def convert(self, source: Array, target: Array, dtype: str) -> None:
        folds.convert(self, source, target, dtype)

    def fold(self, op: str, parts: Sequence[DeviceArray], outs: Sequence[DeviceArray], dtype: str) -> None:
        folds.fold(self, op, parts, outs, dtype)

    def bind_fold(
        self, op: str, parts: Sequence[DeviceArray], outs: Sequence[DeviceArray], dtype: str
    ) -> Callable[[], None]:
        return folds.bind_fold(self, op, parts, outs, dtype)

    def bind_copy(self, target: DeviceArray, source: DeviceArray) -> Callable[[], None]:
        return copies.bind_copy(self, target, source)

    def export(self, memory: DeviceArray) -> Export | None:
        return ipc_handles.export(self.index, self.identity, memory)

    is_exported = staticmethod(ipc_handles.is_exported)

    def make_words(self, memory: Array) -> StreamWords:
        return StreamWords(self, memory)

    def reach(self, export: Export) -> DeviceArray:
        return ipc_handles.open_export(self, self.index, export)


def _machine() -> str:
    """Return a name that all processes of this machine share, and no other machine has."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return os.uname().nodename


_devices: dict[tuple[int, int], CudaDevice] = {}


def cuda_device(index: int) -> CudaDevice:
    """Return this process' one object for the CUDA device of that number. Raises DeviceError if there is none."""
    # A child of fork has none of its parent's streams.
    key = os.getpid(), index
    device = _devices.get(key)
    if device is None:
        count = count_devices()
        if not 0 <= index < count:
            raise DeviceError(f"there is no device cuda:{index}: this process sees {count}, numbered from 0")
        device = _devices.setdefault(key, CudaDevice(index))
    return device


def count_devices() -> int:
    """Return the number of CUDA devices. Raises DeviceError where CUDA can't be used."""
    try:
        return int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as error:
        raise DeviceError(f"CUDA can't be used here: {error}") from error
