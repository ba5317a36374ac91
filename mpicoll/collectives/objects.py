"""Collectives of Python objects that can be pickled.

An object is sent as one message of bytes: a header of sizes, its pickle (protocol 5), and the out-of-band buffers of
the arrays in it. Arrays of the received object are views of that message. The ranks first exchange blocks of a fixed
size, which contain the size of a message, and the message itself if it is small. A negative size means that the rank
has nothing that it can send, and all ranks raise. If a message is larger, a second exchange transfers the messages.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpicoll.buffers.dtypes import Array
from mpicoll.collectives import allgather, arguments, bcast, gather, scatter
from mpicoll.collectives.arguments import adds_rank_to_errors, call_with_timeout
from mpicoll.engine import dispatch
from mpicoll.engine.core.arrays import displacements
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.core.operation import Operation
from mpicoll.engine.core.request import Request
from mpicoll.engine.diagnostics.flight_recorder import Call
from mpicoll.engine.selection.selector import get_forced_rules
from mpicoll.engine.world import CommLike, resolve
from mpicoll.errors import ArgumentError, CommunicationError, DTypeError, MismatchError, ShapeError
from mpicoll.wording import rank_list

_ALIGNMENT = 64
"""Alignment in bytes of each part of a message, so that arrays are aligned for the CPU."""

_FAILED = -1
"""Size that marks an object that can't be sent."""

_BLOCK, _HEAD = 512, 24
"""Sizes in bytes of a block of the first exchange, and of its header.

The header holds the size of the message, the largest size that the sender knows, and the root (-1: none) of the
sender's call."""

_EAGER = _BLOCK - _HEAD
"""Size in bytes of the largest message that fits in a block."""


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
    outgoing = _Outgoing.of(communicator, "bcast_object", obj) if communicator.rank == root else None

    def exchange() -> Array:
        block = _get_blocks(communicator, "bcast", root).exchange(() if outgoing is None else (outgoing,))[0]
        size = _read_size(block)
        _check_sizes("bcast_object", communicator, {root: size}, outgoing)
        message = _read_message(block) if outgoing is None else outgoing.message
        if size > _EAGER:
            _run(bcast.prepare(communicator, message, root, message, None))
        return message

    message = _run_exchange(communicator, "bcast_object", root, exchange, timeout)
    return obj if outgoing is not None else _unpickle(communicator, "bcast_object", root, message)


def gather_object(obj: Any, root: int = 0, *, comm: CommLike = None, timeout: float | None = None) -> list[Any] | None:
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


def allgather_object(obj: Any, *, comm: CommLike = None, timeout: float | None = None) -> list[Any]:
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
    parts: list[_Outgoing] = []
    if rank == root:
        objects: Sequence[Any] = objs if isinstance(objs, Sequence) else ()
        if len(objects) == size:
            parts = [_Outgoing.of(communicator, "scatter_object", one) for one in objects]
        else:
            actual = f"{len(objects)} objects" if isinstance(objs, Sequence) else type(objs).__name__
            error = ShapeError(
                f"scatter_object: objs must be a sequence of {size} objects, one for each rank, got {actual}"
                f" (rank {rank} of {size})"
            )
            parts = [_Outgoing(_EMPTY, error)] * size
    failed = next((one for one in parts if one.error is not None), None)

    def exchange() -> Array:
        block = _get_blocks(communicator, "scatter", root).exchange(parts)[0]
        largest = int(block[:_HEAD].view(np.int64)[1])
        _check_sizes("scatter_object", communicator, {root: largest}, failed)
        message = _read_message(block)
        if largest > _EAGER:
            counts = np.array([one.size for one in parts] or [0] * size, np.int64)
            _run(bcast.prepare(communicator, counts, root, counts, None))
            whole = np.concatenate([one.message for one in parts]) if parts else None
            message = np.empty(_read_size(block), np.uint8)
            _run(scatter.prepare(communicator, whole, root, counts.tolist(), message, None))
        return message

    message = _run_exchange(communicator, "scatter_object", root, exchange, timeout)
    return _unpickle(communicator, "scatter_object", root, message)


def _gather_objects(
    comm: CommunicatorCore, operation: str, obj: Any, root: int | None, timeout: float | None
) -> list[Any] | None:
    """Return the objects of all ranks, on rank `root`, or on all ranks if `root` is None."""
    outgoing = _Outgoing.of(comm, operation, obj)

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
        _check_sizes(operation, comm, dict(enumerate(counts)), outgoing)
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
    return [_unpickle(comm, operation, rank, message) for rank, message in enumerate(messages)]


