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
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeAlias

from mpicoll.buffers.device import device_of, empty_beside
from mpicoll.buffers.dtypes import Array
from mpicoll.engine.core.arrays import CollectiveArrays, displacements, even_displacements
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.core.operation import Operation
from mpicoll.engine.diagnostics.position import Position
from mpicoll.engine.selection.query import DeviceCapabilities, SelectionQuery

_PhaseStep: TypeAlias = tuple[Callable[[], None], bool]
"""Function to call, and True if other ranks wait for this rank in it."""


class HierarchicalCollective:
    """Collective in phases; called in queue order, because communicators are created at first use. `bind` binds the
    operation of a phase to its algorithm."""

    def __init__(self, operation: Operation, bind: Callable[[Operation], Callable[[], None]]) -> None:
        self._operation = operation
        self._bind = bind
        # Phases are chosen in the first run, on any thread, but all ranks must make the same choice.
        self._context = copy_context()
        self._phases: _Phases | None = None

    def __call__(self) -> None:
        if self._phases is None:
            self._phases = self._context.run(_Phases, self._operation, self._bind)
        self._phases.run()


class _Phases:
    """Operation as the steps of this rank."""

    def __init__(self, operation: Operation, bind: Callable[[Operation], Callable[[], None]]) -> None:
        comm, arrays = operation.comm, operation.arrays
        self.comm = comm
        self.arrays = arrays
        self._query = operation.query
        self._bind = bind
        self.node, self.lane = comm.levels()
        self.ranks = _ranks_by_node(comm.nodes)
        self.root_node = comm.nodes[arrays.root]
        self.root_lane = self.ranks[self.root_node].index(arrays.root)
        self.failure: BaseException | None = None
        self._steps: list[_PhaseStep] = []
        self._at = 0
        _PHASES[arrays.collective](self)

    def run(self) -> None:
        """Carry out the steps. After a failure this rank still enters the steps with other ranks and fails in them, to
        release these ranks, as far as an operation that fails before it begins releases them."""
        executing = self.comm.queue.executing
        outer, executing.executor = executing.executor, self
        try:
            for number, (step, communicates) in enumerate(self._steps):
                self._at = number
                if self.failure is None or communicates:
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
        communicating = [number for number, (_, communicates) in enumerate(self._steps) if communicates]
        if self._at not in communicating:
            return Position(f"between the {len(communicating)} phases")
        phase = f"phase {communicating.index(self._at) + 1} of {len(communicating)}"
        for level in (self.node, self.lane):
            inner = level.queue.executing.position(level.members)
            if inner.where:
                return inner._replace(where=f"{phase}: {inner.where}")
        return Position(phase)

    def check(self) -> None:
        """Raise the earlier failure, if any."""
        if self.failure is not None:
            raise self.failure

    def add_local_step(self, step: Callable[[], None]) -> None:
        """Add a step of this rank alone."""
        self._steps.append((step, False))

    def add_phase(
        self,
        comm: CommunicatorCore,
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
        query = self._query
        reduction = self.arrays.reduction if collective in ("allreduce", "reduce", "reduce_scatter") else None
        kind = "float" if query.kind == "half" else query.kind
        arrays = CollectiveArrays(
            collective, comm.rank, source, target, tuple(counts), root, reduction, spare, load=self.check
        )
        sample = source if target is None else target
        assert sample is not None
        device = device_of(sample)
        phase_query = SelectionQuery(
            collective,
            sum(counts) * sample.itemsize,
            comm.context,
            "moved" if reduction is None else kind,
            root,
            uneven=len(set(counts)) > 1,
            native=query.native,
            no_shm_reason=comm.no_shm_reason,
            no_cma_reason=comm.no_cma_reason,
            # The capabilities are looked up when the phase runs.
            device=None if device is None else DeviceCapabilities(),
        )
        if collective == "alltoall":
            arrays.arrivals = arrays.counts
        self._steps.append((self._bind(Operation(comm, phase_query, None, arrays, on=device)), True))


@lru_cache(maxsize=64)
def _ranks_by_node(nodes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    ranks: list[list[int]] = [[] for _ in range(max(nodes) + 1)]
    for rank, node in enumerate(nodes):
        ranks[node].append(rank)
    return tuple(map(tuple, ranks))


class _PackedBlocks:
    """Blocks of all ranks, grouped by lane, in the order of nodes."""

    def __init__(self, phases: _Phases, counts: Sequence[int]) -> None:
        ranks, nodes = phases.ranks, len(phases.ranks)
        order = [node[local] for local in range(len(ranks[0])) for node in ranks]
        offsets = displacements(counts)
        ends = displacements(counts[rank] for rank in order)
        self._unpacked = [slice(offsets[rank], offsets[rank + 1]) for rank in order]
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
            for place, at in zip(self._unpacked, self._packed, strict=True):
                packed[at] = blocks[place]

    def unpack(self, packed: Array, blocks: Array) -> None:
        if packed is not blocks:
            for place, at in zip(self._unpacked, self._packed, strict=True):
                blocks[place] = packed[at]


def _get_shares(phases: _Phases, array: Array) -> tuple[list[int], Array]:
    """Return the elements of each local rank's share of a vector, and this rank's own share."""
    offsets = even_displacements(array.size, phases.comm.local_size)
    local = phases.comm.local_rank
    counts = [stop - start for start, stop in pairwise(offsets)]
    return counts, array[offsets[local] : offsets[local + 1]]


def _get_arrays(phases: _Phases) -> tuple[Any, Any]:
    """Return the input and the output of a collective that moves data: their types can't express on which rank they
    are None."""
    return phases.arrays.source, phases.arrays.target


def _load_operand(phases: _Phases) -> tuple[Array, Array]:
    """Add a step that converts this rank's operand to the dtype of the reduction. Return the array that holds the
    converted operand, which may be the caller's own memory, and the memory for the vector, which may be the same array.
    """
    source, spare = phases.arrays.source, phases.arrays.spare
    assert source is not None
    assert spare is not None
    phases.add_local_step(phases.arrays.load)
    return source, spare


def _allreduce(phases: _Phases) -> None:
    """Add the phases: reduce_scatter and allgather in the node. Between nodes, each rank handles n/L of n bytes."""
    source, array = _load_operand(phases)
    counts, own = _get_shares(phases, array)
    phases.add_phase(phases.node, "reduce_scatter", source, own, counts, spare=array)
    phases.add_phase(phases.lane, "allreduce", own, own, [own.size])
    phases.add_phase(phases.node, "allgather", own, array, counts)
    phases.add_local_step(phases.arrays.store)


def _reduce(phases: _Phases) -> None:
    source, array = _load_operand(phases)
    counts, own = _get_shares(phases, array)
    on_root_node = phases.comm.node == phases.root_node
    phases.add_phase(phases.node, "reduce_scatter", source, own, counts, spare=array)
    phases.add_phase(phases.lane, "reduce", own, own if on_root_node else None, [own.size], phases.root_node)
    if on_root_node:
        whole = array if phases.comm.local_rank == phases.root_lane else None
        phases.add_phase(phases.node, "gather", own, whole, counts, phases.root_lane)
    phases.add_local_step(phases.arrays.store)


def _bcast(phases: _Phases) -> None:
    source, array = _get_arrays(phases)
    counts, own = _get_shares(phases, array)
    on_root_node = phases.comm.node == phases.root_node
    phases.add_local_step(phases.arrays.load)
    if on_root_node:
        phases.add_phase(phases.node, "scatter", source, own, counts, phases.root_lane)
    phases.add_phase(phases.lane, "bcast", own if on_root_node else None, own, [own.size], phases.root_node)
    phases.add_phase(phases.node, "allgather", own, array, counts)
    phases.add_local_step(phases.arrays.store)


def _reduce_scatter(phases: _Phases) -> None:
    """In the node, each rank reduces what its lane is to get."""
    source, array = _load_operand(phases)
    blocks = _PackedBlocks(phases, phases.arrays.counts)
    packed, spare = blocks.memory(source), blocks.memory(array)
    lane_blocks = blocks.own(spare)
    phases.add_local_step(lambda: blocks.pack(source, packed))
    phases.add_phase(phases.node, "reduce_scatter", packed, lane_blocks, blocks.lanes, spare=spare)
    phases.add_phase(phases.lane, "reduce_scatter", lane_blocks, phases.arrays.target, blocks.lane)
    phases.add_local_step(phases.arrays.store)


def _allgather(phases: _Phases) -> None:
    source, target = _get_arrays(phases)
    blocks = _PackedBlocks(phases, phases.arrays.counts)
    packed = blocks.memory(target)
    lane_blocks = blocks.own(packed)
    phases.add_local_step(phases.arrays.load)
    phases.add_phase(phases.lane, "allgather", source, lane_blocks, blocks.lane)
    phases.add_phase(phases.node, "allgather", lane_blocks, packed, blocks.lanes)
    phases.add_local_step(lambda: blocks.unpack(packed, target))
    phases.add_local_step(phases.arrays.store)


def _gather(phases: _Phases) -> None:
    source, target = _get_arrays(phases)
    blocks = _PackedBlocks(phases, phases.arrays.counts)
    packed = None if target is None else blocks.memory(target)
    lane_blocks = None
    if phases.comm.node == phases.root_node:
        lane_blocks = empty_beside(source, sum(blocks.lane)) if packed is None else blocks.own(packed)
    phases.add_local_step(phases.arrays.load)
    phases.add_phase(phases.lane, "gather", source, lane_blocks, blocks.lane, phases.root_node)
    if lane_blocks is not None:
        phases.add_phase(phases.node, "gather", lane_blocks, packed, blocks.lanes, phases.root_lane)
    if packed is not None:
        phases.add_local_step(lambda: blocks.unpack(packed, target))
    phases.add_local_step(phases.arrays.store)


def _scatter(phases: _Phases) -> None:
    source, target = _get_arrays(phases)
    blocks = _PackedBlocks(phases, phases.arrays.counts)
    packed = None if source is None else blocks.memory(source)
    lane_blocks = None
    phases.add_local_step(phases.arrays.load)
    if packed is not None:
        phases.add_local_step(lambda: blocks.pack(source, packed))
    if phases.comm.node == phases.root_node:
        # Apart at the root too: `packed` may be the caller's input.
        lane_blocks = empty_beside(target, sum(blocks.lane))
        phases.add_phase(phases.node, "scatter", packed, lane_blocks, blocks.lanes, phases.root_lane)
    phases.add_phase(phases.lane, "scatter", lane_blocks, target, blocks.lane, phases.root_node)
    phases.add_local_step(phases.arrays.store)


def _alltoall(phases: _Phases) -> None:
    """In the node, each rank gets what is for its lane: so as many bytes leave the node, in fewer messages."""
    source, target = _get_arrays(phases)
    blocks = _PackedBlocks(phases, phases.arrays.counts)
    nodes, local, each = len(phases.ranks), phases.comm.local_size, phases.arrays.counts[0]
    packed = blocks.memory(source)
    # As [rank of the node that it comes from, node that it goes to], and the other way round; then [node that it
    # comes from, rank of that node].
    by_rank, by_node, arrived = (empty_beside(source, source.size) for _ in range(3))
    phases.add_local_step(phases.arrays.load)
    phases.add_local_step(lambda: blocks.pack(source, packed))
    phases.add_phase(phases.node, "alltoall", packed, by_rank, [nodes * each] * local)
    phases.add_local_step(lambda: _transpose(by_rank, by_node, local, nodes))
    phases.add_phase(phases.lane, "alltoall", by_node, arrived, [local * each] * nodes)
    phases.add_local_step(lambda: _transpose(arrived, by_rank, nodes, local))
    phases.add_local_step(lambda: blocks.unpack(by_rank, target))
    phases.add_local_step(phases.arrays.store)


def _transpose(source: Array, target: Array, rows: int, columns: int) -> None:
    """Transpose a matrix of blocks."""
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
