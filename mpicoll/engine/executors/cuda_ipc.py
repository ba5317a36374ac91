"""Collectives of the ranks of one node on device memory that they access directly.

Ranks open each other's allocations once (CUDA IPC) and work in them as in their own, whether they share a device or
have one each. In an operation the ranks first exchange the locations of their buffers; then each rank works in the
memory of the others; after a final synchronisation no rank accesses the memory of the others any more.

:meth:`Arena.sync` waits for the device before it releases the other ranks: the data that they read has been written by
then.

Operands are combined in the order of ranks, each element by one rank: results have the same bits on every rank and in
every run.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast
from weakref import WeakSet

import numpy as np

from mpicoll.buffers.device import Device, DeviceArray, Export, view
from mpicoll.buffers.dtypes import Array
from mpicoll.buffers.ops import Fold
from mpicoll.engine.core.arrays import displacements
from mpicoll.engine.executors.collective_spec import CollectiveSpec, Program
from mpicoll.engine.executors.slots import Move, get_share_offsets, make_moves, make_own_copy
from mpicoll.errors import DeviceError
from mpicoll.transport.base import Transport

if TYPE_CHECKING:
    from mpicoll.engine.core.arena import Arena

COLLECTIVES = ("allreduce", "reduce", "reduce_scatter", "bcast", "allgather", "gather", "scatter", "alltoall")
"""Collectives that :func:`bind` supports."""

MAX_OPEN = 256
"""Maximum number of allocations of each other rank that are kept open for a communicator; the one that its owner has
not used for longest is closed first."""

MAX_SUBSTITUTE_BYTES = 64 << 20
"""Bytes up to which a substitute for memory that can't be exported is kept for the next operation."""

_VIEWS = 4096
"""Maximum number of cached views of other ranks' memory."""

_PATTERN = 256
"""Bytes of the test pattern by which ranks detect whether they can access each other's memory."""

Location: TypeAlias = tuple[int, ...]
"""Number of an allocation, and an offset in it in bytes."""

_NO_LOCATION: Location = (-1, 0)

_SOURCE, _TARGET = 0, 1

_open_lock = threading.Lock()
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

    def __init__(self, transport: Transport, arena: Arena, device: Device) -> None:
        self.device = device
        self._transport = transport
        self._rank = arena.rank
        # This rank's own allocations that the other ranks know, the most recently used last.
        self._published: dict[int, Export] = {}
        self._unpublished: dict[int, Export] = {}
        self._others: list[dict[int, _Allocation]] = [{} for _ in range(arena.size)]
        self._views: dict[tuple[int, int, int, int, np.dtype[Any]], DeviceArray] = {}
        # References that keep allocations open during the current operation.
        self._used: list[DeviceArray] = []
        self._substitutes: dict[int, DeviceArray] = {}
        with _open_lock:
            _instances.add(self)

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
            return array, _NO_LOCATION
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

    def _get_substitute(self, which: int, array: DeviceArray) -> DeviceArray:
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
        with _open_lock:
            for rank, text in enumerate(texts):
                lost, new = json.loads(text)
                if rank == self._rank or not (lost or new):
                    continue
                known = self._others[rank]
                for number in lost:
                    known.pop(number, None)
                for export in map(_decode, new):
                    known[export.number] = _Allocation(export)
                self._views.clear()

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
            with _open_lock:
                if len(self._views) >= _VIEWS:
                    self._views.clear()
                memory = self._memory(rank, number)
                part = self._views[key] = memory[begin : begin + count * dtype.itemsize].view(dtype)
        self._used.append(part)
        return part

    def end(self) -> None:
        """End the current operation, after its work on the device has completed."""
        self._used.clear()

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
            allocation.memory = self._open(allocation.export)
        return allocation.memory

    def _open(self, export: Export) -> DeviceArray:
        """Open an allocation. Allocations that overlap it are closed first, because the system may refuse to open an
        address where an allocation is open that its owner has freed."""
        for peers in _instances:
            peers.close(export.process, lambda old: old.number != export.number and _overlap(old, export))
        try:
            return self.device.reach(export)
        except DeviceError:
            # Small allocations lie in larger ones of the system, and the system opens the latter.
            for peers in _instances:
                peers.close(export.process, lambda old: True)
            return self.device.reach(export)

    def close(self, process: str, which: Callable[[Export], bool]) -> None:
        """Close the allocations of `process` that satisfy `which`; those in use by an operation close when it has
        ended. They are opened again when they are needed."""
        for allocations in self._others:
            for one in allocations.values():
                if one.memory is not None and one.export.process == process and which(one.export):
                    one.memory = None
                    self._views.clear()


def _overlap(one: Export, other: Export) -> bool:
    return one.address < other.address + other.nbytes and other.address < one.address + one.nbytes


_instances: WeakSet[PeerMemory] = WeakSet()
"""Peers of all communicators of this process, which may have opened the same allocations."""


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


def bind(arena: Arena, peers: PeerMemory, spec: CollectiveSpec) -> Program:
    """Return a function that carries out `spec` on device memory, by :meth:`Arena.run` inside of ``device.working``,
    each time that it is called.

    For vectors of n bytes on P ranks, in traffic of device memory, with two synchronisations each:

    * allreduce: each rank combines its share of all sources and writes it to all targets, in one device operation: n
      read and n written per rank. An element is read and written by one rank alone, which reads it from all sources
      before it writes it to any target; so the targets may be the sources.
    * reduce: as allreduce, but to the root's target alone: n read and n/P written per rank.
    * reduce_scatter: each rank combines its own block of all sources: n read and n/P written per rank.
    * bcast, allgather, gather, scatter, alltoall: each rank fetches its result: as much read as written.

    Reductions by an elementwise function of the caller need other methods where several ranks get the result: for
    allreduce each rank combines its share to its own target, and after one more synchronisation fetches the rest, 2n
    read and n written per rank, plus the traffic of the function itself. For reduce the root combines the whole vector.

    Memory that other processes can't open is copied to and from substitute memory: n more read and n more written.
    """
    collective = _PeerCollective(arena, peers, spec)
    return collective.run, collective.steps


