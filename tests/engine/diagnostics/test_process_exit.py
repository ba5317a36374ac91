"""Uncaught exceptions and sys.exit."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest
from support.launch import ROOT

import mpicoll
from mpicoll.engine.diagnostics import process_exit
from mpicoll.engine.diagnostics.process_exit import _fold, abort_on_failure, log_to_stderr

Starter = Callable[..., "CompletedProcess[str]"]


class RecordedAbort:
    """An abort that only records its causes and exit statuses."""

    job_survives, rank_name = False, "rank 1 of 2"

    def __init__(self, calls: list[Any]) -> None:
        self._calls = calls

    def announce(self, of: str, alike: str = "") -> None:
        self._calls.append(of)

    def abort_all(self, status: int) -> None:
        self._calls.append(status)


def test_uncaught_exceptions_end_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(process_exit, "_run_atexit_handlers", lambda abort: calls.append("handlers"))
    monkeypatch.setattr(sys, "excepthook", lambda *error: calls.append(error))
    monkeypatch.setattr(sys, "exit", sys.exit)
    abort_on_failure(RecordedAbort(calls), lambda: calls.append("exit cancelled"))
    error = ValueError("uncaught\nand more")
    sys.excepthook(ValueError, error, None)
    announced = "died of ValueError: uncaught; the job is ended"
    assert calls == [announced, (ValueError, error, None), "exit cancelled", "handlers", 1]
    with pytest.raises(SystemExit) as leaving:
        sys.exit(3)
    assert leaving.value.code == 3


def test_a_failure_at_the_end_does_not_keep_the_job_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def fail(abort: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(process_exit, "_run_atexit_handlers", fail)
    monkeypatch.setattr(sys, "excepthook", lambda *error: None)
    monkeypatch.setattr(sys, "exit", sys.exit)
    abort_on_failure(RecordedAbort(calls), lambda: None)
    with pytest.raises(MemoryError):
        sys.excepthook(MemoryError, MemoryError(), None)
    assert calls[-1] == 1


@pytest.mark.parametrize(
    ("code", "status"),
    [(None, 0), (0, 0), (False, 0), (1, 1), (3, 3), (True, 1), (255, 255), (256, 1), (-256, 1), (2**40, 1), (-1, 255)],
)
def test_an_exit_that_is_not_0_has_a_status_that_is_not_0(code: int | None, status: int) -> None:
    assert process_exit._exit_status(code) == status


def test_an_exit_with_a_text_has_status_1() -> None:
    assert process_exit._exit_status("no such file") == process_exit._exit_status("") == 1


EXITS = {
    "sys.exit(3)": 3,
    "exit(4)": 4,
    "raise SystemExit(5)": 5,
    "class Own(SystemExit): pass\nraise Own(256)": 1,
    "raise SystemExit('a text')": 1,
    "raise SystemExit": None,
    "sys.exit(0)": None,
    "one = threading.Thread(target=sys.exit, args=(3,)); one.start(); one.join()": None,
    "try: raise SystemExit(3)\nexcept SystemExit as one: assert one.code == 3": None,
    "class Own(Exception):\n    def __str__(self): raise RuntimeError\nraise Own": 1,
    "sys.excepthook = print\nraise ValueError": 1,
    "def hook(*error): raise RuntimeError\nsys.excepthook = hook\nraise ValueError": 1,
    "sys.excepthook = print\nimport code\ncode.InteractiveInterpreter().runsource('raise ValueError')": None,
    """sys.excepthook = print
child = os.fork()
if child == 0: raise ValueError
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1""": None,
}
"""Ends of a program, and the statuses with which the job is ended."""


PROGRAM = """
import atexit, os, sys, threading
from mpicoll.engine.diagnostics import process_exit

class Abort:
    job_survives, rank_name = False, "rank 1 of 2"

    def announce(self, of, alike=""):
        pass

    def abort_all(self, status):
        os._exit(100 + status)

def before():
    print("before")

def own():
    print("of mpicoll")

atexit.register(before)
atexit.register(own)
process_exit.abort_on_failure(Abort(), lambda: atexit.unregister(own))
"""
"""The beginning of a program whose job is ended with its status + 100."""


def start(end: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error", "-c", PROGRAM + end]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def test_the_status_of_an_exit_is_that_of_the_job() -> None:
    programs = [start(end) for end in EXITS]
    for one in programs:
        one.communicate(timeout=60)
    expected = {end: 0 if status is None else 100 + status for end, status in EXITS.items()}
    assert dict(zip(EXITS, [one.returncode for one in programs], strict=True)) == expected


def test_an_exception_is_named_after_the_hook_of_others() -> None:
    """Once the hook has shown it; and not that of a session in which the user has gone on."""
    replaced = """
