"""The connections of one rank, and the packets for ranks to which it is not connected yet."""

from __future__ import annotations

import selectors
import socket
from collections import deque
from collections.abc import Iterable, Iterator

from mpicoll.transport.control.connection import MESSAGE, Connection, Packet
from mpicoll.transport.control.deadlines import Deadlines
from mpicoll.transport.control.sockets import unacknowledged_bytes


class Links:
    """The connections of one rank: to the hub, from its clients if it is the hub itself, and unproven ones.

    Unproven are accepted connections whose peers have not proved the token ("stranger"), own attempts to connect to
    the hub ("attempt"), and probes of a port ("probe"). Among the strangers are connections of ranks that have to wait
    until they are clients ("waiting").

    A hub has one connection for each other rank, of which most have nothing to do at a time. So what is done in each
    turn looks only at those that have changed, that wait for something, or whose deadline has come.
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self.hub: Connection | None = None
        self.clients: dict[int, Connection] = {}
        # Dictionaries keep the order: the oldest connection comes first.
        self.strangers: dict[Connection, None] = {}
        self.attempts: dict[Connection, None] = {}
        self.probes: dict[Connection, None] = {}
        self.deadlines: Deadlines[Connection] = Deadlines()
        self.unwritten: set[Connection] = set()
        """Those with bytes or packets that the kernel, or the window of the peer, does not accept now."""
        self.unacknowledged: set[Connection] = set()
        """Those whose peer's kernel may not have acknowledged everything yet."""
        self._selector = selector
        self._changed: set[Connection] = set()
        self._unregistered: set[Connection] = set()  # the selector waits for other events than it should
        self._for_hub: deque[Packet] = deque()
        self._outward: deque[Packet] = deque()
        self._for_clients: dict[int, deque[Packet]] = {}

    def open(self, sock: socket.socket, role: str, rank: int = -1, address: str = "") -> Connection:
        """Return a new unproven connection."""
        connection = Connection(sock, role, rank, address, self._changed)
        self._unproven_of(role)[connection] = None
        self.touch(connection)
        return connection

    def established(self) -> list[Connection]:
        """Return the connections whose peers have proved the token."""
        return [*self.clients.values(), *([self.hub] if self.hub else ())]

    def unproven(self) -> list[Connection]:
        """Return the other connections."""
        return [*self.strangers, *self.attempts, *self.probes]

    def _unproven_of(self, role: str) -> dict[Connection, None]:
        accepted = {"stranger": self.strangers, "waiting": self.strangers}
        return (accepted | {"attempt": self.attempts, "probe": self.probes}).get(role, {})

    def send_to_hub(self, packet: Packet) -> None:
        """Queue `packet` for the hub, also while there is no connection to it."""
        if self.hub:
            self.hub.enqueue([packet])
        else:
            self._for_hub.append(packet)

    def send_to_client(self, rank: int, packet: Packet) -> None:
        """Queue `packet` for `rank`, also while it is not connected."""
        client = self.clients.get(rank)
        if client:
            client.enqueue([packet])
        else:
            self._for_clients.setdefault(rank, deque()).append(packet)

    def take_for_hub(self) -> list[Packet]:
        """Remove and return the packets that wait for a connection to the hub."""
        packets = list(self._for_hub)
        self._for_hub.clear()
        return packets

    def send_outward(self, packet: Packet) -> None:
        """Queue `packet`, which the own group has, for the other groups: for the hub, also while there is none."""
        if self.hub:
            self.hub.enqueue([packet])
        else:
            self.hold_outward(packet)

    def hold_outward(self, packet: Packet) -> None:
        """Queue `packet`, which the own group has, for the next hub."""
        self._outward.append(packet)

    def take_outward(self) -> list[Packet]:
        """Remove and return the packets for the other groups that wait for a connection to the hub."""
        packets = list(self._outward)
        self._outward.clear()
        return packets

    def take_for_client(self, rank: int) -> Iterable[Packet]:
        """Remove and return the packets that wait for a connection of `rank`."""
        return self._for_clients.pop(rank, ())

    def recover_messages(self, lost_hub: Connection, *, outward: bool) -> None:
        """Queue the messages again that a lost hub has not received completely, for it has discarded these.

        They are for the other groups only if `outward`.
        """
        waiting = self._outward if outward else self._for_hub
        waiting.extendleft(packet for packet in reversed(lost_hub.queue) if packet[0] == MESSAGE)

    def add_hub(self, connection: Connection) -> None:
        """Make an attempt the connection to the hub."""
        del self.attempts[connection]
        connection.role = "hub"
        self.deadlines.remove(connection)
        self.hub = connection

    def add_client(self, connection: Connection) -> None:
        """Make an accepted connection that of a client."""
        del self.strangers[connection]
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
        self._unproven_of(connection.role).pop(connection, None)
        self.deadlines.remove(connection)
        for some in (self.unwritten, self.unacknowledged, self._changed, self._unregistered):
            some.discard(connection)
        if self.clients.get(connection.rank) is connection:
            del self.clients[connection.rank]
        if self.hub is connection:
            self.hub = None
        connection.sock.close()

    def has_waiting_packets(self) -> bool:
        """Return True if packets wait for connections."""
        return bool(self._for_hub or self._outward or self._for_clients)

    def touch(self, connection: Connection) -> None:
        """Take account of a change of `connection`, such as of an acknowledgement that has arrived."""
        self._changed.add(connection)

    def write(self) -> None:
        """Hand the kernel as much as it accepts of what has been queued."""
        while self._changed:
            one = self._changed.pop()
            if one.sock.fileno() < 0:
                continue  # it was dropped, and then something was queued
            one.write()
            if one.idle:
                self.unwritten.discard(one)
            else:
                self.unwritten.add(one)
            if one.unacknowledged:
                self.unacknowledged.add(one)
            if one.events != _wanted_events(one):
                self._unregistered.add(one)

    def is_delivered(self) -> bool:
        """Return True if the peers' kernels have acknowledged everything that was sent."""
        if self._changed or self.unwritten:
            return False
        for one in self.unacknowledged.copy():
            if unacknowledged_bytes(one.sock):
                return False
            self.record_acknowledgement(one)
        return True

    def record_acknowledgement(self, connection: Connection) -> None:
        """Record that everything that was sent on `connection` is acknowledged."""
        connection.unacknowledged = False
        self.unacknowledged.discard(connection)

    def take_due(self, now: float) -> Iterator[Connection]:
        """Yield the connections whose deadlines have come, each without its deadline."""
        for one in self.deadlines.take_due(now):
            if one.sock.fileno() >= 0:  # the end of another one may have closed it
                yield one

    @property
    def needs_selector(self) -> bool:
        """True if the selector waits for other events than it should."""
        return bool(self._unregistered)

    def update_selector(self) -> None:
        """Set the events for which the selector waits."""
        while self._unregistered:
            one = self._unregistered.pop()
            events = _wanted_events(one)
            if events != one.events:
                change = self._selector.modify if one.events else self._selector.register
                change(one.sock, events, one)
                one.events = events

    def close(self) -> None:
        """Close all connections."""
        # A forked child has the selector of its parent, from which it must remove nothing.
        for one in [*self.established(), *self.unproven()]:
            one.sock.close()
        for some in (self.clients, self.strangers, self.attempts, self.probes):
            some.clear()
        for others in (self.unwritten, self.unacknowledged, self._changed, self._unregistered):
            others.clear()
        self.hub = None


def _wanted_events(connection: Connection) -> int:
    is_waiting = connection.connecting or connection.blocked
    return selectors.EVENT_READ | (selectors.EVENT_WRITE if is_waiting else 0)
