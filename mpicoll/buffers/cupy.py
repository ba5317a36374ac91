"""CUDA devices and their arrays, by cupy. Imported when the first CUDA array is met."""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import or_
from pathlib import Path
from typing import Any
from weakref import finalize

import cupy
import numpy as np
from cupy.cuda import runtime

from mpicoll.buffers import dtypes, kernels
from mpicoll.buffers.buffer import Buffer
from mpicoll.buffers.device import DeviceArray, Export, Ready, describe, device_of, view
from mpicoll.buffers.dtypes import Array, DType
from mpicoll.errors import DeviceError, DTypeError

_PORTABLE = 1
"""Page-locked memory is so for all devices."""

_LAZY_PEER = 1
"""Memory of another device becomes accessible when it is opened."""

_CAPTURE_ERRORS = range(900, 910)
"""CUDA's errors that tell of a capture that is under way."""

_NOT_READY, _PEERS_ALREADY = 600, 704
"""CUDA's errors that are none here."""

_CUDA_MEMORY = (1, 2, 3)
"""CUDA's kinds of memory that a device can reach: page-locked host memory, a device's, managed."""

_LEGACY_STREAM = 1
"""The default stream, which waits for all streams that don't opt out of it."""

_IDLE = 256 << 20
"""Bytes of page-locked memory that are kept for the next one who asks."""

_PITCH = (1 << 31) - 1
"""Bytes from row to row, at most, in CUDA's copies of rows."""

_ROW = 512
"""Bytes that are worth a transfer of their own; what lies in smaller pieces is put together first."""

_FOLDS = {
    "add": "sum",
    "multiply": "prod",
    "minimum": "min",
    "maximum": "max",
    "bitwise_and": "band",
    "bitwise_or": "bor",
    "bitwise_xor": "bxor",
    "logical_and": "land",
    "logical_or": "lor",
    "logical_xor": "lxor",
}
"""Reductions that do what a ufunc does."""

_FLOAT32 = np.dtype(np.float32)


class _On:
    """A block in which the device of that number is current.

    Left is what was current before, but for a device that the process does not use: CUDA would begin to, for hundreds
    of megabytes of its memory, and threads begin with the first one.
    """

    __slots__ = ("_before", "_index")

    def __init__(self, index: int) -> None:
        self._index = index

    def __enter__(self) -> None:
        self._before = runtime.getDevice()
        # Even if it is current: then the driver, too, knows it in this thread.
        runtime.setDevice(self._index)

    def __exit__(self, *error: object) -> None:
        if self._before != self._index and _in_use(self._before):
            runtime.setDevice(self._before)


class _Relaxed:
    """A block that may do what CUDA forbids while another thread captures a graph, and would end that capture for: our
    work is none of it."""

    __slots__ = ("_mode",)

    def __enter__(self) -> None:
        self._mode = ctypes.c_int(_RELAXED)
        _exchange_capture_mode(self._mode)

    def __exit__(self, *error: object) -> None:
        _exchange_capture_mode(self._mode)


class _Lane:
    """What a thread has of a device: its stream, an event to wait for it, and the host memory that is in use there."""

    __slots__ = ("__weakref__", "event", "kept", "stream")

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.event = _event()
        self.kept: list[Array] = []

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the stream cupy's, on the device that is current."""
        # Leaving cupy's own block would forget what the caller's thread uses without a block.
        before = cupy.cuda.get_current_stream()
        self.stream.use()
        try:
            yield
        finally:
            before.use()

    def settle(self) -> None:
        self.event.record(self.stream)
        self.event.synchronize()
        self.kept.clear()


class _Mark:
    __slots__ = ("_event",)

    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()

    def done(self) -> bool:
        if runtime.eventQuery(self._event.ptr) == _NOT_READY:
            return False
        # Raises what has gone wrong meanwhile.
        self._event.synchronize()
        return True


class _Block:
    """What numpy makes an array of: page-locked memory, or an allocation of another process."""

    __slots__ = ("__array_interface__", "__weakref__")

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {"version": 3, "data": (address, False), "shape": (nbytes,), "typestr": "|u1"}


