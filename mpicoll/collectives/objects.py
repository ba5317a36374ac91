"""Collectives of Python objects that can be pickled.

An object is sent as one message of bytes (see object_messages.py). The ranks first exchange blocks of a fixed size,
which contain the size of a message, and the message itself if it is small. A negative size means that the rank has
nothing that it can send, and all ranks raise. If a message is larger, a second exchange transfers the messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import Any, TypeVar, overload

import numpy as np

from mpicoll.buffers.dtypes import Array
from mpicoll.collectives import allgather, alltoall, arguments, bcast, gather, scatter
from mpicoll.collectives.arguments import adds_rank_to_errors, call_with_timeout
from mpicoll.collectives.object_messages import FAILED, OutgoingObject, check_sizes, pickle_each, unpickle
from mpicoll.engine import dispatch
from mpicoll.engine.core.arrays import displacements
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.core.operation import Operation
from mpicoll.engine.core.request import Request
from mpicoll.engine.diagnostics.flight_recorder import Call
from mpicoll.engine.selection.selector import get_forced_rules
from mpicoll.engine.world import CommLike, resolve
from mpicoll.errors import ArgumentError, MismatchError

T = TypeVar("T")

_BLOCK, _HEAD = 512, 24
"""Sizes in bytes of a block of the first exchange, and of its header.

The header holds the size of the message, the largest size that the sender knows, and the root (-1: none) of the
sender's call."""

_EAGER = _BLOCK - _HEAD
"""Size in bytes of the largest message that fits in a block."""


@overload
def bcast_object(obj: None = ..., root: int = ..., *, comm: CommLike = ..., timeout: float | None = ...) -> Any: ...
@overload
def bcast_object(
    obj: T | None, root: int = ..., *, comm: CommLike = ..., timeout: float | None = ...
) -> T | Any: ...  # None if the root passes it, for which most programs need no look
def bcast_object(obj: Any = None, root: int = 0, *, comm: CommLike = None, timeout: float | None = None) -> Any:
    """Send the object of rank `root` to all ranks.

    Unpickling executes code that the root's pickle names, so the ranks must trust each other. Numpy arrays in the
    object, and other objects that support out-of-band pickling, are not copied into the pickle.

    Args:
        obj: any object that :mod:`pickle` supports; ignored on other ranks than the root.
        root: the rank whose object is sent, the same on every rank.
        comm: the communicator; None is :func:`mpicoll.world`.
        timeout: seconds to wait (see :func:`mpicoll.allreduce`).

    Returns:
        `obj` itself on the root, a copy on the other ranks.

    Raises:
        RankError: `root` is out of range; no message has been sent.
        DTypeError: this rank's object can't be pickled; no object has been sent.
        ArgumentError: another rank's object can't be pickled.
        CommunicationError: this rank can't unpickle an object. Other ranks return, and the communicator stays usable.
        Timeout: the collective is not complete after `timeout` seconds (see :func:`mpicoll.allreduce`).

    Example:
        >>> mpicoll.bcast_object({"epochs": 3}, root=0)
        {'epochs': 3}
    """
    communicator = resolve(comm)
    root = _check_root(communicator, "bcast_object", root)
    outgoing = OutgoingObject.of(communicator, "bcast_object", obj) if communicator.rank == root else None

    def exchange() -> Array:
        block = _get_blocks(communicator, "bcast", root).exchange(() if outgoing is None else (outgoing,))[0]
        size = _read_size(block)
        check_sizes("bcast_object", communicator, {root: size}, outgoing)
        message = _read_message(block) if outgoing is None else outgoing.message
        if size > _EAGER:
            _run(bcast.prepare(communicator, message, root, message, None))
        return message

    message = _run_exchange(communicator, "bcast_object", root, exchange, timeout)
    return obj if outgoing is not None else unpickle(communicator, "bcast_object", root, message)


