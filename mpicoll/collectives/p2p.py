"""Point-to-point operations."""

from __future__ import annotations

from typing import Any, overload

from mpicoll.collectives.arguments import ArrayT, adds_rank_to_errors, call_with_timeout, check_timeout
from mpicoll.collectives.call import repeats
from mpicoll.collectives.message_buffers import (
    NULL_ENVELOPE,
    Status,
    add_header,
    check_source_and_tag,
    make_status,
    prepare_recv,
    prepare_send,
    repeat_exchange,
)
from mpicoll.collectives.transfers import start_recv, start_send, wait_with_timeout
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.core.proc_null import PROC_NULL
from mpicoll.engine.core.queue_errors import timeout_error
from mpicoll.engine.core.request import Request
from mpicoll.engine.diagnostics.flight_recorder import Call
from mpicoll.engine.world import CommLike, resolve
from mpicoll.errors import RankError, Timeout, TruncationError
from mpicoll.transport.base import Envelope


@repeats("send", "dest", "tag")
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
    data, call = prepare_send(communicator, "send", x, dest, tag)
    if call.peer is PROC_NULL:
        return
    if timeout is not None:
        call_with_timeout(communicator, "send", timeout, lambda: start_send(communicator, data, call))
        return
    if call.peer == communicator.rank:
        _check_self_recv(communicator, tag)
    communicator.queue.run_with_deadline(
        communicator.transport.send, call, add_header(communicator, data, call), call.peer, call.tag
    )


@overload
def recv(
    x: ArrayT,
    source: int | None = ...,
    tag: int | None = ...,
    *,
    out: None = ...,
    status: Status | None = ...,
    comm: CommLike = ...,
    timeout: float | None = ...,
) -> ArrayT | Any: ...  # None from PROC_NULL, for which most programs need no look
@overload
def recv(
    x: Any = ...,
    source: int | None = ...,
    tag: int | None = ...,
    *,
    out: ArrayT,
    status: Status | None = ...,
    comm: CommLike = ...,
    timeout: float | None = ...,
) -> ArrayT: ...
@repeats("recv", "source", "tag", "status")
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
    recv_buffer = prepare_recv(communicator, "recv", x, source, tag, out)
    if timeout is not None:
        bound = check_timeout(communicator, "recv", timeout)
        return wait_with_timeout(start_recv(communicator, recv_buffer, status), [], bound)
    call = recv_buffer.call
    if call.peer is PROC_NULL:
        return recv_buffer.finish(NULL_ENVELOPE, status)
    try:
        envelope = communicator.queue.run_with_deadline(
            communicator.transport.recv, call, recv_buffer.memory, call.peer, call.tag
        )
    except TruncationError as error:
        raise recv_buffer.explain(error) from error
    return recv_buffer.finish(envelope, status)


@overload
def sendrecv(
    x: ArrayT,
    dest: int,
    source: int | None = ...,
    sendtag: int = ...,
    recvtag: int | None = ...,
    *,
    like: None = ...,
    out: None = ...,
    status: Status | None = ...,
    comm: CommLike = ...,
    timeout: float | None = ...,
) -> ArrayT | Any: ...  # None from PROC_NULL
@overload
def sendrecv(
    x: Any,
    dest: int,
    source: int | None = ...,
    sendtag: int = ...,
    recvtag: int | None = ...,
    *,
    like: ArrayT,
    out: None = ...,
    status: Status | None = ...,
    comm: CommLike = ...,
    timeout: float | None = ...,
) -> ArrayT | Any: ...
@overload
def sendrecv(
    x: Any,
    dest: int,
    source: int | None = ...,
    sendtag: int = ...,
    recvtag: int | None = ...,
    *,
    like: Any = ...,
    out: ArrayT,
    status: Status | None = ...,
    comm: CommLike = ...,
    timeout: float | None = ...,
) -> ArrayT: ...
@repeats("sendrecv", "dest", "source", "sendtag", "recvtag", "like", "status")
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
    data, sent = prepare_send(communicator, "sendrecv", x, dest, sendtag)
    expected = like if like is not None else x if out is None else out
    recv_buffer = prepare_recv(communicator, "sendrecv", expected, source, recvtag, out, disjoint_from=data)
    if timeout is not None or sent.peer is PROC_NULL or recv_buffer.call.peer is PROC_NULL:
        bound = None if timeout is None else check_timeout(communicator, "sendrecv", timeout)
        receive = start_recv(communicator, recv_buffer, status)
        return wait_with_timeout(receive, [start_send(communicator, data, sent)], bound)
    received, message = recv_buffer.call, add_header(communicator, data, sent)
    sent.name, received.name = "send", "recv"
    call = Call("sendrecv", parts=(sent, received), collective=False)
    if like is None:
        repeat_exchange(communicator, (x, dest, sendtag), (out, source, recvtag), data, recv_buffer, call)
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


@repeats("isend", "dest", "tag")
def isend(x: Any, dest: int, tag: int = 0, *, comm: CommLike = None) -> Request[None]:
    """Start a :func:`send` in the background, with the same arguments.

    Returns:
        A request whose value is None. Until it has completed, `x` must not be changed.

    Example:
        >>> request = mpicoll.isend(np.ones(2), dest=mpicoll.PROC_NULL)
        >>> request.wait()
    """
    communicator = resolve(comm)
    return start_send(communicator, *prepare_send(communicator, "isend", x, dest, tag))


@overload
def irecv(
    x: ArrayT,
    source: int | None = ...,
    tag: int | None = ...,
    *,
    out: None = ...,
    status: Status | None = ...,
    comm: CommLike = ...,
) -> Request[ArrayT | Any]: ...
@overload
def irecv(
    x: Any = ...,
    source: int | None = ...,
    tag: int | None = ...,
    *,
    out: ArrayT,
    status: Status | None = ...,
    comm: CommLike = ...,
) -> Request[ArrayT]: ...
@repeats("irecv", "source", "tag", "status")
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
    transfer = start_recv(communicator, prepare_recv(communicator, "irecv", x, source, tag, out), status)
    return Request(transfer, transfer.value)


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
        return make_status(communicator, NULL_ENVELOPE)
    bound = None if timeout is None else check_timeout(communicator, "probe", timeout)
    call = Call("probe", peer=source, tag=tag, collective=False)

    def wait(bound: float | None) -> Envelope:
        try:
            return communicator.transport.probe(source, tag, bound)
        except Timeout:
            limit = communicator.timeout if bound is None else bound
            queue = communicator.queue
            raise timeout_error(queue.watch, queue.group, str(call), limit, "") from None

    return make_status(communicator, communicator.queue.run_with_deadline(wait, call, bound, bounded=bound is not None))


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
        return make_status(communicator, NULL_ENVELOPE)
    communicator.queue.lock.locked()  # raises in a process that was forked from the rank
    envelope = communicator.transport.iprobe(source, tag)
    return None if envelope is None else make_status(communicator, envelope)


_check_probe_arguments = adds_rank_to_errors(check_source_and_tag)


@adds_rank_to_errors
def _check_self_recv(comm: CommunicatorCore, tag: int) -> None:
    if not comm.transport.matches_own_message(tag):
        raise RankError(
            f"send: rank {comm.rank} sends to itself, but no pending irecv matches tag {tag}, so it would never"
            " complete; post the irecv first, or use isend or sendrecv"
        )
