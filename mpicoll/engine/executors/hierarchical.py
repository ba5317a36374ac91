"""Collectives of several nodes with equal numbers of ranks: ``hierarchical``.

The ranks of a node divide the data among them, each rank exchanges its part with the ranks of equal local rank on the
other nodes, and the results are distributed within the node. So the ranks of a node share its link, and no byte crosses
it more often than necessary.

Each phase is a separate operation, on the communicator of the node or on that of the lane (the ranks of equal local
rank on all nodes), for which an algorithm is chosen as for any other operation. Reductions are carried out in the dtype
of the reduction throughout, and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from mpicoll.buffers.device import device_of, empty_beside
from mpicoll.buffers.dtypes import Array
from mpicoll.buffers.ops import Fold, Reduction
from mpicoll.engine.core.communicator import Communicator
from mpicoll.engine.diagnostics.position import Position
from mpicoll.engine.executors import device as devices
from mpicoll.engine.executors.schedule import Region, cut, extents
from mpicoll.engine.operation import Flat, Operation, carrier, chosen
from mpicoll.engine.selection.query import SelectionQuery
from mpicoll.schedules import Schedule
from mpicoll.transport.base import Native

_Step: TypeAlias = tuple[Callable[[], None], bool]
"""Function to call, and True if other ranks wait for this rank in it."""


def hierarchical(operation: Operation) -> Callable[[], None]:
    """Return a function that carries out `operation` each time that it is called. Called in queue order, because
    communicators are created at first use."""
    # Phases are chosen in the first run, on any thread, but all ranks must make the same choice.
    context = copy_context()
    ready: _Phases | None = None

    def run() -> None:
        nonlocal ready
        if ready is None:
            ready = context.run(_Phases, operation)
        ready.run()

    return run


class _Phases:
    """Operation as the steps of this rank.

    On every rank `source` is its input and `target` its output; each is None where the collective has none on this
    rank.
    """

    def __init__(self, operation: Operation) -> None:
        comm, problem = operation.comm, operation.problem
        self.comm = comm
        self.operation = operation
        self.node, self.lane = comm.levels()
        self.ranks = _ranks_by_node(comm.nodes)
        self.root_node = comm.nodes[problem.root]
        self.root_lane = self.ranks[self.root_node].index(problem.root)
        self.failure: BaseException | None = None
        self._steps: list[_Step] = []
        self._at = 0
        _PHASES[problem.collective](self)

    def run(self) -> None:
        """Carry out the steps. After a failure on this rank, it still enters the joint steps and fails in them, to
        release the other ranks, as far as an operation that fails before it begins releases them."""
        executing = self.comm.progress.executing
        outer, executing.executor = executing.executor, self
        try:
            for number, (step, joint) in enumerate(self._steps):
                self._at = number
                if self.failure is None or joint:
                    try:
                        step()
                    except BaseException as error:  # noqa: BLE001  raised below
                        self.failure = self.failure or error
        finally:
            executing.executor = outer
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    def position(self, members: Sequence[int]) -> Position:
        """Return the current phase and the position in it."""
        joint = [number for number, (_, joint) in enumerate(self._steps) if joint]
        if self._at not in joint:
            return Position(f"between the {len(joint)} phases")
        phase = f"phase {joint.index(self._at) + 1} of {len(joint)}"
        for level in (self.node, self.lane):
            inner = level.progress.executing.position(level.members)
            if inner.where:
                return replace(inner, where=f"{phase}: {inner.where}")
        return Position(phase)

    def check(self) -> None:
        """Raise the earlier failure, if any."""
        if self.failure is not None:
            raise self.failure

    def alone(self, step: Callable[[], None]) -> None:
        """Add a step of this rank alone."""
        self._steps.append((step, False))

    def phase(
        self,
        comm: Communicator,
        collective: str,
        source: Array | None,
        target: Array | None,
        counts: Sequence[int],
        root: int = 0,
        spare: Array | None = None,
    ) -> None:
        """Add a collective of `comm`. `counts` are the elements of the blocks, or of the vector alone. If `source` and
        `target` overlap, one must be the other or its part for this rank. A reduction may write to its `source`, unless
        `spare` memory is passed for that."""
        whole = self.operation.problem
        reduction = self.operation.reduction if collective in ("allreduce", "reduce", "reduce_scatter") else None
        kind = "float" if whole.kind == "half" else whole.kind
        some = source if target is None else target
        assert some is not None
        device = device_of(some)
        problem = SelectionQuery(
            collective,
            sum(counts) * some.itemsize,
            comm.context,
            "moved" if reduction is None else kind,
            root,
            uneven=len(set(counts)) > 1,
            native=whole.native,
            unshared=comm.unshared,
            unread=comm.unread,
            device=None if device is None else devices.reach(comm, device, collective, reduction),
        )
        part = _Part(comm.rank, collective, source, target, tuple(counts), root, reduction, self.check, spare)
        operation = Operation(
            comm,
            problem,
            None,
            native=part.native,
            regions=part.regions,
            result=lambda: None,
            flat=part.flat,
            combine=None if reduction is None else reduction.combine,
            load=part.load,
            store=part.store,
            reduction=reduction,
            on=device,
        )
        self._steps.append((carrier(operation, chosen(operation)), True))


@lru_cache(maxsize=64)
def _ranks_by_node(nodes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    ranks: list[list[int]] = [[] for _ in range(max(nodes) + 1)]
    for rank, node in enumerate(nodes):
        ranks[node].append(rank)
    return tuple(map(tuple, ranks))


@dataclass(slots=True)
class _Part:
    """Arrays of a phase, for any algorithm that carries it out."""

    rank: int
    collective: str
    source: Array | None
    target: Array | None
    counts: tuple[int, ...]
    root: int
    reduction: Reduction | None
    check: Callable[[], None]
    spare: Array | None
    block: Any = None
    """Position of this rank's block in a schedule's memory, which holds the blocks of all ranks."""

    def flat(self) -> Flat:
        fold = None if self.reduction is None else Fold(self.reduction)
        return Flat(self.source, self.target, self.counts, fold, load=self.check)

    def regions(self, schedule: Schedule) -> list[Region]:
        source: Any = self.source
        target: Any = self.target
        offsets = extents(self.counts)
        if self.collective in ("allreduce", "reduce", "bcast"):
            vector = source if target is None else target
            return [Region(vector, cut(vector.size, schedule.chunks))]
        if self.collective == "alltoall":
            ends = extents([offsets[1]] * schedule.scratch)
            scratch = [Region(empty_beside(source, ends[-1]), ends)] if schedule.scratch else []
            return [Region(source, offsets), Region(target, offsets), *scratch]
        whole = target
        if self.collective in ("reduce_scatter", "scatter"):
            whole = source if self.spare is None else self.spare
        if whole is None:
            whole = empty_beside(target if source is None else source, offsets[-1])
        self.block = whole[offsets[self.rank] : offsets[self.rank + 1]]
        return [Region(whole, offsets)]

    def load(self) -> None:
        self.check()
        if self.collective in ("allgather", "gather"):
            self.block[...] = self.source
        elif self.spare is not None and self.spare is not self.source:
            self.spare[...] = self.source

    def store(self) -> None:
        if self.collective in ("reduce_scatter", "scatter"):
            assert self.target is not None
            self.target[...] = self.block

    def native(self, mpi: Native) -> None:
        self.check()
        source: Any = self.source
        target: Any = self.target
        counts = self.counts if len(set(self.counts)) > 1 else None
        name = self.reduction.native or "" if self.reduction is not None else ""
        if self.collective == "allreduce":
            mpi.allreduce(source, target, name)
            return
        if self.collective == "reduce":
            mpi.reduce(source, target, name, self.root)
            return
        if self.collective == "bcast":
            mpi.bcast(target, self.root)
            return
        if self.collective == "alltoall":
            mpi.alltoall(source, target)
            return
        # MPI wants the two apart.
        if source is not None and target is not None and np.may_share_memory(source, target):
            source, apart = empty_beside(source, source.size), source
            np.copyto(source, apart)
        if self.collective == "reduce_scatter":
            mpi.reduce_scatter(source, target, counts, name)
        elif self.collective == "allgather":
            mpi.allgather(source, target, counts)
        elif self.collective == "gather":
            mpi.gather(source, target, counts, self.root)
        else:
            mpi.scatter(source, target, counts, self.root)


class _Packed:
    """Blocks of all ranks, grouped by lane, in the order of nodes."""

    def __init__(self, phases: _Phases, counts: Sequence[int]) -> None:
        ranks, nodes = phases.ranks, len(phases.ranks)
        order = [node[local] for local in range(len(ranks[0])) for node in ranks]
        offsets = extents(counts)
        ends = extents(counts[rank] for rank in order)
        self._places = [slice(offsets[rank], offsets[rank + 1]) for rank in order]
        self._packed = [slice(*extent) for extent in pairwise(ends)]
        # With ranks placed round-robin on the nodes, the blocks are in this order already.
        self._in_order = order == sorted(order)
        self.starts = ends[::nodes]
        self.lanes = [stop - start for start, stop in pairwise(self.starts)]
        self.lane = [counts[node[phases.comm.local_rank]] for node in ranks]
        self._own = slice(*self.starts[phases.comm.local_rank : phases.comm.local_rank + 2])

    def memory(self, blocks: Array) -> Array:
        """Return memory for the packed blocks: `blocks` itself if the order of ranks is the packed order."""
        return blocks if self._in_order else empty_beside(blocks, blocks.size)

    def own(self, packed: Array) -> Array:
        """Return the blocks of this rank's lane."""
        return packed[self._own]

    def pack(self, blocks: Array, packed: Array) -> None:
        if packed is not blocks:
            for place, at in zip(self._places, self._packed, strict=True):
                packed[at] = blocks[place]

    def unpack(self, packed: Array, blocks: Array) -> None:
        if packed is not blocks:
            for place, at in zip(self._places, self._packed, strict=True):
                blocks[place] = packed[at]


