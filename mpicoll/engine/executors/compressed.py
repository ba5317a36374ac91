"""All-reduce of float32 arrays whose messages between nodes are compressed.

In a node, data is reduced and distributed in full precision. Between nodes, each carrier of a share exchanges it with
the carriers of the same share on the other nodes. The share is cut into a chunk for each of them, its owner. A carrier
sends every owner its chunk, compressed; the owner adds the chunks that it receives to its own in float32, and sends the
compressed sum to all others. So what a node adds is rounded once, and the sum once. The owner takes the sum as the
others receive it: all ranks have the same bits.

Each rank of a node carries a share; if nodes have different numbers of ranks, as many on each as on the smallest one.
Chunks begin at whole blocks of the array.

The exchange is that of Tang et al. 2021, "1-bit Adam: communication efficient large-scale training with Adam's
convergence speed", between the nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from mpicoll.buffers.compression import BLOCK, compress, count_message_bytes, decompress
from mpicoll.buffers.dtypes import Array
from mpicoll.buffers.ops import Reduction
from mpicoll.engine.core.arrays import CollectiveArrays, displacements, even_displacements
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.core.compression_memory import CompressionMemory
from mpicoll.engine.core.operation import Operation
from mpicoll.engine.diagnostics.position import Position
from mpicoll.engine.executors.phased import BindPhase
from mpicoll.engine.selection.query import SelectionQuery
from mpicoll.errors import TruncationError
from mpicoll.transport.base import Pending

_PIECE = 1024 * BLOCK
"""Elements of a piece: while one is compressed, those before it are on their way."""


class CompressedPhases:
    """The reduction in the node, the exchange between nodes, and the distribution in the node."""

    def __init__(self, operation: Operation, bind: BindPhase) -> None:
        comm, arrays = operation.comm, operation.arrays
        source, vector = arrays.source, arrays.spare
        assert source is not None
        assert vector is not None
        assert arrays.reduction is not None
        assert operation.compression is not None
        self._comm = comm
        self._arrays = arrays
        self._query = operation.query
        self._node, lane = comm.levels()
        self._failure: BaseException | None = None
        self._phase = ""
        carriers = min(map(comm.nodes.count, comm.nodes))
        shares = _cut(vector.size, carriers)
        counts = [stop - start for start, stop in pairwise(shares)] + [0] * (self._node.size - carriers)
        start, stop = displacements(counts)[self._node.rank :][:2]
        own = vector[start:stop]
        self._exchange: _Exchange | None = None
        self._reduce: Callable[[], None] | None = None
        self._distribute: Callable[[], None] | None = None
        if own.size:
            # Where no other rank of the node adds to it, the operand is the input itself.
            operand = source if self._node.size == 1 and source is not vector else own
            divisor = comm.size if arrays.reduction.name == "avg" else 1
            self._exchange = _Exchange(operation.compression, lane, operand, own, divisor)
        if self._node.size > 1 and vector.size:
            total = arrays.reduction._replace(name="sum")
            self._reduce = bind(self._make_phase("reduce_scatter", source, own, counts, total, vector))
            self._distribute = bind(self._make_phase("allgather", own, vector, counts))

    def run(self) -> None:
        """Carry out the phases. After a failure this rank still enters those in the node, and fails in them, which
        releases the other ranks there."""
        executing = self._comm.queue.executing
        outer, executing.executor = executing.executor, self
        try:
            self._attempt(self._arrays.load)
            self._phase = "the reduction in the node"
            self._attempt(self._reduce)
            self._phase = "the exchange between nodes"
            if self._failure is None:
                self._attempt(self._exchange)
            self._phase = "the distribution in the node"
            self._attempt(self._distribute)
        finally:
            executing.executor = outer
            self._phase = ""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        self._arrays.store()

    def _attempt(self, step: Callable[[], None] | None) -> None:
        if step is not None:
            try:
                step()
            except BaseException as error:  # noqa: BLE001  raised at the end
                self._failure = self._failure or error

    def position(self, members: Sequence[int]) -> Position:
        """Return the current phase and the position in it."""
        exchange, phase = self._exchange, self._phase
        where = f"compressed allreduce, {phase or 'copies'}"
        if exchange is not None and exchange.stage:
            waits_for = tuple(sorted(exchange.lane.members[peer] for peer in exchange.missing))
            return Position(f"{where}: {exchange.stage}", waits_for)
        inner = self._node.queue.executing.position(self._node.members)
        return inner._replace(where=f"{where}: {inner.where}" if inner.where else where)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _make_phase(
        self,
        collective: str,
        source: Array,
        target: Array,
        counts: Sequence[int],
        reduction: Reduction | None = None,
        spare: Array | None = None,
    ) -> Operation:
        """Return the operation of a phase in the node. `counts` are the elements of the ranks' shares."""
        node = self._node
        arrays = CollectiveArrays(
            collective, node.rank, source, target, tuple(counts), 0, reduction, spare, load=self._check
        )
        uneven = len(set(counts)) > 1
        query = SelectionQuery(
            collective,
            sum(counts) * source.itemsize,
            node.context,
            "moved" if reduction is None else "float",
            uneven=uneven,
            native=node.transport.find_native_defect(collective, uneven=uneven) or self._query.native,
            no_shm_reason=node.no_shm_reason,
            no_cma_reason=node.no_cma_reason,
        )
        return Operation(node, query, None, arrays)


