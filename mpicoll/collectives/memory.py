"""Memory of a collective, as flat contiguous arrays: the caller's memory if possible.

Otherwise ``load`` and ``store`` copy between this memory and the caller's arrays, each time the collective runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from mpicoll.buffers.buffer import Buffer
from mpicoll.buffers.device import empty_beside
from mpicoll.buffers.dtypes import Array
from mpicoll.buffers.ops import Fold, Reduction
from mpicoll.engine.core.arrays import CollectiveArrays, do_nothing
from mpicoll.engine.core.communicator_core import CommunicatorCore


def is_plain(array: Array) -> bool:
    """Return True if MPI takes the memory of `array` as it is. mpi4py has no datatype for unaligned elements."""
    return array.flags.c_contiguous and array.flags.aligned


class InputArray:
    """Read-only input, which does not overlap the memory of the output."""

    __slots__ = ("_buffer", "array", "is_user_buffer")

    def __init__(self, buffer: Buffer, out: Buffer | None = None) -> None:
        array = buffer.array
        self._buffer = buffer
        self.is_user_buffer = is_plain(array) and not (out is not None and buffer.overlaps(out))
        self.array: Array = array.reshape(-1) if self.is_user_buffer else empty_beside(array, array.size)

    @property
    def as_bytes(self) -> Array:
        """The array as bytes."""
        return self.array.view(np.uint8)

    def load(self) -> None:
        """Copy the input from the caller's memory, if necessary."""
        if not self.is_user_buffer:
            self._buffer.load(self.array)


class OutputArray:
    """Output, which does not overlap the memory `disjoint_from` that is read while the output is written."""

    __slots__ = ("_buffer", "array", "is_user_buffer")

    def __init__(self, buffer: Buffer, disjoint_from: Array | None = None) -> None:
        array = buffer.array
        self._buffer = buffer
        self.is_user_buffer = is_plain(array) and not (
            disjoint_from is not None and np.may_share_memory(array, disjoint_from)
        )
        self.array: Array = array.reshape(-1) if self.is_user_buffer else empty_beside(array, array.size)

    @property
    def as_bytes(self) -> Array:
        """The array as bytes."""
        return self.array.view(np.uint8)

    def store(self) -> None:
        """Copy the output to the caller's memory, if necessary."""
        if not self.is_user_buffer:
            self._buffer.store(self.array)


class ReductionArray:
    """Memory in which an operand is reduced, in the dtype of the reduction: the memory of the output if that fits.

    `source` is the operand: the caller's memory if it needs no preparation and overlaps neither `array` nor the buffer
    `disjoint_from`, which are written while it is read; otherwise `array` itself, after :meth:`load`.
    """

    __slots__ = ("_buffer", "_out", "_reduction", "_same", "_size", "array", "is_user_buffer", "source")

    def __init__(
        self, buffer: Buffer, reduction: Reduction, out: Buffer | None, size: int, disjoint_from: Buffer | None = None
    ) -> None:
        self._buffer = buffer
        self._reduction = reduction
        self._out = out
        self._size = size
        fits = out is not None and out.array.dtype == reduction.work and is_plain(out.array)
        self.is_user_buffer = fits
        self._same = fits and out is not None and out.same_memory(buffer)
        self.array: Array = (
            out.array.reshape(-1)
            if fits and out is not None
            else empty_beside(buffer.array, buffer.array.size, reduction.work)
        )
        # The parts of pairs are joined when they are loaded.
        readable = (
            reduction.prepare is None
            and buffer.dtype.kind != "opaque"
            and buffer.array.dtype == reduction.work
            and is_plain(buffer.array)
            and not np.may_share_memory(buffer.array, self.array)
            and not (disjoint_from is not None and buffer.overlaps(disjoint_from))
        )
        self.source: Array = buffer.array.reshape(-1) if readable else self.array

    def load(self) -> None:
        """Copy this rank's operand to `source` and prepare it, if necessary."""
        if self.source is not self.array:
            return
        if not self._same:
            self._buffer.load(self.array)
        if self._reduction.prepare is not None:
            self._reduction.prepare(self.array)

    def finish(self, array: Array) -> None:
        """Turn the combined operands in `array` into the result, in place."""
        if self._reduction.finish is not None:
            self._reduction.finish(array, self._size)

    def store(self) -> None:
        """Finish the result and copy it to the caller's memory, on a rank that has a result."""
        if self._out is not None:
            self.finish(self.array)
            if not self.is_user_buffer:
                self._out.store(self.array)


def reduction_arrays(
    collective: str, comm: CommunicatorCore, buffer: Buffer, reduction: Reduction, output: Buffer | None, root: int = 0
) -> CollectiveArrays:
    """Return the arrays of a reduction of vectors; `output` is None on a rank that has no result."""
    work = ReductionArray(buffer, reduction, output, comm.size)
    arrays = CollectiveArrays(
        collective,
        comm.rank,
        work.source,
        None if output is None else work.array,
        (buffer.array.size,),
        root,
        reduction,
        spare=work.array,
        load=work.load,
        store=work.store,
        persistent=collective == "allreduce"
        and work.is_user_buffer
        and work.source is not work.array
        and reduction.finish is None
        and reduction.native is not None,
        unconverted=not reduction.changes(buffer.array.dtype),
    )
    arrays.in_callers_dtype = partial(arrays_for_shared_memory, buffer=buffer, output=output)
    return arrays


def arrays_for_shared_memory(arrays: CollectiveArrays, buffer: Buffer, output: Buffer | None) -> CollectiveArrays:
    """Return the arrays of a reduction for shared memory, where operands are combined in the caller's dtype, unless
    they must be prepared first."""
    reduction = arrays.reduction
    assert reduction is not None
    # There are kernels for the native byte order only, and prefixes are reduced by kernels alone.
    swapped = arrays.collective in ("scan", "exscan") and not buffer.array.dtype.isnative
    if reduction.prepare is not None or buffer.dtype.kind == "opaque" or swapped:
        return arrays.with_fold(Fold(reduction), unconverted=False)
    same = output is not None and output.same_memory(buffer)
    source = InputArray(buffer, None if same else output)
    target = None if output is None else OutputArray(output)
    identity = arrays.identity
    if identity is not None:
        identity = np.empty(1, buffer.array.dtype)
        buffer.library.convert(np.full(1, arrays.identity, reduction.work), identity, buffer.dtype)
    return CollectiveArrays(
        arrays.collective,
        arrays.rank,
        source.array,
        None if target is None else target.array,
        arrays.counts,
        arrays.root,
        reduction,
        arrivals=arrays.arrivals,
        identity=identity,
        load=do_nothing if source.is_user_buffer else source.load,
        store=do_nothing if target is None or target.is_user_buffer else target.store,
        persistent=arrays.persistent,
        fold=Fold(reduction, buffer),
        in_callers_dtype=arrays.in_callers_dtype,
    )


def move_arrays(
    collective: str,
    comm: CommunicatorCore,
    source: InputArray | None,
    target: OutputArray | None,
    counts: Sequence[int],
    root: int = 0,
) -> CollectiveArrays:
    """Return the arrays of a collective that moves bytes; `counts` are the bytes of the ranks' blocks, or of the vector
    alone."""
    return CollectiveArrays(
        collective,
        comm.rank,
        None if source is None else source.as_bytes,
        None if target is None else target.as_bytes,
        tuple(counts),
        root,
        load=do_nothing if source is None or source.is_user_buffer else source.load,
        store=do_nothing if target is None or target.is_user_buffer else target.store,
    )
