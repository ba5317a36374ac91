"""Device memory that other processes of the node open."""

from __future__ import annotations

import os
import secrets
import threading
from contextlib import suppress
from functools import lru_cache
from weakref import WeakValueDictionary, finalize

import numpy as np
from cupy.cuda import runtime

from mpicoll.buffers.cuda.driver import CurrentDevice, RelaxedCapture, find_bounds, find_number
from mpicoll.buffers.device import Device, DeviceArray, Export, view
from mpicoll.errors import DeviceError

_LAZY_PEER = 1
"""Memory of another device becomes accessible when it is opened."""

_PEERS_ALREADY = 704
"""CUDA's error for access that was enabled before."""


class _Opened:
    """An allocation of another process, open as long as this object lives."""

    __slots__ = ("__weakref__", "address")

    def __init__(self, address: int) -> None:
        self.address = address


_opened: WeakValueDictionary[tuple[int, str, int], _Opened] = WeakValueDictionary()
"""Open allocations by device, process and number. Communicators share them: to open one takes up to a millisecond, and
some drivers refuse to open it twice."""

_opening = threading.Lock()


def export(index: int, identity: str, memory: DeviceArray) -> Export | None:
    """Describe `memory` of device `index` for other processes; None if they can't open it."""
    if not memory.size:
        return None
    address = memory.address
    try:
        return _describe(process_name(), index, identity, address, find_number(address))
    except (OSError, runtime.CUDARuntimeError):
        return None


def is_exported(address: int, number: int) -> bool:
    """Return True if the memory at `address` lies in the allocation of that number."""
    try:
        return find_number(address) == number
    except OSError:
        return False


@lru_cache(maxsize=4096)
def _describe(process: str, index: int, identity: str, address: int, number: int) -> Export:
    """Describe the memory at `address`, which lies in the allocation of that number."""
    with RelaxedCapture(), CurrentDevice(index):
        base, nbytes = find_bounds(address)
        return Export(process, identity, number, _handle(index, base, number), base, nbytes, address - base)


def open_export(device: Device, index: int, export: Export) -> DeviceArray:
    """Open an allocation of another process, or of this one, as bytes. Raises DeviceError if that fails."""
    whole = (export.nbytes,)
    try:
        with RelaxedCapture(), CurrentDevice(index):
            if export.process == process_name():
                # CUDA does not open what the process has made.
                _allow(index, runtime.pointerGetAttributes(export.address).device)
                return view(device, export.address, whole, np.dtype(np.uint8))
            with _opening:
                key = index, export.process, export.number
                opened = _opened.get(key)
                if opened is None:
                    address = runtime.ipcOpenMemHandle(export.handle, _LAZY_PEER)
                    opened = _opened[key] = _Opened(address)
                    finalize(opened, _close, index, address).atexit = False
    except runtime.CUDARuntimeError as error:
        raise DeviceError(
            f"{device.name} can't reach {export.nbytes} bytes of process {export.process} on {export.device}: {error}"
        ) from error
    return view(device, opened.address, whole, np.dtype(np.uint8), owner=opened)


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
    """Return the handle by which other processes open an allocation. Raises CUDARuntimeError if they can't, because it
    is managed memory or of a pool of the driver."""
    return bytes(runtime.ipcGetMemHandle(base))


def process_name() -> str:
    """Return a name that no other process has; process numbers are reused, and occur in every container."""
    # A child of fork is another process. Concurrent threads must receive the same name.
    process = os.getpid()
    return _names.get(process) or _names.setdefault(process, secrets.token_hex(16))


_names: dict[int, str] = {}
