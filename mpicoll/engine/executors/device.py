"""Methods for collectives on device memory that are available to a communicator.

The capabilities of a device on the memory of the other ranks are tested once for a communicator, in queue order, at its
first operation on a device; only then is an algorithm chosen. After that the same code runs as on the host: a
DeviceArray turns the copies and reductions of schedules and of shared memory into work of its device.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast
from weakref import ref

from mpicoll.buffers import ops
from mpicoll.buffers.device import Device, find_kernel_failure
from mpicoll.buffers.ops import Reduction
from mpicoll.config import config
from mpicoll.engine import cuda_probes
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.executors import cuda_ipc, nccl, peer_messages, slots, stream_order
from mpicoll.engine.executors.bound_schedule import Exchanger
from mpicoll.engine.executors.collective_spec import CollectiveSpec, Program
from mpicoll.engine.executors.peer_memory import PeerMemory
from mpicoll.engine.executors.staging import DirectExchanger, StagedExchanger, SynchronizedNative
from mpicoll.engine.selection.query import DeviceCapabilities
from mpicoll.errors import DeviceError, MpicollError
from mpicoll.transport import cuda_awareness
from mpicoll.transport.base import Native, Transport

if TYPE_CHECKING:
    from mpicoll.engine.core.arena import Arena


class DeviceContext:
    """Capabilities of the ranks of a communicator on each other's device memory. Each rank uses one device in it."""

    def __init__(self, comm: CommunicatorCore, device: Device) -> None:
        self.device = device
        self._transport: Transport = comm.transport
        self._comm = ref(comm)  # which owns this object, and is dropped without a garbage collection
        self._size, self._runs_probe, self._spans_nodes = comm.size, comm.local_rank == 0, comm.num_nodes > 1
        self.has_exchanged = False
        # Reasons why a method is not available; methods are assumed to be available until the ranks have exchanged
        # their capabilities.
        self._ipc = comm.no_shm_reason
        self._nccl = "there is a single rank" if comm.size == 1 else None
        self._aware: frozenset[str] = frozenset(cuda_awareness.CLASSES)
        self._models: str | None = None
        self._peers: PeerMemory | None = None
        self._order: stream_order.StreamOrder | None = None
        # The reason why the host waits for collectives in the memory of other ranks; None if streams are ordered.
        self._no_order: str | None = None
        # The reason why messages pass through the host, after the exchange.
        self._no_messages: str | None = None
        self._native: nccl.Nccl | None = None
        self.native_order: nccl.NcclOrder | None = None
        """Order of NCCL's collectives; None where the host waits for them, or NCCL is not available."""
        # The reason why the host waits for all collectives, after the exchange.
        self._host_order: str | None = None
        self._page_locked: Arena | None = None

    def get_capabilities(self, collective: str, reduction: Reduction | None) -> DeviceCapabilities:
        """Return the reasons why each method can't serve a collective, as far as they are known."""
        unnamed = reduction is not None and reduction.name not in (*ops.NAMES, "premul_sum")
        lacking = ("reduce" if reduction is not None else "move") not in self._aware
        return DeviceCapabilities(
            nccl=self._nccl or _find_nccl_obstacle(collective, reduction),
            ipc=self._ipc,
            native="this MPI library does not support device memory (mpicoll doctor shows the evidence)"
            if lacking
            else None,
            host=f"op {reduction.name} needs arrays on the device" if unnamed and reduction is not None else None,
            models=self._models,
        )

    def exchange_capabilities(self) -> None:
        """Exchange the capabilities of the ranks. Collective at first use."""
        if self.has_exchanged:
            return
        device = self.device
        properties: dict[str, Any] = {"device": device.identity, "name": device.name, "model": device.model}
        failure: MpicollError | None = None
        properties["order"] = config().cuda_order
        kernel_failure = properties["no kernel"] = find_kernel_failure(device)
        try:
            # The test takes seconds, and matters only where messages leave the node.
            verdict = cuda_awareness.find_cuda_support(
                cuda_probes.PROGRAM if self._spans_nodes and self._runs_probe else None
            )
            if self._runs_probe or not self._spans_nodes:
                properties["aware"] = [name for name in cuda_awareness.CLASSES if getattr(verdict, name)]
        except MpicollError as error:
            failure = error
            properties["failed"] = str(error)
        properties_by_rank = [json.loads(text) for text in self._transport.allgather_text(json.dumps(properties))]
        if failure is not None:
            raise failure
        for rank, one in enumerate(properties_by_rank):
            if "failed" in one:
                raise DeviceError(f"rank {rank} of {self._size} can't use its device {one['name']}: {one['failed']}")
        self._aware = frozenset(cuda_awareness.CLASSES).intersection(
            *(one["aware"] for one in properties_by_rank if "aware" in one)
        )
        self._host_order = self._find_host_order([one["order"] for one in properties_by_rank])
        if self._ipc is None:
            self._ipc = self._find_ipc_obstacle(properties_by_rank)
        shared = max(Counter(one["device"] for one in properties_by_rank).values())
        self._models = " and ".join(sorted({one["model"] for one in properties_by_rank})) + f" shared by {shared}" * (
            shared > 1
        )
        if self._nccl is None:
            first: dict[str, int] = {}
            for rank, one in enumerate(properties_by_rank):
                other = first.setdefault(one["device"], rank)
                if other != rank:
                    self._nccl = f"ranks {other} and {rank} share a device, which NCCL refuses"
                    break
        self.has_exchanged = True
        if kernel_failure is not None:
            warnings.warn(
                f"{kernel_failure}; collectives on the device go through the host, and what needs a kernel fails:"
                f" {cuda_probes.KERNEL_REMEDY}; mpicoll doctor tries again",
                stacklevel=2,
            )

    def _find_ipc_obstacle(self, properties_by_rank: list[dict[str, Any]]) -> str | None:
        """Return the reason why the ranks can't work in each other's device memory; None if they can. Collective."""
        for rank, one in enumerate(properties_by_rank):
            if one["no kernel"] is not None:
                return f"rank {rank} of {self._size}: {one['no kernel']}"
        comm = self._comm()
        arena = None if comm is None else comm.arena()
        if arena is None:
            return "shared memory is not available"
        self._peers = PeerMemory(self._transport, arena, self.device, [one["device"] for one in properties_by_rank])
        obstacle = self._peers.check()
        if obstacle is None and comm is not None:
            self._no_messages = self._create_messages(comm, arena, [one["device"] for one in properties_by_rank])
            self._no_order = self._host_order or self._create_order(comm, arena)
        return obstacle

    def _create_messages(self, comm: CommunicatorCore, arena: Arena, devices: list[str]) -> str | None:
        """Let messages between the ranks pass through memory that they open, or return the reason why they pass through
        the host. Collective."""
        if peer_messages.are_connected(comm, devices):
            return None
        created = peer_messages.create(comm, arena, self.device, devices)
        return created if isinstance(created, str) else None

    def _find_host_order(self, settings: list[str]) -> str | None:
        """Return the reason why the host waits for all collectives; None if streams may."""
        if "host" not in settings:
            return None
        return f"MPICOLL_CUDA_ORDER is host on rank {settings.index('host')} of {self._size}"

    def _create_order(self, comm: CommunicatorCore, arena: Arena) -> str | None:
        """Order collectives by streams, or return the reason why the host has to wait for them. Collective."""
        assert self._peers is not None
        order = stream_order.create(comm, arena, self.device, self._peers.workers)
        if isinstance(order, str):
            return order
        self._order = order
        self._peers.follow_last = order.follow_last
        return None

    def find_order(self, reduction: Reduction | None) -> stream_order.StreamOrder | None:
        """Return the order of collectives with this `reduction` in the memory of other ranks; None where the host waits
        for them: functions of the caller may need it."""
        return self._order if reduction is None or reduction.has_kernel else None

    def make_exchanger(self) -> Exchanger:
        """Return the exchange of messages in device memory. The same kind on all ranks."""
        kind = DirectExchanger if "send" in self._aware else StagedExchanger
        return kind(self._transport, self.device)

    def synchronized_native(self, native: Native) -> Native:
        """Return the MPI library's own collectives, each called after all work queued on the device is done."""
        return cast(Native, SynchronizedNative(native, self.device))

    def describe_messages(self) -> str:
        """Return the reason why messages to ranks of this communicator pass through the host."""
        if not self.has_exchanged:
            return "the ranks have not tried yet if they reach each other's memory: the first collective on it does"
        return self._ipc or self._no_messages or "the receiver is this rank, or is on another node"

    def describe_order(self, *, has_kernel: bool, native: bool) -> str:
        """Return who waits for collectives in the memory of other ranks, or for NCCL's if `native`. `has_kernel` is
        False for functions of the caller."""
        if native:
            waits = f"the host waits: {self._host_order}"
            return waits if self._host_order is not None else "ordered by streams, the host does not wait"
        if self._order is None:
            return f"the host waits: {self._no_order}"
        return "ordered by streams, the host does not wait" if has_kernel else "the host waits: op may need it"

    def bind_shared_memory(
        self, *, direct: bool, repeated: bool = False, order: stream_order.StreamOrder | None = None
    ) -> Callable[[Arena, CollectiveSpec], Program]:
        """Return the function that binds a collective on device memory to the arena: `direct` in the device memory of
        the other ranks, there perhaps in stream `order`, otherwise through the host's shared memory. `repeated` states
        that it will be carried out often, on arrays without owners."""
        peers = self._peers
        if direct:
            assert peers is not None
            return lambda arena, spec: cuda_ipc.bind(arena, peers, spec, repeated=repeated, order=order)

        def bind(arena: Arena, spec: CollectiveSpec) -> Program:
            self._register_host_memory(arena)
            return slots.bind(arena, spec)

        return bind

    def nccl(self) -> nccl.Nccl | None:
        """Return NCCL on this communicator; None if it is not available. Collective at first use."""
        if self._native is None and self._nccl is None:
            created = nccl.create(self._transport, self.device)
            if isinstance(created, str):
                self._nccl = created
            else:
                self._native = created
                comm = self._comm()
                if self._host_order is None and comm is not None:
                    self.native_order = nccl.NcclOrder(comm, self.device, created)
        return self._native

    def complete(self) -> None:
        """Wait until the device has completed all collectives, or the communicator has failed."""
        for order in (self._order, self.native_order):
            if order is not None:
                order.drain(self._transport.timeout)

    def _register_host_memory(self, arena: Arena) -> None:
        """Register shared memory of the host with the device, for fast copies."""
        if self._page_locked is not arena:
            self._page_locked = arena
            for both in (*arena.slots, arena.results):
                for memory in both:
                    self.device.register_host_memory(memory)

    def free(self) -> None:
        """Release the resources of this communicator. Not collective."""
        self.complete()
        self._order = self.native_order = None
        if self._native is not None:
            self._native.free()
            self._native = None
        self._peers = None


def _find_nccl_obstacle(collective: str, reduction: Reduction | None) -> str | None:
    if reduction is None:
        return nccl.unsupported_reason(collective, None, None)
    if reduction.native is None:
        return f"op {reduction.name}: NCCL has no such reduction"
    op, work = reduction.native, reduction.work
    if op in ("min", "max") and work.kind == "f":
        return f"op {reduction.name}: NCCL may lose a NaN"
    if op == "sum" and work.kind in "iu" and work.itemsize <= 2:
        return f"op {reduction.name}: NCCL does not say what happens when a sum of {work.name} overflows"
    return nccl.unsupported_reason(collective, op, work)


def get_device_context(comm: CommunicatorCore, device: Device) -> DeviceContext:
    """Return the capabilities of `comm` on memory of `device`. Raises DeviceError if `comm` uses another device."""
    if comm.devices is None:
        comm.devices = DeviceContext(comm, device)
    context = comm.devices
    assert isinstance(context, DeviceContext)
    if context.device is not device:
        raise DeviceError(
            f"the data is on {device.name}, but {comm.name} uses {context.device.name} on this rank since its first"
            f" collective on a device; copy the data to {context.device.name}, or duplicate the communicator and use"
            f" the duplicate for {device.name}"
        )
    return context
