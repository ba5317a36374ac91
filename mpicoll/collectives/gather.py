"""gather: gather the blocks of all ranks on one rank."""

from __future__ import annotations

from functools import partial
from typing import Any, overload

from mpicoll.buffers.recognise import recognise
from mpicoll.collectives import arguments
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
from mpicoll.collectives.call import UNCACHED, begins, call, repeats, start
from mpicoll.collectives.memory import InputArray, OutputArray, move_arrays
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.core.operation import Operation
from mpicoll.engine.core.request import Request
from mpicoll.engine.plan import Plan
from mpicoll.engine.world import CommLike, resolve


@overload
def gather(
    x: Scalar,
    root: int = ...,
    *,
    counts: Counts | None = ...,
    out: Any = ...,
    comm: CommLike = ...,
    algorithm: str | None = ...,
    timeout: float | None = ...,
) -> Any: ...
@overload
def gather(
    x: ArrayT,
    root: int = ...,
    *,
    counts: Counts | None = ...,
    out: Any = ...,
    comm: CommLike = ...,
    algorithm: str | None = ...,
    timeout: float | None = ...,
) -> ArrayT | None: ...
@repeats("gather", "root", "algorithm", "counts")
def gather(
    x: Any,
    root: int = 0,
    *,
    counts: Counts | None = None,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
    timeout: float | None = None,
) -> Any:
    """Concatenate the blocks of all ranks along axis 0, in rank order, on rank `root`.

    Args:
        x: this rank's block, of shape ``(rows, ...)``, with the same dtype and the same axes after the first on every
            rank. A 0-d array is one row. Any dtype of fixed size.
        root: the rank that gets the result, the same on every rank.
        counts: the rows of each rank's block, the same on every rank; None if all blocks are equal.
        out: an array for the result, on the root only; None creates one.
        comm: the communicator; None is :func:`mpicoll.world`.
        algorithm: the name of an algorithm to force (see :func:`mpicoll.algorithms`); None has one selected.
        timeout: seconds to wait (see :func:`allreduce`).

    Returns:
        On the root an array of `x`'s library and dtype and of shape ``(sum of rows, ...)``, `out` if given; on other
        ranks None.

    Raises:
        DTypeError, ShapeError, RankError, AlgorithmError: an argument is invalid; no message has been sent.
        Timeout: the collective is not complete after `timeout` seconds (see :func:`allreduce`).

    Example:
        >>> mpicoll.gather(np.array([5, 6]), root=0)  # on one rank
        array([5, 6])
    """
    communicator = resolve(comm)
    key = _make_key(root, algorithm, counts)
    return call(
        communicator,
        key,
        x,
        out,
        timeout,
        partial(prepare, communicator, root=root, counts=counts, algorithm=algorithm),
    )


@overload
def igather(
    x: Scalar,
    root: int = ...,
    *,
    counts: Counts | None = ...,
    out: Any = ...,
    comm: CommLike = ...,
    algorithm: str | None = ...,
) -> Request: ...
@overload
def igather(
    x: ArrayT,
    root: int = ...,
    *,
    counts: Counts | None = ...,
    out: Any = ...,
    comm: CommLike = ...,
    algorithm: str | None = ...,
) -> Request[ArrayT | None]: ...
@begins("gather", "root", "algorithm", "counts")
def igather(
    x: Any,
    root: int = 0,
    *,
    counts: Counts | None = None,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
) -> Request:
    """Start :func:`gather` in the background, with the same arguments.

    Returns:
        A request whose value is the result. Until it has completed, `x` must not be changed and `out` must not be used.

    Example:
        >>> mpicoll.igather(np.ones(2)).wait()  # on one rank
        array([1., 1.])
    """
    communicator = resolve(comm)
    key = _make_key(root, algorithm, counts)
    return start(
        communicator, key, x, out, partial(prepare, communicator, root=root, counts=counts, algorithm=algorithm)
    )


@overload
def gather_init(
    x: Scalar,
    root: int = ...,
    *,
    counts: Counts | None = ...,
    out: Any = ...,
    comm: CommLike = ...,
    algorithm: str | None = ...,
) -> Plan: ...
@overload
def gather_init(
    x: ArrayT,
    root: int = ...,
    *,
    counts: Counts | None = ...,
    out: Any = ...,
    comm: CommLike = ...,
    algorithm: str | None = ...,
) -> Plan[ArrayT | None]: ...
def gather_init(
    x: Any,
    root: int = 0,
    *,
    counts: Counts | None = None,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
) -> Plan:
    """Create a plan for repeated calls of :func:`gather` with the same arguments.

    Returns:
        A plan, of which each run reads the contents that `x` has then. While a run is pending, `x` must not be changed
        and `out` must not be used. The plan may return the same array from each run.

    Example:
        >>> plan = mpicoll.gather_init(np.ones(2))
        >>> plan()  # on one rank
        array([1., 1.])
    """
    return Plan(prepare(resolve(comm), x, root, counts, out, algorithm))


def _make_key(root: Any, algorithm: str | None, counts: Any) -> tuple[Any, ...]:
    """Return the key of a call."""
    counts_key = None if counts is None else make_counts_key(counts)
    return ("gather", root, algorithm, counts_key) if type(root) is int else ("gather", UNCACHED)


@adds_rank_to_errors
def prepare(
    comm: CommunicatorCore, x: Any, root: int, counts: Counts | None, out: Any, algorithm: str | None
) -> Operation:
    root = arguments.check_rank("gather", "root", root, comm)
    arguments.check_only_at_root("gather", out, root, comm)
    buffer = recognise("gather", x)
    shape = get_block_shape(buffer)
    rows = check_gather_counts("gather", shape[0], counts, comm)
    whole = resolve_output("gather", out, buffer, (sum(rows), *shape[1:])) if comm.rank == root else None
    source, target = InputArray(buffer, whole), None if whole is None else OutputArray(whole)
    arrays = move_arrays("gather", comm, source, target, get_block_bytes(rows, buffer), root)
    query = make_query(comm, arrays, algorithm, nbytes=sum(arrays.counts))
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
