"""Handles of operations under way."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import nan
from numbers import Real
from typing import Any, Protocol

from mpicoll.engine.core.process_local import refuse_pickling
from mpicoll.engine.core.queue import Progress, Waiting
from mpicoll.engine.diagnostics.flight_recorder import Call
from mpicoll.errors import ArgumentError, Timeout
from mpicoll.transport.base import poll


class Handle(Protocol):
    """What a request stands for."""

    @property
    def limit(self) -> float:
        """Seconds that its communicator gives it."""

    @property
    def awaited(self) -> tuple[Progress, Call]:
        """The queue of its communicator, and the call that is waited for."""

    def test(self) -> Any:
        """Truthy once it has completed."""

    def wait(self, timeout: float | None, bound: float | None = None) -> Any:
        """Block until it has completed. Raises Timeout after `timeout` seconds; `bound` is what the caller was given,
        if that is what is left of it."""


def seconds(operation: str, timeout: Any, *, positive: bool = True) -> float:
    """`timeout` of `operation`. Raises ArgumentError if it is no number of seconds, or not a `positive` one."""
    value = float(timeout) if isinstance(timeout, Real) else nan
    if not (value > 0 or (value <= 0 and not positive)):
        what = "a positive number of seconds" if positive else "a number of seconds"
        raise ArgumentError(f"{operation}: timeout must be {what} or None, got {timeout!r}")
    return value


class Request:
    """An operation under way: ``wait`` for its result, or ``test`` whether it has completed.

    The arrays of the operation must not be changed (nor, for results, read) before it has completed. A request that is
    dropped does not stop its operation.
    """

    __slots__ = ("_finish", "_handle", "_value", "_waited")
    __reduce_ex__ = refuse_pickling("Request", "wait() for it and pass on its result")

    def __init__(self, handle: Handle, finish: Callable[[], Any]) -> None:
        self._handle = handle
        self._finish = finish
        self._waited = False
        self._value: Any = None

    @property
    def limit(self) -> float:
        """Seconds that it may take: its communicator's ``timeout``."""
        return self._handle.limit

    @property
    def awaited(self) -> tuple[Progress, Call]:
        """The queue of its communicator, and the call that is waited for."""
        return self._handle.awaited

    @property
    def waited(self) -> bool:
        """Whether its result was handed out already."""
        return self._waited

    def test(self) -> bool:
        """Whether it has completed; never blocks. ``wait`` gives the result, and the exception of one that failed."""
        return bool(self._waited or self._handle.test())

    def wait(self, timeout: float | None = None, bound: float | None = None) -> Any:
        """The result. Raises what the operation raised, or Timeout after `timeout` seconds, when it is still pending.

        From half a second on, a Timeout says which ranks are missing and where they are; to ask them takes
        milliseconds, or up to 4 s if one can't answer. Whatever `timeout` is, no operation may take longer than its
        communicator's ``timeout``, past which the job is ended. Without MPI_THREAD_MULTIPLE a collective runs in this
        call, which may then take longer than `timeout`. May be called again. Raises ArgumentError for a `timeout` that
        is no number. A Timeout speaks of `bound` seconds, if `timeout` is what is left of them.
        """
        if not self._waited:
            self._handle.wait(None if timeout is None else seconds("wait", timeout, positive=False), bound)
            self._value = self._finish()
            self._waited = True
        return self._value


def waitall(requests: Sequence[Request], timeout: float | None = None) -> list[Any]:
    """The results of all `requests`, in their order. Raises the first exception, or, after `timeout` seconds, Timeout
    that names the first that is still pending (see :meth:`Request.wait`)."""
    if timeout is None:
        return [one.wait() for one in requests]
    timeout = seconds("waitall", timeout, positive=False)
    deadline = time.monotonic() + timeout
    return [one.wait(max(0.0, deadline - time.monotonic()), timeout) for one in requests]


def waitany(requests: Sequence[Request], timeout: float | None = None) -> tuple[int, Any]:
    """The index and the result of one of `requests` that has completed, waiting for it if need be.

    Requests that were waited for already are passed over, as MPI does. Raises ArgumentError if none is left, the
    operation's exception, or Timeout after `timeout` seconds (if that is None, after the least ``timeout`` of their
    communicators).
    """
    if timeout is not None:
        timeout = seconds("waitany", timeout, positive=False)
    active = [(index, one) for index, one in enumerate(requests) if not one.waited]
    if not active:
        raise ArgumentError(f"waitany: none of the {len(requests)} requests is pending")
    if len(active) == 1:
        index, one = active[0]
        return index, one.wait(timeout)

    def first_complete() -> tuple[int, Request] | None:
        return next(((index, one) for index, one in active if one.test()), None)

    bound = min(one.limit for _, one in active) if timeout is None else timeout
    try:
        with _waiting([one for _, one in active], bound, bounded=timeout is not None) as waiting:
            found = poll(lambda: _checked(waiting, first_complete), bound, f"waitany on {len(active)} requests")
    except Timeout as error:
        # One of them says more about itself, and asks the others; unless it has completed by now.
        index, first = active[0]
        try:
            return index, first.wait(0.0, bound)
        except Timeout as more:
            raise Timeout(f"{error}; the first of them: {more}") from None
    assert found is not None
    return found[0], found[1].wait()


def _waiting(requests: Sequence[Request], bound: float, *, bounded: bool) -> Waiting:
    """The wait for one of several requests, `bounded` by the caller or not. What it needs is known if all of them are
    messages of one communicator."""
    progresses, calls = zip(*(one.awaited for one in requests), strict=True)
    known = not bounded and len(set(progresses)) == 1 and not any(call.collective for call in calls)
    call = Call(f"waitany of {len(requests)}", parts=calls if known else (), collective=False)
    progress: Progress = progresses[0]
    return progress.waiting(call, bound)


def _checked(waiting: Waiting, look: Callable[[], Any]) -> Any:
    waiting.check()
    return look()
