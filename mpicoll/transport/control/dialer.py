"""The connections that a rank makes: attempts to connect to the hub, and probes of the ports of other ranks."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterable

from mpicoll.logs import get_logger
from mpicoll.transport.control import timing
from mpicoll.transport.control.addresses import AddressBook
from mpicoll.transport.control.attempts import Attempts
from mpicoll.transport.control.connection import Connection
from mpicoll.transport.control.deadlines import Deadlines
from mpicoll.transport.control.links import Links
from mpicoll.transport.control.sockets import connecting_error, is_taken, start_connecting

_MAX_PROBES = 64
"""Probes that are under way at a time. Each takes a descriptor of the program."""


class Dialer:
    """The attempts of rank `rank` to connect to the hub, and its probes of ranks that have not connected to it."""

    def __init__(self, rank: int, addresses: AddressBook, links: Links) -> None:
        self._rank = rank
        self._addresses = addresses
        self._links = links
        self._hub = -1
        self._attempts: Attempts | None = None
        self._probes: dict[int, Attempts] = {}
        self._probe_times: Deadlines[int] = Deadlines()

    @property
    def next_time(self) -> float:
        """The time at which an attempt or a probe is due."""
        attempts = float("inf") if self._attempts is None else self._attempts.next_time
        return min(attempts, self._probe_times.next_time if self._may_probe() else float("inf"))

    def _may_probe(self) -> bool:
        return len(self._links.probes) < _MAX_PROBES

    def seek_hub(self, rank: int) -> None:
        """Attempt to connect to `rank`."""
        self._hub = rank
        self._attempts = Attempts(self._addresses.addresses_of(rank), due=0.0, pause=0.1, longest=2.0)

    def stop_seeking(self) -> None:
        """Begin no more attempts to connect to a hub."""
        self._attempts = None

    def probe(self, ranks: Iterable[int], now: float) -> None:
        """Probe the ports of `ranks`, and of no others, if they have not connected after a while."""
        due, pause = now + timing.PROBE_AFTER, timing.PROBE_AFTER
        self._probes = {rank: Attempts(self._addresses.addresses_of(rank), due, pause, longest=10.0) for rank in ranks}
        self._probe_times = Deadlines()
        for rank, probes in self._probes.items():
            self._probe_times.set(rank, probes.next_time)

    def probe_too(self, rank: int, now: float) -> None:
        """Probe the port of `rank` too, if it has not connected after a while."""
        due, pause = now + timing.PROBE_AFTER, timing.PROBE_AFTER
        self._probes[rank] = Attempts(self._addresses.addresses_of(rank), due, pause, longest=10.0)
        self._probe_times.set(rank, due)

    def stop_probing(self, rank: int) -> None:
        """Probe the port of `rank` no more."""
        self._probes.pop(rank, None)
        self._probe_times.remove(rank)

    def begin_due(self, now: float, outage: float, has_had_time: Callable[[int], bool]) -> list[Connection]:
        """Begin the attempts and probes that are due. Returns those that have failed at once.

        `has_had_time` returns True if a rank has had time to start. Otherwise it is probed only if it is of this host:
        for others a missing answer would prove nothing.
        """
        begun: list[Connection] = []
        for address in () if self._attempts is None else self._attempts.take_due(now):
            begun += self._begin(self._hub, address, "attempt", now, outage)
        while self._may_probe() and (rank := self._probe_times.take_first(now)) is not None:
            probes = self._probes[rank]
            due = probes.take_due(now)
            for address in due:
                probes.postpone(address, now)
            self._probe_times.set(rank, probes.next_time)
            if due and (self._addresses.is_local(rank) or has_had_time(rank)):
                probes.discard_failures()
                for address in due:
                    begun += self._begin(rank, address, "probe", now, outage)
        return [one for one in begun if one.error is not None]

    def _begin(self, rank: int, address: str, role: str, now: float, outage: float) -> list[Connection]:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            one = self._links.open(socket.socket(family, socket.SOCK_STREAM), role, rank, address)
        except OSError as error:
            get_logger().debug("rank %d has no socket: %s", self._rank, error)
            if role == "attempt" and self._attempts is not None:
                self._attempts.postpone(address, now)
            return []
        one.error = start_connecting(one.sock, address, self._addresses.port(rank), outage) or None
        self._links.deadlines.set(one, now + timing.CONNECT_WITHIN)
        one.connecting = True
        return [one]

    def finish(self, one: Connection, now: float) -> bool:
        """Handle the end of connecting. Returns True if there is a connection, otherwise sets its error."""
        one.error = connecting_error(one.sock) or None
        if one.error is None and one.role == "probe":
            self._check_port(one)
        if one.error is not None:
            return False
        one.connecting = False
        self._links.deadlines.set(one, now + timing.PROVE_WITHIN)
        if one.role == "attempt" or self._addresses.is_local(one.rank):
            self.confirm(one)
        return True  # on another host, another process may have the port

    def confirm(self, one: Connection) -> None:
        """Record that an attempt or a probe has found the rank, or may have."""
        attempts = self._attempts_of(one)
        if attempts is not None:
            attempts.record_success(one.address)

    def wait_longer(self, one: Connection, now: float) -> bool:
        """Handle an attempt that has no answer yet. Returns False, and sets its error, if there can be none."""
        self._check_port(one)
        self._links.deadlines.set(one, now + timing.PROVE_WITHIN)
        return one.error is None  # a stopped process may be silent for long

    def _check_port(self, one: Connection) -> None:
        """Set the error of a port that another process has taken, which can be seen on the same host only."""
        book = self._addresses
        if book.is_local(one.rank) and is_taken(book.port(one.rank), book.inodes(one.rank)):
            one.error = errno.ECONNREFUSED

    def retry(self, one: Connection, now: float) -> None:
        """Attempt again to connect to the hub at the address of `one`."""
        if self._attempts is not None:
            self._attempts.postpone(one.address, now)

    def record_end(self, one: Connection, now: float) -> str | None:
        """Record the end of an attempt or a probe. Returns how all addresses of the rank have failed, or None."""
        attempts = self._attempts_of(one)
        if attempts is None:
            return None
        if one.role == "attempt":
            attempts.postpone(one.address, now)
        attempts.record_failure(one.address, one.error, connecting=one.connecting)
        return attempts.outcome

    def _attempts_of(self, one: Connection) -> Attempts | None:
        """Return the attempts to which `one` belongs, if they still matter."""
        if one.role == "probe":
            return self._probes.get(one.rank)
        return self._attempts if one.role == "attempt" and one.rank == self._hub else None