class _PinnedPool:
    """Page-locked memory in sizes that are powers of two. Safe for several threads, and while the garbage collector
    gives memory back."""

    def __init__(self) -> None:
        self._idle: dict[int, deque[int]] = {1 << power: deque() for power in range(12, 48)}

    def take(self, nbytes: int) -> Array:
        """Bytes that go back when nobody refers to them any more. A device has to be current."""
        size = 1 << max(12, (nbytes - 1).bit_length())
        try:
            address = self._idle[size].pop()
        except IndexError:
            with _Relaxed():
                self._trim()
                address = runtime.hostAlloc(size, _PORTABLE)
        block = _Block(address, nbytes)
        finalize(block, self._idle[size].append, address).atexit = False
        return np.asarray(block)

    def _trim(self) -> None:
        """Give back to CUDA what is too much. Not when it becomes so, as CUDA waits for the whole device then."""
        for _, idle in sorted(self._idle.items(), reverse=True):
            while idle and sum(one * len(several) for one, several in self._idle.items()) > _IDLE:
                with suppress(IndexError):  # another thread may have taken it
                    runtime.freeHost(idle.pop())


class CudaDevice:
    """A GPU; see :class:`mpicoll.buffers.device.Device`. Each thread works on a stream of its own there, which no
    default stream waits for. Made by :func:`cuda_device`."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.kind = "cuda"
        self.name = f"{self.kind}:{index}"
        # The bus tells GPUs of a machine apart, cupy's UUID (which may be cut off) the parts that a GPU was divided in.
        properties = runtime.getDeviceProperties(index)
        uuid = bytes(properties["uuid"]).hex()
        self.identity = f"{_machine()}/{cupy.cuda.Device(index).pci_bus_id}/{uuid}"
        self.model = bytes(properties["name"]).decode()
        self._lanes = threading.local()
        self._idle: deque[Any] = deque()
        self._pinned = _PinnedPool()

    @property
    def stream(self) -> int:
        """This thread's stream, as a ``cudaStream_t``."""
        return int(self._lane().stream.ptr)

    def _lane(self) -> _Lane:
        lane: _Lane | None = getattr(self._lanes, "own", None)
        if lane is None:
            with _On(self.index):
                try:
                    # Of a thread that has ended: cupy's pool holds memory for each stream that there ever was.
                    stream = self._idle.pop()
                except IndexError:
                    stream = cupy.cuda.Stream(non_blocking=True)
                lane = self._lanes.own = _Lane(stream)
            finalize(lane, self._idle.append, stream).atexit = False
        return lane

    def empty(self, count: int, dtype: np.dtype[Any]) -> DeviceArray:
        lane = self._lane()
        with _On(self.index), lane.current():
            memory = cupy.cuda.alloc(count * dtype.itemsize)
        return view(self, memory.ptr, (count,), dtype, owner=memory)

    def pinned(self, nbytes: int) -> Array:
        if not nbytes:
            return np.empty(0, np.uint8)
        with _On(self.index):
            return self._pinned.take(nbytes)

    def register(self, memory: Array) -> None:
        if not memory.nbytes:
            return
        # Whole, since a copy may not lead from one registered range into another.
        whole, root = _origin(memory)
        address = whole.ctypes.data
        begin = address - address % mmap.PAGESIZE
        end = -(-(address + whole.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        with _REGISTERING, _Relaxed(), _On(self.index):
            if any(first <= begin and end <= last for first, last in list(_registered.items())):
                return
            try:
                runtime.hostRegister(begin, end - begin, _PORTABLE)
            except runtime.CUDARuntimeError:
                return
            _registered[begin] = end
            # Called before what was registered earlier for it, such as the end of a mapping.
            finalize(root, _unregister, self.index, begin).atexit = False

    @contextmanager
    def working(self, after: Sequence[Ready] = ()) -> Iterator[None]:
        lane = self._lane()
        with _Relaxed(), _On(self.index), lane.current():
            for event in after:
                lane.stream.wait_event(event)
            try:
                yield
            finally:
                lane.settle()

    def settle(self) -> None:
        self._lane().settle()

    def mark(self) -> _Mark:
        event = _event()
        event.record(self._lane().stream)
        return _Mark(event)

    def copy(self, target: Array, source: Any) -> None:
        if not isinstance(source, np.ndarray):
            source = np.asarray(source)
        if source.dtype != target.dtype:
            if isinstance(source, DeviceArray):
                raise DTypeError(f"copy from {source.dtype} to {target.dtype} on {self.name}: pass arrays of one dtype")
            source = source.astype(target.dtype)
        lines = _lines(target, source)
        if not target.size:
            return
        to, of = target.ctypes.data, source.ctypes.data
        if not isinstance(source, DeviceArray):
            self._up(target, source, lines, to, of)
        elif not isinstance(target, DeviceArray):
            self._down(target, source, lines, to, of)
        elif to != of or lines != _lines(target, target):
            self._across(target, source, lines, to, of)

    def _up(self, target: Array, source: Array, lines: _Lines, to: int, of: int) -> None:
        if self._transfer(lines, to, of):
            self._lane().kept.append(source)
        elif not source.flags.c_contiguous:
            staged = self.pinned(source.nbytes).view(source.dtype).reshape(source.shape)
            np.copyto(staged, source)
            self.copy(target, staged)
        else:
            self.copy(target, self._clone(source))

    def _down(self, target: Array, source: Array, lines: _Lines, to: int, of: int) -> None:
        if self._transfer(lines, to, of):
            self._lane().kept.append(target)
        elif not source.flags.c_contiguous:
            self.copy(target, self._clone(source))
        else:
            staged = self.pinned(source.nbytes).view(source.dtype).reshape(source.shape)
            self.copy(staged, source)
            self.settle()
            np.copyto(target, staged)

    def _across(self, target: Array, source: Array, lines: _Lines, to: int, of: int) -> None:
        if len(lines) == 1 and abs(to - of) >= target.nbytes:
            self._transfer(lines, to, of)
        elif not _apart(target, source):
            self.copy(target, self._clone(source))
        else:
            width, *_ = lines[-1]
            steps = [step for _, *steps in lines[:-1] for step in steps]
            places = reduce(or_, steps, width | to | of)
            word = min(8, places & -places)
            shape = (*(extent for extent, _, _ in lines[:-1]), width // word)
            dtype = np.dtype(f"u{word}")
            into, out_of = (
                self._view(array, address, shape, (*(line[side] for line in lines[:-1]), word), dtype)
                for side, array, address in ((1, target, to), (2, source, of))
            )
            cupy.copyto(into, out_of)

    def _transfer(self, lines: _Lines, to: int, of: int) -> bool:
        """Copy by the device's copying machinery, if it can, and is the best way."""
        stream = self._lane().stream.ptr
        width, _, _ = lines[-1]
        # Which of them the device's is CUDA knows best: arrays of the device may be managed, or the host's.
        if len(lines) == 1:
            runtime.memcpyAsync(to, of, width, runtime.memcpyDefault, stream)
            return True
        rows, step_to, step_of = lines[-2]
        if len(lines) > 2 or width < _ROW or min(step_to, step_of) < width or max(step_to, step_of) > _PITCH:
            return False
        runtime.memcpy2DAsync(to, step_to, of, step_of, width, rows, runtime.memcpyDefault, stream)
        return True

    def apply(self, ufunc: str, inputs: Sequence[Any], out: DeviceArray) -> None:
        if not out.size:
            return
        op, dtype = _FOLDS.get(ufunc), out.dtype.name
        if op is not None and kernels.known(op, dtype) and _alike(inputs, out):
            addresses = [one.ctypes.data for one in (*inputs, out)]
            if all(one == addresses[-1] or abs(one - addresses[-1]) >= out.nbytes for one in addresses):
                self._launch(op, dtype, inputs, [out], addresses)
                return
        function = getattr(cupy, ufunc, None)
        if function is None:
            raise DeviceError(f"{ufunc}: there is no such function for memory of {self.name}")
        target = self.wrap(out)
        function(*(self._operand(one, out, target) for one in inputs), out=target, casting="unsafe")

    def _operand(self, one: Any, out: Array, target: Any) -> Any:
        if not isinstance(one, np.ndarray):
            return one
        if not isinstance(one, DeviceArray):
            return one[()] if not one.ndim else self.wrap(self._clone(one))
        if _apart(one, out):
            return self.wrap(one)
        # cupy takes views of one memory for apart, as it doesn't know it, but for one object.
        same = one.ctypes.data == out.ctypes.data and one.strides == out.strides
        return target if same and one.shape == out.shape and one.dtype == out.dtype else self.wrap(self._clone(one))

    def convert(self, source: Array, target: Array, dtype: str) -> None:
        if not target.size:
            return
        # One kernel converts what lies side by side; everything else is made so.
        whole = self._flat(source)
        direct = isinstance(target, DeviceArray) and target.flags.c_contiguous and target.shape == source.shape
        made = target if direct and _apart(target, whole) else self.empty(source.size, target.dtype)
        narrows = source.dtype == _FLOAT32
        self._launch("sum", dtype, [whole], [made], wide_first=narrows, wide_last=not narrows)
        if made is not target:
            self.copy(target, made.reshape(source.shape))

    def fold(self, op: str, parts: Sequence[DeviceArray], outs: Sequence[DeviceArray], dtype: str) -> None:
        if not kernels.known(op, dtype):
            raise DTypeError(f"there is no kernel that combines arrays of {dtype} by {op!r}")
        if not parts[0].size:
            return
        most = kernels.MOST_PARTS
        if len(parts) <= most:
            self._launch(op, dtype, parts, outs)
            return
        # In several steps, with totals that are as wide as those in a kernel.
        half = dtype in kernels.HALVES
        partly = "sum" if op == "avg" else op
        total = self.empty(parts[0].size, _FLOAT32 if half else parts[0].dtype)
        self._launch(partly, dtype, parts[:most], [total], wide_last=half)
        for begin in range(most, len(parts), most - 1):
            some = [total, *parts[begin : begin + most - 1]]
            if begin + most - 1 < len(parts):
                self._launch(partly, dtype, some, [total], wide_first=half, wide_last=half)
            else:
                self._launch(op, dtype, some, outs, wide_first=half, count=len(parts))

    def _launch(
        self,
        op: str,
        dtype: str,
        parts: Sequence[Array],
        outs: Sequence[Array],
        addresses: list[int] | None = None,
        *,
        wide_first: bool = False,
        wide_last: bool = False,
        count: int = 0,
    ) -> None:
        addresses = addresses or [one.ctypes.data for one in (*parts, *outs)]
        places = reduce(or_, addresses)
        aligned = 4 if wide_first or wide_last else kernels.alignment(dtype)
        if places % aligned:
            self._launch_aligned(op, dtype, parts, outs, wide_first, wide_last, count)
            return
        width = kernels.width(dtype, places)
        kernel = _kernel(op, dtype, len(parts), len(outs), width, wide_first, wide_last)
        size = parts[0].size
        kernel(size, count or len(parts), *addresses, size=kernels.threads(dtype, size, width))

    def _launch_aligned(
        self,
        op: str,
        dtype: str,
        parts: Sequence[Array],
        outs: Sequence[Array],
        wide_first: bool,
        wide_last: bool,
        count: int,
    ) -> None:
        """By way of scratch memory: a kernel that reads an element where none may begin would end the process's use of
        the device."""
        moved = [self._clone(one) for one in parts]
        made = [self.empty(one.size, one.dtype) for one in outs]
        self._launch(op, dtype, moved, made, wide_first=wide_first, wide_last=wide_last, count=count)
        for scratch, out in zip(made, outs, strict=True):
            self.copy(out.reshape(-1), scratch)

    def _flat(self, array: Array) -> Array:
        """The elements in C order side by side on the device: `array` itself, if it is so."""
        whole = array if isinstance(array, DeviceArray) and array.flags.c_contiguous else self._clone(array)
        flat: Array = whole.reshape(-1)
        return flat

    def _clone(self, array: Array) -> DeviceArray:
        scratch: DeviceArray = self.empty(array.size, array.dtype).reshape(array.shape)
        self.copy(scratch, array)
        return scratch

    def wrap(self, array: Array) -> Any:
        """cupy's array on memory of this device, which lives as long as that."""
        if not array.size:
            with _On(self.index):
                return cupy.empty(array.shape, array.dtype)
        return self._view(array, array.ctypes.data, array.shape, array.strides, array.dtype)

    def _view(
        self, owner: Array, address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any]
    ) -> Any:
        below, above = _reach(shape, strides)
        # With the device named cupy doesn't look for it, nor ask whether memory of another device can be reached.
        memory = cupy.cuda.UnownedMemory(address - below, below + above + dtype.itemsize, owner, self.index)
        return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, below), strides)

    def export(self, memory: DeviceArray) -> Export | None:
        if not memory.size:
            return None
        address = memory.ctypes.data
        with _Relaxed(), _On(self.index):
            try:
                base, nbytes, number = _allocation(address)
                handle = _handle(self.index, base, number)
            except (OSError, runtime.CUDARuntimeError):
                return None
        return Export(_process(), self.identity, number, handle, base, nbytes, address - base)

    def reach(self, export: Export) -> DeviceArray:
        whole = (export.nbytes,)
        try:
            with _Relaxed(), _On(self.index):
                if export.process == _process():
                    # CUDA does not open what the process has made.
                    self._allow(runtime.pointerGetAttributes(export.address).device)
                    return view(self, export.address, whole, np.dtype(np.uint8))
                address = runtime.ipcOpenMemHandle(export.handle, _LAZY_PEER)
        except runtime.CUDARuntimeError as error:
            raise DeviceError(
                f"{self.name} can't reach {export.nbytes} bytes of process {export.process} on {export.device}: {error}"
            ) from error
        opened = _Block(address, export.nbytes)
        finalize(opened, _close, self.index, address).atexit = False
        return view(self, address, whole, np.dtype(np.uint8), owner=opened)

    def _allow(self, other: int) -> None:
        """Let kernels of this device, which is current, use memory of another one."""
        if other != self.index:
            try:
                runtime.deviceEnablePeerAccess(other)
            except runtime.CUDARuntimeError as error:
                if error.status != _PEERS_ALREADY:
                    raise


