"""Pending operations as torch sees them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist

from mpicoll.engine.core.poller import poller
from mpicoll.engine.core.process_local import refuse_pickling
from mpicoll.engine.core.queue import Job
from mpicoll.engine.core.request import Request
from mpicoll.errors import CommunicationError, MpicollError
from mpicoll.torch.tensors import Restore, aside, cuda_devices

Later: TypeAlias = "Callable[[Callable[[], None]], None]"
"""What runs a callback, at its time and on a thread on which it may wait."""


def in_a_thread(callback: Callable[[], None]) -> None:
    """Run `callback` on a thread of its own."""
    threading.Thread(target=callback, name="mpicoll-callback", daemon=True).start()


class _Future(torch.futures.Future):  # type: ignore[type-arg]  # generic in stubs only
    """A future whose callbacks run where `later` runs them.

    torch would run them on the thread that completes the future, which is the one that runs the operations; or, if it
    is complete already, at once, so that nobody could tell in which order they come.

    `devices` are those of the CUDA tensors in its value, and of what callbacks do. When it is complete, all work on
    them is done, so every stream sees it. torch has to know them nonetheless: for callbacks that C++ attaches, whose
    work torch then puts on streams of its own, for which it lets those wait that wait for the future.
    """

    def __init__(
        self, later: Later, help_out: Callable[[], object] | None = None, devices: Sequence[torch.device] = ()
    ) -> None:
        super().__init__(devices=list(devices))
        self._devices = devices
        self._later = later
        self._help_out = help_out
        self._ended = threading.Event()

    def wait(self) -> Any:
        """The value. Raises what went wrong."""
        help_out = self._help_out
        if help_out is not None:
            help_out()
        return super().wait()

    def then(self, callback: Callable[..., Any]) -> Any:
        """A future of ``callback(self)``, which runs when this future is complete."""
        result = _Future(self._later, devices=self._devices)

        def call() -> None:
            self._ended.wait()
            try:
                with aside(*self._devices):
                    value = callback(self)
            except BaseException as error:  # noqa: BLE001  whoever waits for the result gets it
                result.complete(None, error)
            else:
                result.complete(value, None)

        self._later(call)
        return result

    def add_done_callback(self, callback: Callable[..., Any]) -> None:
        """Call ``callback(self)`` when this future is complete."""

        def call() -> None:
            self._ended.wait()
            with aside(*self._devices):
                callback(self)

        self._later(call)

    def complete(self, value: Any, error: BaseException | None) -> None:
        """Hand out `value`, or `error`."""
        # It holds the work, which holds this future.
        self._help_out = None
        try:
            # torch records events on the current streams, for which others will wait.
            with aside(*self._devices):
                if error is None:
                    self.set_result(value)
                elif isinstance(error, Exception):
                    self._fail(error)
                else:
                    # torch takes no other kind. An interrupt has reached the thread for which it was meant already.
                    self._fail(CommunicationError(f"the operation was cut short by {error!r}"))
        finally:
            self._ended.set()

    def _fail(self, error: Exception) -> None:
        # set_exception would hand out the error as the value, in which DistributedDataParallel looks for tensors, finds
        # none, and crashes. (With devices torch looks already here, and takes what that raises for the outcome.)
        self._set_unwrap_func(_raise)
        self.set_result(_Failure(error))


class _Failure:
    """A future's value that is an error: whoever looks for tensors in it, which torch does by pickling, gets that."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self.error


def _raise(failure: _Failure) -> None:
    raise failure.error


class Handle(Protocol):
    """An operation under way: a job of a queue, or a transfer."""

    def test(self) -> Any:
        """Return True if it has completed."""

    def wait(self, timeout: float | None, bound: float | None = None) -> Any:
        """Return when it has; raises what went wrong, or Timeout. `bound` is what the caller was given, if `timeout` is
        what is left of it."""


