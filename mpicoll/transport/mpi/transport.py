"""One process' end of an MPI communicator."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from typing import Any, TypeVar, cast
from weakref import WeakSet

import numpy as np
from mpi4py import MPI

from mpicoll.config import config
from mpicoll.errors import CommunicationError, CommunicatorError, RankFailed, Timeout, TruncationError
from mpicoll.transport import launch_env, reductions, shm
from mpicoll.transport.base import MARGIN, Envelope, Memory, Message, Read, Traffic, does_not_fit, poll, renumber
from mpicoll.transport.mpi.fault_tolerance import (
    _DEATHS,
    _REMEDY,
    _VAGUE,
    _dead,
    _glance,
    _look,
    _mourning,
    _transports,
    _who,
    survives,
)
from mpicoll.transport.mpi.messages import _INT_MAX, _envelope, _explained, _too_large
from mpicoll.transport.mpi.native import MpiNative, _parsed
from mpicoll.transport.mpi.ops import _agree_on_reductions
from mpicoll.transport.mpi.pending import MpiPending, _under_way
from mpicoll.transport.mpi.shared_access import Access, _fence, _probe_access
from mpicoll.transport.shm import give_way

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")


_BLOCK = 1 << 30
"""Bytes of the blocks of which larger messages are made."""

_GROUPS = 1 << 15
"""From here on tags are those of the messages by which MPI makes groups; below are those of schedules. On the
communicator of the collectives, since there is nobody on it who receives from any rank, or with any tag."""


_SPINS = 20
"""Looks at a request before the core is left to others."""

_LOOK = 1000
"""Looks at a request before whoever waits looks whether the others are still there, and sleeps for a moment."""

_NAP = 1e-3


_NEWS = 1.0
"""Seconds that the news of a death may take."""

_NAMED = 2.0
"""Seconds in which every survivor of a death learns who has died, after it has learned that somebody has."""


def _refuse_post(*args: Any) -> Any:
    raise CommunicatorError("this process was forked from an MPI rank, and can't communicate; only the rank itself can")


def _forked() -> None:
    global _post  # noqa: PLW0603  every transfer goes through it
    _post = _refuse_post  # type: ignore[assignment]  # it takes whatever it is given


os.register_at_fork(after_in_child=_forked)


def _translated(method: F) -> F:
    """Raise this library's exceptions where MPI raises its own. For methods that are called by position."""

    @wraps(method)
    def call(self: Any, *args: Any) -> Any:
        try:
            return method(self, *args)
        except MPI.Exception as error:
            raise self.explain(error) from error

    return cast(F, call)


