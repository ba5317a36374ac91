"""allreduce: reduce the arrays of all ranks on every rank."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from mpicoll.buffers.ops import OpLike
from mpicoll.collectives.arguments import ArrayT, adds_rank_to_errors, make_query, recognise_operand, resolve_output
from mpicoll.collectives.call import UNCACHED, begins, call, repeats, start
from mpicoll.collectives.memory import reduction_arrays
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.core.operation import Operation
from mpicoll.engine.core.request import Request
from mpicoll.engine.plan import Plan
from mpicoll.engine.world import CommLike, resolve

if TYPE_CHECKING:
    from mpicoll.engine.core.compression_memory import CompressionMemory


@repeats("allreduce", "op", "algorithm", "compression")
def allreduce(
    x: ArrayT,
    op: OpLike = "sum",
    *,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
    compression: str | None = None,
    timeout: float | None = None,
) -> ArrayT:
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
        compression: ``"bf16"`` or ``"int8"``, the same on every rank, to compress messages between nodes, of float32
            arrays on the host with op sum or avg; None: no compression. Sums are computed in float32. Ranks of one
            node compress nothing. With x the sum of a node, the error of each element is at most

            * bf16: 2^-7 times the sum of abs(x) over the nodes;
            * int8: 1/127 times the sum over the nodes of the largest abs(x) among the 256 elements, in the flattened
              array, that have the same ``index // 256``; NaN and infinity make all of these NaN,

            plus the rounding of sums in float32; for avg, divided by the number of ranks. A plan corrects such errors
            in its later runs (see :func:`allreduce_init`).
        timeout: seconds to wait. It may differ between ranks. With None the job is aborted when the communicator's
            ``timeout`` expires.

    Returns:
        An array of `x`'s library, shape and dtype; `out` if given.

    Raises:
        DTypeError, ShapeError, AlgorithmError, DeviceError, ArgumentError: an argument is invalid; no message has been
            sent.
        Timeout: the collective is not complete after `timeout` seconds (see :meth:`Request.wait
            <mpicoll.Request.wait>`). It continues in the background, in queue order: `x` and `out` must not be used
            until the late ranks have entered it.

    Example:
        >>> mpicoll.allreduce(np.array([1.0, 2.0]))  # on one rank
        array([1., 2.])
    """
    communicator = resolve(comm)
    key = _make_key(communicator, op, algorithm, compression)
    result: ArrayT = call(
        communicator,
        key,
        x,
        out,
        timeout,
        partial(prepare, communicator, op=op, algorithm=algorithm, compression=compression),
    )
    return result


@begins("allreduce", "op", "algorithm", "compression")
def iallreduce(
    x: ArrayT,
    op: OpLike = "sum",
    *,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
    compression: str | None = None,
) -> Request[ArrayT]:
    """Start :func:`allreduce` in the background, with the same arguments.

    Returns:
        A request whose value is the result. Until it has completed, `x` must not be changed and `out` must not be used.

    Example:
        >>> mpicoll.iallreduce(np.ones(2)).wait()  # on one rank
        array([1., 1.])
    """
    communicator = resolve(comm)
    key = _make_key(communicator, op, algorithm, compression)
    return start(
        communicator, key, x, out, partial(prepare, communicator, op=op, algorithm=algorithm, compression=compression)
    )


def allreduce_init(
    x: ArrayT,
    op: OpLike = "sum",
    *,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
    compression: str | None = None,
) -> Plan[ArrayT]:
    """Create a plan for repeated calls of :func:`allreduce` with the same arguments.

    With `compression`, the plan keeps what the messages of a run leave out, and adds it in the next one (error
    feedback), so that the mean of its results converges to the exact one. That takes memory on each rank: 4 bytes for
    each element divided by the number of ranks of a node, and as many again divided by the number of nodes. Elements
    that arrive as NaN or infinity leave out nothing.

    Returns:
        A plan, of which each run reads the contents that `x` has then. While a run is pending, `x` must not be changed
        and `out` must not be used. The plan may return the same array from each run.

    Example:
        >>> plan = mpicoll.allreduce_init(np.ones(2))
        >>> plan()  # on one rank
        array([1., 1.])
    """
    return Plan(prepare(resolve(comm), x, op, out, algorithm, compression, feedback=True))


def _make_key(comm: CommunicatorCore, op: OpLike, algorithm: str | None, compression: str | None) -> tuple[Any, ...]:
    """Return the key of a call."""
    # What messages leave out may not be kept from one call to the next.
    cached = type(op) is str and (compression is None or comm.num_nodes == 1)
    return ("allreduce", op, algorithm, compression) if cached else ("allreduce", UNCACHED)


@adds_rank_to_errors
def prepare(
    comm: CommunicatorCore,
    x: Any,
    op: OpLike,
    out: Any,
    algorithm: str | None,
    compression: str | CompressionMemory | None = None,
    *,
    feedback: bool = False,
) -> Operation:
    """Return the operation. With `feedback`, it keeps what its messages leave out for its next run; a
    CompressionMemory, for the operations that share it."""
    memory = None
    if compression is not None:
        # Not at module level: most programs compress nothing.
        from mpicoll.collectives.compression import check_compressible, make_compression

        memory = make_compression("allreduce", compression, op, algorithm, feedback=feedback)
    buffer, reduction = recognise_operand("allreduce", x, op)
    if memory is not None:
        check_compressible("allreduce", memory.name, buffer)
        if comm.num_nodes > 1:
            reduction = reduction._replace(finish=None)  # parts of sums are divided before they are distributed
    output = resolve_output("allreduce", out, buffer, buffer.array.shape)
    arrays = reduction_arrays("allreduce", comm, buffer, reduction, output)
    query = make_query(comm, arrays, algorithm, nbytes=buffer.array.nbytes)
    return Operation(
        comm, query, algorithm, arrays, block=buffer, buffers=(buffer, output), output=output, compression=memory
    )
