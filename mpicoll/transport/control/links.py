"""The connections of one rank, and the packets for ranks to which it is not connected yet."""

from __future__ import annotations

import selectors
from collections import deque
from collections.abc import Iterable

from mpicoll.transport.control.connection import MESSAGE, Connection, Packet
from mpicoll.transport.control.sockets import unacknowledged_bytes


class Links:
    """The connections of one rank: to the hub, from its clients if it is the hub itself, and unproven ones.

    Unproven are accepted connections whose peers have not proved the token ("stranger"), own attempts to connect to
    the hub ("attempt"), and probes of a port ("probe").
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self.hub: Connection | None = None
        self.clients: dict[int, Connection] = {}
        self.unproven: set[Connection] = set()
        self._selector = selector
        self._for_hub: deque[Packet] = deque()
        self._for_clients: dict[int, deque[Packet]] = {}

    def established(self) -> list[Connection]:
        """Return the connections whose peers have proved the token."""
        return [*self.clients.values(), *([self.hub] if self.hub else ())]

    def all(self) -> list[Connection]:
        """Return all connections."""
        return [*self.established(), *self.unproven]

    def attempts(self) -> list[Connection]:
        """Return the attempts to connect to the hub that are under way."""
        return [one for one in self.unproven if one.role == "attempt"]

    def send_to_hub(self, packet: Packet) -> None:
        """Queue `packet` for the hub, also while there is no connection to it."""
        (self.hub.queue if self.hub else self._for_hub).append(packet)

    def send_to_client(self, rank: int, packet: Packet) -> None:
        """Queue `packet` for `rank`, also while it is not connected."""
        client = self.clients.get(rank)
        (client.queue if client else self._for_clients.setdefault(rank, deque())).append(packet)

    def take_for_hub(self) -> list[Packet]:
        """Remove and return the packets that wait for a connection to the hub."""
        packets = list(self._for_hub)
        self._for_hub.clear()
        return packets

    def take_for_client(self, rank: int) -> Iterable[Packet]:
        """Remove and return the packets that wait for a connection of `rank`."""
        return self._for_clients.pop(rank, ())

    def recover_messages(self, lost_hub: Connection) -> None:
        """Queue the messages again that a lost hub has not received completely, for it has discarded these."""
        self._for_hub.extendleft(packet for packet in reversed(lost_hub.queue) if packet[0] == MESSAGE)

    def add_hub(self, connection: Connection) -> None:
        """Make an attempt the connection to the hub."""
        self.unproven.discard(connection)
        connection.role = "hub"
        connection.deadline = float("inf")
        self.hub = connection

    def add_client(self, connection: Connection) -> None:
        """Make an accepted connection that of a client."""
        self.unproven.discard(connection)
        connection.role = "client"
        self.clients[connection.rank] = connection

    def is_established(self, connection: Connection) -> bool:
        """Return True if `connection` is that to the hub or that of a client."""
        return self.hub is connection or self.clients.get(connection.rank) is connection

    def drop(self, connection: Connection) -> None:
        """Close a connection and remove it."""
        if connection.events:
            self._selector.unregister(connection.sock)
            connection.events = 0
        self.unproven.discard(connection)
        if self.clients.get(connection.rank) is connection:
            del self.clients[connection.rank]
        if self.hub is connection:
            self.hub = None
        connection.sock.close()

    def has_waiting_packets(self) -> bool:
        """Return True if packets wait for connections."""
        return bool(self._for_hub) or any(self._for_clients.values())

    def update_selector(self) -> None:
        """Set the events for which the selector waits."""
        for one in self.all():
            events = selectors.EVENT_READ
            if one.connecting or one.blocked:
                events |= selectors.EVENT_WRITE
            if events != one.events:
                change = self._selector.modify if one.events else self._selector.register
                change(one.sock, events, one)
                one.events = events

    def close(self) -> None:
        """Close all connections."""
        for one in self.all():
            one.sock.close()
        self.clients.clear()
        self.unproven.clear()
        self.hub = None


def is_delivered(connection: Connection) -> bool:
    """Return True if the peer's kernel has acknowledged everything that was sent on `connection`."""
    return connection.idle and not unacknowledged_bytes(connection.sock)