class _Messages:
    """The compressed form of a chunk, in one message for each of its pieces."""

    __slots__ = ("messages", "pieces")

    def __init__(self, memory: CompressionMemory, use: str, count: int) -> None:
        name = memory.name
        self.pieces = [slice(start, min(start + _PIECE, count)) for start in range(0, count, _PIECE)]
        ends = displacements(count_message_bytes(name, piece.stop - piece.start) for piece in self.pieces)
        whole = memory.take(use, ends[-1])
        self.messages = [whole[start:end] for start, end in pairwise(ends)]


class _Exchange:
    """The exchange of a share between its carriers: the sum of their `operand`, divided by `divisor`, is written to
    `result`, which may be the operand."""

    def __init__(
        self, memory: CompressionMemory, lane: CommunicatorCore, operand: Array, result: Array, divisor: int
    ) -> None:
        self.lane = lane
        # For positions: what is being done, and the ranks of the lane that it waits for.
        self.stage = ""
        self.missing: tuple[int, ...] = ()
        self._memory = memory
        self._operand = operand
        self._result = result
        self._divisor = np.float32(divisor)
        self._chunks = [slice(*extent) for extent in pairwise(_cut(result.size, lane.size))]
        # Each rank begins with another one.
        self._peers = [(lane.rank + step) % lane.size for step in range(1, lane.size)]
        self._outputs: dict[int, _Messages] = {}
        self._inputs: dict[int, _Messages] = {}
        self._sums: dict[int, _Messages] = {}

    def __call__(self) -> None:
        # All ranks draw the same one, since it is drawn before anything can fail on one of them.
        tag = self.lane.next_tag()
        try:
            self._take_memory()
            self._run(tag)
        except BaseException:
            # Late messages may still be written to the memory, and what was left out is not known.
            self._memory.forget()
            self._outputs = {}
            raise
        finally:
            self.stage, self.missing = "", ()

    def _take_memory(self) -> None:
        if not self._outputs:
            memory, own = self._memory, self._chunks[self.lane.rank]
            sizes = [chunk.stop - chunk.start for chunk in self._chunks]
            self._inputs = {peer: _Messages(memory, f"from {peer}", own.stop - own.start) for peer in self._peers}
            self._sums = {peer: _Messages(memory, f"sum of {peer}", size) for peer, size in enumerate(sizes)}
            self._outputs = {peer: _Messages(memory, f"to {peer}", sizes[peer]) for peer in self._peers}

    def _run(self, tag: int) -> None:
        transport = self.lane.transport
        # From each rank, pieces of its input arrive first, then those of its sum.
        inputs, sums = (
            {peer: [transport.irecv(message, peer, tag) for message in chunks[peer].messages] for peer in self._peers}
            for chunks in (self._inputs, self._sums)
        )
        self.stage = "sending its input"
        leaving = self._send_input(tag)
        self.stage = "adding inputs"
        leaving += self._send_sum(tag, inputs)
        self.stage = "receiving sums"
        for peer in self._peers:
            chunk, arriving = self._result[self._chunks[peer]], self._sums[peer]
            for piece, message, pending in zip(arriving.pieces, arriving.messages, sums[peer], strict=True):
                self._wait(pending, peer, message.size)
                decompress(self._memory.name, message, chunk[piece])
        for peer, pending in leaving:
            self._wait(pending, peer)

    def _send_input(self, tag: int) -> list[tuple[int, Pending]]:
        """Send all owners their chunks of the operand."""
        error = self._memory.take_error("input", self._result.size)
        leaving = []
        for number in range(max(len(one.pieces) for one in self._outputs.values())):
            for peer, outputs in self._outputs.items():
                if number < len(outputs.pieces):
                    chunk, piece, message = self._chunks[peer], outputs.pieces[number], outputs.messages[number]
                    kept = None if error is None else error[chunk][piece]
                    compress(self._memory.name, self._operand[chunk][piece], message, kept)
                    leaving.append((peer, self.lane.transport.isend(message, peer, tag)))
        return leaving

    def _send_sum(self, tag: int, inputs: dict[int, list[Pending]]) -> list[tuple[int, Pending]]:
        """Add what arrives to this rank's own chunk of the operand, in a fixed order, and send the sum to all."""
        name, own = self._memory.name, self._chunks[self.lane.rank]
        operand, result, sums = self._operand[own], self._result[own], self._sums[self.lane.rank]
        error = self._memory.take_error("sum", result.size)
        leaving = []
        for number, (piece, message) in enumerate(zip(sums.pieces, sums.messages, strict=True)):
            total = result[piece]
            if self._operand is not self._result:
                np.copyto(total, operand[piece])
            for peer in sorted(self._peers):
                arrived = self._inputs[peer].messages[number]
                self._wait(inputs[peer][number], peer, arrived.size)
                decompress(name, arrived, total, add=True)
            if self._divisor != 1:
                np.divide(total, self._divisor, out=total)
            compress(name, total, message, None if error is None else error[piece], total)
            leaving += [(peer, self.lane.transport.isend(message, peer, tag)) for peer in self._peers]
        return leaving

    def _wait(self, pending: Pending, peer: int, nbytes: int | None = None) -> None:
        """Wait for a transfer from or to `peer`; of `nbytes`, if it is received."""
        self.missing = (peer,)
        received = pending.wait(None).nbytes
        self.missing = ()
        if nbytes is not None and received != nbytes:
            raise TruncationError(
                f"compressed allreduce: rank {self.lane.rank} expected {nbytes} bytes from rank {peer} of"
                f" {self.lane.name}, got {received}: the ranks disagree about the size of the operation"
            )


def _cut(count: int, parts: int) -> list[int]:
    """Return the offsets of `parts` consecutive parts of `count` elements, which begin at whole blocks."""
    blocks = -(-count // BLOCK)
    return [min(count, BLOCK * offset) for offset in even_displacements(blocks, parts)]
