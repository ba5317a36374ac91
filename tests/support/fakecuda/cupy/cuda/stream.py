"""``cupy.cuda.stream``."""

from __future__ import annotations

import threading
import warnings
from typing import Any

from fakecuda import streams

from cupy.cuda import runtime


class _Current(threading.local):
    """Of a thread: the current stream of each device, and the stacks of ``with``. ``use()`` leaves these alone: what it
    has chosen is forgotten at the end of the next ``with``."""

    def __init__(self) -> None:
        self.streams: dict[int, _BaseStream] = {}
        self.stacks: dict[int, list[_BaseStream]] = {}
        self.devices: list[int] = []


_current = _Current()


def get_current_stream(device_id: int = -1) -> _BaseStream:
    return _current.streams.get(runtime.getDevice() if device_id == -1 else device_id, Stream.null)


class Event:
    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        self.ptr = 0
        if interprocess and not disable_timing:
            raise ValueError("Timing must be disabled for interprocess events")
        self.ptr = runtime.eventCreateWithFlags(0)

    def __del__(self) -> None:
        if self.ptr:
            runtime.eventDestroy(self.ptr)

    @property
    def done(self) -> bool:
        return runtime.eventQuery(self.ptr) == 0

    def record(self, stream: _BaseStream | None = None) -> None:
        runtime.eventRecord(self.ptr, (stream or get_current_stream()).ptr)

    def synchronize(self) -> None:
        runtime.eventSynchronize(self.ptr)


class _BaseStream:
    def __init__(self, ptr: int, device_id: int) -> None:
        self.ptr = ptr
        self.device_id = device_id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BaseStream) and self.ptr == other.ptr

    def __hash__(self) -> int:
        return self.ptr

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.ptr} (device {self.device_id})>"

    def _own_device(self) -> int:
        device = runtime.getDevice()
        if self.device_id not in (-1, device):
            raise RuntimeError(
                f"The device that the stream is created on ({self.device_id})"
                f" does not match with the current device ({device})"
            )
        return device

    def __enter__(self) -> Any:
        device = self._own_device()
        _current.stacks.setdefault(device, [Stream.null]).append(self)
        _current.devices.append(device)
        _current.streams[device] = self
        return self

    def __exit__(self, *args: object) -> None:
        device = _current.devices.pop()
        _current.stacks[device].pop()
        _current.streams[device] = _current.stacks[device][-1]

    def use(self) -> _BaseStream:
        _current.streams[self._own_device()] = self
        return self

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.ptr

    @property
    def done(self) -> bool:
        return runtime.streamQuery(self.ptr) == 0

    def synchronize(self) -> None:
        runtime.streamSynchronize(self.ptr)

    def launch_host_func(self, callback: Any, arg: Any) -> None:
        runtime.launchHostFunc(self.ptr, callback, arg)

    def record(self, event: Event | None = None) -> Event:
        event = event or Event()
        runtime.eventRecord(event.ptr, self.ptr)
        return event

    def wait_event(self, event: Event) -> None:
        runtime.streamWaitEvent(self.ptr, event.ptr)

    def begin_capture(self, mode: int | None = None) -> None:
        if self.ptr in (0, 1):
            raise RuntimeError("cannot capture on the default (legacy) stream")
        runtime.streamBeginCapture(self.ptr, runtime.streamCaptureModeRelaxed if mode is None else mode)

    def end_capture(self) -> Graph:
        return Graph(streams.end_capture(streams.stream_at(self.ptr)))

    def is_capturing(self) -> bool:
        return runtime.streamIsCapturing(self.ptr)


class Graph:
    def __init__(self, work: list[Any]) -> None:
        self._work = work

    def launch(self, stream: _BaseStream | None = None) -> None:
        for work in self._work:
            streams.stream_at((stream or get_current_stream()).ptr).give(work)


class Stream(_BaseStream):
    null: Stream
    ptds: Stream

    def __init__(
        self, null: bool = False, non_blocking: bool = False, ptds: bool = False, priority: int | None = None
    ) -> None:
        self._foreign: Any = None
        if null or ptds:
            super().__init__(0 if null else runtime.streamPerThread, -1)
        else:
            super().__init__(runtime.streamCreateWithPriority(int(non_blocking), priority or 0), runtime.getDevice())

    def __del__(self) -> None:
        if self.ptr > runtime.streamPerThread and self._foreign is None:
            runtime.streamDestroy(self.ptr)

    @classmethod
    def from_external(cls, obj: Any) -> Stream:
        version, ptr = obj.__cuda_stream__()
        if version != 0:
            raise TypeError(f"__cuda_stream__() returned unsupported version {version}, only version 0 is supported")
        stream = cls.__new__(cls)
        _BaseStream.__init__(stream, ptr, -1)
        stream._foreign = obj
        return stream


class ExternalStream(_BaseStream):
    def __init__(self, ptr: int, device_id: int = -1) -> None:
        warnings.warn(
            "ExternalStream is deprecated. Use Stream.from_external() instead to interoperate with external streams"
            " that implement the CUDA stream protocol.",
            DeprecationWarning,
            stacklevel=2,
        )
        super().__init__(ptr, device_id)


Stream.null = Stream(null=True)
Stream.ptds = Stream(ptds=True)
