"""Copies between arrays of a CUDA device, and between it and the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import or_
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from mpicoll.buffers.cuda.driver import CurrentDevice
from mpicoll.buffers.cuda.streams import DeviceStreams
from mpicoll.buffers.device import DeviceArray
from mpicoll.buffers.dtypes import Array
from mpicoll.errors import DTypeError

_PITCH = (1 << 31) - 1
"""Bytes from row to row, at most, in CUDA's copies of rows."""

_ROW = 512
"""The fewest bytes of a row that is copied by a transfer; smaller pieces are packed first."""


_Lines = list[tuple[int, int, int]]
"""Axes: how often, and the bytes from one to the next of the target and of the source. The last are bytes."""


def _lines(target: Array, source: Array) -> _Lines:
    """Return the fewest axes that lead to the same pairs of bytes as ``target[...] = source``. Raises ValueError if
    the source can't be broadcast."""
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


def copy(device: DeviceStreams, target: Array, source: Any) -> None:
    """Assign ``target[...] = source``; see :meth:`mpicoll.buffers.device.Device.copy`."""
    if not isinstance(source, np.ndarray):
        source = np.asarray(source)
    if source.dtype != target.dtype:
        if isinstance(source, DeviceArray):
            raise DTypeError(f"copy from {source.dtype} to {target.dtype} on {device.name}: pass arrays of one dtype")
        source = source.astype(target.dtype)
    lines = _lines(target, source)
    if not target.size:
        return
    to, of = target.ctypes.data, source.ctypes.data
    if not isinstance(source, DeviceArray):
        _up(device, target, source, lines, to, of)
    elif not isinstance(target, DeviceArray):
        _down(device, target, source, lines, to, of)
    elif to != of or lines != _lines(target, target):
        _across(device, target, source, lines, to, of)


def bind_copy(device: DeviceStreams, target: DeviceArray, source: DeviceArray) -> Callable[[], None]:
    """Bind a copy; see :meth:`mpicoll.buffers.device.Device.bind_copy`."""
    to, of, nbytes = target.address, source.address, target.nbytes

    def run(kept: tuple[DeviceArray, DeviceArray] = (target, source)) -> None:
        runtime.memcpyAsync(to, of, nbytes, runtime.memcpyDefault, device.submit().ptr)

    return run


def _up(device: DeviceStreams, target: Array, source: Array, lines: _Lines, to: int, of: int) -> None:
    if _transfer(device, lines, to, of):
        device.thread_stream().kept.append(source)
    elif not source.flags.c_contiguous:
        staged = device.allocate_pinned(source.nbytes).view(source.dtype).reshape(source.shape)
        np.copyto(staged, source)
        copy(device, target, staged)
    else:
        copy(device, target, clone(device, source))


def _down(device: DeviceStreams, target: Array, source: Array, lines: _Lines, to: int, of: int) -> None:
    if _transfer(device, lines, to, of):
        device.thread_stream().kept.append(target)
    elif not source.flags.c_contiguous:
        copy(device, target, clone(device, source))
    else:
        staged = device.allocate_pinned(source.nbytes).view(source.dtype).reshape(source.shape)
        copy(device, staged, source)
        device.synchronize()
        np.copyto(target, staged)


def _across(device: DeviceStreams, target: Array, source: Array, lines: _Lines, to: int, of: int) -> None:
    if len(lines) == 1 and abs(to - of) >= target.nbytes:
        _transfer(device, lines, to, of)
    elif not are_apart(target, source):
        copy(device, target, clone(device, source))
    else:
        width, *_ = lines[-1]
        steps = [step for _, *steps in lines[:-1] for step in steps]
        places = reduce(or_, steps, width | to | of)
        word = min(8, places & -places)
        shape = (*(extent for extent, _, _ in lines[:-1]), width // word)
        dtype = np.dtype(f"u{word}")
        into, out_of = (
            _view(device, array, address, shape, (*(line[side] for line in lines[:-1]), word), dtype)
            for side, array, address in ((1, target, to), (2, source, of))
        )
        device.submit()
        cupy.copyto(into, out_of)


def _transfer(device: DeviceStreams, lines: _Lines, to: int, of: int) -> bool:
    """Copy by a transfer of CUDA. Return False if the layout does not allow that, or rows are too short."""
    width, _, _ = lines[-1]
    # Which of them the device's is CUDA knows best: arrays of the device may be managed, or the host's.
    if len(lines) == 1:
        runtime.memcpyAsync(to, of, width, runtime.memcpyDefault, device.submit().ptr)
        return True
    rows, step_to, step_of = lines[-2]
    if len(lines) > 2 or width < _ROW or min(step_to, step_of) < width or max(step_to, step_of) > _PITCH:
        return False
    runtime.memcpy2DAsync(to, step_to, of, step_of, width, rows, runtime.memcpyDefault, device.submit().ptr)
    return True


def flatten(device: DeviceStreams, array: Array) -> Array:
    """Return the elements flat in C order on the device: `array` itself, if it is contiguous there."""
    whole = array if isinstance(array, DeviceArray) and array.flags.c_contiguous else clone(device, array)
    flat: Array = whole.reshape(-1)
    return flat


def clone(device: DeviceStreams, array: Array) -> DeviceArray:
    """Copy `array` to scratch memory of the device."""
    scratch: DeviceArray = device.empty(array.size, array.dtype).reshape(array.shape)
    copy(device, scratch, array)
    return scratch


def wrap(device: DeviceStreams, array: Array) -> Any:
    """Return a cupy array on memory of this device, which it keeps alive, for work that the caller submits next."""
    device.submit()
    if not array.size:
        with CurrentDevice(device.index):
            return cupy.empty(array.shape, array.dtype)
    return _view(device, array, array.ctypes.data, array.shape, array.strides, array.dtype)


def _view(
    device: DeviceStreams,
    owner: Array,
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: np.dtype[Any],
) -> Any:
    below, above = _reach(shape, strides)
    # With the device named cupy doesn't look for it, nor ask whether memory of another device can be reached.
    memory = cupy.cuda.UnownedMemory(address - below, below + above + dtype.itemsize, owner, device.index)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, below), strides)


def _reach(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int]:
    """Return how many bytes below and above the first element the others begin."""
    steps = [(extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)]
    return -sum(step for step in steps if step < 0), sum(step for step in steps if step > 0)


def are_apart(one: Array, other: Array) -> bool:
    """Return True if the arrays share no memory, by its bounds."""
    return not np.may_share_memory(one, other)
