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
"""Polls without a pause before the waiting thread yields its core."""

YIELDS = 1000
"""Yields before the waiting thread sleeps between polls."""

YIELD_SECONDS = 0.002
"""Seconds after which the waiting thread sleeps between polls, after however few yields: each takes milliseconds where
others use the cores, and takes from them the time to do it. A wait that was so long is extended little by a sleep.
"""

YIELDS_PER_LOOK = 4
"""Yields between two looks at the clock."""

NAP = 50e-6
"""Least seconds between two polls of a sleeping thread."""

_NAP_SHARE = 1e-3
"""Seconds between two polls per second of the wait so far: polls every 50 microseconds would use a fifth of a core."""

_LONGEST_NAP = 1e-3
"""Most seconds between two polls of a sleeping thread."""

_FIRST_NAP = 20e-6
"""Seconds between the first two polls for an event that is not urgent."""


def _find_yield_core() -> Callable[[], object]:
    try:
        # Unlike os.sched_yield of some Python versions, it releases the GIL.
        return ctypes.CDLL(None).sched_yield
    except AttributeError:
        return os.sched_yield


yield_core = _find_yield_core()
"""Yield the core to other processes and threads."""


class Backoff:
    """The pauses of a wait that has polled without a pause: it yields the core between its polls, so many times and for
    so long, then it sleeps."""

    __slots__ = ("_longest_nap", "_max_yields", "_yield_seconds", "begin", "yields")

    def __init__(
        self, max_yields: int = YIELDS, yield_seconds: float = YIELD_SECONDS, longest_nap: float = _LONGEST_NAP
    ) -> None:
        self.yields = 0
        self.begin = time.monotonic()
        self._max_yields = max_yields
        self._yield_seconds = yield_seconds
        self._longest_nap = longest_nap

    def yield_core(self) -> bool:
        """Yield the core and return True. Return False, without a pause, if the wait is to sleep from now on."""
        if self.yields >= self._max_yields:
            return False
        yield_core()
        self.yields += 1
        if self.yields % YIELDS_PER_LOOK == 0 and time.monotonic() - self.begin > self._yield_seconds:
            self._max_yields = 0
        return True

    def sleep(self) -> None:
        """Sleep until the next poll."""
        time.sleep(min(max(NAP, _NAP_SHARE * (time.monotonic() - self.begin)), self._longest_nap))


def poll(
    ready: Callable[[], T],
    timeout: float | None,
    what: str,
    check: Callable[[], object] | None = None,
    nap: float = 0.0,
) -> T:
    """Call `ready` until it returns a true value, and return that value.

    The first calls are made without a pause; later ones yield the core, then sleep. `check`, which may raise, is called
    before each sleep. Raises Timeout, with `what` in its text, after `timeout` seconds (None: never).

    `nap` is a number of seconds by which the end of the wait may be noticed late: where a thread can sleep for so
    short a time, the wait sleeps at once.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    spins, backoff = SPINS, None
    while not (value := ready()):
        if deadline is not None and time.monotonic() > deadline:
            raise Timeout(f"{what}: not complete within the timeout of {timeout:g} s")
        if nap >= NAP:
            if check is not None:
                check()
            time.sleep(min(nap, _LONGEST_NAP))
            continue
        if spins:
            spins -= 1
            continue
        if backoff is None:
            backoff = Backoff()
        if not backoff.yield_core():
            if check is not None:
                check()
            backoff.sleep()
    return value


def wait_on(ready: Callable[[], T], interrupts: list[BaseException], errors: tuple[type[Exception], ...]) -> T:
    """Call `ready`, which waits, and return its value; again after an exception of a signal handler, which is added to
    `interrupts`. Raises `errors`, and a second one.

    For a wait that other ranks have entered, and that `ready` continues when it is called again.
    """
    while True:
        try:
            return ready()
        except errors:
            raise
        except BaseException as error:
            if interrupts:
                raise
            interrupts.append(error)


def wait_for(ready: Callable[[], T | None], seconds: float, check: Callable[[], object] | None = None) -> T | None:
    """Call `ready` until it returns a value other than None, and return that value. Return None after `seconds`.

    Sleeps between the calls, up to a millisecond. `check` is called before each sleep.
    """
    deadline = time.monotonic() + seconds
    nap = _FIRST_NAP
    while (value := ready()) is None and time.monotonic() < deadline:
        if check is not None:
            check()
        time.sleep(nap)
        nap = min(1.1 * nap, _LONGEST_NAP)
    return value
