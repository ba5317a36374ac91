"""One collective call, validated and with its memory prepared, that can be run now, later, or repeatedly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from mpicoll.buffers.buffer import Buffer
from mpicoll.buffers.device import Device, StreamEvent, device_of
from mpicoll.buffers.dtypes import Array
from mpicoll.buffers.ops import Combine, Fold, Reduction
from mpicoll.buffers.pair import parts_of
from mpicoll.buffers.streams import record_events
from mpicoll.engine.core.arena import Arena, Body
from mpicoll.engine.core.communicator import Communicator
from mpicoll.engine.core.request import Request
from mpicoll.engine.diagnostics.flight_recorder import WITHIN, Call
from mpicoll.engine.executors import cuda_ipc, shared_memory
from mpicoll.engine.executors import device as devices
from mpicoll.engine.executors.schedule import Program, Region, Wire, bind
from mpicoll.engine.selection.catalogue import DeviceAlgorithm, HierarchicalAlgorithm, SharedMemoryAlgorithm
from mpicoll.engine.selection.query import SelectionQuery
from mpicoll.engine.selection.selector import Choice, choose
from mpicoll.errors import ScheduleError
from mpicoll.schedules import Algorithm, Schedule
from mpicoll.schedules.model import ROOTED
from mpicoll.transport.base import Native


def _nothing() -> None:
    return None


@dataclass(slots=True)
class Flat:
    """Arrays of a collective through shared memory: this rank's input and output as flat contiguous arrays (None where
    the collective has none on this rank) of one dtype, which are identical or do not overlap.

    `counts` are the elements of all ranks' blocks, or of the vector alone. `load` copies the caller's data to `source`,
    `store` copies it from `target`.
    """

    source: Array | None = None
    target: Array | None = None
    counts: tuple[int, ...] = ()
    fold: Fold | None = None
    load: Callable[[], None] = _nothing
    store: Callable[[], None] = _nothing


@dataclass(slots=True)
class Operation:
    """Prepared collective.

    `block` is this rank's array that is alike on all ranks, except for its rows where there are `counts`: the rows of
    all ranks' blocks. For alltoall these are the rows that are sent, and `arrivals` are the rows that are received.
    `flat` returns the arrays for shared memory. `native` runs the MPI library's own collective. For a schedule,
    `regions` lays its chunks out in memory; then `load` fills that memory from the caller's arrays, and `store` copies
    the received data to the caller's arrays. `result` returns the result of the call. `bare` states that `native` only
    calls one of MPI's collectives on memory that stays the same; `direct` calls it for other arrays like those of
    `flat`, where no other work is needed. Reductions have a `reduction`, and `work`, the whole vector between `load`
    and `store`. `buffers` are all arrays of the caller that the operation accesses, `on` is the device on which they
    lie, if any; `after` holds the events that must complete before the arrays may be accessed.
    """

    comm: Communicator
    problem: SelectionQuery
    algorithm: str | None
    native: Callable[[Native], None]
    regions: Callable[[Schedule], Sequence[Region]]
    result: Callable[[], Any]
    block: Buffer | None = None
    counts: tuple[int, ...] = ()
    arrivals: tuple[int, ...] = ()
    flat: Callable[[], Flat] | None = None
    combine: Combine | None = None
    load: Callable[[], None] = _nothing
    store: Callable[[], None] = _nothing
    bare: bool = False
    direct: Callable[[Native, Any, Any], None] | None = None
    reduction: Reduction | None = None
    work: Array | None = None
    buffers: tuple[Buffer | None, ...] = ()
    on: Device | None = None
    after: tuple[StreamEvent, ...] = ()

    def __post_init__(self) -> None:
        if self.on is None:
            self.on = device_of(*(part.array for one in self.buffers if one is not None for part in parts_of(one)))

    def called(self) -> None:
        """Record the events of the buffers' streams. The caller's thread must call it before each run."""
        if self.on is not None:
            self.after = record_events(*self.buffers)


class Task:
    """Function that carries out `operations`, to be run by the queue of their communicator, and the call that
    identifies it there."""

    __slots__ = ("call", "operations", "run")

    def __init__(self, run: Callable[[], None], call: Call, *operations: Operation) -> None:
        self.run = run
        self.call = call
        self.operations = operations

    def __call__(self) -> None:
        self.run()


def run(operation: Operation) -> Any:
    """Carry out `operation` and return its result."""
    made = task(operation)
    operation.comm.progress.run(made, made.call)
    return operation.result()


def start(operation: Operation) -> Request:
    """Carry out `operation` in the background and return its request, the value of which is the operation's result."""
    made = task(operation)
    return Request(operation.comm.progress.submit(made, made.call), operation.result)


