"""Device memory: pages of the host, mapped where only queued work finds them.

Allocations lie in blocks: small ones share them. A block is an anonymous file, whose parts in use are mapped twice. The
device address can't be touched by the host: that is a crash, or, with ``FAKECUDA_AWARE=1`` in the environment, allowed,
as an MPI that knows CUDA needs it. The working address, at a fixed distance, is what kernels and copies use when they
run. Addresses are alike in all processes, and those of freed memory are given out again, as with CUDA.

Other processes open the block of an allocation, which stays as long as any allocation lies there. With
``FAKECUDA_OPEN_ONCE=1`` a process can't open a block that it has open, which all but the newest drivers refuse.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import resource
import socket
import threading
from bisect import bisect_right, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from fakecuda import errors
from fakecuda.errors import CUDARuntimeError

POISON = np.frombuffer(b"\xf5\xff", np.uint8)
"""Content of uninitialised memory: NaN in all floating dtypes, small negative numbers in integer ones."""

_PAGE = mmap.PAGESIZE
_SPACE = 1 << 38
_AT = 0x1200_0000_0000
_NONE, _BOTH = 0, mmap.PROT_READ | mmap.PROT_WRITE
_FIXED, _NORESERVE = 0x10, 0x4000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]

_FILES = 1 << 16
"""Each block keeps a file open; few systems let a process have so many of them unasked."""

_soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
_allowed = _FILES if _hard == resource.RLIM_INFINITY else min(_FILES, _hard)
if _soft != resource.RLIM_INFINITY and _soft < _allowed:
    resource.setrlimit(resource.RLIMIT_NOFILE, (_allowed, _hard))

LOCK = threading.RLock()
"""Held for a moment, around every change of a table; never while work runs."""


def _map(address: int, nbytes: int, protection: int, flags: int, file: int = -1, offset: int = 0) -> int:
    found = _libc.mmap(address, nbytes, protection, flags, file, offset)
    if found in (None, ctypes.c_void_p(-1).value):
        raise CUDARuntimeError(errors.MEMORY_ALLOCATION, os.strerror(ctypes.get_errno()))
    return int(found)


def _reserve(hint: int) -> int:
    return _map(hint, _SPACE, _NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)


_DEVICE = _reserve(_AT)
_SHIFT = _reserve(_AT + 2 * _SPACE) - _DEVICE


_BLOCK, _SMALL = 2 << 20, 1 << 20
"""Bytes of a block that allocations share, and of the smallest allocation that has one alone."""


@dataclass(slots=True, eq=False)
class Block:
    """`span` bytes at `base` of memory of `device`, an index in this process. `name` names it among all of the node,
    `ipc` tells whether other processes may open it, `exported` whether they may have. `opened`: whose it is that was
    opened here (process, address there). `used` are the begins and ends of its allocations, in order."""

    base: int
    span: int
    device: int
    file: int
    name: str
    ipc: bool = True
    exported: bool = False
    opened: tuple[int, int] | None = None
    used: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class Allocation:
    """`number` is of this allocation only, unlike its address."""

    base: int
    size: int
    number: int
    block: Block

    @property
    def device(self) -> int:
        return self.block.device

    @property
    def span(self) -> int:
        return _round(self.size)


_allocations: dict[int, Allocation] = {}
_bases: list[int] = []
_blocks: list[Block] = []
"""In the order of their addresses."""

_numbers = itertools.count(1)


def _round(nbytes: int) -> int:
    """Return the bytes of the pages that hold so many."""
    return -(-nbytes // _PAGE) * _PAGE


def _find_gap(used: Iterable[tuple[int, int]], begin: int, end: int, nbytes: int) -> int | None:
    """The first gap between what is `used` that is large enough. A page that nobody may touch is left behind each."""
    for first, last in used:
        if first - begin >= nbytes + _PAGE:
            break
        begin = last + _PAGE
    return begin if begin + nbytes <= end else None


def _make_block(span: int, device: int, file: int, name: str, **more: Any) -> Block:
    used = ((one.base, one.base + one.span) for one in _blocks)
    base = _find_gap(used, _DEVICE + _PAGE, _DEVICE + _SPACE, span)
    if base is None:
        raise CUDARuntimeError(errors.MEMORY_ALLOCATION)
    block = Block(base, span, device, file, name, **more)
    insort(_blocks, block, key=lambda one: one.base)
    return block


def _find_place(size: int, device: int, *, ipc: bool) -> tuple[Block, int]:
    """A place for an allocation."""
    span = _round(size)
    if size < _SMALL:
        for block in _blocks:
            if block.device == device and block.ipc == ipc and block.opened is None and block.span == _BLOCK:
                base = _find_gap(block.used, block.base, block.base + block.span, span)
                if base is not None:
                    return block, base
        span = _BLOCK
    name = f"fakecuda-{os.getpid()}-{os.urandom(8).hex()}"
    file = os.memfd_create(name)
    os.ftruncate(file, span)
    block = _make_block(span, device, file, name, ipc=ipc)
    return block, block.base


def _enter(block: Block, base: int, size: int) -> Allocation:
    """Map a part of a block as an allocation."""
    made = Allocation(base, size, next(_numbers), block)
    aware = os.environ.get("FAKECUDA_AWARE") == "1"
    offset = base - block.base
    _map(base, made.span, _BOTH if aware else _NONE, mmap.MAP_SHARED | _FIXED, block.file, offset)
    _map(base + _SHIFT, made.span, _BOTH, mmap.MAP_SHARED | _FIXED, block.file, offset)
    insort(block.used, (base, base + made.span))
    _allocations[base] = made
    insort(_bases, base)
    return made


def _leave(allocation: Allocation) -> None:
    block = allocation.block
    for address in (allocation.base, allocation.base + _SHIFT):
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE | _FIXED
        _map(address, allocation.span, _NONE, flags)
    del _allocations[allocation.base]
    _bases.remove(allocation.base)
    block.used.remove((allocation.base, allocation.base + allocation.span))
    if not block.used:
        os.close(block.file)
        _blocks.remove(block)


def allocate(size: int, device: int, *, ipc: bool = True) -> int:
    """The device address of new memory, which is poisoned."""
    if size <= 0:
        raise CUDARuntimeError(errors.INVALID_VALUE, f"{size} bytes")
    with LOCK:
        made = _enter(*_find_place(size, device, ipc=ipc), size)
    poison(made.base, size)
    return made.base


def poison(address: int, nbytes: int) -> None:
    """Make memory look as if nobody had written it, at once."""
    _fill(working(address, nbytes), nbytes)


def _fill(address: int, nbytes: int) -> None:
    # In words, as byte by byte it would take most of the time of tests that come by much memory.
    whole = nbytes // POISON.size
    array_at(address, (whole,), np.uint16)[...] = POISON.view(np.uint16)
    bytes_at(address, nbytes)[whole * POISON.size :] = POISON[0]


def release(address: int) -> None:
    """Unmap the allocation that begins at `address`. Whoever touches it from now on crashes, or reads poison where
    another process has its block open."""
    with LOCK:
        allocation = _allocations.get(address)
        if allocation is None or allocation.block.opened:
            raise CUDARuntimeError(errors.INVALID_VALUE, f"{address:#x} is not the beginning of an allocation")
        if allocation.block.exported:
            poison(address, allocation.size)
        _leave(allocation)


def find(address: int, nbytes: int = 1) -> Allocation | None:
    """The allocation in which all of this lies."""
    with LOCK:
        place = bisect_right(_bases, address) - 1
        if place < 0:
            return None
        allocation = _allocations[_bases[place]]
    return allocation if address + nbytes <= allocation.base + allocation.size else None


def of_devices(address: int) -> bool:
    """Return True if this may be an address of device memory, in use or not."""
    return _DEVICE <= address < _DEVICE + _SPACE


class _Kernel(threading.local):
    """Of a thread: the device whose kernel it runs; None in copies, which reach all devices."""

    device: int | None = None


kernel = _Kernel()
peers: set[tuple[int, int]] = set()
"""Pairs of a device and another whose memory it may use: peer access has been enabled."""


def working(address: int, nbytes: int) -> int:
    """Return the address at which queued work accesses the device or page-locked host memory at `address`."""
    found = find(address, nbytes)
    if found:
        if kernel.device not in (None, found.device) and (kernel.device, found.device) not in peers:
            words = f"device {kernel.device} has no access to device {found.device}"
            raise CUDARuntimeError(errors.ILLEGAL_ADDRESS, words)
        return address + _SHIFT
    if pinned(address, nbytes):
        return address
    raise CUDARuntimeError(errors.ILLEGAL_ADDRESS, f"{nbytes} bytes at {address:#x}")


class _Place:
    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface


def array_at(address: int, shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...] | None = None) -> Any:
    """A numpy array at an address that is taken as it is."""
    dtype = np.dtype(dtype)
    typestr = f"|V{dtype.itemsize}"  # names of dtypes that the interface has no word for are lost in it
    interface = {"version": 3, "data": (address, False), "shape": shape, "typestr": typestr, "strides": strides}
    return np.asarray(_Place(interface)).view(dtype)


def overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Return True if ranges of addresses, each (begin, end), overlap."""
    return one[0] < other[1] and other[0] < one[1]


