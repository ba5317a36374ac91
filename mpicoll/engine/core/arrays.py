"""Arrays of one collective on this rank, in the form that every executor takes.

A collective is described by flat arrays, the sizes of the ranks' blocks in them, and the root. What the MPI library is
called with, and where the chunks of a schedule lie, follow from that, for all collectives here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from mpicoll.buffers.device import device_of, empty_beside
from mpicoll.buffers.dtypes import Array
from mpicoll.buffers.ops import Fold, Reduction
from mpicoll.transport.base import Native

if TYPE_CHECKING:
    from mpicoll.schedules import Schedule

NativeCall: TypeAlias = Callable[[Any, Any], None]
"""Function of `source` and `target` that calls one of the MPI library's collectives."""


class Region:
    """Consecutive chunks in one flat array: chunk ``i`` of the region is ``array[offsets[i]:offsets[i + 1]]``. `input`
    is copied to the array before a run, or read instead; no schedule writes to it. None: there is none."""

    __slots__ = ("array", "input", "offsets")

    def __init__(self, array: Array, offsets: Sequence[int], input: Array | None = None) -> None:
        self.array = array
        self.offsets = offsets
        self.input = input

    def can_read_input(self) -> bool:
        """Return True if a schedule may read the input where it lies."""
        array, given = self.array, self.input
        if given is None or device_of(array) is not None or device_of(given) is not None:
            return False
        return given.dtype == array.dtype and given.size == array.size and given.flags.c_contiguous


def even_displacements(count: int, pieces: int) -> list[int]:
    """Return the offsets of `pieces` consecutive parts of `count` elements; the first parts are larger by one element
    if `pieces` does not divide `count`."""
    size, extra = divmod(count, pieces)
    return [i * size + min(i, extra) for i in range(pieces + 1)]


def displacements(counts: Iterable[int]) -> list[int]:
    """Return the offsets of consecutive blocks of `counts` elements."""
    offsets = [0]
    for count in counts:
        offsets.append(offsets[-1] + count)
    return offsets


def do_nothing() -> None:
    """Return: the default of :attr:`CollectiveArrays.load` and :attr:`CollectiveArrays.store`, and the function of an
    operation that has ended."""


