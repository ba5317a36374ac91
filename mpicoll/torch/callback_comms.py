"""Ordering of collectives that are started from callbacks of other operations.

All ranks must run the collectives of a communicator in the same order. Collectives that the program starts itself are
in the same order, since all ranks run the same program. A callback, however, runs when its operation has completed,
which on one rank may be before the program's next call and on another after it. Therefore the callbacks of a group run
one after the other, in the order in which they were attached, and the collectives that they start run on a separate
lane: a communicator that only these callbacks use. The path of a lane identifies it: the names of the groups whose
operations the callbacks are attached to, with one more name for each level of nested callbacks.
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
"""Idle time in seconds after which a callback thread exits."""

_TAGS = 1 << 15

Path: TypeAlias = tuple[str, ...]


class _Here(threading.local):
    path: Path = ()


here = _Here()
"""Thread-local state. ``here.path`` is the path of the callback that runs, and empty in the program's own threads."""


class Callbacks:
    """Queue of callbacks, and the thread that runs them one after the other."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._filled = threading.Condition()
        self._queue: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._running = False
        self._within: Callbacks | None = None

    def call(self, callback: Callable[[], None]) -> None:
        """Run `callback`, which may block, after all callbacks that were passed earlier."""
        if threading.current_thread() is self._thread:
            # The running callback may wait for the new one, so the new one can't be queued behind it.
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
        """Return True if a callback is running or queued."""
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
            except BaseException:  # noqa: BLE001  later callbacks still need the thread
                _log.exception("a callback of an operation failed")
            del callback


class Lane:
    """Communicator, and the thread that runs the callbacks of its operations."""

    def __init__(self, comm: Communicator, callbacks: Callbacks) -> None:
        self.comm = comm
        self.callbacks = callbacks


class Lanes:
    """Lanes of a group. `name` is the name of the group and must be the same on all ranks."""

    def __init__(self, comm: Communicator, name: str) -> None:
        self._name = name
        self._comm = comm
        self._lanes: dict[Path, Lane] = {(): Lane(comm, Callbacks((name,)))}

    def current(self) -> Lane:
        """Return the lane for operations that this thread starts on the group.

        Collective at the first call for a callback path, since it duplicates the communicator.
        """
        path = here.path
        found = self._lanes.get(path)
        if found is None:
            # No lock: all callbacks with this path run on one thread. Creating a lane is collective, so a lock that
            # makes one creation wait for another could deadlock. The tag distinguishes concurrent creations.
            comm = self._comm.duplicate(zlib.crc32("/".join(path).encode()) % _TAGS)
            found = self._lanes[path] = Lane(comm, Callbacks((*path, self._name)))
        return found

    def drain(self, timeout: float) -> bool:
        """Wait until neither an operation nor a callback is pending. Return False after `timeout` seconds."""
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
        """Return the communicators of all lanes."""
        return [lane.comm for lane in list(self._lanes.values())]

    def abandon(self) -> None:
        """Fail the operations that are queued and not yet running."""
        for lane in list(self._lanes.values()):
            lane.comm.progress.abandon()

    def free(self) -> None:
        """Free the communicators of all lanes. Collective."""
        for path in sorted(self._lanes, reverse=True):
            self._lanes[path].comm.free()
