"""``cupy.cuda.memory``: allocations, pointers into them, and the pool, which hands memory out again in the stream that
had it as soon as Python has no reference to it any more, whatever the stream still has to do with it."""

from __future__ import annotations

import threading
import weakref
from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fakecuda import memory as fake_memory
from fakecuda import streams, transfers

from cupy.cuda import runtime
from cupy.cuda.device import Device
from cupy.cuda.stream import get_current_stream

_UNIT = 512


class BaseMemory:
    ptr: int
    size: int
    device_id: int

    def __int__(self) -> int:
        return self.ptr

    @property
    def device(self) -> Device:
        return Device(self.device_id)


class Memory(BaseMemory):
    def __init__(self, size: int) -> None:
        self.size = size
        self.device_id = runtime.getDevice()
        self.ptr = runtime.malloc(size) if size > 0 else 0

    def __del__(self) -> None:
        if getattr(self, "ptr", 0) and transfers is not None:  # None while the interpreter ends
            transfers.free_some_time(self.ptr)


class MemoryAsync(BaseMemory):
    def __init__(self, size: int, stream: Any) -> None:
        self.size = size
        self.device_id = runtime.getDevice()
        self._stream = weakref.ref(stream)
        self.ptr = runtime.mallocAsync(size, stream.ptr) if size > 0 else 0

    def __del__(self) -> None:
        if getattr(self, "ptr", 0):
            runtime.freeAsync(self.ptr, (self._stream() or get_current_stream()).ptr)


class UnownedMemory(BaseMemory):
    def __init__(self, ptr: int, size: int, owner: object, device_id: int = -1) -> None:
        if device_id < 0:
            if ptr == 0:
                raise RuntimeError("UnownedMemory requires explicit device ID for a null pointer.")
            device_id = runtime.pointerGetAttributes(ptr).device
        self.size = size
        self.device_id = device_id
        self.ptr = ptr
        self._owner = owner


class MemoryPointer:
    def __init__(self, mem: BaseMemory, offset: int) -> None:
        assert mem.ptr != 0 or offset == 0
        self.ptr = mem.ptr + offset
        self.device_id = mem.device_id
        self.mem = mem

    def __int__(self) -> int:
        return self.ptr

    def __add__(self, offset: int) -> MemoryPointer:
        return MemoryPointer(self.mem, self.ptr - self.mem.ptr + offset)

    def __sub__(self, offset: int) -> MemoryPointer:
        return self + -offset

    @property
    def device(self) -> Device:
        return Device(self.device_id)

    def copy_from_device_async(self, src: MemoryPointer, size: int, stream: Any = None) -> None:
        runtime.memcpyAsync(self.ptr, src.ptr, size, runtime.memcpyDefault, (stream or get_current_stream()).ptr)

    def copy_from_host_async(self, mem: Any, size: int, stream: Any = None) -> None:
        stream = stream or get_current_stream()
        if runtime.streamIsCapturing(stream.ptr):
            raise RuntimeError("the current stream is capturing, so H2D transfers are disallowed")
        runtime.memcpyAsync(self.ptr, getattr(mem, "value", mem), size, runtime.memcpyHostToDevice, stream.ptr)

    def copy_to_host_async(self, mem: Any, size: int, stream: Any = None) -> None:
        stream = stream or get_current_stream()
        if runtime.streamIsCapturing(stream.ptr):
            raise RuntimeError("the current stream is capturing, so D2H transfers are disallowed")
        runtime.memcpyAsync(getattr(mem, "value", mem), self.ptr, size, runtime.memcpyDeviceToHost, stream.ptr)

    def memset_async(self, value: int, size: int, stream: Any = None) -> None:
        runtime.memsetAsync(self.ptr, value, size, (stream or get_current_stream()).ptr)


def _malloc(size: int) -> MemoryPointer:
    return MemoryPointer(Memory(size), 0)


def malloc_async(size: int) -> MemoryPointer:
    return MemoryPointer(MemoryAsync(size, get_current_stream()), 0)


@dataclass(order=True)
class _Chunk:
    """A piece of an allocation."""

    size: int
    offset: int
    mem: Memory


class PooledMemory(BaseMemory):
    """Memory allocated from the pool."""

    def __init__(self, chunk: _Chunk, free: deque[_Chunk], pool: MemoryPool) -> None:
        self.ptr = chunk.mem.ptr + chunk.offset
        self.size = chunk.size
        self.device_id = chunk.mem.device_id
        self._chunk = chunk
        self._free = free
        self._pool = weakref.ref(pool)

    def free(self) -> None:
        if self.ptr:
            self.ptr = 0
            self._free.append(self._chunk)

    __del__ = free


