"""Messages between ranks of one node from device memory to device memory, by way of memory that the receiver opens.

The sender copies the data to memory of its device that other processes can open, and sends an announcement of where it
lies in place of the message: so messages match as all others do, and the sender waits for no receiver. The receiver
copies the data to its place, and marks it as received in a word of shared host memory; then the sender uses the memory
for another message. Messages for which no memory is left pass through the host.

Both copies are complete, for the host, when the operation is: the streams of the caller's arrays are waited for before.
"""

from __future__ import annotations

import atexit
import os
import secrets
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast
from zlib import crc32

import numpy as np

from mpicoll.buffers.buffer import Buffer
from mpicoll.buffers.device import Device, DeviceArray, Export, StreamEvent
from mpicoll.buffers.dtypes import Array
from mpicoll.buffers.streams import record_events
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.core.registry import Registry
from mpicoll.engine.executors.peer_memory import open_allocation, open_lock, register_opened
from mpicoll.engine.executors.staging import ANNOUNCEMENT_BYTES, MIN_ANNOUNCED_BYTES
from mpicoll.errors import CommunicationError, DeviceError, MpicollError
from mpicoll.logs import get_logger
from mpicoll.transport.base import Memory, Transport
from mpicoll.transport.waiting import Backoff

if TYPE_CHECKING:
    from mpicoll.engine.core.arena import Arena

MAX_BYTES = 256 << 20
"""Bytes of device memory, at most, for the messages that a rank has announced and that were not received yet."""

MIN_SHARED_BYTES = 2 << 20
"""Bytes from which on a message is announced to a rank on the same device: processes take turns on a device, and that
costs as much as to copy so many bytes through the host. 2 ranks on an H100, round trip by announcements and through
the host, in microseconds: 981 and 594 for 64 KiB, 932 and 958 for 1 MiB, 1071 and 6331 for 16 MiB."""

_SLOTS = 32
"""Messages, at most, that a rank has announced and that were not received yet."""

_LINE = 64
"""Bytes of a cache line. Each word has one of its own."""

_RECEIVED, _NUMBER, _COUNT, _LOW = 0, 1, 2, 3
_ROUTE = slice(5, 8)
_DESCRIPTION = slice(_NUMBER, 8)
"""Words of a line. The receiver of a message writes its number when it has received it. The sender writes of the
message that it has announced last: its number in the slot, its number among all, its bytes as two words, its route."""

Route: TypeAlias = "tuple[int, int, int]"
"""Receiver of a message, as a rank of the job, its tag, and 32 bits that identify the communicator."""

_FORMAT = struct.Struct("<16s4IQ16sQ64s3Q")
_KEY_BYTES = 16

_EXIT = 5.0
"""Seconds within which the receivers of messages take them, when the sender's process ends."""


class _Slot:
    """Memory for one message, which is free again when the word of the receiver is `number`."""

    __slots__ = ("export", "index", "memory", "number", "reserved")

    def __init__(self, index: int) -> None:
        self.index = index
        self.number = 0
        # While a thread writes to the memory.
        self.reserved = False
        self.memory: DeviceArray | None = None
        self.export: Export | None = None


