"""The protocol by which ranks may be ahead of others in shared memory, in all interleavings of a model."""

from __future__ import annotations

import pytest
from support.ahead_protocol import (
    COMMUNICATION,
    MISMATCHED,
    OWN,
    Call,
    Complete,
    Item,
    Receive,
    Rules,
    Send,
    explore_ahead,
)
from support.interleavings import Violation

ALL, BCAST, GATHER, SCAN = Call("all"), Call("bcast", "others"), Call("gather", "root"), Call("scan", "higher")
OTHER_ROOT = Call("bcast from 1", "others", 1)
LARGE = Call("large", large=True)
EXCHANGE = [Call("messages", "neighbours", message=True), Call("last step", "neighbours")]
OTHER = Call("other")


@pytest.mark.parametrize(
    "calls",
    [
        [BCAST] * 4,
        pytest.param([GATHER] * 6, marks=pytest.mark.long),
        [BCAST, ALL, SCAN, BCAST, GATHER],
        [LARGE, BCAST, LARGE],
    ],
    ids=str,
)
def test_two_ranks_without_failures(calls: list[Call]) -> None:
    assert explore_ahead([calls] * 2, look=1).endings == {((None,) * (len(calls) + 1),) * 2}


@pytest.mark.long
def test_two_ranks_that_are_interrupted() -> None:
    calls = [BCAST, ALL, SCAN, BCAST, GATHER, ALL]
    assert explore_ahead([calls] * 2, look=2, interrupt=1).endings == {((None,) * (len(calls) + 1),) * 2}


@pytest.mark.parametrize("calls", [[SCAN, BCAST], pytest.param([BCAST] * 2, marks=pytest.mark.long)], ids=str)
def test_three_ranks_without_failures(calls: list[Call]) -> None:
    assert explore_ahead([calls] * 3).endings == {((None,) * (len(calls) + 1),) * 3}


def test_neighbours() -> None:
    """The last step of an exchange, in which a rank waits for its neighbours only, frees the memory of the messages."""
    calls = [*EXCHANGE, EXCHANGE[0]]
    assert explore_ahead([calls] * 2).endings == {((None,) * (len(calls) + 1),) * 2}
    with pytest.raises(Violation, match=r"reads|unordered"):
        explore_ahead([[EXCHANGE[0]] * 2] * 2)


def test_neighbours_that_call_another_operation() -> None:
    explore_ahead([[*EXCHANGE, ALL], [BCAST, ALL, ALL]], look=1)
    for odd in range(3):
        explore_ahead([[ALL if rank == odd else EXCHANGE[0], ALL] for rank in range(3)])


@pytest.mark.parametrize("other", [ALL, LARGE, GATHER, SCAN, OTHER_ROOT], ids=lambda call: call.name)
@pytest.mark.parametrize("before", [0, 1])
def test_different_operations_raise_on_all_ranks(other: Call, before: int) -> None:
    """Whichever of them are ahead, if they call another operation."""
    programs = [[BCAST] * before + [BCAST, BCAST, ALL, ALL, ALL], [BCAST] * before + [other, ALL, ALL, ALL, ALL]]
    explore_ahead(programs, look=1)
    explore_ahead(programs[::-1], look=1)


@pytest.mark.parametrize("other", [ALL, GATHER, SCAN, OTHER_ROOT], ids=lambda call: call.name)
@pytest.mark.parametrize("before", [0, 1, pytest.param(3, marks=pytest.mark.long)])
def test_last_calls_that_differ_raise_on_all_ranks(other: Call, before: int) -> None:
    """At the latest at the end of the program; if a rank has ended before another one was so far, on that one."""
    programs = [[BCAST] * before + [BCAST], [BCAST] * before + [other]]
    explore_ahead(programs, look=1)
    explore_ahead(programs, interrupt=2)


def test_last_calls_of_three_ranks() -> None:
    explore_ahead([[BCAST], [BCAST], [ALL]], interrupt=1)
    explore_ahead([[BCAST], [OTHER_ROOT], [BCAST]], interrupt=1)


