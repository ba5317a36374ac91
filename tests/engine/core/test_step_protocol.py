"""The protocol by which the ranks of a node synchronise in shared memory, in all interleavings of a model."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
from support.interleavings import DEAD, Load, Read, Store, Violation, Wait, Write, explore
from support.step_protocol import COMMUNICATION, MISMATCHED, OWN, Call, Outcome, Rules, explore_steps

ONE, TWO, THREE, DIRECT = Call("one"), Call("two", 2), Call("three", 3), Call("direct", 2, direct=True)

Ending = tuple[Any, ...]


def errors(ending: Ending) -> list[list[str | None]]:
    return [[outcome.error for outcome in outcomes] for outcomes in ending]


@pytest.mark.parametrize("size", [2, 3])
def test_no_rank_raises_without_failures(size: int) -> None:
    endings = explore_steps([[TWO, DIRECT, ONE, THREE]] * size).endings
    assert endings == {((Outcome(),) * 4,) * size}


@pytest.mark.parametrize(
    ("programs", "events"),  # failures, interrupts, deaths
    [
        pytest.param([[ONE, TWO, ONE]] * 2, (2, 0, 0), id="failures"),
        pytest.param([[ONE, TWO]] * 2, (1, 2, 1), id="all"),
        pytest.param([[DIRECT, ONE]] * 2, (1, 2, 1), id="direct"),
        pytest.param([[TWO, ONE], [TWO]], (1, 2, 1), id="one-ends-early"),
        pytest.param([[ONE, TWO], [TWO, TWO]], (1, 2, 1), id="mismatch"),
        pytest.param([[ONE, ONE]] * 3, (1, 0, 1), id="failure-death-of-3"),
        pytest.param([[ONE]] * 3, (3, 0, 0), id="failures-of-3"),
        pytest.param([[ONE]] * 3, (0, 2, 1), id="interrupts-of-3"),
        pytest.param([[TWO, ONE], [ONE, ONE], [ONE, ONE]], (1, 0, 1), id="mismatch-of-3"),
        pytest.param([[TWO, ONE], [TWO, ONE], [TWO]], (1, 0, 0), id="one-of-3-ends-early"),
        pytest.param([[ONE, TWO, ONE]] * 2, (2, 2, 1), id="more", marks=pytest.mark.long),
        pytest.param(
            [[TWO, DIRECT, ONE], [DIRECT, DIRECT, ONE]], (1, 2, 1), id="more-mismatch", marks=pytest.mark.long
        ),
        pytest.param([[TWO, ONE]] * 3, (1, 0, 1), id="failure-death-of-3-more", marks=pytest.mark.long),
        pytest.param([[TWO, ONE]] * 3, (0, 2, 0), id="interrupts-of-3-more", marks=pytest.mark.long),
        pytest.param([[DIRECT]] * 3, (0, 2, 0), id="direct-of-3", marks=pytest.mark.long),
        pytest.param([[ONE, ONE], [ONE, ONE], [TWO, ONE]], (0, 2, 0), id="mismatch-of-3-more", marks=pytest.mark.long),
    ],
)
def test_failures_at_any_step(programs: list[list[Call]], events: tuple[int, int, int]) -> None:
    assert (
        explore_steps(programs, Rules(modulus=4), failure=events[0], interrupt=events[1], death=events[2]).states > 100
    )


def test_next_operation_works_after_a_failure() -> None:
    endings = explore_steps([[TWO, ONE]] * 3, failure=1).endings
    found = {tuple(sorted(map(str, ranks))) for ranks, _ in (zip(*errors(ending), strict=True) for ending in endings)}
    assert found == {("None",) * 3, (COMMUNICATION, COMMUNICATION, OWN), ("None", "None", OWN)}


def test_different_operations_raise_the_same_error() -> None:
    (ending,) = explore_steps([[ONE, ONE], [THREE, ONE], [TWO, ONE]]).endings
    assert errors(ending) == [[MISMATCHED, None]] * 3


def test_an_interrupt_does_not_disturb_the_others() -> None:
    for ending in explore_steps([[TWO, ONE]] * 2, interrupt=1).endings:
        assert errors(ending) == [[None, None]] * 2
        assert sum(outcome.interrupted for outcomes in ending for outcome in outcomes) <= 1


def test_ranks_leave_after_a_death() -> None:
    endings = explore_steps([[TWO, ONE]] * 3, death=1).endings
    living = [outcomes for ending in endings if DEAD in ending for outcomes in ending if outcomes != DEAD]
    assert any(outcomes[-1].abandoned for outcomes in living)


@pytest.mark.parametrize("modulus", [4, 6, 8])
def test_number_of_a_step_wraps(modulus: int) -> None:
    explore_steps([[ONE, TWO, THREE, THREE]] * 2, Rules(modulus=modulus), failure=1)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("rules", "calls", "events", "found"),
    [
        pytest.param(Rules(modulus=2), [TWO], {}, "raise None", id="too-small-modulus"),
        pytest.param(Rules(modulus=3), [TWO, TWO], {}, "raise None", id="odd-modulus"),
        pytest.param(Rules(slots=1), [TWO], {}, "unordered", id="one-slot"),
        pytest.param(Rules(release=False), [ONE], {}, "unordered", id="no-release"),
        pytest.param(Rules(acquire=False), [ONE], {}, "unordered", id="no-acquire"),
        pytest.param(Rules(skipped=(0, 1)), [ONE], {}, "unordered", id="no-wait-for-one-rank"),
        pytest.param(Rules(failed_publishes=False), [ONE] * 2, {"failure": 1}, "forever", id="failure-not-published"),
        pytest.param(Rules(failed_waits=False), [ONE] * 3, {"failure": 1}, "unordered", id="failed-does-not-wait"),
        pytest.param(Rules(failed_differs=False), [ONE], {"failure": 3}, "own error", id="all-failed-is-agreement"),
        pytest.param(Rules(looks_again=False), [ONE], {"interrupt": 2}, "published", id="no-second-look"),
        pytest.param(Rules(unusable_release=False), [ONE], {"interrupt": 2}, "published", id="state-without-release"),
    ],
)
def test_each_part_is_needed(rules: Rules, calls: list[Call], events: dict[str, Any], found: str, size: int) -> None:
    with pytest.raises(Violation, match=found):
        explore_steps([calls] * size, rules, None, **events)


@pytest.mark.parametrize("rules", [Rules(withdraws=False), Rules(fences=False)], ids=["word-stays", "no-fences"])
def test_arrays_are_not_read_after_their_owner_has_left(rules: Rules) -> None:
    with pytest.raises(Violation, match="its owner had changed"):
        explore_steps([[DIRECT]] * 2, rules, interrupt=2)


@pytest.mark.parametrize(
    ("programs", "events"),
    [
        pytest.param([[TWO]] * 2, (0, 0, 1), id="death"),
        pytest.param([[ONE]] * 2, (1, 2, 0), id="failure-interrupts"),
        pytest.param([[TWO]] * 2, (0, 2, 1), id="interrupts-death", marks=pytest.mark.long),
        pytest.param([[ONE, TWO]] * 2, (1, 0, 1), id="failure-death", marks=pytest.mark.long),
    ],
)
def test_sleeping_ranks(programs: list[list[Call]], events: tuple[int, int, int]) -> None:
    explore_steps(programs, Rules(sleeps=True), failure=events[0], interrupt=events[1], death=events[2])


@pytest.mark.parametrize("checks", [True, False])
def test_a_wake_may_be_lost(checks: bool) -> None:
    """So a sleep is bounded. With a fence between the store and the look at who sleeps, it would not have to be."""
    with pytest.raises(Violation, match="wait forever"):
        explore_steps([[TWO]] * 2, Rules(sleeps=True, bounded=False, checks=checks))


def test_ranks_that_disagree_on_the_number_of_steps_raise() -> None:
    programs = [[TWO, TWO], [THREE._replace(signature="two"), TWO]]

    def check(ending: Ending) -> str | None:
        return None if all(MISMATCHED in outcomes for outcomes in errors(ending)) else "no error"

    explore_steps(programs, Rules(), check)
    with pytest.raises(Violation, match="reads"):
        explore_steps(programs, Rules(numbered=False), check)


def test_accesses_to_slots_need_no_interleaving() -> None:
    for rules in (Rules(), Rules(slots=1)):
        results: list[set[Ending] | None] = []
        for fine in (False, True):
            try:
                results.append(explore_steps([[TWO, ONE]] * 2, rules, failure=1, fine=fine).endings)
            except Violation:
                results.append(None)
        assert results[0] == results[1]


def _first(value: object) -> bool:
    return value == 1


@pytest.mark.parametrize("release", [True, False])
@pytest.mark.parametrize("acquire", [True, False])
def test_explorer_passes_messages_by_release_and_acquire(release: bool, acquire: bool) -> None:
    def send() -> Generator[Any, Any, None]:
        yield Write("data", 7)
        yield Store("ready", 1, release)

    def receive() -> Generator[Any, Any, object]:
        yield Wait((0,), "ready", _first, "alarm", acquire)
        return (yield Read(0, "data"))

    if release and acquire:
        assert explore([send, receive], {"ready": 0, "alarm": 0}, {}).endings == {(None, 7)}
    else:
        with pytest.raises(Violation, match="unordered"):
            explore([send, receive], {"ready": 0, "alarm": 0}, {})


def test_explorer_delays_stores_and_keeps_their_order() -> None:
    def run(other: int) -> Generator[Any, Any, tuple[object, object]]:
        yield Store("word", 1)
        yield Store("word", 2)
        return (yield Load(other, "word")), (yield Load(other, "word"))

    endings = explore([lambda: run(1), lambda: run(0)], {"word": 0}, {}).endings
    assert ((0, 0), (0, 0)) in endings
    assert {loads for ending in endings for loads in ending} == {(a, b) for a in range(3) for b in range(a, 3)}


def test_explorer_finds_ranks_that_wait_for_each_other() -> None:
    def run(other: int) -> Generator[Any, Any, None]:
        yield Wait((other,), "word", _first, "alarm")
        yield Store("word", 1)

    with pytest.raises(Violation, match="wait forever"):
        explore([lambda: run(1), lambda: run(0)], {"word": 0, "alarm": 0}, {})
