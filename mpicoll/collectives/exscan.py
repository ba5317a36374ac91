"""exscan: reduce, on each rank, the arrays of the lower ranks."""

from __future__ import annotations

from typing import Any

from mpicoll.buffers import ops
from mpicoll.buffers.device import empty_beside
from mpicoll.buffers.dtypes import Array
from mpicoll.buffers.ops import OpLike
from mpicoll.collectives.arguments import names_rank, no_average, operand, problem, result, within
from mpicoll.collectives.memory import Work, flat_vectors, vector
from mpicoll.engine.call_cache import repeated
from mpicoll.engine.core.communicator import Communicator
from mpicoll.engine.core.request import Request
from mpicoll.engine.operation import Operation, run, start
from mpicoll.engine.plan import Plan
from mpicoll.engine.world import CommLike, resolve
from mpicoll.transport.base import Native


def exscan(
    x: Any,
    op: OpLike = "sum",
    *,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
    timeout: float | None = None,
) -> Any:
    """Compute the exclusive prefix reduction: ``x_0 op ... op x_(r-1)`` on rank r, elementwise and in this order.

    Rank 0 returns the neutral element of `op` (0 for sum, the largest value for min, ...); for operations without one
    (minloc, maxloc, functions) rank 0 returns None, and `out` is not changed. Every rank passes `x` of the same shape
    and dtype and the same `op` (see :func:`allreduce`; avg is not supported). Returns an array of `x`'s library, shape
    and dtype, `out` if given. Raises DTypeError, ShapeError, AlgorithmError before any message is sent.

    Raises Timeout after `timeout` seconds (see :func:`allreduce`).
    """
    communicator = resolve(comm)
    if timeout is not None:
        return within(communicator, "exscan", timeout, lambda: iexscan(x, op, out=out, comm=comm, algorithm=algorithm))
    if type(op) is str:
        what = ("exscan", op, algorithm)
        return repeated(communicator, what, x, out, lambda own, out: prepare(communicator, own, op, out, algorithm))
    return run(prepare(communicator, x, op, out, algorithm))


def iexscan(
    x: Any,
    op: OpLike = "sum",
    *,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
) -> Request:
    """Start :func:`exscan` in the background, with the same arguments. The request's value is the result."""
    return start(prepare(resolve(comm), x, op, out, algorithm))


def exscan_init(
    x: Any,
    op: OpLike = "sum",
    *,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
) -> Plan:
    """Return :func:`exscan` as a plan for repeated use, with the same arguments. Each run reads `x` again."""
    return Plan(prepare(resolve(comm), x, op, out, algorithm))


@names_rank
def prepare(comm: Communicator, x: Any, op: OpLike, out: Any, algorithm: str | None) -> Operation:
    no_average("exscan", op)
    buffer, reduction = operand("exscan", x, op)
    target = result("exscan", out, buffer, buffer.array.shape)
    mine = Work(buffer, reduction, None, comm.size, avoid=target)
    neutral = ops.identity(reduction, buffer.dtype)
    first = comm.rank == 0
    nothing = first and neutral is None
    # MPI writes to the caller's memory if that has the dtype of the reduction.
    fits = target.array.dtype == reduction.work and target.array.flags.c_contiguous and not nothing
    prefix = target.array.reshape(-1) if fits else empty_beside(mine.array, mine.array.size)

    name = reduction.native or ""

    def native(mpi: Native) -> None:
        source = mine.operand()
        mpi.exscan(source, prefix, name)
        store()

    def direct(mpi: Native, source: Array, target: Array) -> None:
        mpi.exscan(source, target, name)
        if first:
            target[...] = neutral

    def store() -> None:
        if first and neutral is not None:
            prefix[...] = neutral
        if not fits and not nothing:
            target.store(prefix)

    return Operation(
        comm,
        problem(
            "exscan", comm, algorithm, nbytes=buffer.array.nbytes, count=prefix.size, array=prefix, reduction=reduction
        ),
        algorithm,
        native=native,
        block=buffer,
        buffers=(buffer, target),
        regions=lambda schedule: vector(schedule, mine.array, prefix),
        result=lambda: None if nothing else target.result(),
        combine=reduction.combine,
        reduction=reduction,
        flat=lambda: flat_vectors(buffer, target),
        load=mine.load,
        store=store,
        direct=None if nothing or reduction.changes(buffer.array.dtype) else direct,
    )
