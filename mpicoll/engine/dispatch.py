"""Execution of operations: choose the algorithm, bind the operation to it, and run it or start it in the background."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from contextvars import Context, copy_context
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

from mpicoll.buffers.device import Device
from mpicoll.buffers.ops import Reduction
from mpicoll.buffers.streams import list_streams
from mpicoll.engine.core.arrays import CollectiveArrays, do_nothing
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.core.operation import Operation
from mpicoll.engine.core.request import Request
from mpicoll.engine.diagnostics.flight_recorder import Call
from mpicoll.engine.executors.shared_memory import SharedMemoryCollective, SharedMemoryLost
from mpicoll.engine.learning import LearnedCall, describe_learning, is_learnable
from mpicoll.engine.selection.catalogue import (
    IPC,
    NCCL,
    CompressedAlgorithm,
    DeviceAlgorithm,
    HierarchicalAlgorithm,
    SharedMemoryAlgorithm,
)
from mpicoll.engine.selection.query import DeviceCapabilities
from mpicoll.engine.selection.selector import Choice, choose
from mpicoll.errors import MpicollError, ScheduleError

if TYPE_CHECKING:
    from mpicoll.engine.executors.bound_schedule import Exchanger
    from mpicoll.engine.executors.device import DeviceContext
    from mpicoll.engine.executors.phased import MakePhases, PhasedOperation
    from mpicoll.engine.executors.stream_order import Completion, StreamOrder


class Task:
    """Function that carries out `operations`, to be run by the queue of their communicator, and the call that
    identifies it there. `begin` begins the call instead and returns its request; None if only the queue can start it.
    """

    __slots__ = ("begin", "call", "operations", "run")

    def __init__(self, run: Callable[[], None], call: Call, *operations: Operation) -> None:
        self.run = run
        self.call = call
        self.operations = operations
        self.begin: Callable[[], Request | None] | None = None

    def __call__(self) -> None:
        self.run()


class DeferringTask(Task):
    """Function that carries out the operations of `task`, which may be left to complete on the device. It returns their
    completion then."""

    __slots__ = ()

    def __init__(self, task: Task) -> None:
        super().__init__(task.run, task.call, *task.operations)

    def __call__(self) -> Completion | None:  # type: ignore[override]
        from mpicoll.engine.executors.stream_order import Deferral

        with Deferral() as deferral:
            self.run()
        return deferral.completion


def run(operation: Operation) -> Any:
    """Carry out `operation` and return its result."""
    task = make_task(operation)
    if operation.on is None:
        operation.comm.queue.run(task, task.call)
    else:
        completion = operation.comm.queue.run(DeferringTask(task), task.call)
        if completion is not None:
            _block_callers(operation, completion)
    return operation.result()


def _block_callers(operation: Operation, completion: Completion) -> None:
    """Have the streams of the caller's arrays wait for `completion`; the host, if they can't."""
    streams = list_streams(*operation.buffers)
    if None in streams:
        completion.wait()
    else:
        for stream in streams:
            assert stream is not None
            completion.block_stream(stream)


def start(operation: Operation) -> Request:
    """Carry out `operation` in the background and return its request, the value of which is the operation's result."""
    task = make_task(operation)
    return Request(operation.comm.queue.submit(task, task.call), operation.result)


def make_task(operation: Operation) -> Task:
    """Return the task that carries out `operation`."""
    operation.record_events()
    if is_learnable(operation):
        call = describe_learning(operation.describe(""))
        return Task(LearnedCall(operation, call, partial(bind, fixed=True)), call, operation)
    choice = select_algorithm(operation)
    call = describe_call(operation, choice)
    return Task(bind(operation, choice, call=call), call, operation)


def select_algorithm(operation: Operation) -> Choice | None:
    """Return the algorithm for `operation`; None for data on a device, where the algorithm is chosen at execution: only
    then the ranks know their capabilities."""
    if operation.compresses:
        assert operation.compression is not None
        name = operation.compression.name
        return Choice(f"compressed({name})", CompressedAlgorithm(name), 1, "the argument compression")
    return choose(operation.query, operation.algorithm) if operation.on is None else None


def describe_call(operation: Operation, choice: Choice | None) -> Call:
    """Return the call that carries out `operation` by the algorithm that :func:`select_algorithm` has returned.

    If shared memory turns out to be lost before the call's turn in the queue, it gets the algorithm that ranks choose
    afterwards: the ranks compare it.
    """
    call = operation.describe("" if choice is None else choice.name)
    if choice is not None and isinstance(choice.algorithm, SharedMemoryAlgorithm):
        # Every thread must make the same choice as the other ranks.
        operation.comm.on_shm_loss(partial(_choose_again, ref(operation), call, copy_context()))
    return call


def _choose_again(described: ref[Operation], call: Call, context: Context) -> None:
    operation = described()
    if operation is not None:
        # It would be raised in the operation that has lost shared memory. This one raises it in its own turn.
        with suppress(MpicollError):
            call.algorithm = _choose_after_loss(operation, context).name
            call.signature = 0


