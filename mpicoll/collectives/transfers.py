"""Point-to-point transfers in the background."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from time import monotonic
from typing import Any, TypeAlias

from mpicoll.buffers.dtypes import Array
from mpicoll.collectives.message_buffers import NULL_ENVELOPE, RecvBuffer, Status, add_header
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.core.proc_null import PROC_NULL
from mpicoll.engine.core.queue import OperationQueue
from mpicoll.engine.core.queue_errors import timeout_error
from mpicoll.engine.core.request import Request, waitall
from mpicoll.engine.diagnostics.flight_recorder import Call, sinks
from mpicoll.errors import CommunicationError, Timeout, TruncationError
from mpicoll.transport.base import Envelope, Pending

ExplainError: TypeAlias = "Callable[[TruncationError], TruncationError]"
"""Function that returns a more detailed error for a message that was too large."""


class _NullTransfer:
    """Transfer to or from PROC_NULL, which is always complete."""

    def test(self) -> Envelope:
        return NULL_ENVELOPE

    def wait(self, timeout: float | None) -> Envelope:
        return NULL_ENVELOPE

    def cancel(self) -> Envelope:
        return NULL_ENVELOPE


class Transfer:
    """Point-to-point transfer as a request's handle; the watchdog monitors its waits."""

    __slots__ = ("_call", "_comm", "_envelope", "_explain", "_finish", "_pending")

    def __init__(
        self,
        comm: CommunicatorCore,
        pending: Pending,
        finish: Callable[[Envelope], Any],
        call: Call,
        explain: ExplainError,
    ) -> None:
        self._comm = comm
        self._pending = pending
        self._finish = finish
        self._call = call
        self._explain = explain

    def test(self) -> bool:
        try:
            return self._pending.test() is not None
        except CommunicationError:
            return True  # it has failed; wait() raises the error

    @property
    def awaited(self) -> tuple[OperationQueue, Call]:
        return self._comm.queue, self._call

    @property
    def limit(self) -> float:
        return self._comm.timeout

    def wait(self, timeout: float | None, bound: float | None = None) -> None:
        guarded = self._comm.queue.run_with_deadline
        try:
            self._envelope = guarded(self._wait_pending, self._call, timeout, bound, bounded=timeout is not None)
        except TruncationError as error:
            raise self._explain(error) from error

    def _wait_pending(self, timeout: float | None, bound: float | None) -> Envelope:
        try:
            return self._pending.wait(timeout)
        except Timeout:
            limit = next(one for one in (bound, timeout, self.limit) if one is not None)
            queue = self._comm.queue
            raise timeout_error(queue.watch, queue.group, str(self._call), limit) from None

    def cancel_recv(self) -> bool:
        """Cancel a receive for which no message has arrived. Return True if a message has arrived."""
        return self._comm.queue.run_with_deadline(self._pending.cancel, self._call) is not None

    def value(self) -> Any:
        return self._finish(self._envelope)


def start_send(comm: CommunicatorCore, data: Array, call: Call) -> Request:
    call = _rename(call, "isend")
    assert call.peer is not None
    assert call.tag is not None
    null = call.peer is PROC_NULL
    pending = _NullTransfer() if null else comm.transport.isend(add_header(comm, data, call), call.peer, call.tag)
    transfer = _make_transfer(comm, pending, lambda envelope: None, call)
    return Request(transfer, transfer.value)


def start_recv(comm: CommunicatorCore, recv_buffer: RecvBuffer, status: Status | None) -> Transfer:
    call = recv_buffer.call = _rename(recv_buffer.call, "irecv")
    null = call.peer is PROC_NULL
    pending = _NullTransfer() if null else comm.transport.irecv(recv_buffer.memory, call.peer, call.tag)
    return _make_transfer(
        comm, pending, lambda envelope: recv_buffer.finish(envelope, status), call, recv_buffer.explain
    )


def _rename(call: Call, name: str) -> Call:
    """Return `call`, which may describe other messages as well, with this name."""
    if call.name != name:
        call = copy(call)
        call.name = name
    return call


def _make_transfer(
    comm: CommunicatorCore,
    pending: Pending,
    finish: Callable[[Envelope], Any],
    call: Call,
    explain: ExplainError = lambda error: error,
) -> Transfer:
    # Records the start; the wait is recorded as well.
    sinks.emit(((comm.queue.group, 0, call, monotonic(), None), None, ""))
    return Transfer(comm, pending, finish, call, explain)


def wait_with_timeout(receive: Transfer, others: list[Request], bound: float | None) -> Any:
    """Return the received array if the receive and the `others` complete within `bound` seconds.

    Otherwise cancel the receive and raise Timeout. Without a `bound` the timeout of the communicator applies.
    """
    request = Request(receive, receive.value)
    try:
        return waitall([request, *others], bound)[0]
    except Timeout:
        # The message may have arrived after the timeout and before the cancellation.
        if not request.waited and receive.cancel_recv() and not others:
            return request.wait()
        raise
