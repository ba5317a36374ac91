"""Plans: collectives bound to their arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic

import numpy as np

from mpicoll.engine.core.operation import Operation
from mpicoll.engine.core.process_local import refuse_pickling
from mpicoll.engine.core.queued_operation import QueuedOperation
from mpicoll.engine.core.request import ResultT_co
from mpicoll.engine.diagnostics.flight_recorder import Call
from mpicoll.engine.dispatch import Task, bind, bind_repeated, describe_call, select_algorithm, select_on_device
from mpicoll.engine.learning import get_final_choice, is_learnable
from mpicoll.engine.selection.catalogue import NATIVE, SharedMemoryAlgorithm
from mpicoll.engine.selection.selector import Choice
from mpicoll.errors import ArgumentError

_MAX_PERSISTENT_BYTES = 1024
"""Bytes up to which a persistent collective is the faster one: Open MPI's take no algorithm for large messages."""


class Plan(Generic[ResultT_co]):
    """A collective bound to its arrays, to be repeated.

    The algorithm, the memory and the schedule are bound once, when the plan is made; for data on a device each run
    selects the algorithm again. Each run reads the arrays that were passed to ``…_init`` as they are then, and returns
    the same result array, overwritten. All ranks must create and run the plan in the same order.

    Example:
        >>> x = np.zeros(2)
        >>> plan = mpicoll.allreduce_init(x)
        >>> x[:] = 3
        >>> plan()
        array([3., 3.])
    """

    __slots__ = (
        "_body",
        "_bound_after",
        "_call",
        "_comm",
        "_device",
        "_may_repeat",
        "_operation",
        "_pending",
        "_queue",
        "_repeat",
        "_result",
        "_reuses_result",
        "choice",
    )
    __reduce_ex__ = refuse_pickling("Plan", "create it again on all ranks, by the same …_init function")

    def __init__(self, operation: Operation) -> None:
        self._operation = operation
        self._pending: QueuedOperation | None = None
        self._comm = comm = operation.comm
        self._queue = comm.queue
        # Persistent requests are made by all ranks together, so this takes its turn among the collectives.
        self._call = describe_call(operation, select_algorithm(operation))
        self._device = operation.on
        begin = Call(f"{self._call.name}_init", parts=(self._call,))
        self.choice, self._body = comm.queue.run(self._bind, begin)
        # Where MPI itself writes the result, it is the same array each time, unless it is a number.
        self._result: Any = operation.result() if operation.arrays.persistent else None
        is_number = isinstance(self._result, (bool, int, float, complex, np.generic))
        self._reuses_result = operation.arrays.persistent and not is_number
        # Carries out a run by the extension alone, once shared memory has been used.
        self._repeat: Callable[[], bool] | None = None
        # The value of the queue's `discards` when it was bound.
        self._bound_after = -1
        # It takes the addresses of memory of the host.
        self._may_repeat = isinstance(self.choice.algorithm, SharedMemoryAlgorithm) and self._device is None

    def _bind(self) -> tuple[Choice, Task]:
        """Return the algorithm and the task of a run. All ranks agree on whether it is a persistent collective."""
        operation, native = self._operation, self._comm.transport.native
        nbytes = operation.query.nbytes
        # Again: an operation before this one may have lost shared memory.
        choice = select_algorithm(operation)
        learned = get_final_choice(operation) if is_learnable(operation) else None
        if learned is not None:
            # In the order of the queue, so that the other ranks know it too.
            choice, self._call.algorithm, self._call.signature = learned, learned.name, 0
        if choice is None:
            assert self._device is not None
            choice = select_on_device(operation, self._device, lambda choice: None)()
            return choice, Task(bind(operation, None, call=self._call), self._call, operation)
        small = choice.name == NATIVE and nbytes is not None and nbytes <= _MAX_PERSISTENT_BYTES
        persistent = False
        if small and native is not None and native.has_persistent:
            # Ranks may differ in whether MPI can work on their arrays as they are. All have the same MPI library.
            unconverted = np.array([operation.arrays.persistent], np.int32)
            native.allreduce(unconverted, unconverted, "min")
            persistent = bool(unconverted[0])
        if persistent:
            # A persistent collective never matches a plain one; it would wait forever.
            self._call.algorithm, self._call.signature = f"{NATIVE}, persistent", 0
        run = bind(operation, choice, call=self._call, fixed=True, persistent=persistent)
        return choice, Task(run, self._call, operation)

    def __call__(self) -> ResultT_co:
        """Run once and return the result. Raises ArgumentError while a started run has not been waited for."""
        if self._repeat is not None and self._pending is None and self._repeat():
            repeated: ResultT_co = self._result if self._reuses_result else self._operation.result()
            return repeated
        if self._device is not None:
            self._operation.record_events()
        if self._pending is not None or self._comm.freed:
            self._check_idle("call")
        queue = self._queue
        # Observers read the operation, which is an attribute of the task.
        queue.run(self._body.run if queue.observer is None else self._body, self._call)
        if self._may_repeat and self._bound_after != queue.discards and self._comm.has_arena:
            self._bound_after = queue.discards
            self._repeat = bind_repeated(self._operation, self.choice, self._call)
        result: ResultT_co = self._result if self._reuses_result else self._operation.result()
        return result

    def start(self) -> None:
        """Begin a run in the background. Raises ArgumentError while another one has not been waited for."""
        self._check_idle("start")
        self._operation.record_events()
        self._pending = self._operation.comm.queue.submit(self._body, self._call)

    def test(self) -> bool:
        """Return True if the started run has completed."""
        return self._get_started("test").test()

    def wait(self, timeout: float | None = None) -> ResultT_co:
        """Wait for the started run and return the result. Raises what the run raised, or Timeout after `timeout`
        seconds, when it is still pending.
        """
        job = self._get_started("wait")
        try:
            job.wait(timeout)
        finally:
            if job.reported:
                self._pending = None
        result: ResultT_co = self._operation.result()
        return result

    def _check_idle(self, verb: str) -> None:
        self._operation.comm.check()
        if self._pending is not None:
            raise ArgumentError(
                f"{self._operation.query.collective}_init: {verb}() while a run is pending; wait() for it first"
            )

    def _get_started(self, verb: str) -> QueuedOperation:
        if self._pending is None:
            raise ArgumentError(f"{self._operation.query.collective}_init: {verb}() without start()")
        return self._pending