class CollectiveArrays:
    """Flat contiguous arrays of a collective on this rank, of one dtype, which are identical or do not overlap.

    `source` is this rank's input and `target` its output; each is None where the collective has none on this rank.
    `counts` are the elements of all ranks' blocks, or of the vector alone; for alltoall these are the blocks that this
    rank sends, and `arrivals` those that it receives. `spare` is memory of the size of `source`, in which schedules
    reduce; without it they write to `source`, or to `target` if that has the same size.

    `load` copies the caller's data to `source` before the collective, `store` copies `target` to the caller's array
    after it. `persistent` states that both do nothing, and that the arrays are the same in each run. `unconverted`
    states that the arrays hold the elements, or the bytes, of the caller's arrays as they are, so that the collective
    may as well be carried out on the caller's arrays.

    `reduction` combines elements of `source`. Through shared memory, `fold` combines the operands of all ranks at once,
    perhaps in another dtype: `in_callers_dtype` returns the arrays for that (None: these arrays). `identity` is the
    result of exscan on rank 0, if the reduction has one.
    """

    __slots__ = (
        "_placed",
        "_result",
        "arrivals",
        "collective",
        "counts",
        "fold",
        "identity",
        "in_callers_dtype",
        "load",
        "persistent",
        "rank",
        "reduction",
        "root",
        "source",
        "spare",
        "store",
        "target",
        "unconverted",
    )

    def __init__(
        self,
        collective: str,
        rank: int,
        source: Array | None = None,
        target: Array | None = None,
        counts: tuple[int, ...] = (),
        root: int = 0,
        reduction: Reduction | None = None,
        spare: Array | None = None,
        arrivals: tuple[int, ...] = (),
        identity: Any = None,
        load: Callable[[], None] = do_nothing,
        store: Callable[[], None] = do_nothing,
        persistent: bool = False,
        unconverted: bool = True,
        fold: Fold | None = None,
        in_callers_dtype: Callable[[CollectiveArrays], CollectiveArrays] | None = None,
    ) -> None:
        self.collective = collective
        self.rank = rank
        self.source = source
        self.target = target
        self.counts = counts
        self.root = root
        self.reduction = reduction
        self.spare = spare
        self.arrivals = arrivals
        self.identity = identity
        self.load = load
        self.store = store
        self.persistent = persistent
        self.unconverted = unconverted
        self.fold = fold
        self.in_callers_dtype = in_callers_dtype
        # Memory of a schedule in which the input is placed, with that input, and from which the output is taken; None:
        # it lies there already.
        self._placed: list[tuple[Array, Array]] = []
        self._result: Array | None = None

    def with_fold(self, fold: Fold, *, unconverted: bool | None = None) -> CollectiveArrays:
        """Return the same arrays with another `fold`, and another value of `unconverted` if that is given."""
        return CollectiveArrays(
            self.collective,
            self.rank,
            self.source,
            self.target,
            self.counts,
            self.root,
            self.reduction,
            self.spare,
            self.arrivals,
            self.identity,
            self.load,
            self.store,
            self.persistent,
            self.unconverted if unconverted is None else unconverted,
            fold,
            self.in_callers_dtype,
        )

    def for_shared_memory(self) -> CollectiveArrays:
        """Return the arrays for the collective through shared memory."""
        if self.in_callers_dtype is not None:
            return self.in_callers_dtype(self)
        return self if self.reduction is None else self.with_fold(Fold(self.reduction))

    def native_call(self, mpi: Native) -> NativeCall:
        """Return the MPI library's own collective for arrays like these."""
        return _NATIVE_CALLS[self.collective](self, mpi)

    def run_native(self, mpi: Native) -> None:
        """Carry out the MPI library's own collective, between `load` and `store`."""
        self.load()
        source, target = self.source, self.target
        if self.collective in _DISJOINT and source is not None and target is not None:
            source = _apart(source, target)
        self.native_call(mpi)(source, target)
        self.store()

    def regions(self, schedule: Schedule) -> list[Region]:
        """Return the memory of the chunks of `schedule` on this rank."""
        return _REGIONS.get(self.collective, _vector_regions)(self, schedule)

    def place(self) -> None:
        """Copy the input to the memory of the schedule, before a run."""
        for memory, given in self._placed:
            memory[...] = given

    def take(self) -> None:
        """Copy the output from the memory of the schedule, after a run."""
        if self._result is not None:
            assert self.target is not None
            self.target[...] = self._result
        elif self.identity is not None and self.rank == 0:
            assert self.target is not None
            self.target[...] = self.identity

    def bind_input(self, memory: Array) -> Array | None:
        """Set the memory of a schedule in which the input is placed. Return what is to be placed there."""
        given = None if _same(memory, self.source) else self.source
        self._placed = [] if given is None else [(memory, given)]
        return given

    def bind_regions(self, regions: Sequence[Region]) -> list[Region]:
        """Set that the inputs of `regions` are placed in them. Return the regions."""
        self._placed = [(one.array, one.input) for one in regions if one.input is not None]
        return list(regions)

    def bind_result(self, result: Array) -> None:
        """Set the memory of a schedule from which the output is taken."""
        self._result = None if _same(result, self.target) else result


def _same(block: Array, array: Array | None) -> bool:
    return array is None or not block.size or np.may_share_memory(block, array)


def _apart(source: Array, target: Array) -> Array:
    """Return `source`, copied if it shares memory with `target`."""
    if not np.may_share_memory(source, target):
        return source
    copy = empty_beside(source, source.size)
    np.copyto(copy, source)
    return copy


_DISJOINT = ("reduce_scatter", "allgather", "gather", "scatter")
"""Collectives of MPI whose input and output must not overlap, without its in-place form."""


