"""Collectives of several nodes with equal numbers of ranks: ``hierarchical``.

The ranks of a node divide the data among them, each rank exchanges its part with the ranks of equal local rank on the
other nodes, and the results are distributed within the node. So the ranks of a node share its link, and no byte crosses
it more often than necessary.

Each phase is a separate operation, on the communicator of the node or on that of the lane (the ranks of equal local
rank on all nodes), for which an algorithm is chosen as for any other operation. Reductions are carried out in the dtype
of the reduction throughout, and rounded once.

Large data is cut into pieces, each of which goes through all phases. While some pieces travel between the nodes, by
schedules, the ranks of a node reduce or distribute others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import count, pairwise
from typing import Any

from mpicoll.buffers.device import device_of, empty_beside
from mpicoll.buffers.dtypes import Array
from mpicoll.engine.core.arrays import CollectiveArrays, even_displacements
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.core.operation import Operation
from mpicoll.engine.diagnostics.position import Position
from mpicoll.engine.executors.packed_blocks import PackedBlocks, cut
from mpicoll.engine.executors.phased import BindPhase
from mpicoll.engine.executors.schedule import ScheduledOperation
from mpicoll.engine.selection.query import DeviceCapabilities, SelectionQuery
from mpicoll.engine.selection.selector import Choice, choose, is_decided
from mpicoll.named_tuple import NamedTuple
from mpicoll.schedules import Algorithm

PIECE = 128 * 1024
"""Least bytes of a piece that a rank exchanges with each of the nodes by a schedule. Fewer take longer than in
collectives of MPI."""

_MAX_PIECES = 32
"""Most pieces of an operation. Larger operations have larger pieces. The links are idle while the ranks of a node
reduce the first piece, and while they distribute the last one."""

_IN_FLIGHT = 8
"""Pieces that travel between the nodes at a time. In each, the ranks of a node wait for each other twice, for as long
as it takes until the last one has a core: what they have begun to send has to last for that."""

_LANE_ALGORITHMS = {
    "allreduce": "ring",
    "reduce": "chain",
    "bcast": "chain/1",
    "reduce_scatter": "pairwise",
    "allgather": "ring",
    "gather": "linear",
    "scatter": "linear",
    "alltoall": "pairwise",
}
"""Schedules of pieces between nodes, unless others are forced or tuned: no link carries more than it has to. That of
a broadcast has one segment: its message is cut anyway, and at most two rounds of a schedule are under way at a time."""


class _PhaseStep(NamedTuple):
    run: Callable[[], None]
    communicates: bool
    """True if other ranks wait for this rank in it."""
    where: str
    is_lane: bool = False
    """True if it exchanges data with the other nodes."""


class HierarchicalPhases:
    """The phases of a collective, as the steps of this rank."""

    def __init__(self, operation: Operation, bind: BindPhase) -> None:
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
        self._memory: dict[tuple[str, int], Array] = {}
        self.pieces = 1
        self._streams = False
        if operation.on is None and operation.query.elementwise:
            share = (operation.query.nbytes or 0) // comm.size
            self.pieces = max(1, min(_MAX_PIECES, share // PIECE))
            self._streams = share >= PIECE
        # The steps of the pieces that have been made; and the operations between nodes that have begun, in order.
        self._parts: list[list[_PhaseStep]] = []
        self._travelling: list[ScheduledOperation] = []
        self._at = 0
        # Those to carry out, and what makes the others in the first run, while earlier pieces travel.
        self._steps = [_local(arrays.load)]
        self._unmade = self._make_steps()

    def _make_steps(self) -> Iterator[_PhaseStep]:
        """Yield the steps of all pieces. Each begins to travel before an earlier one is waited for."""
        lanes: list[int] = []
        ahead = _IN_FLIGHT if self._streams else 0
        for now in range(self.pieces + ahead):
            if now < self.pieces:
                self._parts.append([])
                _PHASES[self.arrays.collective](self, now)
                lanes.append(next(at for at, step in enumerate(self._parts[now]) if step.is_lane))
                yield from self._parts[now][: lanes[now] + 1]
            if now >= ahead:
                part, at = self._parts[now - ahead], lanes[now - ahead]
                if self._streams:
                    yield part[at]._replace(run=self._await_first)
                yield from part[at + 1 :]
        yield _local(self.arrays.store)

    def run(self) -> None:
        """Carry out the steps. After a failure this rank still enters the steps with other ranks and fails in them, to
        release these ranks, as far as an operation that fails before it begins releases them. There is no other run
        then: steps may be missing."""
        executing = self.comm.queue.executing
        outer, executing.executor = executing.executor, self
        try:
            for number in count():
                if number == len(self._steps):
                    made = next(self._unmade, None)
                    if made is None:
                        break
                    self._steps.append(made)
                self._at = number
                step = self._steps[number]
                if self.failure is None or step.communicates:
                    try:
                        step.run()
                    except BaseException as error:  # noqa: BLE001  raised below
                        self.failure = self.failure or error
                        while self._travelling:
                            self._travelling.pop().discard()
        finally:
            executing.executor = outer
            # None is left but after an exception of a signal handler between two steps.
            while self._travelling:
                self._travelling.pop().discard()
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    def position(self, members: Sequence[int]) -> Position:
        """Return the current phase and the position in it."""
        step = self._steps[self._at]
        if not step.communicates:
            return Position(step.where or "between the phases")
        for level in (self.node, self.lane):
            inner = level.queue.executing.position(level.members)
            if inner.where:
                return inner._replace(where=f"{step.where}: {inner.where}")
        return Position(step.where)

    def check(self) -> None:
        """Raise the earlier failure, if any."""
        if self.failure is not None:
            raise self.failure

    def get_scratch(self, name: str, beside: Array, count: int) -> Array:
        """Return memory for `count` elements, the same of each `name` for all pieces: none may use it while it travels.
        What one piece leaves there is in the caches when the next one writes to it."""
        return self._get_memory(name, 0, beside, count)

    def get_travelling(self, name: str, beside: Array, count: int) -> Array:
        """Return memory for `count` elements of the current piece, of each `name`, which it may use until it has passed
        through all phases. Later pieces use it again: memory that a process has not used yet is slow."""
        piece = len(self._parts) - 1
        return self._get_memory(name, piece % (_IN_FLIGHT + 1) if self._streams else 0, beside, count)

    def _get_memory(self, name: str, number: int, beside: Array, count: int) -> Array:
        memory = self._memory.get((name, number))
        if memory is None or memory.size < count:
            memory = self._memory[name, number] = empty_beside(beside, count)
        return memory[:count]

    def add_local_step(self, step: Callable[[], None]) -> None:
        """Add a step of this rank alone."""
        self._parts[-1].append(_local(step))

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
        """Add a collective of `comm` to the current piece. `counts` are the elements of the blocks, or of the vector
        alone. If `source` and `target` overlap, one must be the other or its part for this rank. A reduction may write
        to its `source`, unless `spare` memory is passed for that."""
        query = self._query
        reduction = self.arrays.reduction if collective in ("allreduce", "reduce", "reduce_scatter") else None
        kind = "float" if query.kind == "half" else query.kind
        arrays = CollectiveArrays(
            collective, comm.rank, source, target, tuple(counts), root, reduction, spare, load=self.check
        )
        sample = source if target is None else target
        assert sample is not None
        device = device_of(sample)
        uneven = len(set(counts)) > 1
        phase_query = SelectionQuery(
            collective,
            sum(counts) * sample.itemsize,
            comm.context,
            "moved" if reduction is None else kind,
            root,
            uneven=uneven,
            native=comm.transport.find_native_defect(collective, uneven=uneven) or query.native,
            no_shm_reason=comm.no_shm_reason,
            no_cma_reason=comm.no_cma_reason,
            # The capabilities are looked up when the phase runs.
            device=None if device is None else DeviceCapabilities(),
        )
        if collective == "alltoall":
            arrays.arrivals = arrays.counts
        part = self._parts[-1]
        number = sum(step.communicates for step in part) + 1
        where = f"phase {number} within the node" if comm is self.node else f"phase {number}, between the nodes"
        if self.pieces > 1:
            where = f"piece {len(self._parts)} of {self.pieces}, {where}"
        operation = Operation(comm, phase_query, None, arrays, on=device)
        if self._streams and comm is self.lane:
            lane = ScheduledOperation(operation, _choose_schedule(phase_query), comm.transport, streamed=True)
            run: Callable[[], None] = partial(self._begin, lane)
        else:
            run = self._bind(operation)
        part.append(_PhaseStep(run, True, where, comm is self.lane))

    def _begin(self, operation: ScheduledOperation) -> None:
        """Begin an operation between the nodes, and let earlier ones advance."""
        self._travelling.append(operation)
        operation.start()
        self._advance()

    def _advance(self) -> bool:
        """Let the operations between the nodes advance. Return True if the oldest one has nothing to wait for."""
        first, *_ = [operation.advance() for operation in self._travelling]
        return first

    def _await_first(self) -> None:
        """Complete the oldest operation between the nodes, while the others advance."""
        self.check()
        operation, *others = self._travelling
        operation.wait(others)
        operation.finish()
        del self._travelling[0]


def _local(step: Callable[[], None]) -> _PhaseStep:
    return _PhaseStep(step, False, "")


def _choose_schedule(query: SelectionQuery) -> Choice:
    """Return the schedule for a piece between the nodes."""
    if is_decided(query):
        choice = choose(query, None)
        if isinstance(choice.algorithm, Algorithm):
            return choice
    name, nodes = _LANE_ALGORITHMS[query.collective], query.context.layout.ranks
    if query.collective == "allreduce" and nodes & (nodes - 1) == 0:
        # As many bytes in fewer rounds. Between two nodes in a single one, in which no message waits for another.
        name = "recursive_doubling" if nodes == 2 else "halving_doubling"
    return choose(query, name)


@lru_cache(maxsize=64)
def _ranks_by_node(nodes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    ranks: list[list[int]] = [[] for _ in range(max(nodes) + 1)]
    for rank, node in enumerate(nodes):
        ranks[node].append(rank)
    return tuple(map(tuple, ranks))


def _get_piece(phases: HierarchicalPhases, piece: int, array: Any) -> Any:
    """Return a piece of a vector, which is None where a rank has none."""
    return None if array is None else array[cut(slice(0, array.size), phases.pieces)[piece]]


def _pack_blocks(phases: HierarchicalPhases, piece: int) -> PackedBlocks:
    return PackedBlocks(phases.ranks, phases.comm.rank, phases.arrays.counts, phases.pieces, piece)


def _get_shares(phases: HierarchicalPhases, array: Array) -> tuple[list[int], Array]:
    """Return the elements of each local rank's share of a vector, and this rank's own share."""
    offsets = even_displacements(array.size, phases.comm.local_size)
    local = phases.comm.local_rank
    counts = [stop - start for start, stop in pairwise(offsets)]
    return counts, array[offsets[local] : offsets[local + 1]]


def _get_arrays(phases: HierarchicalPhases) -> tuple[Any, Any]:
    """Return the input and the output of a collective that moves data; their types don't say which ranks have none."""
    return phases.arrays.source, phases.arrays.target


