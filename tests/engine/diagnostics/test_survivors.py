"""Ranks that die in a job with MPI's fault tolerance (ULFM): the others continue, whatever the cause and the moment."""

from __future__ import annotations

import pytest
from support import apart, survivors
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


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_survivors_on_several_hosts_continue() -> None:
    if why := apart.possible():
        pytest.skip(f"this machine can't play hosts: {why}")
    case = Case("KILL", "inside", 1)
    done = survivors.run(case, hosts=(2, 2))
    assert not survivors.find_problem(case, done), done.stdout


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(120)
def test_an_exit_of_c_code_ends_the_job() -> None:
    """The launcher does not report it to MPI, whose recovery would wait for that rank until MPICOLL_TIMEOUT."""
    done = survivors.run(Case("C_exit3", "step", 1))
    assert done.returncode not in (0, 124), done.stdout
    assert "shrink() on world" in done.stdout
    assert "can't complete: rank 1 has died, but Open MPI's launcher has not reported it" in done.stdout
