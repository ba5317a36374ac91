"""scan: reduce, on each rank, the arrays of the lower ranks and its own."""

from __future__ import annotations

from typing import Any

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


def scan(
    x: Any,
    op: OpLike = "sum",
    *,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
    timeout: float | None = None,
) -> Any:
    """Compute the inclusive prefix reduction: ``x_0 op x_1 op ... op x_r`` on rank r, elementwise and in this order.

    Every rank passes `x` of the same shape and dtype and the same `op` (see :func:`allreduce`; avg is not supported).
    Returns an array of `x`'s library, shape and dtype, `out` if given. Raises DTypeError, ShapeError, AlgorithmError
    before any message is sent.

    Raises Timeout after `timeout` seconds (see :func:`allreduce`).
    """
    communicator = resolve(comm)
    if timeout is not None:
        return within(communicator, "scan", timeout, lambda: iscan(x, op, out=out, comm=comm, algorithm=algorithm))
    if type(op) is str:
        what = ("scan", op, algorithm)
        return repeated(communicator, what, x, out, lambda own, out: prepare(communicator, own, op, out, algorithm))
    return run(prepare(communicator, x, op, out, algorithm))


def iscan(
    x: Any,
    op: OpLike = "sum",
    *,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
) -> Request:
    """Start :func:`scan` in the background, with the same arguments. The request's value is the result."""
    return start(prepare(resolve(comm), x, op, out, algorithm))


def scan_init(
    x: Any,
    op: OpLike = "sum",
    *,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
) -> Plan:
    """Return :func:`scan` as a plan for repeated use, with the same arguments. Each run reads `x` again."""
    return Plan(prepare(resolve(comm), x, op, out, algorithm))


@names_rank
def prepare(comm: Communicator, x: Any, op: OpLike, out: Any, algorithm: str | None) -> Operation:
    no_average("scan", op)
    buffer, reduction = operand("scan", x, op)
    target = result("scan", out, buffer, buffer.array.shape)
    work = Work(buffer, reduction, target, comm.size)

    name = reduction.native or ""

    def native(mpi: Native) -> None:
        source = work.operand()
        mpi.scan(source, work.array, name)
        work.store()

    return Operation(
        comm,
        problem(
            "scan",
            comm,
            algorithm,
            nbytes=buffer.array.nbytes,
            count=work.array.size,
            array=work.array,
            reduction=reduction,
        ),
        algorithm,
        native=native,
        block=buffer,
        buffers=(buffer, target),
        regions=lambda schedule: vector(schedule, work.array),
        result=target.result,
        combine=reduction.combine,
        reduction=reduction,
        flat=lambda: flat_vectors(buffer, target),
        load=work.load,
        store=work.store,
        direct=None
        if reduction.changes(buffer.array.dtype)
        else lambda mpi, source, target: mpi.scan(source, target, name),
    )
