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
from mpicoll.collectives.arguments import names_rank, within
from mpicoll.engine.core.communicator import Communicator
from mpicoll.engine.core.request import Request
from mpicoll.engine.diagnostics.flight_recorder import Call
from mpicoll.engine.executors.schedule import extents
from mpicoll.engine.operation import Operation, body_of, task
from mpicoll.engine.selection.selector import choose, forced
from mpicoll.engine.world import CommLike, resolve
from mpicoll.errors import ArgumentError, CommunicationError, DTypeError, MismatchError, ShapeError

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
    """Send rank `root`'s object to all ranks: anything that :mod:`pickle` takes.

    `obj` matters on the root only. The root returns `obj` itself, the other ranks return copies. Unpickling executes
    code that the root's pickle names, so the ranks must trust each other. Numpy arrays in the object, and other objects
    that support out-of-band pickling, are not copied into the pickle.

    Raises RankError if `root` is out of range. If the root's object can't be pickled, nothing of it is sent: the root
    raises DTypeError, and the other ranks ArgumentError. If a rank can't unpickle the object, that rank alone raises
    CommunicationError, and the communicator stays usable. Raises Timeout after `timeout` seconds (see
    :func:`mpicoll.allreduce`).
    """
    communicator = resolve(comm)
    root = _checked_root(communicator, "bcast_object", root)
    mine = _Outgoing.of(communicator, "bcast_object", obj) if communicator.rank == root else None

    def exchange() -> Array:
        block = _blocks(communicator, "bcast", root).exchange(() if mine is None else (mine,))[0]
        size = _size(block)
        _check_sizes("bcast_object", communicator, {root: size}, mine)
        message = _message(block) if mine is None else mine.message
        if size > _EAGER:
            _run(bcast.prepare(communicator, message, root, message, None))
        return message

    message = _carried_out(communicator, "bcast_object", root, exchange, timeout)
    return obj if mine is not None else _unpickled(communicator, "bcast_object", root, message)


def gather_object(obj: Any, root: int = 0, *, comm: CommLike = None, timeout: float | None = None) -> list[Any] | None:
    """Collect one object of each rank on rank `root`, as a list of copies in rank order; other ranks return None.

    Objects and errors as for :func:`bcast_object`: one object that can't be pickled is an error on all ranks.
    """
    communicator = resolve(comm)
    root = _checked_root(communicator, "gather_object", root)
    return _gathered(communicator, "gather_object", obj, root, timeout)


def allgather_object(obj: Any, *, comm: CommLike = None, timeout: float | None = None) -> list[Any]:
    """Collect one object of each rank on every rank, as a list of copies in rank order.

    Objects and errors as for :func:`bcast_object`: one object that can't be pickled is an error on all ranks.
    """
    found = _gathered(resolve(comm), "allgather_object", obj, None, timeout)
    assert found is not None
    return found


def scatter_object(
    objs: Sequence[Any] | None = None, root: int = 0, *, comm: CommLike = None, timeout: float | None = None
) -> Any:
    """Scatter rank `root`'s objects: return a copy of the i-th on rank i. `objs` matters on the root only.

    Objects and errors as for :func:`bcast_object`. Also raises ShapeError on the root, and ArgumentError on the other
    ranks, if there is not one object for each rank.
    """
    communicator = resolve(comm)
    root, rank, size = _checked_root(communicator, "scatter_object", root), communicator.rank, communicator.size
    parts: list[_Outgoing] = []
    if rank == root:
        given: Sequence[Any] = objs if isinstance(objs, Sequence) else ()
        if len(given) == size:
            parts = [_Outgoing.of(communicator, "scatter_object", one) for one in given]
        else:
            what = f"{len(given)} objects" if isinstance(objs, Sequence) else type(objs).__name__
            error = ShapeError(
                f"scatter_object: objs must be a sequence of {size} objects, one for each rank, got {what}"
                f" (rank {rank} of {size})"
            )
            parts = [_Outgoing(_EMPTY, error)] * size
    wrong = next((one for one in parts if one.error is not None), None)

    def exchange() -> Array:
        block = _blocks(communicator, "scatter", root).exchange(parts)[0]
        largest = int(block[:_HEAD].view(np.int64)[1])
        _check_sizes("scatter_object", communicator, {root: largest}, wrong)
        message = _message(block)
        if largest > _EAGER:
            counts = np.array([one.size for one in parts] or [0] * size, np.int64)
            _run(bcast.prepare(communicator, counts, root, counts, None))
            whole = np.concatenate([one.message for one in parts]) if parts else None
            message = np.empty(_size(block), np.uint8)
            _run(scatter.prepare(communicator, whole, root, counts.tolist(), message, None))
        return message

    message = _carried_out(communicator, "scatter_object", root, exchange, timeout)
    return _unpickled(communicator, "scatter_object", root, message)


