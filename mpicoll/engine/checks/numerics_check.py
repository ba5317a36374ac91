"""Checks of values: NaN and infinity where there should be none, and bits that should be equal on all ranks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from zlib import crc32

import numpy as np

from mpicoll.buffers.buffer import Buffer
from mpicoll.buffers.dtypes import Array
from mpicoll.buffers.pair import PairLibrary
from mpicoll.buffers.recognise import recognise
from mpicoll.engine.executors.device import on_host
from mpicoll.engine.operation import Operation

_GROW = ("sum", "prod", "avg", "premul_sum", "user")
"""Reductions whose result may be infinite although no operand is."""

_EXPONENT = np.uint16(0x7F80)
_FRACTION = np.uint16(0x007F)
"""Mask of the fraction of a bfloat16, viewed as a 16-bit word."""

_BLOCK = 1 << 20
"""Elements that are checked at a time, where each element is checked."""


def flaw_of_input(operation: Operation) -> str:
    """Describe NaN and infinity in the input of this rank to `operation`; empty if there are none."""
    on = operation.on
    with nullcontext() if on is None else on.working(operation.after):
        return _flaw_of_input(operation)


def _flaw_of_input(operation: Operation) -> str:
    block, collective = operation.block, operation.problem.collective
    if block is None:
        return ""
    if isinstance(block.library, PairLibrary):
        values = block.library.values
        return flaw(values.array, values.dtype.name)
    if not _has_gaps(block):
        return ""
    if collective not in ("bcast", "scatter"):
        return flaw(block.array, block.dtype.name)
    # The root's input is not the block that all ranks have; the other ranks send nothing.
    if operation.comm.rank != operation.problem.root or operation.flat is None:
        return ""
    flat = operation.flat()
    if flat.source is None:
        return ""
    flat.load()
    return flaw(flat.source.view(block.array.dtype), block.dtype.name)


def may_overflow(operation: Operation) -> bool:
    """Return True if the result of `operation` may be infinite, or NaN, although no operand is."""
    reduction, block = operation.reduction, operation.block
    return reduction is not None and block is not None and reduction.name in _GROW and _has_gaps(block)


def flaw_of_result(operation: Operation) -> str:
    """Describe NaN and infinity in the result of a reduction on this rank; empty if there are none."""
    # The first rank's prefix has no operands.
    if operation.problem.collective == "exscan" and operation.comm.rank == 0:
        return ""
    buffer = result_of(operation)
    return "" if buffer is None else flaw(buffer.array, buffer.dtype.name)


def result_of(operation: Operation) -> Buffer | None:
    """Return the result of `operation` on this rank, or None if it has none."""
    result = operation.result()
    if result is None or isinstance(result, tuple):
        return None
    return recognise(operation.problem.collective, result)


def checksum(operation: Operation) -> int:
    """Return a checksum of the bytes of this rank's result; equal on all ranks if the bytes are."""
    result = operation.result()
    parts = result if isinstance(result, tuple) else () if result is None else (result,)
    value = 0
    for part in parts:
        array = on_host(recognise(operation.problem.collective, part).array)
        value = crc32(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data, value)
    return value


def flaw(array: Array, dtype: str) -> str:
    """Describe the number of NaN and infinite elements and the index of the first one; empty if there are none. `dtype`
    names the dtype of the elements where numpy has no such dtype."""
    array = on_host(array)
    words = dtype == "bfloat16" and array.dtype == np.uint16
    if not words and _all_finite(array):
        return ""
    flat, nans, others, first = array.reshape(-1), 0, 0, -1
    for begin in range(0, flat.size, _BLOCK):
        part = flat[begin : begin + _BLOCK]
        nan, wrong = _of_words(part) if words else (np.isnan(part), ~np.isfinite(part))
        count = int(wrong.sum())
        if count and first < 0:
            first = begin + int(wrong.argmax())
        nans += int(nan.sum())
        others += count
    if not others:
        return ""
    kinds = [f"{nans} NaN"] * bool(nans) + [f"{others - nans} infinite"] * (others > nans)
    where = [int(i) for i in np.unravel_index(first, array.shape)]
    return f"{' and '.join(kinds)} of {array.size} element{'s' * (array.size != 1)}, the first at {where}"


def _all_finite(array: Array) -> bool:
    """Return True if all elements are known to be finite, by a fast test: any other element makes the sum NaN or
    infinite."""
    with np.errstate(all="ignore"):
        return bool(np.isfinite(array.sum(dtype=np.float32) if array.dtype.itemsize == 2 else array.sum()))


def _of_words(words: Array) -> tuple[Array, Array]:
    """Return two masks: the elements that are NaN, and those that are NaN or infinite."""
    wrong = (words & _EXPONENT) == _EXPONENT
    return wrong & ((words & _FRACTION) != 0), wrong


def _has_gaps(block: Buffer) -> bool:
    """Return True if the dtype of `block` has NaN and infinity that can be detected."""
    kind: Any = block.array.dtype.kind
    return kind in "fc" or block.dtype.name == "bfloat16"