def _choose_after_loss(operation: Operation, context: Context) -> Choice:
    """Return the algorithm for `operation`, in `context`, now that shared memory is lost."""
    operation.query = operation.query._replace(shm_failed_reason=operation.comm.shm_failed_reason)
    return context.copy().run(choose, operation.query, operation.algorithm)


def bind(
    operation: Operation,
    choice: Choice | None,
    *,
    call: Call | None = None,
    fixed: bool = False,
    persistent: bool = False,
) -> Callable[[], None]:
    """Return a function that carries out `operation`, in queue order, each time that it is called, by the algorithm
    that :func:`select_algorithm` has returned.

    `call` is the call that the queue records, if only the queue calls the function. With `fixed`, memory is bound now,
    otherwise in each run. With `persistent`, all ranks call this function together, and the returned function too.
    """
    if choice is None:
        assert operation.on is not None
        return _bind_on_device(operation, operation.on, call)
    algorithm = choice.algorithm
    if algorithm is None:
        return _bind_native(operation, fixed=fixed, persistent=persistent)
    if isinstance(algorithm, SharedMemoryAlgorithm):
        return _bind_shared_memory(operation, choice, call)
    if isinstance(algorithm, HierarchicalAlgorithm):
        from mpicoll.engine.executors.hierarchical import HierarchicalPhases

        return _bind_phased(operation, HierarchicalPhases)
    if isinstance(algorithm, CompressedAlgorithm):
        from mpicoll.engine.executors.compressed import CompressedPhases

        return _bind_phased(operation, CompressedPhases)
    return _bind_schedule(operation, choice, operation.comm.transport, fixed=fixed)


def _bind_phased(operation: Operation, make_phases: MakePhases) -> PhasedOperation:
    # Not at module level, as the phases themselves: only a job on several nodes needs it.
    from mpicoll.engine.executors.phased import PhasedOperation

    return PhasedOperation(operation, lambda phase: bind(phase, select_algorithm(phase)), make_phases)


def _bind_schedule(
    operation: Operation, choice: Choice, exchanger: Exchanger, *, fixed: bool = False
) -> Callable[[], None]:
    # Not at module level, as it loads the schedules, which most calls don't need.
    from mpicoll.engine.executors.schedule import ScheduledOperation

    return ScheduledOperation(operation, choice, exchanger, fixed=fixed)


def _bind_native(operation: Operation, *, fixed: bool, persistent: bool) -> Callable[[], None]:
    arrays, native = operation.arrays, operation.comm.transport.native
    if native is None:
        raise ScheduleError(
            f"{arrays.collective}: native was chosen, but this communicator does not use an MPI library"
        )
    if not fixed or not arrays.persistent:
        return partial(arrays.run_native, native)
    return native.bind(lambda mpi: arrays.native_call(mpi)(arrays.source, arrays.target), persistent=persistent)


def _bind_shared_memory(operation: Operation, choice: Choice, call: Call | None) -> Callable[[], None]:
    arrays = operation.arrays.for_shared_memory()
    collective = SharedMemoryCollective.of(operation, choice, arrays, call=call)
    # Every thread that runs it must make the same choice as the other ranks.
    context = copy_context()

    def run() -> None:
        try:
            collective(arrays.source, arrays.target, arrays.load)
        except SharedMemoryLost:
            other = _choose_after_loss(operation, context)
            context.copy().run(bind, operation, other)()
        else:
            arrays.store()

    return run


def bind_repeated(operation: Operation, choice: Choice, call: Call) -> Callable[[], bool] | None:
    """Return a function that carries out `operation` by the extension alone, records `call`, and returns True; False if
    Python has to carry it out. Return None if there is no such function. Shared memory has been used before."""
    arrays = operation.arrays.for_shared_memory()
    if arrays.load is not do_nothing or arrays.store is not do_nothing:
        return None
    collective = SharedMemoryCollective.of(operation, choice, arrays, call=call).find_compiled()
    if collective is None:
        return None
    return operation.comm.queue.bind_call(collective, call, arrays.source, arrays.target)


def get_device_capabilities(
    comm: CommunicatorCore, device: Device, collective: str, reduction: Reduction | None
) -> DeviceCapabilities:
    """Return the reasons why each method can't serve a collective on `device`, as far as they are known. Raises
    DeviceError if `comm` uses another device on this rank."""
    return _get_device_context(comm, device).get_capabilities(collective, reduction)


def _get_device_context(comm: CommunicatorCore, device: Device) -> DeviceContext:
    # Not at module level: only data on a device needs the methods for it.
    from mpicoll.engine.executors.device import get_device_context

    return get_device_context(comm, device)