_Lines = list[tuple[int, int, int]]
"""Axes: how often, and the bytes from one to the next of the target and of the source. The last are bytes."""


def _lines(target: Array, source: Array) -> _Lines:
    """The fewest axes that lead to the same pairs of bytes as ``target[...] = source``. Raises ValueError if the source
    can't be broadcast."""
    shape, strides = source.shape, source.strides
    if shape == target.shape and target.flags.c_contiguous and source.flags.c_contiguous:
        return [(target.nbytes, 1, 1)]
    while len(shape) > target.ndim and shape[0] == 1:
        shape, strides = shape[1:], strides[1:]
    missing = target.ndim - len(shape)
    if missing < 0 or any(one not in (1, all_) for one, all_ in zip(shape, target.shape[missing:], strict=True)):
        raise ValueError(f"could not broadcast input array from shape {source.shape} into shape {target.shape}")
    steps = [0] * missing + [step if extent > 1 else 0 for extent, step in zip(shape, strides, strict=True)]
    axes = [axis for axis in zip(target.shape, target.strides, steps, strict=True) if axis[0] > 1]
    axes.sort(key=lambda axis: -abs(axis[1]))
    merged: _Lines = []
    for extent, there, here in [*axes, (target.itemsize, 1, 1)]:
        if merged and merged[-1][1:] == (there * extent, here * extent):
            extent *= merged.pop()[0]
        merged.append((extent, there, here))
    return merged


