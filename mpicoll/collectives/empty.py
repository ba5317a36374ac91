"""empty: arrays in memory that the ranks of a node share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from operator import index
from typing import Any, Literal, overload

import numpy as np

from mpicoll.buffers import dtypes
from mpicoll.buffers.dtypes import Array
from mpicoll.collectives.arguments import adds_rank_to_errors, call_with_timeout
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.core.request import Request
from mpicoll.engine.diagnostics.flight_recorder import Call
from mpicoll.engine.world import CommLike, resolve
from mpicoll.errors import DTypeError, ShapeError


@overload
def empty(
    shape: int | tuple[int, ...],
    dtype: Any = ...,
    *,
    like: Literal["numpy"] = ...,
    comm: CommLike = ...,
    timeout: float | None = ...,
) -> Array: ...
@overload
def empty(
    shape: int | tuple[int, ...],
    dtype: Any = ...,
    *,
    like: Literal["numpy", "torch"],
    comm: CommLike = ...,
    timeout: float | None = ...,
) -> Any: ...
def empty(
    shape: int | tuple[int, ...],
    dtype: Any = "float32",
    *,
    like: Literal["numpy", "torch"] = "numpy",
    comm: CommLike = None,
    timeout: float | None = None,
) -> Any:
    """Return an array in memory that all ranks of `comm` share, if they are on one node.

    Collectives of `comm` on such arrays work on them directly, without copies. A collective skips the copies if the
    buffers of all ranks, or slices of them, were returned by the same call of this function: input and output for
    allreduce (``out=x`` is one buffer), bcast and scatter, the input for all others. The results are the same with any
    buffers.

    The memory is private to the user, has no name, and is freed with the last array that uses it. If the ranks can't
    share memory (:func:`mpicoll.explain` gives the reason) the array is in ordinary memory. This function is
    collective.

    Args:
        shape: the shape of this rank's array; it may differ between ranks.
        dtype: numpy's, or torch's with ``like="torch"``; it may differ between ranks.
        like: the library of the array.
        comm: the communicator; None is :func:`mpicoll.world`.
        timeout: seconds to wait (see :func:`mpicoll.allreduce`).

    Returns:
        A separate array on each rank, whose contents are undefined.

    Raises:
        ShapeError, DTypeError: `shape` or `dtype` is invalid; no message has been sent.
        CommunicationError: the node does not have enough shared memory; raised on all ranks.
        Timeout: the allocation is not complete after `timeout` seconds.

    Example:
        >>> x = mpicoll.empty((2, 3), "float64")
        >>> x.shape, x.dtype
        ((2, 3), dtype('float64'))
    """
    communicator = resolve(comm)
    array: Any = _prepare(communicator, shape, dtype, like, timeout)
    return array


@adds_rank_to_errors
def _prepare(comm: CommunicatorCore, shape: int | tuple[int, ...], dtype: Any, like: str, timeout: float | None) -> Any:
    return make_array("empty", shape, dtype, like, lambda nbytes: _allocate(comm, nbytes, timeout))


def check_shape(operation: str, shape: Any, argument: str = "shape") -> tuple[int, ...]:
    """Return the extents of `shape`, a number or several. Raises ShapeError."""
    try:
        extents = tuple(index(n) for n in shape) if isinstance(shape, (tuple, list)) else (index(shape),)
    except TypeError:
        extents = (-1,)
    if min(extents, default=0) < 0:
        raise ShapeError(f"{operation}: {argument} must be numbers >= 0, got {shape!r}")
    return extents


def make_array(operation: str, shape: Any, dtype: Any, like: str, allocate: Callable[[int], Array]) -> Any:
    """Return an array of the library `like` in the memory that `allocate` returns for its bytes. Raises ShapeError and
    DTypeError before it is allocated."""
    extents = check_shape(operation, shape)
    if like == "torch":
        from mpicoll.buffers.torch import from_bytes, itemsize_of

        return from_bytes(allocate(prod(extents) * itemsize_of(operation, dtype)), dtype, extents)
    if like != "numpy":
        raise DTypeError(f"{operation}: like must be 'numpy' or 'torch', got {like!r}")
    try:
        # numpy replaces a dtype without a size, such as 'S', by one with a size.
        numpy = dtypes.of_numpy(np.empty(0, dtype).dtype).storage
    except (TypeError, DTypeError) as error:
        raise DTypeError(f"{operation}: {error}") from None
    return np.ndarray(extents, numpy, allocate(prod(extents) * numpy.itemsize).data)


def _allocate(comm: CommunicatorCore, nbytes: int, timeout: float | None) -> Array:
    if timeout is not None:
        array: Array = call_with_timeout(comm, "empty", timeout, lambda: _start_allocation(comm, nbytes))
        return array
    allocated: Array = comm.queue.run(comm.allocate, Call("empty"), nbytes)
    return allocated


def _start_allocation(comm: CommunicatorCore, nbytes: int) -> Request:
    job = comm.queue.submit(partial(comm.allocate, nbytes), Call("empty"))
    return Request(job, lambda: job.value)
