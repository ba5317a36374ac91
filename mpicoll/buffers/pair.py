"""Pairs (values, indices) as one buffer, for minloc and maxloc."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np

from mpicoll.buffers.buffer import Buffer
from mpicoll.buffers.device import StreamEvent, check_same_place, device_of
from mpicoll.buffers.dtypes import Array, DType
from mpicoll.buffers.ops import pair_dtype
from mpicoll.buffers.recognise import output, recognise
from mpicoll.errors import DTypeError, ShapeError


class PairLibrary:
    """Arrays of pairs, whose parts are returned to the caller as two arrays of their own libraries. The pairs lie on
    the host, wherever their parts lie."""

    def __init__(self, values: Buffer, indices: Buffer) -> None:
        self.values = values
        self.indices = indices

    def empty(self, like: Buffer, shape: tuple[int, ...]) -> Buffer:
        parts = tuple(part.library.empty(part, shape) for part in (self.values, self.indices))
        return Buffer(parts, np.empty(shape, like.array.dtype), like.dtype, self)

    def finish(self, buffer: Buffer) -> Any:
        values, indices = buffer.user
        device = device_of(values.array, indices.array)
        with nullcontext() if device is None else device.working():
            values.store(np.ascontiguousarray(buffer.array["value"]).reshape(-1))
            indices.store(np.ascontiguousarray(buffer.array["index"]).reshape(-1))
        return values.result(), indices.result()

    def wrap(self, view: Array) -> Any:
        return view

    def convert(self, source: Array, target: Array, dtype: DType) -> None:
        np.copyto(target, source)

    def record_event(self, buffer: Buffer) -> StreamEvent | None:
        return None

    def find_stream(self, buffer: Buffer) -> int | None:
        return None


def parts_of(buffer: Buffer) -> tuple[Buffer, ...]:
    """Return the arrays of the caller that make up `buffer`."""
    if not isinstance(buffer.library, PairLibrary):
        return (buffer,)
    return (buffer.library.values, buffer.library.indices) if buffer.user is None else tuple(buffer.user)


def recognise_pair(operation: str, x: Any) -> Buffer:
    """Return the buffer of ``(values, indices)``. Its ``load`` reads both arrays at the time of the call.

    Raises DTypeError if `x` is not a pair, ShapeError if the shapes differ.
    """
    if not isinstance(x, tuple) or len(x) != 2:
        raise DTypeError(
            f"{operation}: minloc and maxloc need a pair (values, indices), got {type(x).__name__}; pass such as"
            " (x, numpy.full(x.shape, rank))"
        )
    values = recognise(operation, x[0], "x[0] (values)")
    indices = recognise(operation, x[1], "x[1] (indices)")
    if values.array.shape != indices.array.shape:
        raise ShapeError(
            f"{operation}: values have shape {values.array.shape} and indices {indices.array.shape}; they must agree"
        )
    check_same_place(operation, values.array, indices.array, ("values are", "indices"))
    work = pair_dtype(values.dtype, indices.dtype)
    dtype = DType(f"({values.dtype.name}, {indices.dtype.name})", work, work, "opaque")
    return PairBuffer(None, np.empty(values.array.shape, work), dtype, PairLibrary(values, indices))


class PairBuffer(Buffer):
    """The input of a pair reduction: the two arrays are joined when they are loaded."""

    __slots__ = ()

    def load(self, target: Array) -> None:
        library = self.library
        assert isinstance(library, PairLibrary)
        for part, name in ((library.values, "value"), (library.indices, "index")):
            column = np.empty(target.size, target.dtype[name])
            part.load(column)
            device = device_of(part.array)
            if device is not None:
                device.synchronize()
            target[name] = column


def output_pair(operation: str, out: Any, like: Buffer, shape: tuple[int, ...]) -> Buffer:
    """Return the buffer of the caller's ``out=(values, indices)``."""
    library = like.library
    assert isinstance(library, PairLibrary)
    if not isinstance(out, tuple) or len(out) != 2:
        raise DTypeError(f"{operation}: out must be a pair (values, indices), got {type(out).__name__}")
    parts = (output(operation, out[0], library.values, shape), output(operation, out[1], library.indices, shape))
    if parts[0].overlaps(parts[1]):
        raise ShapeError(f"{operation}: both arrays of out share memory, so one would overwrite the other")
    return Buffer(parts, np.empty(shape, like.array.dtype), like.dtype, library)
