"""An operation of a queue, for which threads wait."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol

from mpicoll.engine.core.process_local import refuse_pickling
from mpicoll.engine.core.registered_wait import RegisteredWait
from mpicoll.engine.diagnostics.flight_recorder import Call, CallSite, Group
from mpicoll.logs import get_logger

_ENDING = threading.Lock()
"""Lock held briefly while an operation ends or a callback for its end is registered."""


class OwnQueue(Protocol):
    """The queue of an operation, as far as waits for the operation use it."""

    group: Group

    def make_progress(self) -> None:
        """Run an operation if only the calls of waiting threads do."""

    def wait_until_done(self, operation: QueuedOperation, timeout: float | None, bound: float | None = None) -> None:
        """Return when `operation` is done. Raises Timeout after `timeout` seconds."""

    def waiting(self, call: Call, timeout: float) -> RegisteredWait:
        """Return a wait that polls for at most `timeout` seconds and bypasses the queue."""


class QueuedOperation:
    """An operation in the queue."""

    __slots__ = (
        "__weakref__",
        "_callbacks",
        "_queue",
        "call",
        "done",
        "error",
        "function",
        "reported",
        "site",
        "value",
    )
    __reduce_ex__ = refuse_pickling("QueuedOperation", "wait() for it and pass on its value")

    def __init__(self, queue: OwnQueue, function: Callable[[], Any], call: Call, site: CallSite | None) -> None:
        self.error: BaseException | None = None
        self.reported = False  # the outcome was delivered to a caller
        self._queue = queue
        self.function = function
        self.call = call
        self.site = site
        self.done = False
        self._callbacks: list[Callable[[QueuedOperation], None]] = []
        self.value: Any = None

    def __str__(self) -> str:
        return f"{self.call} on {self._queue.group}"

    def finish(self) -> None:
        """Mark the operation as done and run its callbacks."""
        with _ENDING:
            self.done = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)

    def add_done_callback(self, callback: Callable[[QueuedOperation], None]) -> None:
        """Call ``callback(operation)`` once the operation is done, immediately if it is already.

        The callback runs on the thread that finishes the operation and blocks the other operations of the communicator
        meanwhile; it must not wait or raise.
        """
        with _ENDING:
            if not self.done:
                self._callbacks.append(callback)
                return
        callback(self)

    def test(self) -> bool:
        """Return True if the operation has completed."""
        self._queue.make_progress()
        return self.done

    @property
    def awaited(self) -> tuple[OwnQueue, Call]:
        """The queue and the call of the operation."""
        return self._queue, self.call

    @property
    def limit(self) -> float:
        """Seconds that the operation may take."""
        return self._queue.group.timeout

    def wait(self, timeout: float | None, bound: float | None = None) -> Any:
        """Wait for the operation and return its value or raise its exception. Raises Timeout after `timeout` seconds,
        when the operation is still pending.

        `bound` is the timeout given by the caller, if `timeout` is the remainder of it.
        """
        self._queue.wait_until_done(self, timeout, bound)
        self.reported = True
        if self.error is not None:
            raise self.error
        return self.value

    def __del__(self) -> None:
        # A QueuedOperation whose constructor was interrupted (by Ctrl-C) has no attributes.
        # Nothing can be imported, as for a message, while the interpreter ends.
        if getattr(self, "error", None) is not None and not self.reported and not sys.is_finalizing():
            get_logger().error("%s failed, and its error was not retrieved", self, exc_info=self.error)
