"""One collective call, validated and described by data. :mod:`mpicoll.engine.dispatch` carries it out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from mpicoll.buffers.buffer import Buffer
from mpicoll.buffers.device import Device, StreamEvent, device_of
from mpicoll.buffers.pair import parts_of
from mpicoll.buffers.streams import record_events
from mpicoll.collective_kinds import ROOTED
from mpicoll.engine.core.arrays import CollectiveArrays
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.diagnostics.flight_recorder import Call
from mpicoll.engine.selection.query import SelectionQuery

if TYPE_CHECKING:
    from mpicoll.engine.core.compression_memory import CompressionMemory


class Prepare(Protocol):
    """Function that checks a call on `x` and `out` and describes it."""

    def __call__(self, *, x: Any, out: Any) -> Operation: ...


class Operation:
    """Description of a collective call on this rank, which can be carried out any number of times.

    `query` states what its algorithm must support; `algorithm` is the one that the caller demands, if any. `arrays` are
    the memory that the algorithm works on. `block` is this rank's array that is alike on all ranks, except for its rows
    where the caller passed counts: `counts` are then the rows of all ranks' blocks. For alltoall these are the rows
    that are sent, and `arrivals` the rows that are received. `buffers` are all arrays of the caller that are accessed,
    `output` the one that is returned, None if the call has no result on this rank. `on` is the device on which the
    buffers lie, if any; `after` holds the events that must complete before they may be accessed. `compression` is that
    of the messages between nodes, if the caller demands one.
    """

    __slots__ = (
        "__weakref__",
        "after",
        "algorithm",
        "arrays",
        "arrivals",
        "block",
        "buffers",
        "comm",
        "compression",
        "counts",
        "on",
        "output",
        "query",
    )

    def __init__(
        self,
        comm: CommunicatorCore,
        query: SelectionQuery,
        algorithm: str | None,
        arrays: CollectiveArrays,
        block: Buffer | None = None,
        counts: tuple[int, ...] = (),
        arrivals: tuple[int, ...] = (),
        buffers: tuple[Buffer | None, ...] = (),
        output: Buffer | None = None,
        on: Device | None = None,
        compression: CompressionMemory | None = None,
    ) -> None:
        self.comm = comm
        self.query = query
        self.algorithm = algorithm
        self.arrays = arrays
        self.block = block
        self.counts = counts
        self.arrivals = arrivals
        self.buffers = buffers
        self.output = output
        if on is None:
            on = device_of(*(part.array for one in buffers if one is not None for part in parts_of(one)))
        self.on = on
        self.compression = compression
        self.after: tuple[StreamEvent, ...] = ()

    @property
    def compresses(self) -> bool:
        """True if messages are compressed: the ranks are on several nodes, and the caller demands it."""
        return self.compression is not None and self.comm.context.layout.nodes > 1

    def record_events(self) -> None:
        """Record the events of the buffers' streams. The caller's thread must call it before each run."""
        if self.on is not None:
            self.after = record_events(*self.buffers)

    def result(self) -> Any:
        """Return the result of the call on this rank, after a run."""
        return None if self.output is None else self.output.result()

    def describe(self, algorithm: str) -> Call:
        """Return the description of a run by `algorithm` for the flight recorder and for the other ranks."""
        query, block, reduction = self.query, self.block, self.arrays.reduction
        return Call(
            query.collective,
            query.nbytes,
            "" if block is None else block.dtype.text,
            None if block is None else block.array.shape,
            op="" if reduction is None else reduction.name,
            root=query.root if query.collective in ROOTED else None,
            counts=self.counts,
            arrivals=self.arrivals,
            algorithm=algorithm,
            memory="" if self.on is None else self.on.kind,
            compression="" if self.compression is None else self.compression.name,
        )
