"""The streams on which threads submit work to a CUDA device."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast
from weakref import finalize

import cupy
import numpy as np

from mpicoll.buffers.cuda.driver import CurrentDevice, RelaxedCapture
from mpicoll.buffers.cuda.events import RecordedEvent, new_event
from mpicoll.buffers.cuda.pinned import PinnedPool
from mpicoll.buffers.device import Device, DeviceArray, StreamEvent, view
from mpicoll.buffers.dtypes import Array


class ThreadStream:
    """A thread's stream on a device, an event to wait for it, and the host memory that its work uses."""

    __slots__ = ("__weakref__", "event", "kept", "stream")

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.event = new_event()
        self.kept: list[Array] = []

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the stream cupy's, on the device that is current."""
        # Leaving cupy's own block would forget what the caller's thread uses without a block.
        before = cupy.cuda.get_current_stream()
        self.stream.use()
        try:
            yield
        finally:
            before.use()

    def synchronize(self) -> None:
        self.event.record(self.stream)
        self.event.synchronize()
        self.kept.clear()


class DeviceStreams:
    """A stream of each thread on a device, which no default stream waits for, and the memory that its work needs."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.kind = "cuda"
        self.name = f"{self.kind}:{index}"
        self._of_thread = threading.local()
        self._idle: deque[Any] = deque()
        self._pinned = PinnedPool()

    @property
    def stream(self) -> int:
        """This thread's stream, as a ``cudaStream_t``."""
        return int(self.thread_stream().stream.ptr)

    def thread_stream(self) -> ThreadStream:
        lane: ThreadStream | None = getattr(self._of_thread, "own", None)
        if lane is None:
            with CurrentDevice(self.index):
                try:
                    # A stream of a thread that has ended: cupy's pool holds memory for each stream ever made.
                    stream = self._idle.pop()
                except IndexError:
                    stream = cupy.cuda.Stream(non_blocking=True)
                lane = self._of_thread.own = ThreadStream(stream)
            finalize(lane, self._idle.append, stream).atexit = False
        return lane

    def empty(self, count: int, dtype: np.dtype[Any]) -> DeviceArray:
        lane = self.thread_stream()
        with CurrentDevice(self.index), lane.current():
            memory = cupy.cuda.alloc(count * dtype.itemsize)
        return view(cast(Device, self), memory.ptr, (count,), dtype, owner=memory)

    def allocate_pinned(self, nbytes: int) -> Array:
        if not nbytes:
            return np.empty(0, np.uint8)
        with CurrentDevice(self.index):
            return self._pinned.take(nbytes)

    @contextmanager
    def working(self, after: Sequence[StreamEvent] = ()) -> Iterator[None]:
        lane = self.thread_stream()
        with RelaxedCapture(), CurrentDevice(self.index), lane.current():
            for event in after:
                lane.stream.wait_event(event)
            try:
                yield
            finally:
                lane.synchronize()

    def synchronize(self) -> None:
        self.thread_stream().synchronize()

    def record_event(self) -> RecordedEvent:
        event = new_event()
        event.record(self.thread_stream().stream)
        return RecordedEvent(event)
