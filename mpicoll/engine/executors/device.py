"""Collectives and messages on device memory: the methods available to a communicator, and their execution.

The capabilities of a device on the memory of the other ranks are tested once for a communicator, in queue order, at its
first operation on a device; only then is an algorithm chosen. After that the same code runs as on the host: a
DeviceArray turns the copies and reductions of schedules and of shared memory into work of its device.

Messages of schedules are sent directly from device memory where the MPI library supports it. Otherwise they pass
through page-locked memory in pieces: while one piece is exchanged, the previous one is copied to the device and the
next one to the host.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mpicoll.buffers import ops
from mpicoll.buffers.buffer import Buffer
from mpicoll.buffers.device import Device, DeviceArray, Event, empty_beside
from mpicoll.buffers.dtypes import Array
from mpicoll.buffers.ops import Reduction
from mpicoll.buffers.streams import record_events
from mpicoll.engine import cuda_probes
from mpicoll.engine.executors import cuda_ipc, nccl
from mpicoll.engine.selection.catalogue import IPC, NCCL, DeviceAlgorithm, HierarchicalAlgorithm, SharedMemoryAlgorithm
from mpicoll.engine.selection.query import DeviceCapabilities
from mpicoll.engine.selection.selector import Choice, choose
from mpicoll.errors import DeviceError, MpicollError
from mpicoll.transport import cuda_awareness
from mpicoll.transport.base import Message, Transport

if TYPE_CHECKING:
    from mpicoll.engine.core.arena import Arena
    from mpicoll.engine.core.communicator import Communicator
    from mpicoll.engine.operation import Operation

_NOTHING = np.empty(0, np.uint8)

PIECE = 1 << 20
"""Bytes of a message that pass through page-locked memory at a time."""


class Devices:
    """Capabilities of the ranks of a communicator on each other's device memory. Each rank uses one device in it."""

    def __init__(self, comm: Communicator, device: Device) -> None:
        self.device = device
        self._transport: Transport = comm.transport
        self._arena: Callable[[], Arena | None] = comm.arena
        self._size, self._prober, self._several = comm.size, comm.local_rank == 0, comm.num_nodes > 1
        self._met = False
        # Reasons why a method is not available; methods are assumed to be available until the ranks have exchanged
        # their capabilities.
        self._ipc = comm.unshared
        self._nccl = "there is a single rank" if comm.size == 1 else None
        self._aware: frozenset[str] = frozenset(cuda_awareness.CLASSES)
        self._models: str | None = None
        self.peers: cuda_ipc.Peers | None = None
        self._native: nccl.Nccl | None = None
        self._page_locked: Arena | None = None

    def reach(self, collective: str, reduction: Reduction | None) -> DeviceCapabilities:
        """Return the reasons why each method can't serve a collective, as far as they are known."""
        unnamed = reduction is not None and reduction.name not in (*ops.NAMES, "premul_sum")
        lacking = ("reduce" if reduction is not None else "move") not in self._aware
        return DeviceCapabilities(
            nccl=self._nccl or _not_by_nccl(collective, reduction),
            ipc=self._ipc,
            native="this MPI library can't work on device memory (mpicoll doctor says how that was found)"
            if lacking
            else None,
            host=f"op {reduction.name} wants arrays on the device" if unnamed and reduction is not None else None,
            models=self._models,
        )

    def meet(self) -> None:
        """Exchange the capabilities of the ranks. Collective at first use."""
        if self._met:
            return
        mine = self.device
        told: dict[str, Any] = {"device": mine.identity, "name": mine.name, "model": mine.model}
        failure: MpicollError | None = None
        try:
            # The test takes seconds, and matters only where messages leave the node.
            verdict = cuda_awareness.verdict(cuda_probes.PROGRAM if self._several and self._prober else None)
            if self._prober or not self._several:
                told["aware"] = [name for name in cuda_awareness.CLASSES if getattr(verdict, name)]
        except MpicollError as error:
            failure = error
            told["failed"] = str(error)
        all_told = [json.loads(text) for text in self._transport.texts(json.dumps(told))]
        if failure is not None:
            raise failure
        for rank, one in enumerate(all_told):
            if "failed" in one:
                raise DeviceError(f"rank {rank} of {self._size} can't use its device {one['name']}: {one['failed']}")
        self._aware = frozenset(cuda_awareness.CLASSES).intersection(
            *(one["aware"] for one in all_told if "aware" in one)
        )
        if self._ipc is None:
            arena = self._arena()
            if arena is None:
                self._ipc = "there is no shared memory after all"
            else:
                self.peers = cuda_ipc.Peers(self._transport, arena, self.device)
                self._ipc = self.peers.check()
        shared = max(Counter(one["device"] for one in all_told).values())
        self._models = " and ".join(sorted({one["model"] for one in all_told})) + f" shared by {shared}" * (shared > 1)
        if self._nccl is None:
            first: dict[str, int] = {}
            for rank, one in enumerate(all_told):
                other = first.setdefault(one["device"], rank)
                if other != rank:
                    self._nccl = f"ranks {other} and {rank} share a device, which NCCL refuses"
                    break
        self._met = True

    def straight(self) -> bool:
        """Return True if messages of schedules are sent directly from device memory: the same on all ranks."""
        return "send" in self._aware

    def nccl(self) -> nccl.Nccl | None:
        """Return NCCL on this communicator; None if it is not available. Collective at first use."""
        if self._native is None and self._nccl is None:
            made = nccl.make(self._transport, self.device)
            if isinstance(made, str):
                self._nccl = made
            else:
                self._native = made
        return self._native

    def register_host_memory(self, arena: Arena) -> None:
        """Register shared memory of the host with the device, for fast copies."""
        if self._page_locked is not arena:
            self._page_locked = arena
            for both in (*arena.slots, arena.results):
                for memory in both:
                    self.device.register_host_memory(memory)

    def free(self) -> None:
        """Release the resources of this communicator. Not collective."""
        if self._native is not None:
            self._native.free()
            self._native = None
        self.peers = None


