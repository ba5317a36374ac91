"""Device memory of the ranks of one node, as each rank accesses it.

Ranks open each other's allocations once (CUDA IPC) and work in them as in their own, whether they share a device or
have one each.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast
from weakref import WeakSet

import numpy as np

from mpicoll.buffers.device import Device, DeviceArray, Export, view
from mpicoll.engine.core.arrays import do_nothing
from mpicoll.engine.executors.stream_order import release_memory
from mpicoll.errors import DeviceError
from mpicoll.transport.base import Transport

if TYPE_CHECKING:
    from mpicoll.engine.core.arena import Arena

MAX_OPEN = 256
"""Maximum number of allocations of each other rank that are kept open for a communicator; the one that its owner has
not used for longest is closed first."""

MAX_SUBSTITUTE_BYTES = 64 << 20
"""Bytes up to which a substitute for memory that can't be exported is kept for the next operation."""

_VIEWS = 4096
"""Maximum number of cached views of other ranks' memory."""

_MAX_BOUND = 256
"""Maximum number of collectives whose work on the device is kept, for each communicator."""

_PATTERN = 256
"""Bytes of the test pattern by which ranks detect whether they can access each other's memory."""

Location: TypeAlias = tuple[int, ...]
"""Number of an allocation, and an offset in it in bytes."""

NO_LOCATION: Location = (-1, 0)

open_lock = threading.Lock()
"""Lock held while allocations are opened, and while the list of known allocations changes."""


@dataclass(slots=True)
class _Allocation:
    """Allocation of another rank; `memory` is None before its first use, and after it was closed."""

    export: Export
    memory: DeviceArray | None = None