def _shares(phases: _Phases, array: Array) -> tuple[list[int], Array]:
    """Return the elements of each local rank's share of a vector, and this rank's own share."""
    offsets = cut(array.size, phases.comm.local_size)
    local = phases.comm.local_rank
    counts = [stop - start for start, stop in pairwise(offsets)]
    return counts, array[offsets[local] : offsets[local + 1]]


def _flat(phases: _Phases) -> tuple[Flat, Any, Any]:
    """Return the arrays of the operation, and its input and output: their types can't express on which rank they are
    None."""
    assert phases.operation.flat is not None
    flat = phases.operation.flat()
    return flat, flat.source, flat.target


def _operand(phases: _Phases) -> tuple[Array, Array]:
    """Add a step that converts this rank's operand to the dtype of the reduction. Return the array that holds the
    converted operand, which may be the caller's own memory, and the memory for the vector, which may be the same array.
    """
    flat, source, _ = _flat(phases)
    work = phases.operation.work
    assert work is not None
    direct = source.dtype == work.dtype
    phases.alone(flat.load if direct else phases.operation.load)
    return (source if direct else work), work


def _allreduce(phases: _Phases) -> None:
    """Add the phases: reduce_scatter and allgather in the node. Between nodes, each rank handles n/L of n bytes."""
    source, array = _operand(phases)
    counts, own = _shares(phases, array)
    phases.phase(phases.node, "reduce_scatter", source, own, counts, spare=array)
    phases.phase(phases.lane, "allreduce", own, own, [own.size])
    phases.phase(phases.node, "allgather", own, array, counts)
    phases.alone(phases.operation.store)


