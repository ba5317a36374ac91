"""Communication of device memory by way of the host: MPI's collectives, schedules, and single messages.

Messages of schedules are sent directly from device memory where the MPI library supports it. Otherwise they pass
through page-locked memory in pieces: while one piece is exchanged, the previous one is copied to the device and the
next one to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpicoll.buffers.buffer import Buffer
from mpicoll.buffers.device import Device, DeviceArray, Event, empty_beside
from mpicoll.buffers.dtypes import Array
from mpicoll.buffers.streams import record_events
from mpicoll.transport import cuda_awareness
from mpicoll.transport.base import Message, Transport

_NOTHING = np.empty(0, np.uint8)

PIECE = 1 << 20
"""Bytes of a message that pass through page-locked memory at a time."""

MIN_ANNOUNCED_BYTES = 1 << 16
"""Bytes from which on a message may be announced, and be copied from memory of its sender; smaller ones pass through
the host, which costs less."""

ANNOUNCEMENT_BYTES = 256
"""Size of an announcement, which comes in place of a larger message."""


class SynchronizedNative:
    """MPI's own collectives, each called after all work queued on the device is done."""

    def __init__(self, native: Any, device: Device) -> None:
        self._native = native
        self._device = device

    def reduce(self, source: Array, target: Array | None, op: str, root: int) -> None:
        """Call MPI's reduce, but never in place at a root other than rank 0, where some libraries fail."""
        if source is target and root:
            source = empty_beside(source, source.size)
            np.copyto(source, target)
        self._device.synchronize()
        self._native.reduce(source, target, op, root)

    def __getattr__(self, name: str) -> Callable[..., None]:
        method: Callable[..., None] = getattr(self._native, name)

        def call(*args: Any) -> None:
            self._device.synchronize()
            method(*args)

        return call


class DirectExchanger:
    """Exchange of device memory through an MPI library that supports it."""

    def __init__(self, transport: Transport, device: Device) -> None:
        self._transport = transport
        self._device = device

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message], tag: int) -> None:
        self._device.synchronize()
        self._transport.exchange(sends, recvs, tag)


class StagedExchanger:
    """Exchange of device memory through page-locked memory, in pieces.

    Both ends cut a message alike, and step k of a rank has piece k of each of its messages: so each step is a separate
    exchange. Piece k + 1 is copied to the host, and piece k - 1 to the device, while piece k is exchanged; so two
    pieces of page-locked memory for each message of a round are enough.
    """

    def __init__(self, transport: Transport, device: Device) -> None:
        self._transport = transport
        self._device = device
        self._memory: dict[tuple[str, int, int], Array] = {}
        # Copies to the device that were pending at the end of the last exchange.
        self._uploads: list[Event] = []

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message], tag: int) -> None:
        steps = max((-(-memory.size // PIECE) for _, memory in (*sends, *recvs)), default=0) or 1
        for event in self._uploads:
            event.wait()
        self._uploads = []
        downloads = [self._copy(sends, "sends", 0)]
        for step in range(steps):
            if step + 1 < steps:
                downloads.append(self._copy(sends, "sends", step + 1))
            downloads[step].wait()
            if step > 1:
                self._uploads[step - 2].wait()
            self._transport.exchange(
                self._get_pieces(sends, "sends", step), self._get_pieces(recvs, "recvs", step), tag
            )
            self._uploads.append(self._copy(recvs, "recvs", step))

    def _copy(self, messages: Sequence[Message], which: str, step: int) -> Event:
        """Copy piece `step` of all messages to the host if they are sends, otherwise to the device."""
        for i, (_, memory) in enumerate(messages):
            piece = memory[step * PIECE : (step + 1) * PIECE]
            if isinstance(memory, DeviceArray) and piece.size:
                place = self._get_page_locked(which, i, step, piece.size)
                np.copyto(*((place, piece) if which == "sends" else (piece, place)))
        return self._device.record_event()

    def _get_pieces(self, messages: Sequence[Message], which: str, step: int) -> list[Message]:
        """Return piece `step` of each message that has one: its page-locked memory, or the piece itself if it is on the
        host."""
        result: list[Message] = []
        for i, (peer, memory) in enumerate(messages):
            piece = memory[step * PIECE : (step + 1) * PIECE]
            if isinstance(memory, DeviceArray) and piece.size:
                result.append((peer, self._get_page_locked(which, i, step, piece.size)))
            elif piece.size or (step == 0 and not memory.size):
                result.append((peer, _NOTHING if isinstance(memory, DeviceArray) else piece))
        return result

    def _get_page_locked(self, which: str, i: int, step: int, size: int) -> Array:
        """Return page-locked memory for a piece of message `i`."""
        key = which, i, step & 1
        memory = self._memory.get(key)
        if memory is None or memory.size < size:
            memory = self._memory[key] = self._device.allocate_pinned(size)
        return memory[:size]


def sends_device_memory(checked: bool) -> bool:
    """Return True if a message between two ranks is sent or received directly in device memory. The result may differ
    between ranks."""
    return not checked and cuda_awareness.find_cuda_support(None).send


def copy_to_host(buffer: Buffer, device: Device) -> Array:
    """Return the elements of `buffer`, which lies on `device`, as bytes in page-locked memory."""
    memory = device.allocate_pinned(buffer.array.nbytes)
    with device.working(record_events(buffer)):
        np.copyto(memory.view(buffer.array.dtype).reshape(buffer.array.shape), buffer.array)
    return memory


class DeviceReceive:
    """Receive memory for a message to `buffer`, which lies on `device`: `as_bytes` is to be filled, then stored. It is
    page-locked memory of the host; or the memory of `buffer` itself, if messages are received `direct` into it.

    `array` is the memory of `buffer`, which may be written to when `events` are done.
    """

    __slots__ = ("_device", "_direct", "array", "as_bytes", "events")

    def __init__(self, buffer: Buffer, device: Device, *, direct: bool) -> None:
        array = buffer.array
        self.array = array
        self._device = device
        self._direct = direct and array.flags.c_contiguous
        # The caller's pending work may still read the buffer.
        self.events = record_events(buffer)
        if self._direct:
            with device.working(self.events):
                self.as_bytes: Array = array.reshape(-1).view(np.uint8)
        else:
            self.as_bytes = device.allocate_pinned(array.nbytes)

    def store(self) -> None:
        """Copy the received message to the buffer."""
        if not self._direct:
            with self._device.working(self.events):
                np.copyto(self.array, self.as_bytes.view(self.array.dtype).reshape(self.array.shape))
