"""The ranks of a job, as one rank knows them: living, suspected or exited; and the hub that follows from that."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence

from mpicoll.named_tuple import NamedTuple
from mpicoll.transport.control import timing
from mpicoll.transport.control.events import PeerExit

_MOST_RANGES = 24
"""Ranges of ranks that are listed: they fit into a packet of a peer that has not proved the token."""


class Suspect(NamedTuple):
    """A rank that seems to have died, while other ranks may have its farewell. It can't have left if `certain`."""

    exit: PeerExit
    since: float
    certain: bool


class Membership:
    """The ranks of the job as rank `rank` of `size` knows them. It does no I/O; times are passed to its methods.

    The ranks are in groups: one in a star, several in a tree. The lowest living rank of a group is its *leader*, the
    lowest of all is the *root*. The hub of a leader is the root, the hub of another rank is its leader; so in a star it
    is the root for all. The *children* of a rank are those whose hub it is.

    A suspected rank counts as dead for the election, but its death is reported
    only when it is established: at once if it has left crash output, or if it can't have left and is not a former hub;
    otherwise after the time in which other ranks could have reported its farewell.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.hub = -1
        """The rank that forwards messages; -1 before the first election."""
        self.leaving = False
        """True when this rank has announced its exit: it decides on no deaths."""
        self.resigned = False
        """True when all its clients have been told, or are being told, of its exit: it is hub only if no other can."""
        self.exits: dict[int, PeerExit] = {}
        self.suspects: dict[int, Suspect] = {}
        self.relayed_at = float("-inf")
        """The time at which a farewell was last received through another rank."""
        self._elected_at = 0.0
        self._elections = 0
        self._lowest = 0  # all lower ranks have exited
        self._group_of: Sequence[int] = ()  # in a tree
        self._ranks_of: dict[int, array[int]] = {}
        self._first: dict[int, int] = {}  # of each group the number of those that have exited before all others

    def set_groups(self, groups: Sequence[int]) -> None:
        """Make a tree of the ranks; `groups` has the number of each rank's group, by rank."""
        self._group_of = array("I", groups)
        for rank, group in enumerate(groups):
            self._ranks_of.setdefault(group, array("I")).append(rank)
        self._first = dict.fromkeys(self._ranks_of, 0)

    @property
    def is_hub(self) -> bool:
        """True if this rank is the hub of a star, or the root of a tree."""
        return self.hub == self.rank

    @property
    def is_tree(self) -> bool:
        """True if there are several groups."""
        return len(self._ranks_of) > 1

    @property
    def leads(self) -> bool:
        """True if this rank is the hub of its group."""
        return self.is_hub or (self.hub >= 0 and not self.is_in_group(self.hub))

    @property
    def had_another_hub(self) -> bool:
        """True if there has been another hub: then all ranks have had time to start."""
        return self._elections > 1 if self.is_tree else self.hub > 0

    def has_had_time(self, rank: int) -> bool:
        """Return True if `rank` has had time to start and to connect to this rank."""
        return self.had_another_hub or (self.is_tree and rank != self._ranks_of[self._group_of[rank]][0])

    def is_in_group(self, rank: int, other: int | None = None) -> bool:
        """Return True if `rank` is in the group of `other`, by default of this rank."""
        return not self.is_tree or self._group_of[rank] == self._group_of[self.rank if other is None else other]

    def group_of(self, rank: int) -> Sequence[int]:
        """Return the ranks of the group of `rank`, also those that have exited."""
        return self._ranks_of[self._group_of[rank]] if self.is_tree else range(self.size)

    def leader_of(self, rank: int) -> int | None:
        """Return the leader of the group of `rank`, None if none lives. This rank is none if it has resigned."""
        if not self.is_tree:
            return next(iter(self._able(range(self._lowest, self.size))), None)
        group = self._group_of[rank]
        ranks = self._ranks_of[group]
        while self._first[group] < len(ranks) and ranks[self._first[group]] in self.exits:
            self._first[group] += 1
        return next(iter(self._able(ranks[at] for at in range(self._first[group], len(ranks)))), None)

    def _able(self, ranks: Iterable[int]) -> Iterable[int]:
        return (rank for rank in ranks if self.is_alive(rank) and not (rank == self.rank and self.resigned))

    def is_child(self, rank: int) -> bool:
        """Return True if this rank is the hub of `rank`, which lives."""
        if rank == self.rank or not self.is_alive(rank):
            return False
        return self.leads if self.is_in_group(rank) else self.is_hub and self.leader_of(rank) == rank

    def children(self) -> list[int]:
        """Return the living ranks whose hub this rank is."""
        if not self.is_tree:
            return self.others() if self.is_hub else []
        own = [rank for rank in self.group_of(self.rank) if rank != self.rank and self.is_alive(rank)]
        return [*(own if self.leads else ()), *(self.other_leaders() if self.is_hub else ())]

    def other_leaders(self) -> list[int]:
        """Return the leaders of the other groups of a tree."""
        leaders = (self.leader_of(ranks[0]) for ranks in self._ranks_of.values())
        return [one for one in leaders if one is not None and not self.is_in_group(one)]

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

    def list_ranges(self) -> list[tuple[int, int]]:
        """Return the longest ranges of ranks that have exited, as their first and last ranks: few, for a handshake."""
        ranges: list[list[int]] = []
        for rank in sorted(self.exits):
            if ranges and ranges[-1][1] == rank - 1:
                ranges[-1][1] = rank
            else:
                ranges.append([rank, rank])
        ranges.sort(key=lambda one: one[0] - one[1])
        return [(first, last) for first, last in ranges[:_MOST_RANGES]]

    def list_unknown_exits(self, known: Iterable[tuple[int, int]]) -> list[PeerExit]:
        """Return the exits that are not in the ranges `known`."""
        exits = self.exits.copy()
        for first, last in known:
            for rank in range(max(first, 0), min(last + 1, self.size)):
                exits.pop(rank, None)
        return list(exits.values())

    def elect(self, now: float) -> bool:
        """Determine the hub. Returns True if it has changed."""
        while self._lowest in self.exits:
            self._lowest += 1
        if self.is_tree and self.resigned and self.hub not in (-1, self.rank) and self.is_alive(self.hub):
            return False  # it needs no other one to be rid of its farewell
        leader = self.leader_of(self.rank) if self.is_tree else None
        if leader in (None, self.rank):
            leader = next(iter(self._able(range(self._lowest, self.size))), self.rank)
        if leader == self.hub:
            return False
        assert leader is not None
        self.hub, self._elected_at = leader, now
        self._elections += 1
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

        They are established on a hub when all living ranks have reported the exits that they have seen;
        `have_all_reported` returns True if they have done so.
        """
        if (
            self.suspects
            and self.leads
            and not self.leaving
            and now >= self.relayed_at + timing.REPORT_WITHIN
            and have_all_reported()
        ):
            return [suspect.exit for suspect in self.suspects.values()]
        return []
