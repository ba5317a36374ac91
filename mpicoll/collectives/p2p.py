"""Point-to-point operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from time import monotonic
from typing import Any, TypeAlias

from mpicoll.buffers.buffer import Buffer
from mpicoll.buffers.device import device_of
from mpicoll.buffers.dtypes import Array
from mpicoll.buffers.recognise import recognise
from mpicoll.buffers.streams import record_events
from mpicoll.collectives import arguments
from mpicoll.collectives.arguments import (
    PROC_NULL,
    adds_rank_to_errors,
    call_with_timeout,
    check_timeout,
    recognise_prototype,
    resolve_output,
)
from mpicoll.collectives.memory import InputArray, OutputArray
from mpicoll.engine.core import message_check
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.core.queue import OperationQueue
from mpicoll.engine.core.queue_errors import timeout_error
from mpicoll.engine.core.request import Request, waitall
from mpicoll.engine.diagnostics.flight_recorder import Call, find_call_site, sinks
from mpicoll.engine.executors.staging import DeviceReceive, copy_to_host, sends_device_memory
from mpicoll.engine.world import CommLike, resolve
from mpicoll.errors import CommunicationError, MismatchError, RankError, Timeout, TruncationError
from mpicoll.transport.base import Envelope, Pending

ExplainError: TypeAlias = "Callable[[TruncationError], TruncationError]"
"""Function that returns a more detailed error for a message that was too large."""


@dataclass(slots=True)
class Status:
    """Envelope of a message: filled by ``recv(status=...)``, returned by :func:`probe`.

    Attributes:
        source: Rank that has sent the message.
        tag: Its tag.
        nbytes: Its size in bytes.

    Example:
        >>> request = mpicoll.isend(np.ones(2), 0, tag=7)
        >>> status = mpicoll.Status()
        >>> _ = mpicoll.recv(np.empty(2), status=status)
        >>> status.source, status.tag, status.nbytes
        (0, 7, 16)
        >>> request.wait()
    """

    source: int = -1
    tag: int = -1
    nbytes: int = -1


def send(x: Any, dest: int, tag: int = 0, *, comm: CommLike = None, timeout: float | None = None) -> None:
    """Send the array `x` to rank `dest`.

    Returns when `x` may be changed again, which may wait for the receiver.

    Args:
        x: the array to send, of any dtype of fixed size. `dest` must receive an array of the same shape and dtype.
        dest: the receiving rank. To ``mpicoll.PROC_NULL``, such as the neighbour of a rank at the border, nothing is
            sent. A send to the calling rank itself needs a matching pending :func:`irecv`.
        tag: 0 or more, equal to the receiver's.
        comm: the communicator; None is :func:`mpicoll.world`.
        timeout: seconds to wait (see :meth:`Request.wait <mpicoll.Request.wait>`).

    Raises:
        DTypeError, RankError: an argument is invalid; no message has been sent.
        Timeout: the send is not complete after `timeout` seconds. It is still pending: `x` must not be changed until
            the message has been received.

    Example:
        >>> received = mpicoll.irecv(np.empty(2), source=0, tag=1)
        >>> mpicoll.send(np.array([1.0, 2.0]), dest=0, tag=1)  # on one rank
        >>> received.wait()
        array([1., 2.])
    """
    communicator = resolve(comm)
    data, call = _prepare_send(communicator, "send", x, dest, tag)
    if call.peer is PROC_NULL:
        return
    if timeout is not None:
        call_with_timeout(communicator, "send", timeout, lambda: _start_send(communicator, data, call))
        return
    if call.peer == communicator.rank:
        _check_self_recv(communicator, tag)
    communicator.queue.run_with_deadline(
        communicator.transport.send, call, _add_header(communicator, data, call), call.peer, call.tag
    )


def recv(
    x: Any = None,
    source: int | None = None,
    tag: int | None = None,
    *,
    out: Any = None,
    status: Status | None = None,
    comm: CommLike = None,
    timeout: float | None = None,
) -> Any:
    """Receive an array from rank `source`.

    Args:
        x: an array of the shape, dtype and library of the array to receive, whose contents don't matter; None if `out`
            is given.
        source: the sending rank; None receives from any. From ``mpicoll.PROC_NULL`` nothing is received: the call
            returns at once, with a status of source PROC_NULL, tag -1 and nbytes 0.
        tag: the tag of the message; None receives any.
        out: an array for the message; None creates one. From PROC_NULL it is not changed.
        status: is filled with source, tag and size of the message.
        comm: the communicator; None is :func:`mpicoll.world`.
        timeout: seconds to wait (see :meth:`Request.wait <mpicoll.Request.wait>`).

    Returns:
        The received array: `out`, or a new array. From PROC_NULL it is `out`, which may be None.

    Raises:
        DTypeError, ShapeError, RankError: an argument is invalid; the call has not waited.
        TruncationError: the size of the message differs from that of `x`.
        Timeout: no message has arrived after `timeout` seconds. One that arrives later can be received by another
            receive.

    Example:
        >>> request = mpicoll.isend(np.array([1.0, 2.0]), dest=0, tag=1)
        >>> mpicoll.recv(np.empty(2), source=0, tag=1)  # on one rank
        array([1., 2.])
        >>> request.wait()
    """
    communicator = resolve(comm)
    recv_buffer = _prepare_recv(communicator, "recv", x, source, tag, out)
    if timeout is not None:
        bound = check_timeout(communicator, "recv", timeout)
        return _wait_with_timeout(_start_recv(communicator, recv_buffer, status), [], bound)
    call = recv_buffer.call
    if call.peer is PROC_NULL:
        return recv_buffer.finish(_NULL_ENVELOPE, status)
    try:
        envelope = communicator.queue.run_with_deadline(
            communicator.transport.recv, call, recv_buffer.memory, call.peer, call.tag
        )
    except TruncationError as error:
        raise recv_buffer.explain(error) from error
    return recv_buffer.finish(envelope, status)


def sendrecv(
    x: Any,
    dest: int,
    source: int | None = None,
    sendtag: int = 0,
    recvtag: int | None = None,
    *,
    like: Any = None,
    out: Any = None,
    status: Status | None = None,
    comm: CommLike = None,
    timeout: float | None = None,
) -> Any:
    """Send `x` to `dest` and receive an array from `source`, concurrently, which can't deadlock.

    Args:
        x: the array to send (see :func:`send`).
        dest: the receiving rank, or ``mpicoll.PROC_NULL``.
        source: the sending rank, or ``mpicoll.PROC_NULL``; None receives from any.
        sendtag: the tag of the sent message.
        recvtag: the tag of the received message; None receives any.
        like: an array of the shape and dtype of the array to receive; None takes `out` if given, else `x`.
        out: an array for the received message; None creates one.
        status: is filled with source, tag and size of the received message.
        comm: the communicator; None is :func:`mpicoll.world`.
        timeout: seconds to wait (see :func:`recv`).

    Returns:
        The received array: `out`, or a new array.

    Raises:
        DTypeError, ShapeError, RankError: an argument is invalid; no message has been sent.
        TruncationError: the size of the received message differs from the expected one.
        Timeout: the exchange is not complete after `timeout` seconds (see :func:`send` and :func:`recv`).

    Example:
        >>> mpicoll.sendrecv(np.array([1.0, 2.0]), dest=0, source=0)  # on one rank
        array([1., 2.])
    """
    communicator = resolve(comm)
    data, sent = _prepare_send(communicator, "sendrecv", x, dest, sendtag)
    expected = like if like is not None else x if out is None else out
    recv_buffer = _prepare_recv(communicator, "sendrecv", expected, source, recvtag, out, disjoint_from=data)
    if timeout is not None or sent.peer is PROC_NULL or recv_buffer.call.peer is PROC_NULL:
        bound = None if timeout is None else check_timeout(communicator, "sendrecv", timeout)
        receive = _start_recv(communicator, recv_buffer, status)
        return _wait_with_timeout(receive, [_start_send(communicator, data, sent)], bound)
    received, message = recv_buffer.call, _add_header(communicator, data, sent)
    sent.name, received.name = "send", "recv"
    call = Call("sendrecv", parts=(sent, received), collective=False)
    try:
        envelope = communicator.queue.run_with_deadline(
            communicator.transport.sendrecv,
            call,
            message,
            sent.peer,
            sent.tag,
            recv_buffer.memory,
            received.peer,
            received.tag,
        )
    except TruncationError as error:
        raise recv_buffer.explain(error) from error
    return recv_buffer.finish(envelope, status)


def isend(x: Any, dest: int, tag: int = 0, *, comm: CommLike = None) -> Request:
    """Start a :func:`send` in the background, with the same arguments.

    Returns:
        A request whose value is None. Until it has completed, `x` must not be changed.

    Example:
        >>> request = mpicoll.isend(np.ones(2), dest=mpicoll.PROC_NULL)
        >>> request.wait()
    """
    communicator = resolve(comm)
    return _start_send(communicator, *_prepare_send(communicator, "isend", x, dest, tag))


def _start_send(comm: CommunicatorCore, data: Array, call: Call) -> Request:
    assert call.peer is not None
    assert call.tag is not None
    call.name = "isend"
    null = call.peer is PROC_NULL
    pending = _NullTransfer() if null else comm.transport.isend(_add_header(comm, data, call), call.peer, call.tag)
    transfer = _make_transfer(comm, pending, lambda envelope: None, call)
    return Request(transfer, transfer.value)


def irecv(
    x: Any = None,
    source: int | None = None,
    tag: int | None = None,
    *,
    out: Any = None,
    status: Status | None = None,
    comm: CommLike = None,
) -> Request:
    """Start a :func:`recv` in the background, with the same arguments.

    Returns:
        A request whose value is the array; ``wait`` of the request fills `status`. Until it has completed, `out` must
        not be used.

    Example:
        >>> request = mpicoll.irecv(np.empty(2), source=0)
        >>> mpicoll.send(np.ones(2), dest=0)  # on one rank
        >>> request.wait()
        array([1., 1.])
    """
    communicator = resolve(comm)
    transfer = _start_recv(communicator, _prepare_recv(communicator, "irecv", x, source, tag, out), status)
    return Request(transfer, transfer.value)


def _start_recv(comm: CommunicatorCore, recv_buffer: _RecvBuffer, status: Status | None) -> _Transfer:
    call = recv_buffer.call
    call.name = "irecv"
    null = call.peer is PROC_NULL
    pending = _NullTransfer() if null else comm.transport.irecv(recv_buffer.memory, call.peer, call.tag)
    return _make_transfer(
        comm, pending, lambda envelope: recv_buffer.finish(envelope, status), call, recv_buffer.explain
    )


def _wait_with_timeout(receive: _Transfer, others: list[Request], bound: float | None) -> Any:
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


def probe(
    source: int | None = None, tag: int | None = None, *, timeout: float | None = None, comm: CommLike = None
) -> Status:
    """Wait until a message can be received, and return its status.

    The message is not received.

    Args:
        source: the sending rank; None matches any. For ``mpicoll.PROC_NULL`` the call returns at once the status of a
            message of 0 bytes, as MPI does.
        tag: the tag of the message; None matches any.
        timeout: seconds to wait (see :meth:`Request.wait <mpicoll.Request.wait>`).
        comm: the communicator; None is :func:`mpicoll.world`.

    Returns:
        Source, tag and size in bytes of the message.

    Raises:
        RankError: an argument is out of range; the call has not waited.
        Timeout: no such message has arrived after `timeout` seconds.

    Example:
        >>> request = mpicoll.isend(np.ones(2), dest=0, tag=5)
        >>> mpicoll.probe(source=0)  # on one rank
        Status(source=0, tag=5, nbytes=16)
        >>> mpicoll.recv(np.empty(2), source=0)
        array([1., 1.])
        >>> request.wait()
    """
    communicator = resolve(comm)
    source, tag = _check_probe_arguments(communicator, "probe", source, tag)
    if source is PROC_NULL:
        return _make_status(communicator, _NULL_ENVELOPE)
    bound = None if timeout is None else check_timeout(communicator, "probe", timeout)
    call = Call("probe", peer=source, tag=tag, collective=False)

    def wait(bound: float | None) -> Envelope:
        try:
            return communicator.transport.probe(source, tag, bound)
        except Timeout:
            limit = communicator.timeout if bound is None else bound
            queue = communicator.queue
            raise timeout_error(queue.watch, queue.group, str(call), limit, "") from None

    return _make_status(
        communicator, communicator.queue.run_with_deadline(wait, call, bound, bounded=bound is not None)
    )


def iprobe(source: int | None = None, tag: int | None = None, *, comm: CommLike = None) -> Status | None:
    """Test without waiting whether a message can be received.

    Args:
        source: the sending rank; None matches any.
        tag: the tag of the message; None matches any.
        comm: the communicator; None is :func:`mpicoll.world`.

    Returns:
        The status as :func:`probe` returns it, or None if no such message has arrived.

    Raises:
        RankError: an argument is out of range.

    Example:
        >>> print(mpicoll.iprobe(source=0))  # on one rank
        None
    """
    communicator = resolve(comm)
    source, tag = _check_probe_arguments(communicator, "iprobe", source, tag)
    if source is PROC_NULL:
        return _make_status(communicator, _NULL_ENVELOPE)
    envelope = communicator.transport.iprobe(source, tag)
    return None if envelope is None else _make_status(communicator, envelope)


def _make_status(comm: CommunicatorCore, envelope: Envelope) -> Status:
    nbytes = envelope.nbytes
    if comm.checks.calls and nbytes >= message_check.LENGTH:
        nbytes -= message_check.LENGTH
    return Status(envelope.source, envelope.tag, nbytes)


def _add_header(comm: CommunicatorCore, data: Array, call: Call) -> Array:
    """Return the message to be sent: `data`, preceded by a header if messages are checked."""
    return (
        message_check.add_header(data, message_check.make_header(call, find_call_site())) if comm.checks.calls else data
    )


class _RecvBuffer:
    """Receive buffer. The transport fills `memory`, which has room for a header if messages are checked."""

    __slots__ = ("_comm", "_header", "_name", "_out", "_output", "_target", "call", "memory")

    def __init__(
        self, comm: CommunicatorCore, output: Buffer, target: OutputArray | DeviceReceive, call: Call, out: Any
    ) -> None:
        self._comm = comm
        self._output = output
        self._out = out
        self._target = target
        self._name = call.name
        self.call = call
        self._header: message_check.Header | None = None
        self.memory = target.as_bytes
        if comm.checks.calls:
            self._header = message_check.make_header(call, find_call_site())
            self.memory = message_check.receive_buffer(self.memory.size)

    def finish(self, envelope: Envelope, status: Status | None) -> Any:
        """Return the array with the received message.

        Raises TruncationError or MismatchError if the message differs from the expected one.
        """
        target, nbytes = self._target, envelope.nbytes
        if envelope.source is PROC_NULL:
            if status is not None:
                status.source, status.tag, status.nbytes = envelope.source, envelope.tag, 0
            return self._out
        begin = 0
        if self._header is not None:
            sent = message_check.header_of(self.memory[:nbytes])
            if sent is not None:
                begin = message_check.LENGTH
                nbytes -= begin
                self._compare(sent, envelope.source, envelope.tag)
        if status is not None:
            status.source, status.tag, status.nbytes = envelope.source, envelope.tag, nbytes
        if nbytes != target.as_bytes.size:
            raise TruncationError(
                f"{self._name}: a message of {nbytes} bytes from rank {envelope.source} (tag {envelope.tag})"
                f" arrived where {target.as_bytes.size} bytes, shape {self._output.array.shape} of dtype"
                f" {self._output.dtype.name}, were expected (rank {self._comm.rank} of {self._comm.size});"
                f" {_SIZE_REMEDY}"
            )
        if self._header is not None:
            target.as_bytes[:] = self.memory[begin : begin + nbytes]
        target.store()
        return self._output.result()

    def explain(self, error: TruncationError) -> TruncationError:
        """Return a detailed error for a message that is larger than its buffer, with its header if received."""
        if self._header is not None:
            sent = message_check.header_of(self.memory)
            if sent is not None:
                try:
                    self._compare(sent, self.call.peer, self.call.tag)
                except TruncationError as better:
                    return better
        comm = self._comm
        return TruncationError(f"{self.call} on {comm.name}, rank {comm.rank} of {comm.size}: {error}; {_SIZE_REMEDY}")

    def _compare(self, sent: message_check.Header, source: int | None, tag: int | None) -> None:
        """Raise TruncationError or MismatchError if the header of the sender differs from that of this receive."""
        expected = self._header
        assert expected is not None
        fields = tuple(
            name
            for name, differ in (
                ("size", sent["nbytes"] != expected["nbytes"]),
                ("dtype", sent["dtype"] != expected["dtype"]),
                ("shape", not _shapes_match(sent["shape"], expected["shape"])),
            )
            if differ
        )
        if not fields:
            return
        origin = "" if source is None else f" from rank {source}"
        tag_text = "" if tag is None else f", tag {tag},"
        text = (
            f"rank {self._comm.rank} of {self._comm.size} ({self._comm.name}): the message{origin}{tag_text} does not"
            f" match the receive: they differ in {' and '.join(fields)}\n"
            f"  it was sent by {_describe_header(sent)}\n  and is received by {_describe_header(expected)}"
        )
        if "size" in fields:
            raise TruncationError(text)
        raise MismatchError(text, () if source is None else (source,), fields, (sent, expected))


_SIZE_REMEDY = (
    "sender and receiver must agree on the size; mpicoll.probe returns the size of a message before it is received"
)


def _shapes_match(sent: Sequence[int] | None, expected: Sequence[int] | None) -> bool:
    """Return True if the shapes are compatible. Flat shapes fit all others, since torch's messages are sent flat."""
    return sent is None or expected is None or sent == expected or min(len(sent), len(expected)) < 2


