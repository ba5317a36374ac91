"""Memory of an operation, as flat contiguous arrays: the caller's memory if possible.

Otherwise ``load`` and ``store`` copy between this memory and the caller's arrays, each time the operation runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpicoll.buffers.buffer import Buffer
from mpicoll.buffers.device import empty_beside
from mpicoll.buffers.dtypes import Array
from mpicoll.buffers.ops import Fold, Reduction
from mpicoll.engine.executors.schedule import Region, cut, extents
from mpicoll.engine.operation import Flat
from mpicoll.schedules import Schedule


class Source:
    """Read-only input, which does not overlap the memory of the output."""

    __slots__ = ("_buffer", "array", "own")

    def __init__(self, buffer: Buffer, out: Buffer | None = None) -> None:
        self._buffer = buffer
        self.own = buffer.array.flags.c_contiguous and not (out is not None and buffer.overlaps(out))
        self.array: Array = buffer.array.reshape(-1) if self.own else empty_beside(buffer.array, buffer.array.size)

    @property
    def raw(self) -> Array:
        """As bytes."""
        return self.array.view(np.uint8)

    def load(self) -> None:
        """Copy the input from the caller's memory, if necessary."""
        if not self.own:
            self._buffer.load(self.array)


class Target:
    """Output, which does not overlap the memory `avoid` that is read while the output is written."""

    __slots__ = ("_buffer", "array", "own")

    def __init__(self, buffer: Buffer, avoid: Array | None = None) -> None:
        self._buffer = buffer
        self.own = buffer.array.flags.c_contiguous and not (
            avoid is not None and np.may_share_memory(buffer.array, avoid)
        )
        self.array: Array = buffer.array.reshape(-1) if self.own else empty_beside(buffer.array, buffer.array.size)

    @property
    def raw(self) -> Array:
        """As bytes."""
        return self.array.view(np.uint8)

    def store(self) -> None:
        """Copy the output to the caller's memory, if necessary."""
        if not self.own:
            self._buffer.store(self.array)


class Work:
    """Memory in which an operand is reduced, in the dtype of the reduction: the memory of the output if that fits."""

    __slots__ = ("_buffer", "_out", "_reduction", "_same", "_size", "_source", "array", "own")

    def __init__(
        self, buffer: Buffer, reduction: Reduction, out: Buffer | None, size: int, avoid: Buffer | None = None
    ) -> None:
        self._buffer = buffer
        self._reduction = reduction
        self._out = out
        self._size = size
        fits = out is not None and out.array.dtype == reduction.work and out.array.flags.c_contiguous
        self.own = fits
        self._same = fits and out is not None and out.same_memory(buffer)
        self.array: Array = (
            out.array.reshape(-1)
            if fits and out is not None
            else empty_beside(buffer.array, buffer.array.size, reduction.work)
        )
        # MPI may read the caller's memory if it needs no preparation and overlaps nothing that MPI writes meanwhile:
        # neither `array`, nor the buffer `avoid`.
        readable = (
            reduction.prepare is None
            and buffer.array.dtype == reduction.work
            and buffer.array.flags.c_contiguous
            and not np.may_share_memory(buffer.array, self.array)
            and not (avoid is not None and buffer.overlaps(avoid))
        )
        self._source = buffer.array.reshape(-1) if readable else None

    def load(self) -> None:
        """Copy this rank's operand, if necessary, and prepare it."""
        if not self._same:
            self._buffer.load(self.array)
        if self._reduction.prepare is not None:
            self._reduction.prepare(self.array)

    def operand(self) -> Array:
        """Return the operand for MPI: the caller's memory if MPI may read it, else ``array`` after ``load``."""
        if self._source is not None:
            return self._source
        self.load()
        return self.array

    @property
    def direct(self) -> Array | None:
        """Operand, if MPI can reduce from and to the caller's memory without further steps, else None."""
        return self._source if self.own and self._reduction.finish is None else None

    def finish(self, array: Array) -> None:
        """Turn the combined operands in `array` into the result, in place."""
        if self._reduction.finish is not None:
            self._reduction.finish(array, self._size)

    def store(self) -> None:
        """Finish the result and copy it to the caller's memory, on a rank that has a result."""
        if self._out is not None:
            self.finish(self.array)
            if not self.own:
                self._out.store(self.array)


