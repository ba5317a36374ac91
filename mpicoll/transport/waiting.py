"""Waiting by polling: for what no other thread or process announces.

A wait polls without a pause first, then yields the core between polls, then sleeps: with more ranks than cores,
spinning alone is slow.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from typing import TypeVar

from mpicoll.errors import Timeout

T = TypeVar("T")

SPINS = 20
"""Polls before the waiting thread yields its core."""

YIELDS = 1000
"""Polls before the waiting thread sleeps between polls."""

YIELD_SECONDS = 0.02
"""Seconds after which the waiting thread sleeps between polls, after however few: each yield takes tens of milliseconds
where other processes use the cores.
"""

YIELDS_PER_LOOK = 16
"""Yields between two looks at the clock."""

NAP = 50e-6
"""Seconds between two polls of a sleeping thread."""

_INTERVAL = 1e-3
"""Seconds between two polls for an event that is not urgent."""


def _find_yield_core() -> Callable[[], object]:
    try:
        # Unlike os.sched_yield of some Python versions, it releases the GIL.
        return ctypes.CDLL(None).sched_yield
    except AttributeError:
        return os.sched_yield


yield_core = _find_yield_core()
"""Yield the core to other processes and threads."""


def poll(ready: Callable[[], T], timeout: float | None, what: str, check: Callable[[], object] | None = None) -> T:
    """Call `ready` until it returns a true value, and return that value.

    The first calls are made without a pause; later ones yield the core, then sleep. `check`, which may raise, is called
    before each sleep. Raises Timeout, with `what` in its text, after `timeout` seconds (None: never).
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    polls, sleep_at = 0, 0.0
    while not (value := ready()):
        if deadline is not None and time.monotonic() > deadline:
            raise Timeout(f"{what}: not complete within the timeout of {timeout:g} s")
        polls += 1
        if polls > YIELDS:
            if check is not None:
                check()
            time.sleep(NAP)
        elif polls > SPINS:
            yield_core()
            if polls % YIELDS_PER_LOOK == 0 and time.monotonic() > sleep_at:
                polls = YIELDS
        elif polls == SPINS:
            sleep_at = time.monotonic() + YIELD_SECONDS
    return value


def wait_for(ready: Callable[[], T | None], seconds: float) -> T | None:
    """Call `ready` each millisecond until it returns a value other than None, and return that value.

    Returns None after `seconds`.
    """
    deadline = time.monotonic() + seconds
    while (value := ready()) is None and time.monotonic() < deadline:
        time.sleep(_INTERVAL)
    return value
