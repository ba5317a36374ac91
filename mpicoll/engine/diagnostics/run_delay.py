"""Time for which this process was ready to run and had no core."""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress

from mpicoll.proc_files import read_file

_LEAST = 0.1
"""Seconds between two looks from which on they are kept. A thread that wakes up has a core within some milliseconds."""

_KEPT = 256
"""Number of such intervals that are kept."""

_SCHEDSTAT = "/proc/thread-self/schedstat"


class RunDelay:
    """The times for which the thread that calls :meth:`update` was runnable and had no core, as the kernel counts them.

    A thread that sleeps nearly always, such as the watchdog's, has a core as soon as it wakes up, even beside more
    runnable threads than cores. If it has none for long, neither have the other threads of the process: the cores are
    overloaded by others that come first, or a cgroup limits the time of the process.
    """

    def __init__(self) -> None:
        self._last: float | None = None
        self._intervals: deque[tuple[float, float]] = deque(maxlen=_KEPT)  # the end and the seconds without a core

    def update(self) -> None:
        """Look at the thread's account. Only one thread may call it."""
        total = _read_run_delay()
        if total is None:
            return
        if self._last is None:
            self._last = total
        elif total - self._last >= _LEAST:
            self._intervals.append((time.monotonic(), total - self._last))
            self._last = total

    def list_intervals(self) -> list[tuple[float, float]]:
        """Return the intervals with such times: the seconds since their end, and the seconds without a core."""
        now = time.monotonic()
        return [(round(now - end, 3), round(seconds, 3)) for end, seconds in list(self._intervals)]


def _read_run_delay() -> float | None:
    """Return the seconds for which this thread was runnable and had no core; None where the kernel does not count."""
    with suppress(OSError, IndexError, ValueError):
        return int(read_file(_SCHEDSTAT).split()[1]) * 1e-9
    return None