def task(operation: Operation) -> Task:
    """Return the task that carries out `operation`."""
    operation.called()
    choice = chosen(operation)
    call = call_of(operation, choice)
    return Task(carrier(operation, choice, call), call, operation)


def chosen(operation: Operation) -> Choice | None:
    """Return the algorithm for `operation`; None for data on a device, where the algorithm is chosen at execution: only
    then the ranks know their capabilities."""
    return choose(operation.problem, operation.algorithm) if operation.on is None else None


def carrier(operation: Operation, choice: Choice | None, call: Call | None = None) -> Callable[[], None]:
    """Return a function that carries out `operation` by the algorithm that was :func:`chosen`, each time that it is
    called. If none was chosen, the function stores the name of the algorithm in `call` at execution."""
    if choice is not None:
        return body_of(operation, choice, call=call)
    assert operation.on is not None

    def tell(choice: Choice) -> None:
        if call is not None:
            call.algorithm = choice.name

    return devices.body(operation, operation.on, tell)


def call_of(operation: Operation, choice: Choice | None) -> Call:
    """Return the description of `operation`, carried out by the algorithm that was :func:`chosen`, for outside
    observers."""
    problem, block, reduction = operation.problem, operation.block, operation.reduction
    return Call(
        problem.collective,
        problem.nbytes,
        "" if block is None else block.dtype.name,
        None if block is None else block.array.shape,
        op="" if reduction is None else reduction.name,
        root=problem.root if problem.collective in ROOTED else None,
        counts=operation.counts,
        arrivals=operation.arrivals,
        algorithm="" if choice is None else choice.name,
        memory="" if operation.on is None else operation.on.kind,
    )


def body_of(
    operation: Operation, choice: Choice, *, bound: bool = False, persistent: bool = False, call: Call | None = None
) -> Callable[[], None]:
    """Return a function that carries out `operation` each time that it is called. Memory is bound now (`bound`), or at
    each call. With `persistent` all ranks call this function together, and the returned function too. `call` is the
    call that the queue records, if only the queue calls the returned function."""
    comm, problem = operation.comm, operation.problem
    if choice.algorithm is None:
        native = comm.transport.native
        if native is None:
            raise ScheduleError(f"{problem.collective}: native was chosen where there is no MPI library")
        return (
            native.bind(operation.native, persistent=persistent)
            if bound and operation.bare
            else partial(operation.native, native)
        )
    if isinstance(choice.algorithm, SharedMemoryAlgorithm):
        return _shared(operation, choice, call)
    if isinstance(choice.algorithm, HierarchicalAlgorithm):
        # Not at module level: a circular import, because its phases are operations too.
        from mpicoll.engine.executors.hierarchical import hierarchical

        return hierarchical(operation)
    return scheduled(operation, choice, comm.transport, bound=bound)


