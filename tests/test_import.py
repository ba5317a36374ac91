"""``import mpicoll`` starts nothing and loads no framework."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.launch import ROOT


def run(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_no_framework_is_loaded() -> None:
    run(
        "import mpicoll, sys\n"
        "heavy = {'mpi4py', 'torch', 'cupy', 'ml_dtypes', 'matplotlib', 'rich', 'sklearn'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )


def test_no_framework_is_loaded_by_use_without_mpi() -> None:
    run(
        "import mpicoll, sys, numpy as np\n"
        "assert mpicoll.allreduce(np.ones(3)).tolist() == [1.0] * 3\n"
        "assert mpicoll.iallreduce(np.ones(3)).wait(5).tolist() == [1.0] * 3\n"
        "assert mpicoll.run_local(lambda: mpicoll.allreduce(np.ones(3)).sum(), 3) == [9.0] * 3\n"
        "assert not {'mpi4py', 'torch', 'cupy'} & set(sys.modules)"
    )


def test_no_thread_is_started_and_no_handler_installed() -> None:
    run(
        "import atexit, signal, sys, threading\n"
        "import numpy, logging, concurrent.futures\n"  # what they register is theirs
        "state = lambda: (sys.excepthook, threading.excepthook, atexit._ncallbacks(), signal.getsignal(2))\n"
        "before = state()\n"
        "import mpicoll\n"
        "assert threading.active_count() == 1\n"
        "assert before == state()"
    )


def test_a_malformed_variable_does_not_break_the_import() -> None:
    run("import os; os.environ['MPICOLL_TIMEOUT'] = 'soon'; import mpicoll")


@pytest.mark.parametrize("module", ["errors", "schedules", "transport.local", "engine.world", "collectives.p2p"])
def test_any_module_may_be_imported_first(module: str) -> None:
    run(f"import mpicoll.{module}")
