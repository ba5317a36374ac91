"""allreduce: reduce the arrays of all ranks on every rank."""

from __future__ import annotations

from functools import partial
from typing import Any

from mpicoll.buffers.ops import OpLike
from mpicoll.collectives.arguments import adds_rank_to_errors, make_query, recognise_operand, resolve_output
from mpicoll.collectives.call import UNCACHED, call, repeats
from mpicoll.collectives.memory import reduction_arrays
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.core.operation import Operation
from mpicoll.engine.core.request import Request
from mpicoll.engine.dispatch import start
from mpicoll.engine.plan import Plan
from mpicoll.engine.world import CommLike, resolve


@repeats("allreduce", "op", "algorithm")
def allreduce(
    x: Any,
    op: OpLike = "sum",
    *,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
    timeout: float | None = None,
) -> Any:
    """Reduce the arrays of all ranks elementwise, and return the result on every rank.

    Args:
        x: this rank's array, of the same shape and dtype on every rank; for minloc and maxloc a pair ``(values,
            indices)`` of equal shape.
        op: the reduction, the same on every rank:

            * sum, prod, avg (the mean over ranks), premul_sum(factor): numbers, avg only floating ones; float16 and
              bfloat16 are accumulated in float32 and rounded once;
            * min, max: real numbers and bool; band, bor, bxor: integers and bool; land, lor, lxor: bool, and integers,
              where the result is 0 or 1;
            * minloc, maxloc: the result is a pair like `x`: the extreme values, and the lowest index that has each;
            * an :class:`~mpicoll.Op` or an associative function of two arrays, applied in the order of ranks.
        out: an array of `x`'s shape and dtype for the result; None creates one. ``out=x`` reduces in place.
        comm: the communicator; None is :func:`mpicoll.world`.
        algorithm: the name of an algorithm to force (see :func:`mpicoll.algorithms`); None has one selected.
        timeout: seconds to wait. It may differ between ranks. With None the job is aborted when the communicator's
            ``timeout`` expires.

    Returns:
        An array of `x`'s library, shape and dtype; `out` if given.

    Raises:
        DTypeError, ShapeError, AlgorithmError: an argument is invalid; no message has been sent.
        Timeout: the collective is not complete after `timeout` seconds (see :meth:`Request.wait
            <mpicoll.Request.wait>`). It continues in the background, in queue order: `x` and `out` must not be used
            until the late ranks have entered it.

    Example:
        >>> mpicoll.allreduce(np.array([1.0, 2.0]))  # on one rank
        array([1., 2.])
    """
    communicator = resolve(comm)
    key = ("allreduce", op, algorithm) if type(op) is str else ("allreduce", UNCACHED)
    return call(communicator, key, x, out, timeout, partial(prepare, communicator, op=op, algorithm=algorithm))


def iallreduce(
    x: Any,
    op: OpLike = "sum",
    *,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
) -> Request:
    """Start :func:`allreduce` in the background, with the same arguments.

    Returns:
        A request whose value is the result. Until it has completed, `x` must not be changed and `out` must not be used.

    Example:
        >>> mpicoll.iallreduce(np.ones(2)).wait()  # on one rank
        array([1., 1.])
    """
    return start(prepare(resolve(comm), x, op, out, algorithm))


def allreduce_init(
    x: Any,
    op: OpLike = "sum",
    *,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
) -> Plan:
    """Create a plan for repeated calls of :func:`allreduce` with the same arguments.

    Returns:
        A plan, of which each run reads the contents that `x` has then. While a run is pending, `x` must not be changed
        and `out` must not be used. The plan may return the same array from each run.

    Example:
        >>> plan = mpicoll.allreduce_init(np.ones(2))
        >>> plan()  # on one rank
        array([1., 1.])
    """
    return Plan(prepare(resolve(comm), x, op, out, algorithm))


@adds_rank_to_errors
def prepare(comm: CommunicatorCore, x: Any, op: OpLike, out: Any, algorithm: str | None) -> Operation:
    buffer, reduction = recognise_operand("allreduce", x, op)
    output = resolve_output("allreduce", out, buffer, buffer.array.shape)
    arrays = reduction_arrays("allreduce", comm, buffer, reduction, output)
    query = make_query(comm, arrays, algorithm, nbytes=buffer.array.nbytes)
    return Operation(comm, query, algorithm, arrays, block=buffer, buffers=(buffer, output), output=output)
