"""The streams on which threads submit work to a CUDA device."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, cast
from weakref import finalize

import cupy
import numpy as np
from cupy.cuda import runtime

from mpicoll.buffers.cuda.driver import CurrentDevice, RelaxedCapture
from mpicoll.buffers.cuda.events import RecordedEvent, is_capturing, is_done, new_event
from mpicoll.buffers.cuda.pinned import PinnedPool
from mpicoll.buffers.device import Device, DeviceArray, StreamEvent, view
from mpicoll.buffers.dtypes import Array


class ThreadStream:
    """A thread's stream on a device, an event to wait for it, and the host memory that its work uses.

    The stream waits for events of callers (`after`) only when it gets work: while it has none, the host waits for these
    events themselves, so that a collective whose ranks first wait for their data costs one round trip less.
    """

    __slots__ = ("__weakref__", "after", "event", "has_work", "kept", "stream")

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.event = new_event()
        self.kept: list[Array] = []
        self.after: list[StreamEvent] = []
        self.has_work = False

    def submit(self) -> Any:
        """Return the stream for work that the caller submits next. It begins when the events are done."""
        for one in self.after:
            self.stream.wait_event(one)
        self.after.clear()
        self.has_work = True
        return self.stream

    def synchronize(self) -> None:
        """Wait for all work submitted, or if there is none for the events. Does nothing a second time."""
        if self.has_work:
            self.event.record(self.stream)
            self.event.synchronize()
            self.has_work = False
        if self.after:
            for one in self.after:
                if not one.done:
                    one.synchronize()
            self.after.clear()
        if self.kept:
            self.kept.clear()


class CurrentStream:
    """A block in which a stream is cupy's, on the device that is current."""

    __slots__ = ("_before", "_stream")

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        # Leaving cupy's own block would forget what the caller's thread uses without a block.
        self._before = cupy.cuda.get_current_stream()
        self._stream.use()

    def __exit__(self, *error: object) -> None:
        self._before.use()


class _Working:
    """A block for the work of a thread, for which the host `waits` at its end; see
    :meth:`mpicoll.buffers.device.Device.working` and :meth:`~mpicoll.buffers.device.Device.submitting`."""

    __slots__ = ("_after", "_device", "_mode", "_stream", "_thread_stream", "_waits")

    def __init__(self, index: int, thread_stream: ThreadStream, after: Sequence[StreamEvent], waits: bool) -> None:
        self._waits = waits
        self._mode = RelaxedCapture()
        self._device = CurrentDevice(index)
        self._thread_stream = thread_stream
        self._after = after

    def __enter__(self) -> None:
        thread_stream = self._thread_stream
        self._mode.__enter__()
        try:
            self._device.__enter__()
            # Leaving cupy's own block would forget what the caller's thread uses without a block.
            self._stream = cupy.cuda.get_current_stream()
            thread_stream.stream.use()
        except BaseException:
            self._mode.__exit__()
            raise
        thread_stream.after += self._after

    def __exit__(self, failure: type[BaseException] | None, *error: object) -> None:
        try:
            if self._waits or failure is not None:
                self._thread_stream.synchronize()
        finally:
            self._stream.use()
            self._device.__exit__()
            self._mode.__exit__()


class DeviceStreams:
    """A stream of each thread on a device, which no default stream waits for, and the memory that its work needs."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.kind = "cuda"
        self.name = f"{self.kind}:{index}"
        self._of_thread = threading.local()
        self._idle: deque[Any] = deque()
        self._idle_events: deque[Any] = deque()
        self._pinned = PinnedPool()

    @property
    def stream(self) -> int:
        """This thread's stream, as a ``cudaStream_t``, for work that the caller submits next."""
        return int(self.submit().ptr)

    def submit(self) -> Any:
        """Return this thread's stream for work that the caller submits next."""
        return self.thread_stream().submit()

    def thread_stream(self) -> ThreadStream:
        own: ThreadStream | None = getattr(self._of_thread, "own", None)
        if own is None:
            with CurrentDevice(self.index):
                try:
                    # A stream of a thread that has ended: cupy's pool holds memory for each stream ever made.
                    stream = self._idle.pop()
                except IndexError:
                    stream = cupy.cuda.Stream(non_blocking=True)
                own = self._of_thread.own = ThreadStream(stream)
            finalize(own, self._idle.append, stream).atexit = False
        return own

    def empty(self, count: int, dtype: np.dtype[Any]) -> DeviceArray:
        own = self.thread_stream()
        with CurrentDevice(self.index), CurrentStream(own.stream):
            memory = cupy.cuda.alloc(count * dtype.itemsize)
        # Earlier work of this stream may still use memory of the pool: other streams and ranks wait for it.
        own.has_work = True
        return view(cast(Device, self), memory.ptr, (count,), dtype, owner=memory)

    def allocate_pinned(self, nbytes: int) -> Array:
        if not nbytes:
            return np.empty(0, np.uint8)
        with CurrentDevice(self.index):
            return self._pinned.take(nbytes)

    def working(self, after: Sequence[StreamEvent] = ()) -> AbstractContextManager[None]:
        return _Working(self.index, self.thread_stream(), after, True)

    def submitting(self, after: Sequence[StreamEvent] = ()) -> AbstractContextManager[None]:
        return _Working(self.index, self.thread_stream(), after, False)

    def synchronize(self) -> None:
        self.thread_stream().synchronize()

    def record_submitted(self) -> tuple[StreamEvent, list[Any]]:
        own = self.thread_stream()
        stream = own.submit()
        event = self._take_event()
        event.record(stream)
        kept: list[Any] = [*own.kept]
        own.kept.clear()
        return event, kept

    def follow(self, event: StreamEvent) -> None:
        self.thread_stream().after.append(event)

    def block_stream(self, stream: int, event: StreamEvent) -> None:
        with CurrentDevice(self.index):
            runtime.streamWaitEvent(stream, event.ptr)

    def is_done(self, event: StreamEvent) -> bool:
        with RelaxedCapture(), CurrentDevice(self.index):
            return is_done(event)

    def wait_for(self, event: StreamEvent) -> None:
        with RelaxedCapture(), CurrentDevice(self.index):
            event.synchronize()

    def _take_event(self) -> Any:
        try:
            return self._idle_events.pop()
        except IndexError:
            return new_event()

    def record_caller(self, stream: int) -> StreamEvent | None:
        with CurrentDevice(self.index):
            if is_capturing(stream):
                return None
            event = self._take_event()
            runtime.eventRecord(event.ptr, stream)
        return event

    def reuse_event(self, event: StreamEvent) -> None:
        self._idle_events.append(event)

    def record_event(self) -> RecordedEvent:
        event = new_event()
        event.record(self.submit())
        return RecordedEvent(event)
