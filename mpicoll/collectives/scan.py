"""scan: reduce, on each rank, the arrays of the lower ranks and its own."""

from __future__ import annotations

from functools import partial
from typing import Any

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
from mpicoll.collectives.memory import reduction_arrays
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.core.operation import Operation
from mpicoll.engine.core.request import Request
from mpicoll.engine.plan import Plan
from mpicoll.engine.world import CommLike, resolve


@repeats("scan", "op", "algorithm")
def scan(
    x: ArrayT,
    op: OpLike = "sum",
    *,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
    timeout: float | None = None,
) -> ArrayT:
    """Compute the inclusive prefix reduction: ``x_0 op x_1 op ... op x_r`` on rank r, elementwise and in this order.

    Args:
        x: this rank's array, of the same shape and dtype on every rank.
        op: the reduction, the same on every rank (see :func:`allreduce`); avg is not supported.
        out: an array of `x`'s shape and dtype for the result; None creates one.
        comm: the communicator; None is :func:`mpicoll.world`.
        algorithm: the name of an algorithm to force (see :func:`mpicoll.algorithms`); None has one selected.
        timeout: seconds to wait (see :func:`allreduce`).

    Returns:
        An array of `x`'s library, shape and dtype; `out` if given.

    Raises:
        DTypeError, ShapeError, AlgorithmError: an argument is invalid; no message has been sent.
        Timeout: the collective is not complete after `timeout` seconds (see :func:`allreduce`).

    Example:
        >>> mpicoll.scan(np.array([1, 2]))  # on one rank
        array([1, 2])
    """
    communicator = resolve(comm)
    key = _make_key(op, algorithm)
    result: ArrayT = call(
        communicator, key, x, out, timeout, partial(prepare, communicator, op=op, algorithm=algorithm)
    )
    return result


@begins("scan", "op", "algorithm")
def iscan(
    x: ArrayT,
    op: OpLike = "sum",
    *,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
) -> Request[ArrayT]:
    """Start :func:`scan` in the background, with the same arguments.

    Returns:
        A request whose value is the result. Until it has completed, `x` must not be changed and `out` must not be used.

    Example:
        >>> mpicoll.iscan(np.ones(2)).wait()  # on one rank
        array([1., 1.])
    """
    communicator = resolve(comm)
    key = _make_key(op, algorithm)
    return start(communicator, key, x, out, partial(prepare, communicator, op=op, algorithm=algorithm))


def scan_init(
    x: ArrayT,
    op: OpLike = "sum",
    *,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
) -> Plan[ArrayT]:
    """Create a plan for repeated calls of :func:`scan` with the same arguments.

    Returns:
        A plan, of which each run reads the contents that `x` has then. While a run is pending, `x` must not be changed
        and `out` must not be used. The plan may return the same array from each run.

    Example:
        >>> plan = mpicoll.scan_init(np.ones(2))
        >>> plan()  # on one rank
        array([1., 1.])
    """
    return Plan(prepare(resolve(comm), x, op, out, algorithm))


def _make_key(op: OpLike, algorithm: str | None) -> tuple[Any, ...]:
    """Return the key of a call."""
    return ("scan", op, algorithm) if type(op) is str else ("scan", UNCACHED)


@adds_rank_to_errors
def prepare(comm: CommunicatorCore, x: Any, op: OpLike, out: Any, algorithm: str | None) -> Operation:
    reject_average("scan", op)
    buffer, reduction = recognise_operand("scan", x, op)
    output = resolve_output("scan", out, buffer, buffer.array.shape)
    arrays = reduction_arrays("scan", comm, buffer, reduction, output)
    query = make_query(comm, arrays, algorithm, nbytes=buffer.array.nbytes)
    return Operation(comm, query, algorithm, arrays, block=buffer, buffers=(buffer, output), output=output)