def _vector_regions(arrays: CollectiveArrays, schedule: Schedule) -> list[Region]:
    vector = next(one for one in (arrays.spare, arrays.target, arrays.source) if one is not None)
    return vector_regions(schedule, vector, given=arrays.bind_input(vector))


def _exscan_regions(arrays: CollectiveArrays, schedule: Schedule) -> list[Region]:
    assert arrays.spare is not None
    assert arrays.target is not None
    return vector_regions(schedule, arrays.spare, arrays.target, given=arrays.bind_input(arrays.spare))


def vector_regions(schedule: Schedule, array: Array, *scratch: Array, given: Array | None = None) -> list[Region]:
    """Return the regions of a vector collective: the chunks of `array`, then scratch chunks of the same sizes.

    The first scratch chunks are in the arrays `scratch`, each as large as `array`; the others are in new memory. The
    input that is placed in `array` is `given`.
    """
    offsets = even_displacements(array.size, schedule.chunks)
    regions = [Region(array, offsets, given), *(Region(part, offsets) for part in scratch)]
    left = schedule.scratch - len(scratch) * schedule.chunks
    if left > 0:
        sizes = [offsets[i % schedule.chunks + 1] - offsets[i % schedule.chunks] for i in range(left)]
        ends = displacements(sizes)
        regions.append(Region(empty_beside(array, ends[-1]), ends))
    return regions


def _allgather_regions(arrays: CollectiveArrays, schedule: Schedule) -> list[Region]:
    offsets, rank, whole = displacements(arrays.counts), arrays.rank, arrays.target
    assert whole is not None
    arrays.bind_input(whole[offsets[rank] : offsets[rank + 1]])
    return [Region(whole, offsets)]


def _reduce_scatter_regions(arrays: CollectiveArrays, schedule: Schedule) -> list[Region]:
    """Return the region of the blocks; those of the blocks before and after the own one, and of the output for that, if
    it lies apart."""
    offsets, rank = displacements(arrays.counts), arrays.rank
    source, target = arrays.source, arrays.target
    assert source is not None
    assert target is not None
    whole = source if arrays.spare is None else arrays.spare
    start, stop = offsets[rank : rank + 2]
    if device_of(target) is not None or any(np.may_share_memory(target, one) for one in (source, whole)):
        arrays.bind_result(whole[start:stop])
        return [Region(whole, offsets, arrays.bind_input(whole))]
    given = None if _same(whole, source) else source
    ends = [one - stop for one in offsets[rank + 1 :]]
    before = Region(whole[:start], offsets[: rank + 1], None if given is None else given[:start])
    after = Region(whole[stop:], ends, None if given is None else given[stop:])
    return arrays.bind_regions([before, Region(target, [0, stop - start], source[start:stop]), after])


def _rooted_regions(arrays: CollectiveArrays, schedule: Schedule) -> list[Region]:
    """Return the region of the blocks of a gather or a scatter.

    On the root all blocks are in its array. On any other rank they are scratch memory for its own block and for those
    that it forwards; if it forwards none, its array itself.
    """
    gather, rank = arrays.collective == "gather", arrays.rank
    own, whole = (arrays.source, arrays.target) if gather else (arrays.target, arrays.source)
    if whole is not None:
        offsets = displacements(arrays.counts)
    else:
        assert own is not None
        used = {rank}
        for one in schedule.rounds:
            used.update(*(send.chunks for send in one.sends), *(recv.chunks for recv in one.recvs))
        offsets = displacements(count if chunk in used else 0 for chunk, count in enumerate(arrays.counts))
        whole = own if len(used) == 1 else empty_beside(own, offsets[-1])
    block = whole[offsets[rank] : offsets[rank + 1]]
    if gather:
        arrays.bind_input(block)
    else:
        arrays.bind_result(block)
    return [Region(whole, offsets)]


