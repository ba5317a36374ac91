"""reduce_scatter: reduce the arrays of all ranks, and scatter the result."""

from __future__ import annotations

from functools import partial
from typing import Any

from mpicoll.buffers.device import empty_beside
from mpicoll.buffers.ops import OpLike
from mpicoll.collectives import arguments
from mpicoll.collectives.arguments import (
    ArrayT,
    Counts,
    adds_rank_to_errors,
    check_scatter_counts,
    get_row_size,
    make_counts_key,
    make_query,
    recognise_operand,
    resolve_output,
)
from mpicoll.collectives.call import UNCACHED, begins, call, repeats, start
from mpicoll.collectives.memory import OutputArray, ReductionArray, arrays_for_shared_memory
from mpicoll.engine.core.arrays import CollectiveArrays
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.core.operation import Operation
from mpicoll.engine.core.request import Request
from mpicoll.engine.plan import Plan
from mpicoll.engine.world import CommLike, resolve
from mpicoll.errors import DTypeError


@repeats("reduce_scatter", "op", "algorithm", "counts")
def reduce_scatter(
    x: ArrayT,
    op: OpLike = "sum",
    *,
    counts: Counts | None = None,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
    timeout: float | None = None,
) -> ArrayT:
    """Reduce the arrays of all ranks elementwise, and scatter blocks of the result: rank i gets the i-th.

    Args:
        x: this rank's array, of the same shape ``(sum of rows, ...)`` and dtype on every rank.
        op: the reduction, the same on every rank (see :func:`allreduce`); a function must be elementwise.
        counts: the rows of each rank's block, the same on every rank; None if all blocks are equal.
        out: an array for this rank's block; None creates one.
        comm: the communicator; None is :func:`mpicoll.world`.
        algorithm: the name of an algorithm to force (see :func:`mpicoll.algorithms`); None has one selected.
        timeout: seconds to wait (see :func:`allreduce`).

    Returns:
        This rank's block of the result, an array of `x`'s library and dtype and of shape ``(rows, ...)``; `out` if
        given.

    Raises:
        DTypeError, ShapeError, AlgorithmError: an argument is invalid; no message has been sent.
        Timeout: the collective is not complete after `timeout` seconds (see :func:`allreduce`).

    Example:
        >>> mpicoll.reduce_scatter(np.array([1, 2]))  # on one rank
        array([1, 2])
    """
    communicator = resolve(comm)
    key = _make_key(op, algorithm, counts)
    result: ArrayT = call(
        communicator, key, x, out, timeout, partial(prepare, communicator, op=op, counts=counts, algorithm=algorithm)
    )
    return result


@begins("reduce_scatter", "op", "algorithm", "counts")
def ireduce_scatter(
    x: ArrayT,
    op: OpLike = "sum",
    *,
    counts: Counts | None = None,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
) -> Request[ArrayT]:
    """Start :func:`reduce_scatter` in the background, with the same arguments.

    Returns:
        A request whose value is the result. Until it has completed, `x` must not be changed and `out` must not be used.

    Example:
        >>> mpicoll.ireduce_scatter(np.ones(2)).wait()  # on one rank
        array([1., 1.])
    """
    communicator = resolve(comm)
    key = _make_key(op, algorithm, counts)
    return start(communicator, key, x, out, partial(prepare, communicator, op=op, counts=counts, algorithm=algorithm))


def reduce_scatter_init(
    x: ArrayT,
    op: OpLike = "sum",
    *,
    counts: Counts | None = None,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
) -> Plan[ArrayT]:
    """Create a plan for repeated calls of :func:`reduce_scatter` with the same arguments.

    Returns:
        A plan, of which each run reads the contents that `x` has then. While a run is pending, `x` must not be changed
        and `out` must not be used. The plan may return the same array from each run.

    Example:
        >>> plan = mpicoll.reduce_scatter_init(np.ones(2))
        >>> plan()  # on one rank
        array([1., 1.])
    """
    return Plan(prepare(resolve(comm), x, op, counts, out, algorithm))


def _make_key(op: OpLike, algorithm: str | None, counts: Any) -> tuple[Any, ...]:
    """Return the key of a call."""
    counts_key = None if counts is None else make_counts_key(counts)
    return ("reduce_scatter", op, algorithm, counts_key) if type(op) is str else ("reduce_scatter", UNCACHED)


@adds_rank_to_errors
def prepare(
    comm: CommunicatorCore, x: Any, op: OpLike, counts: Counts | None, out: Any, algorithm: str | None
) -> Operation:
    buffer, reduction = recognise_operand("reduce_scatter", x, op)
    if not reduction.elementwise:
        raise DTypeError(
            f"reduce_scatter: op {reduction.name} is not declared elementwise, so it can't be applied to blocks;"
            " pass mpicoll.Op(function, elementwise=True), or reduce, then scatter"
        )
    shape = arguments.get_block_shape(buffer)
    rows = check_scatter_counts("reduce_scatter", shape[0], counts, comm)
    block = resolve_output("reduce_scatter", out, buffer, (rows[comm.rank], *shape[1:]))
    elements = tuple(count * get_row_size(shape) for count in rows)
    work, target = ReductionArray(buffer, reduction, None, comm.size, disjoint_from=block), OutputArray(block)
    # The block is written to the output if that has the dtype of the reduction.
    fits = block.array.dtype == reduction.work
    part = target.array if fits else empty_beside(work.array, elements[comm.rank])

    def store() -> None:
        work.finish(part)
        if fits:
            target.store()
        else:
            block.store(part)

    arrays = CollectiveArrays(
        "reduce_scatter",
        comm.rank,
        work.source,
        part,
        elements,
        reduction=reduction,
        spare=work.array,
        load=work.load,
        store=store,
        unconverted=not reduction.changes(buffer.array.dtype),
    )
    arrays.in_callers_dtype = partial(arrays_for_shared_memory, buffer=buffer, output=block)
    query = make_query(comm, arrays, algorithm, nbytes=buffer.array.nbytes)
    return Operation(
        comm,
        query,
        algorithm,
        arrays,
        block=buffer,
        buffers=(buffer, block),
        counts=() if counts is None else rows,
        output=block,
    )
