"""The ranks of a job, as one rank knows them: living, suspected or exited; and the hub that follows from that."""

from __future__ import annotations

from collections.abc import Callable

from mpicoll.named_tuple import NamedTuple
from mpicoll.transport.control import timing
from mpicoll.transport.control.events import PeerExit


class Suspect(NamedTuple):
    """A rank that seems to have died, while other ranks may have its farewell. It can't have left if `certain`."""

    exit: PeerExit
    since: float
    certain: bool


class Membership:
    """The ranks of the job as rank `rank` of `size` knows them. It does no I/O; times are passed to its methods.

    The hub is the lowest living rank. A suspected rank counts as dead for the election, but its death is reported
    only when it is established: at once if it has left crash output, or if it can't have left and is not a former hub;
    otherwise after the time in which other ranks could have reported its farewell.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.hub = -1
        """The rank that forwards messages; -1 before the first election."""
        self.leaving = False
        """True when this rank has announced its exit: it decides on no deaths, and is hub only if no other rank can."""
        self.exits: dict[int, PeerExit] = {}
        self.suspects: dict[int, Suspect] = {}
        self.relayed_at = float("-inf")
        """The time at which a farewell was last received through another rank."""
        self._elected_at = 0.0
        self._lowest = 0  # all lower ranks have exited

    @property
    def is_hub(self) -> bool:
        """True if this rank is the hub."""
        return self.hub == self.rank

    @property
    def had_another_hub(self) -> bool:
        """True if there has been another hub: then all ranks have had time to start."""
        return self.hub > 0

    @property
    def is_alone(self) -> bool:
        """True if no other rank lives."""
        return len(self.exits) + sum(rank not in self.exits for rank in self.suspects) == self.size - 1

    def others(self) -> list[int]:
        """Return the other living ranks."""
        return [rank for rank in range(self.size) if rank != self.rank and self.is_alive(rank)]

    def is_alive(self, rank: int) -> bool:
        """Return True if `rank` has neither exited nor seems to have died."""
        return rank not in self.exits and rank not in self.suspects

    def has_died(self, rank: int) -> bool:
        """Return True if `rank` is known to have died. One that has left may still have to report other exits."""
        return rank in self.exits and self.exits[rank].why != "left"

    def elect(self, now: float) -> bool:
        """Determine the hub. Returns True if it has changed."""
        while self._lowest in self.exits:
            self._lowest += 1
        able = (
            rank
            for rank in range(self._lowest, self.size)
            if self.is_alive(rank) and not (rank == self.rank and self.leaving)
        )
        hub = next(able, self.rank)
        if hub == self.hub:
            return False
        self.hub, self._elected_at = hub, now
        return True

    def record(self, gone: PeerExit) -> bool:
        """Record an exit that is established. Returns False if it was recorded before."""
        if gone.rank in self.exits or gone.rank == self.rank:
            return False
        self.suspects.pop(gone.rank, None)
        self.exits[gone.rank] = gone
        return True

    def suspect(self, gone: PeerExit, now: float, *, certain: bool) -> bool:
        """Suspect a rank. Returns True if its death is established instead, and to be recorded."""
        if gone.crash_output or (certain and gone.rank > self.hub):
            return True
        before = self.suspects.get(gone.rank)
        if before is None or (certain and not before.certain):
            self.suspects[gone.rank] = Suspect(gone, now, certain)
        return False

    def expiry(self, suspect: Suspect) -> float:
        """Return the time at which the death of `suspect` is established, unless a report about it arrives before."""
        if suspect.certain:
            return suspect.since + timing.HUB_DEATH_DELAY
        if self.leaving:
            return float("inf")  # the ranks that stay decide
        return max(suspect.since, self._elected_at) + timing.REPORT_WITHIN * (1 if self.is_hub else 2)

    def unannounced(self, have_all_reported: Callable[[], bool], now: float) -> list[PeerExit]:
        """Return the exits of suspects that no rank has announced.

        They are established on the hub when all living ranks have reported the exits that they have seen;
        `have_all_reported` returns True if they have done so.
        """
        if (
            self.suspects
            and self.is_hub
            and not self.leaving
            and now >= self.relayed_at + timing.REPORT_WITHIN
            and have_all_reported()
        ):
            return [suspect.exit for suspect in self.suspects.values()]
        return []
