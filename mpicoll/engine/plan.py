"""Plans: collectives bound to their arrays."""

from __future__ import annotations

from threading import get_ident
from time import monotonic
from typing import Any

import numpy as np

from mpicoll.engine.core.process_local import refuse_pickling
from mpicoll.engine.core.queue import Job
from mpicoll.engine.diagnostics.flight_recorder import Call, keepers
from mpicoll.engine.executors.device import chooser
from mpicoll.engine.operation import Operation, Task, body_of, call_of, carrier, chosen
from mpicoll.engine.selection.catalogue import NATIVE
from mpicoll.engine.selection.selector import Choice
from mpicoll.errors import ArgumentError

_PERSISTENT = 1024
"""Bytes up to which a persistent collective is the faster one: Open MPI's take no algorithm for large messages."""


class Plan:
    """A collective bound to its arrays, to be repeated.

    The algorithm, the memory and the schedule are bound once, when the plan is made; for data on a device each run
    looks the algorithm up. Each run reads the arrays that were passed to ``…_init`` as they are then, and gives the
    same result array each time, filled anew. All ranks must make the plan and run it alike.
    """

    __slots__ = ("_body", "_call", "_comm", "_device", "_job", "_operation", "_progress", "_result", "_same", "choice")
    __reduce_ex__ = refuse_pickling("Plan", "make it anew on all ranks, by the same …_init function")

    def __init__(self, operation: Operation) -> None:
        choice = chosen(operation)
        self._operation = operation
        self._job: Job | None = None
        self._comm = comm = operation.comm
        self._progress = comm.progress
        # Persistent requests are made by all ranks together, so this takes its turn among the collectives.
        self._call = call_of(operation, choice)
        self._device = operation.on
        begin = Call(f"{self._call.name}_init", parts=(self._call,))
        self.choice, self._body = comm.progress.run(self._bound, begin, choice)
        # Where MPI itself writes the result, it is the same array each time, unless it is a number.
        self._result = operation.result() if operation.bare else None
        self._same = operation.bare and not isinstance(self._result, (bool, int, float, complex, np.generic))

    def _bound(self, choice: Choice | None) -> tuple[Choice, Task]:
        """The algorithm, and what carries out a run. Where it may be a persistent collective, all ranks decide on that
        together."""
        operation, native = self._operation, self._comm.transport.native
        nbytes = operation.problem.nbytes
        if choice is None:
            assert self._device is not None
            choice = chooser(operation, self._device, lambda choice: None)()
            return choice, Task(carrier(operation, None, self._call), self._call, operation)
        small = native is not None and choice.name == NATIVE and nbytes is not None and nbytes <= _PERSISTENT
        persistent = False
        if small and native is not None:
            # Ranks may differ in whether MPI can work on their arrays as they are.
            bare = np.array([operation.bare], np.int32)
            native.allreduce(bare, bare, "min")
            persistent = bool(bare[0])
        if persistent:
            # It meets no plain collective, for which it would wait for ever.
            self._call.algorithm, self._call.signature = f"{NATIVE}, persistent", 0
        run = body_of(operation, choice, bound=True, persistent=persistent, call=self._call)
        return choice, Task(run, self._call, operation)

    def __call__(self) -> Any:
        """Run once and return the result. Raises ArgumentError while a started run has not been waited for."""
        progress = self._progress
        if self._device is not None:
            self._operation.called()
        if (
            self._job is not None
            or self._comm.freed
            or progress.observer is not None
            or progress.queue
            or progress.lock.locked()
        ):
            self._idle("call")
            progress.run(self._body, self._call)
            return self._operation.result()
        # progress.run, written out for the call that is made most.
        with progress.lock:
            progress.thread = get_ident()
            progress.number = number = progress.number + 1
            progress.current = entry = (progress.group, number, self._call, monotonic(), None)
            try:
                progress.match(self._call)
                self._body.run()
            except BaseException as error:  # noqa: BLE001  raised again
                raise progress.failed(entry, error)  # noqa: B904  it has its cause
            progress.current = None
            keepers.keep((entry, monotonic(), ""))
        return self._result if self._same else self._operation.result()

    def start(self) -> None:
        """Begin a run in the background. Raises ArgumentError while another one has not been waited for."""
        self._idle("start")
        self._operation.called()
        self._job = self._operation.comm.progress.submit(self._body, self._call)

    def test(self) -> bool:
        """Whether the started run has completed."""
        return self._started("test").test()

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for the started run and return the result. Raises what the run raised, or Timeout after `timeout`
        seconds, when it is still pending.
        """
        job = self._started("wait")
        try:
            job.wait(timeout)
        finally:
            if job.reported:
                self._job = None
        return self._operation.result()

    def _idle(self, verb: str) -> None:
        self._operation.comm.check()
        if self._job is not None:
            raise ArgumentError(
                f"{self._operation.problem.collective}_init: {verb}() while a run is pending; wait() for it first"
            )

    def _started(self, verb: str) -> Job:
        if self._job is None:
            raise ArgumentError(f"{self._operation.problem.collective}_init: {verb}() without start()")
        return self._job
