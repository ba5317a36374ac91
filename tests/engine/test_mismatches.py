"""Some of the generated mismatches; ``ci/mismatches.py`` has more, also those that leave ranks waiting."""

from __future__ import annotations

import mismatches
import pytest
from ranks import Ranks

import mpicoll


@pytest.mark.parametrize("number", range(2 * len(mismatches.KINDS)))
def test_generated_mismatches(several: Ranks, number: int) -> None:
    wanted = mismatches.case("tests", number, several.size, "native")

    def body() -> str:
        world = mpicoll.world()
        with mpicoll.debug():
            return mismatches.check(wanted, world, lambda spec, form: mismatches.native(spec, world, form))

    for failure in several(body):
        assert failure == ""


def test_cases_are_all_different_and_mean_something() -> None:
    for face in mismatches.FACES:
        cases = mismatches.cases("tests", 210, (2, 3, 4), face)
        assert {one.kind for one in cases} == set(mismatches.KINDS)
        assert {one.form for one in cases} == set(mismatches.FORMS)
        for one in cases:
            assert one.usual != one.theirs
            assert 0 < len(one.odd) <= one.size // 2
        assert len(set(map(str, cases))) == len(cases)