Abort.announce = lambda self, of, alike="": print(of, of == alike)
sys.excepthook = lambda kind, *rest: print("shown", kind.__name__)
"""
    ends = {
        "raise ValueError('x')": (["shown ValueError", "died of ValueError: x; the job is ended True"], 101),
        "raise KeyboardInterrupt": (
            ["shown KeyboardInterrupt", "died of KeyboardInterrupt; the job is ended True"],
            101,
        ),
        "sys.ps1 = '> '\nraise ValueError": (["shown ValueError", "of mpicoll", "before"], 1),
    }
    programs = [start(replaced + end) for end in ends]
    assert [(one.communicate(timeout=60)[0].splitlines(), one.returncode) for one in programs] == list(ends.values())


def test_a_failure_is_described_by_its_type_where_it_has_no_text() -> None:
    class Own(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert process_exit.describe_failure(Own()) == "died of Own"


def test_atexit_handlers_run_within_a_bound_after_an_exception() -> None:
    """In Python's order, on the main thread, and without those that communicate with other ranks."""
    ends = """
def after():
    print("after", threading.current_thread() is threading.main_thread())
    print(1 / 0)

atexit.register(after)
raise ValueError
"""
    hangs = """
process_exit._ATEXIT_TIMEOUT = 0.1
atexit.register(threading.Event().wait)
atexit.register(print, "at first")
raise ValueError
"""
    for one, printed in [(start(ends), ["after True", "before"]), (start(hangs), ["at first"])]:
        assert one.communicate(timeout=60)[0].splitlines() == printed
        assert one.returncode == 101


def test_hooks_that_block_or_fail_do_not_prevent_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when they write to a file system that does not respond."""
    called, release = list[str](), threading.Event()
    hooks = [release.wait, lambda: called.append(str(1 / 0)), lambda: called.append("last")]
    monkeypatch.setattr(process_exit, "exit_hooks", hooks)
    monkeypatch.setattr(process_exit, "_HOOK_TIMEOUT", 0.1)
    process_exit.run_exit_hooks()
    assert called == ["last"]
    release.set()


def test_open_files_are_written_before_the_end(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as text, (tmp_path / "data").open("wb") as data:
        text.write("last words")
        data.write(b"1234")
        process_exit.run_exit_hooks()
        assert (tmp_path / "log").read_text() == "last words"
        assert (tmp_path / "data").read_bytes() == b"1234"


def _raised(function: Callable[[], Any]) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011  each is looked at
        function()
    return caught.value


def _frames(error: Exception) -> list[str]:
    return [one.name for one in traceback.extract_tb(_fold(error, error.__traceback__))]


def test_frames_of_the_package_are_folded() -> None:
    """But not those of the program between and below them, and none where an error is a mistake of the package."""

    def step(state: int, number: int, comm: Any) -> None:
        raise ValueError("in the program")

    refused = _raised(lambda: mpicoll.allreduce(np.ones(3, "M8[s]")))
    assert _frames(refused) == ["_raised", "<lambda>"]
    below = _raised(lambda: mpicoll.resilient(step, 0, 1))
    assert _frames(below) == ["_raised", "<lambda>", "step"]
    if sys.version_info >= (3, 11):
        for error in (refused, below):
            (note,) = error.__notes__
            assert re.fullmatch(r"\[\d+ frames of mpicoll are not shown; python -X dev shows them\]", note)
    mistake = _raised(lambda: mpicoll.resilient(step, 0, "1"))  # type: ignore[arg-type]
    assert _frames(mistake)[-1] == "resilient"


def test_an_exception_that_takes_no_note_ends_the_job_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fixed(mpicoll.ArgumentError):
        def __setattr__(self, name: str, value: Any) -> None:
            raise AttributeError(name)

    calls: list[Any] = []
    monkeypatch.setattr(process_exit, "_run_atexit_handlers", lambda abort: None)
    monkeypatch.setattr(sys, "excepthook", lambda *error: None)
    monkeypatch.setattr(sys, "exit", sys.exit)
    abort_on_failure(RecordedAbort(calls), lambda: calls.append("exit cancelled"))

    def step(state: int, number: int, comm: Any) -> None:
        raise Fixed("x")

    error = _raised(lambda: mpicoll.resilient(step, 0, 1))
    sys.excepthook(type(error), error, error.__traceback__)
    assert calls == ["died of Fixed: x; the job is ended", "exit cancelled", 1]


def test_what_a_hook_of_others_swallows_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch.distributed lets the hooks before its own write to a string."""
    shown = io.StringIO()
    monkeypatch.setattr(sys, "__stderr__", shown)
    monkeypatch.setattr(process_exit, "_run_atexit_handlers", lambda abort: None)
    monkeypatch.setattr(sys, "excepthook", lambda *error: sys.stderr.write("the traceback"))
    monkeypatch.setattr(sys, "exit", sys.exit)
    abort_on_failure(RecordedAbort([]), lambda: None)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    sys.excepthook(ValueError, ValueError(), None)
    assert shown.getvalue() == "the traceback"


