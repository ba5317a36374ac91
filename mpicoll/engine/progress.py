"""In which order, and on which thread, the collectives of a communicator run.

All of them go through one FIFO, because MPI wants the same order on all ranks and lets blocking and non-blocking
collectives never match: a rank may wait for an operation at once that another started in the background. Whoever holds
the lock runs the head of the queue: a worker thread in the background, or a caller that waits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from threading import get_ident
from typing import Any

from mpicoll.engine.watch import Watch
from mpicoll.errors import CommunicatorError, Timeout

_log = logging.getLogger("mpicoll")

_ENDING = threading.Lock()
"""Held for the moment in which a job ends or is asked to say when it does."""

_IDLE = 5.0
"""Seconds after which a worker with nothing to do ends. A program may have thousands of communicators."""


class _Refusal:
    """What stands in the place of a queue's locks in a process that must not communicate."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _raise(self, *args: Any, **kwargs: Any) -> Any:
        raise CommunicatorError(
            f"communicator {self._name}: this process was forked from an MPI rank, and can't communicate; only the rank"
            " itself can"
        )

    __enter__ = acquire = _raise
    active = property(_raise)

    def __exit__(self, *args: object) -> None:
        """Never reached, but asked for by ``with``."""


class Job:
    """An operation in the queue."""

    __slots__ = ("_callbacks", "_function", "_progress", "done", "error", "reported", "value", "what")

    def __init__(self, progress: Progress, function: Callable[[], Any], what: tuple[Any, ...]) -> None:
        self._progress = progress
        self._function = function
        self.what = what
        self.done = False
        self.reported = False  # whether somebody has learned how it ended
        self._callbacks: list[Callable[[Job], None]] = []
        self.value: Any = None
        self.error: BaseException | None = None

    def __str__(self) -> str:
        return " ".join(map(str, self.what))

    def run(self) -> None:
        """Carry it out. The progress lock is held."""
        self._progress.current = self.what
        try:
            self.value = self._function()
        except Exception as error:  # noqa: BLE001  whoever waits for it gets it
            self.error = self._progress.explain(error)
        except BaseException as error:
            # An interrupt is meant for the thread that it reaches, whatever that thread is doing for others.
            self.error = error
            raise
        finally:
            self._progress.current = None
            self.finish()

    def finish(self) -> None:
        """It is done: tell who asked for it."""
        with _ENDING:
            self.done = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)

    def when_done(self, callback: Callable[[Job], None]) -> None:
        """Call ``callback(job)`` once it is done, at once if it is already.

        It runs on the thread that happens to finish the job, and holds up the others of its communicator meanwhile; it
        must not wait or raise."""
        with _ENDING:
            if not self.done:
                self._callbacks.append(callback)
                return
        callback(self)

    def test(self) -> bool:
        """Whether it has completed."""
        self._progress.poke()
        return self.done

    def wait(self, timeout: float | None) -> Any:
        """Its value or its exception. Raises Timeout after `timeout` seconds; the operation stays pending then."""
        self._progress.complete(self, timeout)
        self.reported = True
        if self.error is not None:
            raise self.error
        return self.value

    def __del__(self) -> None:
        if self.error is not None and not self.reported:
            _log.error("%s failed, and nobody waited for it", self, exc_info=self.error)


class Progress:
    """The queue of one communicator."""

    def __repr__(self) -> str:
        return f"the queue of communicator {self._name}"

    def __init__(
        self, name: str, watch: Watch | None, *, background: bool, explain: Callable[[Exception], Exception]
    ) -> None:
        self._name = name
        self._watch = watch
        self._background = background
        self.explain = explain
        self.lock = threading.Lock()
        self.queue: deque[Job] = deque()
        self._filled = threading.Condition()
        self._worker: threading.Thread | None = None
        self._closed = False
        self.current: tuple[Any, ...] | None = None
        if watch is not None:
            watch.add(self)

    def guarded(self, function: Callable[..., Any], what: tuple[Any, ...], *args: Any) -> Any:
        """Call `function` under the watch, which reports `what` if it takes too long. For whatever blocks outside the
        queue.
        """
        if self._watch is None:
            return function(*args)
        active, ident = self._watch.active, get_ident()
        active[ident] = what
        try:
            return function(*args)
        finally:
            del active[ident]

    def run(self, function: Callable[..., Any], what: tuple[Any, ...], *args: Any) -> Any:
        """Run a blocking operation after everything that was submitted before it."""
        with self.lock:
            while self.queue:
                self.queue.popleft().run()
            self.current = what
            try:
                return function(*args)
            except Exception as error:  # noqa: BLE001  raised again
                raise self.explained(error)  # noqa: B904  it has its cause
            finally:
                self.current = None

    def explained(self, error: Exception) -> Exception:
        """What to raise for `error`, which is its cause unless it is the same."""
        explained = self.explain(error)
        if explained is not error:
            explained.__cause__ = error
        return explained

    def submit(self, function: Callable[[], Any], what: tuple[Any, ...]) -> Job:
        """Queue an operation for the background."""
        job = Job(self, function, what)
        with self._filled:
            self.queue.append(job)
            self._filled.notify()
            if self._background and self._worker is None:
                self._worker = threading.Thread(target=self._work, name=f"mpicoll-{self._name}", daemon=True)
                self._worker.start()
        return job

    def poke(self) -> None:
        """Without a worker, testing is what makes progress."""
        if not self._background and self.queue and self.lock.acquire(blocking=False):
            try:
                self._head()
            finally:
                self.lock.release()

    def complete(self, job: Job, timeout: float | None) -> None:
        """Return when `job` is done. Without a timeout this thread helps, else the worker does it alone."""
        if timeout is None:
            while not job.done:
                with self.lock:
                    self._head()
            return
        deadline = time.monotonic() + timeout
        while not job.done:
            if time.monotonic() > deadline:
                raise Timeout(f"{job}: not complete within the timeout of {timeout:g} s; it is still pending")
            self.poke()
            time.sleep(20e-6)

    def drain(self, timeout: float) -> bool:
        """Wait for everything that was submitted; whether that came about."""
        deadline = time.monotonic() + timeout
        while self.queue or self.lock.locked():
            if time.monotonic() > deadline:
                return False
            self.poke()
            time.sleep(1e-4)
        return True

    def close(self, *, abandon: bool = False) -> None:
        """End the worker, after what is queued has run or, to `abandon` it, without."""
        if abandon:
            self.abandon()
        with self.lock:
            while self.queue:
                self.queue.popleft().run()
        self.stop()

    def abandon(self) -> None:
        """Fail everything that is queued and does not run yet. Waits for nothing."""
        while self.queue:
            with suppress(IndexError):  # somebody else has just taken the last one
                job = self.queue.popleft()
                job.error = CommunicatorError(f"{job}: abandoned")
                job.finish()

    def refuse(self) -> None:
        """Raise CommunicatorError from now on: this process was forked from the one that communicates."""
        self.lock = self._filled = self._watch = _Refusal(self._name)  # type: ignore[assignment]

    def stop(self) -> None:
        """Let the worker end when the queue is empty."""
        with self._filled:
            self._closed = True
            self._filled.notify()

    def _head(self) -> None:
        """Run the head of the queue, if there is one. The lock is held."""
        if self.queue:
            self.queue.popleft().run()

    def _work(self) -> None:
        while True:
            with self._filled:
                while not self.queue and not self._closed:
                    if not self._filled.wait(_IDLE):
                        break
                if not self.queue:
                    self._worker = None
                    return
            with self.lock, suppress(BaseException):  # the job keeps it for whoever waits
                self._head()
