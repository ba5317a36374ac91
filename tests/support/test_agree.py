"""The ranks of a pytest run agree: small pytest projects under mpirun."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from support.launch import ROOT, mpirun

pytestmark = pytest.mark.slow  # each test is a job

HEADER = """
import ctypes, os, time
import pytest
from mpi4py import MPI
comm = MPI.COMM_WORLD
pytestmark = pytest.mark.mpi
"""


@dataclass
class Done:
    """The end of a job."""

    returncode: int
    stdout: str
    seconds: float


def run(folder: Path, tests: dict[str, str], *options: str, size: int = 2, with_mpi: bool = True) -> Done:
    """Run the tests in some texts, by the names of their modules, with this project's conftest and settings."""
    shutil.copy(ROOT / "tests" / "conftest.py", folder)
    for name, text in tests.items():
        (folder / f"test_{name}.py").write_text(HEADER + text)
    common = ["-p", "no:cacheprovider", "--color=no", "-c", ROOT / "pyproject.toml", f"--rootdir={folder}"]
    if with_mpi:
        common.append("--with-mpi")
    begin = time.monotonic()
    done = mpirun(size, "-m", "pytest", *common, *options, folder, cwd=folder)
    return Done(done.returncode, done.stdout, time.monotonic() - begin)


def outcomes(module: str, output: str) -> list[str]:
    """Return the outcomes of the tests of a module, in their order, from the lines of ``pytest -v``."""
    return re.findall(rf"^test_{module}\.py::\w+ (\w+)", output, re.MULTILINE)


# --- jobs that come to their end


def test_all_pass(tmp_path: Path) -> None:
    tests = """
@pytest.mark.parametrize("x", range(20))
def test_barrier(x): comm.Barrier()
"""
    done = run(
        tmp_path,
        {"barrier": tests},
        f"--junit-xml={tmp_path / 'report.xml'}",
        size=3,
    )
    assert done.returncode == 0, done.stdout
    assert len(re.findall(r"\d+ passed", done.stdout)) == 1, "only rank 0 reports"
    assert "20 passed" in done.stdout
    (suite,) = ET.parse(tmp_path / "report.xml").iter("testsuite")
    assert (suite.get("tests"), suite.get("failures")) == ("20", "0")


FAILING = {
    "failure": """
def test_on_one(): assert comm.rank != 1, f"only rank {comm.rank} is wrong"
def test_on_all(): assert False, f"rank {comm.rank} says so"
def test_goes_on(): comm.Barrier()
""",
    "fixture": """
@pytest.fixture
def no_room(): assert comm.rank != 1, "no room"
@pytest.fixture
def mess():
    yield
    assert comm.rank != 1, "what a mess"
def test_setup(no_room): comm.Barrier()
def test_teardown(mess): comm.Barrier()
def test_next(): comm.Barrier()
""",
    "difference": """
def test_skip():
    if comm.rank == 1: pytest.skip("not on me")
def test_skip_all(): pytest.skip("on nobody")
@pytest.mark.xfail
def test_xfail_on_one(): assert comm.rank == 0
@pytest.mark.xfail
def test_xfail_on_all(): assert False
""",
    "hypothesis": """
from hypothesis import assume, given, strategies as st
@given(st.lists(st.integers(0, 100)))
def test_sum(together, x):
    assume(len(x) != 1)
    with together():
        comm.Barrier()
        assert comm.rank == 0 or sum(x) < 150
""",
    "last": """
@pytest.fixture(scope="session", autouse=True)
def note(request):
    yield
    with open(f"failed.{comm.rank}", "w") as file: file.write(str(request.session.testsfailed))
def test_goes_on(): comm.Barrier()
""",
}


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Done, Path]:
    """A job with all of FAILING, and the folder where it ran."""
    folder = tmp_path_factory.mktemp("failing")
    return run(folder, FAILING, "-v", size=3), folder


def test_failure_on_one_rank_is_everyones(failing: tuple[Done, Path]) -> None:
    done, folder = failing
    assert done.returncode == 1, done.stdout
    assert outcomes("failure", done.stdout) == ["FAILED", "FAILED", "PASSED"], done.stdout
    for text in ("only rank 1 is wrong", "rank 0 says so", "rank 1 says so", "rank 2 says so"):
        assert text in done.stdout
    # pytest counts errors as well.
    assert [(folder / f"failed.{rank}").read_text() for rank in range(3)] == ["7"] * 3
    assert "5 failed, 4 passed, 1 skipped, 1 xfailed, 2 errors" in done.stdout


def test_fixture_that_fails_on_one_rank(failing: tuple[Done, Path]) -> None:
    done, _ = failing
    assert outcomes("fixture", done.stdout) == ["ERROR", "PASSED", "ERROR", "PASSED"], done.stdout
    for text in ("ERROR at setup of test_setup", "no room", "ERROR at teardown of test_teardown", "what a mess"):
        assert text in done.stdout


