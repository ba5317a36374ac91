"""One collective call, validated and with its memory at hand, ready to be run now, later, or again and again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mpicoll.buffers.ops import Combine
from mpicoll.engine.communicator import Communicator
from mpicoll.engine.execute import Program, Region, bind, scratch
from mpicoll.engine.request import Request
from mpicoll.engine.select import Choice, Problem, choose
from mpicoll.errors import ScheduleError
from mpicoll.schedules import Schedule
from mpicoll.transport.base import Native


def _nothing() -> None:
    return None


@dataclass(slots=True)
class Operation:
    """What a collective's file prepares.

    `native` runs the MPI library's own collective. For a schedule, `regions` lays its chunks out in memory; then `load`
    fills that memory from the caller's arrays, and `store` moves what arrived to the caller's arrays. `result` is what
    the call returns.
    """

    comm: Communicator
    problem: Problem
    algorithm: str | None
    native: Callable[[Native], None]
    regions: Callable[[Schedule], Sequence[Region]]
    result: Callable[[], Any]
    combine: Combine | None = None
    load: Callable[[], None] = _nothing
    store: Callable[[], None] = _nothing

    def what(self) -> tuple[Any, ...]:
        """What the watch and error messages call it."""
        nbytes = "" if self.problem.nbytes is None else f"of {self.problem.nbytes} bytes"
        return self.problem.collective, nbytes, f"on rank {self.comm.rank} of {self.comm.size}"


def run(operation: Operation) -> Any:
    """Carry out `operation` and return its result."""
    choice = choose(operation.problem, operation.algorithm)
    operation.comm.progress.run(_body(operation, choice), operation.what())
    return operation.result()


def start(operation: Operation) -> Request:
    """Carry out `operation` in the background. The request's value is its result."""
    choice = choose(operation.problem, operation.algorithm)
    job = operation.comm.progress.submit(_body(operation, choice), operation.what())
    return Request(job, operation.result)


def _body(operation: Operation, choice: Choice) -> Callable[[], None]:
    transport = operation.comm.transport
    if choice.algorithm is None:
        native = transport.native
        if native is None:
            raise ScheduleError(f"{operation.problem.collective}: native was chosen where there is no MPI library")
        return lambda: operation.native(native)
    # The tag is drawn here, in the order of calls, so that late messages of a call that failed match no other call.
    tag = operation.comm.next_tag()

    def scheduled() -> None:
        program = _program(operation, choice)
        operation.load()
        program.run(transport, tag)
        operation.store()

    return scheduled


def _program(operation: Operation, choice: Choice) -> Program:
    assert choice.algorithm is not None
    comm, problem = operation.comm, operation.problem
    schedule = choice.algorithm.schedule(comm.rank, comm.size, problem.root, choice.segments)
    return bind(schedule, operation.regions(schedule), operation.combine, scratch)


class Plan:
    """A collective bound to its arrays, to be repeated.

    The algorithm, the memory and the schedule are bound once, when the plan is made. Each run reads the arrays that
    were passed to ``…_init`` as they are then, and gives the same result array each time, filled anew. All ranks must
    make the plan and run it alike.
    """

    __slots__ = ("_body", "_operation", "_request", "choice")

    def __init__(self, operation: Operation) -> None:
        self.choice = choose(operation.problem, operation.algorithm)
        self._operation = operation
        self._request: Request | None = None
        self._body = self._bound()

    def _bound(self) -> Callable[[], None]:
        operation, transport = self._operation, self._operation.comm.transport
        if self.choice.algorithm is None:
            return _body(operation, self.choice)
        program = _program(operation, self.choice)
        tag = operation.comm.next_tag()

        def scheduled() -> None:
            operation.load()
            program.run(transport, tag)
            operation.store()

        return scheduled

    def __call__(self) -> Any:
        """Run once and return the result. Raises RuntimeError while a started run has not been waited for."""
        self._idle("call")
        self._operation.comm.check()
        self._operation.comm.progress.run(self._body, self._operation.what())
        return self._operation.result()

    def start(self) -> None:
        """Begin a run in the background."""
        self._idle("start")
        self._operation.comm.check()
        job = self._operation.comm.progress.submit(self._body, self._operation.what())
        self._request = Request(job, self._operation.result)

    def test(self) -> bool:
        """Whether the started run has completed."""
        return self._started("test").test()

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for the started run and return the result. Raises Timeout; the run is still pending then."""
        value = self._started("wait").wait(timeout)
        self._request = None
        return value

    def _idle(self, verb: str) -> None:
        if self._request is not None:
            raise RuntimeError(
                f"{self._operation.problem.collective}_init: {verb}() while a run is pending; wait() for it first"
            )

    def _started(self, verb: str) -> Request:
        if self._request is None:
            raise RuntimeError(f"{self._operation.problem.collective}_init: {verb}() without start()")
        return self._request
