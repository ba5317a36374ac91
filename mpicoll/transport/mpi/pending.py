"""Non-blocking transfers, and a registry of those that MPI may still be carrying out."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, TypeAlias

from mpi4py import MPI

from mpicoll.errors import CommunicationError, RankFailed
from mpicoll.extension import list_pending_messages
from mpicoll.transport.base import Envelope, Memory, Traffic
from mpicoll.transport.mpi.fault_tolerance import FailureState, fault_tolerant
from mpicoll.transport.mpi.translation import envelope_of, translate_truncation
from mpicoll.transport.waiting import poll

PostedRecv: TypeAlias = tuple[Any, int | None, int | None]
"""Communicator, source and tag (None: any) of a posted receive; for a send the communicator is None."""


class MpiPending:
    """A non-blocking transfer. It stores its outcome, since MPI reports that only once, and to one thread only."""

    def __init__(
        self,
        rank: int,
        failures: FailureState,
        traffic: Traffic,
        request: MPI.Request,
        data: Memory,
        takes: PostedRecv,
    ) -> None:
        self.rank = rank
        self.takes = takes
        self._failures = failures
        self._traffic = traffic
        self._request = request
        self._data = data
        self._status = MPI.Status()
        self._done: Envelope | None = None
        self._error: CommunicationError | None = None
        self._cancelling = False
        self._lock = threading.Lock()
        active_transfers.add(self)

    def test(self) -> Envelope | None:
        # A waiting thread holds the lock inside MPI, and completes the transfer itself.
        if not self._lock.acquire(blocking=False):
            return None
        try:
            return self._advance(self._failures.complete if fault_tolerant() else MPI.Request.Test)
        finally:
            self._lock.release()

    def wait(self, timeout: float | None) -> Envelope:
        if timeout is None and not fault_tolerant():
            with self._lock:
                self._advance(MPI.Request.Wait)
        else:
            poll(self.test, timeout, f"rank {self.rank}: point-to-point transfer")
        assert self._done is not None
        return self._done

    def cancel(self) -> Envelope | None:
        with self._lock:
            if self._done is None and self._error is None:
                self._cancelling = True
                self._request.Cancel()
            # A message that had been matched with the receive before still arrives.
            self._advance(MPI.Request.Wait)
            return None if self._status.Is_cancelled() else self._done

    def _advance(self, step: Callable[[MPI.Request, MPI.Status], bool]) -> Envelope | None:
        """Call `step`, which completes the request if it can. Return the envelope if it has; raise the transfer's
        error."""
        if self._error is not None:
            raise self._error
        if self._done is None:
            try:
                finished = step(self._request, self._status)
            except MPI.Exception as error:
                received = self.takes[0] is not None
                truncated = translate_truncation(self.rank, error, self._status, self._data) if received else None
                self._error = truncated or self._failures.operation_error(error, (self._request, self._data))
                active_transfers.remove(self)
                raise self._error from error
            except RankFailed as error:
                self._error = error
                active_transfers.remove(self)
                self._failures.retain((self._request, self._data))
                raise
            if finished:
                self._done = envelope_of(self._status)
                if self.takes[0] is not None and not (self._cancelling and self._status.Is_cancelled()):
                    next(self._traffic.receives[self._done.source, self._done.tag])
                active_transfers.remove(self)
        return self._done


class ActiveTransfer(Protocol):
    """A transfer, and what it receives."""

    takes: PostedRecv

    def test(self) -> Envelope | None: ...


class ActiveTransfers:
    """All transfers that MPI may still be carrying out. MPI uses their memory even if the program has dropped the
    requests and the communicator, so this registry keeps it alive."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.pending: dict[int, ActiveTransfer] = {}

    def add(self, pending: ActiveTransfer) -> None:
        """Register `pending`, and test the two oldest transfers."""
        self.test_oldest()
        with self._lock:
            self.pending[id(pending)] = pending

    def test_oldest(self) -> None:
        """Test the two oldest transfers, if there are any. Called whenever a message is started, it bounds the number
        of completed transfers on which the program never waits."""
        if not self.pending:
            return
        with self._lock:
            oldest = list(itertools.islice(self.pending.items(), 2))
            for key, _ in oldest:
                self.pending[key] = self.pending.pop(key)
        for _, one in oldest:
            with suppress(CommunicationError):  # raised again by the transfer's own wait
                one.test()

    def remove(self, pending: ActiveTransfer) -> None:
        """Unregister `pending`, which has completed or failed."""
        with self._lock:
            self.pending.pop(id(pending), None)

    def list_started(self) -> list[tuple[str, int | None]]:
        """Return the transfers that may be under way, as "send" or "recv" and the tag (None: any, or not known). Takes
        no lock: the thread that holds it may be stuck."""
        transfers = [one.takes for one in list(self.pending.values())]
        started = [(kind, None if tag == MPI.ANY_TAG else tag) for _, kind, _, tag in list_pending_messages()]
        return [("send" if comm is None else "recv", tag) for comm, _, tag in transfers] + started

    def list_posted_receives(self) -> list[PostedRecv]:
        """Return the receives that have not completed; entries of unfinished sends (communicator None) are included."""
        with self._lock:
            registered = list(self.pending.values())
        for one in registered:
            with suppress(CommunicationError):
                one.test()
        with self._lock:
            return [one.takes for one in self.pending.values()]


active_transfers = ActiveTransfers()