def _gathered(
    comm: Communicator, operation: str, obj: Any, root: int | None, timeout: float | None
) -> list[Any] | None:
    """Return the objects of all ranks, on rank `root`, or on all ranks if `root` is None."""
    mine = _Outgoing.of(comm, operation, obj)

    def exchange() -> list[Array]:
        blocks = _blocks(comm, "allgather").exchange((mine,), -1 if root is None else root)
        counts, _, roots = blocks[:, :_HEAD].copy().view(np.int64).T.tolist()
        if len(set(roots)) > 1:
            calls = ("allgather_object" if one < 0 else f"gather_object with root {one}" for one in roots)
            raise MismatchError(
                f"{operation}: the ranks disagree about the call (rank {comm.rank} of {comm.size}):\n"
                + "\n".join(f"  rank {rank} calls {call}" for rank, call in enumerate(calls)),
                tuple(rank for rank, one in enumerate(roots) if one != roots[comm.rank]),
                ("root",),
            )
        _check_sizes(operation, comm, dict(enumerate(counts)), mine)
        if max(counts) <= _EAGER:
            return [_message(one) for one in blocks]
        whole = np.empty(sum(counts) if root in (None, comm.rank) else 0, np.uint8)
        if root is None:
            _run(allgather.prepare(comm, mine.message, counts, whole, None))
        else:
            _run(gather.prepare(comm, mine.message, root, counts, whole if comm.rank == root else None, None))
        return np.split(whole, extents(counts)[1:-1])

    messages = _carried_out(comm, operation, root, exchange, timeout)
    if root not in (None, comm.rank):
        return None
    return [_unpickled(comm, operation, rank, message) for rank, message in enumerate(messages)]


@names_rank
def _checked_root(comm: Communicator, operation: str, root: Any) -> int:
    return arguments.rank(operation, "root", root, comm)


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
    def of(cls, comm: Communicator, operation: str, obj: Any) -> _Outgoing:
        try:
            return cls(_pickled(obj))
        except Exception as error:  # noqa: BLE001  raised after the exchange, in which the other ranks receive the failure
            shown = DTypeError(
                f"{operation}: a {type(obj).__name__} can't be pickled: {error}; pass what pickle takes, such as the"
                f" values that it is made of (rank {comm.rank} of {comm.size})"
            )
            shown.__cause__ = error
            return cls(_EMPTY, shown)


class _Blocks:
    """First exchange of one kind of call, bound once to separate memory."""

    __slots__ = ("_body", "_received", "_sent")

    def __init__(self, comm: Communicator, collective: str, root: int) -> None:
        one, every = np.zeros(_BLOCK, np.uint8), np.zeros(0, np.uint8)
        if collective == "allgather" or (collective == "scatter" and comm.rank == root):
            every = np.zeros(comm.size * _BLOCK, np.uint8)
        if collective == "allgather":
            sent, received = one, every
            prepared = allgather.prepare(comm, one, None, every, None)
        elif collective == "scatter":
            sent, received = every, one
            prepared = scatter.prepare(comm, every if comm.rank == root else None, root, None, one, None)
        else:
            sent = received = one
            prepared = bcast.prepare(comm, one, root, one, None)
        self._sent, self._received = sent.reshape(-1, _BLOCK), received.reshape(-1, _BLOCK)
        self._body = body_of(prepared, choose(prepared.problem, None), bound=True)

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


