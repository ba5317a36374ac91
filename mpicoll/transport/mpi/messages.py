"""Messages over MPI: the rounds of schedules, and the caller's point-to-point messages."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from mpi4py import MPI

from mpicoll.errors import CommunicationError, CommunicatorError, TruncationError
from mpicoll.transport.base import (
    ConcludeFailure,
    Envelope,
    Memory,
    Message,
    Route,
    Traffic,
    round_size_error,
    truncation_error,
)
from mpicoll.transport.mpi.fault_tolerance import FailureState, fault_tolerant
from mpicoll.transport.mpi.native import INT_MAX
from mpicoll.transport.mpi.pending import MpiPending, active_transfers
from mpicoll.transport.mpi.posted_round import PostedRound
from mpicoll.transport.mpi.translation import (
    describe_truncation,
    envelope_of,
    is_truncation,
    reports_size,
    translate_truncation,
    translates_errors,
)
from mpicoll.transport.waiting import poll

if TYPE_CHECKING:
    from mpicoll._shm import LineEnd, MessageCall, PendingMessage
    from mpicoll.transport.mpi.background_messages import MpiBackgroundQueue

R = TypeVar("R")

_BLOCK = 1 << 30
"""Bytes of the blocks into which messages of more than INT_MAX bytes are divided."""


def _reject_post(*args: Any) -> Any:
    raise CommunicatorError("this process was forked from an MPI rank, and can't communicate; only the rank itself can")


def _reject_transfers() -> None:
    """In a forked child: replace the function through which every transfer goes."""
    global _post  # noqa: PLW0603
    _post = _reject_post  # type: ignore[assignment]  # it accepts any arguments


def may_call_unlocked() -> bool:
    """Return True if the extension may call MPI without the interpreter lock, while Python calls it too."""
    return not fault_tolerant() and _post is not _reject_post and MPI.Query_thread() == MPI.THREAD_MULTIPLE


os.register_at_fork(after_in_child=_reject_transfers)


class MessagePassing:
    """The messages of one process on two communicators of the same ranks: `collective` for the rounds of schedules,
    `p2p` for the caller's messages."""

    def __init__(self, collective: MPI.Intracomm, p2p: MPI.Intracomm, members: tuple[int, ...]) -> None:
        self.rank = collective.rank
        self.size = collective.size
        self.members = members
        self.failures = FailureState(collective, p2p, members)
        self.traffic = Traffic()
        self._sends, self._receives = self.traffic.sends, self.traffic.receives
        self._collective = collective
        self._p2p = p2p

    def translate_error(self, error: Exception) -> Exception:
        return self.failures.translate_error(error)

    @translates_errors
    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message], tag: int) -> None:
        requests: list[MPI.Request] = []
        statuses = [MPI.Status() for _ in range(len(recvs) + len(sends))]
        try:
            self._start_round(requests, sends, recvs, tag)
            if fault_tolerant():
                self.failures.wait_all(requests, statuses)
            else:
                MPI.Request.Waitall(requests, statuses)
        except BaseException as error:
            self.fail_round(requests, statuses, sends, recvs, error)
            raise
        self.check_sizes(recvs, statuses)

    def post(self, sends: Sequence[Message], recvs: Sequence[Message], tag: int) -> PostedRound:
        return PostedRound(self, sends, recvs, lambda requests: self._start_round(requests, sends, recvs, tag))

    def make_program_error(self, code: int, peer: int, expected: int, received: int) -> Exception:
        """Return the exception for a message of a program that has failed, as :attr:`StreamedProgram.failure`."""
        if not code:
            return self._size_mismatch(peer, expected, f"{received}")
        if code < 0:
            return CommunicationError(
                f"the connection with rank {self.members[peer]} was lost ({os.strerror(-code)});"
                " MPICOLL_SOCKETS=off has MPI carry all messages"
            )
        error = MPI.Exception(code)
        if error.Get_error_class() == MPI.ERR_TRUNCATE:
            return self._size_mismatch(peer, expected, "more")
        return self.translate_error(error)

    def _start_round(
        self, requests: list[MPI.Request], sends: Sequence[Message], recvs: Sequence[Message], tag: int
    ) -> None:
        """Start the transfers of a round, and append them to `requests`: after a failure it has those that have
        started."""
        comm = self._collective
        for source, data in recvs:
            requests.append(_post(comm.Irecv, data, source, tag))
        for dest, data in sends:
            requests.append(_post(comm.Isend, data, dest, tag))

    def fail_round(
        self,
        requests: Sequence[MPI.Request],
        statuses: Sequence[MPI.Status],
        sends: Sequence[Message],
        recvs: Sequence[Message],
        error: BaseException | None,
    ) -> None:
        """Abandon the messages of a round that has failed with `error`, or is given up (None)."""
        # Some transfers may be unfinished: nothing may be received any more, and the memory of the sends must
        # outlive the failure.
        for request in () if fault_tolerant() else requests[: len(recvs)]:
            if request != MPI.REQUEST_NULL:
                request.Cancel()
                request.Free()
        self.failures.retain((requests, sends, recvs))
        if isinstance(error, MPI.Exception):
            self._raise_first(recvs, statuses)

    def check_sizes(self, recvs: Sequence[Message], statuses: Sequence[MPI.Status]) -> None:
        """Raise TruncationError if a message of a round was smaller than the memory for it."""
        for (source, data), status in zip(recvs, statuses, strict=False):
            received = status.Get_elements(MPI.BYTE)
            if received != data.size:
                raise round_size_error(self.rank, source, data.size, received)

    def _size_mismatch(self, source: int | None, expected: int, received: str) -> TruncationError:
        return TruncationError(
            f"rank {self.rank} expected {expected} bytes from rank {source}, got {received}:"
            " the ranks disagree about the size of the operation"
        )

    def _raise_first(self, recvs: Sequence[Message], statuses: Sequence[MPI.Status]) -> None:
        """Raise the error of the first transfer that failed, which is more specific than "error in status"."""
        for at, status in enumerate(statuses):
            kind = status.Get_error()
            if kind in (MPI.SUCCESS, MPI.ERR_PENDING):
                continue
            error = MPI.Exception(kind)
            if error.Get_error_class() == MPI.ERR_TRUNCATE and at < len(recvs):
                source, data = recvs[at]
                received = status.Get_elements(MPI.BYTE)
                size = f"{received}" if reports_size(status, data) else "more"
                raise self._size_mismatch(source, data.size, size) from error
            raise error

    @translates_errors
    def send(self, data: Memory, dest: int, tag: int) -> None:
        next(self._sends[dest, tag])
        if fault_tolerant():
            self.failures.wait(_post(self._p2p.Isend, data, dest, tag), data)
        else:
            _post(self._p2p.Send, data, dest, tag)

    @translates_errors
    def recv(self, data: Memory, source: int | None, tag: int | None) -> Envelope:
        if fault_tolerant():
            request = _post(self._p2p.Irecv, data, _source(source), _tag(tag))
            return self._count_receive(self.failures.wait(request, data))
        status = MPI.Status()
        # Open MPI writes all of a large message that arrives through shared memory, also past the end of a receive
        # buffer that is too small. So the size is queried first.
        if _post is _reject_post:
            _reject_post(self._p2p.Mprobe, data)
        message = self._p2p.Mprobe(_source(source), _tag(tag), status)
        envelope = envelope_of(status)
        if envelope.nbytes > data.size:
            whole = np.empty(envelope.nbytes, np.uint8)
            _post(message.Recv, whole)
            next(self._receives[envelope.source, envelope.tag])
            # The first bytes may contain a header that identifies the message.
            data[:] = whole[: data.size]
            raise truncation_error(self.rank, envelope, data.size)
        _post(message.Recv, data)
        next(self._receives[envelope.source, envelope.tag])
        return envelope

    def _count_receive(self, status: MPI.Status) -> Envelope:
        envelope = envelope_of(status)
        next(self._receives[envelope.source, envelope.tag])
        return envelope

    @translates_errors
    def sendrecv(
        self, data: Memory, dest: int, tag: int, into: Memory, source: int | None, recvtag: int | None
    ) -> Envelope:
        next(self._sends[dest, tag])
        if fault_tolerant():
            receiving = _post(self._p2p.Irecv, into, _source(source), _tag(recvtag))
            sending = _post(self._p2p.Isend, data, dest, tag)
            self.failures.wait(sending, data)
            return self._count_receive(self.failures.wait(receiving, into))
        status = MPI.Status()
        try:
            if max(data.size, into.size) <= INT_MAX:
                self._p2p.Sendrecv(data, dest, tag, into, _source(source), _tag(recvtag), status)
            else:
                sending = _post(self._p2p.Isend, data, dest, tag)
                _post(self._p2p.Recv, into, _source(source), _tag(recvtag), status)
                sending.Wait()
        except MPI.Exception as error:
            raise (translate_truncation(self.rank, error, status, into) or error) from error
        return self._count_receive(status)

    @translates_errors
    def isend(self, data: Memory, dest: int, tag: int) -> MpiPending:
        next(self._sends[dest, tag])
        request = _post(self._p2p.Isend, data, dest, tag)
        return MpiPending(self.rank, self.failures, self.traffic, request, data, (None, None, None))

    @translates_errors
    def irecv(self, data: Memory, source: int | None, tag: int | None) -> MpiPending:
        request = _post(self._p2p.Irecv, data, _source(source), _tag(tag))
        return MpiPending(self.rank, self.failures, self.traffic, request, data, (self._p2p, source, tag))

    def bind_messages(
        self,
        sent: Route | None,
        received: Route | None,
        active: dict[int, Any] | None,
        conclude: ConcludeFailure,
        accept: Callable[[Any, int], int] | None,
    ) -> MessageCall | None:
        if fault_tolerant() or _post is _reject_post:
            return None
        # Late, since the first messages of a job do not need it.
        from mpicoll.transport.mpi.direct_messages import bind_messages

        def conclude_failure(entry: Any, code: int, source: int, tag: int, nbytes: int) -> Exception:
            return conclude(entry, self._make_error(code) if code else None, Envelope(source, tag, nbytes))

        return bind_messages(self._p2p, self.traffic, sent, received, active, conclude_failure, None, accept)

    def bind_started_message(
        self,
        route: Route,
        active: dict[int, Any] | None,
        conclude: ConcludeFailure,
        wrap: Callable[[PendingMessage], Any],
        accept: Callable[[Any, int], int],
        *,
        size: int,
        sends: bool,
    ) -> MessageCall | None:
        # Another thread makes progress on messages that the program leaves alone.
        if not may_call_unlocked():
            return None
        from mpicoll.transport.mpi.direct_messages import bind_messages

        def conclude_failure(entry: Any, code: int, source: int, tag: int, nbytes: int) -> Exception:
            message = Envelope(source, tag, nbytes)
            return conclude(entry, self._make_transfer_error(code, message, size) if code else None, message)

        pending = active_transfers.pending

        def wrap_started(message: PendingMessage) -> Any:
            if pending:
                active_transfers.test_oldest()
            return wrap(message)

        sent, received = (route, None) if sends else (None, route)
        return bind_messages(self._p2p, self.traffic, sent, received, active, conclude_failure, wrap_started, accept)

    def bind_line_end(
        self,
        peer: int,
        like: Any,
        nbytes: int,
        sync_tags: tuple[int, ...],
        plain_tags: tuple[int, ...],
        acknowledgement_tag: int,
    ) -> LineEnd | None:
        if fault_tolerant() or _post is _reject_post or nbytes > INT_MAX:
            return None
        from mpicoll.transport.mpi.direct_messages import bind_line_end

        values = peer, like, nbytes, sync_tags, plain_tags, acknowledgement_tag
        return bind_line_end(self._p2p, self.traffic, values, self._make_error, self._adopt)

    def bind_background_messages(self, peers: Sequence[int]) -> MpiBackgroundQueue | None:
        if not may_call_unlocked():
            return None
        from mpicoll.transport.mpi.background_messages import make_queue

        return make_queue(self._p2p, self.traffic, peers, self._make_transfer_error)

    def _adopt(self, request: int, data: Memory, received: tuple[int, int] | None) -> MpiPending:
        """Return the transfer of an MPI request, by its handle, that the extension has started."""
        takes = (None, None, None) if received is None else (self._p2p, *received)
        return MpiPending(self.rank, self.failures, self.traffic, MPI.Request.fromhandle(request), data, takes)

    def _make_transfer_error(self, code: int, message: Envelope, size: int) -> Exception:
        """Return this library's exception for an error code of MPI, of a receive of `message` into `size` bytes."""
        cause = MPI.Exception(code)
        if not is_truncation(cause):
            return self._make_error(code)
        error = describe_truncation(self.rank, cause, message, size)
        error.__cause__ = cause
        return error

    def _make_error(self, code: int) -> Exception:
        """Return this library's exception for an error code of MPI."""
        cause = MPI.Exception(code)
        error = self.translate_error(cause)
        error.__cause__ = cause
        return error

    def matches_own_message(self, tag: int) -> bool:
        return any(
            source in (None, self.rank) and wanted in (None, tag) for source, wanted in self.list_posted_receives()
        )

    def list_posted_receives(self) -> list[tuple[int | None, int | None]]:
        from mpicoll.transport.mpi.direct_messages import list_started_receives

        posted = active_transfers.list_posted_receives()
        here = [(source, tag) for comm, source, tag in posted if comm is self._p2p]
        return here + list_started_receives(self._p2p)

    @translates_errors
    def iprobe(self, source: int | None, tag: int | None) -> Envelope | None:
        if MPI.Is_finalized():  # a communicator that is freed late looks for messages that were not received
            return None
        status = MPI.Status()
        return envelope_of(status) if self._p2p.Iprobe(_source(source), _tag(tag), status) else None

    @translates_errors
    def probe(self, source: int | None, tag: int | None, timeout: float | None) -> Envelope:
        status = MPI.Status()
        if timeout is None:
            self._p2p.Probe(_source(source), _tag(tag), status)
        else:
            poll(lambda: self._p2p.Iprobe(_source(source), _tag(tag), status), timeout, f"rank {self.rank}: probe")
        return envelope_of(status)


def _post(call: Callable[..., R], data: Memory, *envelope: Any) -> R:
    """Start a transfer of bytes. More than INT_MAX bytes are sent as one element of a derived datatype."""
    if data.size <= INT_MAX:
        return call(data, *envelope)
    whole, rest = divmod(data.size, _BLOCK)
    chunk = MPI.BYTE.Create_contiguous(_BLOCK)
    large = MPI.Datatype.Create_struct([whole, rest], [0, whole * _BLOCK], [chunk, MPI.BYTE]).Commit()
    try:
        return call([data, 1, large], *envelope)
    finally:
        # MPI itself keeps a freed datatype until the transfers that use it have completed.
        chunk.Free()
        large.Free()


def _source(source: int | None) -> int:
    return MPI.ANY_SOURCE if source is None else source


def _tag(tag: int | None) -> int:
    return MPI.ANY_TAG if tag is None else tag
