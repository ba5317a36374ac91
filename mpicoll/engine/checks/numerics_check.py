"""Checks of values: NaN and infinity where there should be none, and bits that should be equal on all ranks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from zlib import crc32

import numpy as np

from mpicoll.buffers.buffer import Buffer
from mpicoll.buffers.device import on_host
from mpicoll.buffers.dtypes import Array
from mpicoll.buffers.pair import PairLibrary
from mpicoll.buffers.recognise import recognise
from mpicoll.engine.core.operation import Operation
from mpicoll.wording import count

_OVERFLOWING_OPS = ("sum", "prod", "avg", "premul_sum", "user")
"""Reductions whose result may be infinite although no operand is."""

_EXPONENT = np.uint16(0x7F80)
_FRACTION = np.uint16(0x007F)
"""Mask of the fraction of a bfloat16, viewed as a 16-bit word."""

_BLOCK = 1 << 20
"""Elements that are checked at a time, where each element is checked."""


def describe_nonfinite_input(operation: Operation) -> str:
    """Describe NaN and infinity in the input of this rank to `operation`; empty if there are none."""
    on = operation.on
    with nullcontext() if on is None else on.working(operation.after):
        return _describe_nonfinite_input(operation)


def _describe_nonfinite_input(operation: Operation) -> str:
    block, collective = operation.block, operation.query.collective
    if block is None:
        return ""
    if isinstance(block.library, PairLibrary):
        values = block.library.values
        return describe_nonfinite(values.array, values.dtype.name)
    if not _can_be_nonfinite(block):
        return ""
    if collective not in ("bcast", "scatter"):
        return describe_nonfinite(block.array, block.dtype.name)
    # The root's input is not the block that all ranks have; the other ranks send nothing.
    arrays = operation.arrays
    if arrays.source is None:
        return ""
    arrays.load()
    return describe_nonfinite(arrays.source.view(block.array.dtype), block.dtype.name)


def may_overflow(operation: Operation) -> bool:
    """Return True if the result of `operation` may be infinite, or NaN, although no operand is."""
    reduction, block = operation.arrays.reduction, operation.block
    return (
        reduction is not None and block is not None and reduction.name in _OVERFLOWING_OPS and _can_be_nonfinite(block)
    )


def describe_nonfinite_result(operation: Operation) -> str:
    """Describe NaN and infinity in the result of a reduction on this rank; empty if there are none."""
    # The first rank's prefix has no operands.
    if operation.query.collective == "exscan" and operation.comm.rank == 0:
        return ""
    buffer = get_result(operation)
    return "" if buffer is None else describe_nonfinite(buffer.array, buffer.dtype.name)


def get_result(operation: Operation) -> Buffer | None:
    """Return the result of `operation` on this rank, or None if it has none."""
    result = operation.result()
    if result is None or isinstance(result, tuple):
        return None
    return recognise(operation.query.collective, result)


def checksum(operation: Operation) -> int:
    """Return a checksum of the bytes of this rank's result; equal on all ranks if the bytes are."""
    result = operation.result()
    parts = result if isinstance(result, tuple) else () if result is None else (result,)
    value = 0
    for part in parts:
        value = _add_to_checksum(value, on_host(recognise(operation.query.collective, part).array))
    return value


def _add_to_checksum(value: int, array: Array) -> int:
    """Return `value`, continued with the bytes of `array`, without those between the fields of records."""
    if array.dtype.names is not None:
        for name in array.dtype.names:
            value = _add_to_checksum(value, array[name])
        return value
    return crc32(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data, value)


def describe_nonfinite(array: Array, dtype: str) -> str:
    """Describe the number of NaN and infinite elements and the index of the first one; empty if there are none. `dtype`
    names the dtype of the elements where numpy has no such dtype."""
    array = on_host(array)
    words = dtype == "bfloat16" and array.dtype == np.uint16
    if not words and _all_finite(array):
        return ""
    flat, nans, nonfinite, first = array.reshape(-1), 0, 0, -1
    for begin in range(0, flat.size, _BLOCK):
        part = flat[begin : begin + _BLOCK]
        nan, nonfinite_mask = _find_nonfinite_words(part) if words else (np.isnan(part), ~np.isfinite(part))
        found = int(nonfinite_mask.sum())
        if found and first < 0:
            first = begin + int(nonfinite_mask.argmax())
        nans += int(nan.sum())
        nonfinite += found
    if not nonfinite:
        return ""
    kinds = [f"{nans} NaN"] * bool(nans) + [f"{nonfinite - nans} infinite"] * (nonfinite > nans)
    where = [int(i) for i in np.unravel_index(first, array.shape)]
    return f"{' and '.join(kinds)} of {count(array.size, 'element')}, the first at {where}"


def _all_finite(array: Array) -> bool:
    """Return True if all elements are known to be finite, by a fast test: any other element makes the sum NaN or
    infinite."""
    with np.errstate(all="ignore"):
        return bool(np.isfinite(array.sum(dtype=np.float32) if array.dtype.itemsize == 2 else array.sum()))


def _find_nonfinite_words(words: Array) -> tuple[Array, Array]:
    """Return two masks: the elements that are NaN, and those that are NaN or infinite."""
    nonfinite_mask = (words & _EXPONENT) == _EXPONENT
    return nonfinite_mask & ((words & _FRACTION) != 0), nonfinite_mask


def _can_be_nonfinite(block: Buffer) -> bool:
    """Return True if the dtype of `block` has NaN and infinity that can be detected."""
    kind: Any = block.array.dtype.kind
    return kind in "fc" or block.dtype.name == "bfloat16"