class PeerMessages:
    """Messages of this rank to and from the ranks of one node. Created by :func:`create`, collectively; kept as long as
    any communicator of the job, since messages of all of them pass here."""

    def __init__(self, transport: Transport, arena: Arena, device: Device, devices: Sequence[str]) -> None:
        self.device = device
        self.members = tuple(transport.members)
        self._devices = devices
        self._rank = arena.rank
        self._transport = transport
        # A line of words for each slot of each rank.
        size = arena.size * _SLOTS * _LINE
        self._memory = transport.share(size if arena.rank == 0 else 0)[0]
        lines = self._memory[:size].view(np.uint32).reshape(arena.size, _SLOTS, _LINE // 4)
        self._received, self._lines = lines[:, :, _RECEIVED], lines
        self._count = 0
        self._slots = [_Slot(index) for index in range(_SLOTS)]
        self._lock = threading.Lock()
        # Of other ranks: by rank and slot, the number of the allocation, and its memory.
        self._opened: dict[tuple[int, int], tuple[Export, DeviceArray]] = {}
        self.key = b""

    # --- sender

    def reaches(self, device: Device, member: int) -> bool:
        """Return True if messages from `device` to that rank of the job pass here."""
        return device is self.device and member in self.members and member != self.members[self._rank]

    def get_min_bytes(self, member: int) -> int:
        """Return the bytes from which on messages to that rank of the job pass here."""
        shared = self._devices[self.members.index(member)] == self._devices[self._rank]
        return MIN_SHARED_BYTES if shared else MIN_ANNOUNCED_BYTES

    def connects(self, members: Sequence[int], devices: Sequence[str]) -> bool:
        """Return True if messages between these ranks of the job, on these devices, pass here: on all of them alike."""
        there = dict(zip(self.members, self._devices, strict=True))
        return all(there.get(member) == device for member, device in zip(members, devices, strict=True))

    def send(self, array: DeviceArray, events: Sequence[StreamEvent], route: Route) -> Memory | None:
        """Return the announcement of a message, the elements of `array` when `events` are done; None if there is no
        memory for it."""
        nbytes = array.nbytes
        slot = self._reserve(nbytes)
        if slot is None:
            return None
        try:
            with self.device.working(events):
                if slot.memory is None:
                    try:
                        slot.memory = self.device.empty(_round(nbytes), np.dtype(np.uint8))
                    except MemoryError:  # what the program needs may fill the device
                        return None
                    slot.export = self.device.export(slot.memory)
                export = slot.export
                if export is None:
                    slot.memory = None
                    return None
                target = slot.memory[:nbytes].view(array.dtype).reshape(array.shape)
                np.copyto(target, array)
            number = slot.number % 0xFFFFFFFF + 1
            with self._lock:
                self._count += 1
                described = number, self._count & 0xFFFFFFFF, nbytes & 0xFFFFFFFF, nbytes >> 32, *route
                self._lines[self._rank, slot.index, _DESCRIPTION] = described
            slot.number = number
        finally:
            slot.reserved = False
        _keep(self)
        written = _FORMAT.pack(
            self.key,
            self._rank,
            slot.index,
            slot.number,
            0,
            nbytes,
            bytes.fromhex(export.process),
            export.number,
            export.handle,
            export.address,
            export.nbytes,
            export.offset,
        )
        return np.frombuffer(written.ljust(ANNOUNCEMENT_BYTES, b"\0"), np.uint8)

    def _reserve(self, nbytes: int) -> _Slot | None:
        """Return a slot whose memory is free, and large enough or None; None if there is no such slot."""
        received = self._received[self._rank]
        with self._lock:
            free = [one for one in self._slots if not one.reserved and one.number == received[one.index]]
            fitting = [one for one in free if one.memory is not None and one.memory.nbytes >= nbytes]
            if fitting:
                slot = min(fitting, key=_get_capacity)
            else:
                if not free:
                    return None
                # Larger memory takes the place of the largest that is too small.
                slot = max(free, key=_get_capacity)
                used = sum(map(_get_capacity, self._slots)) - _get_capacity(slot)
                if used + _round(nbytes) > MAX_BYTES:
                    return None
                slot.memory = slot.export = None
            slot.reserved = True
            return slot

    @property
    def is_idle(self) -> bool:
        """True if all messages that this rank has announced were received."""
        return not self._list_receivers()

    def _list_receivers(self) -> list[int]:
        """Return the ranks that have not received all messages that this rank has announced."""
        lines = self._lines[self._rank]
        waiting = lines[lines[:, _RECEIVED] != lines[:, _NUMBER]]
        return sorted({self.members.index(int(line[_ROUTE][0])) for line in waiting})

    def drain(self, seconds: float) -> bool:
        """Wait until all messages that this rank has announced were received, at most for that many seconds. Return
        True if they were."""
        end = time.monotonic() + seconds
        pause = Backoff()
        while receivers := self._list_receivers():
            try:
                self._transport.check_peers(0.0, receivers)
            except CommunicationError:
                return False
            if time.monotonic() > end:
                return False
            if not pause.yield_core():
                time.sleep(1e-3)
        return True

    # --- receiver

    def find_nbytes(self, source: int, tag: int, group: int) -> int | None:
        """Return the bytes of the first message that rank `source` of the job has announced to this one with this tag,
        in a communicator, and that was not received yet; None if there is none."""
        if source not in self.members:
            return None
        lines = self._lines[self.members.index(source)]
        member = self.members[self._rank]
        waiting = [
            (int(line[_COUNT]), int(line[_LOW]) | int(line[_LOW + 1]) << 32)
            for line in lines[lines[:, _RECEIVED] != lines[:, _NUMBER]]
            if tuple(line[_ROUTE]) == (member, tag, group)
        ]
        return min(waiting)[1] if waiting else None

    def read(self, data: Memory) -> Announced:
        """Return the message that is announced by `data`."""
        _, sender, index, number, _, nbytes, process, allocation, handle, address, size, offset = _FORMAT.unpack(
            data.tobytes()[: _FORMAT.size]
        )
        export = Export(process.hex(), self._devices[sender], allocation, handle, address, size, offset)
        return Announced(self, sender, index, number, nbytes, export)

    def find_memory(self, sender: int, index: int, export: Export) -> DeviceArray:
        """Return the memory of a slot of another rank. Raises DeviceError if it can't be opened."""
        with self._lock:
            found = self._opened.get((sender, index))
            if found is not None and found[0].number == export.number:
                return found[1]
            # Closed first: the system may give its address to what takes its place.
            self._opened.pop((sender, index), None)
            del found
        try:
            with open_lock:
                memory = open_allocation(self.device, export, self._transport.timeout)
        except DeviceError as error:
            raise DeviceError(
                f"rank {self._rank} of {len(self.members)} (of this node): the message of rank {sender} can't be read:"
                f" {error}"
            ) from error
        with self._lock:
            self._opened[sender, index] = export, memory
        return memory

    def close(self, process: str, which: Any) -> None:
        """Close the allocations of `process` that satisfy `which`, as :meth:`PeerMemory.close` does."""
        with self._lock:
            for key, (export, _) in list(self._opened.items()):
                if export.process == process and which(export):
                    del self._opened[key]

    def mark_received(self, sender: int, index: int, number: int) -> None:
        """Give the memory of a slot back to its sender."""
        self._received[sender, index] = number


@dataclass(slots=True)
class Announced:
    """A message whose data lies in memory of its sender, until :meth:`drop` or :meth:`copy_to`."""

    _messages: PeerMessages
    _sender: int
    _index: int
    _number: int
    nbytes: int
    _export: Export

    def drop(self) -> None:
        """Give the memory back to the sender."""
        self._messages.mark_received(self._sender, self._index, self._number)

    def copy_to(self, target: Array, events: Sequence[StreamEvent] = ()) -> None:
        """Copy the message to `target`, an array of any layout on the host or on a device, when `events` are done, and
        give the memory back to the sender. Raises DeviceError if it can't be opened."""
        messages, export = self._messages, self._export
        try:
            whole = messages.find_memory(self._sender, self._index, export)
            begin = export.offset
            source = whole[begin : begin + self.nbytes].view(target.dtype).reshape(target.shape)
            on = target.on if isinstance(target, DeviceArray) else messages.device
            with on.working(events):
                if on is not messages.device and not target.flags.c_contiguous:
                    # Kernels of this device can't read what is open for another one; plain copies can.
                    fetched = on.empty(source.size, source.dtype).reshape(source.shape)
                    on.copy(fetched, source)
                    source = fetched
                on.copy(target, source)
        finally:
            self.drop()


def _get_capacity(slot: _Slot) -> int:
    return 0 if slot.memory is None else slot.memory.nbytes


def _round(nbytes: int) -> int:
    """Return the bytes of memory for a message: sizes that differ little share memory."""
    return 1 << (nbytes - 1).bit_length()


def create(comm: CommunicatorCore, arena: Arena, device: Device, devices: Sequence[str]) -> PeerMessages | str:
    """Return the messages between the ranks of `comm`, which have opened each other's memory; or the reason why they
    pass through the host, the same on all ranks. Collective. `devices` are the identities of the ranks' devices."""
    transport = comm.transport
    failure, created = "", None
    try:
        created = PeerMessages(transport, arena, device, devices)
    except MpicollError as error:
        failure = f"rank {arena.rank} (of this node): {error}"
    proposed = secrets.token_bytes(_KEY_BYTES).hex()
    answers = transport.allgather_text(f"{proposed} {failure}")
    failures = [one.partition(" ")[2] for one in answers if one.partition(" ")[2]]
    if failures or created is None:
        return failures[0]
    created.key = bytes.fromhex(answers[0].partition(" ")[0])
    comm.registry.add_peer_messages(created)
    with open_lock:
        register_opened(created)
    # No rank announces a message before all know how to read it.
    transport.allgather_text("")
    return created


def are_connected(comm: CommunicatorCore, devices: Sequence[str]) -> bool:
    """Return True if messages between the ranks of `comm`, on devices of these identities, pass through what has been
    created before. The same on all ranks."""
    return any(cast(PeerMessages, one).connects(comm.members, devices) for one in comm.registry.peer_messages)


def find_sender(comm: CommunicatorCore, device: Device, dest: int) -> PeerMessages | None:
    """Return what messages from `device` to rank `dest` of `comm` pass through; None if it is the host."""
    member = comm.members[dest]
    for one in comm.registry.peer_messages:
        if one.reaches(device, member):
            return cast(PeerMessages, one)
    return None


def announce(comm: CommunicatorCore, buffer: Buffer, device: Device, dest: int, tag: int) -> Memory | None:
    """Return the announcement of a message of `buffer`, which lies on `device`, to rank `dest` of `comm`; None if it
    passes through the host."""
    messages = find_sender(comm, device, dest)
    if messages is None or buffer.array.nbytes < messages.get_min_bytes(comm.members[dest]):
        return None
    assert isinstance(buffer.array, DeviceArray)
    return messages.send(buffer.array, record_events(buffer), (comm.members[dest], tag, _identify(comm)))


def find_announced_nbytes(comm: CommunicatorCore, source: int, tag: int) -> int | None:
    """Return the bytes of the message whose announcement from rank `source` of `comm` is the next to be received with
    this tag; None if there is none."""
    for one in comm.registry.peer_messages:
        nbytes = cast(PeerMessages, one).find_nbytes(comm.members[source], tag, _identify(comm))
        if nbytes is not None:
            return nbytes
    return None


def _identify(comm: CommunicatorCore) -> int:
    return crc32(comm.queue.group.key.encode())


def find_announced(registry: Registry, data: Memory) -> Announced | None:
    """Return the message that is announced by `data`, the bytes of a received message; None if it is the message
    itself."""
    if data.size == ANNOUNCEMENT_BYTES and registry.peer_messages:
        key = data[:_KEY_BYTES].tobytes()
        for one in registry.peer_messages:
            if one.key == key:
                return cast(PeerMessages, one).read(data)
    return None


_unreceived: set[PeerMessages] = set()
"""Those that have announced messages which may not have been received yet: their memory has to live."""

_registering = threading.Lock()
_registered: list[int] = []
"""The process that waits for receivers when it ends, not a child of fork."""


def _keep(messages: PeerMessages) -> None:
    """Keep the memory of what was announced until it has been received, also when the process ends."""
    with _registering:
        for one in [one for one in _unreceived if one is not messages and one.is_idle]:
            _unreceived.discard(one)
        _unreceived.add(messages)
        if not _registered:
            # Registered after the exit of MPI, hence called before it.
            atexit.register(_drain)
            _registered.append(os.getpid())


def _drain() -> None:
    end = time.monotonic() + _EXIT
    for one in list(_unreceived) if os.getpid() in _registered else ():
        if not one.drain(end - time.monotonic()):
            get_logger().warning("messages from memory of %s were not received when the program ended", one.device.name)
