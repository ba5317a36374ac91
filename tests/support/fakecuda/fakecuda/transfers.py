"""Copies between the host and devices, and memory that is given back, as the CUDA runtime does them."""

from __future__ import annotations

import ctypes
import os
from collections import deque

from fakecuda import errors, memory, streams
from fakecuda.errors import CUDARuntimeError
from fakecuda.streams import Stream

HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, DEFAULT = range(5)
_ENDS = {HOST_TO_HOST: (0, 0), HOST_TO_DEVICE: (1, 0), DEVICE_TO_HOST: (0, 1), DEVICE_TO_DEVICE: (1, 1)}


def copy(
    stream: Stream, target: int, source: int, kind: int, width: int, height: int = 1, pitch: tuple[int, int] = (0, 0)
) -> None:
    """Give `stream` a copy of `height` rows of `width` bytes, `pitch` bytes apart in target and source.

    Pageable host memory is read, and written, before this returns, as CUDA's staging does it; page-locked memory when
    the copy runs. With ``FAKECUDA_ATS=1`` pageable memory is read when the copy runs, as on machines whose devices
    reach all of the host's memory.
    """
    if width * height == 0:
        return
    pitches = pitch[0] or width, pitch[1] or width
    sizes = [(height - 1) * step + width for step in pitches]
    ends = [_where(target, sizes[0]), _where(source, sizes[1])]
    same = target == source and pitches[0] == pitches[1]
    if not same and memory.overlap((target, target + sizes[0]), (source, source + sizes[1])):
        raise RuntimeError(f"a copy to {target:#x} overlaps its source at {source:#x}: its result is left to chance")
    if kind != DEFAULT and _ENDS[kind] != tuple(int(end == "device") for end in ends):
        raise CUDARuntimeError(errors.INVALID_COPY, f"kind {kind} to {ends[0]} from {ends[1]} memory")
    steps = [(one, 1) for one in pitches]
    shape = height, width
    if "pageable" in ends and stream.capture is not None:
        raise CUDARuntimeError(errors.CAPTURE_UNSUPPORTED)
    kept = None
    if ends[1] == "pageable" and os.environ.get("FAKECUDA_ATS") != "1":
        kept = memory.array_at(source, shape, "u1", steps[1]).copy()

    def work() -> None:
        views = [
            memory.array_at(address, shape, "u1", step)
            if end == "pageable"
            else memory.working_view(address, shape, "u1", step)
            for address, end, step in zip((target, source), ends, steps, strict=True)
        ]
        views[0][...] = views[1] if kept is None else kept

    stream.give(work)
    if ends[0] == "pageable":
        stream.wait()


def copy_now(target: int, source: int, kind: int, nbytes: int) -> None:
    """cudaMemcpy: in the legacy default stream. The host waits, but not for what goes to a device from one, or from
    pageable memory."""
    stream = streams.stream_at(0)
    if _where(source, nbytes) == "pageable":
        stream.give(None)
        stream.wait()
    copy(stream, target, source, kind, nbytes)
    if "pinned" in (_where(source, nbytes), _where(target, nbytes)):
        stream.wait()


def fill(stream: Stream, target: int, value: int, nbytes: int) -> None:
    """cudaMemsetAsync."""

    def work() -> None:
        ctypes.memset(memory.working(target, nbytes), value, nbytes)

    if nbytes:
        stream.give(work)


def _where(address: int, nbytes: int) -> str:
    if memory.find(address):
        return "device"
    if memory.pinned(address, nbytes):
        return "pinned"
    if memory.partly_pinned(address, nbytes):
        raise CUDARuntimeError(errors.INVALID_VALUE, f"{nbytes} bytes at {address:#x} are partly registered")
    return "pageable"


_later: dict[int, deque[memory.Allocation]] = {}
"""Memory of each device that was given back by a destructor, which may run anywhere and so can't wait."""


def free(address: int) -> None:
    """cudaFree: all work of the device is done before."""
    allocation = memory.find(address)
    if allocation is None:
        raise CUDARuntimeError(errors.INVALID_VALUE, f"{address:#x}")
    streams.wait_for_device(allocation.device)
    memory.release(address)


def free_some_time(address: int) -> None:
    """The same for a destructor: as soon as one runs while the device has nothing to do."""
    allocation = memory.find(address)
    if allocation is not None:
        _later.setdefault(allocation.device, deque()).append(allocation)
    if streams.running():
        return
    for device, waiting in list(_later.items()):
        if not waiting or streams.has_work(device):
            continue
        for _ in range(len(waiting)):
            try:
                one = waiting.popleft()
            except IndexError:
                break  # another thread was here
            if memory.find(one.base) is one:  # and was not given back by its address, too
                memory.release(one.base)


def free_host(address: int) -> None:
    """cudaFreeHost: all work of the device is done before, but where a destructor can't wait."""
    wait_unless_running()
    memory.release_host(address)


def wait_unless_running() -> None:
    """Wait for all work of the device, except where a destructor can't wait."""
    if not streams.running():
        streams.wait_for_device(streams.device())