class PeerMemory:
    """Device memory of the ranks of one node, as this rank accesses it: one object for each communicator and device.

    Device memory that a rank frees returns to the device only when its peers close it: when the rank next lends them
    memory that is new to them, or when the communicator is freed. CUDA leaves the behaviour undefined if memory is
    freed while it is open in another process; no rank accesses it any more then.
    """

    def __init__(self, transport: Transport, arena: Arena, device: Device, devices: Sequence[str]) -> None:
        """`devices` are the identities of all ranks' devices."""
        self.device = device
        self.workers = [devices.index(one) for one in devices]
        """For each rank, the first rank on its device."""
        self._transport = transport
        self._rank = arena.rank
        # This rank's own allocations that the other ranks know, the most recently used last.
        self._published: dict[int, Export] = {}
        self._unpublished: dict[int, Export] = {}
        self._others: list[dict[int, _Allocation]] = [{} for _ in range(arena.size)]
        self._views: dict[tuple[int, int, int, int, np.dtype[Any]], DeviceArray] = {}
        # The work of repeated collectives, by the collective and the memory of all ranks. It keeps allocations open.
        self._bound: dict[tuple[Any, ...], Callable[[], None]] = {}
        # References that keep allocations open during the current operation.
        self._used: list[DeviceArray] = []
        self._substitutes: dict[int, DeviceArray] = {}
        self.follow_last: Callable[[], None] = do_nothing
        """Has the work that this thread submits next begin after all submitted collectives, which use substitutes."""
        with open_lock:
            register_opened(self)

    def check(self) -> str | None:
        """Return the reason why the ranks can't access each other's memory, the same text on all of them; None if they
        can. Collective at first use. The ranks test it: each rank reads what all ranks have written, by a copy and by a
        kernel."""
        pattern = secrets.token_bytes(_PATTERN)
        # The memory has to stay allocated until all ranks have read it.
        scratch, own = self._try_export(pattern)
        exchanged = [json.loads(one) for one in self._transport.allgather_text(json.dumps([own, pattern.hex()]))]
        failure = "" if any(isinstance(one, str) for one, _ in exchanged) else self._try_reach(exchanged)
        verdicts = self._transport.allgather_text(failure)
        del scratch
        failures = [one for one, _ in exchanged if isinstance(one, str)] + [one for one in verdicts if one]
        return failures[0] if failures else None

    def _try_export(self, pattern: bytes) -> tuple[DeviceArray | None, Any]:
        """Return scratch memory that contains `pattern`, and its export or the reason why it can't be exported."""
        device = self.device
        try:
            with device.working():
                scratch = device.empty(_PATTERN, np.dtype(np.uint8))
                host = device.allocate_pinned(_PATTERN)
                host[:] = np.frombuffer(pattern, np.uint8)
                device.copy(scratch, host)
            export = device.export(scratch)
        except Exception as error:  # noqa: BLE001  raised after the exchange, on all ranks
            return None, f"rank {self._rank} (of this node) can't use memory of {device.name}: {error}"
        if export is None:
            return None, f"rank {self._rank} (of this node): memory of {device.name} can't be opened by other processes"
        return scratch, _encode(export)

    def _try_reach(self, exchanged: Sequence[Any]) -> str:
        """Return the reason why this rank can't read the data of the other ranks; empty if it can."""
        device = self.device
        for rank, (written, pattern) in enumerate(exchanged):
            if rank == self._rank:
                continue
            export = _decode(written)
            pair = f"rank {self._rank} (of this node, {device.name}) can't read memory of rank {rank} ({export.device})"
            try:
                with device.working():
                    there = device.reach(export)[export.offset : export.offset + _PATTERN]
                    # Copies may succeed where kernels fail.
                    here = device.empty(_PATTERN, there.dtype)
                    device.fold("max", [there], [here], "uint8")
                    host = device.allocate_pinned(2 * _PATTERN)
                    device.copy(host[:_PATTERN], there)
                    device.copy(host[_PATTERN:], here)
            except Exception as error:  # noqa: BLE001  raised after the exchange, on all ranks
                return f"{pair}: {error}"
            if host.tobytes().hex() != 2 * pattern:
                return f"{pair}: it reads other data there"
        return ""

    # --- this rank's memory

    def export_buffer(self, which: int, array: Any) -> tuple[Any, Location]:
        """Return the location of `array` for the other ranks. If they can't access it, return substitute memory for one
        operation and for its buffer `which`. Raises DeviceError if they can't access that either."""
        if array is None or array.size == 0:
            return array, NO_LOCATION
        export = self.device.export(array)
        if export is None:
            array = self._get_substitute(which, array)
            export = self.device.export(array)
        if export is None:
            raise DeviceError(
                f"rank {self._rank} (of this node): memory of {self.device.name} can no longer be opened by other"
                " processes; use one allocator of device memory throughout the program"
            )
        number = export.number
        if number in self._published:
            self._published[number] = self._published.pop(number)
        else:
            self._unpublished[number] = export
        return array, (number, export.offset)

    def is_published(self, address: int, number: int) -> bool:
        """Return True if the other ranks know the allocation of that number, and `address` still lies in it."""
        published = self._published
        export = published.get(number)
        if export is None or not self.device.is_exported(address, number):
            return False
        del published[number]
        published[number] = export
        return True

    def _get_substitute(self, which: int, array: DeviceArray) -> DeviceArray:
        self.follow_last()
        nbytes, words = array.nbytes, np.dtype(np.uint8)
        memory = self._substitutes.get(which)
        if memory is None or memory.nbytes < nbytes:
            capacity = 1 << (nbytes - 1).bit_length()
            if capacity <= MAX_SUBSTITUTE_BYTES:
                memory = self._substitutes[which] = self.device.empty(capacity, words)
            else:
                memory = self.device.empty(nbytes, words)
        return cast(DeviceArray, memory[:nbytes].view(array.dtype))

    @property
    def has_unpublished(self) -> bool:
        """True if this rank lends memory of allocations that are unknown to the other ranks."""
        return bool(self._unpublished)

    def publish_exports(self) -> None:
        """Exchange new allocations. Collective, called when all ranks know that a rank has new ones."""
        gone = self._find_stale() if self._unpublished else []
        message = json.dumps([gone, [_encode(one) for one in self._unpublished.values()]])
        texts = self._transport.allgather_text(message)
        for number in gone:
            del self._published[number]
        self._published |= self._unpublished
        self._unpublished = {}
        with open_lock:
            for rank, text in enumerate(texts):
                lost, new = json.loads(text)
                if rank == self._rank or not (lost or new):
                    continue
                known = self._others[rank]
                for number in lost:
                    known.pop(number, None)
                for export in map(_decode, new):
                    known[export.number] = _Allocation(export)
                self._forget()

    def _find_stale(self) -> list[int]:
        """Return the announced allocations that were freed, and as many more as the limit OPEN requires."""
        gone = [number for number, one in self._published.items() if not self._is_alive(one)]
        left = [number for number in self._published if number not in gone]
        return gone + left[: max(0, len(left) + len(self._unpublished) - MAX_OPEN)]

    def _is_alive(self, export: Export) -> bool:
        now = self.device.export(view(self.device, export.address, (1,), np.dtype(np.uint8)))
        return now is not None and now.number == export.number

    # --- that of the others

    def get_view(self, rank: int, place: Location, start: int, count: int, dtype: np.dtype[Any]) -> DeviceArray:
        """Return `count` elements of another rank's buffer that begins at `place`, from element `start` on. They stay
        open until :meth:`end`."""
        number, offset = place
        begin = offset + start * dtype.itemsize
        key = rank, number, begin, count, dtype
        part = self._views.get(key)
        if part is None:
            # A thread that closes the allocation meanwhile must find the view, which would keep it open.
            with open_lock:
                if len(self._views) >= _VIEWS:
                    self._forget()
                memory = self._memory(rank, number)
                part = self._views[key] = memory[begin : begin + count * dtype.itemsize].view(dtype)
        self._used.append(part)
        return part

    def get_bound(self, key: tuple[Any, ...], bind: Callable[[], Callable[[], None]]) -> Callable[[], None]:
        """Return what `bind` returns, or has returned for this `key` since the last allocation was closed. It keeps
        allocations open, so it has to be referenced until its work on the device has completed."""
        bound = self._bound
        work = bound.get(key)
        if work is None:
            if len(bound) >= _MAX_BOUND:
                bound.clear()
            work = bound[key] = bind()
        return work

    def end(self) -> None:
        """End the current operation, after its work on the device has completed."""
        self._used.clear()

    def take_used(self) -> list[DeviceArray]:
        """End the current operation before its work on the device has completed, and return what has to be referenced
        until then."""
        used, self._used = self._used, []
        return used

    def copy_if_remote(self, rank: int, place: Location, array: DeviceArray) -> DeviceArray:
        """Return `array`, which lies at `place`, or a copy of it if it is on another device than this rank's memory."""
        if self._others[rank][place[0]].export.device == self.device.identity:
            return array
        here = self.device.empty(array.size, array.dtype)
        self.device.copy(here, array)
        return here

    def _memory(self, rank: int, number: int) -> DeviceArray:
        allocation = self._others[rank][number]
        if allocation.memory is None:
            allocation.memory = open_allocation(self.device, allocation.export, self._transport.timeout)
        return allocation.memory

    def close(self, process: str, which: Callable[[Export], bool]) -> None:
        """Close the allocations of `process` that satisfy `which`; those in use by an operation close when it has
        ended. They are opened again when they are needed."""
        for allocations in self._others:
            for one in allocations.values():
                if one.memory is not None and one.export.process == process and which(one.export):
                    one.memory = None
                    self._forget()

    def _forget(self) -> None:
        """Drop all that keeps allocations open beyond an operation."""
        self._views.clear()
        # Another dictionary: what a thread binds meanwhile is not to be found any more.
        self._bound = {}