def test_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """mpirun ends texts with a zero byte and no newline, and may write one just before."""
    sys.stderr.write("a text of mpirun\n\0")
    log_to_stderr("rank 1 of 2 died", separate=True)
    assert capsys.readouterr().err.splitlines() == ["a text of mpirun", "\0", "mpicoll: rank 1 of 2 died"]


@pytest.mark.slow
def test_an_uncaught_exception_ends_the_job(job: Starter) -> None:
    done = job(
        3,
        """
def breaks():
    raise ZeroDivisionError("on rank 1 alone")
if mpicoll.world().rank == 1:
    breaks()
mpicoll.allreduce(np.ones(2))
""",
    )
    assert done.returncode not in (0, 124), done.stdout
    assert "mpicoll: rank 1 of 3 died of ZeroDivisionError: on rank 1 alone" in done.stdout
    assert "in breaks" in done.stdout
    assert "ZeroDivisionError: on rank 1 alone" in done.stdout


@pytest.mark.slow
def test_a_rank_without_descriptors_ends_the_job(job: Starter) -> None:
    done = job(
        2,
        """
import os, resource
world = mpicoll.world()
mpicoll.barrier()
if world.rank == 1:
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
    files = []
    while True:
        files.append(open(os.devnull))
mpicoll.barrier()
""",
    )
    assert done.returncode not in (0, 124), done.stdout
    assert "mpicoll: rank 1 of 2 died of OSError: [Errno 24]" in done.stdout
    assert "Error in sys.excepthook" not in done.stdout


@pytest.mark.slow
def test_an_exception_on_all_ranks_is_shown_once(job: Starter) -> None:
    done = job(3, "def breaks():\n    mpicoll.allreduce(np.ones(3, 'M8[s]'))\nbreaks()\n")
    assert done.returncode not in (0, 124), done.stdout
    assert re.findall("^mpicoll: .* died of", done.stdout, re.MULTILINE) == ["mpicoll: ranks 0-2 of 3 died of"]
    assert done.stdout.count("Traceback") == done.stdout.count("in breaks") == 1, done.stdout
    assert "mpicoll/collectives" not in done.stdout


LAUNCHER = """
import ctypes, os, subprocess, sys
ctypes.CDLL(None).prctl(15, sys.argv[1].encode(), 0, 0, 0)  # PR_SET_NAME
program = "from mpicoll.engine.diagnostics.process_exit import log_after_sigterm as log; log('first'); log('second')"
rank = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE)
rank.wait(30)
print("forwarded", rank.stderr.read(), file=sys.stderr)
"""

REFUSE = "import mpicoll.engine.diagnostics.process_exit as p; p._PIDFD_GETFD = -1; "


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("kind", ["file", "pipe"])
@pytest.mark.parametrize("may_copy", [True, False], ids=["copied", "opened"])
@pytest.mark.parametrize("name", ["prterun", "other"])
def test_a_line_after_sigterm_is_read_by_the_launcher_or_written_in_its_place(
    name: str, may_copy: bool, kind: str, tmp_path: Path
) -> None:
    """Open MPI 5's launcher reads nothing any more; its own output continues in the same file."""
    launcher = tmp_path / "launcher.py"
    launcher.write_text(LAUNCHER if may_copy else LAUNCHER.replace('program = "', 'program = "' + REFUSE))
    shown = tmp_path / "shown"
    with shown.open("wb" if may_copy else "ab") as file:
        done = subprocess.run(
            [sys.executable, str(launcher), name],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stderr=file if kind == "file" else subprocess.PIPE,
            timeout=60,
            check=True,
        )
    text = shown.read_bytes() if kind == "file" else done.stderr
    lines = b"\nmpicoll: first\n\nmpicoll: second\n"
    assert text == (lines + b"forwarded b''\n" if name == "prterun" else b"forwarded %r\n" % lines)
