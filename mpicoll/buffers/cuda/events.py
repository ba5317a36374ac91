"""Events of CUDA streams, and streams that are captured into graphs."""

from __future__ import annotations

from typing import Any

import cupy
from cupy.cuda import runtime

from mpicoll.buffers.cuda.driver import CurrentDevice
from mpicoll.buffers.device import StreamEvent
from mpicoll.errors import DeviceError

_CAPTURE_ERRORS = range(900, 910)
"""CUDA's errors for calls that a capture forbids."""

_NOT_READY = 600
"""CUDA's error for an event that has not happened yet."""


class RecordedEvent:
    """An event in the work of a device; see :class:`mpicoll.buffers.device.Event`."""

    __slots__ = ("_event",)

    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()

    def done(self) -> bool:
        return is_done(self._event)


def is_done(event: Any) -> bool:
    """Return True if all work before `event` is done. Raises the error of that work."""
    status = runtime.eventQuery(event.ptr)
    if status == _NOT_READY:
        return False
    if status:
        event.synchronize()
    return True


def new_event() -> Any:
    return cupy.cuda.Event(block=False, disable_timing=True)


def record_event(index: int, stream: int) -> StreamEvent:
    """Record an event on the stream of that address (a ``cudaStream_t``) on device `index`. Raises DeviceError if the
    stream is being captured."""
    with CurrentDevice(index):
        if is_capturing(stream):
            raise DeviceError(capture_error(index))
        event = new_event()
        runtime.eventRecord(event.ptr, stream)
    return event


def is_capturing(stream: int) -> bool:
    """Return True if the stream, of the current device, is being captured into a CUDA graph."""
    try:
        return bool(runtime.streamIsCapturing(stream))
    except runtime.CUDARuntimeError as error:
        # Of another stream, which forbids the use of the default one meanwhile.
        if error.status in _CAPTURE_ERRORS:
            return True
        raise
    except RuntimeError:
        # cupy's word for a capture that has failed and not ended.
        return True


def refuse_capture(operation: str, argument: str, index: int, stream: int) -> None:
    """Raise DeviceError if the stream is being captured."""
    with CurrentDevice(index):
        capturing = is_capturing(stream)
    if capturing:
        raise DeviceError(f"{operation}: {argument}: {capture_error(index)}")


def capture_error(index: int) -> str:
    return (
        f"work on cuda:{index} is being captured into a CUDA graph, which can't hold communication; call it before or"
        " after the capture"
    )


def current_stream(index: int) -> int:
    """Return the address of cupy's current stream on device `index`."""
    return int(cupy.cuda.get_current_stream(index).ptr)
