"""Memory and envelopes of point-to-point messages: checked arguments, buffers, and headers of checked messages."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mpicoll.buffers.buffer import Buffer
from mpicoll.buffers.device import Device, device_of
from mpicoll.buffers.dtypes import Array
from mpicoll.buffers.recognise import is_tensor, recognise
from mpicoll.buffers.streams import record_events
from mpicoll.collectives.arguments import (
    adds_rank_to_errors,
    check_peer,
    check_tag,
    recognise_prototype,
    resolve_output,
)
from mpicoll.collectives.memory import InputArray, OutputArray
from mpicoll.collectives.repeated_messages import (
    explain_truncation,
    repeat_irecv,
    repeat_isend,
    repeat_recv,
    repeat_send,
    repeat_sendrecv,
    size_error,
)
from mpicoll.engine.core import message_check
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.core.proc_null import PROC_NULL
from mpicoll.engine.diagnostics.flight_recorder import Call, find_call_site
from mpicoll.engine.executors.staging import (
    ANNOUNCEMENT_BYTES,
    MIN_ANNOUNCED_BYTES,
    DeviceReceive,
    copy_to_host,
    sends_device_memory,
)
from mpicoll.errors import MismatchError, TruncationError
from mpicoll.transport.base import Envelope

if TYPE_CHECKING:
    from mpicoll.engine.executors.peer_messages import Announced

NULL_ENVELOPE = Envelope(PROC_NULL, -1, 0)
"""Envelope of a receive from PROC_NULL."""


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


@adds_rank_to_errors
def prepare_send(comm: CommunicatorCore, operation: str, x: Any, dest: Any, tag: Any) -> tuple[Array, Call]:
    """Check `dest` and `tag`, and return the bytes of `x` and the Call record."""
    key = _make_key(comm, operation, x, dest, tag)
    known: Call | None = None if key is None else comm.call_cache.get(key)
    if known is not None:
        if operation == "send":
            repeat_send(comm, x, dest, tag, known)
        elif operation == "isend":
            repeat_isend(comm, x, dest, tag, known)
        if type(x) is np.ndarray and x.flags.c_contiguous:
            return x.reshape(-1).view(np.uint8), known
    dest, tag = check_peer(operation, "dest", dest, comm), check_tag(operation, tag, comm)
    buffer = recognise(operation, x)
    device, call = device_of(buffer.array), _describe_call(operation, buffer, dest, tag)
    if device is not None and not sends_device_memory(comm.checks.calls):
        announcement = _announce(comm, buffer, device, dest, tag)
        return copy_to_host(buffer, device) if announcement is None else announcement, call
    source = InputArray(buffer)
    with nullcontext() if device is None else device.working(record_events(buffer)):
        source.load()
    if key is not None and dest is not PROC_NULL and source.is_user_buffer and _is_unconverted(buffer, x):
        comm.cache_call(key, call)
    return source.as_bytes, call


def _announce(comm: CommunicatorCore, buffer: Buffer, device: Device, dest: int, tag: int) -> Array | None:
    """Return the announcement of a message to rank `dest` that the receiver copies from memory of `device`; None if it
    passes through the host."""
    if dest is PROC_NULL or not may_be_announced(comm, buffer.array.nbytes):
        return None
    from mpicoll.engine.executors.peer_messages import announce

    return announce(comm, buffer, device, dest, tag)


def may_be_announced(comm: CommunicatorCore, nbytes: int | None) -> bool:
    """Return True if an announcement may come in place of a message of that size."""
    return bool(comm.registry.peer_messages) and nbytes is not None and nbytes >= MIN_ANNOUNCED_BYTES


def _find_announced(comm: CommunicatorCore, data: Array) -> Announced | None:
    """Return the message that is announced by `data`, the bytes of a received message; None if it is the message
    itself."""
    if not comm.registry.peer_messages:
        return None
    from mpicoll.engine.executors.peer_messages import find_announced

    return find_announced(comm.registry, data)


def _make_key(comm: CommunicatorCore, operation: str, x: Any, peer: Any, tag: Any) -> tuple[Any, ...] | None:
    """Return the key of a message of a numpy array or a tensor, whose description serves later ones; None for all
    others.

    A peer and a tag of another type could equal those of an earlier message, and still be invalid.
    """
    if comm.checks.calls or operation == "sendrecv" or (type(x) is not np.ndarray and not is_tensor(x)):
        return None
    if (peer is not None and type(peer) is not int) or (tag is not None and type(tag) is not int):
        return None
    return operation, x.dtype, x.shape, peer, tag


def repeat_exchange(
    comm: CommunicatorCore,
    sent: tuple[Any, int, int],
    received: tuple[Any, int | None, int | None],
    data: Array,
    recv_buffer: RecvBuffer,
    call: Call,
) -> None:
    """Have the extension carry out later exchanges like `call`, if there has been one before.

    Args:
        sent: the array that is sent, dest and tag; `data` are its bytes.
        received: the array for the received message, source and tag; None where a new array or any is taken.
    """
    (x, dest, sendtag), (out, source, recvtag) = sent, received
    keys = (
        _make_key(comm, "exchange", x, dest, sendtag),
        _make_key(comm, "exchange", x if out is None else out, source, recvtag),
    )
    if may_be_announced(comm, recv_buffer.call.nbytes):
        return
    if None in keys or not _has_bytes(x, data) or (out is not None and not _has_bytes(out, recv_buffer.memory)):
        return
    key = (*keys, out is None)
    if key in comm.call_cache:
        repeat_sendrecv(comm, sent, received, call)
    else:
        comm.cache_call(key, call)


def _has_bytes(array: Any, data: Array) -> bool:
    """Return True if the bytes of a message, `data`, are those of `array` itself."""
    return data.size == array.nbytes and (type(array) is not np.ndarray or np.may_share_memory(data, array))


def _is_unconverted(buffer: Buffer, array: Array) -> bool:
    """Return True if the bytes of a message like `array` are those of the array itself."""
    # Where the memory of a tensor is not that of its values, the extension leaves it to Python.
    return buffer.array.nbytes == array.nbytes and (
        type(array) is not np.ndarray or np.may_share_memory(buffer.array, array)
    )


def _describe_call(operation: str, buffer: Buffer, peer: int | None, tag: int | None) -> Call:
    array = buffer.array
    device = device_of(array)
    return Call(
        operation,
        array.nbytes,
        buffer.dtype.text,
        array.shape,
        peer=peer,
        tag=tag,
        memory="" if device is None else device.kind,
        collective=False,
    )


@adds_rank_to_errors
def prepare_recv(
    comm: CommunicatorCore, operation: str, x: Any, source: Any, tag: Any, out: Any, disjoint_from: Array | None = None
) -> RecvBuffer:
    """Check `source` and `tag`, and return the receive buffer."""
    like = x if out is None else out
    key = None if out is not None and x is not None else _make_key(comm, operation, like, source, tag)
    known: Call | None = None if key is None else comm.call_cache.get(key)
    repeats = known is not None and not may_be_announced(comm, known.nbytes)
    if known is not None and repeats and operation == "recv":
        repeat_recv(comm, x, out, source, tag, known)
    elif known is not None and repeats and operation == "irecv":
        repeat_irecv(comm, x, out, source, tag, known)
    if known is not None and type(like) is np.ndarray and (out is None or out.flags.carray):
        plain = _PlainArray(np.empty(x.shape, x.dtype) if out is None else out)
        return RecvBuffer(comm, plain, plain, known, out)
    source, tag = check_source_and_tag(comm, operation, source, tag)
    prototype = recognise_prototype(operation, x, out)
    output = resolve_output(operation, out, prototype, prototype.array.shape)
    call = _describe_call(operation, output, source, tag)
    if key is not None and source is not PROC_NULL and _is_unconverted(prototype, like):
        comm.cache_call(key, call)
    return RecvBuffer(comm, output, _make_target(comm, output, disjoint_from), call, out)


class _PlainArray:
    """A contiguous numpy array that receives a message, as the output and as its memory."""

    __slots__ = ("_array", "as_bytes")

    def __init__(self, array: Array) -> None:
        self._array = array
        self.as_bytes: Array = array.reshape(-1).view(np.uint8)

    def store(self) -> None:
        """Do nothing: the message is in the array."""

    def result(self) -> Array:
        return self._array


def _make_target(comm: CommunicatorCore, output: Buffer, disjoint_from: Array | None) -> OutputArray | DeviceReceive:
    device = device_of(output.array)
    if device is None:
        return OutputArray(output, disjoint_from)
    # An announcement is received on the host.
    direct = not may_be_announced(comm, output.array.nbytes) and sends_device_memory(comm.checks.calls)
    return DeviceReceive(output, device, direct=direct)


def check_source_and_tag(
    comm: CommunicatorCore, operation: str, source: Any, tag: Any
) -> tuple[int | None, int | None]:
    return (
        None if source is None else check_peer(operation, "source", source, comm),
        None if tag is None else check_tag(operation, tag, comm),
    )


def make_status(comm: CommunicatorCore, envelope: Envelope) -> Status:
    nbytes = envelope.nbytes
    if comm.checks.calls and nbytes >= message_check.LENGTH:
        nbytes -= message_check.LENGTH
    if nbytes == ANNOUNCEMENT_BYTES and comm.registry.peer_messages:
        from mpicoll.engine.executors.peer_messages import find_announced_nbytes

        announced = find_announced_nbytes(comm, envelope.source, envelope.tag)
        nbytes = nbytes if announced is None else announced
    return Status(envelope.source, envelope.tag, nbytes)


def add_header(comm: CommunicatorCore, data: Array, call: Call) -> Array:
    """Return the message to be sent: `data`, preceded by a header if messages are checked."""
    return (
        message_check.add_header(data, message_check.make_header(call, find_call_site())) if comm.checks.calls else data
    )


class RecvBuffer:
    """Receive buffer. The transport fills `memory`, which has room for a header if messages are checked."""

    __slots__ = ("_comm", "_header", "_name", "_out", "_output", "_target", "call", "memory")

    def __init__(
        self,
        comm: CommunicatorCore,
        output: Buffer | _PlainArray,
        target: OutputArray | DeviceReceive | _PlainArray,
        call: Call,
        out: Any,
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
        if envelope.source is PROC_NULL:
            if status is not None:
                status.source, status.tag, status.nbytes = envelope.source, envelope.tag, 0
            return self._out
        nbytes, begin = envelope.nbytes, 0
        sent = None if self._header is None else message_check.header_of(self.memory[:nbytes])
        if sent is not None:
            begin = message_check.LENGTH
            nbytes -= begin
        data = self.memory[begin : begin + nbytes]
        announced = _find_announced(self._comm, data) if nbytes == ANNOUNCEMENT_BYTES else None
        try:
            if sent is not None:
                self._compare(sent, envelope.source, envelope.tag)
            self._check_size(envelope, nbytes if announced is None else announced.nbytes, status)
        except BaseException:
            if announced is not None:
                announced.drop()
            raise
        self._store(data, announced)
        return self._output.result()

    def _check_size(self, envelope: Envelope, nbytes: int, status: Status | None) -> None:
        """Fill `status`, and raise TruncationError if the message does not have the expected size."""
        if status is not None:
            status.source, status.tag, status.nbytes = envelope.source, envelope.tag, nbytes
        size = self._target.as_bytes.size
        if nbytes != size:
            message = Envelope(envelope.source, envelope.tag, nbytes)
            raise size_error(self._comm.queue.group, self.call, self._name, message, size)

    def _store(self, data: Array, announced: Announced | None) -> None:
        """Copy the message, `data` or what that announces, to the caller's array."""
        target = self._target
        if announced is not None and isinstance(target, DeviceReceive):
            announced.copy_to(target.array, target.events)
            return
        if announced is not None:
            announced.copy_to(target.as_bytes)
        elif self._header is not None:
            target.as_bytes[:] = data
        target.store()

    def explain(self, error: TruncationError) -> TruncationError:
        """Return a detailed error for a message that is larger than its buffer, with its header if received."""
        if self._header is not None:
            sent = message_check.header_of(self.memory)
            if sent is not None:
                try:
                    self._compare(sent, self.call.peer, self.call.tag)
                except TruncationError as better:
                    return better
        return explain_truncation(self._comm.queue.group, self.call, error)

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


def _shapes_match(sent: Sequence[int] | None, expected: Sequence[int] | None) -> bool:
    """Return True if the shapes are compatible. Flat shapes fit all others, since torch's messages are sent flat."""
    return sent is None or expected is None or sent == expected or min(len(sent), len(expected)) < 2


def _describe_header(header: message_check.Header) -> str:
    return str(header["text"]) + (f" at {header['site']}" if header["site"] else "")
