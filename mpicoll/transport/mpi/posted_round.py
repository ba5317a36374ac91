"""The messages of a round that were posted and are completed later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from mpi4py import MPI

from mpicoll.transport.base import Message
from mpicoll.transport.mpi.fault_tolerance import FailureState, fault_tolerant


class _Endpoint(Protocol):
    """Part of the transport whose messages they are."""

    @property
    def failures(self) -> FailureState: ...
    def translate_error(self, error: Exception) -> Exception: ...
    def fail_round(
        self,
        requests: Sequence[MPI.Request],
        statuses: Sequence[MPI.Status],
        sends: Sequence[Message],
        recvs: Sequence[Message],
        error: BaseException | None,
    ) -> None: ...
    def check_sizes(self, recvs: Sequence[Message], statuses: Sequence[MPI.Status]) -> None: ...


class PostedRound:
    """Messages in flight. `post` starts the transfer of each receive, then of each send."""

    def __init__(
        self,
        endpoint: _Endpoint,
        sends: Sequence[Message],
        recvs: Sequence[Message],
        post: Callable[[list[MPI.Request]], None],
    ) -> None:
        self._endpoint = endpoint
        self._sends, self._recvs = sends, recvs
        self._requests: list[MPI.Request] = []
        self._statuses = [MPI.Status() for _ in range(len(recvs) + len(sends))]
        self._guard(lambda: post(self._requests))

    def test(self) -> bool:
        """Return True if all messages have completed."""
        return self._guard(self._test)

    def discard(self) -> None:
        """Cancel the receives, after a failure elsewhere; the memory of unfinished transfers is kept alive."""
        self._endpoint.fail_round(self._requests, self._statuses, self._sends, self._recvs, None)

    def _test(self) -> bool:
        if fault_tolerant():
            complete = self._endpoint.failures.complete
            while self._requests:
                at = len(self._requests) - 1
                if not complete(self._requests[at], self._statuses[at]):
                    return False
                self._requests.pop()
        elif not MPI.Request.Testall(self._requests, self._statuses):
            return False
        self._endpoint.check_sizes(self._recvs, self._statuses)
        return True

    def _guard(self, step: Callable[[], bool | None]) -> bool:
        """Call `step`; after a failure, abandon the messages and raise the transport's error."""
        try:
            try:
                return bool(step())
            except BaseException as error:
                self._endpoint.fail_round(self._requests, self._statuses, self._sends, self._recvs, error)
                raise
        except MPI.Exception as error:
            raise self._endpoint.translate_error(error) from error