def test_different_outcomes_are_a_failure(failing: tuple[Done, Path]) -> None:
    done, _ = failing
    assert outcomes("difference", done.stdout) == ["FAILED", "SKIPPED", "FAILED", "XFAIL"], done.stdout
    assert "not on me" in done.stdout


def test_hypothesis_shrinks_in_step(failing: tuple[Done, Path]) -> None:
    done, _ = failing
    assert outcomes("hypothesis", done.stdout) == ["FAILED"], done.stdout
    assert "x=[50, 100]" in done.stdout, "the smallest example, which takes shrinking"
    assert "ranks 1, 2 of 3" in done.stdout or "rank 1 of 3" in done.stdout


def test_marked_tests_are_skipped_without_the_option(tmp_path: Path) -> None:
    done = run(tmp_path, {"it": "def test_it(): assert False"}, size=1, with_mpi=False)
    assert done.returncode == 0, done.stdout
    assert "1 skipped" in done.stdout


# --- jobs that are ended

ENDED = {
    "stuck": (
        3,
        """
def test_stuck():
    if comm.rank == 1:
        raise RuntimeError("rank 1 leaves early")
    comm.Barrier()  # waits here
""",
    ),
    "hang": (
        2,
        """
def inner(): comm.recv(source=1)
@pytest.mark.timeout(3)
def test_hang():
    if comm.rank == 0: inner()
    else: time.sleep(100)
""",
    ),
    "teardown": (
        2,
        """
@pytest.fixture
def room():
    yield
    comm.recv(source=0)
@pytest.mark.timeout(3)
def test_hang(room): assert False
""",
    ),
    "gil": (
        2,
        """
@pytest.mark.timeout(1)
def test_hang(): ctypes.PyDLL(None).sleep(100)
""",
    ),
    "os._exit": (
        2,
        """
def test_leave():
    if comm.rank == 1: os._exit(3)
    comm.Barrier()
""",
    ),
    "interrupt": (
        2,
        """
def test_leave():
    if comm.rank == 1: raise KeyboardInterrupt
    comm.Barrier()
""",
    ),
    "collection": (
        2,
        """
if comm.rank == 1:
    def test_one(): pass
else:
    def test_zero(): pass
""",
    ),
    "import": (
        2,
        """
if comm.rank == 1: import no_such_module
def test_it(): comm.Barrier()
""",
    ),
}


OF_LONG = ("teardown", "interrupt")
"""What another one of ENDED does by the same code, but for a few lines."""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Callable[[str], Done]]:
    """Return the end of a job of ENDED. Most of their time is waiting, so several of them run at the same time."""
    long = pytestconfig.getoption("--tier") == "long"
    with ThreadPoolExecutor(3) as pool:
        jobs: dict[str, Future[Done]] = {
            name: pool.submit(run, tmp_path_factory.mktemp("ended"), {"it": tests}, size=size)
            for name, (size, tests) in ENDED.items()
            if long or name not in OF_LONG
        }

        def one(name: str) -> Done:
            done = jobs[name].result()
            assert done.seconds < 45, done.stdout
            assert done.returncode not in (0, 124), done.stdout
            return done

        yield one


def test_failure_while_others_wait_ends_the_job(ended: Callable[[str], Done]) -> None:
    done = ended("stuck")
    assert "RuntimeError: rank 1 leaves early" in done.stdout
    assert done.stdout.count("comm.Barrier()  # waits here") >= 2, "both waiting ranks show where"


def test_hang_ends_at_its_timeout_with_every_stack(ended: Callable[[str], Done]) -> None:
    done = ended("hang")
    assert "test_hang is over its time" in done.stdout
    assert "def inner(): comm.recv(source=1)" in done.stdout
    assert "else: time.sleep(100)" in done.stdout


@pytest.mark.long
def test_hang_in_teardown_after_a_failure(ended: Callable[[str], Done]) -> None:
    """pytest-timeout takes a failure for the beginning of a debugger's session, and stops its clock."""
    assert "test_hang is over its time" in ended("teardown").stdout


def test_hang_with_the_gil_held_on_all_ranks(ended: Callable[[str], Done]) -> None:
    done = ended("gil")
    assert "Timeout (" in done.stdout
    assert "in test_hang" in done.stdout


@pytest.mark.parametrize(
    ("leave", "said"), [("os._exit", ""), pytest.param("interrupt", "interrupted", marks=pytest.mark.long)]
)
def test_rank_that_leaves_ends_the_job(ended: Callable[[str], Done], leave: str, said: str) -> None:
    assert said in ended(leave).stdout


def test_ranks_that_collect_differently(ended: Callable[[str], Done]) -> None:
    done = ended("collection")
    assert "not on rank 0: test_it.py::test_one" in done.stdout
    assert "only on rank 0: test_it.py::test_zero" in done.stdout
    assert "passed" not in done.stdout


def test_import_that_fails_on_one_rank(ended: Callable[[str], Done]) -> None:
    done = ended("import")
    assert "No module named 'no_such_module'" in done.stdout
    assert "passed" not in done.stdout
