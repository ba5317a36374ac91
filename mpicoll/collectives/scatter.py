"""scatter: send each rank its block of one rank's array."""

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
    check_scatter_counts,
    get_block_bytes,
    get_block_shape,
    make_counts_key,
    make_query,
    recognise_prototype,
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
def scatter(
    x: Scalar,
    root: int = ...,
    *,
    counts: Counts | None = ...,
    out: None = ...,
    comm: CommLike = ...,
    algorithm: str | None = ...,
    timeout: float | None = ...,
) -> Any: ...
@overload
def scatter(
    x: ArrayT,
    root: int = ...,
    *,
    counts: Counts | None = ...,
    out: None = ...,
    comm: CommLike = ...,
    algorithm: str | None = ...,
    timeout: float | None = ...,
) -> ArrayT: ...
@overload
def scatter(
    x: Any,
    root: int = ...,
    *,
    counts: Counts | None = ...,
    out: ArrayT,
    comm: CommLike = ...,
    algorithm: str | None = ...,
    timeout: float | None = ...,
) -> ArrayT: ...
@repeats("scatter", "root", "algorithm", "counts")
def scatter(
    x: Any,
    root: int = 0,
    *,
    counts: Counts | None = None,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
    timeout: float | None = None,
) -> Any:
    """Divide the array of rank `root` along axis 0 into blocks, and send the i-th block to rank i.

    Args:
        x: on the root the array, of shape ``(sum of rows, ...)`` and any dtype of fixed size. On other ranks an array
            of the shape ``(rows, ...)`` and the dtype of their block, whose contents don't matter, or None if `out` is
            given.
        root: the rank whose array is divided, the same on every rank.
        counts: the rows of each rank's block, the same on every rank; None if all blocks are equal.
        out: an array for this rank's block; None creates one.
        comm: the communicator; None is :func:`mpicoll.world`.
        algorithm: the name of an algorithm to force (see :func:`mpicoll.algorithms`); None has one selected.
        timeout: seconds to wait (see :func:`allreduce`).

    Returns:
        This rank's block, an array of `x`'s library and dtype; `out` if given.

    Raises:
        DTypeError, ShapeError, RankError, AlgorithmError: an argument is invalid; no message has been sent.
        Timeout: the collective is not complete after `timeout` seconds (see :func:`allreduce`).

    Example:
        >>> mpicoll.scatter(np.arange(3), root=0)  # on one rank
        array([0, 1, 2])
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
def iscatter(
    x: Scalar,
    root: int = ...,
    *,
    counts: Counts | None = ...,
    out: None = ...,
    comm: CommLike = ...,
    algorithm: str | None = ...,
) -> Request: ...
@overload
def iscatter(
    x: ArrayT,
    root: int = ...,
    *,
    counts: Counts | None = ...,
    out: None = ...,
    comm: CommLike = ...,
    algorithm: str | None = ...,
) -> Request[ArrayT]: ...
@overload
def iscatter(
    x: Any,
    root: int = ...,
    *,
    counts: Counts | None = ...,
    out: ArrayT,
    comm: CommLike = ...,
    algorithm: str | None = ...,
) -> Request[ArrayT]: ...
@begins("scatter", "root", "algorithm", "counts")
def iscatter(
    x: Any,
    root: int = 0,
    *,
    counts: Counts | None = None,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
) -> Request:
    """Start :func:`scatter` in the background, with the same arguments.

    Returns:
        A request whose value is the result. Until it has completed, `x` must not be changed and `out` must not be used.

    Example:
        >>> mpicoll.iscatter(np.ones(2)).wait()  # on one rank
        array([1., 1.])
    """
    communicator = resolve(comm)
    key = _make_key(root, algorithm, counts)
    return start(
        communicator, key, x, out, partial(prepare, communicator, root=root, counts=counts, algorithm=algorithm)
    )


@overload
def scatter_init(
    x: Scalar,
    root: int = ...,
    *,
    counts: Counts | None = ...,
    out: None = ...,
    comm: CommLike = ...,
    algorithm: str | None = ...,
) -> Plan: ...
@overload
def scatter_init(
    x: ArrayT,
    root: int = ...,
    *,
    counts: Counts | None = ...,
    out: None = ...,
    comm: CommLike = ...,
    algorithm: str | None = ...,
) -> Plan[ArrayT]: ...
@overload
def scatter_init(
    x: Any,
    root: int = ...,
    *,
    counts: Counts | None = ...,
    out: ArrayT,
    comm: CommLike = ...,
    algorithm: str | None = ...,
) -> Plan[ArrayT]: ...
def scatter_init(
    x: Any,
    root: int = 0,
    *,
    counts: Counts | None = None,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
) -> Plan:
    """Create a plan for repeated calls of :func:`scatter` with the same arguments.

    Returns:
        A plan, of which each run reads the contents that `x` has then. While a run is pending, `x` must not be changed
        and `out` must not be used. The plan may return the same array from each run.

    Example:
        >>> plan = mpicoll.scatter_init(np.ones(2))
        >>> plan()  # on one rank
        array([1., 1.])
    """
    return Plan(prepare(resolve(comm), x, root, counts, out, algorithm))


def _make_key(root: Any, algorithm: str | None, counts: Any) -> tuple[Any, ...]:
    """Return the key of a call."""
    counts_key = None if counts is None else make_counts_key(counts)
    return ("scatter", root, algorithm, counts_key) if type(root) is int else ("scatter", UNCACHED)


@adds_rank_to_errors
def prepare(
    comm: CommunicatorCore, x: Any, root: int, counts: Counts | None, out: Any, algorithm: str | None
) -> Operation:
    root = arguments.check_rank("scatter", "root", root, comm)
    is_root = comm.rank == root
    buffer = recognise("scatter", x) if is_root else recognise_prototype("scatter", x, out)
    shape = get_block_shape(buffer)
    divide = check_scatter_counts if is_root else check_gather_counts
    rows = divide("scatter", shape[0], counts, comm)
    block = resolve_output("scatter", out, buffer, (rows[comm.rank], *shape[1:]))
    source, target = InputArray(buffer, block) if is_root else None, OutputArray(block)
    arrays = move_arrays("scatter", comm, source, target, get_block_bytes(rows, buffer), root)
    query = make_query(comm, arrays, algorithm, nbytes=sum(arrays.counts))
    return Operation(
        comm,
        query,
        algorithm,
        arrays,
        block=block,
        buffers=(buffer, block),
        counts=() if counts is None else rows,
        output=block,
    )