def scheduled(operation: Operation, choice: Choice, wire: Wire, *, bound: bool = False) -> Callable[[], None]:
    """Return a function that carries out `operation` by a schedule, over `wire`."""
    comm, algorithm = operation.comm, choice.algorithm
    assert isinstance(algorithm, Algorithm)
    schedule = algorithm.schedule(comm.rank, comm.size, operation.problem.root, choice.segments)
    executing = comm.progress.executing

    def program() -> Program:
        return bind(schedule, operation.regions(schedule), operation.combine)

    ready = program() if bound else None

    def run() -> None:
        # Each run draws a tag, so that late messages of a failed run match no other run. All ranks draw the same tag,
        # since operations run in the same order on all of them; so the tag is drawn first, before anything can fail on
        # one rank.
        tag = comm.next_tag()
        current = ready or program()
        operation.load()
        outer, executing.executor = executing.executor, current
        try:
            current.run(wire, tag)
        finally:
            executing.executor = outer
        operation.store()

    return run


class Unshared(Exception):
    """Raised if shared memory turns out to be unavailable at its first use. No rank has exchanged data."""


class Shared:
    """Collective through shared memory, on any arrays of one kind; with `peers`, through the memory of their devices.

    `call` is the call that the queue records, if only the queue calls the object. The comparison of the ranks' calls is
    then done here.
    """

    __slots__ = ("_arena", "_body", "_comm", "_peers", "_signature", "_spec")

    def __init__(
        self,
        comm: Communicator,
        problem: SelectionQuery,
        choice: Choice,
        dtype: np.dtype[Any],
        counts: tuple[int, ...],
        fold: Fold | None = None,
        peers: cuda_ipc.Peers | None = None,
        call: Call | None = None,
    ) -> None:
        assert isinstance(choice.algorithm, SharedMemoryAlgorithm | DeviceAlgorithm)
        self._comm = comm
        self._peers = peers
        self._spec = shared_memory.Spec(
            problem.collective, choice.algorithm.name, dtype, counts, problem.root, fold, choice.segment
        )
        self._signature = self._spec.signature
        if call is not None:
            self._signature ^= call.sign()
            call.signature = WITHIN
        self._arena: Arena | None = None
        self._body: Body | None = None

    @classmethod
    def of(
        cls,
        operation: Operation,
        choice: Choice,
        flat: Flat,
        peers: cuda_ipc.Peers | None = None,
        call: Call | None = None,
    ) -> Shared:
        """Return the collective for `operation`, which works on arrays like those of `flat`."""
        some = flat.target if flat.source is None else flat.source
        dtype = np.dtype(np.uint8) if some is None else some.dtype
        return cls(operation.comm, operation.problem, choice, dtype, flat.counts, flat.fold, peers, call)

    def __call__(
        self,
        source: Array | None,
        target: Array | None,
        load: Callable[[], None] | None = None,
        settle: Callable[[], None] | None = None,
    ) -> None:
        """Carry out the collective, in queue order, after `load`. `settle` waits for asynchronous work of this rank to
        complete before the other ranks read its results. Raises Unshared before any data has been exchanged."""
        arena = self._arena
        if arena is None:
            arena = self._arena = self._comm.arena()
            if arena is None:
                raise Unshared("there is no shared memory after all; it is carried out another way")
            peers = self._peers
            self._body = (
                shared_memory.bind(arena, self._spec) if peers is None else cuda_ipc.bind(arena, peers, self._spec)
            )
        assert self._body is not None
        arena.run(self._body, source, target, load, self._signature, settle)


def _shared(operation: Operation, choice: Choice, call: Call | None) -> Callable[[], None]:
    assert operation.flat is not None
    flat = operation.flat()
    carry_out = Shared.of(operation, choice, flat, call=call)
    # Every thread that runs it must make the same choice as the other ranks.
    context = copy_context()

    def run() -> None:
        try:
            carry_out(flat.source, flat.target, flat.load)
        except Unshared:
            if call is not None:
                call.signature = 0
            operation.problem = replace(operation.problem, lost=operation.comm.lost)
            context.copy().run(lambda: body_of(operation, choose(operation.problem, None)))()
        else:
            flat.store()

    return run
