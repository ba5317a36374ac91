"""Detection of operations that can never complete."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mpicoll.config import config
from mpicoll.engine.diagnostics.abort import JobAbort
from mpicoll.engine.diagnostics.call_facts import State
from mpicoll.engine.diagnostics.departures import make_departed_state
from mpicoll.engine.diagnostics.flight_recorder import Entry, EntryTuple
from mpicoll.engine.diagnostics.local_waits import LocalWaits, WaitKey, wait_key
from mpicoll.engine.diagnostics.peers import QUERY_TIMEOUT, Peers
from mpicoll.errors import CommunicationError, MismatchError
from mpicoll.named_tuple import NamedTuple

if TYPE_CHECKING:
    from mpicoll.engine.diagnostics.deadlock import Deadlock

_INTERVAL = 0.4
"""Fraction of MPICOLL_STUCK_AFTER between two examinations of all ranks: a wait found stuck by both is stuck."""

_MAX_INTERVAL = 60.0
"""Maximum seconds between two requests for an examination because of one wait. The interval doubles each time."""

AFTER_LEAVE = 0.2
"""Seconds that a rank waits before it compares its waits with the final states of ranks that have left."""

_RAISE_TIMEOUT = 15.0
"""Seconds that an operation that can never complete has to raise, if it polls, before the job is aborted."""

_BLOCKED = 0.5
"""Seconds without polling after which such an operation is assumed to block. One that is about to raise has stopped
polling too, and its thread may not get a core at once.
"""


class Cause(NamedTuple):
    """The reason why operations can never complete."""

    why: str
    mismatch: bool

    def error(self) -> CommunicationError:
        return MismatchError(self.why) if self.mismatch else CommunicationError(self.why)


class UnsatisfiableWaits:
    """The operations of this rank that can never complete. Except for :meth:`check`, used by the watchdog's thread.

    They raise if they poll; an operation that blocks inside MPI can't, and the job is aborted.
    """

    def __init__(self, waits: LocalWaits, peers: Peers, abort: JobAbort) -> None:
        self._waits = waits
        self._peers = peers
        self._abort = abort
        self._causes: dict[WaitKey, Cause] = {}
        self._since: dict[WaitKey, float] = {}  # when each of them was marked
        self._polled: dict[WaitKey, float] = {}  # when each of them was seen to poll, or marked
        self._found: tuple[Any, ...] = ()  # the waits that the last examination has found to be stuck
        self._examined = 0.0  # time of the last examination
        self._requested = False  # True if a rank has requested an examination from the coordinator
        self._next: dict[WaitKey, float] = {}  # for each wait, when an examination is due because of it

    def check(self, raw: EntryTuple | None) -> None:
        """Raise CommunicationError if the operation `raw`, in which this rank polls, can never complete."""
        cause = self._causes.get(wait_key(Entry._make(raw))) if self._causes and raw is not None else None
        if cause is not None:
            raise cause.error()

    def mark(self, waits: Sequence[Sequence[Any]], cause: Cause) -> None:
        """Mark the operations of this rank among `waits`, each (rank, key, number, begin), as unable to complete."""
        own = {(key, number, begin) for rank, key, number, begin in waits if rank == self._peers.rank}
        bounded = [*self._waits.timed_out, *self._waits.bounded]
        for entry in self._waits.entries():
            if wait_key(entry) in own and not any(entry.call is one for one in bounded):
                self._causes.setdefault(wait_key(entry), cause)
        self._waits.failing = self._causes.keys()

    def request_examination(self) -> None:
        """Examine all ranks at the next opportunity, because another rank has requested it from the coordinator."""
        self._requested = True

    def seconds_to_next(self, waiting: list[Entry], now: float) -> list[float]:
        """Return the seconds after which the next checks are due, for each reason."""
        seconds = [max(0.05, self._due(entry) - now) for entry in waiting]
        if self._found or self._requested:
            seconds.append(max(0.05, self._examined + self._interval() - now))
        if self._peers.left and waiting:
            seconds.append(AFTER_LEAVE)
        if self._since:
            seconds.append(0.05)
        return seconds

    def update(self, waiting: list[Entry], now: float) -> None:
        """Check the operations in which this rank waits."""
        self._compare_with_left_ranks(waiting, now)
        self._abort_if_blocked(waiting, now)
        self._examine_if_due(waiting, now)

    def _compare_with_left_ranks(self, waiting: list[Entry], now: float) -> None:
        """Fail operations that wait for ranks that have left.

        The state of a rank that has left is final, so a single examination is sufficient.
        """
        left = set(self._peers.left)
        if any(
            left & set(entry.group.members) and now - entry.begin > AFTER_LEAVE and wait_key(entry) not in self._causes
            for entry in waiting
        ):
            from mpicoll.engine.diagnostics.deadlock import find_deadlock  # late, see `late_imports`

            states = {rank: make_departed_state(rank, "left", **one) for rank, one in self._peers.left.items()}
            found = find_deadlock(states | {self._peers.rank: self._peers.own_state()}, self._peers.size)
            if found is not None:
                self.mark(found.waits, Cause(str(found), bool(found.mismatches)))

    def _abort_if_blocked(self, waiting: list[Entry], now: float) -> None:
        """Abort the job if an operation that can never complete has not raised: one that blocks inside MPI can't."""
        self._causes = {key: self._causes[key] for key in map(wait_key, waiting) if key in self._causes}
        self._waits.failing = self._causes.keys()
        self._since = {key: self._since.get(key, now) for key in self._causes}
        if not self._causes:
            return
        pending = self._peers.own_state().get("pending", [])
        polling = {(one["key"], one["number"], one["begin"]) for one in pending if one.get("polls")}
        self._polled = {key: now if key in polling else self._polled.get(key, now) for key in self._causes}
        for key, cause in self._causes.items():
            if now - self._polled[key] > _BLOCKED or now - self._since[key] > _RAISE_TIMEOUT:
                self._abort.request(cause.why)

    @staticmethod
    def _interval() -> float:
        """Return the seconds between two examinations."""
        return _INTERVAL * config().stuck_after

    def _due(self, entry: Entry) -> float:
        """Return the time at which the states of all ranks are to be collected because of a wait.

        It is such that a second examination is complete when the wait has lasted MPICOLL_STUCK_AFTER seconds.
        """
        return self._next.get(wait_key(entry), entry.begin + config().stuck_after - self._interval())

    def _examine_if_due(self, waiting: list[Entry], now: float) -> None:
        """Examine all ranks on the coordinator, which each rank requests because of its waits."""
        if self._peers.network is None:
            return
        due = [entry for entry in waiting if now >= self._due(entry) and wait_key(entry) not in self._causes]
        later = {
            wait_key(entry): now + min(max(config().stuck_after, now - entry.begin), _MAX_INTERVAL) for entry in due
        }
        known = {wait_key(entry) for entry in waiting}
        self._next = {key: at for key, at in self._next.items() if key in known} | later
        coordinator = self._peers.coordinator()
        if coordinator != self._peers.rank:
            if due:
                self._peers.send("examination request", coordinator)
            return
        self._requested = self._requested or bool(due)
        if not (self._requested or self._found) or now - self._examined < self._interval():
            return
        self._requested = False
        found = self._find_deadlock()
        self._examined = time.monotonic()
        before, self._found = self._found, () if found is None else found.waits
        if found is not None and before == found.waits:
            cause = Cause(str(found), bool(found.mismatches))
            self._peers.send("unsatisfiable", waits=found.waits, why=cause.why, mismatch=cause.mismatch)
            self.mark(found.waits, cause)
            self._found = ()

    def _find_deadlock(self) -> Deadlock | None:
        """Return the deadlock that the states of all ranks prove if they don't change, or None."""
        from mpicoll.engine.diagnostics.deadlock import find_deadlock, open_questions  # late, see `late_imports`

        states = self._collect_states()
        questions = open_questions(states)
        if questions:
            states = self._collect_states(questions)
        return find_deadlock(states, self._peers.size)

    def _collect_states(self, calls: Sequence[Sequence[Any]] = ()) -> dict[int, State]:
        """Return the states of the ranks that reply, without operations that are about to raise.

        Their ranks continue, so that another operation that waits for these ranks may complete.
        """
        states = self._peers.collect_states(QUERY_TIMEOUT, full=False, calls=calls)
        return {
            rank: state | {"pending": [one for one in state.get("pending", []) if not one.get("failing")]}
            for rank, state in states.items()
            if state is not None
        }