def _not_by_nccl(collective: str, reduction: Reduction | None) -> str | None:
    if reduction is None:
        return nccl.refusal(collective, None, None)
    if reduction.native is None:
        return f"op {reduction.name}: NCCL has no such reduction"
    op, work = reduction.native, reduction.work
    if op in ("min", "max") and work.kind == "f":
        return f"op {reduction.name}: NCCL may lose a NaN"
    if op == "sum" and work.kind in "iu" and work.itemsize <= 2:
        return f"op {reduction.name}: NCCL does not say what happens when a sum of {work.name} overflows"
    return nccl.refusal(collective, op, work)


def devices(comm: Communicator, device: Device) -> Devices:
    """Return the capabilities of `comm` on memory of `device`. Raises DeviceError if `comm` uses another device."""
    if comm.devices is None:
        comm.devices = Devices(comm, device)
    mine = comm.devices
    if mine.device is not device:
        raise DeviceError(
            f"the data is on {device.name}, but {comm.name} works with {mine.device.name} on this rank since its first"
            f" collective there; copy the data to {mine.device.name}, or take a communicator of its own for"
            f" {device.name} (duplicate())"
        )
    return mine


def reach(comm: Communicator, device: Device, collective: str, reduction: Reduction | None) -> DeviceCapabilities:
    """Return the reasons why each method can't serve a collective on `device`, as far as they are known. Raises
    DeviceError if `comm` uses another device on this rank."""
    return devices(comm, device).reach(collective, reduction)


def body(operation: Operation, device: Device, tell: Callable[[Choice], None]) -> Callable[[], None]:
    """Return a function that carries out `operation`, in queue order, each time that it is called. It passes the chosen
    algorithm to `tell`."""
    choose_now = chooser(operation, device, tell)

    def run() -> None:
        choice = choose_now()
        with device.working(operation.after):
            _carry_out(operation, choice, devices(operation.comm, device))

    return run


def chooser(operation: Operation, device: Device, tell: Callable[[Choice], None]) -> Callable[[], Choice]:
    """Return a function that chooses the algorithm for `operation`, collectively and in queue order, after the ranks
    have exchanged their capabilities. Each choice is passed to `tell` before the operation begins."""
    # Every thread that calls it must make the same choice as the other ranks.
    context = copy_context()
    comm, problem = operation.comm, operation.problem

    def look() -> Choice:
        mine = devices(comm, device)
        # Pairs are joined on the host, so the device does not matter.
        ways = None if problem.device is None else mine.reach(problem.collective, operation.reduction)
        choice = context.copy().run(choose, replace(problem, device=ways, lost=comm.lost), operation.algorithm)
        tell(choice)
        return choice

    def choose_now() -> Choice:
        mine = devices(comm, device)
        mine.meet()
        choice = look()
        return look() if choice.name == NCCL and mine.nccl() is None else choice

    return choose_now


def _carry_out(operation: Operation, choice: Choice, mine: Devices) -> None:
    # Not at module level: a circular import.
    from mpicoll.engine.operation import Shared, body_of, scheduled

    algorithm, device, comm = choice.algorithm, mine.device, operation.comm
    if isinstance(algorithm, HierarchicalAlgorithm) or operation.problem.device is None:
        body_of(operation, choice)()
    elif isinstance(algorithm, DeviceAlgorithm) and algorithm.name == NCCL:
        native = mine.nccl()
        assert native is not None
        operation.native(native)
    elif isinstance(algorithm, (DeviceAlgorithm, SharedMemoryAlgorithm)):
        assert operation.flat is not None
        flat = operation.flat()
        peers = mine.peers if choice.name == IPC else None
        arena = comm.arena()
        assert arena is not None
        if peers is None:
            mine.register_host_memory(arena)
        Shared.of(operation, choice, flat, peers)(flat.source, flat.target, flat.load, device.synchronize)
        flat.store()
    elif algorithm is None:
        native_of_mpi = comm.transport.native
        assert native_of_mpi is not None
        operation.native(_Settled(native_of_mpi, device))  # type: ignore[arg-type]
    else:
        wire = _Straight(comm.transport, device) if mine.straight() else _Staged(comm.transport, device)
        scheduled(operation, choice, wire)()
        # Pending copies through page-locked memory must have completed.
        device.synchronize()