def _blocks(comm: Communicator, collective: str, root: int = 0) -> _Blocks:
    """Return the cached blocks for `collective` and `root`. Must be called while the operation runs in the queue."""
    key = ("blocks", collective, root, forced())
    found: _Blocks | None = comm.repeated.get(key)
    if found is None:
        found = comm.repeated[key] = _Blocks(comm, collective, root)
    return found


def _size(block: Array) -> int:
    return int(block[:_HEAD].view(np.int64)[0])


def _message(block: Array) -> Array:
    """Return the message in a block, or uninitialized memory for the message if it is too large for a block."""
    size = _size(block)
    return np.array(block[_HEAD : _HEAD + size]) if size <= _EAGER else np.empty(size, np.uint8)


def _check_sizes(operation: str, comm: Communicator, sizes: dict[int, int], mine: _Outgoing | None) -> None:
    """Raise an error on all ranks if one of them has nothing to send: this rank's own error if it has one."""
    failed = [rank for rank, size in sizes.items() if size < 0]
    if not failed:
        return
    if mine is not None and mine.error is not None:
        raise mine.error
    who = f"rank {failed[0]}" if len(failed) == 1 else f"ranks {', '.join(map(str, failed))}"
    raise ArgumentError(
        f"{operation}: {who} passed what can't be sent, so nothing was; the error raised there says why"
        f" (rank {comm.rank} of {comm.size})"
    )


def _run(operation: Operation) -> None:
    """Run a part of an exchange immediately, within its operation."""
    task(operation)()


def _carried_out(
    comm: Communicator, operation: str, root: int | None, exchange: Callable[[], Any], timeout: float | None
) -> Any:
    """Run `exchange` as one operation in the queue of `comm`, and return its value."""
    call = Call(operation, root=root)

    def forgetful() -> Any:
        try:
            return exchange()
        except ArgumentError:
            raise  # on all ranks, after an exchange that is complete
        except BaseException:
            # Late messages may still be written to the memory of the blocks, so it must not be used again.
            comm.repeated.clear()
            raise

    if timeout is None:
        return comm.progress.run(forgetful, call)
    # Algorithms are selected in the worker's thread, but with the context of this thread.
    context = copy_context()

    def start() -> Request:
        job = comm.progress.submit(lambda: context.run(forgetful), call)
        return Request(job, lambda: job.value)

    return within(comm, operation, timeout, start)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _pickled(obj: Any) -> Array:
    """Return `obj` as a message: the number of parts and their sizes, then the parts: the pickle and its buffers."""
    memory: list[pickle.PickleBuffer] = []
    data = pickle.dumps(obj, protocol=5, buffer_callback=memory.append)
    views = [memoryview(data), *(one.raw() for one in memory)]
    parts = [np.frombuffer(one, np.uint8) for one in views]
    head = np.array([len(parts), *(one.size for one in parts)], np.int64).view(np.uint8)
    offsets = extents(_aligned(one.size) for one in (head, *parts))
    message = np.empty(offsets[-1], np.uint8)
    for offset, one in zip(offsets, (head, *parts), strict=False):
        message[offset : offset + one.size] = one
    return message


def _unpickled(comm: Communicator, operation: str, source: int, message: Array) -> Any:
    """Return the object in a `message`. The object's arrays are views of the message.

    Raises CommunicationError if the object can't be unpickled.
    """
    number = int(message[:8].view(np.int64)[0])
    sizes = message[8 : 8 * (number + 1)].view(np.int64).tolist()
    offsets = extents(_aligned(size) for size in (8 * (number + 1), *sizes))
    whole = message.data
    data, *memory = [whole[offset : offset + size] for offset, size in zip(offsets[1:], sizes, strict=False)]
    try:
        return pickle.loads(data, buffers=memory)
    except Exception as error:
        raise CommunicationError(
            f"{operation}: the object of rank {source} can't be unpickled: {error!r}; import here what it is made of"
            f" (rank {comm.rank} of {comm.size}; the exchange is complete, and the communicator can be used)"
        ) from error
