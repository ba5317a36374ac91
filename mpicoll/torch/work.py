"""What an operation under way looks like to torch."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from mpicoll.engine.poller import poller
from mpicoll.engine.progress import Job
from mpicoll.engine.request import Request
from mpicoll.errors import MpicollError

_IDLE = 5.0
"""Seconds after which a thread for callbacks ends if it has nothing to do."""


class _Callbacks:
    """Threads that complete futures whose callbacks are Python's.

    Such a callback may wait for another operation (PowerSGD's do), so it must hold up neither the operations' own
    threads nor another callback: each finds a thread that is idle, or gets a new one.
    """

    def __init__(self) -> None:
        self._filled = threading.Condition()
        self._queue: deque[Callable[[], None]] = deque()
        self._idle = 0

    def run(self, function: Callable[[], None]) -> None:
        with self._filled:
            self._queue.append(function)
            if self._idle >= len(self._queue):
                self._filled.notify()
            else:
                threading.Thread(target=self._work, name="mpicoll-callback", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._filled:
                self._idle += 1
                if not self._queue:
                    self._filled.wait(_IDLE)
                self._idle -= 1
                if not self._queue:
                    return
                function = self._queue.popleft()
            function()


_callbacks = _Callbacks()


class _Future(torch.futures.Future):  # type: ignore[type-arg]  # generic in stubs only
    """A future that knows whether somebody in Python waits to be called."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._called = False

    def then(self, callback: Callable[..., Any]) -> Any:
        with self._lock:
            self._called = True
        return super().then(callback)

    def add_done_callback(self, callback: Callable[..., Any]) -> None:
        with self._lock:
            self._called = True
        super().add_done_callback(callback)

    def complete(self, value: Any, error: BaseException | None) -> None:
        """Hand out `value`, or `error`. Returns at once."""

        def now() -> None:
            if error is None:
                self.set_result(value)
            else:
                self.set_exception(error)

        with self._lock:
            if not self._called:
                # Whoever comes now waits for the lock, and finds it complete.
                now()
                return
        _callbacks.run(now)


class Handle(Protocol):
    """An operation under way: a job of a queue, or a transfer."""

    def test(self) -> Any:
        """Whether it has completed."""

    def wait(self, timeout: float | None) -> Any:
        """Return when it has; raises what went wrong, or Timeout."""


class Work(dist.Work):
    """An operation under way, and the tensors that it fills.

    ``wait(timeout)`` (a timedelta; None and zero mean MPICOLL_TIMEOUT) returns True when the operation has completed,
    raises what went wrong, or Timeout, after which it is still pending. A Work that is dropped does not stop its
    operation.
    """

    def __init__(self, handle: Handle, outputs: list[torch.Tensor], source: Callable[[], int] | None = None) -> None:
        super().__init__()
        self.handle = handle
        self._outputs = outputs
        self._source = source
        self._future: _Future | None = None
        self._error: BaseException | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        try:
            self.handle.wait(timeout.total_seconds() if timeout else None)
        except MpicollError as error:
            if self.handle.test():
                self._error = error
            raise
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return bool(self.handle.test())

    def is_success(self) -> bool:
        """Whether it has completed, and nothing went wrong."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """What went wrong, if it has completed; else None."""
        if self._error is None and self.is_completed():
            # Since it has completed, this returns at once; what it raises is kept for those who ask.
            with suppress(MpicollError):
                self.wait()
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The tensors that it fills. Waits for them."""
        self.wait()
        return self._outputs

    def source_rank(self) -> int:
        """The rank, in the group, from which a completed receive got its message."""
        if self._source is None:
            raise TypeError("source_rank: this operation does not receive from a rank; only recv's work has one")
        return self._source()

    def _source_rank(self) -> int:
        return self.source_rank()

    def get_future(self) -> Any:
        """A ``torch.futures.Future`` of :meth:`result`."""
        if self._future is None:
            self._future = _Future()
            if isinstance(self.handle, Job):
                self.handle.when_done(self._complete)
            else:
                poller.watch(self.handle, self._complete)
        return self._future

    def _complete(self, job: Job | None = None) -> None:
        assert self._future is not None
        if job is not None:
            job.reported = job.reported or job.error is not None
        error = self.exception() if job is None else job.error
        self._future.complete(self._outputs, error)


class Together:
    """Several operations as one handle."""

    def __init__(self, handles: list[Handle]) -> None:
        self._handles = handles

    def test(self) -> bool:
        return all(one.test() for one in self._handles)

    def wait(self, timeout: float | None) -> None:
        for one in self._handles:
            one.wait(timeout)


def transfer(request: Request, tensors: list[torch.Tensor], source: Callable[[], int] | None = None) -> Work:
    """The work of a point-to-point transfer, which goes on in the background."""
    poller.watch(request)
    return Work(request, tensors, source)