def _describe_header(header: message_check.Header) -> str:
    return str(header["text"]) + (f" at {header['site']}" if header["site"] else "")


_NULL_ENVELOPE = Envelope(PROC_NULL, -1, 0)
"""Envelope of a receive from PROC_NULL."""


class _NullTransfer:
    """Transfer to or from PROC_NULL, which is always complete."""

    def test(self) -> Envelope:
        return _NULL_ENVELOPE

    def wait(self, timeout: float | None) -> Envelope:
        return _NULL_ENVELOPE

    def cancel(self) -> Envelope:
        return _NULL_ENVELOPE


class _Transfer:
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


def _make_transfer(
    comm: CommunicatorCore,
    pending: Pending,
    finish: Callable[[Envelope], Any],
    call: Call,
    explain: ExplainError = lambda error: error,
) -> _Transfer:
    # Records the start; the wait is recorded as well.
    sinks.emit(((comm.queue.group, 0, call, monotonic(), None), None, ""))
    return _Transfer(comm, pending, finish, call, explain)


@adds_rank_to_errors
def _prepare_send(comm: CommunicatorCore, operation: str, x: Any, dest: Any, tag: Any) -> tuple[Array, Call]:
    """Check `dest` and `tag`, and return the bytes of `x` and the Call record."""
    dest, tag = arguments.check_peer(operation, "dest", dest, comm), arguments.check_tag(operation, tag, comm)
    buffer = recognise(operation, x)
    device, call = device_of(buffer.array), _describe_call(operation, buffer, dest, tag)
    if device is not None and not sends_device_memory(comm.checks.calls):
        return copy_to_host(buffer, device), call
    source = InputArray(buffer)
    with nullcontext() if device is None else device.working(record_events(buffer)):
        source.load()
    return source.as_bytes, call


