"""What faults do to messages. Times are data here: nothing waits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mpicoll.transport.local.faults import Delay, Drop, Fault, FaultInjector, Kill, Killed


def test_delays_add_up_and_are_of_their_pair() -> None:
    faults = FaultInjector([Delay(0.5, source=0), Delay(0.25, dest=2), Delay(9, source=2, dest=1)])
    assert faults
    assert faults.delays
    assert [faults.arrival(*pair, 1.0) for pair in ((1, 0), (0, 1), (0, 2), (2, 1))] == [1.0, 1.5, 1.75, 10.0]


def test_later_messages_do_not_overtake() -> None:
    faults = FaultInjector([Delay(1.0, source=0, dest=1)])
    assert faults.arrival(0, 1, 5.0) == 6.0
    assert faults.arrival(0, 1, 4.0) == 6.0
    assert faults.arrival(0, 2, 4.0) == 4.0


@pytest.mark.parametrize(
    ("fault", "left"),
    [
        (Drop(), [1, 2, 3]),
        (Drop(nth=2), [0, 1, 3]),
        (Drop(source=0, nth=1, count=2), [0, 3]),
        (Drop(dest=1, nth=1, count=99), [0]),
        (Drop(source=1), [0, 1, 2, 3]),
        (Drop(dest=0), [0, 1, 2, 3]),
    ],
    ids=["first", "third", "two", "rest", "other-source", "other-dest"],
)
def test_dropped_messages(fault: Fault, left: Sequence[int]) -> None:
    faults = FaultInjector([fault])
    assert not faults.delays
    assert [nth for nth in range(4) if faults.arrival(0, 1, 0.0) is not None] == left


def test_messages_are_counted_for_each_pair() -> None:
    faults = FaultInjector([Drop(nth=1)])
    assert [faults.arrival(source, 2, 0.0) for source in (0, 1, 0, 1)] == [0.0, 0.0, None, None]


def test_a_killed_rank_sends_nothing_more() -> None:
    faults = FaultInjector([Kill(0, nth=2)])
    assert [faults.arrival(*pair, 0.0) for pair in ((0, 1), (1, 0), (0, 0))] == [0.0, 0.0, 0.0]
    for nth in (2, 3):
        with pytest.raises(Killed, match=f"rank 0 was killed before its message {nth}"):
            faults.arrival(0, 1, 0.0)
    assert faults.arrival(1, 0, 0.0) == 0.0


def test_programs_do_not_catch_the_death() -> None:
    assert not issubclass(Killed, Exception)


def test_no_faults() -> None:
    faults = FaultInjector([])
    assert not faults
    assert faults.arrival(0, 1, 3.0) == 3.0
