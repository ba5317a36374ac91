"""Reductions, ufuncs and conversions on arrays of a CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial, reduce
from operator import or_
from typing import Any

import cupy
import numpy as np

from mpicoll.buffers import kernels
from mpicoll.buffers.cuda.copies import are_apart, clone, copy, flatten, wrap
from mpicoll.buffers.cuda.streams import DeviceStreams
from mpicoll.buffers.device import DeviceArray
from mpicoll.buffers.dtypes import Array
from mpicoll.errors import DeviceError, DTypeError
from mpicoll.ufuncs import UFUNCS

_FOLDS = {ufunc.__name__: op for op, ufunc in UFUNCS.items()}
"""The reduction that does the same as a ufunc, by the ufunc's name."""

_FLOAT32 = np.dtype(np.float32)

_BLOCK = 128
"""Threads of a block."""

_MOST_BLOCKS = (1 << 31) - 1
"""CUDA's limit; threads of more elements repeat."""


def apply(device: DeviceStreams, ufunc: str, inputs: Sequence[Any], out: DeviceArray) -> None:
    """Call a ufunc; see :meth:`mpicoll.buffers.device.Device.apply`."""
    if not out.size:
        return
    op, dtype = _FOLDS.get(ufunc), out.dtype.name
    if op is not None and kernels.known(op, dtype) and _alike(inputs, out):
        addresses = [one.ctypes.data for one in (*inputs, out)]
        if all(one == addresses[-1] or abs(one - addresses[-1]) >= out.nbytes for one in addresses):
            _bind(device, op, dtype, inputs, [out])()
            return
    function = getattr(cupy, ufunc, None)
    if function is None:
        raise DeviceError(f"{ufunc}: there is no such function for memory of {device.name}")
    target = wrap(device, out)
    function(*(_wrap_operand(device, one, out, target) for one in inputs), out=target, casting="unsafe")


def _wrap_operand(device: DeviceStreams, one: Any, out: Array, target: Any) -> Any:
    if not isinstance(one, np.ndarray):
        return one
    if not isinstance(one, DeviceArray):
        return one[()] if not one.ndim else wrap(device, clone(device, one))
    if are_apart(one, out):
        return wrap(device, one)
    # cupy knows that two arrays share memory only if they are one object.
    same = one.ctypes.data == out.ctypes.data and one.strides == out.strides
    return target if same and one.shape == out.shape and one.dtype == out.dtype else wrap(device, clone(device, one))


def convert(device: DeviceStreams, source: Array, target: Array, dtype: str) -> None:
    """Convert between float32 and half precision; see :meth:`mpicoll.buffers.device.Device.convert`."""
    if not target.size:
        return
    # One kernel converts what lies side by side; everything else is made so.
    whole = flatten(device, source)
    direct = isinstance(target, DeviceArray) and target.flags.c_contiguous and target.shape == source.shape
    made = target if direct and are_apart(target, whole) else device.empty(source.size, target.dtype)
    narrows = source.dtype == _FLOAT32
    _bind(device, "sum", dtype, [whole], [made], wide_first=narrows, wide_last=not narrows)()
    if made is not target:
        copy(device, target, made.reshape(source.shape))


def fold(device: DeviceStreams, op: str, parts: Sequence[DeviceArray], outs: Sequence[DeviceArray], dtype: str) -> None:
    """Combine `parts` into each of `outs`; see :meth:`mpicoll.buffers.device.Device.fold`."""
    bind_fold(device, op, parts, outs, dtype)()


def bind_fold(
    device: DeviceStreams, op: str, parts: Sequence[DeviceArray], outs: Sequence[DeviceArray], dtype: str
) -> Callable[[], None]:
    """Return a function that does what :func:`fold` does."""
    if not kernels.known(op, dtype):
        raise DTypeError(f"there is no kernel that combines arrays of {dtype} by {op!r}")
    if len(parts) > kernels.MOST_PARTS and parts[0].size:
        return partial(_fold_in_steps, device, op, parts, outs, dtype)
    return _bind(device, op, dtype, parts, outs)


def _fold_in_steps(
    device: DeviceStreams, op: str, parts: Sequence[DeviceArray], outs: Sequence[DeviceArray], dtype: str
) -> None:
    """Combine more parts than a kernel takes, with totals that are as wide as those in a kernel."""
    most, half = kernels.MOST_PARTS, dtype in kernels.HALVES
    partly = "sum" if op == "avg" else op
    total = device.empty(parts[0].size, _FLOAT32 if half else parts[0].dtype)
    _bind(device, partly, dtype, parts[:most], [total], wide_last=half)()
    for begin in range(most, len(parts), most - 1):
        some = [total, *parts[begin : begin + most - 1]]
        if begin + most - 1 < len(parts):
            _bind(device, partly, dtype, some, [total], wide_first=half, wide_last=half)()
        else:
            _bind(device, op, dtype, some, outs, wide_first=half, count=len(parts))()


def _bind(
    device: DeviceStreams,
    op: str,
    dtype: str,
    parts: Sequence[Array],
    outs: Sequence[Array],
    *,
    wide_first: bool = False,
    wide_last: bool = False,
    count: int = 0,
) -> Callable[[], None]:
    """Return a function that launches the kernel on these arrays, which it keeps alive."""
    addresses = [one.ctypes.data for one in (*parts, *outs)]
    size, places = parts[0].size, reduce(or_, addresses)
    if not size:
        return _do_nothing
    aligned = 4 if wide_first or wide_last else kernels.alignment(dtype)
    if places % aligned:
        return partial(_launch_aligned, device, op, dtype, parts, outs, wide_first, wide_last, count)
    width = kernels.width(dtype, places)
    kernel = _kernel(op, dtype, len(parts), len(outs), width, wide_first, wide_last)
    grid = (min(-(-kernels.threads(dtype, size, width) // _BLOCK), _MOST_BLOCKS),)
    arguments = (size, count or len(parts), *addresses)

    def launch(kept: tuple[Sequence[Array], ...] = (parts, outs)) -> None:
        device.submit()
        kernel(grid, (_BLOCK,), arguments)

    return launch


def _do_nothing() -> None:
    """Launch nothing, for arrays without elements."""


def _launch_aligned(
    device: DeviceStreams,
    op: str,
    dtype: str,
    parts: Sequence[Array],
    outs: Sequence[Array],
    wide_first: bool,
    wide_last: bool,
    count: int,
) -> None:
    """Launch on copies in scratch memory: a kernel that reads a misaligned element makes the device unusable for this
    process."""
    moved = [clone(device, one) for one in parts]
    made = [device.empty(one.size, one.dtype) for one in outs]
    _bind(device, op, dtype, moved, made, wide_first=wide_first, wide_last=wide_last, count=count)()
    for scratch, out in zip(made, outs, strict=True):
        copy(device, out.reshape(-1), scratch)


def _alike(inputs: Sequence[Any], out: DeviceArray) -> bool:
    """Return True if operands are like the result: contiguous, of its shape and dtype, on the device."""
    return out.flags.c_contiguous and all(
        isinstance(one, DeviceArray)
        and one.dtype == out.dtype
        and one.shape == out.shape
        and bool(one.flags.c_contiguous)
        for one in inputs
    )


@lru_cache(maxsize=1024)
def _kernel(op: str, dtype: str, parts: int, outs: int, width: int, wide_first: bool, wide_last: bool) -> Any:
    source = kernels.fold(op, dtype, parts, outs, width, wide_first=wide_first, wide_last=wide_last)
    return cupy.RawKernel(source.program, source.name)
