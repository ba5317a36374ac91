"""The extension in C may be absent."""

from __future__ import annotations

import gc
import shutil
import subprocess
import sys
from collections import deque
from pathlib import Path
from weakref import ref

import pytest
from support.launch import ROOT

import mpicoll

PRINT = """
from mpicoll import extension
print(extension.find_missing_reason())
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the package, without what was compiled."""
    shutil.copytree(
        ROOT / "mpicoll", tmp_path / "mpicoll", ignore=shutil.ignore_patterns("*.so", "__pycache__", "csrc")
    )
    return tmp_path


def find_missing_reason(folder: Path) -> str:
    """What a process says of the package in a folder."""
    command = [sys.executable, "-c", PRINT]
    return subprocess.run(
        command, cwd=folder, env={"PYTHONPATH": str(folder)}, capture_output=True, text=True, timeout=60, check=True
    ).stdout.strip()


def test_no_extension(copy: Path) -> None:
    assert find_missing_reason(copy) == "mpicoll was installed without it"


def test_extension_that_can_not_be_loaded(copy: Path) -> None:
    (copy / "mpicoll" / "_shm.abi3.so").write_text("not an object file")
    assert "mpicoll/_shm.abi3.so" in find_missing_reason(copy)


def test_extension_that_was_compiled_from_other_sources(copy: Path) -> None:
    (copy / "mpicoll" / "_shm.py").write_text("class Steps: ...")
    assert "build_ext --inplace" in find_missing_reason(copy)


@pytest.mark.extension
def test_extension_before_the_module_in_its_place() -> None:
    assert mpicoll._shm.__file__.endswith(".so")


@pytest.mark.extension
def test_calls_hold_their_queue() -> None:
    """It is collected with them."""
    from mpicoll._shm import Calls, QueueLock

    class Queue:
        calls: Calls | None = None

    queue = Queue()
    calls, collected = Calls(QueueLock(), queue, deque(), object()), ref(queue)
    queue.calls = calls
    del queue
    kept = collected()
    assert kept is not None
    assert kept.calls is calls
    del kept
    calls.clear()
    del calls
    gc.collect()
    assert collected() is None