def _reach(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int]:
    """How many bytes below and above the first element the others begin."""
    steps = [(extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)]
    return -sum(step for step in steps if step < 0), sum(step for step in steps if step > 0)


def _apart(one: Array, other: Array) -> bool:
    """Whether they share no memory, by its bounds."""
    return not np.may_share_memory(one, other)


def _alike(inputs: Sequence[Any], out: DeviceArray) -> bool:
    """Whether operands are as the result is: flat in memory, of its shape and dtype, on the device."""
    return out.flags.c_contiguous and all(
        isinstance(one, DeviceArray)
        and one.dtype == out.dtype
        and one.shape == out.shape
        and bool(one.flags.c_contiguous)
        for one in inputs
    )


def _event() -> Any:
    return cupy.cuda.Event(block=False, disable_timing=True)


@lru_cache(maxsize=1024)
def _kernel(op: str, dtype: str, parts: int, outs: int, width: int, wide_first: bool, wide_last: bool) -> Any:
    source = kernels.fold(op, dtype, parts, outs, width, wide_first=wide_first, wide_last=wide_last)
    parameters = ", ".join(f"uint64 {name}" for name in source.parameters)
    return cupy.ElementwiseKernel(parameters, "", source.operation, source.name, preamble=source.preamble)


_REGISTERING = threading.RLock()
_registered: dict[int, int] = {}
"""Page-locked ranges of host memory: where they begin, and end."""


