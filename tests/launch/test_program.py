"""A Python program as a rank of ``mpicoll run``: it runs as by itself, and its failure ends the job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.launch import ROOT

RUNNER = ROOT / "mpicoll" / "launch" / "program.py"

PROGRAM = """\
import os, sys
print([__name__, __file__, sys.argv, sys.path[0], __loader__.name, type(__builtins__), __annotations__], flush=True)
print(sys.excepthook is sys.__excepthook__, sys.modules["__main__"].__dict__ is globals(), flush=True)
def hook(kind, error, trace):
    print(kind, error, file=sys.stderr)
def fail(end):
    {"text": lambda: sys.exit("broken"), "3": lambda: sys.exit(3), "0": lambda: sys.exit(0), "none": sys.exit,
     "raise": lambda: 1 / 0, "hook": lambda: [setattr(sys, "excepthook", hook), 1 / 0], "": int}[end]()
fail(sys.argv[1])
"""


@pytest.mark.parametrize("module", [False, True], ids=["script", "module"])
def test_a_program_runs_as_by_itself(module: bool, tmp_path: Path) -> None:
    """Name, arguments, search path, status, output and the message that the launcher of MPICH's family gets."""
    (tmp_path / "program.py").write_text(PROGRAM)
    words = ["-m", "program"] if module else ["program.py"]
    for end, status in (("", 0), ("0", 0), ("none", 0), ("3", 3), ("text", 1), ("raise", 1), ("hook", 1)):
        receive, send = os.pipe()
        plain, ours = (
            subprocess.run(
                [sys.executable, *program, *words, end],
                cwd=tmp_path,
                env=os.environ | {"PMI_FD": str(send)},
                pass_fds=[send],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            for program in ([], [str(RUNNER)])
        )
        os.close(send)
        with os.fdopen(receive, "rb") as pipe:
            assert pipe.read() == (b"cmd=abort exitcode=%d\n" % status if status else b"")
        assert ours.returncode == plain.returncode == status
        assert ours.stdout == plain.stdout
        if end == "raise" and module:
            assert "program.py" in ours.stderr
            assert "launch" not in ours.stderr
        else:
            assert ours.stderr == plain.stderr


LASTING = """\
import atexit, multiprocessing, pickle, threading
class State:
    pass
def show(when):
    print(when, type(pickle.loads(pickle.dumps(State()))) is State)
def show_late(main):
    main.join()
    show("in a thread")
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print("spawned", type(pool.apply(State)) is State)
    atexit.register(show, "at exit")
    threading.Thread(target=show_late, args=[threading.main_thread()]).start()
"""


@pytest.mark.parametrize("words", [["lasting.py"], ["-m", "lasting"]], ids=["script", "module"])
def test_the_main_module_is_that_of_the_program_until_the_end(words: list[str], tmp_path: Path) -> None:
    """Pickle looks there for classes of the program, also after its last line, and multiprocessing for its file."""
    (tmp_path / "lasting.py").write_text(LASTING)
    done = subprocess.run(
        [sys.executable, str(RUNNER), *words], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.splitlines() == ["spawned True", "in a thread True", "at exit True"], done.stderr


FAILING = """\
import os
from mpicoll.engine.diagnostics import process_exit
class Abort:
    job_survives, rank_name = False, "rank 1 of 2"
    def announce(self, of, alike=""):
        print(alike, end="")
    def abort_all(self, status):
        os._exit(100 + status)
process_exit.abort_on_failure(Abort(), int)
raise ValueError
"""


@pytest.mark.parametrize("words", [["failing.py"], ["-m", "failing"]], ids=["script", "module"])
def test_ranks_that_fail_alike_are_found_by_the_frames_of_the_program(words: list[str], tmp_path: Path) -> None:
    """The hook that mpicoll finds is Python's, and the traceback has no frame of the launcher to count."""
    (tmp_path / "failing.py").write_text(FAILING)
    done = subprocess.run(
        [sys.executable, str(RUNNER), *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 101
    line = len(FAILING.splitlines())
    assert done.stdout == done.stderr
    assert done.stdout.splitlines() == [
        "Traceback (most recent call last):",
        f'  File "{tmp_path / "failing.py"}", line {line}, in <module>',
        "    raise ValueError",
        "ValueError",
    ]
