"""Transfers between workers and servers, which go on while workers compute and servers update weights.

A thread of the extension moves the messages if it can: :class:`BackgroundTransfers`. It needs no interpreter lock, for
which a thread of Python competes with the program.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from mpicoll.engine.core.poller import poller
from mpicoll.errors import CommunicationError
from mpicoll.parallel.parameter_server.messages import Array
from mpicoll.transport.base import BackgroundQueue, Envelope, Pending, Transport

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

_LARGE_PERIOD = 1e-3
"""Seconds between two tests of messages that the thread of the extension does not carry out."""

_SECONDS_TO_FREE = 1.0
"""Most seconds for which the last messages of a rank keep its thread: MPI sends those that are short by itself."""

_WINDOW = 4
"""Transfers that are tested at a time: a test of any makes MPI move all."""


BACKGROUND_BYTES = 1 << 20
"""Bytes of the dense tensors of a server from which a thread of the extension moves messages. Those of a smaller model
are sent at once, and a rank that waits for one sees it earlier than a thread that sleeps between its looks."""


class Link(NamedTuple):
    """Connection to another rank: `rank` in the job's communicator, `peer` in that of the link."""

    transport: Transport
    peer: int
    rank: int

    def send(self, data: Array, tag: int) -> Pending:
        """Start to send bytes."""
        return self.transport.isend(data, self.peer, tag)

    def recv(self, data: Array, tag: int) -> Pending:
        """Start to receive bytes."""
        return self.transport.irecv(data, self.peer, tag)


class Transfer(Protocol):
    """Send that has started, or will."""

    def test(self) -> Envelope | None:
        """Return the envelope if the data has been sent, else None. Raises CommunicationError if that has failed."""


class Transfers(Protocol):
    """Sends and receives on links, which are indices. Sent data must not be changed until it has been sent."""

    announces: bool
    """True if a pause ends when a message has completed."""

    @property
    def completed(self) -> int:
        """Number of messages that have completed, where pauses depend on it."""

    def send(self, link: int, data: Array, tag: int) -> Pending:
        """Start to send."""

    def send_in_turn(self, link: int, data: Array, tag: int) -> Transfer:
        """Send when what was passed to this method before has been sent."""

    def recv(self, link: int, data: Array, tag: int) -> Pending:
        """Start to receive."""

    def recv_all(self, messages: Iterable[tuple[int, Array, int]]) -> list[Pending]:
        """Start to receive messages, which are the link, the memory and the tag of each."""

    def test(self) -> bool:
        """Make progress. Return True if no transfer is left. Does not raise."""

    def pause(self, seen: int, seconds: float) -> None:
        """Sleep for `seconds`, or until `completed` is not `seen`."""

    def free(self) -> None:
        """End, when all transfers have."""


class BackgroundTransfers:
    """Transfers that a thread of the extension moves, on all ranks: it sends messages in pieces."""

    announces = True

    def __init__(self, links: Sequence[Link], queue: BackgroundQueue) -> None:
        self._links = links
        self._queue = queue
        # Larger than the thread can carry out.
        self._large: list[Pending] = []

    @property
    def completed(self) -> int:
        return self._queue.completed

    def send(self, link: int, data: Array, tag: int) -> Pending:
        if data.nbytes > self._queue.max_bytes:
            return self._add_large(self._links[link].send(data, tag))
        return self._queue.send(link, data, tag)

    def send_in_turn(self, link: int, data: Array, tag: int) -> Transfer:
        if data.nbytes > self._queue.max_bytes:
            return self._add_large(self._links[link].send(data, tag))
        return self._queue.send(link, data, tag, in_turn=True)

    def recv(self, link: int, data: Array, tag: int) -> Pending:
        if data.nbytes > self._queue.max_bytes:
            return self._add_large(self._links[link].recv(data, tag))
        return self._queue.recv(link, data, tag)

    def _add_large(self, pending: Pending) -> Pending:
        # The thread makes progress on it, too.
        self._large.append(pending)
        return pending

    def recv_all(self, messages: Iterable[tuple[int, Array, int]]) -> list[Pending]:
        return [self.recv(*message) for message in messages]

    def test(self) -> bool:
        self._large = [one for one in self._large if not _has_ended(one)]
        return not (self._queue.left or self._large)

    def pause(self, seen: int, seconds: float) -> None:
        # The thread does not count the large ones.
        self._queue.pause(seen, min(seconds, _LARGE_PERIOD) if self._large else seconds)

    def free(self) -> None:
        end = time.monotonic() + _SECONDS_TO_FREE
        while not self.test() and time.monotonic() < end:
            self.pause(self.completed, _LARGE_PERIOD)
        self._queue.stop()


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
    """Send that starts after earlier ones on the same link."""

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


class PolledTransfers:
    """Transfers that a thread of Python tests, or a rank that is `driven`: MPI moves large messages only while it is
    called."""

    announces = False
    completed = 0

    def __init__(self, links: Sequence[Link], *, driven: bool) -> None:
        self._links = links
        self._driven = driven
        # Other transports move messages that have been started by themselves.
        self._background = not driven and all(
            link.transport.background and link.transport.native is not None for link in links
        )
        # Held during calls of MPI.
        self._lock = threading.Lock()
        # Held for moments only, so that backward does not wait for MPI. Taken after the other one.
        self._queues_lock = threading.Lock()
        self._left: deque[Pending] = deque()
        self._queues: list[deque[QueuedSend]] = [deque() for _ in links]
        self._paces = [Pace(enabled=driven or self._background) for _ in links]
        self._watched = False

    def send(self, link: int, data: Array, tag: int) -> Pending:
        pending = self._links[link].send(data, tag)
        self._add(pending)
        return pending

    def recv(self, link: int, data: Array, tag: int) -> Pending:
        # The thread that waits for it tests it.
        return self._links[link].recv(data, tag)

    def send_in_turn(self, link: int, data: Array, tag: int) -> QueuedSend:
        send = QueuedSend(self._links[link], data, tag)
        with self._queues_lock:
            self._queues[link].append(send)
        if not self._background:
            with self._lock:
                self._start_sends()
        self._watch()
        return send

    def recv_all(self, messages: Iterable[tuple[int, Array, int]]) -> list[Pending]:
        started = []
        # The thread that tests waits meanwhile: MPI calls release the interpreter lock, for which both would compete.
        with self._lock:
            for link, data, tag in messages:
                pending = self._links[link].recv(data, tag)
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

    def pause(self, seen: int, seconds: float) -> None:
        time.sleep(seconds)

    def free(self) -> None:
        """Do nothing: MPI completes what is left."""


def _has_ended(pending: Transfer) -> bool:
    try:
        return pending.test() is not None
    except CommunicationError:
        return True  # raised again where the program waits for it
