"""Messages that the extension carries out, or starts, because they are like earlier ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np

from mpicoll.buffers.recognise import bind_empty, recognise
from mpicoll.collectives.memory import OutputArray
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.core.message_progress import enable_progress
from mpicoll.engine.core.queue import OperationQueue
from mpicoll.engine.core.queue_errors import describe_error, timeout_error
from mpicoll.engine.core.registry import Registry
from mpicoll.engine.core.request import Request
from mpicoll.engine.diagnostics.flight_recorder import Call, EntryTuple, Group, sinks
from mpicoll.engine.executors.staging import ANNOUNCEMENT_BYTES
from mpicoll.errors import Timeout, TruncationError
from mpicoll.transport.base import Envelope, Route, truncation_error
from mpicoll.transport.waiting import poll

if TYPE_CHECKING:
    from mpicoll._shm import PendingMessage

SIZE_REMEDY = (
    "sender and receiver must agree on the size; mpicoll.probe returns the size of a message before it is received"
)

_MAX_BYTES = 2**31 - 1
"""Size of the largest message that is one block for MPI."""


def repeat_send(comm: CommunicatorCore, x: Any, dest: int, tag: int, call: Call) -> None:
    """Have the extension carry out later sends like `call`, of arrays like `x`."""
    if dest != comm.rank:  # where an error is raised unless a receive has been posted
        _repeat(comm, ("send", dest, tag), x, None, call, Route(dest, tag), None)


def repeat_recv(comm: CommunicatorCore, x: Any, out: Any, source: int | None, tag: int | None, call: Call) -> None:
    """Have the extension carry out later receives like `call`, of arrays like `x` or into arrays like `out`."""
    _repeat(comm, ("recv", source, tag, None), x, x if out is None else out, call, None, Route(source, tag))


def repeat_sendrecv(
    comm: CommunicatorCore,
    sent: tuple[Any, int, int],
    received: tuple[Any, int | None, int | None],
    call: Call,
) -> None:
    """Have the extension carry out later exchanges like `call`. Its arguments are those of
    :func:`~mpicoll.collectives.message_buffers.repeat_exchange`."""
    (x, dest, sendtag), (out, source, recvtag) = sent, received
    key = "sendrecv", dest, source, sendtag, recvtag, None, None
    _repeat(comm, key, x, x if out is None else out, call, Route(dest, sendtag), Route(source, recvtag))


def repeat_isend(comm: CommunicatorCore, x: Any, dest: int, tag: int, call: Call) -> None:
    """Have the extension start later sends like `call`, of arrays like `x`, which return a Request."""
    wrap = partial(make_request, comm.queue)
    repeat_started(comm, ("isend", dest, tag), x, None, call, Route(dest, tag), wrap)


def repeat_irecv(comm: CommunicatorCore, x: Any, out: Any, source: int | None, tag: int | None, call: Call) -> None:
    """Have the extension start later receives like `call`, of arrays like `x` or into arrays like `out`, which return a
    Request."""
    wrap = partial(make_request, comm.queue)
    result = x if out is None else out
    repeat_started(comm, ("irecv", source, tag, None), x, result, call, Route(source, tag), wrap)


def repeat_started(
    comm: CommunicatorCore,
    key: tuple[Any, ...],
    x: Any,
    result: Any,
    call: Call,
    route: Route,
    wrap: Callable[[PendingMessage], Any],
) -> None:
    """Have the extension start later messages like `call`, with this `key`, and return ``wrap(message)`` for them:
    sends of arrays like `x`, or receives into arrays like `result`, where that is not None."""
    size = x.nbytes if result is None else result.nbytes
    if comm.queue.calls is None or size > _MAX_BYTES:
        return
    conclude = partial(_conclude_failure, comm.queue.group, size)
    active = None if comm.watch is None else comm.watch.active
    accept = partial(_accept_announced, comm.registry)
    carrier = comm.transport.bind_started_message(
        route, active, conclude, wrap, accept, size=size, sends=result is None
    )
    if carrier is not None and enable_progress():
        make_result = None if result is None or x is None else bind_empty(result)
        comm.queue.add_call(key, x, result, make_result, carrier, call, in_place=False)


def make_request(queue: OperationQueue, message: PendingMessage) -> Request:
    """Return the request of a message that the extension has started."""
    handle = StartedMessage(queue, message)
    return Request(handle, handle.value)


def makes_progress(request: Request) -> bool:
    """Return True if the extension has started the message: it makes progress on it while no thread waits for it."""
    return isinstance(request._handle, StartedMessage)  # noqa: SLF001  made by make_request


class StartedMessage:
    """Message that the extension has started, as a request's handle."""

    __slots__ = ("_message", "_queue")

    def __init__(self, queue: OperationQueue, message: PendingMessage) -> None:
        self._queue = queue
        self._message = message

    def test(self) -> bool:
        return self._message.test()

    @property
    def awaited(self) -> tuple[OperationQueue, Call]:
        return self._queue, self._message.call

    @property
    def limit(self) -> float:
        return self._queue.group.timeout

    def wait(self, timeout: float | None, bound: float | None = None) -> None:
        if timeout is not None:
            self._queue.run_with_deadline(self._wait_within, self._message.call, timeout, bound, bounded=True)
        self._message.wait()  # which raises the error of a message that has failed

    def _wait_within(self, timeout: float, bound: float | None) -> None:
        try:
            poll(self._message.test, timeout, "message")
        except Timeout:
            queue = self._queue
            limit = timeout if bound is None else bound
            raise timeout_error(queue.watch, queue.group, str(self._message.call), limit) from None

    def value(self) -> Any:
        return None if self._message.sends else self._message.array


