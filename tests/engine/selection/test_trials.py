"""Trials of algorithms: which one is taken in which call, and which one stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from math import inf

import pytest

from mpicoll.engine.selection.trials import Trials

NAMES = ("native", "ring", "chain")


def run(trials: Trials, calls: int, seconds: Callable[[str, int], float]) -> list[str]:
    """Carry out calls that take `seconds` of the algorithm and the number of the call, and return their algorithms."""
    taken = []
    for number in range(calls):
        if trials.meets:
            trials.agree(trials.seconds)
        taken.append(trials.begin())
        trials.end(seconds(taken[-1], number))
    return taken


def times(**seconds: float) -> Callable[[str, int], float]:
    return lambda name, number: seconds[name]


def test_the_first_call_is_the_untried_one_and_all_are_tried_in_turn() -> None:
    trials = Trials(NAMES)
    taken = run(trials, 7, times(native=1e-3, ring=1e-3, chain=1e-3))
    assert taken == ["native", *NAMES, *NAMES]
    assert not trials.settled


def test_the_fastest_stays() -> None:
    trials = Trials(NAMES)
    taken = run(trials, 40, times(native=2e-3, ring=1e-3, chain=1.2e-3))
    assert taken[-20:] == ["ring"] * 20
    assert trials.final
    assert trials.typical == {"native": 2e-3, "ring": 1e-3, "chain": 1.2e-3}
    # Two that are close are tried four times, the slow one twice; the last times are exchanged in one more call.
    assert [taken[:11].count(name) for name in NAMES] == [3, 4, 4]


def test_the_untried_choice_stays_if_others_are_hardly_faster() -> None:
    trials = Trials(NAMES)
    run(trials, 40, times(native=1e-3, ring=0.97e-3, chain=0.96e-3))
    assert trials.winner == "native"
    faster = Trials(NAMES)
    run(faster, 40, times(native=1e-3, ring=0.97e-3, chain=0.94e-3))
    assert faster.winner == "chain"


def test_an_algorithm_whose_times_vary_is_taken_at_its_mean() -> None:
    """One slow call of four may have been disturbed; two of them are its own."""
    for slow, winner in ((1, "chain"), (2, "native")):
        calls = iter(range(10))

        def seconds(name: str, _: int, slow: int = slow, calls: Iterator[int] = calls) -> float:
            if name != "chain":
                return {"native": 1e-3, "ring": 2e-3}[name]
            return 1.6e-3 if next(calls) < slow else 0.9e-3

        trials = Trials(NAMES)
        run(trials, 12, seconds)
        assert trials.winner == winner


def test_a_hopeless_algorithm_is_tried_once_unless_its_first_use_may_have_made_connections() -> None:
    slow = Trials(NAMES)
    assert run(slow, 60, times(native=0.1, ring=0.31, chain=0.09)).count("ring") == 1
    first = Trials(NAMES)
    run(
        first,
        60,
        lambda name, number: (
            9e-3 if name == "ring" and number < 4 else times(native=2e-3, ring=1e-3, chain=3e-3)(name, 0)
        ),
    )
    assert first.winner == "ring"


def test_trials_of_long_calls_end_sooner() -> None:
    taken = run(Trials(NAMES), 60, times(native=0.1, ring=0.15, chain=0.125))
    assert [taken.count(name) for name in ("ring", "chain")] == [2, 2]
    short = run(Trials(NAMES), 60, times(native=1e-3, ring=1.5e-3, chain=1.25e-3))
    assert [short.count(name) for name in ("ring", "chain")] == [4, 4]


def test_single_slow_calls_decide_nothing() -> None:
    trials = Trials(NAMES)
    # Each algorithm is disturbed in one call of its trials.
    run(
        trials, 60, lambda name, number: times(native=2e-3, ring=1e-3, chain=1.3e-3)(name, 0) * (4 if number < 4 else 1)
    )
    assert trials.winner == "ring"


def test_an_algorithm_that_fails_is_not_taken() -> None:
    trials = Trials(NAMES)
    taken = run(trials, 60, times(native=2e-3, ring=inf, chain=1e-3))
    assert trials.winner == "chain"
    assert taken.count("ring") == 1
    nothing = Trials(NAMES)
    run(nothing, 60, times(native=inf, ring=inf, chain=inf))
    assert nothing.winner == "native"
    assert nothing.settled


def test_one_candidate_is_never_timed() -> None:
    trials = Trials(("native",), watched=True)
    for _ in range(600):
        assert not trials.meets
        assert trials.begin() == "native"
        trials.end(1.0)
    assert trials.final


def test_ranks_with_other_times_of_their_own_take_the_same_algorithms() -> None:
    ranks = [Trials(NAMES, watched=True) for _ in range(3)]
    factors = [
        {"native": 1, "ring": 0.5, "chain": 0.1},
        {"native": 1, "ring": 0.5, "chain": 2},
        dict.fromkeys(NAMES, 0.3),
    ]
    for _ in range(1000):
        assert len({one.meets for one in ranks}) == 1
        if ranks[0].meets:
            slowest = max(one.seconds for one in ranks)
            for one in ranks:
                one.agree(slowest)
        (name,) = {one.begin() for one in ranks}
        for one, factor in zip(ranks, factors, strict=True):
            one.end(1e-3 * factor[name])
    assert {one.winner for one in ranks} == {"ring"}  # the slowest rank needs twice as long for chain
    assert ranks[0].typical == {"native": 1e-3, "ring": 0.5e-3, "chain": 2e-3}


@pytest.mark.parametrize("watched", [True, False])
def test_a_drift_leads_to_new_trials(watched: bool) -> None:
    trials = Trials(NAMES, watched=watched)
    run(trials, 100, times(native=2e-3, ring=1e-3, chain=3e-3))
    assert trials.winner == "ring"
    assert trials.final is not watched
    later = run(trials, 600, times(native=2e-3, ring=4e-3, chain=3e-3))
    assert trials.winner == ("native" if watched else "ring")
    assert set(later) == (set(NAMES) if watched else {"ring"})
    assert trials.typical["ring"] == (4e-3 if watched else 1e-3)


def test_steady_times_are_checked_less_and_less_often() -> None:
    trials = Trials(NAMES, watched=True)
    seconds = times(native=2e-3, ring=1e-3, chain=3e-3)
    run(trials, 30, seconds)
    meetings = []
    for number in range(20_000):
        if trials.meets:
            meetings.append(number)
            trials.agree(trials.seconds)
        assert trials.begin() == "ring"
        trials.end(seconds("ring", 0))
    # Three calls are timed, and four exchange times: at 256, 512, 1024, 2048, 4096 calls after the previous check.
    assert len(meetings) <= 4 * 8
    assert meetings[0] < 300
    assert max(later - earlier for earlier, later in pairwise(meetings)) >= 4000