@adds_rank_to_errors
def _check_root(comm: CommunicatorCore, operation: str, root: Any) -> int:
    return arguments.check_rank(operation, "root", root, comm)


_EMPTY = np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True)
class _Outgoing:
    """Object as a message, or the error of its pickling."""

    message: Array
    error: ArgumentError | None = None

    @property
    def size(self) -> int:
        return _FAILED if self.error is not None else self.message.size

    @classmethod
    def of(cls, comm: CommunicatorCore, operation: str, obj: Any) -> _Outgoing:
        try:
            return cls(_pickle(obj))
        except Exception as error:  # noqa: BLE001  raised after the exchange, in which the other ranks receive the failure
            pickling_error = DTypeError(
                f"{operation}: a {type(obj).__name__} can't be pickled: {error}; pass an object that pickle supports,"
                f" such as the values that it consists of (rank {comm.rank} of {comm.size})"
            )
            pickling_error.__cause__ = error
            return cls(_EMPTY, pickling_error)


class _Blocks:
    """First exchange of one kind of call, bound once to separate memory."""

    __slots__ = ("_body", "_received", "_sent")

    def __init__(self, comm: CommunicatorCore, collective: str, root: int) -> None:
        one, every = np.zeros(_BLOCK, np.uint8), np.zeros(0, np.uint8)
        if collective == "allgather" or (collective == "scatter" and comm.rank == root):
            every = np.zeros(comm.size * _BLOCK, np.uint8)
        if collective == "allgather":
            sent, received = one, every
            operation = allgather.prepare(comm, one, None, every, None)
        elif collective == "scatter":
            sent, received = every, one
            operation = scatter.prepare(comm, every if comm.rank == root else None, root, None, one, None)
        else:
            sent = received = one
            operation = bcast.prepare(comm, one, root, one, None)
        self._sent, self._received = sent.reshape(-1, _BLOCK), received.reshape(-1, _BLOCK)
        self._body = dispatch.bind(operation, dispatch.select_algorithm(operation), fixed=True)

    def exchange(self, outgoing: Sequence[_Outgoing], root: int = -1) -> Array:
        """Send the messages `outgoing` in a call with this `root`, and return the received blocks, one per row."""
        sizes = [one.size for one in outgoing]
        largest = _FAILED if _FAILED in sizes else max(sizes, default=0)
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


def _check_sizes(operation: str, comm: CommunicatorCore, sizes: dict[int, int], outgoing: _Outgoing | None) -> None:
    """Raise an error on all ranks if one of them has nothing to send: this rank's own error if it has one."""
    failed_ranks = [rank for rank, size in sizes.items() if size < 0]
    if not failed_ranks:
        return
    if outgoing is not None and outgoing.error is not None:
        raise outgoing.error
    raise ArgumentError(
        f"{operation}: {rank_list(failed_ranks)} passed an object that can't be sent, so nothing was sent; the error"
        f" raised there gives the reason (rank {comm.rank} of {comm.size})"
    )


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


def _align(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _pickle(obj: Any) -> Array:
    """Return `obj` as a message: the number of parts and their sizes, then the parts: the pickle and its buffers."""
    memory: list[pickle.PickleBuffer] = []
    data = pickle.dumps(obj, protocol=5, buffer_callback=memory.append)
    views = [memoryview(data), *(one.raw() for one in memory)]
    parts = [np.frombuffer(one, np.uint8) for one in views]
    head = np.array([len(parts), *(one.size for one in parts)], np.int64).view(np.uint8)
    offsets = displacements(_align(one.size) for one in (head, *parts))
    message = np.empty(offsets[-1], np.uint8)
    for offset, one in zip(offsets, (head, *parts), strict=False):
        message[offset : offset + one.size] = one
    return message


def _unpickle(comm: CommunicatorCore, operation: str, source: int, message: Array) -> Any:
    """Return the object in a `message`. The object's arrays are views of the message.

    Raises CommunicationError if the object can't be unpickled.
    """
    number = int(message[:8].view(np.int64)[0])
    sizes = message[8 : 8 * (number + 1)].view(np.int64).tolist()
    offsets = displacements(_align(size) for size in (8 * (number + 1), *sizes))
    whole = message.data
    data, *memory = [whole[offset : offset + size] for offset, size in zip(offsets[1:], sizes, strict=False)]
    try:
        return pickle.loads(data, buffers=memory)
    except Exception as error:
        raise CommunicationError(
            f"{operation}: the object of rank {source} can't be unpickled: {error!r}; import its classes on this rank"
            f" first (rank {comm.rank} of {comm.size}; the exchange is complete, and the communicator can be used)"
        ) from error