def select_on_device(operation: Operation, device: Device, report: Callable[[Choice], None]) -> Callable[[], Choice]:
    """Return a function that chooses the algorithm for `operation`, collectively and in queue order, after the ranks
    have exchanged their capabilities. Each choice is passed to `report` before the operation begins."""
    # Every thread that calls it must make the same choice as the other ranks.
    context = copy_context()

    def choose_once() -> Choice:
        choice = context.copy().run(_choose_on_device, operation, device)
        report(choice)
        return choice

    def choose_after_exchange() -> Choice:
        device_context = _get_device_context(operation.comm, device)
        device_context.exchange_capabilities()
        choice = choose_once()
        return choose_once() if choice.name == NCCL and device_context.nccl() is None else choice

    return choose_after_exchange


def _choose_on_device(operation: Operation, device: Device) -> Choice:
    """Return the algorithm for `operation`, as far as the capabilities of the ranks are known."""
    comm, query = operation.comm, operation.query
    # Pairs are joined on the host, so the device does not matter.
    capabilities = (
        None
        if query.device is None
        else get_device_capabilities(comm, device, query.collective, operation.arrays.reduction)
    )
    query = query._replace(device=capabilities, shm_failed_reason=comm.shm_failed_reason)
    return choose(query, operation.algorithm)


def bind_repeated_on_device(
    operation: Operation, device: Device
) -> tuple[Choice, CollectiveArrays, SharedMemoryCollective, StreamOrder | None] | bool:
    """Return the algorithm of `operation`, its arrays, what carries it out on any arrays like these, and in which order
    of streams. Return False if such operations are bound each time, True if that is not known before the ranks have
    carried out one."""
    if operation.query.device is None:
        return False
    if not _get_device_context(operation.comm, device).has_exchanged:
        return True
    choice = _choose_on_device(operation, device)
    if choice.name != IPC and not isinstance(choice.algorithm, SharedMemoryAlgorithm):
        return False
    arrays = operation.arrays.for_shared_memory()
    if arrays.load is not do_nothing or arrays.store is not do_nothing:
        return False
    order = _get_device_context(operation.comm, device).find_order(operation.arrays.reduction)
    order = order if choice.name == IPC else None
    collective = _bind_shared_on_device(operation, choice, arrays, device, repeated=True, order=order)
    return choice, arrays, collective, order


def _bind_shared_on_device(
    operation: Operation,
    choice: Choice,
    arrays: CollectiveArrays,
    device: Device,
    *,
    repeated: bool = False,
    order: StreamOrder | None = None,
) -> SharedMemoryCollective:
    device_context = _get_device_context(operation.comm, device)
    bind_to_arena = device_context.bind_shared_memory(direct=choice.name == IPC, repeated=repeated, order=order)
    return SharedMemoryCollective.of(operation, choice, arrays, bind_to_arena)


def _bind_on_device(operation: Operation, device: Device, call: Call | None) -> Callable[[], None]:
    def report(choice: Choice) -> None:
        if call is not None:
            call.algorithm = choice.name

    choose_after_exchange = select_on_device(operation, device, report)

    def run() -> None:
        # Not at module level, as the other methods for devices.
        from mpicoll.engine.executors.stream_order import Waiting, complete_or_defer

        choice = choose_after_exchange()
        device_context = _get_device_context(operation.comm, device)
        if choice.name == NCCL and (native := device_context.native_order) is not None:
            submit = partial(native.submit, operation.arrays.run_native)
            complete_or_defer(native.carry_out(operation.after, submit, kept=operation))
            return
        order = device_context.find_order(operation.arrays.reduction) if choice.name == IPC else None
        if order is not None:
            submit = partial(_submit_on_device, operation, choice, device, order)
            complete_or_defer(order.carry_out(operation.after, submit, kept=operation))
            return
        # What the phases of a collective do has to be complete before the next one.
        with Waiting(), device.working(operation.after):
            _run_on_device(operation, choice, device)

    return run


def _submit_on_device(operation: Operation, choice: Choice, device: Device, order: StreamOrder) -> None:
    shared = operation.arrays.for_shared_memory()
    collective = _bind_shared_on_device(operation, choice, shared, device, order=order)
    collective(shared.source, shared.target, shared.load)
    shared.store()


def _run_on_device(operation: Operation, choice: Choice, device: Device) -> None:
    algorithm, arrays, comm = choice.algorithm, operation.arrays, operation.comm
    if isinstance(algorithm, HierarchicalAlgorithm) or operation.query.device is None:
        bind(operation, choice)()
        return
    device_context = _get_device_context(comm, device)
    if isinstance(algorithm, DeviceAlgorithm) and algorithm.name == NCCL:
        nccl = device_context.nccl()
        assert nccl is not None
        arrays.run_native(nccl)
    elif isinstance(algorithm, (DeviceAlgorithm, SharedMemoryAlgorithm)):
        shared = arrays.for_shared_memory()
        collective = _bind_shared_on_device(operation, choice, shared, device)
        collective(shared.source, shared.target, shared.load, device.synchronize)
        shared.store()
    elif algorithm is None:
        assert comm.transport.native is not None
        arrays.run_native(device_context.synchronized_native(comm.transport.native))
    else:
        _bind_schedule(operation, choice, device_context.make_exchanger())()
        # Pending copies through page-locked memory must have completed.
        device.synchronize()
