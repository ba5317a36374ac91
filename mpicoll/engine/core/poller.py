"""Thread that makes progress on transfers on which no thread waits.

MPI moves a large message, or detects its arrival, only while a thread calls MPI.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from mpicoll.logs import get_logger

_PERIOD = 1e-3
"""Seconds between two polls: frequent enough to move large messages, too rare to slow down waiting threads."""

_EAGER_PERIOD = 5e-5
"""Seconds between two polls if a pending transfer has a completion callback."""

_IDLE = 5.0
"""Seconds after which an idle thread ends."""


class Testable(Protocol):
    """Object that may have completed."""

    def test(self) -> Any:
        """Return a true value once it has completed; must not raise."""


PendingTransfer: TypeAlias = "tuple[Testable, Callable[[], None] | None, float]"
"""Object, completion callback, and seconds between two polls."""


class Poller:
    """Thread that tests objects until they have completed."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._pending: list[PendingTransfer] = []
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._registered = False

    def watch(self, one: Testable, done: Callable[[], None] | None = None, *, period: float | None = None) -> None:
        """Test `one` until it has completed, then call `done`, which must not wait or raise.

        `period` is the number of seconds between two polls; by default few where there is a callback.
        """
        if period is None:
            period = _PERIOD if done is None else _EAGER_PERIOD
        with self._changed:
            self._pending.append((one, done, period))
            if self._thread is None:
                if not self._registered:
                    # Registered after MPI was loaded, hence called before MPI is finalised.
                    atexit.register(self.stop)
                    self._registered = True
                self._thread = threading.Thread(target=self._run, name="mpicoll-poller", daemon=True)
                self._thread.start()
            elif len(self._pending) == 1:
                self._changed.notify()

    def stop(self) -> None:
        """Stop polling, because MPI is about to be finalised. Returns after the thread has ended, or after 5 s."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join(_IDLE)

    def _run(self) -> None:
        while not self._stopped:
            with self._changed:
                if not self._pending and not self._changed.wait(_IDLE) and not self._pending:
                    self._thread = None
                    return
                pending, self._pending = self._pending, []
            left = self._poll_once(pending)
            del pending  # completed objects must not be kept alive while the thread sleeps
            if left:
                period = min(period for *_, period in left)
                with self._changed:
                    self._pending += left
                del left
                time.sleep(period)

    def _poll_once(self, pending: list[PendingTransfer]) -> list[PendingTransfer]:
        """Test all of `pending` once and return those that have not completed."""
        left = []
        for one, done, period in pending:
            if not one.test():
                left.append((one, done, period))
            elif done is not None:
                self._run_callback(done)
        return left

    @staticmethod
    def _run_callback(done: Callable[[], None]) -> None:
        try:
            done()
        except Exception:  # noqa: BLE001  the thread must go on for the others
            get_logger().exception("the completion callback of a transfer failed")


poller = Poller()
"""Poller of this process."""