def _unregister(index: int, begin: int) -> None:
    _registered.pop(begin, None)
    # The system may have let go of it by itself.
    with suppress(runtime.CUDARuntimeError), _Relaxed(), _On(index):
        runtime.hostUnregister(begin)


def _origin(memory: Array) -> tuple[Array, Any]:
    """The array of which `memory` is a part, and what both live as long as."""
    base: Any = memory.base
    while isinstance(base, np.ndarray):
        memory, base = base, base.base
    return memory, memory if base is None else base


def _close(index: int, address: int) -> None:
    # Its owner may be gone.
    with suppress(runtime.CUDARuntimeError), _Relaxed(), _On(index):
        runtime.ipcCloseMemHandle(address)


@lru_cache(maxsize=1)
def _libcuda() -> Any:
    """The driver, for what cupy has no functions for. Raises OSError where there is none."""
    driver = ctypes.CDLL("libcuda.so.1")
    number, place = ctypes.c_int, ctypes.c_uint64
    driver.cuMemGetAddressRange_v2.argtypes = [ctypes.POINTER(place), ctypes.POINTER(ctypes.c_size_t), place]
    driver.cuPointerGetAttribute.argtypes = [ctypes.POINTER(place), number, place]
    driver.cuDevicePrimaryCtxGetState.argtypes = [number, ctypes.POINTER(ctypes.c_uint), ctypes.POINTER(number)]
    driver.cuThreadExchangeStreamCaptureMode.argtypes = [ctypes.POINTER(number)]
    return driver


