"""Handles of pending operations."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import nan
from numbers import Real
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from mpicoll.engine.core.process_local import refuse_pickling
from mpicoll.engine.core.queued_operation import OwnQueue
from mpicoll.engine.core.registered_wait import RegisteredWait
from mpicoll.engine.diagnostics.flight_recorder import Call
from mpicoll.errors import ArgumentError, Timeout
from mpicoll.transport.waiting import poll

if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault

    # So annotations may say Request alone.
    ResultT_co = TypeVarWithDefault("ResultT_co", covariant=True, default=Any)
else:
    ResultT_co = TypeVar("ResultT_co", covariant=True)

ValueT = TypeVar("ValueT")


class Handle(Protocol):
    """Pending operation behind a request."""

    @property
    def limit(self) -> float:
        """Timeout of the communicator in seconds."""

    @property
    def awaited(self) -> tuple[OwnQueue, Call]:
        """The queue of the communicator, and the pending call."""

    def test(self) -> Any:
        """Return a true value once the operation has completed."""

    def wait(self, timeout: float | None, bound: float | None = None) -> Any:
        """Block until the operation has completed. Raises Timeout after `timeout` seconds; `bound` is the timeout given
        by the caller, if `timeout` is the remainder of it."""


def seconds(operation: str, timeout: Any, *, positive: bool = True) -> float:
    """Return the `timeout` of `operation` as a float. Raises ArgumentError if `timeout` is not a number of seconds, or
    not a positive one where `positive` is set."""
    value = float(timeout) if isinstance(timeout, Real) else nan
    if not (value > 0 or (value <= 0 and not positive)):
        what = "a positive number of seconds" if positive else "a number of seconds"
        raise ArgumentError(f"{operation}: timeout must be {what} or None, got {timeout!r}")
    return value


class Request(Generic[ResultT_co]):
    """Pending operation: ``wait`` returns its result, ``test`` queries its completion.

    The arrays of the operation must not be changed (nor, for results, read) before it has completed. Dropping a request
    does not stop its operation.

    Example:
        >>> request = mpicoll.iallreduce(np.ones(2))
        >>> request.wait()
        array([1., 1.])
    """

    __slots__ = ("_finish", "_handle", "_value", "_waited")
    __reduce_ex__ = refuse_pickling("Request", "wait() for it and pass on its result")

    def __init__(self, handle: Handle, finish: Callable[[], ResultT_co]) -> None:
        self._handle = handle
        self._finish = finish
        self._waited = False
        self._value: Any = None

    @property
    def limit(self) -> float:
        """Seconds that the operation may take: its communicator's ``timeout``."""
        return self._handle.limit

    @property
    def awaited(self) -> tuple[OwnQueue, Call]:
        """The queue of the communicator, and the pending call."""
        return self._handle.awaited

    @property
    def waited(self) -> bool:
        """True if the result has already been returned."""
        return self._waited

    def test(self) -> bool:
        """Return True if the operation has completed; never blocks. ``wait`` returns the result, or raises the
        exception of an operation that failed."""
        return bool(self._waited or self._handle.test())

    def wait(self, timeout: float | None = None, bound: float | None = None) -> ResultT_co:
        """Wait for the operation and return its result. Raises what the operation raised, or Timeout after `timeout`
        seconds, when the operation is still pending.

        From half a second on, the message of a Timeout lists the missing ranks and their positions; querying the ranks
        takes milliseconds, or up to 4 s if a rank can't respond. Independently of `timeout`, no operation may take
        longer than its communicator's ``timeout``, past which the job is ended. Without MPI_THREAD_MULTIPLE a
        collective runs in this call, which may then take longer than `timeout`. May be called again. Raises
        ArgumentError for a `timeout` that is not a number. The message of a Timeout states `bound` seconds, if
        `timeout` is the remainder of `bound`.
        """
        if not self._waited:
            self._handle.wait(None if timeout is None else seconds("wait", timeout, positive=False), bound)
            self._value = self._finish()
            self._waited = True
        value: ResultT_co = self._value
        return value


def waitall(requests: Sequence[Request[ValueT]], timeout: float | None = None) -> list[ValueT]:
    """Wait for all `requests` and return their results in order.

    Args:
        requests: Pending or completed requests of this rank.
        timeout: Bound in seconds for all together. None: that of each communicator.

    Returns:
        The result of each request (see :meth:`Request.wait`).

    Raises:
        Timeout: The named request, the first one, is still pending after `timeout` seconds.
        Exception: The first exception of an operation.

    Example:
        >>> x = np.ones(2)
        >>> mpicoll.waitall([mpicoll.iallreduce(x), mpicoll.iallreduce(2 * x)])
        [array([1., 1.]), array([2., 2.])]
    """
    if timeout is None:
        return [one.wait() for one in requests]
    timeout = seconds("waitall", timeout, positive=False)
    deadline = time.monotonic() + timeout
    return [one.wait(max(0.0, deadline - time.monotonic()), timeout) for one in requests]


def waitany(requests: Sequence[Request[ValueT]], timeout: float | None = None) -> tuple[int, ValueT]:
    """Wait for any of `requests` to complete and return its index and its result.

    Args:
        requests: Requests of this rank. Those that were already waited for are ignored, as in MPI.
        timeout: Bound in seconds. None: the least ``timeout`` of their communicators.

    Returns:
        The index of the request that has completed, and its result.

    Raises:
        ArgumentError: No request is left.
        Timeout: No request has completed in time.
        Exception: The exception of the operation.

    Example:
        >>> mpicoll.waitany([mpicoll.iallreduce(np.ones(2))])
        (0, array([1., 1.]))
    """
    if timeout is not None:
        timeout = seconds("waitany", timeout, positive=False)
    active = [(index, one) for index, one in enumerate(requests) if not one.waited]
    if not active:
        raise ArgumentError(f"waitany: none of the {len(requests)} requests is pending")
    if len(active) == 1:
        index, one = active[0]
        return index, one.wait(timeout)

    def first_complete() -> tuple[int, Request[ValueT]] | None:
        return next(((index, one) for index, one in active if one.test()), None)

    bound = min(one.limit for _, one in active) if timeout is None else timeout
    try:
        with _waiting([one for _, one in active], bound, bounded=timeout is not None) as waiting:
            found = poll(lambda: _check_and_poll(waiting, first_complete), bound, f"waitany on {len(active)} requests")
    except Timeout as error:
        # The wait for one request gives a more detailed error and queries the other ranks, unless it has completed by
        # now.
        index, first = active[0]
        try:
            return index, first.wait(0.0, bound)
        except Timeout as more:
            raise Timeout(f"{error}; the first of them: {more}") from None
    assert found is not None
    return found[0], found[1].wait()


def _waiting(requests: Sequence[Request], bound: float, *, bounded: bool) -> RegisteredWait:
    """Return the wait for one of several requests; `bounded` states that the caller has given a timeout. The awaited
    calls are known only if the wait is not `bounded` and all requests are messages of one communicator."""
    queues, calls = zip(*(one.awaited for one in requests), strict=True)
    known = not bounded and len(set(queues)) == 1 and not any(call.collective for call in calls)
    call = Call(f"waitany of {len(requests)}", parts=calls if known else (), collective=False)
    queue: OwnQueue = queues[0]
    return queue.waiting(call, bound)


def _check_and_poll(waiting: RegisteredWait, look: Callable[[], Any]) -> Any:
    waiting.check()
    return look()
