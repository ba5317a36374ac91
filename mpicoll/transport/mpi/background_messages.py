"""Messages that a thread of the extension moves, which never takes the interpreter lock."""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, finalize

from mpi4py import MPI

from mpicoll.errors import CommunicationError
from mpicoll.transport.base import Envelope, Memory, Traffic, truncation_error
from mpicoll.transport.mpi.direct_messages import bind_background_messages
from mpicoll.transport.mpi.native import INT_MAX
from mpicoll.transport.mpi.pending import PostedRecv, active_transfers
from mpicoll.transport.waiting import poll

if TYPE_CHECKING:
    from mpicoll._shm import BackgroundMessage, BackgroundMessages

MakeError = Callable[[int, Envelope, int], Exception]
"""Function of an error code of MPI, of a message and of the bytes of the memory for it."""


class MpiBackgroundMessage:
    """A message that the thread moves."""

    def __init__(
        self, messages: BackgroundMessages, message: BackgroundMessage, size: int, takes: PostedRecv, error: MakeError
    ) -> None:
        self.takes = takes
        self._messages = messages
        self._message = message
        self._size = size
        self._make_error = error
        self._outcome: Envelope | Exception | None = None
        active_transfers.add(self)

    def test(self) -> Envelope | None:
        if self._outcome is None:
            found = self._message.test()
            if found is None:
                return None
            code, _, source, tag, nbytes = found
            envelope = Envelope(source, tag, nbytes)
            if not code and nbytes > self._size:
                # Some libraries report no error.
                self._outcome = truncation_error(self.takes[0].rank, envelope, self._size)
            else:
                self._outcome = self._make_error(code, envelope, self._size) if code else envelope
            active_transfers.remove(self)
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome

    def wait(self, timeout: float | None) -> Envelope:
        envelope = poll(self.test, timeout, "a message that a thread moves")
        assert envelope is not None
        return envelope

    def cancel(self) -> Envelope | None:
        if not self._messages.cancel(self._message):
            raise CommunicationError("a receive was cancelled, and MPI has not completed it")
        envelope = self.test()
        found = self._message.test()
        return None if found is not None and found[1] else envelope


class MpiBackgroundQueue:
    """Messages to and from the ranks `peers` of `comm`."""

    max_bytes = INT_MAX

    def __init__(
        self, messages: BackgroundMessages, comm: MPI.Intracomm, peers: Sequence[int], make_error: MakeError
    ) -> None:
        self._messages = messages
        self._comm = comm
        self._peers = peers
        self._make_error = make_error
        # Messages that have not completed keep `messages`.
        finalize(self, messages.stop).atexit = False
        _queues.add(self)
        _stop_at_exit()

    @property
    def completed(self) -> int:
        return self._messages.completed

    @property
    def left(self) -> int:
        return self._messages.left

    def send(self, lane: int, data: Memory, tag: int, *, in_turn: bool = False) -> MpiBackgroundMessage:
        return self._wrap(self._messages.send(lane, data, tag, in_turn), data, (None, None, None))

    def recv(self, lane: int, data: Memory, tag: int) -> MpiBackgroundMessage:
        return self._wrap(self._messages.recv(lane, data, tag), data, (self._comm, self._peers[lane], tag))

    def _wrap(self, message: BackgroundMessage, data: Memory, takes: PostedRecv) -> MpiBackgroundMessage:
        return MpiBackgroundMessage(self._messages, message, data.nbytes, takes, self._make_error)

    def pause(self, seen: int, seconds: float) -> None:
        self._messages.wait(seen, seconds)

    def stop(self) -> None:
        self._messages.stop()


_queues: WeakSet[MpiBackgroundQueue] = WeakSet()


@functools.cache
def _stop_at_exit() -> None:
    """Have the threads of all queues end. MPI was loaded before, hence that is before MPI is finalized."""

    def stop_all() -> None:
        for queue in list(_queues):
            queue.stop()

    atexit.register(stop_all)


def make_queue(
    comm: MPI.Intracomm, traffic: Traffic, peers: Sequence[int], make_error: Callable[..., Any]
) -> MpiBackgroundQueue | None:
    """Return the queue of `comm`; None if the extension can't call MPI. `make_error` is a :data:`MakeError`."""
    messages = bind_background_messages(comm, traffic, peers)
    return None if messages is None else MpiBackgroundQueue(messages, comm, peers, make_error)
