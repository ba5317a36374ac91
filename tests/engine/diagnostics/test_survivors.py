"""Ranks that die in a job with MPI's fault tolerance (ULFM): the others continue, whatever the cause and the moment."""

from __future__ import annotations

import pytest
from support import survivors
from support.survivors import Case

CHOSEN = [
    Case("TERM", "step", 1),
    Case("INT", "inside", 0),
    Case("_exit3", "shrink", 1),
    Case("exit3", "agree", 0),
    Case("_exit3", "exit", 1),
]


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=str(case), marks=() if case in CHOSEN else pytest.mark.long) for case in survivors.matrix()],
)
def test_the_survivors_continue(case: Case) -> None:
    done = survivors.run(case)
    assert not survivors.find_problem(case, done), done.stdout
