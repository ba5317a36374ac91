"""exscan: reduce, on each rank, the arrays of the lower ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

from mpicoll.buffers import ops
from mpicoll.buffers.device import empty_beside
from mpicoll.buffers.ops import OpLike
from mpicoll.collectives.arguments import (
    ArrayT,
    adds_rank_to_errors,
    make_query,
    recognise_operand,
    reject_average,
    resolve_output,
)
from mpicoll.collectives.call import UNCACHED, begins, call, repeats, start
from mpicoll.collectives.memory import ReductionArray, arrays_for_shared_memory, is_plain
from mpicoll.engine.core.arrays import CollectiveArrays, do_nothing
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.core.operation import Operation
from mpicoll.engine.core.request import Request
from mpicoll.engine.plan import Plan
from mpicoll.engine.world import CommLike, resolve


@repeats("exscan", "op", "algorithm")
def exscan(
    x: ArrayT,
    op: OpLike = "sum",
    *,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
    timeout: float | None = None,
) -> ArrayT:
    """Compute the exclusive prefix reduction: ``x_0 op ... op x_(r-1)`` on rank r, elementwise and in this order.

    Args:
        x: this rank's array, of the same shape and dtype on every rank.
        op: the reduction, the same on every rank (see :func:`allreduce`); avg is not supported.
        out: an array of `x`'s shape and dtype for the result; None creates one.
        comm: the communicator; None is :func:`mpicoll.world`.
        algorithm: the name of an algorithm to force (see :func:`mpicoll.algorithms`); None has one selected.
        timeout: seconds to wait (see :func:`allreduce`).

    Returns:
        An array of `x`'s library, shape and dtype; `out` if given. On rank 0 it holds the neutral element of `op` (0
        for sum, the largest value for min, ...); for reductions without one (minloc, maxloc, functions) rank 0 returns
        None, and `out` is not changed.

    Raises:
        DTypeError, ShapeError, AlgorithmError: an argument is invalid; no message has been sent.
        Timeout: the collective is not complete after `timeout` seconds (see :func:`allreduce`).

    Example:
        >>> mpicoll.exscan(np.array([1, 2]))  # on one rank
        array([0, 0])
    """
    communicator = resolve(comm)
    key = _make_key(op, algorithm)
    result: ArrayT = call(
        communicator, key, x, out, timeout, partial(prepare, communicator, op=op, algorithm=algorithm)
    )
    return result


@begins("exscan", "op", "algorithm")
def iexscan(
    x: ArrayT,
    op: OpLike = "sum",
    *,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
) -> Request[ArrayT]:
    """Start :func:`exscan` in the background, with the same arguments.

    Returns:
        A request whose value is the result. Until it has completed, `x` must not be changed and `out` must not be used.

    Example:
        >>> mpicoll.iexscan(np.ones(2)).wait()  # on one rank
        array([0., 0.])
    """
    communicator = resolve(comm)
    key = _make_key(op, algorithm)
    return start(communicator, key, x, out, partial(prepare, communicator, op=op, algorithm=algorithm))


def exscan_init(
    x: ArrayT,
    op: OpLike = "sum",
    *,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
) -> Plan[ArrayT]:
    """Create a plan for repeated calls of :func:`exscan` with the same arguments.

    Returns:
        A plan, of which each run reads the contents that `x` has then. While a run is pending, `x` must not be changed
        and `out` must not be used. The plan may return the same array from each run.

    Example:
        >>> plan = mpicoll.exscan_init(np.ones(2))
        >>> plan()  # on one rank
        array([0., 0.])
    """
    return Plan(prepare(resolve(comm), x, op, out, algorithm))


def _make_key(op: OpLike, algorithm: str | None) -> tuple[Any, ...]:
    """Return the key of a call."""
    return ("exscan", op, algorithm) if type(op) is str else ("exscan", UNCACHED)


@adds_rank_to_errors
def prepare(comm: CommunicatorCore, x: Any, op: OpLike, out: Any, algorithm: str | None) -> Operation:
    reject_average("exscan", op)
    buffer, reduction = recognise_operand("exscan", x, op)
    output = resolve_output("exscan", out, buffer, buffer.array.shape)
    work = ReductionArray(buffer, reduction, None, comm.size, disjoint_from=output)
    identity = ops.identity(reduction, buffer.dtype)
    has_result = comm.rank > 0 or identity is not None
    # The result is written to the caller's memory if that has the dtype of the reduction.
    is_user_buffer = output.array.dtype == reduction.work and is_plain(output.array) and has_result
    prefix = output.array.reshape(-1) if is_user_buffer else empty_beside(work.array, work.array.size)
    arrays = CollectiveArrays(
        "exscan",
        comm.rank,
        work.source,
        prefix,
        (prefix.size,),
        reduction=reduction,
        spare=work.array,
        identity=identity,
        load=work.load,
        store=do_nothing if is_user_buffer or not has_result else lambda: output.store(prefix),
        unconverted=has_result and not reduction.changes(buffer.array.dtype),
    )
    arrays.in_callers_dtype = partial(arrays_for_shared_memory, buffer=buffer, output=output)
    query = make_query(comm, arrays, algorithm, nbytes=buffer.array.nbytes)
    return Operation(
        comm,
        query,
        algorithm,
        arrays,
        block=buffer,
        buffers=(buffer, output),
        output=output if has_result else None,
    )