def gather_object(obj: T, root: int = 0, *, comm: CommLike = None, timeout: float | None = None) -> list[T] | None:
    """Collect one object of each rank on rank `root`.

    Args:
        obj: any object that :mod:`pickle` supports. The ranks must trust each other (see :func:`bcast_object`).
        root: the rank that gets the objects, the same on every rank.
        comm: the communicator; None is :func:`mpicoll.world`.
        timeout: seconds to wait (see :func:`mpicoll.allreduce`).

    Returns:
        On the root a list of copies in rank order; on other ranks None.

    Raises:
        RankError: `root` is out of range; no message has been sent.
        DTypeError: this rank's object can't be pickled; no object has been sent.
        ArgumentError: another rank's object can't be pickled.
        CommunicationError: this rank can't unpickle an object. Other ranks return, and the communicator stays usable.
        Timeout: the collective is not complete after `timeout` seconds (see :func:`mpicoll.allreduce`).

    Example:
        >>> mpicoll.gather_object("a", root=0)  # on one rank
        ['a']
    """
    communicator = resolve(comm)
    root = _check_root(communicator, "gather_object", root)
    return _gather_objects(communicator, "gather_object", obj, root, timeout)


def allgather_object(obj: T, *, comm: CommLike = None, timeout: float | None = None) -> list[T]:
    """Collect one object of each rank on every rank.

    Args:
        obj: any object that :mod:`pickle` supports. The ranks must trust each other (see :func:`bcast_object`).
        comm: the communicator; None is :func:`mpicoll.world`.
        timeout: seconds to wait (see :func:`mpicoll.allreduce`).

    Returns:
        A list of copies in rank order.

    Raises:
        DTypeError: this rank's object can't be pickled; no object has been sent.
        ArgumentError: another rank's object can't be pickled.
        CommunicationError: this rank can't unpickle an object. Other ranks return, and the communicator stays usable.
        Timeout: the collective is not complete after `timeout` seconds (see :func:`mpicoll.allreduce`).

    Example:
        >>> mpicoll.allgather_object("a")  # on one rank
        ['a']
    """
    objects = _gather_objects(resolve(comm), "allgather_object", obj, None, timeout)
    assert objects is not None
    return objects


@overload
def scatter_object(objs: None = ..., root: int = ..., *, comm: CommLike = ..., timeout: float | None = ...) -> Any: ...
@overload
def scatter_object(
    objs: Sequence[T] | None, root: int = ..., *, comm: CommLike = ..., timeout: float | None = ...
) -> T: ...
def scatter_object(
    objs: Sequence[Any] | None = None, root: int = 0, *, comm: CommLike = None, timeout: float | None = None
) -> Any:
    """Send the i-th object of rank `root` to rank i.

    Args:
        objs: on the root a sequence of one object for each rank, which :mod:`pickle` supports; ignored on other ranks.
            The ranks must trust each other (see :func:`bcast_object`).
        root: the rank whose objects are sent, the same on every rank.
        comm: the communicator; None is :func:`mpicoll.world`.
        timeout: seconds to wait (see :func:`mpicoll.allreduce`).

    Returns:
        A copy of this rank's object.

    Raises:
        RankError: `root` is out of range; no message has been sent.
        ShapeError: on the root, `objs` does not have one object for each rank; other ranks raise ArgumentError.
        DTypeError: this rank's object can't be pickled; no object has been sent.
        ArgumentError: another rank's object can't be pickled.
        CommunicationError: this rank can't unpickle an object. Other ranks return, and the communicator stays usable.
        Timeout: the collective is not complete after `timeout` seconds (see :func:`mpicoll.allreduce`).

    Example:
        >>> mpicoll.scatter_object(["a"], root=0)  # on one rank
        'a'
    """
    communicator = resolve(comm)
    root, rank, size = _check_root(communicator, "scatter_object", root), communicator.rank, communicator.size
    parts = pickle_each(communicator, "scatter_object", objs) if rank == root else []
    failed = next((one for one in parts if one.error is not None), None)

    def exchange() -> Array:
        block = _get_blocks(communicator, "scatter", root).exchange(parts)[0]
        largest = int(block[:_HEAD].view(np.int64)[1])
        check_sizes("scatter_object", communicator, {root: largest}, failed)
        message = _read_message(block)
        if largest > _EAGER:
            counts = np.array([one.size for one in parts] or [0] * size, np.int64)
            _run(bcast.prepare(communicator, counts, root, counts, None))
            whole = np.concatenate([one.message for one in parts]) if parts else None
            message = np.empty(_read_size(block), np.uint8)
            _run(scatter.prepare(communicator, whole, root, counts.tolist(), message, None))
        return message

    message = _run_exchange(communicator, "scatter_object", root, exchange, timeout)
    return unpickle(communicator, "scatter_object", root, message)