def _reduce(phases: _Phases) -> None:
    source, array = _operand(phases)
    counts, own = _shares(phases, array)
    here = phases.comm.node == phases.root_node
    phases.phase(phases.node, "reduce_scatter", source, own, counts, spare=array)
    phases.phase(phases.lane, "reduce", own, own if here else None, [own.size], phases.root_node)
    if here:
        whole = array if phases.comm.local_rank == phases.root_lane else None
        phases.phase(phases.node, "gather", own, whole, counts, phases.root_lane)
    phases.alone(phases.operation.store)


def _bcast(phases: _Phases) -> None:
    flat, source, array = _flat(phases)
    counts, own = _shares(phases, array)
    here = phases.comm.node == phases.root_node
    phases.alone(flat.load)
    if here:
        phases.phase(phases.node, "scatter", source, own, counts, phases.root_lane)
    phases.phase(phases.lane, "bcast", own if here else None, own, [own.size], phases.root_node)
    phases.phase(phases.node, "allgather", own, array, counts)
    phases.alone(flat.store)


def _reduce_scatter(phases: _Phases) -> None:
    """In the node, each rank reduces what its lane is to get."""
    source, array = _operand(phases)
    counts, rank = _flat(phases)[0].counts, phases.comm.rank
    blocks = _Packed(phases, counts)
    packed, spare = blocks.memory(source), blocks.memory(array)
    mine, begin = blocks.own(spare), sum(counts[:rank])
    phases.alone(lambda: blocks.pack(source, packed))
    phases.phase(phases.node, "reduce_scatter", packed, mine, blocks.lanes, spare=spare)
    phases.phase(phases.lane, "reduce_scatter", mine, array[begin : begin + counts[rank]], blocks.lane)
    phases.alone(phases.operation.store)