_RELAXED = 2
_BUFFER_ID = 7


def _exchange_capture_mode(mode: Any) -> None:
    """Set this thread's mode, and write what it was to `mode`."""
    with suppress(OSError):
        _libcuda().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def _in_use(index: int) -> bool:
    """Whether this process has begun to use a device."""
    flags, active = ctypes.c_uint(), ctypes.c_int(1)
    with suppress(OSError):
        _libcuda().cuDevicePrimaryCtxGetState(index, ctypes.byref(flags), ctypes.byref(active))
    return bool(active.value)


def _allocation(address: int) -> tuple[int, int, int]:
    """Where the allocation at `address` begins, its bytes, and a number that no other of this process has. Raises
    OSError if there is none, or it has no such things. Its device has to be current."""
    base, nbytes, number = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_uint64()
    driver = _libcuda()
    failed = driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(nbytes), address)
    failed = failed or driver.cuPointerGetAttribute(ctypes.byref(number), _BUFFER_ID, address)
    if failed:
        raise OSError(f"CUDA's error {failed} for the allocation at {address:#x}")
    return base.value, nbytes.value, number.value


@lru_cache(maxsize=4096)
def _handle(index: int, base: int, number: int) -> bytes:
    """By what other processes open an allocation. Raises CUDARuntimeError if they can't: it is managed, or of a pool of
    the driver's."""
    return bytes(runtime.ipcGetMemHandle(base))


def _process() -> str:
    """What this process is called among all processes; numbers of processes are used again, and in every container."""
    # A child of fork is another process. Threads may ask at once, and have to be told the same.
    process = os.getpid()
    return _names.get(process) or _names.setdefault(process, secrets.token_hex(16))


_names: dict[int, str] = {}


