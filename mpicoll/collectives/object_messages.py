"""Python objects as messages of bytes.

A message is a header of sizes, the object's pickle (protocol 5), and the out-of-band buffers of the arrays in it.
Arrays of the received object are views of the message.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpicoll.buffers.dtypes import Array
from mpicoll.engine.core.arrays import displacements
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.errors import ArgumentError, CommunicationError, DTypeError, ShapeError
from mpicoll.wording import rank_list

_ALIGNMENT = 64
"""Alignment in bytes of each part of a message, so that arrays are aligned for the CPU."""

FAILED = -1
"""Size that marks an object that can't be sent."""

_EMPTY = np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True)
class OutgoingObject:
    """Object as a message, or the error of its pickling."""

    message: Array
    error: ArgumentError | None = None

    @property
    def size(self) -> int:
        return FAILED if self.error is not None else self.message.size

    @classmethod
    def of(cls, comm: CommunicatorCore, operation: str, obj: Any) -> OutgoingObject:
        try:
            return cls(_pickle(obj))
        except Exception as error:  # noqa: BLE001  raised after the exchange, in which the other ranks receive the failure
            pickling_error = DTypeError(
                f"{operation}: a {type(obj).__name__} can't be pickled: {error}; pass an object that pickle supports,"
                f" such as the values that it consists of (rank {comm.rank} of {comm.size})"
            )
            pickling_error.__cause__ = error
            return cls(_EMPTY, pickling_error)


def pickle_each(comm: CommunicatorCore, operation: str, objs: Any) -> list[OutgoingObject]:
    """Return one message for each rank; if `objs` are not one object for each rank, messages with that error."""
    objects: Sequence[Any] = objs if isinstance(objs, Sequence) else ()
    if len(objects) == comm.size:
        return [OutgoingObject.of(comm, operation, one) for one in objects]
    actual = f"{len(objects)} objects" if isinstance(objs, Sequence) else type(objs).__name__
    error = ShapeError(
        f"{operation}: objs must be a sequence of {comm.size} objects, one for each rank, got {actual}"
        f" (rank {comm.rank} of {comm.size})"
    )
    return [OutgoingObject(_EMPTY, error)] * comm.size


def check_sizes(operation: str, comm: CommunicatorCore, sizes: dict[int, int], outgoing: OutgoingObject | None) -> None:
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


def unpickle(comm: CommunicatorCore, operation: str, source: int, message: Array) -> Any:
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