def _overlap(one: Export, other: Export) -> bool:
    return one.address < other.address + other.nbytes and other.address < one.address + one.nbytes


class _Opened(Protocol):
    """An owner of open allocations of other processes."""

    def close(self, process: str, which: Callable[[Export], bool]) -> None: ...


_instances: WeakSet[_Opened] = WeakSet()
"""Owners of open allocations, which may be the same ones, of all communicators of this process."""


def register_opened(opened: _Opened) -> None:
    """Have :func:`open_allocation` close what is in its way among what `opened` keeps open. The lock is held."""
    _instances.add(opened)


def open_allocation(device: Device, export: Export, seconds: float) -> DeviceArray:
    """Open an allocation of another process; the lock is held. Raises DeviceError if it can't be opened.

    Allocations that overlap it are closed first, because the system may refuse to open an address where an allocation
    is open that its owner has freed. Waits at most so many `seconds` for the collectives of each communicator that use
    such allocations.
    """
    for opened in _instances:
        opened.close(export.process, lambda old: old.number != export.number and _overlap(old, export))
    try:
        return device.reach(export)
    except DeviceError:
        # Small allocations lie in larger ones of the system, and the system opens the latter. Collectives that
        # streams order keep open what they use.
        release_memory(seconds)
        for opened in _instances:
            opened.close(export.process, lambda old: True)
        return device.reach(export)


def _encode(export: Export) -> list[Any]:
    """Return `export` as JSON values."""
    return [
        export.process,
        export.device,
        export.number,
        export.handle.hex(),
        export.address,
        export.nbytes,
        export.offset,
    ]


def _decode(written: Sequence[Any]) -> Export:
    process, device, number, handle, address, nbytes, offset = written
    return Export(process, device, number, bytes.fromhex(handle), address, nbytes, offset)
