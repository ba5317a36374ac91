"""The listening sockets of a rank."""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Callable, Iterator, Sequence

from mpicoll.logs import get_logger
from mpicoll.transport.control.sockets import RESERVED_DESCRIPTORS, listen, query_descriptor_limit, tune

_AT_ONCE = 64
"""Connections that are accepted before the other connections are served."""

_PAUSE = 1.0
"""Seconds for which no connection is accepted when the process has too few descriptors."""

_UNEXPECTED = 64
"""Connections that are accepted at once, beyond one for each rank, while no rank is expected to connect."""

_UNEXPECTED_RATE = 50
"""Connections that are accepted per second when these are used up."""

_UNEXPECTED_PAUSE = 0.2


class Listener:
    """The sockets at which rank `rank` of `size` accepts connections.

    They have one port, at the IP addresses `addresses`, or at all of this host if there are none. Each is registered
    at `selector` with this object.
    """

    def __init__(self, rank: int, size: int, selector: selectors.BaseSelector, addresses: Sequence[str]) -> None:
        self._rank = rank
        self._selector = selector
        self._resume_at = float("inf")
        self._resume_if_expected = False
        self._has_logged = False
        self._burst = float(size + _UNEXPECTED)
        self._allowed = self._burst
        self._allowed_at = float("-inf")
        self._sockets = listen(size, addresses)
        self._register()

    @property
    def port(self) -> int:
        """The port at which this rank listens."""
        return int(self._sockets[0].getsockname()[1])

    @property
    def inodes(self) -> list[int]:
        """The inodes of the sockets, by which other processes of this host can recognise them."""
        return [os.fstat(listening.fileno()).st_ino for listening in self._sockets]

    @property
    def next_time(self) -> float:
        """The time at which :meth:`resume` is due."""
        return self._resume_at

    def accept(self, listening: socket.socket, outage: float, now: float, *, expected: bool) -> Iterator[socket.socket]:
        """Yield new connections to the socket `listening`, tuned for an outage of `outage` seconds.

        `expected` is True if a rank of the job may be about to connect. Otherwise the rate is limited: connections of
        others must not take the time of the program.
        """
        for _ in range(_AT_ONCE if self._resume_at == float("inf") else 0):
            if not expected and self._unexpected_left(now) < 1:
                self._stop(now + _UNEXPECTED_PAUSE)
                self._resume_if_expected = True
                return
            try:
                sock, _ = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError as error:
                self._pause(f"{error}", now)
                return
            if not expected:
                self._allowed -= 1
            limit = query_descriptor_limit()
            if sock.fileno() > limit - RESERVED_DESCRIPTORS:
                sock.close()
                self._pause(f"the limit of {limit} descriptors is near", now)
                return
            try:
                tune(sock, outage)
            except OSError:  # the connection has ended already
                sock.close()
                continue
            yield sock

    def _unexpected_left(self, now: float) -> float:
        self._allowed = min(self._burst, self._allowed + (now - self._allowed_at) * _UNEXPECTED_RATE)
        self._allowed_at = now
        return self._allowed

    def _stop(self, until: float) -> None:
        for listening in self._sockets:
            self._selector.unregister(listening)
        self._resume_at = until
        self._resume_if_expected = False

    def _pause(self, why: str, now: float) -> None:
        self._stop(now + _PAUSE)
        if not self._has_logged:
            self._has_logged = True
            get_logger().info(
                "rank %d can't accept all connections of its job: %s; it works without the others", self._rank, why
            )

    def resume(self, now: float, is_expected: Callable[[], bool]) -> None:
        """Accept connections again if the pause is over, or if it was for others and a rank is expected now."""
        if now >= self._resume_at or (self._resume_if_expected and is_expected()):
            self._register()
            self._resume_at = float("inf")
            self._resume_if_expected = False

    def close(self) -> None:
        """Close the port."""
        for listening in self._sockets:
            listening.close()

    def _register(self) -> None:
        for listening in self._sockets:
            self._selector.register(listening, selectors.EVENT_READ, self)