def _alltoall_regions(arrays: CollectiveArrays, schedule: Schedule) -> list[Region]:
    assert arrays.source is not None
    assert arrays.target is not None
    leave = displacements(arrays.counts)
    regions = [Region(arrays.source, leave), Region(arrays.target, displacements(arrays.arrivals))]
    if schedule.scratch:
        # Only algorithms for equal blocks use scratch memory.
        ends = displacements([leave[1]] * schedule.scratch)
        regions.append(Region(empty_beside(arrays.source, ends[-1]), ends))
    return regions


_REGIONS: dict[str, Callable[[CollectiveArrays, Schedule], list[Region]]] = {
    "exscan": _exscan_regions,
    "allgather": _allgather_regions,
    "reduce_scatter": _reduce_scatter_regions,
    "gather": _rooted_regions,
    "scatter": _rooted_regions,
    "alltoall": _alltoall_regions,
    "barrier": lambda arrays, schedule: [],
}


def _op(arrays: CollectiveArrays) -> str:
    return "" if arrays.reduction is None else arrays.reduction.native or ""


def _sizes(arrays: CollectiveArrays) -> tuple[int, ...] | None:
    """Return the elements of the ranks' blocks; None if they are equal."""
    return arrays.counts if len(set(arrays.counts)) > 1 else None


def _native_allreduce(arrays: CollectiveArrays, mpi: Native) -> NativeCall:
    op = _op(arrays)
    return lambda source, target: mpi.allreduce(source, target, op)


def _native_reduce(arrays: CollectiveArrays, mpi: Native) -> NativeCall:
    op, root = _op(arrays), arrays.root
    return lambda source, target: mpi.reduce(source, target, op, root)


def _native_scan(arrays: CollectiveArrays, mpi: Native) -> NativeCall:
    op = _op(arrays)
    return lambda source, target: mpi.scan(source, target, op)


def _native_exscan(arrays: CollectiveArrays, mpi: Native) -> NativeCall:
    op, identity = _op(arrays), arrays.identity
    if arrays.rank > 0 or identity is None:
        return lambda source, target: mpi.exscan(source, target, op)

    def call(source: Array, target: Array) -> None:
        mpi.exscan(source, target, op)
        target[...] = identity

    return call


def _native_reduce_scatter(arrays: CollectiveArrays, mpi: Native) -> NativeCall:
    op, sizes = _op(arrays), _sizes(arrays)
    return lambda source, target: mpi.reduce_scatter(source, target, sizes, op)


def _native_bcast(arrays: CollectiveArrays, mpi: Native) -> NativeCall:
    root = arrays.root
    if arrays.rank != root:
        return lambda source, target: mpi.bcast(target, root)

    def call(source: Array | None, target: Array) -> None:
        if source is None or source is target:
            mpi.bcast(target, root)
            return
        # In this order: the caches of the other ranks do not hold the memory that is written then.
        mpi.bcast(source, root)
        target[...] = source

    return call


def _native_allgather(arrays: CollectiveArrays, mpi: Native) -> NativeCall:
    sizes = _sizes(arrays)
    return lambda source, target: mpi.allgather(source, target, sizes)


def _native_gather(arrays: CollectiveArrays, mpi: Native) -> NativeCall:
    sizes, root = _sizes(arrays), arrays.root
    return lambda source, target: mpi.gather(source, target, sizes, root)


def _native_scatter(arrays: CollectiveArrays, mpi: Native) -> NativeCall:
    sizes, root = _sizes(arrays), arrays.root
    return lambda source, target: mpi.scatter(source, target, sizes, root)


_NATIVE_CALLS: dict[str, Callable[[CollectiveArrays, Native], NativeCall]] = {
    "allreduce": _native_allreduce,
    "reduce": _native_reduce,
    "scan": _native_scan,
    "exscan": _native_exscan,
    "reduce_scatter": _native_reduce_scatter,
    "bcast": _native_bcast,
    "allgather": _native_allgather,
    "gather": _native_gather,
    "scatter": _native_scatter,
    "alltoall": lambda arrays, mpi: mpi.alltoall,
    "barrier": lambda arrays, mpi: lambda source, target: mpi.barrier(),
}