def _get_operand(phases: HierarchicalPhases) -> tuple[Array, Array]:
    """Return this rank's operand in the dtype of the reduction, and the memory for the result, perhaps the same."""
    source, spare = phases.arrays.source, phases.arrays.spare
    assert source is not None
    assert spare is not None
    return source, spare


def _allreduce(phases: HierarchicalPhases, piece: int) -> None:
    """Add the phases: reduce_scatter and allgather in the node. Between nodes, each rank handles n/L of n bytes."""
    source, array = (_get_piece(phases, piece, one) for one in _get_operand(phases))
    counts, own = _get_shares(phases, array)
    phases.add_phase(phases.node, "reduce_scatter", source, own, counts, spare=array)
    phases.add_phase(phases.lane, "allreduce", own, own, [own.size])
    phases.add_phase(phases.node, "allgather", own, array, counts)


def _reduce(phases: HierarchicalPhases, piece: int) -> None:
    source, array = (_get_piece(phases, piece, one) for one in _get_operand(phases))
    counts, own = _get_shares(phases, array)
    on_root_node = phases.comm.node == phases.root_node
    phases.add_phase(phases.node, "reduce_scatter", source, own, counts, spare=array)
    phases.add_phase(phases.lane, "reduce", own, own if on_root_node else None, [own.size], phases.root_node)
    if on_root_node:
        whole = array if phases.comm.local_rank == phases.root_lane else None
        phases.add_phase(phases.node, "gather", own, whole, counts, phases.root_lane)


