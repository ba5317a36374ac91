"""In which order collectives run that are started by the callbacks of others.

All ranks must run the collectives of a communicator in the same order. What the program itself starts is in order,
since all ranks run the same program; but a callback runs when its operation has completed, here sooner and there later
than the program's next call. So what callbacks start runs on a lane of its own, a communicator that only they use; and
the callbacks of a lane run one after the other, in the order in which they were attached. What their callbacks start
has the next lane, and so on.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from mpicoll.engine.communicator import Communicator

_log = logging.getLogger("mpicoll")

_IDLE = 5.0
"""Seconds after which a thread for callbacks ends if it has nothing to do."""


class _Here(threading.local):
    depth = 0


here = _Here()
"""``here.depth``: 0 in the program's own threads, 1 in callbacks of what they start, 2 in callbacks of that, ..."""


class Lane:
    """A communicator, and the thread on which the callbacks of its operations run."""

    def __init__(self, comm: Communicator, depth: int = 0) -> None:
        self.comm = comm
        self._depth = depth
        self._next: Lane | None = None
        self._growing = threading.Lock()
        self._filled = threading.Condition()
        self._queue: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None

    def current(self) -> Lane:
        """The lane for what this thread starts, on this lane's group."""
        lane = self
        while lane._depth < here.depth:
            lane = lane._following()
        return lane

    def _following(self) -> Lane:
        """Collective when it is called first."""
        with self._growing:
            if self._next is None:
                self._next = Lane(self.comm.duplicate(), self._depth + 1)
        return self._next

    def call(self, callback: Callable[[], None]) -> None:
        """Run `callback`, which may wait, after those that were passed before it."""
        with self._filled:
            self._queue.append(callback)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name=f"mpicoll-callback-{self.comm.name}", daemon=True
                )
                self._thread.start()
            else:
                self._filled.notify()

    def _work(self) -> None:
        here.depth = self._depth + 1
        while True:
            with self._filled:
                if not self._queue and not self._filled.wait(_IDLE) and not self._queue:
                    self._thread = None
                    return
                callback = self._queue.popleft()
            try:
                callback()
            except Exception:  # noqa: BLE001  the thread must go on for those who come after it
                _log.exception("a callback of an operation on %s failed", self.comm.name)

    def free(self) -> None:
        """Collective: give the communicators back, this one and those of the following lanes."""
        if self._next is not None:
            self._next.free()
        self.comm.free()