class MpiTransport:
    """One process' end of an MPI communicator, on two duplicates of it: one for collectives, one for messages.

    `unshared`, `unread` and what reductions MPI computes wrongly are those of the communicator that it was made of;
    without one it finds out."""

    def __init__(
        self,
        collective: MPI.Intracomm,
        p2p: MPI.Intracomm,
        nodes: tuple[int, ...],
        access: Access | None = None,
        key: str = "",
        wrong: reductions.Wrong | None = None,
    ) -> None:
        self.rank = collective.rank
        self.size = collective.size
        self.timeout = config().timeout
        self.nodes = nodes
        self.members = members(collective)
        self.key = key or _draw_key(collective)
        self.native = MpiNative(collective)
        self.mpi = p2p
        # Only COMM_WORLD is sure to have the attribute.
        self.max_tag = int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767)
        self.background = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._collective = collective
        self._p2p = p2p
        self.traffic = Traffic()
        self._sends, self._receives = self.traffic.sends, self.traffic.receives
        self._abandoned: list[Any] = []
        self._words: list[Any] = []
        self._comparing: MPI.Intracomm | None = None
        self._access = _probe_access(collective, nodes) if access is None else access
        self.unshared, self.unread, self._named = self._access
        self._wrong = _agree_on_reductions(collective, nodes) if wrong is None else wrong
        self._made: WeakSet[MpiTransport] = WeakSet()
        self._revoked = self._freed = False
        if survives():
            with _mourning:
                self._before = frozenset(_dead.difference(self.members))
                _transports.add(self)
                if not _dead.isdisjoint(self.members):  # of these deaths there will be no more news
                    self.revoke()

    def misreduces(self, op: str, dtype: np.dtype[Any]) -> str | None:
        return reductions.refusal(self._wrong, op, dtype)

    def share(self, nbytes: int) -> list[Memory]:
        memories, failure = shm.share(nbytes, self._collective.allgather, self.rank, named=self._named)
        if memories is None:
            raise CommunicationError(f"{failure}; set MPICOLL_SHARED_MEMORY=off to do without")
        return memories

    def adopt(self, memory: Memory, fd: int) -> list[Memory]:
        if self._named:
            raise CommunicationError("memory without a name can't be passed on (MPICOLL_SHARED_MEMORY=named)")
        memories, failure = shm.adopt(memory, fd, self._collective.allgather, self.rank)
        if memories is None:
            raise CommunicationError(failure)
        return memories

    def readers(self) -> list[Read]:
        return [shm.reader(pid) for pid in self._collective.allgather(os.getpid())]

    @property
    def own_cores(self) -> bool:
        # Not the cores to which this process is bound: a launcher gives each rank its own, if there are enough.
        return launch_env.local_ranks(os.environ, MPI.COMM_WORLD.size) <= (os.cpu_count() or 1)

    @property
    def fence(self) -> Callable[[], object] | None:
        return _fence()

    def check_peers(self, waited: float, peers: Sequence[int]) -> None:
        """The launcher ends a job in which a process has died. Where the job survives deaths, not only that of `peers`
        counts: they may have given up because of another."""
        # Who waits here calls MPI nowhere else, and it must keep this process' messages moving, which others may wait
        # for before they come.
        MPI.COMM_SELF.Iprobe()
        if survives() and (self._revoked or self._collective.Is_revoked()):
            raise self._lost("it was given up")
        if waited > self.timeout + MARGIN:
            missing = ", ".join(str(self.members[peer]) for peer in peers)
            raise Timeout(f"in shared memory, rank {missing} did not come within {self.timeout:g} s")

    @_translated
    def texts(self, text: str) -> list[str]:
        return cast("list[str]", self._collective.allgather(text))

    def explain(self, error: Exception) -> Exception:
        """This library's exception for one of MPI's; any other as it is."""
        if isinstance(error, MPI.Exception):
            return self.failed(error)
        # In shared memory, a rank that can't go on says no more than that.
        given_up = type(error) is CommunicationError and survives()
        if given_up and (self._revoked or self._collective.Is_revoked() or _look() & set(self.members)):
            return self._lost(str(error))
        return error

    def failed(self, error: MPI.Exception, memory: Any = None) -> CommunicationError:
        """What to raise for `error`; `memory` is what MPI may still use."""
        if survives():
            kind = error.Get_error_class()
            if kind in _DEATHS or (kind in _VAGUE and _look() & set(self.members)):
                self._abandoned.append(memory)
                return self._lost(error.Get_error_string())
        return _explained(self.rank, error)

    def _lost(self, what: str) -> RankFailed:
        """The error for an operation that has failed since ranks have died. Who knows first lets the others know."""
        self.revoke()
        deadline = time.monotonic() + _NAMED
        while not (dead := _look() - self._before) and time.monotonic() < deadline:
            MPI.COMM_SELF.Iprobe()
            time.sleep(_NAP)
        ranks = tuple(sorted(dead & set(self.members) or dead))
        return RankFailed(f"rank {self.rank} of {self.size}: {_who(ranks)} ({what}). {_REMEDY}", ranks)

    def ended(self, request: MPI.Request, status: MPI.Status) -> bool:
        """Whether a transfer has, where the job survives deaths.

        Open MPI frees a transfer that it reports as failed, and ends the job when the rest of it fails after that. So
        MPI is asked only for what is a success already."""
        if request.Get_status(status):
            if status.Get_error() != MPI.SUCCESS:
                raise MPI.Exception(status.Get_error())
            request.Wait()
            return True
        if self._revoked or self._p2p.Is_revoked() or self._collective.Is_revoked() or _glance() & set(self.members):
            raise self._lost("while it waited for a message")
        return False

    def _wait(self, requests: Sequence[MPI.Request], statuses: Sequence[MPI.Status]) -> None:
        for request, status in zip(requests, statuses, strict=False):
            turns = 0
            while not self.ended(request, status):
                turns += 1
                if turns > _LOOK:
                    time.sleep(50e-6)
                elif turns > _SPINS:
                    give_way()

    def _finish(self, request: MPI.Request, data: Memory) -> MPI.Status:
        status = MPI.Status()
        try:
            self._wait([request], [status])
        except BaseException:
            self.keep((request, data))
            raise
        return status

    def keep(self, memory: Any) -> None:
        """Keep what MPI may still use."""
        self._abandoned.append(memory)

    def revoke(self) -> None:
        """Nobody can use it any more, nor what was made of it: whoever waits on it gets RankFailed, on all ranks.
        Waits for nothing. Raises CommunicatorError where MPI can't."""
        if not survives():
            raise CommunicatorError(
                f"shrink: rank {self.rank} of {self.size} is in a job that ends when a rank dies; start it by"
                " `mpirun --with-ft ulfm` of Open MPI 5 to have it go on"
            )
        with _mourning:
            made = list(self._made)
            if not self._revoked and not self._freed:
                self._revoked = True
                for comm in self._handles():
                    with suppress(MPI.Exception):  # of some of those who are to be told there is nothing left
                        comm.Revoke()
        for one in made:
            one.revoke()

    @_translated
    def shrink(self) -> MpiTransport:
        self.revoke()
        # Nothing may fail here on some ranks alone: MPI_Comm_shrink is the one call that makes a communicator, and of
        # the same ranks everywhere, even if more of them die meanwhile.
        collective = self._collective.Shrink()
        while (p2p := self._collective.Shrink()).size != collective.size:
            collective = p2p
        # Open MPI crashes where it is still making a communicator that another rank revokes already, because of the
        # next death. So nobody uses it before all have it; the first shrink was over for all when the second began.
        with suppress(MPI.Exception):  # who has died meanwhile
            self._collective.Ack_failed()
            self._collective.Agree(1)
        # Not one of _made: a late failure on this communicator revokes those again, and the new one must outlive it.
        return self._derive(cast(MPI.Intracomm, collective), cast(MPI.Intracomm, p2p), f"{self.key}/{collective.size}")

    def failed_already(self) -> bool:
        deadline = time.monotonic() + _NEWS
        while survives() and time.monotonic() < deadline:
            MPI.COMM_SELF.Iprobe()
            if self._revoked or self._collective.Is_revoked() or _look() & set(self.members):
                return True
            time.sleep(_NAP)
        return False

    @_translated
    def agree(self, flag: bool) -> bool:
        if not survives():
            alike = np.array([flag], np.int32)
            self._collective.Allreduce(MPI.IN_PLACE, alike, MPI.LAND)
            return bool(alike[0])
        while True:
            # Deaths make it raise, everywhere, until all know of them.
            self._collective.Ack_failed()
            try:
                return bool(self._collective.Agree(int(flag)))
            except MPI.Exception as error:
                if error.Get_error_class() not in _DEATHS:
                    raise

    @_translated
    def compare(self, word: int, text: Callable[[], str], idle: Callable[[], None]) -> list[str] | None:
        if self._is_common(word, idle):
            return None
        assert self._comparing is not None
        return cast("list[str]", self._comparing.allgather(text()))

    def _is_common(self, word: int, idle: Callable[[], None]) -> bool:
        """Collective: whether all ranks have the same `word`.

        Collectives that differ from rank to rank may leave messages on the communicator of the collectives, so this
        has one of its own, which is made once all ranks have come for the first time."""
        first = self._comparing is None
        comm = self._collective if self._comparing is None else self._comparing
        if not self._words:
            if self.misreduces("min", np.dtype(np.int64)) is not None:
                return self._is_common_by_list(word)
            mine, least = np.empty(2, np.int64), np.empty(2, np.int64)
            self._words = [mine, least, _parsed(mine), _parsed(least)]
        mine, least, source, target = self._words
        mine[0], mine[1] = word, -word
        request = comm.Iallreduce(source, target, MPI.MIN)
        turns = 0
        try:
            while not request.Test():
                turns += 1
                if turns > _SPINS:
                    give_way()
                    if turns % _LOOK == 0:
                        idle()
                        time.sleep(_NAP)
        except BaseException:
            self._abandoned.append((request, self._words))
            self._words = []
            raise
        if first:
            self._make_comparing()
        # The least of the words, and the greatest.
        return bool(least[0] == -least[1])

    def _is_common_by_list(self, word: int) -> bool:
        """The same where the library computes the least of integers wrongly."""
        if self._comparing is None:
            self._make_comparing()
        assert self._comparing is not None
        return len(set(self._comparing.allgather(word))) == 1

    def _make_comparing(self) -> None:
        comm = self._collective.Dup()
        with _mourning:
            self._comparing = comm
            if self._revoked:
                with suppress(MPI.Exception):
                    comm.Revoke()

    def _handles(self) -> list[MPI.Intracomm]:
        """The communicators that belong to this one alone."""
        return [self._collective, self._p2p, *([] if self._comparing is None else [self._comparing])]

    @_translated
    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message], tag: int) -> None:
        comm = self._collective
        requests: list[MPI.Request] = []
        statuses = [MPI.Status() for _ in range(len(recvs) + len(sends))]
        try:
            for source, data in recvs:
                requests.append(_post(comm.Irecv, data, source, tag))
            for dest, data in sends:
                requests.append(_post(comm.Isend, data, dest, tag))
            if survives():
                self._wait(requests, statuses)
            else:
                MPI.Request.Waitall(requests, statuses)
        except BaseException as error:
            # Some may still be under way: nothing may arrive any more, and what leaves must outlive the failure.
            for request in () if survives() else requests[: len(recvs)]:
                if request != MPI.REQUEST_NULL:
                    request.Cancel()
                    request.Free()
            self._abandoned.append((requests, sends, recvs))
            if isinstance(error, MPI.Exception):
                self._raise_first(recvs, statuses)
            raise
        for (source, data), status in zip(recvs, statuses, strict=False):
            got = status.Get_elements(MPI.BYTE)
            if got != data.size:
                raise self._other_size(source, data, f"{got}")

    def _other_size(self, source: int | None, data: Memory, got: str) -> TruncationError:
        return TruncationError(
            f"rank {self.rank} expected {data.size} bytes from rank {source}, got {got}:"
            " the ranks disagree about the size of the operation"
        )

    def _raise_first(self, recvs: Sequence[Message], statuses: Sequence[MPI.Status]) -> None:
        """Raise the error of the first transfer that failed, which says more than "error in status"."""
        for at, status in enumerate(statuses):
            kind = status.Get_error()
            if kind in (MPI.SUCCESS, MPI.ERR_PENDING):
                continue
            error = MPI.Exception(kind)
            if error.Get_error_class() == MPI.ERR_TRUNCATE and at < len(recvs):
                source, data = recvs[at]
                got = status.Get_elements(MPI.BYTE)
                # Not every MPI library says how large the message was.
                raise self._other_size(source, data, f"{got}" if got > data.size else "more") from error
            raise error

    @_translated
    def send(self, data: Memory, dest: int, tag: int) -> None:
        next(self._sends[dest, tag])
        if survives():
            self._finish(_post(self._p2p.Isend, data, dest, tag), data)
        else:
            _post(self._p2p.Send, data, dest, tag)

    @_translated
    def recv(self, data: Memory, source: int | None, tag: int | None) -> Envelope:
        if survives():
            return self._received(self._finish(_post(self._p2p.Irecv, data, _source(source), _tag(tag)), data))
        status = MPI.Status()
        # Open MPI writes all of a large message that comes through shared memory, also past the end of a buffer that is
        # too small for it. So it is asked for its size first.
        if _post is _refuse_post:
            _refuse_post(self._p2p.Mprobe, data)
        message = self._p2p.Mprobe(_source(source), _tag(tag), status)
        envelope = _envelope(status)
        if envelope.nbytes > data.size:
            whole = np.empty(envelope.nbytes, np.uint8)
            _post(message.Recv, whole)
            next(self._receives[envelope.source, envelope.tag])
            # Its beginning may say what it is.
            data[:] = whole[: data.size]
            raise does_not_fit(self.rank, envelope, data.size)
        _post(message.Recv, data)
        next(self._receives[envelope.source, envelope.tag])
        return envelope

    def _received(self, status: MPI.Status) -> Envelope:
        envelope = _envelope(status)
        next(self._receives[envelope.source, envelope.tag])
        return envelope

    @_translated
    def sendrecv(
        self, data: Memory, dest: int, tag: int, into: Memory, source: int | None, recvtag: int | None
    ) -> Envelope:
        next(self._sends[dest, tag])
        if survives():
            receiving = _post(self._p2p.Irecv, into, _source(source), _tag(recvtag))
            sending = _post(self._p2p.Isend, data, dest, tag)
            self._finish(sending, data)
            return self._received(self._finish(receiving, into))
        status = MPI.Status()
        try:
            if max(data.size, into.size) <= _INT_MAX:
                self._p2p.Sendrecv(data, dest, tag, into, _source(source), _tag(recvtag), status)
            else:
                sending = _post(self._p2p.Isend, data, dest, tag)
                _post(self._p2p.Recv, into, _source(source), _tag(recvtag), status)
                sending.Wait()
        except MPI.Exception as error:
            raise (_too_large(self.rank, error, status, into) or error) from error
        return self._received(status)

    @_translated
    def isend(self, data: Memory, dest: int, tag: int) -> MpiPending:
        next(self._sends[dest, tag])
        return MpiPending(self, _post(self._p2p.Isend, data, dest, tag), data, (None, None, None))

    @_translated
    def irecv(self, data: Memory, source: int | None, tag: int | None) -> MpiPending:
        request = _post(self._p2p.Irecv, data, _source(source), _tag(tag))
        return MpiPending(self, request, data, (self._p2p, source, tag))

    def takes_own(self, tag: int) -> bool:
        return any(
            comm is self._p2p and source in (None, self.rank) and wanted in (None, tag)
            for comm, source, wanted in _under_way.receives()
        )

    def receiving(self) -> list[tuple[int | None, int | None]]:
        return [(source, tag) for comm, source, tag in _under_way.receives() if comm is self._p2p]

    @_translated
    def settle(self, seconds: float) -> bool:
        if MPI.Is_finalized() or self._revoked:
            return False
        request = self._collective.Ibarrier()
        deadline = time.monotonic() + seconds
        while not request.Test() and time.monotonic() < deadline:
            time.sleep(_NAP)
        self._abandoned.append(request)
        return True

    @_translated
    def iprobe(self, source: int | None, tag: int | None) -> Envelope | None:
        if MPI.Is_finalized():  # as when a communicator is freed late, which looks for what nobody has received
            return None
        status = MPI.Status()
        return _envelope(status) if self._p2p.Iprobe(_source(source), _tag(tag), status) else None

    @_translated
    def probe(self, source: int | None, tag: int | None, timeout: float | None) -> Envelope:
        status = MPI.Status()
        if timeout is None:
            self._p2p.Probe(_source(source), _tag(tag), status)
        else:
            poll(lambda: self._p2p.Iprobe(_source(source), _tag(tag), status), timeout, f"rank {self.rank}: probe")
        return _envelope(status)

    @_translated
    def split(self, color: int | None, key: int) -> MpiTransport | None:
        child = cast(MPI.Intracomm, self._collective.Split(MPI.UNDEFINED if color is None else color, key))
        return None if child == MPI.COMM_NULL else self._child(child, child.Dup())

    @_translated
    def group(self, ranks: Sequence[int]) -> MpiTransport:
        whole = self._collective.Get_group()
        part = whole.Incl(list(ranks))
        try:
            self._gather(ranks, 0)
            child = self._collective.Create_group(part, _GROUPS)
            # To make a group takes Open MPI far longer than to duplicate it.
            return self._child(child, child.Dup())
        finally:
            part.Free()
            whole.Free()

    @_translated
    def duplicate(self, tag: int) -> MpiTransport:
        everybody = self._p2p.Get_group()
        try:
            self._gather(range(self.size), 1 + tag)
            child = self._collective.Create_group(everybody, _GROUPS + 1 + tag)
            return self._child(child, child.Dup())
        finally:
            everybody.Free()

    def _gather(self, ranks: Sequence[int], number: int) -> None:
        """Where the job survives deaths, return when all of `ranks` have come: Open MPI can't leave the making of a
        group for which one of them does not come any more."""
        if not survives():
            return
        here, size, nothing = list(ranks).index(self.rank), len(ranks), np.empty(0, np.uint8)
        tag, step = _GATHERING + number, 1
        while step < size:
            self.exchange([(ranks[(here + step) % size], nothing)], [(ranks[here - step], nothing)], tag)
            step *= 2

    def _child(self, collective: MPI.Intracomm, p2p: MPI.Intracomm) -> MpiTransport:
        """A transport on communicators made of this one's, which is revoked with it."""
        child = self._derive(collective, p2p)
        with _mourning:
            self._made.add(child)
            revoked = self._revoked
        if revoked:
            child.revoke()
        return child

    def _derive(self, collective: MPI.Intracomm, p2p: MPI.Intracomm, key: str = "") -> MpiTransport:
        part, whole = collective.Get_group(), self._collective.Get_group()
        ranks = MPI.Group.Translate_ranks(part, range(part.size), whole)
        part.Free()
        whole.Free()
        nodes = renumber([self.nodes[rank] for rank in ranks])
        return MpiTransport(collective, p2p, nodes, self._access, key, self._wrong)

    @_translated
    def free(self) -> None:
        with _mourning:
            self._freed = True
            _transports.discard(self)
        # After MPI_Finalize there is nothing left to free, and MPI would abort the process. What was revoked can't be
        # freed without waiting for the dead.
        if not MPI.Is_finalized() and not (survives() and (self._revoked or self._collective.Is_revoked())):
            for comm in self._handles():
                comm.Free()


