"""empty: arrays in memory that the ranks of a node share."""

from __future__ import annotations

from functools import partial
from math import prod
from operator import index
from typing import Any, Literal

import numpy as np

from mpicoll.buffers import dtypes
from mpicoll.buffers.dtypes import Array
from mpicoll.collectives.arguments import names_rank, within
from mpicoll.engine.core.communicator import Communicator
from mpicoll.engine.core.request import Request
from mpicoll.engine.diagnostics.flight_recorder import Call
from mpicoll.engine.world import CommLike, resolve
from mpicoll.errors import DTypeError, ShapeError


def empty(
    shape: int | tuple[int, ...],
    dtype: Any = "float32",
    *,
    like: Literal["numpy", "torch"] = "numpy",
    comm: CommLike = None,
    timeout: float | None = None,
) -> Any:
    """Return an array in memory that all ranks of `comm` share, if they are on one node.

    Collectives of `comm` on such arrays work on them directly, without copies. This function is collective: every rank
    passes a `shape` and a `dtype` (numpy's, or torch's with ``like="torch"``), which may differ between ranks, and
    returns a separate array. A collective skips the copies if the buffers of all ranks, or slices of them, were
    returned by the same call of this function: input and output for allreduce (``out=x`` is one buffer), bcast and
    scatter, the input for all others. The results are the same with any buffers.

    The contents are undefined. The memory is private to the user, has no name, and is freed with the last array that
    uses it. If ranks can't share memory (:func:`mpicoll.explain` gives the reason) the array is in ordinary memory.

    Raises ShapeError or DTypeError if `shape` or `dtype` is invalid, CommunicationError on all ranks if the node does
    not have enough shared memory, and Timeout after `timeout` seconds (see :func:`allreduce`).
    """
    communicator = resolve(comm)
    made: Any = _prepare(communicator, shape, dtype, like, timeout)
    return made


@names_rank
def _prepare(comm: Communicator, shape: int | tuple[int, ...], dtype: Any, like: str, timeout: float | None) -> Any:
    try:
        extents = tuple(index(n) for n in shape) if isinstance(shape, (tuple, list)) else (index(shape),)
    except TypeError:
        extents = (-1,)
    if min(extents, default=0) < 0:
        raise ShapeError(f"empty: shape must be numbers >= 0, got {shape!r}")
    if like == "torch":
        from mpicoll.buffers.torch import from_bytes, itemsize_of

        return from_bytes(_memory(comm, prod(extents) * itemsize_of("empty", dtype), timeout), dtype, extents)
    if like != "numpy":
        raise DTypeError(f"empty: like must be 'numpy' or 'torch', got {like!r}")
    try:
        # numpy replaces a dtype without a size, such as 'S', by one with a size.
        numpy = dtypes.of_numpy(np.empty(0, dtype).dtype).storage
    except (TypeError, DTypeError) as error:
        raise DTypeError(f"empty: {error}") from None
    return np.ndarray(extents, numpy, _memory(comm, prod(extents) * numpy.itemsize, timeout).data)


def _memory(comm: Communicator, nbytes: int, timeout: float | None) -> Array:
    if timeout is not None:
        late: Array = within(comm, "empty", timeout, lambda: _start(comm, nbytes))
        return late
    allocated: Array = comm.progress.run(comm.allocate, Call("empty"), nbytes)
    return allocated


def _start(comm: Communicator, nbytes: int) -> Request:
    job = comm.progress.submit(partial(comm.allocate, nbytes), Call("empty"))
    return Request(job, lambda: job.value)