class _Settled:
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


class _Straight:
    """Exchange of device memory through an MPI library that supports it."""

    def __init__(self, transport: Transport, device: Device) -> None:
        self._transport = transport
        self._device = device

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message], tag: int) -> None:
        self._device.synchronize()
        self._transport.exchange(sends, recvs, tag)


class _Staged:
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
        self._up: list[Event] = []

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message], tag: int) -> None:
        steps = max((-(-memory.size // PIECE) for _, memory in (*sends, *recvs)), default=0) or 1
        for mark in self._up:
            mark.wait()
        self._up = []
        down = [self._copy(sends, "sends", 0)]
        for step in range(steps):
            if step + 1 < steps:
                down.append(self._copy(sends, "sends", step + 1))
            down[step].wait()
            if step > 1:
                self._up[step - 2].wait()
            self._transport.exchange(self._pieces(sends, "sends", step), self._pieces(recvs, "recvs", step), tag)
            self._up.append(self._copy(recvs, "recvs", step))

    def _copy(self, messages: Sequence[Message], which: str, step: int) -> Event:
        """Copy piece `step` of all messages to the host if they are sends, otherwise to the device."""
        for i, (_, memory) in enumerate(messages):
            piece = memory[step * PIECE : (step + 1) * PIECE]
            if isinstance(memory, DeviceArray) and piece.size:
                place = self._place(which, i, step, piece.size)
                np.copyto(*((place, piece) if which == "sends" else (piece, place)))
        return self._device.record_event()

    def _pieces(self, messages: Sequence[Message], which: str, step: int) -> list[Message]:
        """Return piece `step` of each message that has one: its page-locked memory, or the piece itself if it is on the
        host."""
        found: list[Message] = []
        for i, (peer, memory) in enumerate(messages):
            piece = memory[step * PIECE : (step + 1) * PIECE]
            if isinstance(memory, DeviceArray) and piece.size:
                found.append((peer, self._place(which, i, step, piece.size)))
            elif piece.size or (step == 0 and not memory.size):
                found.append((peer, _NOTHING if isinstance(memory, DeviceArray) else piece))
        return found

    def _place(self, which: str, i: int, step: int, size: int) -> Array:
        """Return page-locked memory for a piece of message `i`."""
        key = which, i, step & 1
        memory = self._memory.get(key)
        if memory is None or memory.size < size:
            memory = self._memory[key] = self._device.pinned(size)
        return memory[:size]


def takes_straight(checked: bool) -> bool:
    """Return True if a message between two ranks is sent or received directly in device memory. The result may differ
    between ranks."""
    return not checked and cuda_awareness.verdict(None).send


def fetched(buffer: Buffer, device: Device) -> Array:
    """Return the elements of `buffer`, which lies on `device`, as bytes in page-locked memory."""
    memory = device.pinned(buffer.array.nbytes)
    with device.working(record_events(buffer)):
        np.copyto(memory.view(buffer.array.dtype).reshape(buffer.array.shape), buffer.array)
    return memory


class Landing:
    """Receive memory for a message to `buffer`, which lies on `device`: `raw` is to be filled, then stored. It is
    page-locked memory of the host; or the memory of `buffer` itself, if messages are received `straight` into it."""

    __slots__ = ("_after", "_array", "_device", "_straight", "raw")

    def __init__(self, buffer: Buffer, device: Device, *, straight: bool) -> None:
        array = buffer.array
        self._array = array
        self._device = device
        self._straight = straight and array.flags.c_contiguous
        # The caller's pending work may still read the buffer.
        self._after = record_events(buffer)
        if self._straight:
            with device.working(self._after):
                self.raw: Array = array.reshape(-1).view(np.uint8)
        else:
            self.raw = device.pinned(array.nbytes)

    def store(self) -> None:
        """Copy the received message to the buffer."""
        if not self._straight:
            with self._device.working(self._after):
                np.copyto(self._array, self.raw.view(self._array.dtype).reshape(self._array.shape))


def on_host(array: Array) -> Array:
    """Return the elements of `array` in memory that the host can read."""
    if not isinstance(array, DeviceArray):
        return array
    found = np.empty(array.shape, array.dtype)
    with array.on.working():
        np.copyto(found, array)
    return found
