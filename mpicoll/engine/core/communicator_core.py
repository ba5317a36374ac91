"""The resources of a communicator, and their lifetime."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol
from weakref import finalize, ref

import numpy as np

from mpicoll.config import TuneMode
from mpicoll.engine.core.message_check import warn_of_unmatched_messages
from mpicoll.engine.core.observer import accept_any_call
from mpicoll.engine.core.queue import OperationQueue
from mpicoll.engine.core.registry import Options, Registry
from mpicoll.engine.core.running_call import RunningCall
from mpicoll.engine.core.uninterrupted import call_uninterrupted
from mpicoll.engine.diagnostics.flight_recorder import Call, Group
from mpicoll.engine.diagnostics.position import Position
from mpicoll.engine.diagnostics.watchdog import Watchdog
from mpicoll.engine.selection.layout import make_layout
from mpicoll.engine.selection.query import UNTUNED, SelectionQuery, TunedTable, selection_context
from mpicoll.errors import ArgumentError, CommunicationError, CommunicatorError, RankFailed, Timeout
from mpicoll.transport.base import Memory, Transport

if TYPE_CHECKING:
    from mpicoll.engine.core.arena import Arena
    from mpicoll.engine.core.topology import Topology
    from mpicoll.engine.selection.trials import Trials

_TAGS = 1 << 15
"""Number of tags of collectives, which wrap at the smallest range that MPI guarantees."""


_SHARING = Position("the making of shared memory")
_SPLITTING = Position("the making of communicators for the nodes")


class DeviceResources(Protocol):
    """State of a communicator on device memory, which belongs to its executors. `has_exchanged` is True when the ranks,
    all of them, have exchanged what they can do with each other's memory."""

    has_exchanged: bool

    def describe_order(self, *, has_kernel: bool, native: bool) -> str:
        """Return who waits for collectives in the memory of other ranks, or for NCCL's if `native`."""

    def describe_messages(self) -> str:
        """Return the reason why messages to ranks of this communicator pass through the host."""

    def complete(self) -> None:
        """Wait until the device has completed all collectives, or the communicator has failed."""

    def free(self) -> None:
        """Release the resources. Not collective."""


MAX_CACHED_CALLS = 1024
"""Maximum number of cached calls per communicator."""


