"""Fault tolerance: jobs in which communication goes on after the failure of a rank (MPI's ULFM extension).

MPI reports a failure only to calls that involve the failed rank. So failures are also obtained from the
control network (:func:`mark_dead`). Every communicator that has a failed member is revoked: all its ranks then leave
their waits with RankFailed.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any
from weakref import WeakSet

import numpy as np
from mpi4py import MPI

from mpicoll.errors import CommunicationError, CommunicatorError, RankFailed
from mpicoll.transport import launch_env
from mpicoll.transport.base import Memory
from mpicoll.transport.mpi.translation import translate_error
from mpicoll.transport.waiting import poll, wait_for
from mpicoll.wording import inflect, rank_list

_POLL_INTERVAL = 0.05
"""Seconds between two queries of MPI for failed ranks, by waiting threads."""

_DETECTION_TIME = 1.0
"""Seconds within which a failure becomes known to the surviving ranks."""

_IDENTIFICATION_TIME = 2.0
"""Seconds within which it is known to a survivor which rank has failed, after one of its operations has failed."""

# Error classes that report a failed rank. Not every MPI library defines all of them.
_FAILURES = tuple(
    getattr(MPI, name) for name in ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED") if hasattr(MPI, name)
)
_UNSPECIFIC = (MPI.ERR_INTERN, MPI.ERR_OTHER, MPI.ERR_UNKNOWN)
"""Error classes that Open MPI also raises when a rank has failed."""

_REMEDY = (
    "This communicator can't be used any more; the survivors continue with comm.shrink(), which all of them must call,"
    " or run their loop with mpicoll.resilient"
)

_lock = threading.RLock()
"""Guards what follows, and which communicators are revoked or freed."""
_dead: set[int] = set()
_states: WeakSet[FailureState] = WeakSet()
_polled_at = 0.0


@lru_cache(maxsize=1)
def fault_tolerant() -> bool:
    """Return True if the job continues when a rank fails: MPI's fault tolerance is on (``mpirun --with-ft ulfm``)."""
    return (
        launch_env.is_fault_tolerant(os.environ)
        and hasattr(MPI.Comm, "Shrink")
        and MPI.Query_thread() == MPI.THREAD_MULTIPLE
    )


def allgather_objects(comm: MPI.Intracomm, value: Any) -> list[Any]:
    """Return the values of all ranks, as ``comm.allgather(value)`` does. Collective."""
    if not fault_tolerant():
        return list(comm.allgather(value))
    # mpi4py would call MPI_Allgatherv, of which Open MPI does not report all failures (`quirks.UNEVEN_ALLGATHER`).
    mine = np.frombuffer(MPI.pickle.dumps(value), np.uint8)
    sizes = np.empty(comm.size, np.int64)
    comm.Allgather(np.array([mine.size], np.int64), sizes)
    blocks = np.zeros((comm.size, sizes.max()), np.uint8)
    blocks[comm.rank, : mine.size] = mine
    comm.Allgather(MPI.IN_PLACE, blocks)
    return [MPI.pickle.loads(block[:size]) for block, size in zip(blocks, sizes, strict=True)]


def mark_dead(rank: int) -> None:
    """Record that `rank` of the job has died, and revoke all communicators of which it is a member: waits on them raise
    RankFailed. Does nothing if the death is known already, or if the job is not fault-tolerant."""
    if fault_tolerant() and not MPI.Is_finalized():
        with _lock:
            if rank in _dead:
                return
            _dead.add(rank)
            for state in list(_states):
                if rank in state.members:
                    state.revoke()


def _poll_dead() -> set[int]:
    """Return the ranks of the job that are known to be dead; query MPI at intervals only."""
    global _polled_at  # noqa: PLW0603  the interval is one for all communicators
    now = time.monotonic()
    if now - _polled_at > _POLL_INTERVAL:
        _polled_at = now
        _query_dead()
    return _dead


def _query_dead() -> set[int]:
    """Return the ranks of the job that are known to be dead, those included that MPI knows of now."""
    for rank in _failed_ranks() - _dead:
        mark_dead(rank)
    return set(_dead)