def _allgather(phases: _Phases) -> None:
    flat, source, target = _flat(phases)
    blocks = _Packed(phases, flat.counts)
    packed = blocks.memory(target)
    mine = blocks.own(packed)
    phases.alone(flat.load)
    phases.phase(phases.lane, "allgather", source, mine, blocks.lane)
    phases.phase(phases.node, "allgather", mine, packed, blocks.lanes)
    phases.alone(lambda: blocks.unpack(packed, target))
    phases.alone(flat.store)


def _gather(phases: _Phases) -> None:
    flat, source, target = _flat(phases)
    blocks = _Packed(phases, flat.counts)
    packed = None if target is None else blocks.memory(target)
    mine = None
    if phases.comm.node == phases.root_node:
        mine = empty_beside(source, sum(blocks.lane)) if packed is None else blocks.own(packed)
    phases.alone(flat.load)
    phases.phase(phases.lane, "gather", source, mine, blocks.lane, phases.root_node)
    if mine is not None:
        phases.phase(phases.node, "gather", mine, packed, blocks.lanes, phases.root_lane)
    if packed is not None:
        phases.alone(lambda: blocks.unpack(packed, target))
    phases.alone(flat.store)


def _scatter(phases: _Phases) -> None:
    flat, source, target = _flat(phases)
    blocks = _Packed(phases, flat.counts)
    packed = None if source is None else blocks.memory(source)
    mine = None
    phases.alone(flat.load)
    if packed is not None:
        phases.alone(lambda: blocks.pack(source, packed))
    if phases.comm.node == phases.root_node:
        # Apart at the root too: `packed` may be the caller's input.
        mine = empty_beside(target, sum(blocks.lane))
        phases.phase(phases.node, "scatter", packed, mine, blocks.lanes, phases.root_lane)
    phases.phase(phases.lane, "scatter", mine, target, blocks.lane, phases.root_node)
    phases.alone(flat.store)


def _alltoall(phases: _Phases) -> None:
    """In the node, each rank gets what is for its lane: so as many bytes leave the node, in fewer messages."""
    flat, source, target = _flat(phases)
    blocks = _Packed(phases, flat.counts)
    nodes, local, each = len(phases.ranks), phases.comm.local_size, flat.counts[0]
    packed = blocks.memory(source)
    # As [rank of the node that it comes from, node that it goes to], and the other way round; then [node that it
    # comes from, rank of that node].
    by_rank, by_node, arrived = (empty_beside(source, source.size) for _ in range(3))
    phases.alone(flat.load)
    phases.alone(lambda: blocks.pack(source, packed))
    phases.phase(phases.node, "alltoall", packed, by_rank, [nodes * each] * local)
    phases.alone(lambda: _transpose(by_rank, by_node, local, nodes))
    phases.phase(phases.lane, "alltoall", by_node, arrived, [local * each] * nodes)
    phases.alone(lambda: _transpose(arrived, by_rank, nodes, local))
    phases.alone(lambda: blocks.unpack(by_rank, target))
    phases.alone(flat.store)


def _transpose(source: Array, target: Array, rows: int, columns: int) -> None:
    """Of a matrix of blocks."""
    shape = (source.size // (rows * columns),)
    target.reshape(columns, rows, *shape)[...] = source.reshape(rows, columns, *shape).swapaxes(0, 1)


_PHASES: dict[str, Callable[[_Phases], None]] = {
    "allreduce": _allreduce,
    "reduce": _reduce,
    "bcast": _bcast,
    "reduce_scatter": _reduce_scatter,
    "allgather": _allgather,
    "gather": _gather,
    "scatter": _scatter,
    "alltoall": _alltoall,
}
