"""Time for which a thread was ready to run and had no core."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from mpicoll.engine.diagnostics import run_delay
from mpicoll.engine.diagnostics.run_delay import RunDelay


def test_long_ones_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    totals = iter([5.0, 5.01, 5.02, 7.5, 7.55, 7.59, 7.61, 30.0])
    monkeypatch.setattr(run_delay, "_read_run_delay", lambda: next(totals))
    delays = RunDelay()
    found = []
    for _ in range(8):
        delays.update()
        found.append([seconds for _, seconds in delays.list_intervals()])
    # What was before the first look does not count; small ones add up.
    assert found == [[], [], [], [2.5], [2.5], [2.5], [2.5, 0.11], [2.5, 0.11, 22.39]]
    assert all(0 <= ago < 5 for ago, _ in delays.list_intervals())


def test_where_the_kernel_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_delay, "_SCHEDSTAT", "/proc/no such file")
    delays = RunDelay()
    delays.update()
    assert delays.list_intervals() == []


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs sched_setaffinity")
def test_a_thread_whose_core_another_process_uses() -> None:
    if run_delay._read_run_delay() is None:
        pytest.skip("this kernel does not count run delays")
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        delays = RunDelay()
        delays.update()
        end = time.monotonic() + 20
        while not delays.list_intervals() and time.monotonic() < end:
            delays.update()
    finally:
        other.kill()
        other.wait()
        os.sched_setaffinity(0, allowed)
    ((_, seconds),) = delays.list_intervals()
    assert 0.1 <= seconds < 20
