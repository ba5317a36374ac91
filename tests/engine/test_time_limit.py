"""The limit on the time of code that may hold the interpreter lock."""

from __future__ import annotations

import signal
from collections.abc import Callable
from subprocess import CompletedProcess

import pytest

from mpicoll.engine.time_limit import time_limit

Python = Callable[..., "CompletedProcess[str]"]


def test_code_that_holds_the_interpreter_lock_is_ended(python: Python) -> None:
    done = python("""
from mpicoll.engine.time_limit import time_limit

def holds_the_lock():
    sum(range(10**11))

with time_limit(0.2, stderr=2):
    holds_the_lock()
""")
    assert done.returncode == -signal.SIGRTMAX
    assert "in holds_the_lock" in done.stdout


def test_there_is_no_limit_without_an_unused_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_IGN)
    done = []
    with time_limit(10, stderr=2):
        done.append("the block")
    assert done


def test_the_start_of_mpi_leaves_the_timer_of_faulthandler_to_the_program(python: Python) -> None:
    """As with pytest's option faulthandler_timeout."""
    done = python("""
import faulthandler, time
from mpicoll.engine import startup
faulthandler.dump_traceback_later(1, exit=True)
startup._mpi_init_waits_for_all_ranks()
time.sleep(20)
""")
    assert done.returncode == 1, done.stdout
    assert "Timeout (0:00:01)!" in done.stdout
