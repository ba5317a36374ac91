"""Messages from one rank to another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mpicoll.buffers.buffer import Buffer, recognise
from mpicoll.buffers.dtypes import Array
from mpicoll.collectives import arguments
from mpicoll.collectives.arguments import names_rank, result, template
from mpicoll.collectives.memory import Source, Target
from mpicoll.engine.communicator import Communicator
from mpicoll.engine.request import Request
from mpicoll.engine.world import CommLike, resolve
from mpicoll.errors import CommunicationError, RankError, TruncationError
from mpicoll.transport.base import Envelope, Pending


@dataclass(slots=True)
class Status:
    """Where a message came from: filled by ``recv(status=...)``, returned by :func:`probe`. `nbytes` is its size."""

    source: int = -1
    tag: int = -1
    nbytes: int = -1


def send(x: Any, dest: int, tag: int = 0, *, comm: CommLike = None) -> None:
    """Send the array `x` to rank `dest`; return when `x` may be changed again, which may wait for the receiver.

    `dest` must receive an array of the same shape and dtype with an equal `tag` (0 or more). Any dtype of fixed size.
    Sending to oneself needs a pending :func:`irecv` that takes it. Raises DTypeError, RankError before any message
    leaves.
    """
    communicator = resolve(comm)
    data, dest, tag = _outgoing(communicator, "send", x, dest, tag)
    if dest == communicator.rank:
        _need_own_recv(communicator, tag)
    communicator.progress.guarded(communicator.transport.send, _what("send to", dest, communicator), data, dest, tag)


def recv(
    x: Any = None,
    source: int | None = None,
    tag: int | None = None,
    *,
    out: Any = None,
    status: Status | None = None,
    comm: CommLike = None,
) -> Any:
    """Receive an array like `x` from rank `source` (None: from any) with `tag` (None: with any).

    `x` tells shape, dtype and library; its contents don't matter, and it may be None if `out` is given. Returns `out`,
    or a new array. `status`, if given, is filled with where the message came from. Raises DTypeError, ShapeError,
    RankError before it waits; TruncationError if the message has another size than `x`.
    """
    communicator = resolve(comm)
    filled, target, source, tag = _incoming(communicator, "recv", x, source, tag, out)
    envelope = communicator.progress.guarded(
        communicator.transport.recv, _what("recv from", source, communicator), target.raw, source, tag
    )
    return _received(communicator, "recv", filled, target, envelope, status)


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
) -> Any:
    """Send `x` to `dest` and receive an array from `source` (None: from any) at once, which can't deadlock.

    What is received is like `like`, or like `x` if that is None, and goes to `out` if given. Other arguments, result
    and errors as for :func:`send` and :func:`recv`.
    """
    communicator = resolve(comm)
    outgoing, dest, sendtag = _outgoing(communicator, "sendrecv", x, dest, sendtag)
    expected = like if like is not None else x if out is None else out
    filled, target, source, recvtag = _incoming(
        communicator, "sendrecv", expected, source, recvtag, out, avoid=outgoing
    )
    what = (f"sendrecv to {dest}, from {source}, on rank {communicator.rank} of {communicator.size}",)
    envelope = communicator.progress.guarded(
        communicator.transport.sendrecv, what, outgoing, dest, sendtag, target.raw, source, recvtag
    )
    return _received(communicator, "sendrecv", filled, target, envelope, status)


def isend(x: Any, dest: int, tag: int = 0, *, comm: CommLike = None) -> Request:
    """:func:`send` in the background: `x` must not be changed before the request has completed. Its value is None."""
    communicator = resolve(comm)
    data, dest, tag = _outgoing(communicator, "isend", x, dest, tag)
    pending = communicator.transport.isend(data, dest, tag)
    return _request(communicator, pending, lambda envelope: None, _what("isend to", dest, communicator))


def irecv(
    x: Any = None,
    source: int | None = None,
    tag: int | None = None,
    *,
    out: Any = None,
    status: Status | None = None,
    comm: CommLike = None,
) -> Request:
    """:func:`recv` in the background. The request's value is the array; `status` is filled by its ``wait``."""
    communicator = resolve(comm)
    filled, target, source, tag = _incoming(communicator, "irecv", x, source, tag, out)
    pending = communicator.transport.irecv(target.raw, source, tag)

    def finish(envelope: Envelope) -> Any:
        return _received(communicator, "irecv", filled, target, envelope, status)

    return _request(communicator, pending, finish, _what("irecv from", source, communicator))


