"""One collective call, validated and with its memory at hand, ready to be run now, later, or again and again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from mpicoll.buffers.dtypes import Array
from mpicoll.buffers.ops import Combine, Fold
from mpicoll.engine import shared
from mpicoll.engine.communicator import Communicator
from mpicoll.engine.execute import Program, Region, bind, scratch
from mpicoll.engine.progress import Job
from mpicoll.engine.request import Request
from mpicoll.engine.select import Choice, Method, Problem, choose, forced
from mpicoll.errors import ArgumentError, ScheduleError
from mpicoll.schedules import Schedule
from mpicoll.transport.base import Native


def _nothing() -> None:
    return None


@dataclass(slots=True)
class Flat:
    """What a collective through shared memory works on: this rank's input and output as flat contiguous arrays (None
    where the collective has none here) of one dtype, which are alike or apart.

    `counts` are the elements of all ranks' blocks, or of the vector alone. `load` brings the caller's data to `source`,
    `store` takes it from `target`."""

    source: Array | None = None
    target: Array | None = None
    counts: tuple[int, ...] = ()
    fold: Fold | None = None
    load: Callable[[], None] = _nothing
    store: Callable[[], None] = _nothing


@dataclass(slots=True)
class Operation:
    """What a collective's file prepares.

    `flat` is what it works on through shared memory. `native` runs the MPI library's own collective. For a schedule,
    `regions` lays its chunks out in memory; then `load` fills that memory from the caller's arrays, and `store` moves
    what arrived to the caller's arrays. `result` is what the call returns.
    """

    comm: Communicator
    problem: Problem
    algorithm: str | None
    native: Callable[[Native], None]
    regions: Callable[[Schedule], Sequence[Region]]
    result: Callable[[], Any]
    flat: Callable[[], Flat] | None = None
    combine: Combine | None = None
    load: Callable[[], None] = _nothing
    store: Callable[[], None] = _nothing

    def __str__(self) -> str:
        nbytes = "" if self.problem.nbytes is None else f" of {self.problem.nbytes} bytes"
        return f"{self.problem.collective}{nbytes} on rank {self.comm.rank} of {self.comm.size}"


def run(operation: Operation) -> Any:
    """Carry out `operation` and return its result."""
    operation.comm.progress.run(body(operation), (operation,))
    return operation.result()


def start(operation: Operation) -> Request:
    """Carry out `operation` in the background. The request's value is its result."""
    job = operation.comm.progress.submit(body(operation), (operation,))
    return Request(job, operation.result)


def body(operation: Operation) -> Callable[[], None]:
    """What carries out `operation`, to be run by the queue of its communicator, alone or as a part of a larger job."""
    return _body(operation, choose(operation.problem, operation.algorithm))


def _body(operation: Operation, choice: Choice, *, bound: bool = False) -> Callable[[], None]:
    """What carries out `operation`, as often as it is called. Memory is bound now (`bound`), or at each call."""
    comm, problem = operation.comm, operation.problem
    if choice.algorithm is None:
        native = comm.transport.native
        if native is None:
            raise ScheduleError(f"{problem.collective}: native was chosen where there is no MPI library")
        return partial(operation.native, native)
    if isinstance(choice.algorithm, Method):
        return _shared(operation, choice, choice.algorithm.name)
    schedule = choice.algorithm.schedule(comm.rank, comm.size, problem.root, choice.segments)

    def program() -> Program:
        return bind(schedule, operation.regions(schedule), operation.combine, scratch)

    ready = program() if bound else None

    def scheduled() -> None:
        # Each run draws a tag, so that late messages of one that failed match no other. All ranks draw the same, since
        # operations run in the same order on all of them; so it comes first, before anything can fail on one rank.
        tag = comm.next_tag()
        current = ready or program()
        operation.load()
        current.run(comm.transport, tag)
        operation.store()

    return scheduled


