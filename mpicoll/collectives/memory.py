"""The memory that an operation works on, as flat contiguous arrays: the caller's own wherever that is possible.

``load`` and ``store`` copy between it and the caller's arrays where it isn't, each time the operation runs.
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
    """An input, apart from the memory of the output: it is only read."""

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
        """Fetch the input."""
        if not self.own:
            self._buffer.load(self.array)


class Target:
    """An output, apart from the memory `avoid` that is still read while the output is written."""

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
        """Deliver the output."""
        if not self.own:
            self._buffer.store(self.array)


class Work:
    """The memory in which an operand is reduced, in the dtype of the reduction: the output's own if that fits."""

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
        """Fetch this rank's operand and prepare it."""
        if not self._same:
            self._buffer.load(self.array)
        if self._reduction.prepare is not None:
            self._reduction.prepare(self.array)

    def operand(self) -> Array:
        """The operand for MPI: the caller's memory as it is, where MPI may read it, else loaded into ``array``."""
        if self._source is not None:
            return self._source
        self.load()
        return self.array

    @property
    def direct(self) -> Array | None:
        """The operand, if MPI can reduce from the caller's memory to the caller's memory with nothing around it."""
        return self._source if self.own and self._reduction.finish is None else None

    def finish(self, array: Array) -> None:
        """Turn the combined operands in `array` into the result, in place."""
        if self._reduction.finish is not None:
            self._reduction.finish(array, self._size)

    def store(self) -> None:
        """Finish the result and deliver it, on a rank that has one."""
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
    """A reduction through shared memory: of the caller's dtype, unless operands have to be prepared first; `work` and
    `part` (where this rank's part of the result goes, in that dtype) serve then.
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
    """What MPI reduces from and to, where operands are not changed before or after."""
    return Flat(Source(source, target).array, Target(target).array)


def _nothing() -> None:
    return None


def vector(schedule: Schedule, array: Array, *scratch: Array) -> list[Region]:
    """Regions of a vector collective: the pieces of `array`, then scratch chunks in the sizes of the pieces.

    The first scratch chunks lie in the arrays `scratch`, each as large as `array`; the rest in fresh memory.
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
    """The blocks of a gather or a scatter on one rank.

    The root has all of them in `whole`, its caller's memory. Any other rank (`whole` is None) has its own block in
    `own` and, in scratch memory, the blocks that pass through it on their way, its own among them.
    """

    __slots__ = ("_elements", "_own", "_place", "_rank", "_whole")

    def __init__(self, elements: Sequence[int], rank: int, own: Array, whole: Array | None) -> None:
        self._elements = elements
        self._rank = rank
        self._own = own
        self._whole = whole
        self._place = own

    def regions(self, schedule: Schedule) -> list[Region]:
        """Lay the blocks out."""
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
        """Put this rank's own block in its place."""
        if block.size and not np.may_share_memory(block, self._place):
            self._place[...] = block

    def take(self, block: Array) -> None:
        """Fetch this rank's own block from its place."""
        if not np.may_share_memory(block, self._place):
            block[...] = self._place