def _failed_ranks() -> set[int]:
    """Return the ranks of the job whose failure MPI has detected."""
    failed, whole = MPI.COMM_WORLD.Get_failed(), MPI.COMM_WORLD.Get_group()
    ranks = MPI.Group.Translate_ranks(failed, range(failed.size), whole)
    failed.Free()
    whole.Free()
    return set(ranks)


def find_undetected_failures() -> set[int]:
    """Return the ranks that were marked as dead, but whose failure MPI has not detected: its recovery waits for them.

    Open MPI's launcher reports no exits with a status other than 0.
    """
    return _dead - _failed_ranks() if _dead and not MPI.Is_finalized() else set()


class FailureState:
    """Failures and revocation of a transport's communicators.

    Where the job is not fault-tolerant (see :func:`fault_tolerant`) MPI ends it when a rank fails; then only
    :meth:`translate_error` and :meth:`retain` are of use.
    """

    def __init__(self, collective: MPI.Intracomm, p2p: MPI.Intracomm, members: tuple[int, ...]) -> None:
        self.members = members
        self._rank, self._size = collective.rank, collective.size
        self._collective, self._p2p = collective, p2p
        self.handles = [collective, p2p]
        """The communicators that belong to the transport, which are revoked and freed together."""
        self._retained: list[Any] = []
        self._derived: WeakSet[FailureState] = WeakSet()
        self.revoked_here = self._freed = False
        self._dead_before: frozenset[int] = frozenset()
        if fault_tolerant():
            with _lock:
                self._dead_before = frozenset(_dead.difference(members))
                _states.add(self)
                if not _dead.isdisjoint(members):  # these deaths are reported no second time
                    self.revoke()

    # --- revocation

    def revoke(self) -> None:
        """Revoke the communicators and all that were derived from them: on every rank, waits on them raise RankFailed.
        Returns at once. Raises CommunicatorError if the job is not fault-tolerant."""
        if not fault_tolerant():
            raise CommunicatorError(
                f"shrink: rank {self._rank} of {self._size} is in a job that ends when a rank dies; start it with"
                " `mpirun --with-ft ulfm` (Open MPI 5) to let it continue"
            )
        with _lock:
            derived = list(self._derived)
            if not self.revoked_here and not self._freed:
                self.revoked_here = True
                for comm in self.handles:
                    with suppress(MPI.Exception):  # some of the ranks to be informed have ended
                        comm.Revoke()
        for one in derived:
            one.revoke()

    def add_handle(self, comm: MPI.Intracomm) -> None:
        """Revoke and free `comm` with the other communicators of the transport."""
        with _lock:
            self.handles.append(comm)
            if self.revoked_here:
                with suppress(MPI.Exception):
                    comm.Revoke()

    def is_revoked(self) -> bool:
        """Return True if this rank or another one has revoked the communicator."""
        return self.revoked_here or bool(self._collective.Is_revoked())

    def add_derived(self, derived: FailureState) -> None:
        """Revoke `derived` with this one, from now on."""
        with _lock:
            self._derived.add(derived)
            revoked = self.revoked_here
        if revoked:
            derived.revoke()

    def mark_freed(self) -> bool:
        """Revoke the communicators no more: they are about to be freed. Return False if they must not be freed."""
        with _lock:
            self._freed = True
            _states.discard(self)
        # After MPI_Finalize nothing is left to free, and MPI would abort the process. Freeing a revoked communicator
        # would wait for its dead members.
        return not MPI.Is_finalized() and not (fault_tolerant() and self.is_revoked())

    def has_failed(self) -> bool:
        """Return True if a member is known to be dead or the communicator is revoked; wait a second for such reports.

        Always False if the job is not fault-tolerant.
        """

        def failed() -> bool | None:
            MPI.COMM_SELF.Iprobe()
            return self.is_revoked() or bool(_query_dead() & set(self.members)) or None

        return fault_tolerant() and bool(wait_for(failed, _DETECTION_TIME))

    def agree(self, flag: bool) -> bool:
        """Return the logical and of the flags of the living ranks. Collective over these, even if some die."""
        if not fault_tolerant():
            # A reduction of an object would match the barrier at the exit of a rank that has left.
            agreed = np.array([flag], np.int32)
            self._collective.Allreduce(MPI.IN_PLACE, agreed, MPI.LAND)
            return bool(agreed[0])
        while True:
            # Each failure makes Agree raise on all ranks until all have acknowledged it.
            self._collective.Ack_failed()
            try:
                return bool(self._collective.Agree(int(flag)))
            except MPI.Exception as error:
                if error.Get_error_class() not in _FAILURES:
                    raise

    # --- errors

    def translate_error(self, error: Exception) -> Exception:
        """Return this library's exception for an exception of MPI's; any other one as it is."""
        if isinstance(error, MPI.Exception):
            return self.operation_error(error)
        # In shared memory, the error of a rank whose peer can't continue does not name the reason. A rank that was
        # interrupted abandons its operation before it dies.
        return self.rank_failed(str(error)) if type(error) is CommunicationError and self.has_failed() else error

    def operation_error(self, error: MPI.Exception, memory: Any = None) -> CommunicationError:
        """Return the exception for an operation that has failed with `error`; `memory` is what MPI may still use."""
        if fault_tolerant():
            kind = error.Get_error_class()
            # An unspecific error may arrive before the death is known.
            if kind in _FAILURES or (kind in _UNSPECIFIC and self.has_failed()):
                self.retain(memory)
                return self.rank_failed(error.Get_error_string())
        return translate_error(self._rank, error)

    def rank_failed(self, reason: str) -> RankFailed:
        """Return the exception for an operation that has failed because ranks have died. Revokes the communicators, so
        that the other ranks leave their waits as well."""
        self.revoke()

        def newly_dead() -> set[int] | None:
            MPI.COMM_SELF.Iprobe()
            return _query_dead() - self._dead_before or None

        dead = wait_for(newly_dead, _IDENTIFICATION_TIME) or set()
        ranks = tuple(sorted(dead & set(self.members) or dead))
        return RankFailed(f"rank {self._rank} of {self._size}: {_describe_dead(ranks)} ({reason}). {_REMEDY}", ranks)

    def retain(self, memory: Any) -> None:
        """Keep memory alive that MPI may still use after a failed operation."""
        self._retained.append(memory)

    # --- transfers of a fault-tolerant job

    def complete(self, request: MPI.Request, status: MPI.Status) -> bool:
        """Complete a transfer if it has finished; return True if so. Raises RankFailed.

        Open MPI frees a request that it reports as failed, and aborts the job when another part of the transfer fails
        afterwards. So only requests that have succeeded are passed to MPI for completion.
        """
        if request.Get_status(status):
            if status.Get_error() != MPI.SUCCESS:
                raise MPI.Exception(status.Get_error())
            request.Wait()
            return True
        if (
            self.revoked_here
            or self._p2p.Is_revoked()
            or self._collective.Is_revoked()
            or _poll_dead() & set(self.members)
        ):
            raise self.rank_failed("while it waited for a message")
        return False

    def wait_all(self, requests: Sequence[MPI.Request], statuses: Sequence[MPI.Status]) -> None:
        """Wait until all transfers have completed. Raises RankFailed."""
        for request, status in zip(requests, statuses, strict=False):
            poll(partial(self.complete, request, status), None, "transfer")

    def wait(self, request: MPI.Request, data: Memory) -> MPI.Status:
        """Wait until the transfer of `data` has completed, and return its status. Raises RankFailed."""
        status = MPI.Status()
        try:
            self.wait_all([request], [status])
        except BaseException:
            self.retain((request, data))
            raise
        return status


def _describe_dead(ranks: Sequence[int]) -> str:
    if not ranks:
        return "another rank has revoked the communicator"
    return f"{rank_list(ranks)} of the job {inflect(ranks, 'has', 'have')} died"