def _repeat(
    comm: CommunicatorCore,
    key: tuple[Any, ...],
    x: Any,
    result: Any,
    call: Call,
    sent: Route | None,
    received: Route | None,
) -> None:
    if comm.queue.calls is None or max(one.nbytes for one in (x, result) if one is not None) > _MAX_BYTES:
        return
    # Not the communicator: the queue, which refers to this, must not keep it.
    conclude = partial(_conclude_failure, comm.queue.group, 0 if result is None else result.nbytes)
    active = None if comm.watch is None else comm.watch.active
    accept = None if received is None else partial(_accept_announced, comm.registry)
    carrier = comm.transport.bind_messages(sent, received, active, conclude, accept)
    if carrier is not None:
        make_result = None if result is None or x is None else bind_empty(result)
        comm.queue.add_call(key, x, result, make_result, carrier, call, in_place=False)


def _accept_announced(registry: Registry, array: Any, nbytes: int) -> int:
    """Store the message whose announcement, of `nbytes`, was received into `array`, an array or its bytes. Return the
    bytes of that message; `nbytes` if none was announced. The receive may have begun before there were
    announcements."""
    if nbytes != ANNOUNCEMENT_BYTES or not registry.peer_messages:
        return nbytes
    from mpicoll.engine.executors.peer_messages import find_announced

    target = OutputArray(recognise("irecv", np.frombuffer(array, np.uint8) if type(array) is memoryview else array))
    announced = find_announced(registry, target.as_bytes[:nbytes])
    if announced is None:
        return nbytes
    if announced.nbytes != target.as_bytes.size:
        announced.drop()
        return announced.nbytes
    announced.copy_to(target.as_bytes)
    target.store()
    return announced.nbytes


def _conclude_failure(
    group: Group, size: int, entry: EntryTuple, error: Exception | None, message: Envelope
) -> Exception:
    """Record that the operation of `entry` has failed, and return the exception to raise: `error` or, if that is None,
    one for a `message` of another size than `size`."""
    call = entry[2].parts[-1] if entry[2].parts else entry[2]
    if error is None:
        shown: Exception = size_error(group, call, call.name, message, size)
    else:
        shown = explain_truncation(group, call, error) if isinstance(error, TruncationError) else error
    sinks.emit((entry, monotonic(), describe_error(shown)))
    return shown


def size_error(group: Group, call: Call, name: str, message: Envelope, size: int) -> TruncationError:
    """Return the error for a `message` that was received by `call`, of `name`, where `size` bytes were expected."""
    if message.nbytes > size:
        return explain_truncation(group, call, truncation_error(group.rank, message, size))
    return TruncationError(
        f"{name}: a message of {message.nbytes} bytes from rank {message.source} (tag {message.tag})"
        f" arrived where {size} bytes, shape {call.shape} of dtype"
        f" {call.dtype}, were expected (rank {group.rank} of {len(group.members)});"
        f" {SIZE_REMEDY}"
    )


def explain_truncation(group: Group, call: Call, error: TruncationError) -> TruncationError:
    """Return the error for a message that was too large for `call`, with its cause `error`."""
    shown = TruncationError(
        f"{call} on {group.name}, rank {group.rank} of {len(group.members)}: {error}; {SIZE_REMEDY}"
    )
    shown.__cause__ = error
    return shown
