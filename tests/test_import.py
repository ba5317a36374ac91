"""``import mpicoll`` starts nothing and loads no framework."""

from __future__ import annotations

import ast
import re
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


BY_NAME = {
    # Public names and subpackages are imported when they are used.
    "__init__.py": {"mpicoll.", "mpicoll.schedules"},
    # torch's entry point lies below mpicoll.torch, and loads it when the backend is used.
    "autoload.py": {"mpicoll.legacy_autoload", "mpicoll.torch.backend", "mpicoll.torch.rendezvous_handler"},
    "legacy_autoload.py": {
        "mpicoll.torch.legacy.c10d_patches",
        "mpicoll.torch.legacy.group_creation",
        "mpicoll.torch.legacy.process_group",
    },
    # Whether MPI and NCCL have been used is asked without loading them.
    "engine/startup.py": {"mpicoll.engine.executors.nccl", "mpicoll.transport.mpi"},
    "launch/program.py": {"mpicoll.transport.mpi"},
}
"""The modules that are named by a string, where the contracts on imports don't see them."""


def test_modules_are_named_by_strings_only_where_they_must() -> None:
    package = ROOT / "mpicoll"
    found = {
        str(file.relative_to(package)): names
        for file in package.rglob("*.py")
        if (names := set(filter(_names_module, _strings(file.read_text()))))
    }
    assert found == BY_NAME


def _strings(source: str) -> list[str]:
    constants = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant))
    return [value for value in constants if isinstance(value, str)]


def _names_module(text: str) -> bool:
    if not re.fullmatch(r"mpicoll\.[\w.]*", text):
        return False
    path = ROOT.joinpath(*text.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()