def test_a_call_that_one_rank_misses_is_an_error() -> None:
    endings = explore_ahead([[BCAST, BCAST], [BCAST]], check=lambda ending: None).endings
    assert endings == {((None, None, COMMUNICATION), (None, None))}


def test_one_of_three_ranks_calls_another_operation() -> None:
    for odd in range(3):
        explore_ahead([[ALL if rank == odd else BCAST, ALL] for rank in range(3)])


def test_ranks_that_have_not_gone_on_remain_synchronised() -> None:
    endings = explore_ahead([[ALL, ALL], [Call("other"), ALL]]).endings
    assert endings == {((MISMATCHED, None, None),) * 2}
    endings = explore_ahead([[GATHER, ALL], [BCAST, ALL]]).endings  # each waits for the other
    assert endings == {((MISMATCHED, None, None),) * 2}


def test_failures() -> None:
    endings = explore_ahead([[BCAST, BCAST, ALL, ALL]] * 2, failure=1, look=1).endings
    assert {OWN, COMMUNICATION, None} == {error for ending in endings for errors in ending for error in errors}


@pytest.mark.parametrize(
    "programs", [[[BCAST, GATHER, ALL]] * 2, [[BCAST, ALL, ALL], [SCAN, ALL, ALL]]], ids=["equal", "different"]
)
def test_deaths(programs: list[list[Call]]) -> None:
    explore_ahead(programs, death=1, look=1)


@pytest.mark.parametrize(
    ("rules", "programs", "found"),
    [
        pytest.param(Rules(ring=2), [[BCAST] * 5] * 2, "forever|reads|unordered", id="small-ring"),
        pytest.param(Rules(ahead=1, ring=2), [[BCAST] * 5] * 2, "reads|unordered", id="ring-for-one-ahead"),
        pytest.param(Rules(bounded=False, ring=4), [[BCAST] * 6] * 2, "forever|reads|unordered", id="no-bound"),
        pytest.param(
            Rules(scans=False), [[ALL, BCAST], [OTHER_ROOT, BCAST]], "MismatchError|forever", id="no-look-back"
        ),
        pytest.param(Rules(passes=False), [[BCAST] * 4] * 2, "waits for step 1, and has seen 2", id="seen-is-equal"),
        pytest.param(Rules(describes=False), [[BCAST], [ALL]], "should raise MismatchError", id="no-description"),
        pytest.param(Rules(catches_up=False), [[LARGE, BCAST, LARGE]] * 2, "reads|unordered", id="no-wait-for-slots"),
        pytest.param(Rules(ends=False), [[BCAST], [OTHER_ROOT]], "should raise MismatchError", id="no-end"),
    ],
)
def test_each_part_is_needed(rules: Rules, programs: list[list[Call]], found: str) -> None:
    interrupts = 1 if not rules.describes else 0  # a rank ends before another one is so far
    with pytest.raises(Violation, match=found):
        explore_ahead(programs, rules, look=1, interrupt=interrupts)


def test_ranks_that_have_gone_on_must_leave() -> None:
    programs = [[BCAST, BCAST, ALL, ALL], [ALL, ALL, BCAST, ALL]]
    left = {errors[:-1] for ending in explore_ahead(programs).endings for errors in ending}
    assert all(set(errors[errors.index(MISMATCHED) + 1 :]) <= {COMMUNICATION} for errors in left)
    with pytest.raises(Violation, match="reads 1 of 1, not 3"):
        explore_ahead(programs, Rules(parts=False))


# --- begun calls


def _begin(*items: Item) -> list[Item]:
    return [item._replace(begun=True) if isinstance(item, Call) else item for item in items]