class CommunicatorCore:
    """The resources of a communicator: transport, queue of operations, shared memory, state on devices; and the data by
    which operations are chosen and checked.

    The package's code works with this class; users have a :class:`~mpicoll.Communicator`, which holds one.
    """

    def __init__(
        self,
        transport: Transport,
        watch: Watchdog | None,
        *,
        name: str,
        world: bool = True,
        table: TunedTable = UNTUNED,
        checks: Options,
        registry: Registry,
        tune: TuneMode = "off",
        topology: Topology | None = None,
    ) -> None:
        self.transport = transport
        self.topology = topology
        self.rank = transport.rank
        self.size = transport.size
        self.nodes = transport.nodes
        self.context = selection_context(make_layout(transport.nodes), table, connects=transport.connects)
        group = Group(transport.key, name, transport.members, transport.rank, transport.timeout, transport.traffic)
        self.queue = OperationQueue(group, watch, background=transport.background, explain=transport.translate_error)
        # Prepared operations by their keys, including those of torch.
        self.call_cache: dict[tuple[Any, ...], Any] = {}
        # Which algorithms may be tried, and the trials of each kind of call; both are the same on all ranks.
        self.tune: TuneMode = tune
        self.trials: dict[SelectionQuery, Trials] = {}
        # True if the ranks have allocated or adopted shared memory.
        self.has_user_segments = False
        self.watch = watch
        # Reasons why memory can't be shared, or read directly, among all ranks; the same on all ranks.
        self.no_shm_reason, self.no_cma_reason = _apart(transport)
        # Reason why the first use of shared memory failed.
        self.shm_failed_reason: str | None = None
        # Called if the first use of shared memory fails.
        self._loss_callbacks: list[Callable[[], None]] = []
        self._arena: Arena | None = None
        # Set by the first operation on device memory.
        self.devices: DeviceResources | None = None
        self._levels: tuple[CommunicatorCore, CommunicatorCore] | None = None
        self._tags = itertools.count()
        self.freed = False
        self.is_world = world
        self.running = RunningCall(transport, self.queue)
        # The checks that the environment requests, and the checks in effect.
        self.requested = checks
        self.checks = checks
        if self.no_shm_reason is None:
            self.queue.match = partial(_match_first, ref(self))
        elif self.size > 1:
            self.queue.match = self._message_matcher()
        self.registry = registry
        registry.add(self)
        # A communicator that is dropped without being freed must not leave its worker and its shared memory behind. So
        # neither the queue nor the arena, which the queue refers to, has a reference to this object.
        finalize(self, self.queue.on_dropped).atexit = False

    def __repr__(self) -> str:
        return f"<mpicoll.Communicator {self.name}: rank {self.rank} of {self.size}{', freed' if self.freed else ''}>"

    @property
    def name(self) -> str:
        """Name of the communicator in messages."""
        return self.queue.group.name

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of this communicator, as ranks of the MPI job."""
        return self.queue.group.members

    @property
    def timeout(self) -> float:
        """Seconds that an operation may take, past which the job is ended with a report of each rank's position.
        Defaults to ``MPICOLL_TIMEOUT``; communicators derived from this one inherit the value."""
        return self.queue.group.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        if not 0 < seconds < float("inf"):
            raise ArgumentError(f"timeout of {self!r} must be a positive number of seconds, got {seconds!r}")
        self.queue.group.timeout = self.transport.timeout = float(seconds)
        for level in self._levels or ():
            level.timeout = seconds

    @property
    def node(self) -> int:
        """The number of this rank's node."""
        return self.nodes[self.rank]

    @property
    def num_nodes(self) -> int:
        """Number of nodes of the ranks."""
        return len(set(self.nodes))

    @property
    def local_rank(self) -> int:
        """This rank's number among those of its node."""
        return self.nodes[: self.rank].count(self.node)

    @property
    def local_size(self) -> int:
        """Number of ranks on this node."""
        return self.nodes.count(self.node)

    def check(self) -> None:
        """Raise CommunicatorError if the communicator was freed."""
        if self.freed:
            raise CommunicatorError(f"{self!r} can't be used any more: it was freed")

    def next_tag(self) -> int:
        """Return the tag of the next collective. It is the same on all ranks, because all ranks call the same
        collectives in the same order."""
        return next(self._tags) % _TAGS

    @property
    def has_arena(self) -> bool:
        """True if :meth:`arena` has created the shared memory."""
        return self._arena is not None

    @property
    def has_arena_later(self) -> bool:
        """True until the first use of shared memory, where it may be available."""
        return self._arena is None and self.no_shm_reason is None and self.shm_failed_reason is None

    def on_shm_loss(self, callback: Callable[[], None]) -> None:
        """Call `callback` if the first use of shared memory fails, or has failed; maybe twice. Any thread may call
        this."""
        if self.has_arena_later:
            self._loss_callbacks.append(callback)
        if self.shm_failed_reason is not None:
            callback()

    @property
    def cma_failed_reason(self) -> str | None:
        """Reason why the ranks can't read each other's memory, as of the last operation that needed that."""
        return None if self._arena is None else self._arena.cma_failed_reason

    def arena(self) -> Arena | None:
        """Return the shared memory of the ranks, or None if it is not available.

        Then ``no_shm_reason`` or, from this call on, ``shm_failed_reason`` holds the reason. Collective at first use;
        called by operations.
        """
        if self.has_arena_later:
            interrupt = self._make_arena()
            if interrupt is not None:
                raise interrupt
        return self._arena

    def _make_arena(self) -> BaseException | None:
        """Make the shared memory of the ranks, or set the reason why it is not available. Returns the exception that a
        signal handler has raised meanwhile."""
        # Not at module level: it needs the extension, and no_shm_reason is not None where that is missing.
        from mpicoll.engine.core.arena import Arena

        def make() -> None:
            executing = self.queue.executing
            outer, executing.executor = executing.executor, _SHARING
            try:
                self._arena = self.queue.arena = Arena(
                    self.transport,
                    self.running.describe,
                    self.running.mismatch_error,
                    self.running.check_wait,
                    executing,
                    self.running.row_mismatch_error,
                )
            except (RankFailed, Timeout):
                raise  # not all ranks have taken part
            except CommunicationError as error:
                self.shm_failed_reason = str(error)
                for callback in self._loss_callbacks.copy():
                    callback()
            finally:
                executing.executor = outer
            self._loss_callbacks.clear()

        if not self.transport.background:  # another thread must not communicate
            make()
            return None
        return call_uninterrupted(make)

    def match_first(self, call: Call) -> BaseException | None:
        """Begin the first collective, which all ranks have to enter, regardless of the operation that they call."""
        interrupt = self._make_arena() if self.has_arena_later else None
        self.queue.match = self._message_matcher() if self._arena is None else self._arena.match
        try:
            later = self.queue.match(call)
        except BaseException as error:
            if interrupt is not None:
                raise interrupt from error
            raise
        return interrupt or later

    def _message_matcher(self) -> Callable[[Call], BaseException | None]:
        """Return the function that begins a collective where there is no shared memory."""
        if not self.requested.batched:
            return accept_any_call
        # Not at module level, like the other comparisons: calls that agree in shared memory do not need it.
        from mpicoll.engine.core.call_comparison import BatchedComparison

        return BatchedComparison(self.transport, self.queue).match

    def levels(self) -> tuple[CommunicatorCore, CommunicatorCore]:
        """Return private communicators of the ranks of this node, and of the ranks of equal local rank on all nodes, in
        the order of nodes. Collective at first use; called by operations."""
        if self._levels is None:
            executing = self.queue.executing
            outer, executing.executor = executing.executor, _SPLITTING
            try:
                node = self.transport.split(self.node, self.rank)
                lane = self.transport.split(self.local_rank, self.node)
            finally:
                executing.executor = outer
            assert node is not None
            assert lane is not None
            self._levels = self.derive(node, "node"), self.derive(lane, "lane")
            for level in self._levels:
                level.running.queue = self.queue  # it runs operations on behalf of this communicator
        return self._levels

    def allocate(self, nbytes: int) -> Memory:
        """Return memory of `nbytes` that all ranks can access, if shared memory is available, otherwise private memory.
        Collective; called by operations. Shared memory lasts as long as an array that views it. The first allocation
        discards the choices of algorithms that were cached for earlier calls."""
        arena = self.arena()
        if arena is None:
            return np.empty(nbytes, np.uint8)
        memory = arena.segments.allocate(nbytes)[:nbytes]
        self._discard_cached_choices()
        return memory

    def adopt(self, memory: Memory, fd: int) -> int:
        """Give all ranks access to `memory`; see `SegmentTable.adopt`. Collective; called by operations where there is
        an arena."""
        assert self._arena is not None
        number = self._arena.segments.adopt(memory, fd)
        self._discard_cached_choices()
        return number

    def unregister(self, number: int) -> None:
        """Unregister adopted memory before it is released."""
        if self._arena is not None:
            self._arena.segments.unregister(number)

    def cache_call(self, key: tuple[Any, ...], call: Any) -> None:
        """Keep what serves later calls with this `key`. Of more than MAX_CACHED_CALLS all earlier ones are dropped."""
        if len(self.call_cache) >= MAX_CACHED_CALLS:
            self.call_cache.clear()
        self.call_cache[key] = call

    def discard_calls(self) -> None:
        """Prepare all calls again."""
        self.call_cache.clear()
        self.queue.discard_calls()

    def _discard_cached_choices(self) -> None:
        if not self.has_user_segments:
            self.has_user_segments = True
            self.discard_calls()

    def derive(
        self, transport: Transport, name: str, *, world: bool = False, topology: Topology | None = None
    ) -> CommunicatorCore:
        """Return the communicator on a transport that was derived from this communicator's transport."""
        transport.timeout = self.timeout
        return CommunicatorCore(
            transport,
            self.watch,
            name=f"{self.name}/{name}",
            world=world,
            table=self.context.table,
            checks=self.requested,
            registry=self.registry,
            tune=self.tune,
            topology=topology,
        )

    def complete_on_device(self) -> None:
        """Wait until the device of this rank has completed all collectives, or the communicator has failed."""
        if self.devices is not None:
            self.devices.complete()

    def free_locally(self) -> None:
        """Free a revoked communicator, without a message."""
        self.queue.close()
        self.queue.retire()
        self.freed = True
        self._release_resources()
        for level in self._levels or ():
            level.free_locally()
        self._levels = None

    def _release_resources(self) -> None:
        """Release the resources other than those of MPI."""
        self.discard_calls()
        self._arena = self.queue.arena = None
        if self.devices is not None:
            self.devices.free()
            self.devices = None

    def free(self) -> None:
        """Free the communicator after its pending operations have completed. Collective. Freeing it twice has no
        effect.

        Raises MismatchError if the ranks have called different collectives, and this was not found before.
        """
        if not self.freed:
            self.queue.close()
            self.queue.compare_unseen_calls()
            self.freed = True
            self._release_resources()
            for level in self._levels or ():
                level.free()
            self._levels = None
            warn_of_unmatched_messages([(self.transport, self.name)])
            # A communicator that was abandoned, or whose ranks have died, can be freed as well. Not before its devices:
            # while these are watched, the end of a rank that has freed it may be taken for a failure.
            self.queue.match = accept_any_call
            self.queue.run(self.transport.free, Call("free"))
            self.queue.retire()


def _match_first(comm: ref[CommunicatorCore], call: Call) -> BaseException | None:
    core = comm()
    if core is None:
        raise CommunicatorError(f"{call}: its communicator was dropped")
    return core.match_first(call)


def _apart(transport: Transport) -> tuple[str | None, str | None]:
    """Return the reasons why the ranks of `transport` can't share memory, and can't read each other's memory; None
    where they can."""
    if transport.size == 1:
        return ("there is a single rank",) * 2
    if len(set(transport.nodes)) > 1:
        return ("the ranks are on several nodes",) * 2
    return transport.no_shm_reason, transport.no_cma_reason
