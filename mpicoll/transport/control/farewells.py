"""Farewells: the exits that ranks have announced."""

from __future__ import annotations

from collections.abc import Iterable

from mpicoll.transport.control.connection import FAREWELL, FORWARDED, Connection, Packet


class Farewells:
    """The farewell of this rank, and those that it has received.

    A rank may end once its farewell is with a rank that can't end before it has forwarded it.
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
        self._numbers: dict[int, int] = {}  # of the received farewells, in their order
        self._unconfirmed: dict[Connection, None] = {}

    @property
    def is_certain(self) -> bool:
        """True if the other ranks will receive the own farewell even if this process ends."""
        return self.is_forwarded or self.reached_higher_rank

    def receive(self, farewell: Packet) -> None:
        """Record the farewell of a rank. Farewells are forwarded in the order in which they are received."""
        source = farewell[1]
        self.received[source] = farewell
        self._numbers.setdefault(source, len(self._numbers))

    def confirm_later(self, connection: Connection) -> None:
        """Confirm to the peer, when all ranks have its farewell, that it is forwarded."""
        self._unconfirmed[connection] = None

    def confirm(self, unwritten: Iterable[Connection]) -> None:
        """Confirm the farewells that have been handed to the kernel on all connections.

        `unwritten` are the connections with something that has not been. The first farewell that waits on one of them
        states which others do, as all connections have them in the same order.
        """
        if not self._unconfirmed:
            return
        end = min(map(self._first_number, unwritten), default=len(self._numbers))
        for connection in [one for one in self._unconfirmed if self._numbers.get(one.rank, -1) < end]:
            del self._unconfirmed[connection]
            connection.enqueue([(FORWARDED, self._rank, connection.rank, b"{}")])

    def _first_number(self, connection: Connection) -> int:
        """Return the number of the first farewell that waits; 0 if it may be in the bytes that wait for the kernel."""
        if connection.blocked:
            return 0
        numbers = (self._numbers[one[1]] for one in connection.queue if one[0] == FAREWELL and one[1] in self._numbers)
        return next(numbers, len(self._numbers))

    def drop(self, connection: Connection) -> None:
        """Confirm nothing on a connection that is closed."""
        self._unconfirmed.pop(connection, None)