def _describe_call(operation: str, buffer: Buffer, peer: int | None, tag: int | None) -> Call:
    array = buffer.array
    device = device_of(array)
    return Call(
        operation,
        array.nbytes,
        buffer.dtype.name,
        array.shape,
        peer=peer,
        tag=tag,
        memory="" if device is None else device.kind,
        collective=False,
    )


@adds_rank_to_errors
def _prepare_recv(
    comm: CommunicatorCore, operation: str, x: Any, source: Any, tag: Any, out: Any, disjoint_from: Array | None = None
) -> _RecvBuffer:
    """Check `source` and `tag`, and return the receive buffer."""
    source, tag = _check_source_and_tag(comm, operation, source, tag)
    like = recognise_prototype(operation, x, out)
    output = resolve_output(operation, out, like, like.array.shape)
    return _RecvBuffer(
        comm, output, _make_target(comm, output, disjoint_from), _describe_call(operation, output, source, tag), out
    )


def _make_target(comm: CommunicatorCore, output: Buffer, disjoint_from: Array | None) -> OutputArray | DeviceReceive:
    device = device_of(output.array)
    if device is None:
        return OutputArray(output, disjoint_from)
    return DeviceReceive(output, device, direct=sends_device_memory(comm.checks.calls))


def _check_source_and_tag(
    comm: CommunicatorCore, operation: str, source: Any, tag: Any
) -> tuple[int | None, int | None]:
    return (
        None if source is None else arguments.check_peer(operation, "source", source, comm),
        None if tag is None else arguments.check_tag(operation, tag, comm),
    )


_check_probe_arguments = adds_rank_to_errors(_check_source_and_tag)


@adds_rank_to_errors
def _check_self_recv(comm: CommunicatorCore, tag: int) -> None:
    if not comm.transport.matches_own_message(tag):
        raise RankError(
            f"send: rank {comm.rank} sends to itself, but no pending irecv matches tag {tag}, so it would never"
            " complete; post the irecv first, or use isend or sendrecv"
        )
