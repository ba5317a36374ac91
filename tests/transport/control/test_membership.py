"""Which rank is the hub, and when a rank that seems to have died counts as dead. Without connections or a clock."""

from __future__ import annotations

import pytest

from mpicoll.transport.control.events import PeerExit
from mpicoll.transport.control.membership import Membership
from mpicoll.transport.control.timing import HUB_DEATH_DELAY, REPORT_WITHIN


def gone(rank: int, why: str = "closed", words: str = "") -> PeerExit:
    return PeerExit(rank, why, words, 0, "")


def elected(rank: int, size: int, now: float = 0.0) -> Membership:
    members = Membership(rank, size)
    assert members.hub == -1
    assert members.elect(now)
    return members


def expiry(members: Membership, rank: int) -> float:
    return members.expiry(members.suspects[rank])


def test_the_hub_is_the_lowest_rank_that_is_neither_dead_nor_suspected() -> None:
    members = elected(2, 4)
    assert (members.hub, members.is_hub, members.had_another_hub) == (0, False, False)
    assert not members.elect(1.0)
    assert not members.suspect(gone(0), 1.0, certain=False)
    assert members.elect(1.0)
    assert (members.hub, members.had_another_hub) == (1, True)
    assert members.record(gone(1, "left"))
    assert members.elect(2.0)
    assert members.is_hub
    assert members.others() == [3]
    members.suspects.pop(0)  # it has connected again
    assert members.elect(3.0)
    assert members.hub == 0


def test_a_leaving_rank_is_hub_only_if_no_other_can_be() -> None:
    members = elected(0, 3)
    members.leaving = members.resigned = True
    assert members.elect(1.0)
    assert members.hub == 1
    members.record(gone(1))
    members.record(gone(2, "left"))
    assert members.elect(2.0)
    assert members.is_hub
    assert members.is_alone


def test_an_exit_is_recorded_once() -> None:
    members = elected(1, 3)
    members.suspect(gone(0), 0.0, certain=False)
    assert members.record(gone(0, "left"))
    assert members.suspects == {}
    assert not members.record(gone(0, "closed"))
    assert not members.record(gone(1))  # this rank
    assert members.exits == {0: gone(0, "left")}
    assert not members.has_died(0)
    members.record(gone(2))
    assert members.has_died(2)


@pytest.mark.parametrize(
    ("rank", "suspected", "certain", "words", "established"),
    [
        (1, 0, False, "Fatal Python error", True),  # it has left crash output, hence no farewell
        (1, 2, True, "", True),  # never was a hub
        (1, 0, True, "", False),  # a hub: the next one may have received crash output
        (1, 2, False, "", False),
    ],
)
def test_what_establishes_a_death_at_once(
    rank: int, suspected: int, certain: bool, words: str, established: bool
) -> None:
    members = elected(rank, 3)
    assert members.suspect(gone(suspected, words=words), 0.0, certain=certain) is established
    assert (suspected in members.suspects) is not established


def test_when_a_suspicion_becomes_a_death() -> None:
    members = elected(2, 4, now=0.0)
    members.suspect(gone(0), 10.0, certain=True)
    members.suspect(gone(1), 10.0, certain=False)
    members.elect(10.0)
    assert members.is_hub
    assert expiry(members, 0) == 10.0 + HUB_DEATH_DELAY
    assert expiry(members, 1) == 10.0 + REPORT_WITHIN
    members.leaving = True  # then the ranks that stay decide
    assert expiry(members, 1) == float("inf")
    # Others give the hub twice the time, counted from its election.
    members = elected(3, 4, now=0.0)
    members.suspect(gone(0), 10.0, certain=False)
    members.elect(20.0)
    assert members.hub == 1
    assert expiry(members, 0) == 20.0 + 2 * REPORT_WITHIN
    # A suspicion becomes certain, never uncertain again.
    members.suspect(gone(0, "unreachable"), 30.0, certain=True)
    members.suspect(gone(0), 40.0, certain=False)
    assert members.suspects[0].exit.why == "unreachable"
    assert expiry(members, 0) == 30.0 + HUB_DEATH_DELAY


def test_the_hub_decides_when_all_have_reported() -> None:
    members = elected(1, 4)
    members.suspect(gone(0), 0.0, certain=False)
    assert members.unannounced(lambda: True, 0.0) == []  # it is not the hub yet
    members.elect(0.0)
    assert members.unannounced(lambda: False, 0.0) == []
    assert members.unannounced(lambda: True, 0.0) == [gone(0)]
    members.relayed_at = 1.0  # a farewell was relayed: more may follow
    assert members.unannounced(lambda: True, 1.0) == []
    assert members.unannounced(lambda: True, 1.0 + REPORT_WITHIN) == [gone(0)]
    members.leaving = True
    assert members.unannounced(lambda: True, 1.0 + REPORT_WITHIN) == []
