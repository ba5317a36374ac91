"""Farewells: the exits that ranks have announced."""

from __future__ import annotations

from collections.abc import Callable

from mpicoll.transport.control.connection import FORWARDED, Connection, Packet


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
        self._unconfirmed: list[tuple[Connection, Packet]] = []

    @property
    def is_certain(self) -> bool:
        """True if the other ranks will receive the own farewell even if this process ends."""
        return self.is_forwarded or self.reached_higher_rank

    def confirm_later(self, connection: Connection, farewell: Packet) -> None:
        """Confirm to the peer, when all ranks have its farewell, that it is forwarded."""
        self._unconfirmed.append((connection, farewell))

    def confirm(self, is_forwarded: Callable[[Packet], bool]) -> None:
        """Confirm the farewells for which `is_forwarded` returns True."""
        for connection, farewell in list(self._unconfirmed):
            if is_forwarded(farewell):
                self._unconfirmed.remove((connection, farewell))
                connection.queue.append((FORWARDED, self._rank, connection.rank, b"{}"))
                connection.write()

    def drop(self, connection: Connection) -> None:
        """Confirm nothing on a connection that is closed."""
        self._unconfirmed = [one for one in self._unconfirmed if one[0] is not connection]
