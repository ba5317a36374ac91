"""The stacks of threads that run, and what is taken from them."""

from __future__ import annotations

import ast
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import mpicoll
from mpicoll.engine.diagnostics.flight_recorder import CallSite
from mpicoll.engine.diagnostics.stacks import (
    call_site_in,
    is_idle,
    program_site,
    runs_program,
    source_line,
    take_stacks,
)

OURS = str(Path(mpicoll.__file__).parent / "engine" / "core" / "queue.py")
INSTALLED = pytest.__file__
STANDARD = threading.__file__

FRAMES = {"_getframe", "_current_frames", "walk_stack", "f_locals", "f_back", "tb_frame"}
"""By which Python's frames are looked at."""

LOOKS = {
    "engine/diagnostics/process_exit.py": "folds the traceback of an error that ends the program",
    "engine/diagnostics/flight_recorder.py": "finds the line that calls us, at the time of the call",
    "launch/rank.py": "shows the traceback of a function",
    "launch/program.py": "shows the traceback of a program",
    "autoload.py": "is called by torch without what it needs",
    "legacy_autoload.py": "the same",
    "torch/legacy/c10d_frames.py": "the same",
}


def test_stacks_of_threads_that_wait() -> None:
    ready, end = threading.Event(), threading.Event()

    def wait() -> None:
        ready.set()
        end.wait()

    wait.__code__ = wait.__code__.replace(co_name="größe")
    thread = threading.Thread(target=wait)
    thread.start()
    ready.wait()
    try:
        found = take_stacks()
    finally:
        end.set()
        thread.join()
    mine, other = found[threading.get_ident()], found[thread.ident or 0]
    assert [frame.function for frame in mine[:2]] == ["take_stacks", "test_stacks_of_threads_that_wait"]
    assert (mine[1].file, source_line(mine[1])) == (__file__, "found = take_stacks()")
    assert [frame.function for frame in other if frame.file == __file__] == ["größe"]
    assert runs_program(other)


BUSY = """
import sys, threading, time
from mpicoll.engine.diagnostics.stacks import take_stacks

class Resource:
    def __del__(self):
        sum(range(200))

def use(depth):
    kept = Resource()
    return use(depth - 1) if depth else None

def work():
    while True:
        use(20)

for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
sys.setswitchinterval(1e-5)
deadline = time.monotonic() + 1
while time.monotonic() < deadline:
    found = take_stacks()
    assert len(found) == 4
print("done")
"""


@pytest.mark.slow
def test_threads_that_run_meanwhile() -> None:
    """Frames that are about to go are read, and nothing crashes."""
    done = subprocess.run([sys.executable, "-c", BUSY], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_lines_of_the_program() -> None:
    own, library, ours = (
        CallSite("/home/a/train.py", 3, "step"),
        CallSite(INSTALLED, 4, "main"),
        CallSite(OURS, 5, "run"),
    )
    torch, standard = CallSite("/x/torch/distributed/c10d.py", 6, "all_reduce"), CallSite(STANDARD, 7, "run")
    operator = CallSite("/home/a/train.py", 9, "largest")
    assert program_site([ours, torch, library, own]) == own
    assert program_site([ours, torch, standard, library]) == library
    assert program_site([ours, standard]) is None
    assert call_site_in([operator, ours, torch, own]) == own
    assert call_site_in([operator]) == operator
    assert call_site_in([]) is None
    assert not runs_program([ours, standard])
    assert runs_program([ours, library, standard])
    assert not is_idle([])


def test_no_other_code_looks_at_frames() -> None:
    """To walk frames of other threads may crash, and ties code to the names of variables elsewhere."""
    package = Path(mpicoll.__file__).parent
    found = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if any(getattr(node, "attr", None) in FRAMES for node in ast.walk(ast.parse(path.read_text())))
    }
    assert found == LOOKS.keys()