def probe(
    source: int | None = None, tag: int | None = None, *, timeout: float | None = None, comm: CommLike = None
) -> Status:
    """Wait until a message from `source` (None: any) with `tag` (None: any) can be received, and say which; it stays
    there.

    Raises RankError before it waits, Timeout after `timeout` seconds.
    """
    communicator = resolve(comm)
    source, tag = _checked_probe(communicator, "probe", source, tag)
    what = _what("probe from", source, communicator)
    return _status(communicator.progress.guarded(communicator.transport.probe, what, source, tag, timeout))


def iprobe(source: int | None = None, tag: int | None = None, *, comm: CommLike = None) -> Status | None:
    """:func:`probe` that doesn't wait: None if there is no such message."""
    communicator = resolve(comm)
    source, tag = _checked_probe(communicator, "iprobe", source, tag)
    envelope = communicator.transport.iprobe(source, tag)
    return None if envelope is None else _status(envelope)


def _status(envelope: Envelope) -> Status:
    return Status(envelope.source, envelope.tag, envelope.nbytes)


class _Transfer:
    """A point-to-point transfer as a request's handle; waits under the watch."""

    __slots__ = ("_comm", "_envelope", "_finish", "_pending", "_what")

    def __init__(
        self, comm: Communicator, pending: Pending, finish: Callable[[Envelope], Any], what: tuple[Any, ...]
    ) -> None:
        self._comm = comm
        self._pending = pending
        self._finish = finish
        self._what = what

    def test(self) -> bool:
        try:
            return self._pending.test() is not None
        except CommunicationError:
            return True  # it has failed, which is for its own wait to say

    def wait(self, timeout: float | None) -> None:
        self._envelope = self._comm.progress.guarded(self._pending.wait, self._what, timeout)

    def value(self) -> Any:
        return self._finish(self._envelope)


def _request(comm: Communicator, pending: Pending, finish: Callable[[Envelope], Any], what: tuple[Any, ...]) -> Request:
    transfer = _Transfer(comm, pending, finish, what)
    return Request(transfer, transfer.value)


def _what(verb: str, peer: int | None, comm: Communicator) -> tuple[Any, ...]:
    return verb, "any rank" if peer is None else f"rank {peer}", f"on rank {comm.rank} of {comm.size}"


@names_rank
def _outgoing(comm: Communicator, operation: str, x: Any, dest: Any, tag: Any) -> tuple[Array, int, int]:
    """The bytes of `x`, and `dest` and `tag` checked."""
    checked = arguments.rank(operation, "dest", dest, comm), arguments.tag(operation, tag, comm)
    source = Source(recognise(operation, x))
    source.load()
    return source.raw, *checked


@names_rank
def _incoming(
    comm: Communicator, operation: str, x: Any, source: Any, tag: Any, out: Any, avoid: Array | None = None
) -> tuple[Buffer, Target, int | None, int | None]:
    """Where what arrives goes, and `source` and `tag` checked."""
    checked = _checked(comm, operation, source, tag)
    like = template(operation, x, out)
    filled = result(operation, out, like, like.array.shape)
    return filled, Target(filled, avoid), *checked


def _checked(comm: Communicator, operation: str, source: Any, tag: Any) -> tuple[int | None, int | None]:
    return (
        None if source is None else arguments.rank(operation, "source", source, comm),
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


def _received(
    comm: Communicator, operation: str, filled: Buffer, target: Target, envelope: Envelope, status: Status | None
) -> Any:
    if status is not None:
        status.source, status.tag, status.nbytes = envelope.source, envelope.tag, envelope.nbytes
    if envelope.nbytes != target.raw.size:
        raise TruncationError(
            f"{operation}: a message of {envelope.nbytes} bytes from rank {envelope.source} (tag {envelope.tag})"
            f" arrived where {target.raw.size} bytes, shape {filled.array.shape} of dtype {filled.dtype.name}, were"
            f" expected (rank {comm.rank} of {comm.size})"
        )
    target.store()
    return filled.result()