class MemoryPool:
    """Chunks are cut from larger ones that are free, and put together again where they lie side by side."""

    def __init__(self, allocator: Callable[[int], MemoryPointer] | None = None) -> None:
        self._allocator = allocator or _malloc
        self._free: dict[tuple[int, int], list[_Chunk]] = {}
        self._given_back: dict[tuple[int, int], deque[_Chunk]] = {}
        self._lock = threading.Lock()
        self._used: list[weakref.ref[PooledMemory]] = []
        # Of a cycle of garbage Python calls every destructor, also of what another one has just saved from it.
        self._kept: dict[int, Memory] = {}

    def malloc(self, size: int) -> MemoryPointer:
        if size == 0:
            return MemoryPointer(Memory(0), 0)
        size = -(-size // _UNIT) * _UNIT
        stream = streams.stream_at(get_current_stream().ptr)
        key = streams.device(), stream.ptr
        with self._lock:
            back = self._given_back.setdefault(key, deque())
            chunk = self._take(key, size)
        new = chunk is None
        if chunk is None:
            chunk = _Chunk(size, 0, self._allocator(size).mem)  # type: ignore[arg-type]
            self._kept[chunk.mem.ptr] = chunk.mem
        made = PooledMemory(chunk, back, self)
        _spoil(stream, chunk, new)
        with self._lock:
            self._used = [one for one in self._used if one() is not None]
            self._used.append(weakref.ref(made))
        return MemoryPointer(made, 0)

    def _take(self, key: tuple[int, int], size: int) -> _Chunk | None:
        """The smallest that is free and large enough, cut to size."""
        free = self._merged(key)
        for place, chunk in enumerate(free):
            if chunk.size >= size:
                del free[place]
                if chunk.size > size:
                    insort(free, _Chunk(chunk.size - size, chunk.offset + size, chunk.mem), key=_order)
                return _Chunk(size, chunk.offset, chunk.mem)
        return None

    def _merged(self, key: tuple[int, int]) -> list[_Chunk]:
        """Return the free chunks of a stream, smallest first."""
        back = self._given_back.get(key, deque())
        chunks = self._free.setdefault(key, [])
        while back:
            chunks.append(back.popleft())
        chunks.sort(key=lambda one: (one.mem.ptr, one.offset))
        merged: list[_Chunk] = []
        for chunk in chunks:
            last = merged[-1] if merged else None
            if last is not None and last.mem is chunk.mem and last.offset + last.size == chunk.offset:
                last.size += chunk.size
            else:
                merged.append(chunk)
        merged.sort(key=_order)
        self._free[key] = merged
        return merged

    def free_all_blocks(self, stream: Any = None) -> None:
        """Give allocations back of which nothing is in use."""
        with self._lock:
            for key in list(self._given_back):
                if stream is None or key[1] == streams.stream_at(stream.ptr).ptr:
                    chunks = self._merged(key)
                    self._free[key] = [one for one in chunks if one.size < one.mem.size]
                    for one in chunks:
                        if one.size == one.mem.size:
                            del self._kept[one.mem.ptr]

    def used_bytes(self) -> int:
        with self._lock:
            return sum(found.size for one in self._used if (found := one()) is not None and found.ptr)

    def free_bytes(self) -> int:
        with self._lock:
            return sum(one.size for key in list(self._given_back) for one in self._merged(key))

    def total_bytes(self) -> int:
        return self.used_bytes() + self.free_bytes()

    def n_free_blocks(self) -> int:
        with self._lock:
            return sum(len(self._merged(key)) for key in list(self._given_back))


def _order(chunk: _Chunk) -> tuple[int, int, int]:
    return chunk.size, chunk.mem.ptr, chunk.offset


def _spoil(stream: streams.Stream, chunk: _Chunk, new: bool) -> None:
    """Nothing may rely on what was in memory before: it is poisoned in the order of the stream. What is `new` is so
    already, but other streams may not write there before this one has come to it."""
    address = chunk.mem.ptr + chunk.offset
    if stream.done == stream.given:
        if not new:
            fake_memory.poison(address, chunk.size)
    elif stream.capture is None:
        stream.give(lambda: fake_memory.poison(address, chunk.size))


_pool = MemoryPool()
_allocator: Callable[[int], MemoryPointer] = _pool.malloc


def alloc(size: int) -> MemoryPointer:
    return _allocator(size)


def set_allocator(allocator: Callable[[int], MemoryPointer] | None = None) -> None:
    global _allocator  # noqa: PLW0603
    _allocator = allocator or _malloc


def get_allocator() -> Callable[[int], MemoryPointer]:
    return _allocator
