"""Implementation of torch's Work and Future for pending operations."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
import torch.distributed as dist

from mpicoll.engine.core.poller import poller
from mpicoll.engine.core.process_local import refuse_pickling
from mpicoll.engine.core.queued_operation import QueuedOperation
from mpicoll.engine.core.request import Request
from mpicoll.errors import CommunicationError, MpicollError
from mpicoll.torch import work_status
from mpicoll.torch.tensors import Restore, find_cuda_devices, on_internal_streams

if TYPE_CHECKING:
    from mpicoll.engine.executors.stream_order import Completion

CallbackScheduler: TypeAlias = "Callable[[Callable[[], None]], None]"
"""Function that schedules a callback, in order and on a thread that the callback may block."""


def run_in_thread(callback: Callable[[], None]) -> None:
    """Run `callback` on a new thread."""
    threading.Thread(target=callback, name="mpicoll-callback", daemon=True).start()


_DEVICE_PERIOD = 2e-4
"""Seconds between two looks at a collective on a device for which a future is to be completed."""


class _Future(torch.futures.Future):  # type: ignore[type-arg]  # generic in stubs only
    """Future whose callbacks `schedule` schedules.

    torch would run callbacks on the thread that completes the future, which is the thread that runs the operations. If
    the future is already complete, torch would run them immediately, in an undefined order.

    `devices` are the CUDA devices of the tensors in the value, and of the work of callbacks. All work on them has
    finished when the future is complete, so the value is visible to every stream. torch still needs the devices, for
    callbacks that C++ attaches: torch runs their work on streams from its pool, and synchronizes the streams of threads
    that wait for the future with these.
    """

    def __init__(
        self,
        schedule: CallbackScheduler,
        make_progress: Callable[[], object] | None = None,
        devices: Sequence[torch.device] = (),
    ) -> None:
        super().__init__(devices=list(devices))
        self._devices = devices
        self._schedule = schedule
        self._make_progress = make_progress
        self._completed = threading.Event()

    def wait(self) -> Any:
        """Return the value. Raises the error of the operation if it failed."""
        make_progress = self._make_progress
        if make_progress is not None:
            make_progress()
        return super().wait()

    def then(self, callback: Callable[..., Any]) -> Any:
        """Return a future of ``callback(self)``, which runs when this future is complete."""
        result = _Future(self._schedule, devices=self._devices)

        def call() -> None:
            self._completed.wait()
            try:
                with on_internal_streams(*self._devices):
                    value = callback(self)
            except BaseException as error:  # noqa: BLE001  raised by the wait for the result
                result.complete(None, error)
            else:
                result.complete(value, None)

        self._schedule(call)
        return result

    def add_done_callback(self, callback: Callable[..., Any]) -> None:
        """Call ``callback(self)`` when this future is complete."""

        def call() -> None:
            self._completed.wait()
            with on_internal_streams(*self._devices):
                callback(self)

        self._schedule(call)

    def complete(self, value: Any, error: BaseException | None) -> None:
        """Complete the future with `value`, or with `error` if it is not None."""
        # Breaks a reference cycle: the function holds the Work, which holds this future.
        self._make_progress = None
        try:
            # torch records events on the current streams, and waiting streams wait for these events.
            with on_internal_streams(*self._devices):
                if error is None:
                    self.set_result(value)
                elif isinstance(error, Exception):
                    self._fail(error)
                else:
                    # torch accepts only Exceptions. A KeyboardInterrupt has already been raised in its own thread.
                    self._fail(CommunicationError(f"the operation was interrupted by {error!r}"))
        finally:
            self._completed.set()

    def _fail(self, error: Exception) -> None:
        # set_exception would make the error the value. DistributedDataParallel would look for tensors in it, find none
        # and crash. (With devices torch already looks for tensors here, and takes the exception that this raises for
        # the outcome.)
        self._set_unwrap_func(_raise_failure)
        self.set_result(_Failure(error))


class _Failure:
    """Value of a future that failed. Pickling it, which is how torch looks for tensors in a value, raises the error."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self.error


def _raise_failure(failure: _Failure) -> None:
    raise failure.error


_NO_FUTURE: torch.futures.Future[Any] = torch.futures.Future()
"""Result of :meth:`Work.get_future` for a search for the Work."""


class WorkHandle(Protocol):
    """Pending operation: a job of a queue, or a point-to-point transfer."""

    def test(self) -> Any:
        """Return True if the operation has completed."""

    def wait(self, timeout: float | None, bound: float | None = None) -> Any:
        """Wait until the operation has completed. Raises the error of the operation, or Timeout.

        If `timeout` is the remainder of a longer timeout, `bound` is that timeout, for the error message.
        """


def block_current_stream(completion: Completion, place: torch.device | None) -> None:
    """Have the later work of torch's current stream on `place` begin when the collective is complete."""
    completion.block_stream(torch.cuda.current_stream(place).cuda_stream)