def flat_reduction(
    buffer: Buffer,
    reduction: Reduction,
    out: Buffer | None,
    counts: Sequence[int],
    work: Work,
    part: Array | None = None,
) -> Flat:
    """Return the memory of a reduction through shared memory.

    The reduction uses the caller's dtype, unless operands have to be prepared first. In that case it uses `work` and
    `part`, the memory for this rank's part of the result in the dtype of `work`.
    """
    if reduction.prepare is None and buffer.dtype.kind != "opaque":
        same = out is not None and out.same_memory(buffer)
        source, target = Source(buffer, None if same else out), None if out is None else Target(out)
        return Flat(
            source.array,
            None if target is None else target.array,
            tuple(counts),
            Fold(reduction, buffer),
            source.load,
            _nothing if target is None else target.store,
        )
    if part is not None:
        return Flat(work.array, part, tuple(counts), Fold(reduction), work.load)
    return Flat(work.array, None if out is None else work.array, tuple(counts), Fold(reduction), work.load, work.store)


def flat_vectors(source: Buffer, target: Buffer) -> Flat:
    """Return the memory of a reduction whose operands need no preparation and whose result needs no finish."""
    return Flat(Source(source, target).array, Target(target).array)


def _nothing() -> None:
    return None


def vector(schedule: Schedule, array: Array, *scratch: Array) -> list[Region]:
    """Return the regions of a vector collective: the chunks of `array`, then scratch chunks of the same sizes.

    The first scratch chunks are in the arrays `scratch`, each as large as `array`; the others are in new memory.
    """
    offsets = cut(array.size, schedule.chunks)
    regions = [Region(part, offsets) for part in (array, *scratch)]
    left = schedule.scratch - len(scratch) * schedule.chunks
    if left > 0:
        sizes = [offsets[i % schedule.chunks + 1] - offsets[i % schedule.chunks] for i in range(left)]
        ends = extents(sizes)
        regions.append(Region(empty_beside(array, ends[-1]), ends))
    return regions


class Blocks:
    """Blocks of a gather or a scatter on one rank.

    On the root all blocks are in `whole`, the caller's memory. On any other rank (`whole` is None) its own block is in
    `own`, and the blocks that the rank forwards, together with its own, are in scratch memory.
    """

    __slots__ = ("_elements", "_own", "_place", "_rank", "_whole")

    def __init__(self, elements: Sequence[int], rank: int, own: Array, whole: Array | None) -> None:
        self._elements = elements
        self._rank = rank
        self._own = own
        self._whole = whole
        self._place = own

    def regions(self, schedule: Schedule) -> list[Region]:
        """Return the regions of the blocks that `schedule` uses on this rank."""
        if self._whole is not None:
            offsets = extents(self._elements)
            array = self._whole
        else:
            rounds = schedule.rounds
            named = {chunk for one in rounds for send in one.sends for chunk in send.chunks}
            named |= {chunk for one in rounds for recv in one.recvs for chunk in recv.chunks}
            named.add(self._rank)
            offsets = extents(count if chunk in named else 0 for chunk, count in enumerate(self._elements))
            array = self._own if len(named) == 1 else empty_beside(self._own, offsets[-1])
        self._place = array[offsets[self._rank] : offsets[self._rank + 1]]
        return [Region(array, offsets)]

    def place(self, block: Array) -> None:
        """Copy `block`, this rank's own block, into the regions."""
        if block.size and not np.may_share_memory(block, self._place):
            self._place[...] = block

    def take(self, block: Array) -> None:
        """Copy this rank's own block from the regions to `block`."""
        if not np.may_share_memory(block, self._place):
            block[...] = self._place
