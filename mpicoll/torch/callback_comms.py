"""Ordering of collectives that are started from callbacks of other operations.

All ranks must run the collectives of a communicator in the same order. What the program itself starts is in order,
since all ranks run the same program; but a callback runs when its operation has completed, here sooner and there later
than the program's next call. So the callbacks of a group run one after the other, in the order in which they were
attached; and what they start runs on a lane of its own, a communicator that only they use. A lane is known by where the
callbacks come from: the names of the groups whose operations' callbacks they are, callbacks of callbacks having more.
"""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from mpicoll.engine.core.communicator import Communicator

_log = logging.getLogger("mpicoll")

_IDLE = 5.0
"""Seconds after which a thread for callbacks ends if it has nothing to do."""

_TAGS = 1 << 15

Path: TypeAlias = tuple[str, ...]


class _Here(threading.local):
    path: Path = ()


here = _Here()
"""``here.path``: empty in the program's own threads; in a callback, where it comes from."""


class Callbacks:
    """A thread on which callbacks run, one after the other."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._filled = threading.Condition()
        self._queue: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._running = False
        self._within: Callbacks | None = None

    def call(self, callback: Callable[[], None]) -> None:
        """Run `callback`, which may wait, after those that were passed before it."""
        if threading.current_thread() is self._thread:
            # The callback that passes it may wait for it, so it can't wait for that one.
            self._within = self._within or Callbacks((*self._path, "within"))
            self._within.call(callback)
            return
        with self._filled:
            self._queue.append(callback)
            if self._thread is None:
                name = f"mpicoll-callbacks-{'/'.join(self._path)}"
                self._thread = threading.Thread(target=self._work, name=name, daemon=True)
                self._thread.start()
            else:
                self._filled.notify()

    def busy(self) -> bool:
        """Return True if callbacks run, or wait to run."""
        return bool(self._queue) or self._running or (self._within is not None and self._within.busy())

    def _work(self) -> None:
        here.path = self._path
        while True:
            with self._filled:
                self._running = False
                if not self._queue and not self._filled.wait(_IDLE) and not self._queue:
                    self._thread = None
                    return
                self._running = True
                callback = self._queue.popleft()
            try:
                callback()
            except BaseException:  # noqa: BLE001  the thread must go on for those who come after it
                _log.exception("a callback of an operation failed")
            del callback


class Lane:
    """A communicator, and what runs the callbacks of its operations."""

    def __init__(self, comm: Communicator, callbacks: Callbacks) -> None:
        self.comm = comm
        self.callbacks = callbacks


class Lanes:
    """The lanes of a group; `name` is that of the group, the same on all ranks."""

    def __init__(self, comm: Communicator, name: str) -> None:
        self._name = name
        self._comm = comm
        self._lanes: dict[Path, Lane] = {(): Lane(comm, Callbacks((name,)))}

    def current(self) -> Lane:
        """The lane for what this thread starts on the group. Collective when a callback asks first."""
        path = here.path
        found = self._lanes.get(path)
        if found is None:
            # No lock: all callbacks with this path run on one thread. A lock would let the making of one lane, for
            # which other ranks have to come, wait for that of another. The tag keeps them apart.
            comm = self._comm.duplicate(zlib.crc32("/".join(path).encode()) % _TAGS)
            found = self._lanes[path] = Lane(comm, Callbacks((*path, self._name)))
        return found

    def drain(self, timeout: float) -> bool:
        """Wait until neither an operation nor a callback is pending; whether that came about."""
        deadline = time.monotonic() + timeout
        while True:
            lanes = list(self._lanes.values())
            if not all(lane.comm.progress.drain(max(0.0, deadline - time.monotonic())) for lane in lanes):
                return False
            if not any(lane.callbacks.busy() for lane in lanes) and len(lanes) == len(self._lanes):
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(1e-3)

    def communicators(self) -> list[Communicator]:
        """Those of all lanes."""
        return [lane.comm for lane in list(self._lanes.values())]

    def abandon(self) -> None:
        """Fail what is queued and does not run yet."""
        for lane in list(self._lanes.values()):
            lane.comm.progress.abandon()

    def free(self) -> None:
        """Collective: give the communicators back."""
        for path in sorted(self._lanes, reverse=True):
            self._lanes[path].comm.free()
