"""One round of messages between neighbours."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.core.proc_null import PROC_NULL
from mpicoll.engine.diagnostics.position import Position
from mpicoll.errors import TruncationError
from mpicoll.transport.base import Message
from mpicoll.wording import rank_list


class NeighbourExchange:
    """The messages of a round. `sends` and `recvs` are the bytes for and from each neighbour, which may be this rank or
    PROC_NULL. Of the messages between two ranks, the first in `sends` of one is the first in `recvs` of the other."""

    __slots__ = ("_comm", "_name", "_recvs", "_sends")

    def __init__(self, comm: CommunicatorCore, name: str, sends: Sequence[Message], recvs: Sequence[Message]) -> None:
        self._comm = comm
        self._name = name
        self._sends = [message for message in sends if message[0] is not PROC_NULL]
        self._recvs = [message for message in recvs if message[0] is not PROC_NULL]

    def run(self, tag: int) -> None:
        """Carry out the round."""
        rank = self._comm.rank
        own = [data for dest, data in self._sends if dest == rank]
        if own:
            self._copy_own(own, [data for source, data in self._recvs if source == rank])
            self._sends = [message for message in self._sends if message[0] != rank]
            self._recvs = [message for message in self._recvs if message[0] != rank]
        if not (self._sends or self._recvs):
            return
        executing = self._comm.queue.executing
        outer, executing.executor = executing.executor, self
        try:
            self._comm.transport.exchange(self._sends, self._recvs, tag)
        finally:
            executing.executor = outer

    def _copy_own(self, sent: Sequence[np.ndarray], received: Sequence[np.ndarray]) -> None:
        for data, into in zip(sent, received, strict=True):
            if data.size != into.size:
                raise TruncationError(
                    f"{self._name}: rank {self._comm.rank} of {self._comm.size} sends itself {data.size} bytes, but"
                    f" expects {into.size}"
                )
            np.copyto(into, data)

    def position(self, members: Sequence[int]) -> Position:
        """Return the ranks whose messages have been requested."""
        peers = tuple(sorted({members[source] for source, _ in self._recvs}))
        where = f"the exchange of {self._name}"
        return Position(f"{where}, which receives from {rank_list(peers)}" if peers else where, peers)