class _PeerCollective:
    """Collective on device memory, as one rank carries it out."""

    def __init__(self, arena: Arena, peers: PeerMemory, spec: CollectiveSpec) -> None:
        self._arena = arena
        self._peers = peers
        self._spec = spec
        self._fused = None if spec.fold is None else spec.fold.fused
        rank, size = arena.rank, arena.size
        moves = make_moves(spec, rank, size) if spec.fold is None else []
        self._copy_own = make_own_copy(moves, rank)
        # The elements that this rank combines
        shares = get_share_offsets(spec.counts[0], size, spec.dtype.itemsize)
        self._share_range = shares[rank], shares[rank + 1]
        everywhere = spec.collective == "allreduce"
        if spec.collective == "reduce_scatter":
            ends = displacements(spec.counts)
            self._share_range = ends[rank], ends[rank + 1]
        elif self._fused is None and not everywhere:
            self._share_range = 0, spec.counts[0] if rank == spec.root else 0
        if everywhere and self._fused is None:
            moves = [Move(peer, low, low, shares[peer + 1] - low) for peer, low in enumerate(shares[:-1])]
        # The next rank first, so that not all ranks read from the same one.
        theirs = [one for one in moves if one.peer != rank and one.count]
        self._incoming_moves = sorted(theirs, key=lambda one: (one.peer - rank) % size)
        self.steps = 3 if everywhere and self._fused is None else 2
        # Other ranks write to the memory, or read it.
        self._exports_target = everywhere or (
            spec.collective == "reduce" and rank == spec.root and self._fused is not None
        )

    def run(self, source: Any, target: Any) -> None:
        """Carry out the collective on this rank's flat input and output."""
        try:
            self._run(source, target)
        except BaseException:
            # A failed rank ends the operation for the other ranks, which may free their memory then.
            self._peers.device.synchronize()
            raise
        finally:
            self._peers.end()

    def _run(self, source: Any, target: Any) -> None:
        arena, peers = self._arena, self._peers
        exported, at = peers.export_buffer(_SOURCE, source)
        if exported is not source:
            peers.device.copy(exported, source)
        result, to = target, _NO_LOCATION
        if self._exports_target:
            # In place, both buffers have the same substitute.
            result, to = (
                (exported, at) if _address(target) == _address(source) else peers.export_buffer(_TARGET, target)
            )
        arena.post(peers.has_unpublished, *at, *to)
        arena.sync()
        exchanged = arena.read_posted(5)
        if any(news for news, *_ in exchanged):
            peers.publish_exports()
        sources, targets = [one[1:3] for one in exchanged], [one[3:5] for one in exchanged]
        if self._spec.fold is None:
            self._fetch(sources, result)
            self._copy_own(exported, result)
        else:
            self._reduce(self._spec.fold, sources, targets, exported, result)
        arena.sync()
        if self._exports_target and result is not target and result is not source:
            peers.device.copy(target, result)

    def _fetch(self, places: Sequence[Location], target: Any) -> None:
        peers, dtype = self._peers, self._spec.dtype
        for one in self._incoming_moves:
            there = peers.get_view(one.peer, places[one.peer], one.start, one.count, dtype)
            peers.device.copy(target[one.to : one.to + one.count], there)

    def _reduce(
        self, fold: Fold, sources: Sequence[Location], targets: Sequence[Location], source: Array, target: Any
    ) -> None:
        spec, peers = self._spec, self._peers
        low, high = self._share_range
        everywhere = spec.collective == "allreduce"
        if low < high:
            parts = self._get_operands(sources, source)
            if self._fused is None:
                fold(parts, target[low:high] if everywhere else target)
            else:
                op, dtype = self._fused
                peers.device.fold(op, parts, self._get_targets(targets, target), dtype)
        if everywhere and self._fused is None:
            self._arena.sync()
            self._fetch(targets, target)

    def _get_operands(self, places: Sequence[Location], own: Array) -> list[Any]:
        """Return the elements of all ranks' inputs that this rank combines."""
        low, high = self._share_range
        parts: list[Any] = []
        for rank, place in enumerate(places):
            if rank == self._arena.rank:
                parts.append(own[low:high])
                continue
            part = self._peers.get_view(rank, place, low, high - low, self._spec.dtype)
            # Functions of the caller's libraries take no arrays of several devices.
            parts.append(self._peers.copy_if_remote(rank, place, part) if self._fused is None else part)
        return parts

    def _get_targets(self, places: Sequence[Location], own: Any) -> list[Any]:
        """Return the targets for the elements that this rank combines."""
        spec, rank = self._spec, self._arena.rank
        low, high = self._share_range
        if spec.collective == "reduce_scatter":
            return [own]
        receivers = [spec.root] if spec.collective == "reduce" else range(self._arena.size)
        return [
            own[low:high] if one == rank else self._peers.get_view(one, places[one], low, high - low, spec.dtype)
            for one in receivers
        ]


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])
