"""reduce: reduce the arrays of all ranks on one rank."""

from __future__ import annotations

from functools import partial
from typing import Any

from mpicoll.buffers.ops import OpLike
from mpicoll.collectives import arguments
from mpicoll.collectives.arguments import ArrayT, adds_rank_to_errors, make_query, recognise_operand, resolve_output
from mpicoll.collectives.call import UNCACHED, begins, call, repeats, start
from mpicoll.collectives.memory import reduction_arrays
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.core.operation import Operation
from mpicoll.engine.core.request import Request
from mpicoll.engine.plan import Plan
from mpicoll.engine.world import CommLike, resolve


@repeats("reduce", "op", "root", "algorithm")
def reduce(
    x: ArrayT,
    op: OpLike = "sum",
    root: int = 0,
    *,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
    timeout: float | None = None,
) -> ArrayT | None:
    """Reduce the arrays of all ranks elementwise, and return the result on rank `root`.

    Args:
        x: this rank's array, of the same shape and dtype on every rank.
        op: the reduction, the same on every rank (see :func:`allreduce`).
        root: the rank that gets the result, the same on every rank.
        out: an array of `x`'s shape and dtype for the result, on the root only; None creates one.
        comm: the communicator; None is :func:`mpicoll.world`.
        algorithm: the name of an algorithm to force (see :func:`mpicoll.algorithms`); None has one selected.
        timeout: seconds to wait (see :func:`allreduce`).

    Returns:
        On the root an array of `x`'s library, shape and dtype, `out` if given; on other ranks None.

    Raises:
        DTypeError, ShapeError, RankError, AlgorithmError: an argument is invalid; no message has been sent.
        Timeout: the collective is not complete after `timeout` seconds (see :func:`allreduce`).

    Example:
        >>> mpicoll.reduce(np.array([3, 4]), "max", root=0)  # on one rank
        array([3, 4])
    """
    communicator = resolve(comm)
    key = _make_key(op, root, algorithm)
    result: ArrayT | None = call(
        communicator, key, x, out, timeout, partial(prepare, communicator, op=op, root=root, algorithm=algorithm)
    )
    return result


@begins("reduce", "op", "root", "algorithm")
def ireduce(
    x: ArrayT,
    op: OpLike = "sum",
    root: int = 0,
    *,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
) -> Request[ArrayT | None]:
    """Start :func:`reduce` in the background, with the same arguments.

    Returns:
        A request whose value is the result. Until it has completed, `x` must not be changed and `out` must not be used.

    Example:
        >>> mpicoll.ireduce(np.ones(2)).wait()  # on one rank
        array([1., 1.])
    """
    communicator = resolve(comm)
    key = _make_key(op, root, algorithm)
    return start(communicator, key, x, out, partial(prepare, communicator, op=op, root=root, algorithm=algorithm))


def reduce_init(
    x: ArrayT,
    op: OpLike = "sum",
    root: int = 0,
    *,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
) -> Plan[ArrayT | None]:
    """Create a plan for repeated calls of :func:`reduce` with the same arguments.

    Returns:
        A plan, of which each run reads the contents that `x` has then. While a run is pending, `x` must not be changed
        and `out` must not be used. The plan may return the same array from each run.

    Example:
        >>> plan = mpicoll.reduce_init(np.ones(2))
        >>> plan()  # on one rank
        array([1., 1.])
    """
    return Plan(prepare(resolve(comm), x, op, root, out, algorithm))


def _make_key(op: OpLike, root: Any, algorithm: str | None) -> tuple[Any, ...]:
    """Return the key of a call."""
    return ("reduce", op, root, algorithm) if type(root) is int and type(op) is str else ("reduce", UNCACHED)


@adds_rank_to_errors
def prepare(comm: CommunicatorCore, x: Any, op: OpLike, root: int, out: Any, algorithm: str | None) -> Operation:
    root = arguments.check_rank("reduce", "root", root, comm)
    arguments.check_only_at_root("reduce", out, root, comm)
    buffer, reduction = recognise_operand("reduce", x, op)
    output = resolve_output("reduce", out, buffer, buffer.array.shape) if comm.rank == root else None
    arrays = reduction_arrays("reduce", comm, buffer, reduction, output, root)
    query = make_query(comm, arrays, algorithm, nbytes=buffer.array.nbytes)
    return Operation(comm, query, algorithm, arrays, block=buffer, buffers=(buffer, output), output=output)