def check_aligned(address: int, strides: tuple[int, ...], itemsize: int) -> None:
    """A kernel reads elements only at multiples of their size."""
    if any(one % itemsize for one in (address, *strides)):
        raise CUDARuntimeError(errors.MISALIGNED, f"{address:#x}, strides {strides}, elements of {itemsize} bytes")


def bytes_at(address: int, nbytes: int) -> Any:
    return array_at(address, (nbytes,), np.uint8)


def extent(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """Return the bytes that an array occupies before and behind its address."""
    reach = [(extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)]
    return -sum(one for one in reach if one < 0), sum(one for one in reach if one > 0) + itemsize


def working_view(address: int, shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...] | None = None) -> Any:
    """A numpy array for work that runs now: the device memory, or page-locked host memory, at `address`."""
    dtype = np.dtype(dtype)
    if 0 in shape:
        return np.empty(shape, dtype)
    steps = contiguous(shape, dtype.itemsize) if strides is None else strides
    before, behind = extent(shape, steps, dtype.itemsize)
    at = working(address - before, before + behind) + before
    return array_at(at, shape, dtype, steps)


def contiguous(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Strides in C order."""
    strides = [itemsize]
    for extent in reversed(shape[1:]):
        strides.append(strides[-1] * extent)
    return tuple(reversed(strides)) if shape else ()


# Page-locked host memory: the beginning of a range, its length in bytes, and the mapping if it was allocated here.

_ranges: dict[int, tuple[int, Any]] = {}


def _pages(address: int, nbytes: int) -> tuple[int, int]:
    return address // _PAGE, -(-(address + nbytes) // _PAGE)


def register(address: int, nbytes: int) -> None:
    """cudaHostRegister. Whole pages are locked, and none twice."""
    if nbytes <= 0 or find(address):
        raise CUDARuntimeError(errors.INVALID_VALUE, f"{nbytes} bytes at {address:#x}")
    with LOCK:
        begin, end = _pages(address, nbytes)
        for other, (length, _) in _ranges.items():
            first, last = _pages(other, length)
            if first < end and begin < last:
                raise CUDARuntimeError(errors.HOST_REGISTERED, f"{nbytes} bytes at {address:#x}")
        _ranges[address] = nbytes, None


def unregister(address: int) -> None:
    """cudaHostUnregister."""
    with LOCK:
        if address not in _ranges or _ranges[address][1] is not None:
            raise CUDARuntimeError(errors.HOST_NOT_REGISTERED, f"{address:#x}")
        del _ranges[address]


def allocate_host(nbytes: int) -> int:
    """cudaHostAlloc, poisoned."""
    memory = mmap.mmap(-1, nbytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    with LOCK:
        _ranges[address] = nbytes, memory
    _fill(address, nbytes)
    return address


def release_host(address: int) -> None:
    """cudaFreeHost."""
    with LOCK:
        if _ranges.get(address, (0, None))[1] is None:
            raise CUDARuntimeError(errors.INVALID_VALUE, f"{address:#x}")
        del _ranges[address]


def pinned(address: int, nbytes: int = 1) -> bool:
    """Return True if the whole range is page-locked host memory."""
    with LOCK:
        return any(one <= address and address + nbytes <= one + length for one, (length, _) in _ranges.items())


def partly_pinned(address: int, nbytes: int) -> bool:
    """Return True if a part of the range is page-locked host memory."""
    with LOCK:
        return any(one < address + nbytes and address < one + length for one, (length, _) in _ranges.items())


# Devices, and what other processes see of their memory.


def visible() -> list[int]:
    """The node's devices that this process may use, as ``CUDA_VISIBLE_DEVICES`` names them."""
    installed = int(os.environ.get("FAKECUDA_DEVICES", "1"))
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        return list(range(installed))
    return [int(name) for name in names.split(",") if name.strip() and 0 <= int(name) < installed]


def can_reach(device: int, other: int) -> bool:
    """Return True if kernels of `device` can use memory of `other`; ``FAKECUDA_PEERS=0`` disables this."""
    return device == other or os.environ.get("FAKECUDA_PEERS", "1") == "1"


def uuid(device: int) -> bytes:
    """Of a device of this process, as a string of C: it ends at the first zero, or else runs on past its 16 bytes into
    what lies behind them, which nobody defines."""
    whole = sha256(f"{socket.gethostname()} {visible()[device]}".encode()).digest()[:16]
    return (whole + f"{os.getpid():x}".encode()).partition(b"\0")[0]


def _handle(*parts: object) -> bytes:
    return " ".join(map(str, parts)).encode().ljust(64, b"\0")


def export(address: int) -> bytes:
    """cudaIpcGetMemHandle: of the block, and of the place there."""
    allocation = find(address)
    if allocation is None or allocation.base != address or not allocation.block.ipc or allocation.block.opened:
        raise CUDARuntimeError(errors.INVALID_VALUE, f"{address:#x} can't be shared")
    block = allocation.block
    block.exported = True
    tag = block.name.rpartition("-")[2]
    numbers = os.getpid(), block.file, block.span, visible()[block.device], block.base - _DEVICE, address - block.base
    return _handle(*(f"{one:x}" for one in numbers), tag)


_opened: dict[str, tuple[Allocation, int]] = {}
"""By name: what blocks of other processes are open here, and how often."""


def open_export(handle: bytes, device: int) -> int:
    """cudaIpcOpenMemHandle, for kernels of `device`. A block is mapped once however often this is called for what lies
    there."""
    *numbers, tag = handle.rstrip(b"\0").decode().split()
    process, file, span, physical, base, offset = (int(one, 16) for one in numbers)
    name = f"fakecuda-{process}-{tag}"
    if process == os.getpid():
        raise CUDARuntimeError(errors.UNINITIALIZED, "memory of the same process")
    # Devices that this process does not see are reached as others are.
    owner = visible().index(physical) if physical in visible() else ~physical
    if not can_reach(device, owner):
        raise CUDARuntimeError(errors.PEER_UNSUPPORTED, f"memory of device {owner}, on device {device}")
    with LOCK:
        if name in _opened:
            if os.environ.get("FAKECUDA_OPEN_ONCE") == "1":
                raise CUDARuntimeError(errors.ALREADY_MAPPED, "the block is open here")
            allocation, times = _opened[name]
            _opened[name] = allocation, times + 1
            _enable_peer(device, owner)
            return allocation.base + offset
        path = Path(f"/proc/{process}/fd/{file}")
        try:
            if name not in str(path.readlink()):
                raise CUDARuntimeError(errors.INVALID_VALUE, "the memory has been freed")
            found = os.open(path, os.O_RDWR)
        except OSError as error:
            raise CUDARuntimeError(errors.INVALID_VALUE, str(error)) from error
        origin = process, base
        if any(one.block.opened == origin for one, _ in _opened.values()):
            os.close(found)
            raise CUDARuntimeError(errors.ALREADY_MAPPED, "what lay at this address before is still open")
        block = _make_block(span, owner, found, name, ipc=False, opened=origin)
        made = _enter(block, block.base, span)
        _opened[name] = made, 1
        _enable_peer(device, owner)
        return made.base + offset


def _enable_peer(device: int, owner: int) -> None:
    """Whoever opens memory of another device may use it there, by each device for which it is opened."""
    if owner != device:
        peers.add((device, owner))


def close_export(address: int) -> None:
    """cudaIpcCloseMemHandle."""
    with LOCK:
        found = find(address)
        if found is None or not found.block.opened:
            raise CUDARuntimeError(errors.INVALID_VALUE, f"{address:#x} was not opened")
        name = found.block.name
        allocation, times = _opened[name]
        if times > 1:
            _opened[name] = allocation, times - 1
            return
        del _opened[name]
        _leave(allocation)
