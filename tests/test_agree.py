"""The ranks of a pytest run agree: small pytest projects under mpirun."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from xml.etree import ElementTree as ET

import pytest
from launch import ROOT, mpirun

HEADER = """
import ctypes, os, time
import pytest
from mpi4py import MPI
comm = MPI.COMM_WORLD
pytestmark = pytest.mark.mpi
"""

Run = Callable[..., "CompletedProcess[str]"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run the tests in a text on some ranks, with this project's conftest and settings."""

    def run(tests: str, *options: str, size: int = 2, with_mpi: bool = True) -> CompletedProcess[str]:
        shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
        (tmp_path / "test_it.py").write_text(HEADER + tests)
        common = ["-p", "no:cacheprovider", "--color=no", "-c", ROOT / "pyproject.toml", f"--rootdir={tmp_path}"]
        if with_mpi:
            common.append("--with-mpi")
        return mpirun(size, "-m", "pytest", *common, *options, tmp_path, cwd=tmp_path)

    return run


def test_all_pass(run: Run, tmp_path: Path) -> None:
    done = run(
        """
@pytest.mark.parametrize("x", range(20))
def test_barrier(x): comm.Barrier()
""",
        f"--junit-xml={tmp_path / 'report.xml'}",
        size=3,
    )
    assert done.returncode == 0, done.stdout
    assert len(re.findall(r"\d+ passed", done.stdout)) == 1, "only rank 0 reports"
    assert "20 passed" in done.stdout
    (suite,) = ET.parse(tmp_path / "report.xml").iter("testsuite")
    assert (suite.get("tests"), suite.get("failures")) == ("20", "0")


def test_failure_on_one_rank_is_everyones(run: Run, tmp_path: Path) -> None:
    done = run(
        """
@pytest.fixture(scope="session", autouse=True)
def note(request):
    yield
    with open(f"failed.{comm.rank}", "w") as file: file.write(str(request.session.testsfailed))
def test_on_the_last(): assert comm.rank == 0, f"only rank {comm.rank} is wrong"
def test_on_all(): assert False, f"rank {comm.rank} says so"
def test_goes_on(): comm.Barrier()
"""
    )
    assert done.returncode == 1, done.stdout
    assert "2 failed, 1 passed" in done.stdout
    for text in ("only rank 1 is wrong", "rank 0 says so", "rank 1 says so"):
        assert text in done.stdout
    assert [(tmp_path / f"failed.{rank}").read_text() for rank in range(2)] == ["2", "2"]


def test_fixture_that_fails_on_one_rank(run: Run) -> None:
    done = run(
        """
@pytest.fixture
def no_room(): assert comm.rank != 1, "no room"
@pytest.fixture
def mess():
    yield
    assert comm.rank != 1, "what a mess"
def test_setup(no_room): comm.Barrier()
def test_teardown(mess): comm.Barrier()
def test_next(): comm.Barrier()
"""
    )
    assert done.returncode == 1, done.stdout
    assert "2 passed, 2 errors" in done.stdout
    for text in ("ERROR at setup of test_setup", "no room", "ERROR at teardown of test_teardown", "what a mess"):
        assert text in done.stdout


def test_different_outcomes_are_a_failure(run: Run) -> None:
    done = run(
        """
def test_skip():
    if comm.rank == 1: pytest.skip("not on me")
def test_skip_all(): pytest.skip("on nobody")
@pytest.mark.xfail
def test_xfail_on_one(): assert comm.rank == 0
@pytest.mark.xfail
def test_xfail_on_all(): assert False
"""
    )
    assert done.returncode == 1, done.stdout
    assert "2 failed, 1 skipped, 1 xfailed" in done.stdout
    assert "not on me" in done.stdout


