"""``cupy.cuda.pinned_memory``."""

from __future__ import annotations

import ctypes
from collections import deque
from functools import cache
from typing import Any

from fakecuda import memory as fake_memory

from cupy.cuda import runtime


class PinnedMemory:
    def __init__(self, size: int, flags: int = 0) -> None:
        self.size = size
        self.ptr = runtime.hostAlloc(size, flags) if size > 0 else 0

    def __del__(self) -> None:
        if self.ptr:
            fake_memory.release_host(self.ptr)

    def __int__(self) -> int:
        return self.ptr


class PinnedMemoryPointer:
    """Has Python's buffer interface: it is a ctypes array, too."""

    mem: PinnedMemory
    ptr: int

    def __new__(cls, mem: PinnedMemory, offset: int) -> Any:
        made = _kind(mem.size - offset).from_address(mem.ptr + offset)
        made.mem = mem
        made.ptr = mem.ptr + offset
        return made

    def __init__(self, mem: PinnedMemory, offset: int) -> None: ...

    def __int__(self) -> int:
        return self.ptr

    def __add__(self, offset: int) -> PinnedMemoryPointer:
        return PinnedMemoryPointer(self.mem, self.ptr - self.mem.ptr + offset)

    def size(self) -> int:
        return self.mem.size - (self.ptr - self.mem.ptr)


@cache
def _kind(size: int) -> Any:
    return type("PinnedMemoryPointer", (PinnedMemoryPointer, ctypes.c_byte * size), {})


def _malloc(size: int) -> PinnedMemoryPointer:
    return PinnedMemoryPointer(PinnedMemory(size), 0)


class _Pooled(PinnedMemory):
    def __init__(self, mem: PinnedMemory, free: deque[PinnedMemory]) -> None:
        self.ptr = mem.ptr
        self.size = mem.size
        self._mem = mem
        self._free = free

    def __del__(self) -> None:
        self._free.append(self._mem)


class PinnedMemoryPool:
    """Hands memory out again as soon as nobody refers to it, even if a copy from it is still to run."""

    def __init__(self, allocator: Any = _malloc) -> None:
        self._allocator = allocator
        self._free: dict[int, deque[PinnedMemory]] = {}
        self._kept: dict[int, PinnedMemory] = {}  # as the pool of device memory does it

    def malloc(self, size: int) -> PinnedMemoryPointer:
        if size == 0:
            return PinnedMemoryPointer(PinnedMemory(0), 0)
        size = max(512, 1 << (size - 1).bit_length())
        free = self._free.setdefault(size, deque())
        try:
            mem = free.pop()
        except IndexError:
            mem = self._allocator(size).mem
            self._kept[mem.ptr] = mem
        return PinnedMemoryPointer(_Pooled(mem, free), 0)

    def free_all_blocks(self) -> None:
        for free in self._free.values():
            while free:
                del self._kept[free.pop().ptr]

    def n_free_blocks(self) -> int:
        return sum(map(len, self._free.values()))


_pool = PinnedMemoryPool()
_allocator: Any = _pool.malloc


def alloc_pinned_memory(size: int) -> PinnedMemoryPointer:
    return _allocator(size)  # type: ignore[no-any-return]


def set_pinned_memory_allocator(allocator: Any = None) -> None:
    global _allocator  # noqa: PLW0603
    _allocator = allocator or _malloc
