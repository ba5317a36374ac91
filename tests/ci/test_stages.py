"""The stages of ci/test.sh: small pytest projects, whose tests fail always, or once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.launch import ROOT

TESTS = {
    "unsteady.py": """
import os, pathlib, pytest

def once(name):
    file = pathlib.Path(f"failed-{name}")
    if not file.exists():
        file.touch()
        raise AssertionError(f"{name} was not there in time")

@pytest.mark.parametrize("x", ["a/b.c::d", "[]"])
def test_call(x): once(f"call-{len(x)}")

class TestClass:
    @pytest.fixture
    def late(self):
        yield
        once("teardown")
    def test_teardown(self, late): pass
    def test_skipped(self): pytest.skip("never")

def test_alone(): assert "PYTEST_XDIST_WORKER" not in os.environ or once("alone") is None
""",
    "genuine.py": """
import pytest
from test_unsteady import once
@pytest.fixture
def broken(): raise OSError("no such thing")
def test_always(): assert False, "never right"
def test_error(broken): pass
def test_both_times_elsewhere():
    once("elsewhere")
def test_right(): pass
""",
    "many.py": """
import pytest
from test_unsteady import once
@pytest.mark.parametrize("x", range(11))
def test_many(x): once(f"many-{x}")
""",
    "crash.py": """
import os
from test_unsteady import once
def test_once(): once("crash")
def test_dies(): os._exit(1)
""",
    "fatal.py": """
import os
def test_right(): pass
def test_aborts(): os.abort()
""",
    "stop.py": """
import time
from test_unsteady import once
def test_once(): once("stop")
def test_stops(): time.sleep(600)
""",
    "skip.py": """
import pytest
from test_unsteady import once
def test_skips_then():
    once("skip")
    pytest.skip("not now")
""",
}


def run_stages(folder: Path, *stages: str) -> tuple[int, str]:
    """Status and output of a script with these stages, in a folder with the tests of `TESTS`."""
    (folder / "ci").symlink_to(ROOT / "ci")
    for name, text in TESTS.items():
        (folder / f"test_{name}").write_text(text)
    script = folder / "stages.sh"
    options = "-q -p no:cacheprovider --rootdir=. -c /dev/null --import-mode=prepend"
    script.write_text(
        "\n".join(["set -euo pipefail", "source ci/stages.sh", f"options=({options})", *stages, "sum_up"])
    )
    environ = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_CURRENT_TEST"):
        environ.pop(name, None)
    done = subprocess.run(
        ["timeout", "--kill-after=5", "100", "bash", script],
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def stage(name: str, file: str, *options: str, limit: int = 60) -> str:
    return f"tests {name} {limit} python -m pytest ${{options[@]}} -- test_{file}.py {' '.join(options)}"


def test_what_passes_when_run_alone_is_unsteady(tmp_path: Path) -> None:
    """With pytest-xdist at first, and then without."""
    status, output = run_stages(tmp_path, stage("unit", "unsteady", "-p", "xdist.plugin", "--numprocesses=2"))
    lines = output.splitlines()
    names = ["test_call[a/b.c::d]", "test_call[[]]", "TestClass::test_teardown", "test_alone"]
    unsteady = [f"UNSTEADY: passed when run alone: test_unsteady.py::{name}" for name in names]
    assert sorted(lines[-5:-1]) == sorted(unsteady), output
    assert (status, lines[-1]) == (0, "0 passed, 0 failed, 1 skipped, 4 unsteady"), output
    for text in unsteady:
        assert f"=== unit: {text}" in lines
    shown = output.partition("Its first failure:")[2]
    for name in ("call-8", "call-2", "teardown", "alone"):
        assert f"AssertionError: {name} was not there in time" in shown
    assert "=== unit-retry: ok" in output


def test_what_fails_twice_fails(tmp_path: Path) -> None:
    status, output = run_stages(tmp_path, stage("one", "genuine"), stage("two", "skip"))
    lines = output.splitlines()
    assert lines[-3:] == [
        "UNSTEADY: passed when run alone: test_genuine.py::test_both_times_elsewhere",
        "FAILED: one two",
        "1 passed, 3 failed, 0 skipped, 1 unsteady",
    ], output
    assert status == 1


def test_what_is_no_chance_is_not_retried(tmp_path: Path) -> None:
    """Many failures, a process that dies, or a stage that is stopped; nor where no stage asks for it."""
    status, output = run_stages(
        tmp_path,
        stage("many", "many"),
        stage("worker", "crash", "-p", "xdist.plugin", "--numprocesses=1"),
        stage("crash", "crash").replace("test_crash", "test_crash.py --deselect test_crash.py::test_once"),
        stage("stop", "stop", limit=4),
        stage("plain", "skip").replace(" -- ", " "),
    )
    assert "-retry" not in output
    lines = output.splitlines()
    assert lines[-2:] == ["FAILED: many worker crash stop plain", "0 passed, 16 failed, 0 skipped"], output
    assert status == 1


def test_the_end_of_what_was_cut_short_is_repeated(tmp_path: Path) -> None:
    """Above the last lines, also with the tests that have crashed. What has left a process behind does not wait."""
    leaves = "bash -c 'sleep 60 & for i in {1..20}; do echo number $i; done; exit 3'"
    began = time.monotonic()
    status, output = run_stages(
        tmp_path,
        f"tests leaves/one 60 {leaves}",
        stage("fatal", "fatal"),
        "check passes 60 echo right",
        "check not 60 false",
    )
    assert time.monotonic() - began < 40
    assert (status, output.count("number 20\n"), output.count("number 12\n")) == (1, 2, 1)
    _, leaves, fatal = output.split(": cut short")
    assert leaves.splitlines()[1:9] == [f"number {one}" for one in range(13, 21)]
    assert fatal.splitlines()[1].endswith("Fatal Python error: Aborted")
    assert 'test_fatal.py", line 4 in test_aborts' in fatal.splitlines()[2]
    assert fatal.splitlines()[-2:] == ["FAILED: leaves/one fatal not", "0 passed, 3 failed, 0 skipped"]


@pytest.mark.slow
def test_ranks_retry_together(tmp_path: Path) -> None:
    """What failed on one rank only, all of them run once more."""
    tests = """
import pathlib, pytest
from mpi4py import MPI
comm = MPI.COMM_WORLD
pytestmark = pytest.mark.mpi

def test_unsteady():
    comm.Barrier()
    if comm.rank == 1:
        file = pathlib.Path("failed")
        if not file.exists():
            file.touch()
            assert False, "rank 1 was late"

def test_genuine(): assert comm.allreduce(1) != 2, "there are two ranks"
"""
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_mpi.py").write_text(tests)
    settings = f"-c {ROOT / 'pyproject.toml'} --rootdir=. -p no:cacheprovider -q"
    status, output = run_stages(
        tmp_path,
        "unset PYTEST_DISABLE_PLUGIN_AUTOLOAD",
        f"tests mpi-2 90 mpirun -np 2 python -m pytest --with-mpi {settings} -- test_mpi.py -m mpi",
    )
    assert output.splitlines()[-3:] == [
        "UNSTEADY: passed when run alone: test_mpi.py::test_unsteady",
        "FAILED: mpi-2",
        "0 passed, 1 failed, 0 skipped, 1 unsteady",
    ], output
    assert "rank 1 was late" in output.partition("Its first failure:")[2], output
    assert status == 1
