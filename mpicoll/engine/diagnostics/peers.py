"""The watchdogs of the other ranks: their states, on request, and the ranks that have ended."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from mpicoll.engine.diagnostics.departures import make_departed_state, make_unreached_state
from mpicoll.engine.diagnostics.local_waits import LocalWaits
from mpicoll.engine.diagnostics.run_delay import RunDelay
from mpicoll.transport.control.events import Message, PeerExit
from mpicoll.transport.control.network import ControlNetwork

QUERY_TIMEOUT = 2.0
"""Seconds in which the watchdogs of the other ranks reply to a query."""


class Peers:
    """The other ranks as this rank's watchdog knows them. Used by the watchdog's thread.

    ``network`` is None before the ranks are connected and after the control network was closed. ``announced`` are ranks
    that have announced that they abort the job, or are known to be lost, with the cause; ``left`` are ranks that make
    no more calls, with their final states as :func:`~mpicoll.engine.diagnostics.departures.make_departed_state` takes
    them.
    """

    def __init__(self, waits: LocalWaits) -> None:
        self.rank, self.size = 0, 1
        self.fault_tolerant = False  # True if ranks may die (ULFM)
        self.network: ControlNetwork | None = None
        self.announced: dict[int, str] = {}
        self.left: dict[int, dict[str, Any]] = {}
        # Events that arrived while states were collected.
        self.deferred: deque[Message | PeerExit] = deque()
        self.run_delay = RunDelay()
        self._waits = waits
        self._query = 0  # number of the last query
        self._replies: dict[int, Any] = {}

    def reachable(self) -> set[int]:
        """Return this rank and the ranks that have not ended, as far as is known."""
        network = self.network
        gone = {} if network is None else network.exits
        return {self.rank, *(rank for rank in range(self.size) if rank not in gone and rank not in self.announced)}

    def coordinator(self) -> int:
        """Return the lowest reachable rank, which reports for all of them."""
        return min(self.reachable())

    def dead(self) -> set[int]:
        """Return the ranks of the job that have died."""
        network = self.network
        return set() if network is None else {rank for rank, one in network.exits.items() if one.why != "left"}

    def send(self, kind: str, to: int | None = None, **fields: Any) -> None:
        """Send a message to the watchdog of the rank `to`, or to those of all ranks; nothing if not connected."""
        network = self.network
        if network is not None:
            network.send({"kind": kind, **fields}, to)

    def own_state(self, *, full: bool = False, calls: Sequence[Sequence[Any]] = ()) -> dict[str, Any]:
        """Return the state of this rank. `full` includes stacks and past operations."""
        state = self._waits.state(self.rank, self.size, full=full, calls=calls)
        return state | {"run_delay": self.run_delay.list_intervals()}

    def collect_states(
        self, seconds: float, *, full: bool, calls: Sequence[Sequence[Any]] = ()
    ) -> dict[int, dict[str, Any] | None]:
        """Return the states of all ranks, None for those that don't reply within `seconds`.

        `calls` are collectives, as (key, number); the ranks report their calls of these. `full` requests stacks
        and past operations too.
        """
        self._query += 1
        self._replies = {self.rank: self.own_state(full=full, calls=calls)}
        network = self.network
        if network is not None:
            network.send({"kind": "query", "number": self._query, "full": full, "calls": calls})
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                if len(self._replies) + len(network.exits) >= self.size:
                    break
                for event in network.poll(max(0.0, deadline - time.monotonic())):
                    if isinstance(event, PeerExit) or not self.handle_query(event):
                        self.deferred.append(event)
        states = {rank: self._replies.get(rank) for rank in range(self.size)}
        if network is not None:
            for rank, one in network.exits.items():
                how, words = ("left", "") if one.why == "left" else ("died", self.announced.get(rank, one.why))
                states[rank] = make_departed_state(rank, how, words, **self.left.get(rank, {}))
            silent = {rank for rank, state in states.items() if state is None}
            # A hub that forwards replies of others is alive, though its own reply may be late.
            if network.hub in silent and len(silent) + len(network.exits) == self.size - 1:
                states |= {rank: make_unreached_state(rank, network.hub) for rank in silent - {network.hub}}
        return states

    def handle_query(self, message: Message) -> bool:
        """Reply to a query, or record a reply. Return False for other messages."""
        body = message.body
        match body.get("kind"):
            case "query":
                state = self.own_state(full=body["full"], calls=body["calls"])
                self.send("state", message.source, number=body["number"], state=state)
            case "state":
                if body["number"] == self._query:
                    self._replies[message.source] = body["state"]
            case _:
                return False
        return True