def _machine() -> str:
    """The same for all processes of a machine, and no other machine has it."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return os.uname().nodename


_devices: dict[tuple[int, int], CudaDevice] = {}


def cuda_device(index: int) -> CudaDevice:
    """The one object of this process for the CUDA device of that number. Raises DeviceError if there is none."""
    # A child of fork has none of its parent's streams.
    key = os.getpid(), index
    device = _devices.get(key)
    if device is None:
        count = _count()
        if not 0 <= index < count:
            raise DeviceError(f"there is no device cuda:{index}: this process sees {count}, numbered from 0")
        device = _devices.setdefault(key, CudaDevice(index))
    return device


def _count() -> int:
    try:
        return int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as error:
        raise DeviceError(f"CUDA can't be used here: {error}") from error


def device_count() -> int:
    """How many CUDA devices this process can use: none where there is no driver."""
    try:
        return _count()
    except DeviceError:
        return 0


def facts() -> list[dict[str, Any]]:
    """What there is to know of each CUDA device, in their order.

    index, name, identity (its name among all devices of all nodes), bus (of PCI), capability (such as "9.0"), memory
    (bytes), peers (devices whose memory it can reach), and the versions of CUDA that the driver and cupy's runtime are
    for (driver, runtime) and of cupy. Raises DeviceError where there is no driver, or no device.
    """
    versions = {
        "driver": _version(runtime.driverGetVersion()),
        "runtime": _version(runtime.runtimeGetVersion()),
        "cupy": str(cupy.__version__),
    }
    every = range(_count())
    if not every:
        raise DeviceError("CUDA can't be used here: there is no device")
    found = []
    for index in every:
        properties = runtime.getDeviceProperties(index)
        found.append(
            {
                "index": index,
                "name": cuda_device(index).model,
                "identity": cuda_device(index).identity,
                "bus": str(cupy.cuda.Device(index).pci_bus_id),
                "capability": f"{properties['major']}.{properties['minor']}",
                "memory": int(properties["totalGlobalMem"]),
                "peers": [one for one in every if one != index and runtime.deviceCanAccessPeer(index, one)],
                **versions,
            }
        )
    return found


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def event_on(index: int, stream: int) -> Ready:
    """What the stream of that address (a ``cudaStream_t``) on device `index` has been given up to now. Raises
    DeviceError if it is given to a CUDA graph."""
    with _On(index):
        if _capturing(stream):
            raise DeviceError(_captured(index))
        event = _event()
        runtime.eventRecord(event.ptr, stream)
    return event


def capturing(index: int, stream: int) -> bool:
    """Whether what that stream is given is captured into a CUDA graph, instead of being done."""
    with _On(index):
        return _capturing(stream)


def _capturing(stream: int) -> bool:
    try:
        return bool(runtime.streamIsCapturing(stream))
    except runtime.CUDARuntimeError as error:
        # Of another stream, which forbids the use of the default one meanwhile.
        if error.status in _CAPTURE_ERRORS:
            return True
        raise
    except RuntimeError:
        # cupy's word for a capture that has failed and not ended.
        return True


def refuse_capture(operation: str, argument: str, index: int, stream: int) -> None:
    """Raise DeviceError if the stream is being captured."""
    if capturing(index, stream):
        raise DeviceError(f"{operation}: {argument}: {_captured(index)}")


def _captured(index: int) -> str:
    return (
        f"work on cuda:{index} is being captured into a CUDA graph, which can't hold communication; call it before or"
        " after the capture"
    )


def _stream(index: int) -> int:
    """cupy's current one."""
    with _On(index):
        return int(cupy.cuda.get_current_stream().ptr)


class CupyLibrary:
    """cupy's arrays."""

    def empty(self, like: Buffer, shape: tuple[int, ...]) -> Buffer:
        on, dtype = _home(like), like.array.dtype
        try:
            with _On(on.index):
                created = cupy.empty(shape, dtype)
        except (TypeError, ValueError) as error:
            raise DTypeError(f"cupy has no arrays of {like.dtype.name} ({error}); pass out=") from error
        return Buffer(created, _of_cupy(created), like.dtype, self)

    def finish(self, buffer: Buffer) -> Any:
        return buffer.user

    def wrap(self, view: Array) -> Any:
        assert isinstance(view, DeviceArray)
        assert isinstance(view.on, CudaDevice)
        return view.on.wrap(view)

    def convert(self, source: Array, target: Array, dtype: DType) -> None:
        on = device_of(source, target)
        assert on is not None
        on.convert(source, target, dtype.name)

    def add(self, left: Array, right: Array, target: Array, dtype: DType) -> bool:
        return False

    def ready(self, buffer: Buffer) -> Ready | None:
        index = _home(buffer).index
        return event_on(index, _stream(index))


class InterfaceLibrary(CupyLibrary):
    """Other arrays with the CUDA array interface. Results are cupy's."""

    def ready(self, buffer: Buffer) -> Ready | None:
        if isinstance(buffer.user, cupy.ndarray):
            return super().ready(buffer)
        stream = _interface_stream(buffer.user)
        return None if stream is None else event_on(_home(buffer).index, stream)


