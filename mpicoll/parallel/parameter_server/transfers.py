"""Transfers of a worker, which go on while it computes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from mpicoll.engine.core.poller import poller
from mpicoll.errors import CommunicationError
from mpicoll.parallel.parameter_server.links import Link
from mpicoll.parallel.parameter_server.messages import Array
from mpicoll.transport.base import Pending

_WINDOW = 4
"""Transfers that are tested at a time: a test of any makes MPI move all."""


class Transfers:
    """Sends and receives of a worker. A thread tests them: MPI moves large messages only while it is called."""

    def __init__(self, links: Sequence[Link]) -> None:
        self._links = links
        # Other transports move messages by themselves.
        self._background = all(link.transport.background and link.transport.native is not None for link in links)
        self._lock = threading.Lock()
        self._left: deque[Pending] = deque()
        self._watched = False

    def send(self, server: int, data: Array, tag: int) -> Pending:
        """Start to send `data`, which must not be changed until it has been sent."""
        pending = self._links[server].send(data, tag)
        self._add(pending)
        return pending

    def recv(self, server: int, data: Array, tag: int) -> Pending:
        """Start to receive into `data`."""
        pending = self._links[server].recv(data, tag)
        self._add(pending)
        return pending

    def _add(self, pending: Pending) -> None:
        with self._lock:
            self._left.append(pending)
            start = self._background and not self._watched
            self._watched = self._watched or start
        if start:
            # With a callback, the thread tests more often.
            poller.watch(self, lambda: None)

    def test(self) -> bool:
        """Make progress. Return True if no transfer is left. Called by the poller, so it does not raise."""
        with self._lock:
            for _ in range(min(_WINDOW, len(self._left))):
                pending = self._left.popleft()
                if not _has_ended(pending):
                    self._left.append(pending)
            if self._left:
                return False
            self._watched = False
            return True


def _has_ended(pending: Pending) -> bool:
    try:
        return pending.test() is not None
    except CommunicationError:
        return True  # raised again where the program waits for it