class DeviceHandle:
    """Handle for a collective on the CUDA device `place`, whose `job` may end before the device completes it."""

    def __init__(self, job: QueuedOperation, place: torch.device) -> None:
        self._job = job
        self._place = place

    def test(self) -> bool:
        """Return True if the device has completed the collective, or it has failed."""
        if not self._job.test():
            return False
        completion = self._job.value
        try:
            return completion is None or completion.done()
        except Exception:  # noqa: BLE001  raised by wait()
            return True

    def wait(self, timeout: float | None, bound: float | None = None) -> None:
        """Wait on the host until the collective is submitted, and let torch's current stream wait for the device."""
        completion = self._job.wait(timeout, bound)
        if completion is not None:
            block_current_stream(completion, self._place)


class Work(dist.Work):
    """Pending operation, and its output tensors.

    ``wait(timeout)`` returns True when the operation has completed. `timeout` is a timedelta; None and zero mean the
    timeout of the group, after which the job is aborted. ``wait`` raises the error of the operation, or Timeout, after
    which the operation is still pending. Dropping a Work does not stop its operation. ``bound`` is the timeout in
    seconds of a wait without `timeout`.

    For CUDA tensors, too, ``wait`` blocks the host: the result is visible to all streams, not only to the current one.
    Where streams order a collective (``MPICOLL_CUDA_ORDER``), the host waits until it is submitted, and the current
    stream until it is complete.
    """

    __reduce_ex__ = refuse_pickling("Work", "wait() for it and pass on its tensors")

    def __init__(
        self,
        handle: WorkHandle,
        outputs: list[torch.Tensor],
        schedule: CallbackScheduler = run_in_thread,
        source: Callable[[], int] | None = None,
    ) -> None:
        super().__init__()
        self.handle = handle
        self.outputs = outputs
        self._schedule = schedule
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
        """Block the host as :meth:`wait` does: a stream can wait for an operation only after it is submitted."""
        self.wait()

    def is_completed(self) -> bool:
        return bool(self.handle.test())

    def is_success(self) -> bool:
        """Return True if the operation has completed without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return the error of a completed operation that failed, else None."""
        if self._error is None and self.is_completed():
            # The operation has completed, so this returns at once; wait() stores the error.
            with suppress(BaseException):
                self.wait()
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Wait for the operation, and return its output tensors."""
        self.wait()
        return self.outputs

    def source_rank(self) -> int:
        """Return the rank, in the group, of the sender of a completed receive.

        Raises TypeError for other operations.
        """
        if self._source is None:
            raise TypeError("source_rank: only the Work of recv has a source rank")
        return self._source()

    def _source_rank(self) -> int:
        return self.source_rank()

    def get_future(self) -> Any:
        """Return a ``torch.futures.Future`` of :meth:`result`.

        Callbacks of collectives run one after the other, in the order in which they were attached, and may start
        collectives themselves.
        """
        if work_status.answer(self):
            return _NO_FUTURE
        if self._future is None:
            self._future = _Future(self._schedule, self.wait, find_cuda_devices(self.outputs))
            if isinstance(self.handle, QueuedOperation):
                self.handle.add_done_callback(self._complete)
            elif isinstance(self.handle, DeviceHandle):
                poller.watch(self.handle, self._complete, period=_DEVICE_PERIOD)
            else:
                poller.watch(self.handle, self._complete)
        return self._future

    def _complete(self, job: QueuedOperation | None = None) -> None:
        assert self._future is not None
        if job is not None:
            job.reported = job.reported or job.error is not None
        error = self.exception() if job is None else job.error
        self._future.complete(self.outputs, error)


class CoalescedHandle:
    """Handle for several operations."""

    def __init__(self, handles: list[WorkHandle]) -> None:
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


class RecvHandle:
    """Receive that completes when the message is in the caller's tensor.

    The first call of ``test`` or ``wait`` that sees the message moves it there.
    """

    def __init__(self, request: Request, restore: Restore) -> None:
        self._request = request
        self._restore = restore
        self._lock = threading.Lock()
        self._completed = False

    def test(self) -> bool:
        # A thread in wait() holds the lock, and completes the receive itself.
        if self._lock.acquire(blocking=False):
            try:
                if not self._completed and self._request.test():
                    with suppress(MpicollError):  # raised by wait()
                        self._finish(None)
                    self._completed = True
            finally:
                self._lock.release()
        return self._completed

    def wait(self, timeout: float | None, bound: float | None = None) -> None:
        with self._lock:
            self._finish(timeout, bound)
            self._completed = True

    def _finish(self, timeout: float | None, bound: float | None = None) -> None:
        """Wait for the message and move it, once. The error of a receive that failed is raised at each call."""
        self._request.wait(timeout, bound)
        restore, self._restore = self._restore, None
        if restore is not None:
            restore()


def create_transfer_work(
    handle: WorkHandle, tensors: list[torch.Tensor], source: Callable[[], int] | None = None
) -> Work:
    """Return the Work of a point-to-point transfer, which progresses in the background."""
    poller.watch(handle)
    return Work(handle, tensors, source=source)
