"""Page-locked host memory: a pool, and registration of other memory."""

from __future__ import annotations

import mmap
import threading
from collections import deque
from contextlib import suppress
from typing import Any
from weakref import finalize

import numpy as np
from cupy.cuda import runtime

from mpicoll.buffers.cuda.driver import CurrentDevice, RelaxedCapture
from mpicoll.buffers.dtypes import Array

_PORTABLE, _MAPPED = 1, 2
"""Page-lock memory for all devices; map it, so that streams and kernels can access it."""

_IDLE = 256 << 20
"""Bytes of unused page-locked memory that the pool keeps."""


class _Block:
    """The array interface of page-locked memory."""

    __slots__ = ("__array_interface__", "__weakref__")

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {"version": 3, "data": (address, False), "shape": (nbytes,), "typestr": "|u1"}


class PinnedPool:
    """Page-locked memory in sizes that are powers of two. Safe for several threads, and while the garbage collector
    gives memory back."""

    def __init__(self) -> None:
        self._idle: dict[int, deque[int]] = {1 << power: deque() for power in range(12, 48)}

    def take(self, nbytes: int) -> Array:
        """Return memory that goes back to the pool when nothing refers to it any more. A device has to be current."""
        size = 1 << max(12, (nbytes - 1).bit_length())
        try:
            address = self._idle[size].pop()
        except IndexError:
            with RelaxedCapture():
                self._trim()
                address = runtime.hostAlloc(size, _PORTABLE)
        block = _Block(address, nbytes)
        finalize(block, self._idle[size].append, address).atexit = False
        return np.asarray(block)

    def _trim(self) -> None:
        """Free unused memory beyond the limit. Only before an allocation, because CUDA waits for the whole device."""
        for _, idle in sorted(self._idle.items(), reverse=True):
            while idle and sum(one * len(several) for one, several in self._idle.items()) > _IDLE:
                with suppress(IndexError):  # another thread may have taken it
                    runtime.freeHost(idle.pop())


_REGISTERING = threading.RLock()
_registered: dict[int, int] = {}
"""Page-locked ranges of host memory: where they begin, and end."""

_owners: dict[int, set[int]] = {}
"""The identities of the objects that own the memory of a range, by its begin: ranks that are threads have one each."""


def register_host_memory(index: int, memory: Array) -> None:
    if not memory.nbytes:
        return
    # Whole, since a copy may not lead from one registered range into another.
    whole, root = _origin(memory)
    address = whole.ctypes.data
    begin = address - address % mmap.PAGESIZE
    end = -(-(address + whole.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    with _REGISTERING, RelaxedCapture(), CurrentDevice(index):
        first = next((one for one, last in dict(_registered).items() if one <= begin and end <= last), None)
        if first is None:
            try:
                runtime.hostRegister(begin, end - begin, _PORTABLE | _MAPPED)
            except runtime.CUDARuntimeError:
                return
            _registered[first := begin] = end
        owners = _owners.setdefault(first, set())
        if id(root) not in owners:
            owners.add(id(root))
            # Called before what was registered earlier for it, such as the end of a mapping.
            finalize(root, _unregister, index, first, id(root)).atexit = False


def _unregister(index: int, begin: int, owner: int) -> None:
    owners = _owners.get(begin, set())
    owners.discard(owner)
    if owners:
        return
    _owners.pop(begin, None)
    _registered.pop(begin, None)
    # The system may have let go of it by itself.
    with suppress(runtime.CUDARuntimeError), RelaxedCapture(), CurrentDevice(index):
        runtime.hostUnregister(begin)


def _origin(memory: Array) -> tuple[Array, Any]:
    """Return the array of which `memory` is a part, and the object that owns the memory of both."""
    base: Any = memory.base
    while isinstance(base, np.ndarray):
        memory, base = base, base.base
    return memory, memory if base is None else base
