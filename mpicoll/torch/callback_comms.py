"""Ordering of collectives that are started from callbacks of other operations.

All ranks must run the collectives of a communicator in the same order. Collectives that the program starts itself are
in the same order, since all ranks run the same program. A callback, however, runs when its operation has completed,
which on one rank may be before the program's next call and on another after it. Therefore the callbacks of a group run
one after the other, in the order in which they were attached, and the collectives that they start use a
separate communicator, which only these callbacks use. Its path identifies it: the names of the groups whose operations
the callbacks are attached to, with one more name for each level of nested callbacks.
"""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from mpicoll.engine.core.communicator import Communicator, core_of

_log = logging.getLogger("mpicoll")

_IDLE_SECONDS = 5.0
"""Idle time in seconds after which a callback thread exits."""

_NUM_TAGS = 1 << 15

Path: TypeAlias = tuple[str, ...]


class _CallbackContext(threading.local):
    path: Path = ()


callback_context = _CallbackContext()
"""Thread-local state. ``path`` is the path of the callback that runs, and empty in the program's own threads."""


class CallbackQueue:
    """Queue of callbacks, and the thread that runs them one after the other."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._not_empty = threading.Condition()
        self._queue: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._running = False
        self._nested: CallbackQueue | None = None

    def submit(self, callback: Callable[[], None]) -> None:
        """Run `callback`, which may block, after all callbacks that were passed earlier."""
        if threading.current_thread() is self._thread:
            # The running callback may wait for the new one, so the new one can't be queued behind it.
            self._nested = self._nested or CallbackQueue((*self._path, "within"))
            self._nested.submit(callback)
            return
        with self._not_empty:
            self._queue.append(callback)
            if self._thread is None:
                name = f"mpicoll-callbacks-{'/'.join(self._path)}"
                self._thread = threading.Thread(target=self._run_callbacks, name=name, daemon=True)
                self._thread.start()
            else:
                self._not_empty.notify()

    def is_busy(self) -> bool:
        """Return True if a callback is running or queued."""
        return bool(self._queue) or self._running or (self._nested is not None and self._nested.is_busy())

    def _run_callbacks(self) -> None:
        callback_context.path = self._path
        while True:
            with self._not_empty:
                self._running = False
                if not self._queue and not self._not_empty.wait(_IDLE_SECONDS) and not self._queue:
                    self._thread = None
                    return
                self._running = True
                callback = self._queue.popleft()
            try:
                callback()
            except BaseException:  # noqa: BLE001  later callbacks still need the thread
                _log.exception("a callback of an operation failed")
            del callback


class CallbackComm:
    """Communicator, and the thread that runs the callbacks of its operations."""

    def __init__(self, comm: Communicator, callbacks: CallbackQueue) -> None:
        self.comm = comm
        self.core = core_of(comm)
        self.callbacks = callbacks


class CallbackComms:
    """Communicators of a group by callback path. `name` is that of the group, and must be the same on all ranks."""

    def __init__(self, comm: Communicator, name: str) -> None:
        self._name = name
        self._comm = comm
        self._by_path: dict[Path, CallbackComm] = {(): CallbackComm(comm, CallbackQueue((name,)))}

    def get_current(self) -> CallbackComm:
        """Return the communicator for operations that this thread starts on the group.

        Collective at the first call for a callback path, since it duplicates the communicator.
        """
        path = callback_context.path
        found = self._by_path.get(path)
        if found is None:
            # No lock: all callbacks with this path run on one thread. Duplication is collective, so a lock that makes
            # one duplication wait for another could deadlock. The tag distinguishes concurrent duplications.
            comm = self._comm.duplicate(zlib.crc32("/".join(path).encode()) % _NUM_TAGS)
            found = self._by_path[path] = CallbackComm(comm, CallbackQueue((*path, self._name)))
        return found

    def drain(self, timeout: float) -> bool:
        """Wait until neither an operation nor a callback is pending. Return False after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            members = list(self._by_path.values())
            if not all(member.core.queue.drain(max(0.0, deadline - time.monotonic())) for member in members):
                return False
            if not any(member.callbacks.is_busy() for member in members) and len(members) == len(self._by_path):
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(1e-3)

    def list_communicators(self) -> list[Communicator]:
        """Return the communicators of all callback paths."""
        return [member.comm for member in list(self._by_path.values())]

    def abandon(self) -> None:
        """Fail the operations that are queued and not yet running."""
        for member in list(self._by_path.values()):
            member.core.queue.abandon()

    def free(self) -> None:
        """Free the communicators of all callback paths. Collective."""
        for path in sorted(self._by_path, reverse=True):
            self._by_path[path].comm.free()
