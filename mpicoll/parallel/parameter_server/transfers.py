"""Transfers of a worker, which go on while it computes."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence

from mpicoll.engine.core.poller import poller
from mpicoll.errors import CommunicationError
from mpicoll.parallel.parameter_server.links import Link
from mpicoll.parallel.parameter_server.messages import Array
from mpicoll.transport.base import Envelope, Pending

IN_FLIGHT = 2
"""Large messages on their way to one rank at a time. MPI moves all that have been started side by side, so that all
would arrive at the end, and none could be answered while others arrive."""

_DISTANCE = 0.75
"""Time between the starts of two messages, as a share of that at full bandwidth."""

_LONGEST_DISTANCE = 0.01
"""Most seconds between the starts of two messages: one that was received late says nothing of the bandwidth."""

_PACED_BYTES = 256 << 10
"""Bytes of the messages after which others wait: for shorter ones, the interval between two tests would be measured."""

_PERIOD = 2e-4
"""Seconds between two tests: long enough to leave the core to the program, short beside the milliseconds that a message
of the default size takes at 1 Gbit/s."""

_WINDOW = 4
"""Transfers that are tested at a time: a test of any makes MPI move all."""


class Pace:
    """Pace of the sends of one queue.

    Large messages that start together arrive together, in turns with those of the other direction: the handshake of
    each waits behind the data of the other rank, and half the bandwidth is lost. So they start one after the other, at
    a distance that depends on how long the last one has taken.

    Args:
        enabled: False where nothing would start a message that has been refused.
    """

    def __init__(self, *, enabled: bool = True) -> None:
        self._enabled = enabled
        self._next = 0.0
        self._distance = 0.0

    def may_start(self) -> bool:
        """Return True if a message may start now, and count it as started."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + self._distance
        return True

    def end(self, begin: float, nbytes: int) -> None:
        """Take note that a message of `nbytes` has been sent which was started at `begin`."""
        if not self._enabled or nbytes < _PACED_BYTES:
            self._distance = 0.0
            return
        taken = time.monotonic() - begin
        self._distance = min(_DISTANCE * taken / IN_FLIGHT, _LONGEST_DISTANCE)


class QueuedSend:
    """Send that starts after earlier ones to the same server."""

    def __init__(self, link: Link, data: Array, tag: int) -> None:
        self._link, self._data, self._tag = link, data, tag
        self.nbytes = int(data.nbytes)
        self._pending: Pending | None = None
        self._error: CommunicationError | None = None
        self.begin = 0.0

    @property
    def has_started(self) -> bool:
        """True if the data is being sent, or the send has failed."""
        return self._pending is not None or self._error is not None

    def start(self) -> None:
        """Start to send. An error is raised by :meth:`test`."""
        self.begin = time.monotonic()
        try:
            self._pending = self._link.send(self._data, self._tag)
        except CommunicationError as error:
            self._error = error

    def test(self) -> Envelope | None:
        """Return the envelope if the data has been sent, else None."""
        if self._error is not None:
            raise self._error
        return None if self._pending is None else self._pending.test()


class Transfers:
    """Sends and receives of a worker. A thread tests them: MPI moves large messages only while it is called."""

    def __init__(self, links: Sequence[Link]) -> None:
        self._links = links
        # Other transports move messages that have been started by themselves.
        self._background = all(link.transport.background and link.transport.native is not None for link in links)
        # Held during calls of MPI.
        self._lock = threading.Lock()
        # Held for moments only, so that backward does not wait for MPI. Taken after the other one.
        self._queues_lock = threading.Lock()
        self._left: deque[Pending] = deque()
        self._queues: list[deque[QueuedSend]] = [deque() for _ in links]
        self._paces = [Pace(enabled=self._background) for _ in links]
        self._watched = False

    def send(self, server: int, data: Array, tag: int) -> Pending:
        """Start to send `data`, which must not be changed until it has been sent."""
        pending = self._links[server].send(data, tag)
        self._add(pending)
        return pending

    def send_in_turn(self, server: int, data: Array, tag: int) -> QueuedSend:
        """Send `data` when what was passed to this method before has been sent."""
        send = QueuedSend(self._links[server], data, tag)
        with self._queues_lock:
            self._queues[server].append(send)
        if not self._background:
            with self._lock:
                self._start_sends()
        self._watch()
        return send

    def recv_all(self, messages: Iterable[tuple[int, Array, int]]) -> list[Pending]:
        """Start to receive messages, which are the server, the memory and the tag of each.

        The thread that tests waits meanwhile: MPI calls release the interpreter lock, for which both would compete.
        """
        started = []
        with self._lock:
            for server, data, tag in messages:
                pending = self._links[server].recv(data, tag)
                self._left.append(pending)
                started.append(pending)
        self._watch()
        return started

    def _add(self, pending: Pending) -> None:
        with self._lock:
            self._left.append(pending)
        self._watch()

    def _watch(self) -> None:
        with self._queues_lock:
            start = self._background and not self._watched
            self._watched = self._watched or start
        if start:
            poller.watch(self, period=_PERIOD)

    def _start_sends(self) -> None:
        """Start the sends whose turn it is. The lock is held."""
        for queue, pace in zip(self._queues, self._paces, strict=True):
            for send in list(queue)[:IN_FLIGHT]:
                if send.has_started and _has_ended(send):
                    with self._queues_lock:
                        queue.remove(send)
                    pace.end(send.begin, send.nbytes)
            for send in list(queue)[:IN_FLIGHT]:
                if not send.has_started and pace.may_start():
                    send.start()

    def test(self) -> bool:
        """Make progress. Return True if no transfer is left. Called by the poller, so it does not raise."""
        with self._lock:
            self._start_sends()
            for _ in range(min(_WINDOW, len(self._left))):
                pending = self._left.popleft()
                if not _has_ended(pending):
                    self._left.append(pending)
            with self._queues_lock:
                if self._left or any(self._queues):
                    return False
                self._watched = False
                return True


def _has_ended(pending: Pending | QueuedSend) -> bool:
    try:
        return pending.test() is not None
    except CommunicationError:
        return True  # raised again where the program waits for it