_drawn = itertools.count()

_GATHERING = 1 << 15
"""Above the tags of collectives."""


def _draw_key(comm: MPI.Intracomm) -> str:
    """Collective: rank 0 draws the name, which no other communicator gets, since it has drawn no other of this
    number."""
    drawn = np.array([MPI.COMM_WORLD.rank, next(_drawn)])
    comm.Bcast(drawn)
    return f"{drawn[0]}.{drawn[1]}"


def members(comm: MPI.Intracomm) -> tuple[int, ...]:
    """The ranks of `comm` as ranks of COMM_WORLD."""
    part, whole = comm.Get_group(), MPI.COMM_WORLD.Get_group()
    try:
        return tuple(MPI.Group.Translate_ranks(part, range(part.size), whole))
    finally:
        part.Free()
        whole.Free()


def _post(call: Callable[..., R], data: Memory, *envelope: Any) -> R:
    """Start a transfer of bytes. Beyond MPI's counts they go as one element of a derived datatype."""
    if data.size <= _INT_MAX:
        return call(data, *envelope)
    whole, rest = divmod(data.size, _BLOCK)
    chunk = MPI.BYTE.Create_contiguous(_BLOCK)
    large = MPI.Datatype.Create_struct([whole, rest], [0, whole * _BLOCK], [chunk, MPI.BYTE]).Commit()
    try:
        return call([data, 1, large], *envelope)
    finally:
        # MPI itself keeps a freed type until the transfers that use it are done.
        chunk.Free()
        large.Free()


def _source(source: int | None) -> int:
    return MPI.ANY_SOURCE if source is None else source


def _tag(tag: int | None) -> int:
    return MPI.ANY_TAG if tag is None else tag