def alltoall_object(objs: Sequence[T], *, comm: CommLike = None, timeout: float | None = None) -> list[T]:
    """Send the i-th object of every rank to rank i.

    Args:
        objs: a sequence of one object for each rank, which :mod:`pickle` supports. The ranks must trust each other (see
            :func:`bcast_object`).
        comm: the communicator; None is :func:`mpicoll.world`.
        timeout: seconds to wait (see :func:`mpicoll.allreduce`).

    Returns:
        A list whose j-th element is a copy of rank j's object for this rank.

    Raises:
        ShapeError: `objs` does not have one object for each rank; other ranks raise ArgumentError.
        DTypeError: this rank has an object that can't be pickled; no object has been sent.
        ArgumentError: another rank has an object that can't be pickled.
        CommunicationError: this rank can't unpickle an object. Other ranks return, and the communicator stays usable.
        Timeout: the collective is not complete after `timeout` seconds (see :func:`mpicoll.allreduce`).

    Example:
        >>> mpicoll.alltoall_object(["a"])  # on one rank
        ['a']
    """
    communicator = resolve(comm)
    parts = pickle_each(communicator, "alltoall_object", objs)
    failed = next((one for one in parts if one.error is not None), None)

    def exchange() -> list[Array]:
        blocks = _get_blocks(communicator, "alltoall").exchange(parts)
        counts, largest, _ = blocks[:, :_HEAD].copy().view(np.int64).T.tolist()
        check_sizes("alltoall_object", communicator, dict(enumerate(largest)), failed)
        if max(largest) <= _EAGER:
            return [_read_message(one) for one in blocks]
        whole = np.empty(sum(counts), np.uint8)
        joined = np.concatenate([one.message for one in parts])
        _run(alltoall.prepare(communicator, joined, ([one.size for one in parts], counts), whole, None))
        return np.split(whole, displacements(counts)[1:-1])

    messages = _run_exchange(communicator, "alltoall_object", None, exchange, timeout)
    return [unpickle(communicator, "alltoall_object", rank, message) for rank, message in enumerate(messages)]


def _gather_objects(
    comm: CommunicatorCore, operation: str, obj: Any, root: int | None, timeout: float | None
) -> list[Any] | None:
    """Return the objects of all ranks, on rank `root`, or on all ranks if `root` is None."""
    outgoing = OutgoingObject.of(comm, operation, obj)

    def exchange() -> list[Array]:
        blocks = _get_blocks(comm, "allgather").exchange((outgoing,), -1 if root is None else root)
        counts, _, roots = blocks[:, :_HEAD].copy().view(np.int64).T.tolist()
        if len(set(roots)) > 1:
            calls = ("allgather_object" if one < 0 else f"gather_object with root {one}" for one in roots)
            raise MismatchError(
                f"{operation}: the ranks disagree about the call (rank {comm.rank} of {comm.size}):\n"
                + "\n".join(f"  rank {rank} calls {call}" for rank, call in enumerate(calls)),
                tuple(rank for rank, one in enumerate(roots) if one != roots[comm.rank]),
                ("root",),
            )
        check_sizes(operation, comm, dict(enumerate(counts)), outgoing)
        if max(counts) <= _EAGER:
            return [_read_message(one) for one in blocks]
        whole = np.empty(sum(counts) if root in (None, comm.rank) else 0, np.uint8)
        if root is None:
            _run(allgather.prepare(comm, outgoing.message, counts, whole, None))
        else:
            _run(gather.prepare(comm, outgoing.message, root, counts, whole if comm.rank == root else None, None))
        return np.split(whole, displacements(counts)[1:-1])

    messages = _run_exchange(comm, operation, root, exchange, timeout)
    if root not in (None, comm.rank):
        return None
    return [unpickle(comm, operation, rank, message) for rank, message in enumerate(messages)]