@pytest.mark.parametrize(
    "programs",
    [
        [_begin(ALL, ALL, ALL, ALL)] * 2,
        [_begin(ALL, BCAST, ALL, ALL), [ALL, BCAST, *_begin(ALL, ALL)]],
        [[*_begin(ALL), BCAST, *_begin(ALL, BCAST), ALL], [ALL, *_begin(BCAST, ALL), BCAST, *_begin(ALL)]],
        [[*_begin(LARGE, LARGE, ALL), LARGE], [*_begin(LARGE), LARGE, *_begin(ALL, LARGE)]],
        pytest.param([_begin(ALL, GATHER, SCAN)] * 3, marks=pytest.mark.long),
        [_begin(ALL, ALL), _begin(ALL, ALL), [ALL, ALL]],
    ],
    ids=str,
)
def test_begun_calls(programs: list[list[Item]]) -> None:
    calls = sum(isinstance(item, Call) for item in programs[0])
    assert explore_ahead(programs, look=1, test=1, interrupt=1).endings == {((None,) * (calls + 1),) * len(programs)}


def test_other_ranks_need_no_wait_of_a_begun_call() -> None:
    for calls in (ALL, OTHER):
        explore_ahead([[*_begin(ALL, ALL), Receive(1), ALL], [*_begin(calls, ALL), Complete(), Send(), ALL]])


@pytest.mark.parametrize("forms", ["bi", "ib", "ii", "iib", "ibb", "iii"])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_begun_calls_after_one_that_differs(forms: str, at: int) -> None:
    """All ranks raise the error of the call that differs, and carry out the others."""
    programs: list[list[Item]] = []
    for rank, form in enumerate(forms):
        calls: list[Item] = [ALL] * 4
        calls[at] = ALL if rank else OTHER
        programs.append(_begin(*calls) if form == "i" else calls)
    errors: list[str | None] = [None] * 5
    errors[at] = MISMATCHED
    more = 1 if len(forms) == 2 else 0
    assert explore_ahead(programs, look=more, test=more).endings == {(tuple(errors),) * len(forms)}


@pytest.mark.parametrize("forms", ["bi", *(pytest.param(forms, marks=pytest.mark.long) for forms in ("bib", "bii"))])
def test_begun_calls_after_one_that_fails(forms: str) -> None:
    programs = [_begin(ALL, ALL, ALL) if form == "i" else [ALL, ALL, ALL] for form in forms]
    for ending in explore_ahead(programs, failure=1, look=1, test=1).endings:
        for outcomes in zip(*ending, strict=True):
            own = outcomes.count(OWN)
            assert own <= 1
            assert set(outcomes) - {OWN} == ({COMMUNICATION} if own else {None})


def test_begun_calls_where_a_rank_has_gone_on() -> None:
    """The ranks part, and no later call is carried out."""
    endings = explore_ahead([[BCAST, *_begin(ALL, ALL)], [ALL, *_begin(ALL), ALL]], look=1, test=1).endings
    assert {errors[2] for ending in endings for errors in ending} == {COMMUNICATION}


@pytest.mark.parametrize(
    "programs", [[[ALL, ALL], _begin(ALL, ALL)], [[ALL, ALL], _begin(ALL, ALL), _begin(ALL, OTHER)]]
)
def test_deaths_where_calls_are_begun(programs: list[list[Item]]) -> None:
    explore_ahead(programs, death=1, interrupt=1)


@pytest.mark.parametrize(
    ("rules", "programs", "found"),
    [
        pytest.param(Rules(meets=False), [_begin(ALL, ALL, ALL), [OTHER, ALL, ALL]], "has passed step", id="meeting"),
        pytest.param(Rules(restarts=False), [_begin(ALL, ALL), [OTHER, ALL]], "reads None", id="no-restart"),
        pytest.param(Rules(one_large=False), [_begin(*[LARGE] * 4)] * 2, "unordered|reads", id="several-large"),
        pytest.param(
            Rules(attends=False),
            [[*_begin(ALL), Receive(1)], [*_begin(OTHER), Complete(), Send()]],
            "forever",
            id="alone",
        ),
        pytest.param(
            Rules(ring=3), [[*_begin(ALL, ALL), *[BCAST] * 4]] * 2, "forever|reads|unordered", id="small-ring"
        ),
    ],
)
def test_each_part_is_needed_for_begun_calls(rules: Rules, programs: list[list[Item]], found: str) -> None:
    with pytest.raises(Violation, match=found):
        explore_ahead(programs, rules, look=1)
