"""Non-blocking transfers, and all of them that may be under way."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

from mpi4py import MPI

from mpicoll.errors import CommunicationError, RankFailed
from mpicoll.transport.base import Envelope, Memory, poll
from mpicoll.transport.mpi.fault_tolerance import survives
from mpicoll.transport.mpi.messages import _envelope, _too_large

if TYPE_CHECKING:
    from mpicoll.transport.mpi.transport import MpiTransport

Takes: TypeAlias = tuple[Any, int | None, int | None]
"""What a transfer receives: communicator, source and tag; no communicator if it sends."""


class MpiPending:
    """A non-blocking transfer. It remembers how it ended, since MPI tells that only once, and only to one thread."""

    def __init__(self, owner: MpiTransport, request: MPI.Request, data: Memory, takes: Takes) -> None:
        self.rank = owner.rank
        self._owner = owner
        self.takes = takes
        self._request = request
        self._data = data
        self._status = MPI.Status()
        self._done: Envelope | None = None
        self._error: CommunicationError | None = None
        self._cancelling = False
        self._lock = threading.Lock()
        _under_way.keep(self)

    def test(self) -> Envelope | None:
        # A thread that waits holds the lock inside MPI, and will see the end by itself.
        if not self._lock.acquire(blocking=False):
            return None
        try:
            return self._advance(self._owner.ended if survives() else MPI.Request.Test)
        finally:
            self._lock.release()

    def wait(self, timeout: float | None) -> Envelope:
        if timeout is None and not survives():
            with self._lock:
                self._advance(MPI.Request.Wait)
        else:
            poll(self.test, timeout, f"rank {self.rank}: point-to-point transfer")
        assert self._done is not None
        return self._done

    def take_back(self) -> Envelope | None:
        with self._lock:
            if self._done is None and self._error is None:
                self._cancelling = True
                self._request.Cancel()
            # A message that was on its way to it comes all the same.
            self._advance(MPI.Request.Wait)
            return None if self._status.Is_cancelled() else self._done

    def _advance(self, step: Callable[[MPI.Request, MPI.Status], bool]) -> Envelope | None:
        if self._error is not None:
            raise self._error
        if self._done is None:
            try:
                finished = step(self._request, self._status)
            except MPI.Exception as error:
                too_large = None if self.takes[0] is None else _too_large(self.rank, error, self._status, self._data)
                self._error = too_large or self._owner.failed(error, (self._request, self._data))
                _under_way.drop(self)
                raise self._error from error
            except RankFailed as error:
                self._error = error
                _under_way.drop(self)
                self._owner.keep((self._request, self._data))
                raise
            if finished:
                self._done = _envelope(self._status)
                if self.takes[0] is not None and not (self._cancelling and self._status.Is_cancelled()):
                    next(self._owner.traffic.receives[self._done.source, self._done.tag])
                _under_way.drop(self)
        return self._done


class _UnderWay:
    """All transfers that may be under way: MPI uses their memory even when the caller has dropped them, and their
    communicator."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._pending: dict[int, MpiPending] = {}

    def keep(self, pending: MpiPending) -> None:
        """Keep `pending`, and look at the two oldest, which bounds the number of those that nobody waits for."""
        with self._lock:
            oldest = list(itertools.islice(self._pending.items(), 2))
            for key, _ in oldest:
                self._pending[key] = self._pending.pop(key)
            self._pending[id(pending)] = pending
        for _, one in oldest:
            with suppress(CommunicationError):  # for its own wait to say
                one.test()

    def drop(self, pending: MpiPending) -> None:
        """`pending` has ended."""
        with self._lock:
            self._pending.pop(id(pending), None)

    def receives(self) -> list[Takes]:
        """What is being received."""
        with self._lock:
            everything = list(self._pending.values())
        for one in everything:
            with suppress(CommunicationError):
                one.test()
        with self._lock:
            return [one.takes for one in self._pending.values()]


_under_way = _UnderWay()
