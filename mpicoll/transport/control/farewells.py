"""Farewells: the exits that ranks have announced."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, takewhile
from typing import Any

from mpicoll.transport.control.connection import ALL, FAREWELL, FAREWELLS, FORWARDED, Connection, Packet, encode

_BATCH_LIMIT = 1 << 20
"""Bytes of the bodies of farewells that are sent in one packet."""


class Farewells:
    """The farewell of this rank, and those that it has received.

    A rank may end once its farewell is with a rank that can't end before it has forwarded it. A hub forwards the
    farewells that arrive within a moment in one packet: at the end of a program all ranks leave, mostly with the same
    body.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.own: Packet | None = None
        """The farewell of this rank, as soon as it is to be sent."""
        self.is_forwarded = False
        """True if the hub has forwarded the own farewell: no rank needs anything of this rank any more."""
        self.reached_higher_rank = False
        """True if the own farewell has been sent to a client with a higher rank."""
        self.received: dict[int, Packet] = {}
        self.unsent: dict[int, Connection] = {}
        """The ranks whose farewells are to be forwarded, with the connections on which these have come."""
        self._numbers: dict[int, int] = {}  # of the received farewells, in their order
        self._batches: dict[bytes, int] = {}  # the number of the first farewell, by the payload
        self._unconfirmed: dict[Connection, None] = {}
        self._confirmed: set[Connection] = set()

    @property
    def is_certain(self) -> bool:
        """True if the other ranks will receive the own farewell even if this process ends."""
        return self.is_forwarded or self.reached_higher_rank

    def receive(self, farewell: Packet) -> None:
        """Record the farewell of a rank. Farewells are forwarded in the order in which they are received."""
        source = farewell[1]
        self.received[source] = farewell
        self._numbers.setdefault(source, len(self._numbers))

    def make_packets(self, ranks: Iterable[int]) -> list[Packet]:
        """Return packets with the received farewells of `ranks`."""
        packets: list[Packet] = []
        batch: list[Packet] = []
        nbytes = 0
        for farewell in (self.received[rank] for rank in ranks):
            if batch and nbytes + len(farewell[3]) > _BATCH_LIMIT:
                packets.append(self._make_packet(batch))
                batch, nbytes = [], 0
            batch.append(farewell)
            nbytes += len(farewell[3])
        return [*packets, self._make_packet(batch)] if batch else packets

    def _make_packet(self, batch: Sequence[Packet]) -> Packet:
        if len(batch) == 1:
            return batch[0]
        payload = encode(_describe(batch))
        self._batches.setdefault(payload, min(self._numbers[one[1]] for one in batch))
        return FAREWELLS, self._rank, ALL, payload

    def confirm_later(self, connection: Connection) -> None:
        """Confirm to the peer, when all ranks have its farewell, that it is forwarded."""
        self._unconfirmed[connection] = None

    @property
    def are_confirmed(self) -> bool:
        """True if no rank waits for the confirmation of its farewell."""
        return not self._unconfirmed

    def needs_nothing(self, connection: Connection) -> bool:
        """Return True if the peer has left, and its farewell is confirmed."""
        return connection in self._confirmed

    def confirm(self, unwritten: Iterable[Connection]) -> None:
        """Confirm the farewells that have been handed to the kernel on all connections.

        `unwritten` are the connections with something that has not been. The first farewell that waits on one of them
        states which others do, as all connections have them in the same order.
        """
        if not self._unconfirmed:
            return
        end = min([len(self._numbers), *(self._numbers[rank] for rank in islice(self.unsent, 1))])
        end = min([end, *map(self._first_number, unwritten)])
        # In the order in which they have come, mostly: then few are looked at that can't be confirmed yet.
        for connection in [*takewhile(lambda one: self._numbers.get(one.rank, -1) < end, self._unconfirmed)]:
            del self._unconfirmed[connection]
            self._confirmed.add(connection)
            connection.enqueue([(FORWARDED, self._rank, connection.rank, b"{}")])

    def _first_number(self, connection: Connection) -> int:
        """Return the number of the first farewell that waits; 0 if it may be in the bytes that wait for the kernel."""
        if connection.blocked:
            return 0
        numbers = {FAREWELL: lambda one: self._numbers.get(one[1]), FAREWELLS: lambda one: self._batches.get(one[3])}
        found = (numbers[one[0]](one) for one in connection.queue if one[0] in numbers)
        return next((number for number in found if number is not None), len(self._numbers))

    def drop(self, connection: Connection) -> None:
        """Confirm nothing on a connection that is closed."""
        self._unconfirmed.pop(connection, None)
        self._confirmed.discard(connection)


def _describe(batch: Sequence[Packet]) -> dict[str, Any]:
    """Return the content of a packet: the bodies, and ranges of ranks with the position of the body of each."""
    bodies: dict[bytes, int] = {}
    ranges: list[list[int]] = []
    for _, rank, _, body in batch:
        number = bodies.setdefault(body, len(bodies))
        if ranges and ranges[-1][1:] == [rank - 1, number]:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank, number])
    return {"bodies": [json.loads(body) for body in bodies], "ranges": ranges}


def read_farewells(content: dict[str, Any], size: int) -> Iterator[tuple[Packet, dict[str, Any]]]:
    """Yield the farewells in a packet of a job of `size` ranks, with their bodies. Raises ValueError if it is none."""
    bodies = content["bodies"]
    payloads = [encode(body) for body in bodies]
    for first, last, number in content["ranges"]:
        if not 0 <= first <= last < size or not isinstance(bodies[number], dict):
            raise ValueError("a range of ranks that do not exist, or a body that is none")
        for rank in range(first, last + 1):
            yield (FAREWELL, rank, ALL, payloads[number]), bodies[number]