def test_failure_while_others_wait_ends_the_job(run: Run) -> None:
    begin = time.monotonic()
    done = run(
        """
def test_stuck():
    if comm.rank == 1:
        raise RuntimeError("rank 1 leaves early")
    comm.Barrier()  # waits here
""",
        size=3,
    )
    assert time.monotonic() - begin < 20
    assert done.returncode not in (0, 124), done.stdout
    assert "RuntimeError: rank 1 leaves early" in done.stdout
    assert done.stdout.count("comm.Barrier()  # waits here") >= 2, "both waiting ranks show where"


def test_hang_ends_at_its_timeout_with_every_stack(run: Run) -> None:
    begin = time.monotonic()
    done = run(
        """
def inner(): comm.recv(source=1)
@pytest.mark.timeout(3)
def test_hang():
    if comm.rank == 0: inner()
    else: time.sleep(100)
"""
    )
    assert time.monotonic() - begin < 20
    assert done.returncode not in (0, 124), done.stdout
    assert "test_hang is over its time" in done.stdout
    assert "def inner(): comm.recv(source=1)" in done.stdout
    assert "else: time.sleep(100)" in done.stdout


def test_hang_in_teardown_after_a_failure(run: Run) -> None:
    """pytest-timeout takes a failure for the beginning of a debugger's session, and stops its clock."""
    done = run(
        """
@pytest.fixture
def room():
    yield
    comm.recv(source=0)
@pytest.mark.timeout(3)
def test_hang(room): assert False
"""
    )
    assert done.returncode not in (0, 124), done.stdout
    assert "test_hang is over its time" in done.stdout


def test_hang_with_the_gil_held_on_all_ranks(run: Run) -> None:
    done = run(
        """
@pytest.mark.timeout(1)
def test_hang(): ctypes.PyDLL(None).sleep(100)
"""
    )
    assert done.returncode not in (0, 124), done.stdout
    assert "Timeout (" in done.stdout
    assert "in test_hang" in done.stdout


@pytest.mark.parametrize(("leave", "said"), [("os._exit(3)", ""), ("raise KeyboardInterrupt", "interrupted")])
def test_rank_that_leaves_ends_the_job(run: Run, leave: str, said: str) -> None:
    begin = time.monotonic()
    done = run(
        f"""
def test_leave():
    if comm.rank == 1: {leave}
    comm.Barrier()
"""
    )
    assert time.monotonic() - begin < 20
    assert done.returncode not in (0, 124), done.stdout
    assert said in done.stdout


def test_ranks_that_collect_differently(run: Run) -> None:
    done = run(
        """
if comm.rank == 1:
    def test_one(): pass
else:
    def test_zero(): pass
"""
    )
    assert done.returncode not in (0, 124), done.stdout
    assert "not on rank 0: test_it.py::test_one" in done.stdout
    assert "only on rank 0: test_it.py::test_zero" in done.stdout
    assert "passed" not in done.stdout


def test_import_that_fails_on_one_rank(run: Run) -> None:
    done = run("if comm.rank == 1: import no_such_module\ndef test_it(): comm.Barrier()")
    assert done.returncode not in (0, 124), done.stdout
    assert "No module named 'no_such_module'" in done.stdout
    assert "passed" not in done.stdout


def test_hypothesis_shrinks_in_step(run: Run) -> None:
    done = run(
        """
from hypothesis import assume, given, strategies as st
@given(st.lists(st.integers(0, 100)))
def test_sum(together, x):
    assume(len(x) != 1)
    with together():
        comm.Barrier()
        assert comm.rank == 0 or sum(x) < 150
""",
        size=3,
    )
    assert done.returncode == 1, done.stdout
    assert "1 failed" in done.stdout
    assert "x=[50, 100]" in done.stdout, "the smallest example, which takes shrinking"
    assert "ranks 1, 2 of 3" in done.stdout or "rank 1 of 3" in done.stdout


def test_marked_tests_are_skipped_without_the_option(run: Run) -> None:
    done = run("def test_it(): assert False", with_mpi=False)
    assert done.returncode == 0, done.stdout
    assert "1 skipped" in done.stdout
