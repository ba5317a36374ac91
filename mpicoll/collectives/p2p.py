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
from mpicoll.collectives.arguments import PROC_NULL, names_rank, result, seconds_of, template, within
from mpicoll.collectives.memory import Source, Target
from mpicoll.engine.checks import message_check
from mpicoll.engine.core.communicator import Communicator
from mpicoll.engine.core.queue import Progress
from mpicoll.engine.core.request import Request, waitall
from mpicoll.engine.diagnostics.flight_recorder import Call, call_site, keepers
from mpicoll.engine.executors.device import Landing, fetched, takes_straight
from mpicoll.engine.world import CommLike, resolve
from mpicoll.errors import CommunicationError, MismatchError, RankError, Timeout, TruncationError
from mpicoll.transport.base import Envelope, Pending

Explained: TypeAlias = "Callable[[TruncationError], TruncationError]"
"""Function that returns a more detailed error for a message that was too large."""


@dataclass(slots=True)
class Status:
    """Source, tag and size in bytes of a message: filled by ``recv(status=...)``, returned by :func:`probe`."""

    source: int = -1
    tag: int = -1
    nbytes: int = -1


def send(x: Any, dest: int, tag: int = 0, *, comm: CommLike = None, timeout: float | None = None) -> None:
    """Send the array `x` to rank `dest`; return when `x` may be changed again, which may wait for the receiver.

    `dest` must receive an array of the same shape and dtype with an equal `tag` (0 or more). Any dtype of fixed size.
    If `dest` is ``mpicoll.PROC_NULL``, such as the neighbour of a rank at the border, nothing is sent. A send to the
    calling rank itself needs a matching pending :func:`irecv`.

    Raises DTypeError, RankError before any message is sent, and Timeout after `timeout` seconds (see
    :meth:`Request.wait <mpicoll.Request.wait>`). After Timeout the send is still pending: `x` must not be changed until
    the message has been received.
    """
    communicator = resolve(comm)
    data, call = _outgoing(communicator, "send", x, dest, tag)
    if call.peer is PROC_NULL:
        return
    if timeout is not None:
        within(communicator, "send", timeout, lambda: _start_send(communicator, data, call))
        return
    if call.peer == communicator.rank:
        _need_own_recv(communicator, tag)
    communicator.progress.guarded(
        communicator.transport.send, call, _noted(communicator, data, call), call.peer, call.tag
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
    """Receive an array like `x` from rank `source` (None: from any) with `tag` (None: with any).

    `x` gives shape, dtype and library; its contents don't matter, and it may be None if `out` is given. Returns `out`,
    or a new array. `status`, if given, is filled with source, tag and size of the message. From ``mpicoll.PROC_NULL``
    nothing is received: the call returns at once, with `out` unchanged (None without `out`) and a status with source
    PROC_NULL, tag -1 and nbytes 0.

    Raises DTypeError, ShapeError, RankError before it waits; TruncationError if the size of the message differs from
    that of `x`; Timeout after `timeout` seconds (see :meth:`Request.wait <mpicoll.Request.wait>`). After Timeout a
    message that arrives later can be received by another receive.
    """
    communicator = resolve(comm)
    arrival = _incoming(communicator, "recv", x, source, tag, out)
    if timeout is not None:
        bound = seconds_of(communicator, "recv", timeout)
        return _within(_start_recv(communicator, arrival, status), [], bound)
    call = arrival.call
    if call.peer is PROC_NULL:
        return arrival.finish(_NOTHING, status)
    try:
        envelope = communicator.progress.guarded(communicator.transport.recv, call, arrival.memory, call.peer, call.tag)
    except TruncationError as error:
        raise arrival.explained(error) from error
    return arrival.finish(envelope, status)


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
    """Send `x` to `dest` and receive an array from `source` (None: from any) at once, which can't deadlock.

    The received array has the shape and dtype of `like` or, if that is None, of `out` if given, else of `x`. It is
    stored in `out` if given. Other arguments, result and errors as for :func:`send` and :func:`recv`; either rank may
    be ``mpicoll.PROC_NULL``.
    """
    communicator = resolve(comm)
    data, sent = _outgoing(communicator, "sendrecv", x, dest, sendtag)
    expected = like if like is not None else x if out is None else out
    arrival = _incoming(communicator, "sendrecv", expected, source, recvtag, out, avoid=data)
    if timeout is not None or sent.peer is PROC_NULL or arrival.call.peer is PROC_NULL:
        bound = None if timeout is None else seconds_of(communicator, "sendrecv", timeout)
        receiving = _start_recv(communicator, arrival, status)
        return _within(receiving, [_start_send(communicator, data, sent)], bound)
    received, message = arrival.call, _noted(communicator, data, sent)
    sent.name, received.name = "send", "recv"
    call = Call("sendrecv", parts=(sent, received), collective=False)
    try:
        envelope = communicator.progress.guarded(
            communicator.transport.sendrecv,
            call,
            message,
            sent.peer,
            sent.tag,
            arrival.memory,
            received.peer,
            received.tag,
        )
    except TruncationError as error:
        raise arrival.explained(error) from error
    return arrival.finish(envelope, status)


def isend(x: Any, dest: int, tag: int = 0, *, comm: CommLike = None) -> Request:
    """Start a :func:`send`. `x` must not be changed before the request has completed. The request's value is None."""
    communicator = resolve(comm)
    return _start_send(communicator, *_outgoing(communicator, "isend", x, dest, tag))


def _start_send(comm: Communicator, data: Array, call: Call) -> Request:
    assert call.peer is not None
    assert call.tag is not None
    call.name = "isend"
    null = call.peer is PROC_NULL
    pending = _Null() if null else comm.transport.isend(_noted(comm, data, call), call.peer, call.tag)
    transfer = _transfer(comm, pending, lambda envelope: None, call)
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
    """Start a :func:`recv`. The request's value is the array; ``wait`` of the request fills `status`."""
    communicator = resolve(comm)
    transfer = _start_recv(communicator, _incoming(communicator, "irecv", x, source, tag, out), status)
    return Request(transfer, transfer.value)


def _start_recv(comm: Communicator, arrival: _Arrival, status: Status | None) -> _Transfer:
    call = arrival.call
    call.name = "irecv"
    null = call.peer is PROC_NULL
    pending = _Null() if null else comm.transport.irecv(arrival.memory, call.peer, call.tag)
    return _transfer(comm, pending, lambda envelope: arrival.finish(envelope, status), call, arrival.explained)


def _within(receiving: _Transfer, others: list[Request], bound: float | None) -> Any:
    """Return the received array if the receive and the `others` complete within `bound` seconds.

    Otherwise cancel the receive and raise Timeout. Without a `bound` the timeout of the communicator applies.
    """
    request = Request(receiving, receiving.value)
    try:
        return waitall([request, *others], bound)[0]
    except Timeout:
        # The message may have arrived after the timeout and before the cancellation.
        if not request.waited and receiving.take_back() and not others:
            return request.wait()
        raise


def probe(
    source: int | None = None, tag: int | None = None, *, timeout: float | None = None, comm: CommLike = None
) -> Status:
    """Wait until a message from `source` (None: any) with `tag` (None: any) can be received, and return its status.

    The message is not received. For ``mpicoll.PROC_NULL`` it returns at once the status of a message of 0 bytes, as MPI
    does.

    Raises RankError before it waits, Timeout after `timeout` seconds (see :meth:`Request.wait <mpicoll.Request.wait>`).
    """
    communicator = resolve(comm)
    source, tag = _checked_probe(communicator, "probe", source, tag)
    if source is PROC_NULL:
        return _status(communicator, _NOTHING)
    bound = None if timeout is None else seconds_of(communicator, "probe", timeout)
    call = Call("probe", peer=source, tag=tag, collective=False)

    def wait(bound: float | None) -> Envelope:
        try:
            return communicator.transport.probe(source, tag, bound)
        except Timeout:
            given = communicator.timeout if bound is None else bound
            raise communicator.progress.late(str(call), given, "") from None

    return _status(communicator, communicator.progress.guarded(wait, call, bound, bounded=bound is not None))


def iprobe(source: int | None = None, tag: int | None = None, *, comm: CommLike = None) -> Status | None:
    """Probe without waiting: return the status as :func:`probe` does, or None if there is no such message."""
    communicator = resolve(comm)
    source, tag = _checked_probe(communicator, "iprobe", source, tag)
    if source is PROC_NULL:
        return _status(communicator, _NOTHING)
    envelope = communicator.transport.iprobe(source, tag)
    return None if envelope is None else _status(communicator, envelope)


def _status(comm: Communicator, envelope: Envelope) -> Status:
    nbytes = envelope.nbytes
    if comm.checks.calls and nbytes >= message_check.LENGTH:
        nbytes -= message_check.LENGTH
    return Status(envelope.source, envelope.tag, nbytes)


def _noted(comm: Communicator, data: Array, call: Call) -> Array:
    """Return the message to be sent: `data`, with a note that describes the call if messages are checked."""
    return message_check.with_note(data, message_check.note(call, call_site())) if comm.checks.calls else data


class _Arrival:
    """Receive buffer. The transport fills `memory`, which has room for a note if messages are checked."""

    __slots__ = ("_comm", "_filled", "_name", "_note", "_out", "_target", "call", "memory")

    def __init__(self, comm: Communicator, filled: Buffer, target: Target | Landing, call: Call, out: Any) -> None:
        self._comm = comm
        self._filled = filled
        self._out = out
        self._target = target
        self._name = call.name
        self.call = call
        self._note: message_check.Note | None = None
        self.memory = target.raw
        if comm.checks.calls:
            self._note = message_check.note(call, call_site())
            self.memory = message_check.room(self.memory.size)

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
        if self._note is not None:
            sent = message_check.note_of(self.memory[:nbytes])
            if sent is not None:
                begin = message_check.LENGTH
                nbytes -= begin
                self._compare(sent, envelope.source, envelope.tag)
        if status is not None:
            status.source, status.tag, status.nbytes = envelope.source, envelope.tag, nbytes
        if nbytes != target.raw.size:
            raise TruncationError(
                f"{self._name}: a message of {nbytes} bytes from rank {envelope.source} (tag {envelope.tag})"
                f" arrived where {target.raw.size} bytes, shape {self._filled.array.shape} of dtype"
                f" {self._filled.dtype.name}, were expected (rank {self._comm.rank} of {self._comm.size}); {_AGREE}"
            )
        if self._note is not None:
            target.raw[:] = self.memory[begin : begin + nbytes]
        target.store()
        return self._filled.result()

    def explained(self, error: TruncationError) -> TruncationError:
        """Return a detailed error for a message that is larger than its buffer, with its note if that was received."""
        if self._note is not None:
            sent = message_check.note_of(self.memory)
            if sent is not None:
                try:
                    self._compare(sent, self.call.peer, self.call.tag)
                except TruncationError as better:
                    return better
        comm = self._comm
        return TruncationError(f"{self.call} on {comm.name}, rank {comm.rank} of {comm.size}: {error}; {_AGREE}")

    def _compare(self, sent: message_check.Note, source: int | None, tag: int | None) -> None:
        """Raise TruncationError or MismatchError if the note of the sender differs from that of this receive."""
        expected = self._note
        assert expected is not None
        fields = tuple(
            name
            for name, differ in (
                ("size", sent["nbytes"] != expected["nbytes"]),
                ("dtype", sent["dtype"] != expected["dtype"]),
                ("shape", not _go_together(sent["shape"], expected["shape"])),
            )
            if differ
        )
        if not fields:
            return
        whence = "" if source is None else f" from rank {source}"
        what = "" if tag is None else f", tag {tag},"
        text = (
            f"rank {self._comm.rank} of {self._comm.size} ({self._comm.name}): the message{whence}{what} is not what is"
            f" received: they differ in {' and '.join(fields)}\n"
            f"  it was sent by {_told(sent)}\n  and is received by {_told(expected)}"
        )
        if "size" in fields:
            raise TruncationError(text)
        raise MismatchError(text, () if source is None else (source,), fields, (sent, expected))


_AGREE = "sender and receiver must agree on the size; mpicoll.probe says how large a message is before it is received"


def _go_together(sent: Sequence[int] | None, expected: Sequence[int] | None) -> bool:
    """Return True if the shapes are compatible. Flat shapes fit all others, since torch's messages are sent flat."""
    return sent is None or expected is None or sent == expected or min(len(sent), len(expected)) < 2


def _told(about: message_check.Note) -> str:
    return f"{about['text']}" + (f" at {about['site']}" if about["site"] else "")


_NOTHING = Envelope(PROC_NULL, -1, 0)
"""Envelope of a receive from PROC_NULL."""


class _Null:
    """Transfer to or from PROC_NULL, which is always complete."""

    def test(self) -> Envelope:
        return _NOTHING

    def wait(self, timeout: float | None) -> Envelope:
        return _NOTHING

    def cancel(self) -> Envelope:
        return _NOTHING


class _Transfer:
    """Point-to-point transfer as a request's handle; the watchdog monitors its waits."""

    __slots__ = ("_call", "_comm", "_envelope", "_explained", "_finish", "_pending")

    def __init__(
        self, comm: Communicator, pending: Pending, finish: Callable[[Envelope], Any], call: Call, explained: Explained
    ) -> None:
        self._comm = comm
        self._pending = pending
        self._finish = finish
        self._call = call
        self._explained = explained

    def test(self) -> bool:
        try:
            return self._pending.test() is not None
        except CommunicationError:
            return True  # it has failed; wait() raises the error

    @property
    def awaited(self) -> tuple[Progress, Call]:
        return self._comm.progress, self._call

    @property
    def limit(self) -> float:
        return self._comm.timeout

    def wait(self, timeout: float | None, bound: float | None = None) -> None:
        guarded = self._comm.progress.guarded
        try:
            self._envelope = guarded(self._within, self._call, timeout, bound, bounded=timeout is not None)
        except TruncationError as error:
            raise self._explained(error) from error

    def _within(self, timeout: float | None, bound: float | None) -> Envelope:
        try:
            return self._pending.wait(timeout)
        except Timeout:
            given = next(one for one in (bound, timeout, self.limit) if one is not None)
            raise self._comm.progress.late(str(self._call), given) from None

    def take_back(self) -> bool:
        """Cancel a receive for which no message has arrived. Return True if a message has arrived."""
        return self._comm.progress.guarded(self._pending.cancel, self._call) is not None

    def value(self) -> Any:
        return self._finish(self._envelope)


def _transfer(
    comm: Communicator,
    pending: Pending,
    finish: Callable[[Envelope], Any],
    call: Call,
    explained: Explained = lambda error: error,
) -> _Transfer:
    # Records the start; the wait is recorded as well.
    keepers.keep(((comm.progress.group, 0, call, monotonic(), None), None, ""))
    return _Transfer(comm, pending, finish, call, explained)


@names_rank
def _outgoing(comm: Communicator, operation: str, x: Any, dest: Any, tag: Any) -> tuple[Array, Call]:
    """Check `dest` and `tag`, and return the bytes of `x` and the Call record."""
    checked = arguments.peer(operation, "dest", dest, comm), arguments.tag(operation, tag, comm)
    buffer = recognise(operation, x)
    device, call = device_of(buffer.array), _call(operation, buffer, *checked)
    if device is not None and not takes_straight(comm.checks.calls):
        return fetched(buffer, device), call
    source = Source(buffer)
    with nullcontext() if device is None else device.working(record_events(buffer)):
        source.load()
    return source.raw, call


def _call(operation: str, buffer: Buffer, peer: int | None, tag: int | None) -> Call:
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


@names_rank
def _incoming(
    comm: Communicator, operation: str, x: Any, source: Any, tag: Any, out: Any, avoid: Array | None = None
) -> _Arrival:
    """Check `source` and `tag`, and return the receive buffer."""
    checked = _checked(comm, operation, source, tag)
    like = template(operation, x, out)
    filled = result(operation, out, like, like.array.shape)
    return _Arrival(comm, filled, _place(comm, filled, avoid), _call(operation, filled, *checked), out)


def _place(comm: Communicator, filled: Buffer, avoid: Array | None) -> Target | Landing:
    device = device_of(filled.array)
    if device is None:
        return Target(filled, avoid)
    return Landing(filled, device, straight=takes_straight(comm.checks.calls))


def _checked(comm: Communicator, operation: str, source: Any, tag: Any) -> tuple[int | None, int | None]:
    return (
        None if source is None else arguments.peer(operation, "source", source, comm),
        None if tag is None else arguments.tag(operation, tag, comm),
    )


_checked_probe = names_rank(_checked)


@names_rank
def _need_own_recv(comm: Communicator, tag: int) -> None:
    if not comm.transport.takes_own(tag):
        raise RankError(
            f"send: rank {comm.rank} sends to itself, and has no irecv pending that takes tag {tag}: that would wait"
            " for ever; post the irecv first, or use isend or sendrecv"
        )