@dataclass(frozen=True, slots=True)
class DlpackLibrary(CupyLibrary):
    """Arrays that only have DLPack. Results are made by their library's ``from_dlpack``; if it has none, they are
    cupy's."""

    make: Callable[[Any], Any]

    def finish(self, buffer: Buffer) -> Any:
        return self.make(buffer.user) if isinstance(buffer.user, cupy.ndarray) else buffer.user

    def wrap(self, view: Array) -> Any:
        return self.make(CupyLibrary.wrap(self, view))

    def ready(self, buffer: Buffer) -> Ready | None:
        if not isinstance(buffer.user, cupy.ndarray):
            # Their library makes cupy's stream wait for its own.
            cupy.from_dlpack(buffer.user)
        return CupyLibrary.ready(self, buffer)


_CUPY = CupyLibrary()
_INTERFACE = InterfaceLibrary()


def _home(buffer: Buffer) -> CudaDevice:
    on = device_of(buffer.array)
    assert isinstance(on, CudaDevice)
    return on


def _of_cupy(x: Any) -> DeviceArray:
    return view(cuda_device(x.data.device_id), x.data.ptr, x.shape, x.dtype, x.strides, owner=x)


def _interface_stream(x: Any) -> int | None:
    """The stream for which users of `x` have to wait."""
    interface = x.__cuda_array_interface__
    stream = interface.get("stream")
    if stream is None and interface.get("version", 0) < 3:
        # There was no word for it, so it may be any that the default stream waits for.
        return _LEGACY_STREAM
    return None if stream is None else int(stream)


def recognise_cuda(operation: str, x: Any, argument: str = "x") -> Buffer:
    """The buffer of `x`: a cupy array, or any object with the CUDA array interface, or with DLPack on a CUDA device.

    Raises DeviceError for addresses that are none of CUDA's, and while work is captured into a CUDA graph; DTypeError
    for a foreign byte order and malformed interfaces.
    """
    if isinstance(x, cupy.ndarray):
        index = x.data.device_id
        refuse_capture(operation, argument, index, _stream(index))
        return Buffer(x, _of_cupy(x), _dtype(operation, argument, x.dtype), _CUPY)
    if hasattr(x, "__cuda_array_interface__"):
        return _interfaced(operation, x, argument)
    return _by_dlpack(operation, x, argument)


def _interfaced(operation: str, x: Any, argument: str) -> Buffer:
    memory = describe(x)
    dtype = _dtype(operation, argument, memory.dtype)
    index = cupy.cuda.runtime.getDevice()
    if 0 not in memory.shape:
        place = runtime.pointerGetAttributes(memory.pointer)
        if place.type not in _CUDA_MEMORY:
            raise DeviceError(
                f"{operation}: {argument} is a {type(x).__name__} at {memory.pointer:#x}, which is no memory of CUDA's"
            )
        index = place.device
    stream = _interface_stream(x)
    if stream is not None:
        refuse_capture(operation, argument, index, stream)
    array = view(
        cuda_device(index), memory.pointer, memory.shape, memory.dtype, memory.strides, x, writable=not memory.readonly
    )
    return Buffer(x, array, dtype, _INTERFACE)


def _by_dlpack(operation: str, x: Any, argument: str) -> Buffer:
    _, index = x.__dlpack_device__()
    refuse_capture(operation, argument, index, _stream(index))
    try:
        array = cupy.from_dlpack(x)
    except runtime.CUDARuntimeError:
        raise
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise DTypeError(
            f"{operation}: {argument} is a {type(x).__name__} that cupy can't take by DLPack: {error}"
        ) from error
    namespace = getattr(x, "__array_namespace__", None)
    module = sys.modules.get(type(x).__module__.partition(".")[0]) if namespace is None else namespace()
    library = DlpackLibrary(getattr(module, "from_dlpack", lambda result: result))
    return Buffer(x, _of_cupy(array), _dtype(operation, argument, array.dtype), library)


def _dtype(operation: str, argument: str, dtype: np.dtype[Any]) -> DType:
    if not dtype.isnative:
        raise DTypeError(
            f"{operation}: {argument} has dtype {dtype}, whose byte order is not this machine's; convert it first"
        )
    try:
        return dtypes.of_numpy(dtype)
    except DTypeError as error:
        raise DTypeError(f"{operation}: {argument}: {error}") from None
