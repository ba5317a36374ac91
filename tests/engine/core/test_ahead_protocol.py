"""The protocol by which ranks may be ahead of others in shared memory, in all interleavings of a model."""

from __future__ import annotations

import pytest
from support.ahead_protocol import COMMUNICATION, MISMATCHED, OWN, Call, Rules, explore_ahead
from support.interleavings import Violation

ALL, BCAST, GATHER, SCAN = Call("all"), Call("bcast", "others"), Call("gather", "root"), Call("scan", "higher")


@pytest.mark.parametrize("calls", [[BCAST] * 6, [GATHER] * 6, [BCAST, ALL, SCAN, BCAST, GATHER, ALL]], ids=str)
def test_two_ranks_without_failures(calls: list[Call]) -> None:
    assert explore_ahead([calls] * 2).endings == {((None,) * len(calls),) * 2}


@pytest.mark.parametrize("calls", [[BCAST] * 3, [SCAN, BCAST, ALL]], ids=str)
def test_three_ranks_without_failures(calls: list[Call]) -> None:
    assert explore_ahead([calls] * 3, Rules(ahead=1, ring=2)).endings == {((None,) * len(calls),) * 3}


@pytest.mark.parametrize("other", [ALL, GATHER, SCAN], ids=lambda call: call.name)
@pytest.mark.parametrize("before", [0, 2])
def test_different_operations_raise_on_all_ranks(other: Call, before: int) -> None:
    """Whichever of them are ahead, if they call another operation."""
    programs = [[BCAST] * before + [BCAST, BCAST, ALL, ALL, ALL], [BCAST] * before + [other, ALL, ALL, ALL, ALL]]
    explore_ahead(programs)
    explore_ahead(programs[::-1])


def test_one_of_three_ranks_calls_another_operation() -> None:
    for odd in range(3):
        explore_ahead([[ALL if rank == odd else BCAST, ALL, ALL] for rank in range(3)], Rules(ahead=1, ring=2))


def test_ranks_that_have_not_gone_on_remain_synchronised() -> None:
    endings = explore_ahead([[ALL, ALL], [Call("other"), ALL]]).endings
    assert endings == {((MISMATCHED, None),) * 2}
    endings = explore_ahead([[GATHER, ALL], [BCAST, ALL]]).endings  # each waits for the other
    assert endings == {((MISMATCHED, None),) * 2}


def test_failures() -> None:
    endings = explore_ahead([[BCAST, BCAST, ALL, ALL]] * 2, failure=1).endings
    assert {OWN, COMMUNICATION, None} == {error for ending in endings for errors in ending for error in errors}


@pytest.mark.parametrize(
    "programs", [[[BCAST, GATHER, ALL]] * 2, [[BCAST, ALL, ALL], [SCAN, ALL, ALL]]], ids=["equal", "different"]
)
def test_deaths(programs: list[list[Call]]) -> None:
    explore_ahead(programs, death=1)


@pytest.mark.parametrize(
    ("rules", "programs", "found"),
    [
        pytest.param(Rules(ring=2), [[BCAST] * 5] * 2, "forever|reads|unordered", id="small-ring"),
        pytest.param(Rules(bounded=False), [[BCAST] * 6] * 2, "forever|reads|unordered", id="no-bound"),
        pytest.param(Rules(scans=False), [[BCAST, SCAN], [ALL, SCAN]], "MismatchError|forever", id="no-look-back"),
        pytest.param(Rules(meets=False), [[BCAST, BCAST, ALL], [ALL, ALL, ALL]], "has passed", id="meet-too-early"),
    ],
)
def test_each_part_is_needed(rules: Rules, programs: list[list[Call]], found: str) -> None:
    with pytest.raises(Violation, match=found):
        explore_ahead(programs, rules)


def test_ranks_that_have_gone_on_must_leave() -> None:
    programs = [[BCAST, BCAST, ALL, ALL], [ALL, ALL, BCAST, ALL]]
    left = {errors for ending in explore_ahead(programs).endings for errors in ending}
    assert all(set(errors[errors.index(MISMATCHED) + 1 :]) <= {COMMUNICATION} for errors in left)
    with pytest.raises(Violation, match="reads 1 of 1, not 3"):
        explore_ahead(programs, Rules(parts=False))
