"""Handles of operations under way."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from mpicoll.config import config
from mpicoll.errors import ArgumentError
from mpicoll.transport.base import poll


class Handle(Protocol):
    """What a request stands for."""

    def test(self) -> Any:
        """Truthy once it has completed."""

    def wait(self, timeout: float | None) -> Any:
        """Block until it has completed."""


class Request:
    """An operation under way: ``wait`` for its result, or ``test`` whether it has completed.

    The arrays of the operation must not be changed (nor, for results, read) before it has completed. A request that is
    dropped does not stop its operation.
    """

    __slots__ = ("_finish", "_handle", "_value", "_waited")

    def __init__(self, handle: Handle, finish: Callable[[], Any]) -> None:
        self._handle = handle
        self._finish = finish
        self._waited = False
        self._value: Any = None

    @property
    def waited(self) -> bool:
        """Whether its result was handed out already."""
        return self._waited

    def test(self) -> bool:
        """Whether it has completed; never blocks. ``wait`` gives the result, and the exception of one that failed."""
        return bool(self._waited or self._handle.test())

    def wait(self, timeout: float | None = None) -> Any:
        """The result. Raises what the operation raised, or Timeout after `timeout` seconds, when it is still pending.

        Without `timeout` the bound is ``MPICOLL_TIMEOUT``, past which the job is ended. Without MPI_THREAD_MULTIPLE a
        collective runs in this call, which may then take longer than `timeout`. May be called again.
        """
        if not self._waited:
            self._handle.wait(timeout)
            self._value = self._finish()
            self._waited = True
        return self._value


def waitall(requests: Sequence[Request], timeout: float | None = None) -> list[Any]:
    """The results of all `requests`, in their order. Raises the first exception, or Timeout after `timeout` seconds."""
    deadline = None if timeout is None else time.monotonic() + timeout
    return [one.wait(None if deadline is None else max(0.0, deadline - time.monotonic())) for one in requests]


def waitany(requests: Sequence[Request], timeout: float | None = None) -> tuple[int, Any]:
    """The index and the result of one of `requests` that has completed, waiting for it if need be.

    Requests that were waited for already are passed over, as MPI does. Raises ArgumentError if none is left, the
    operation's exception, or Timeout after `timeout` seconds (MPICOLL_TIMEOUT if that is None).
    """
    active = [(index, one) for index, one in enumerate(requests) if not one.waited]
    if not active:
        raise ArgumentError(f"waitany: none of the {len(requests)} requests is pending")
    if len(active) == 1:
        index, one = active[0]
        return index, one.wait(timeout)

    def first_complete() -> tuple[int, Request] | None:
        return next(((index, one) for index, one in active if one.test()), None)

    bound = config().timeout if timeout is None else timeout
    found = poll(first_complete, bound, f"waitany on {len(active)} requests")
    assert found is not None
    return found[0], found[1].wait(None)
