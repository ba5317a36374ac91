"""Device memory that other processes of the node open."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from functools import lru_cache
from weakref import finalize

import numpy as np
from cupy.cuda import runtime

from mpicoll.buffers.cuda.driver import CurrentDevice, RelaxedCapture, find_allocation
from mpicoll.buffers.device import Device, DeviceArray, Export, view
from mpicoll.errors import DeviceError

_LAZY_PEER = 1
"""Memory of another device becomes accessible when it is opened."""

_PEERS_ALREADY = 704
"""CUDA's error for access that was enabled before."""


class _Opened:
    """An allocation of another process, open as long as this object lives."""

    __slots__ = ("__weakref__",)


def export(index: int, identity: str, memory: DeviceArray) -> Export | None:
    if not memory.size:
        return None
    address = memory.ctypes.data
    with RelaxedCapture(), CurrentDevice(index):
        try:
            base, nbytes, number = find_allocation(address)
            handle = _handle(index, base, number)
        except (OSError, runtime.CUDARuntimeError):
            return None
    return Export(process_name(), identity, number, handle, base, nbytes, address - base)


def open_export(device: Device, index: int, export: Export) -> DeviceArray:
    whole = (export.nbytes,)
    try:
        with RelaxedCapture(), CurrentDevice(index):
            if export.process == process_name():
                # CUDA does not open what the process has made.
                _allow(index, runtime.pointerGetAttributes(export.address).device)
                return view(device, export.address, whole, np.dtype(np.uint8))
            address = runtime.ipcOpenMemHandle(export.handle, _LAZY_PEER)
    except runtime.CUDARuntimeError as error:
        raise DeviceError(
            f"{device.name} can't reach {export.nbytes} bytes of process {export.process} on {export.device}: {error}"
        ) from error
    opened = _Opened()
    finalize(opened, _close, index, address).atexit = False
    return view(device, address, whole, np.dtype(np.uint8), owner=opened)


def _allow(index: int, other: int) -> None:
    """Let kernels of this device, which is current, use memory of another one."""
    if other != index:
        try:
            runtime.deviceEnablePeerAccess(other)
        except runtime.CUDARuntimeError as error:
            if error.status != _PEERS_ALREADY:
                raise


def _close(index: int, address: int) -> None:
    # Its owner may be gone.
    with suppress(runtime.CUDARuntimeError), RelaxedCapture(), CurrentDevice(index):
        runtime.ipcCloseMemHandle(address)


@lru_cache(maxsize=4096)
def _handle(index: int, base: int, number: int) -> bytes:
    """By what other processes open an allocation. Raises CUDARuntimeError if they can't: it is managed, or of a pool of
    the driver's."""
    return bytes(runtime.ipcGetMemHandle(base))


def process_name() -> str:
    """What this process is called among all processes; numbers of processes are used again, and in every container."""
    # A child of fork is another process. Threads may ask at once, and have to be told the same.
    process = os.getpid()
    return _names.get(process) or _names.setdefault(process, secrets.token_hex(16))


_names: dict[int, str] = {}