class Work(dist.Work):
    """An operation under way, and the tensors that it fills.

    ``wait(timeout)`` (a timedelta; None and zero mean the group's, past which the job is ended) returns True when the
    operation has completed, raises what went wrong, or Timeout, after which it is still pending. A Work that is dropped
    does not stop its operation. ``bound`` is the timeout in seconds of a wait that is given none.

    Of CUDA tensors, too, it waits in the host: what has completed is there for all streams, whichever is current.
    """

    __reduce_ex__ = refuse_pickling("Work", "wait() for it and pass on its tensors")

    def __init__(
        self,
        handle: Handle,
        outputs: list[torch.Tensor],
        later: Later = in_a_thread,
        source: Callable[[], int] | None = None,
    ) -> None:
        super().__init__()
        self.handle = handle
        self.outputs = outputs
        self._later = later
        self._source = source
        self._future: _Future | None = None
        self._error: BaseException | None = None
        self.bound: float | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        seconds = timeout.total_seconds() if timeout else 0.0
        try:
            self.handle.wait(seconds if seconds > 0 else self.bound)
        except BaseException as error:
            if self.handle.test():
                self._error = error
            raise
        return True

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        """As :meth:`wait`: an operation between processes can't be waited for by a stream."""
        self.wait()

    def is_completed(self) -> bool:
        return bool(self.handle.test())

    def is_success(self) -> bool:
        """Return True if it has completed without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return the error of a completed operation; else None."""
        if self._error is None and self.is_completed():
            # Since it has completed, this returns at once; what it raises is kept for those who ask.
            with suppress(BaseException):
                self.wait()
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The tensors that it fills. Waits for them."""
        self.wait()
        return self.outputs

    def source_rank(self) -> int:
        """The rank, in the group, from which a completed receive got its message."""
        if self._source is None:
            raise TypeError("source_rank: this operation does not receive from a rank; only recv's work has one")
        return self._source()

    def _source_rank(self) -> int:
        return self.source_rank()

    def get_future(self) -> Any:
        """A ``torch.futures.Future`` of :meth:`result`.

        Callbacks of collectives run one after the other, in the order in which they were attached, and may start
        collectives of their own."""
        if self._future is None:
            self._future = _Future(self._later, self.wait, cuda_devices(self.outputs))
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
        self._future.complete(self.outputs, error)


class Together:
    """Several operations as one handle."""

    def __init__(self, handles: list[Handle]) -> None:
        self._handles = handles

    def test(self) -> bool:
        return all(one.test() for one in self._handles)

    def wait(self, timeout: float | None, bound: float | None = None) -> None:
        if timeout is None:
            for one in self._handles:
                one.wait(None)
            return
        deadline = time.monotonic() + timeout
        for one in self._handles:
            one.wait(max(0.0, deadline - time.monotonic()), timeout if bound is None else bound)


class Received:
    """A receive, complete when what came is where the caller wants it: whoever notices first moves it there."""

    def __init__(self, request: Request, restore: Restore) -> None:
        self._request = request
        self._restore = restore
        self._lock = threading.Lock()
        self._ended = False

    def test(self) -> bool:
        # Who waits holds the lock, and will see the end by itself.
        if self._lock.acquire(blocking=False):
            try:
                if not self._ended and self._request.test():
                    with suppress(MpicollError):  # for its own wait to say
                        self._finish(None)
                    self._ended = True
            finally:
                self._lock.release()
        return self._ended

    def wait(self, timeout: float | None, bound: float | None = None) -> None:
        with self._lock:
            self._finish(timeout, bound)
            self._ended = True

    def _finish(self, timeout: float | None, bound: float | None = None) -> None:
        """Wait for it and move what came, once; of a receive that failed, say so each time."""
        self._request.wait(timeout, bound)
        restore, self._restore = self._restore, None
        if restore is not None:
            restore()


def transfer(handle: Handle, tensors: list[torch.Tensor], source: Callable[[], int] | None = None) -> Work:
    """The work of a point-to-point transfer, which goes on in the background."""
    poller.watch(handle)
    return Work(handle, tensors, source=source)