def _bcast(phases: HierarchicalPhases, piece: int) -> None:
    source, array = (_get_piece(phases, piece, one) for one in _get_arrays(phases))
    counts, own = _get_shares(phases, array)
    on_root_node = phases.comm.node == phases.root_node
    if on_root_node:
        phases.add_phase(phases.node, "scatter", source, own, counts, phases.root_lane)
    phases.add_phase(phases.lane, "bcast", own if on_root_node else None, own, [own.size], phases.root_node)
    phases.add_phase(phases.node, "allgather", own, array, counts)


def _reduce_scatter(phases: HierarchicalPhases, piece: int) -> None:
    """In the node, each rank reduces what its lane is to get."""
    source, array = _get_operand(phases)
    blocks = _pack_blocks(phases, piece)
    packed = source if blocks.in_order else phases.get_scratch("packed", array, sum(blocks.lanes))
    lane_blocks = phases.get_travelling("lane", array, sum(blocks.lane))
    target = phases.arrays.target
    assert target is not None
    phases.add_local_step(lambda: blocks.pack(source, packed))
    spare = array if blocks.in_order else None
    phases.add_phase(phases.node, "reduce_scatter", packed, lane_blocks, blocks.lanes, spare=spare)
    phases.add_phase(phases.lane, "reduce_scatter", lane_blocks, target[blocks.block], blocks.lane)


