"""allgather: gather the blocks of all ranks on every rank."""

from __future__ import annotations

from functools import partial
from typing import Any, overload

from mpicoll.buffers.recognise import recognise
from mpicoll.collectives.arguments import (
    ArrayT,
    Counts,
    Scalar,
    adds_rank_to_errors,
    check_gather_counts,
    get_block_bytes,
    get_block_shape,
    make_counts_key,
    make_query,
    resolve_output,
)
from mpicoll.collectives.call import begins, call, repeats, start
from mpicoll.collectives.memory import InputArray, OutputArray, move_arrays
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.core.operation import Operation
from mpicoll.engine.core.request import Request
from mpicoll.engine.plan import Plan
from mpicoll.engine.world import CommLike, resolve


@overload
def allgather(
    x: Scalar,
    *,
    counts: Counts | None = ...,
    out: Any = ...,
    comm: CommLike = ...,
    algorithm: str | None = ...,
    timeout: float | None = ...,
) -> Any: ...
@overload
def allgather(
    x: ArrayT,
    *,
    counts: Counts | None = ...,
    out: Any = ...,
    comm: CommLike = ...,
    algorithm: str | None = ...,
    timeout: float | None = ...,
) -> ArrayT: ...
@repeats("allgather", "algorithm", "counts")
def allgather(
    x: Any,
    *,
    counts: Counts | None = None,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
    timeout: float | None = None,
) -> Any:
    """Concatenate the blocks of all ranks along axis 0, in rank order, and return the result on every rank.

    Args:
        x: this rank's block, of shape ``(rows, ...)``, with the same dtype and the same axes after the first on every
            rank. A 0-d array is one row. Any dtype of fixed size.
        counts: the rows of each rank's block, the same on every rank; None if all blocks are equal.
        out: an array for the result; None creates one.
        comm: the communicator; None is :func:`mpicoll.world`.
        algorithm: the name of an algorithm to force (see :func:`mpicoll.algorithms`); None has one selected.
        timeout: seconds to wait (see :func:`allreduce`).

    Returns:
        An array of `x`'s library and dtype and of shape ``(sum of rows, ...)``; `out` if given.

    Raises:
        DTypeError, ShapeError, AlgorithmError: an argument is invalid; no message has been sent.
        Timeout: the collective is not complete after `timeout` seconds (see :func:`allreduce`).

    Example:
        >>> mpicoll.allgather(np.array([[1, 2]]))  # on one rank
        array([[1, 2]])
    """
    communicator = resolve(comm)
    key = _make_key(algorithm, counts)
    return call(communicator, key, x, out, timeout, partial(prepare, communicator, counts=counts, algorithm=algorithm))


@overload
def iallgather(
    x: Scalar,
    *,
    counts: Counts | None = ...,
    out: Any = ...,
    comm: CommLike = ...,
    algorithm: str | None = ...,
) -> Request: ...
@overload
def iallgather(
    x: ArrayT,
    *,
    counts: Counts | None = ...,
    out: Any = ...,
    comm: CommLike = ...,
    algorithm: str | None = ...,
) -> Request[ArrayT]: ...
@begins("allgather", "algorithm", "counts")
def iallgather(
    x: Any,
    *,
    counts: Counts | None = None,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
) -> Request:
    """Start :func:`allgather` in the background, with the same arguments.

    Returns:
        A request whose value is the result. Until it has completed, `x` must not be changed and `out` must not be used.

    Example:
        >>> mpicoll.iallgather(np.ones(2)).wait()  # on one rank
        array([1., 1.])
    """
    communicator = resolve(comm)
    key = _make_key(algorithm, counts)
    return start(communicator, key, x, out, partial(prepare, communicator, counts=counts, algorithm=algorithm))


@overload
def allgather_init(
    x: Scalar,
    *,
    counts: Counts | None = ...,
    out: Any = ...,
    comm: CommLike = ...,
    algorithm: str | None = ...,
) -> Plan: ...
@overload
def allgather_init(
    x: ArrayT,
    *,
    counts: Counts | None = ...,
    out: Any = ...,
    comm: CommLike = ...,
    algorithm: str | None = ...,
) -> Plan[ArrayT]: ...
def allgather_init(
    x: Any,
    *,
    counts: Counts | None = None,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
) -> Plan:
    """Create a plan for repeated calls of :func:`allgather` with the same arguments.

    Returns:
        A plan, of which each run reads the contents that `x` has then. While a run is pending, `x` must not be changed
        and `out` must not be used. The plan may return the same array from each run.

    Example:
        >>> plan = mpicoll.allgather_init(np.ones(2))
        >>> plan()  # on one rank
        array([1., 1.])
    """
    return Plan(prepare(resolve(comm), x, counts, out, algorithm))


def _make_key(algorithm: str | None, counts: Any) -> tuple[Any, ...]:
    """Return the key of a call."""
    counts_key = None if counts is None else make_counts_key(counts)
    return ("allgather", algorithm, counts_key)


@adds_rank_to_errors
def prepare(comm: CommunicatorCore, x: Any, counts: Counts | None, out: Any, algorithm: str | None) -> Operation:
    buffer = recognise("allgather", x)
    shape = get_block_shape(buffer)
    rows = check_gather_counts("allgather", shape[0], counts, comm)
    whole = resolve_output("allgather", out, buffer, (sum(rows), *shape[1:]))
    source, target = InputArray(buffer, whole), OutputArray(whole)
    arrays = move_arrays("allgather", comm, source, target, get_block_bytes(rows, buffer))
    arrays.persistent = source.is_user_buffer and target.is_user_buffer
    query = make_query(comm, arrays, algorithm, nbytes=target.array.nbytes)
    return Operation(
        comm,
        query,
        algorithm,
        arrays,
        block=buffer,
        buffers=(buffer, whole),
        counts=() if counts is None else rows,
        output=whole,
    )
