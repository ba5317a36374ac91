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


@pytest.mark.extension
def test_objects_that_were_not_initialised() -> None:
    """Python may make them, as a constructor that fails before it calls that of its base class does."""
    from mpicoll._shm import Collective, NeighbourCollective, QueueLock, Steps

    steps = Steps.__new__(Steps)
    for use in (
        steps.step,
        steps.catch_up,
        steps.step_failed,
        steps.abandon,
        steps.find_unseen_call,
        lambda: steps.step_signature(1),
        lambda: steps.post(1),
        lambda: steps.set_slots([], 0, 0, 0),
        lambda: steps.set_processes([]),
        lambda: steps.add_segment(1, [], 0),
    ):
        with pytest.raises(ValueError, match="not initialised"):
            use()
    assert steps.list_late_ranks() == steps.list_unusable_ranks() == steps.list_signatures() == []
    memory = bytearray(Steps.count_flag_bytes(1))
    steps.__init__(memory, 0, 1, False)  # type: ignore[misc]
    with pytest.raises(ValueError, match="initialised twice"):
        steps.__init__(memory, 1, 2, False)  # type: ignore[misc]
    assert (steps.rank, steps.size) == (0, 1)
    steps.step()
    collective = Collective.__new__(Collective)
    with pytest.raises(ValueError, match="there is no sort"):
        collective.__init__(steps, "sort", "sum", "int64", 8, [1], 0, 1, False, 1)  # type: ignore[misc]
    for one in (collective, *(kind.__new__(kind) for kind in (Collective, NeighbourCollective))):
        for carry_out in (one.carry_out, one.run):
            with pytest.raises(TypeError, match="initialised"):
                carry_out(None, None)
    assert QueueLock.__new__(QueueLock).acquire()