@adds_rank_to_errors
def _check_root(comm: CommunicatorCore, operation: str, root: Any) -> int:
    return arguments.check_rank(operation, "root", root, comm)


class _Blocks:
    """First exchange of one kind of call, bound once to separate memory."""

    __slots__ = ("_body", "_received", "_sent")

    def __init__(self, comm: CommunicatorCore, collective: str, root: int) -> None:
        one, every = np.zeros(_BLOCK, np.uint8), np.zeros(0, np.uint8)
        if collective in ("allgather", "alltoall") or (collective == "scatter" and comm.rank == root):
            every = np.zeros(comm.size * _BLOCK, np.uint8)
        if collective == "allgather":
            sent, received = one, every
            operation = allgather.prepare(comm, one, None, every, None)
        elif collective == "alltoall":
            sent, received = every, np.zeros_like(every)
            operation = alltoall.prepare(comm, sent, None, received, None)
        elif collective == "scatter":
            sent, received = every, one
            operation = scatter.prepare(comm, every if comm.rank == root else None, root, None, one, None)
        else:
            sent = received = one
            operation = bcast.prepare(comm, one, root, one, None)
        self._sent, self._received = sent.reshape(-1, _BLOCK), received.reshape(-1, _BLOCK)
        self._body = dispatch.bind(operation, dispatch.select_algorithm(operation), fixed=True)

    def exchange(self, outgoing: Sequence[OutgoingObject], root: int = -1) -> Array:
        """Send the messages `outgoing` in a call with this `root`, and return the received blocks, one per row."""
        sizes = [one.size for one in outgoing]
        largest = FAILED if FAILED in sizes else max(sizes, default=0)
        for row, one in zip(self._sent, outgoing, strict=False):
            row[:_HEAD].view(np.int64)[:] = one.size, largest, root
            if 0 <= one.size <= _EAGER:
                row[_HEAD : _HEAD + one.size] = one.message
        self._body()
        return self._received


def _get_blocks(comm: CommunicatorCore, collective: str, root: int = 0) -> _Blocks:
    """Return the cached blocks for `collective` and `root`. Must be called while the operation runs in the queue."""
    key = ("blocks", collective, root, get_forced_rules())
    blocks: _Blocks | None = comm.call_cache.get(key)
    if blocks is None:
        blocks = comm.call_cache[key] = _Blocks(comm, collective, root)
    return blocks


def _read_size(block: Array) -> int:
    return int(block[:_HEAD].view(np.int64)[0])


def _read_message(block: Array) -> Array:
    """Return the message in a block, or uninitialized memory for the message if it is too large for a block."""
    size = _read_size(block)
    return np.array(block[_HEAD : _HEAD + size]) if size <= _EAGER else np.empty(size, np.uint8)


def _run(operation: Operation) -> None:
    """Run a part of an exchange immediately, within its operation."""
    dispatch.make_task(operation)()


def _run_exchange(
    comm: CommunicatorCore, operation: str, root: int | None, exchange: Callable[[], Any], timeout: float | None
) -> Any:
    """Run `exchange` as one operation in the queue of `comm`, and return its value."""
    call = Call(operation, root=root)

    def exchange_or_clear_cache() -> Any:
        try:
            return exchange()
        except ArgumentError:
            raise  # on all ranks, after an exchange that is complete
        except BaseException:
            # Late messages may still be written to the memory of the blocks, so it must not be used again.
            comm.call_cache.clear()
            raise

    if timeout is None:
        return comm.queue.run(exchange_or_clear_cache, call)
    # Algorithms are selected in the worker's thread, but with the context of this thread.
    context = copy_context()

    def start() -> Request:
        job = comm.queue.submit(lambda: context.run(exchange_or_clear_cache), call)
        return Request(job, lambda: job.value)

    return call_with_timeout(comm, operation, timeout, start)
