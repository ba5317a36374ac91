"""Exit status of processes that are not children, found by their numbers."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from support.descriptors import count_process_descriptors
from support.patches import patch_within

from mpicoll.transport.control import process_status
from mpicoll.transport.control.process_status import Process, compute_max_descriptors, describe_process

CHILD = """
import json, sys
from mpicoll.transport.control.process_status import describe_process
print(json.dumps(describe_process()), flush=True)
sys.exit(int(sys.stdin.readline()))
"""


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def description(child: subprocess.Popen[str]) -> dict[str, Any]:
    assert child.stdout is not None
    found = json.loads(child.stdout.readline())
    assert isinstance(found, dict)
    assert found["pid"] == child.pid
    return found


def end(child: subprocess.Popen[str], status: int, *, reap: bool) -> None:
    if status < 0:
        child.send_signal(-status)
    else:
        assert child.stdin is not None
        child.stdin.write(f"{status}\n")
        child.stdin.flush()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    if reap:
        child.wait()


@pytest.mark.parametrize("status", [0, 3, -signal.SIGKILL])
@pytest.mark.parametrize("way", ["pidfd", "pidfd without wait", "no pidfd", "stat", "late"])
def test_status(child: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch, way: str, status: int) -> None:
    """With a pidfd, also before the parent waits, with the file of older kernels, and with no descriptor."""
    if way.startswith("pidfd") and not process_status._keeps_status:
        pytest.skip("needs Linux 6.15")
    monkeypatch.setattr(process_status, "_keeps_status", "pidfd" in way)
    if way == "no pidfd":
        monkeypatch.delattr(os, "pidfd_open")
    before = count_process_descriptors()
    process = Process(description(child), descriptor=way != "late")
    assert count_process_descriptors() == before + (way != "late")
    assert way == "late" or process.status() is None
    end(child, status, reap=way == "pidfd")
    assert process.status() == status
    process.close()
    process.close()
    assert count_process_descriptors() == before


@pytest.mark.parametrize("has_pidfd", [True, False])
def test_kill(child: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch, has_pidfd: bool) -> None:
    what = description(child)
    before = count_process_descriptors()
    with pytest.raises(ProcessLookupError):
        Process(what | {"start": 1}, descriptor=False).kill()
    assert child.poll() is None
    if not has_pidfd:
        monkeypatch.delattr(os, "pidfd_open")
    Process(what, descriptor=False).kill()
    assert child.wait(10) == -signal.SIGKILL
    assert count_process_descriptors() == before


@pytest.mark.parametrize("change", [{"start": 1}, {"pid_namespace": "pid:[1]"}, {"pid_namespace": ""}])
def test_another_process_with_its_number_is_not_taken_for_it(change: dict[str, Any]) -> None:
    """In another PID namespace, or after its end."""
    before = count_process_descriptors()
    with pytest.raises(ProcessLookupError):
        Process(describe_process() | change)
    assert count_process_descriptors() == before


def test_its_number_is_reused_before_it_is_looked_at(child: subprocess.Popen[str]) -> None:
    process = Process(description(child) | {"start": 1}, descriptor=False)
    end(child, 3, reap=False)
    assert process.status() is None


def test_a_process_that_has_ended_leaves_no_descriptor(
    child: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    what = description(child)
    end(child, 0, reap=True)
    # As if it ended between the two.
    patch_within(monkeypatch, process_status, os, pidfd_open=lambda pid: os.open("/dev/null", os.O_RDONLY))
    before = count_process_descriptors()
    with pytest.raises(OSError, match="No such file"):
        Process(what)
    assert count_process_descriptors() == before


def test_most_descriptors_are_left_to_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, most in ((256, 16), (resource.RLIM_INFINITY, 1024)):
        with monkeypatch.context() as within:
            patch_within(within, process_status, resource, getrlimit=lambda what, soft=soft: (soft, soft))
            assert compute_max_descriptors() == most