def _allgather(phases: HierarchicalPhases, piece: int) -> None:
    source, target = _get_arrays(phases)
    blocks = _pack_blocks(phases, piece)
    packed = target if blocks.in_order else phases.get_scratch("packed", target, sum(blocks.lanes))
    lane_blocks = blocks.own(packed) if blocks.in_order else phases.get_travelling("lane", target, sum(blocks.lane))
    phases.add_phase(phases.lane, "allgather", source[blocks.block], lane_blocks, blocks.lane)
    phases.add_phase(phases.node, "allgather", lane_blocks, packed, blocks.lanes)
    phases.add_local_step(lambda: blocks.unpack(packed, target))


def _gather(phases: HierarchicalPhases, piece: int) -> None:
    source, target = _get_arrays(phases)
    blocks = _pack_blocks(phases, piece)
    packed = target
    if target is not None and not blocks.in_order:
        packed = phases.get_travelling("packed", target, sum(blocks.lanes))
    lane_blocks = None
    if phases.comm.node == phases.root_node:
        lane_blocks = phases.get_travelling("lane", source, sum(blocks.lane)) if packed is None else blocks.own(packed)
    phases.add_phase(phases.lane, "gather", source[blocks.block], lane_blocks, blocks.lane, phases.root_node)
    if lane_blocks is not None:
        phases.add_phase(phases.node, "gather", lane_blocks, packed, blocks.lanes, phases.root_lane)
    if packed is not None:
        phases.add_local_step(lambda: blocks.unpack(packed, target))


def _scatter(phases: HierarchicalPhases, piece: int) -> None:
    source, target = _get_arrays(phases)
    blocks = _pack_blocks(phases, piece)
    packed = source
    if source is not None and not blocks.in_order:
        packed = phases.get_scratch("packed", source, sum(blocks.lanes))
        phases.add_local_step(lambda: blocks.pack(source, packed))
    lane_blocks = None
    if phases.comm.node == phases.root_node:
        # Apart at the root too: `packed` may be the caller's input.
        lane_blocks = phases.get_travelling("lane", target, sum(blocks.lane))
        phases.add_phase(phases.node, "scatter", packed, lane_blocks, blocks.lanes, phases.root_lane)
    phases.add_phase(phases.lane, "scatter", lane_blocks, target[blocks.block], blocks.lane, phases.root_node)


def _alltoall(phases: HierarchicalPhases, piece: int) -> None:
    """In the node, each rank gets what is for its lane: so as many bytes leave the node, in fewer messages."""
    source, target = _get_arrays(phases)
    blocks = _pack_blocks(phases, piece)
    nodes, local, each = len(phases.ranks), phases.comm.local_size, blocks.lane[0]
    count = sum(blocks.lanes)
    packed = source if blocks.in_order else phases.get_scratch("packed", source, count)
    # As [rank of the node that it comes from, node that it goes to], and the other way round; then [node that it
    # comes from, rank of that node].
    by_rank = phases.get_scratch("by rank", source, count)
    by_node, arrived = (phases.get_travelling(name, source, count) for name in ("by node", "arrived"))
    phases.add_local_step(lambda: blocks.pack(source, packed))
    phases.add_phase(phases.node, "alltoall", packed, by_rank, [nodes * each] * local)
    phases.add_local_step(lambda: _transpose(by_rank, by_node, local, nodes))
    phases.add_phase(phases.lane, "alltoall", by_node, arrived, [local * each] * nodes)
    phases.add_local_step(lambda: _transpose(arrived, by_rank, nodes, local))
    phases.add_local_step(lambda: blocks.unpack(by_rank, target))


def _transpose(source: Array, target: Array, rows: int, columns: int) -> None:
    """Transpose a matrix of blocks."""
    shape = (source.size // (rows * columns),)
    target.reshape(columns, rows, *shape)[...] = source.reshape(rows, columns, *shape).swapaxes(0, 1)


_PHASES: dict[str, Callable[[HierarchicalPhases, int], None]] = {
    "allreduce": _allreduce,
    "reduce": _reduce,
    "bcast": _bcast,
    "reduce_scatter": _reduce_scatter,
    "allgather": _allgather,
    "gather": _gather,
    "scatter": _scatter,
    "alltoall": _alltoall,
}
