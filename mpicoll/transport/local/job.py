"""The state that ranks which are threads share."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from mpicoll.errors import RankFailed, Timeout
from mpicoll.transport.local.faults import Fault, FaultInjector, Killed
from mpicoll.transport.local.mailbox import LocalMailbox, LocalMessage
from mpicoll.wording import rank_list

T = TypeVar("T")

Group: TypeAlias = tuple[int, tuple[int, ...]]
"""A group by its context, which others may share, and its members."""

Contexts: TypeAlias = tuple[int, int]
"""The contexts of a group, as in MPI: one for collectives and one for point-to-point messages."""


@dataclass(slots=True)
class Agreement:
    """An agreement of the living ranks: their flags and, once all have entered, their ranks and new contexts."""

    flags: dict[int, bool]
    ranks: tuple[int, ...] = ()
    contexts: Contexts = (0, 0)


class LocalJob:
    """A job of `size` ranks: mailboxes, dead ranks, faults, and exchanges of values.

    `timeout` is the bound of a wait in seconds. `changed` guards all of it, and is notified of every change.
    """

    def __init__(self, size: int, faults: Sequence[Fault] = (), timeout: float = 60.0) -> None:
        self.size = size
        self.timeout = timeout
        self.changed = threading.Condition()
        self.dead: set[int] = set()
        """The ranks whose threads have ended."""
        self.killed: set[int] = set()
        """The dead ranks that faults have killed."""
        self.revoked: set[Group] = set()
        """The revoked groups, as in ULFM."""
        self.faults = FaultInjector(faults)
        self._mailboxes: dict[tuple[int, int], LocalMailbox] = {}
        self._contexts = itertools.count(1)
        self._exchanges: dict[Hashable, dict[int, Any]] = {}
        self._agreements: dict[Hashable, Agreement] = {}

    def mailbox(self, context: int, rank: int) -> LocalMailbox:
        """Return the mailbox of rank `rank` of the job. The lock is held."""
        return self._mailboxes.setdefault((context, rank), LocalMailbox())

    def deliver(self, context: int, source: int, dest: int, message: LocalMessage) -> None:
        """Put `message` into the mailbox of rank `dest` of the job, unless a fault prevents it. The lock is held."""
        try:
            arrival = self.faults.arrival(source, dest, message.arrival)
        except Killed:
            self.killed.add(source)
            self.mark_dead(source)
            raise
        if arrival is not None:
            message.arrival = arrival
            self.mailbox(context, dest).deliver(message)
            self.changed.notify_all()

    def mark_dead(self, rank: int) -> None:
        """Record that the thread of `rank` has ended."""
        with self.changed:
            self.dead.add(rank)
            self.changed.notify_all()

    def wait(
        self,
        ready: Callable[[], T | None],
        peers: Callable[[], set[int]],
        timeout: float,
        what: str,
        group: Group | None = None,
    ) -> T:
        """Wait until `ready` returns a value other than None. The lock is held. Raises RankFailed or Timeout.

        `peers` are the ranks of the job whose death makes that impossible; `group` is the group of the
        operation.
        """
        deadline = time.monotonic() + timeout
        while (value := ready()) is None:
            dead = peers() & self.dead
            if dead:
                raise exit_error(what, dead)
            if group in self.revoked:
                raise self.revoked_error(what)
            now = time.monotonic()
            if now >= deadline:
                raise Timeout(f"{what}: nothing within {timeout:g} s")
            # No notification is sent when a delayed message arrives.
            self.changed.wait(min(deadline - now, 0.002 if self.faults.delays else 1.0))
        return value

    def revoked_error(self, what: str) -> RankFailed:
        """Return the error for an operation in a revoked group."""
        ranks = tuple(sorted(self.killed))
        return RankFailed(
            f"{what}: the group was revoked (killed: {rank_list(ranks)}); continue with comm.shrink()", ranks
        )

    def agree(self, key: Hashable, members: Sequence[int], rank: int, flag: bool, timeout: float) -> Agreement:
        """Exchange flags with those of `members` that live. Deaths do not make it fail."""
        with self.changed:
            agreement = self._agreements.setdefault(key, Agreement({}))
            agreement.flags[rank] = flag
            self.changed.notify_all()

            def complete() -> bool | None:
                if not agreement.ranks and agreement.flags.keys() | self.dead >= set(members):
                    # The first thread that finds the agreement complete determines the result for all.
                    agreement.ranks = tuple(m for m in members if m in agreement.flags and m not in self.dead)
                    agreement.contexts = next(self._contexts), next(self._contexts)
                return bool(agreement.ranks) or None

            self.wait(complete, set, timeout, "agreement of the living ranks")
            return agreement

    def exchange(
        self,
        key: Hashable,
        members: Sequence[int],
        rank: int,
        value: Any,
        timeout: float,
        what: str = "creation of a group",
        group: Group | None = None,
    ) -> tuple[dict[int, Any], Contexts]:
        """Exchange a value with all of `members`. Returns the values by member, and new contexts for the members."""
        with self.changed:
            table = self._exchanges.setdefault(key, {-1: (next(self._contexts), next(self._contexts))})
            table[rank] = value
            self.changed.notify_all()

            def missing() -> set[int]:
                return {m for m in members if m not in table}

            try:
                self.wait(lambda: None if missing() else True, missing, timeout, what, group)
            except Timeout as error:
                raise Timeout(f"{error} from {rank_list(missing())}") from None
            self._exchanges.pop(key, None)
            values = dict(table)
            return values, values.pop(-1)


def exit_error(what: str, dead: set[int]) -> RankFailed:
    """Return the error for an operation `what` that can't complete because ranks of the job have exited."""
    return RankFailed(f"{what}: rank {min(dead)} has exited", tuple(sorted(dead)))