def _shared(operation: Operation, choice: Choice, method: str) -> Callable[[], None]:
    """What carries out `operation` through shared memory; in another way, if it turns out that there is none."""
    comm, problem = operation.comm, operation.problem
    assert operation.flat is not None
    flat = operation.flat()
    some = flat.target if flat.source is None else flat.source
    spec = shared.Spec(
        problem.collective,
        method,
        np.dtype(np.uint8) if some is None else some.dtype,
        flat.counts,
        problem.root,
        flat.fold,
        choice.segment,
    )
    ready: shared.Body | None = None

    def run() -> None:
        nonlocal ready
        arena = comm.arena()
        if arena is None:
            operation.problem = replace(problem, unshared=comm.unshared)
            _body(operation, choose(operation.problem, None))()
            return
        if ready is None:
            ready = shared.bind(arena, spec)
        flat.load()
        arena.run(ready, flat.source, flat.target)
        flat.store()

    return run


_REPEATED_BYTES = 16 * 1024
"""Up to here, two copies cost less than to prepare an operation anew."""

_REPEATED_MAX = 256
"""How many prepared operations a communicator keeps."""


def repeated(
    comm: Communicator, key: tuple[Any, ...], x: Array, out: Any, prepare: Callable[[Array, Any], Operation]
) -> Any:
    """Carry out ``prepare(x, out)`` for a numpy array `x`, and keep what was prepared, if it is small, for later calls.

    Those are the calls of equal `key`, which must hold all that `prepare` depends on, but for `out` and the contents of
    `x`, and must be made anew for each call: the watch tells calls apart by it.
    """
    try:
        known = None if forced() else comm.repeated.get(key)
    except TypeError:
        # What can't be hashed is no name of an algorithm: `prepare` says so.
        known = None
    if known is not None and (out is None or _is_like(out, known[1])):
        try:
            return comm.progress.run(known[0], key, x, out)
        except BaseException:
            # Late messages may still find their way into its memory.
            comm.repeated.pop(key, None)
            raise
    operation = prepare(x, out)
    nbytes = operation.problem.nbytes
    if known is None and nbytes is not None and nbytes <= _REPEATED_BYTES and not forced():
        if len(comm.repeated) >= _REPEATED_MAX:
            comm.repeated.clear()
        own = np.empty(x.shape, x.dtype)
        comm.repeated[key] = _repeater(own, prepare(own, None))
    return run(operation)


def _repeater(source: Array, operation: Operation) -> tuple[Callable[[Array, Any], Any], Any]:
    """What runs `operation` on arrays of its own, between which and the caller's it copies; and its result."""
    body = _body(operation, choose(operation.problem, operation.algorithm), bound=True)
    value = operation.result()

    # A closure: this is the innermost of the short path, and slots of an object take longer to reach.
    def once(x: Array, out: Any) -> Any:
        source[...] = x
        body()
        if out is None:
            return None if value is None else value.copy()
        out[...] = value
        return out

    return once, value


def _is_like(out: Any, value: Any) -> bool:
    """Whether `value` can simply be copied to `out`."""
    fits = type(out) is np.ndarray and value is not None and out.dtype == value.dtype and out.shape == value.shape
    return fits and out.flags.c_contiguous and out.flags.writeable


class Plan:
    """A collective bound to its arrays, to be repeated.

    The algorithm, the memory and the schedule are bound once, when the plan is made. Each run reads the arrays that
    were passed to ``…_init`` as they are then, and gives the same result array each time, filled anew. All ranks must
    make the plan and run it alike.
    """

    __slots__ = ("_body", "_job", "_operation", "choice")

    def __init__(self, operation: Operation) -> None:
        self.choice = choose(operation.problem, operation.algorithm)
        self._operation = operation
        self._job: Job | None = None
        self._body = _body(operation, self.choice, bound=True)

    def __call__(self) -> Any:
        """Run once and return the result. Raises ArgumentError while a started run has not been waited for."""
        self._idle("call")
        self._operation.comm.progress.run(self._body, (self._operation,))
        return self._operation.result()

    def start(self) -> None:
        """Begin a run in the background. Raises ArgumentError while another one has not been waited for."""
        self._idle("start")
        self._job = self._operation.comm.progress.submit(self._body, (self._operation,))

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
