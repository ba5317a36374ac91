"""A thread that looks after transfers which nobody is waiting for.

MPI moves a large message, or notices that it has arrived, only while somebody calls MPI.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

_log = logging.getLogger("mpicoll")

_PERIOD = 1e-3
"""Seconds between two looks: enough to keep large messages moving, too rare to be in the way of those who wait."""

_EAGER_PERIOD = 5e-5
"""The same where somebody wants to be told at once."""

_IDLE = 5.0
"""Seconds after which the thread ends if there is nothing to look after."""


class Testable(Protocol):
    """Something that may have completed."""

    def test(self) -> Any:
        """Truthy once it has; must not raise."""


Watched: TypeAlias = "tuple[Testable, Callable[[], None] | None]"


class Poller:
    """Tests what it was given until it has completed."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._pending: list[Watched] = []
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._registered = False

    def watch(self, one: Testable, done: Callable[[], None] | None = None) -> None:
        """Keep `one` moving until it has completed, then call `done`, which must not wait or raise."""
        with self._changed:
            self._pending.append((one, done))
            if self._thread is None:
                if not self._registered:
                    # After MPI was loaded, hence called before MPI is finalised.
                    atexit.register(self.stop)
                    self._registered = True
                self._thread = threading.Thread(target=self._run, name="mpicoll-poller", daemon=True)
                self._thread.start()
            elif len(self._pending) == 1:
                self._changed.notify()

    def stop(self) -> None:
        """Look after nothing any more: MPI is about to end. Returns when the thread has, or after seconds."""
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
            left = self._look_after(pending)
            del pending  # what has completed must not be kept while nothing happens
            if left:
                period = _EAGER_PERIOD if any(done for _, done in left) else _PERIOD
                with self._changed:
                    self._pending += left
                del left
                time.sleep(period)

    def _look_after(self, pending: list[Watched]) -> list[Watched]:
        """Test all of them once; those that are left."""
        left = []
        for one, done in pending:
            if not one.test():
                left.append((one, done))
            elif done is not None:
                self._tell(done)
        return left

    @staticmethod
    def _tell(done: Callable[[], None]) -> None:
        try:
            done()
        except Exception:  # noqa: BLE001  the thread must go on for the others
            _log.exception("what was to be called at the end of a transfer failed")


poller = Poller()
"""The poller of this process."""
