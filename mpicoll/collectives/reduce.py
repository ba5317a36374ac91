"""reduce: reduce the arrays of all ranks on one rank."""

from __future__ import annotations

from typing import Any

from mpicoll.buffers.ops import OpLike
from mpicoll.collectives import arguments
from mpicoll.collectives.arguments import names_rank, operand, problem, within
from mpicoll.collectives.memory import Work, flat_reduction, vector
from mpicoll.engine.call_cache import repeated
from mpicoll.engine.core.communicator import Communicator
from mpicoll.engine.core.request import Request
from mpicoll.engine.operation import Operation, run, start
from mpicoll.engine.plan import Plan
from mpicoll.engine.world import CommLike, resolve
from mpicoll.transport.base import Native


def reduce(
    x: Any,
    op: OpLike = "sum",
    root: int = 0,
    *,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
    timeout: float | None = None,
) -> Any:
    """Reduce the arrays of all ranks elementwise, and return the result on rank `root`; other ranks return None.

    Every rank passes `x` of the same shape and dtype, the same `op` (see :func:`allreduce`) and the same `root`. `out`
    is for the root only. Raises DTypeError, ShapeError, RankError, AlgorithmError before any message is sent.

    Raises Timeout after `timeout` seconds (see :func:`allreduce`).
    """
    communicator = resolve(comm)
    if timeout is not None:
        return within(
            communicator, "reduce", timeout, lambda: ireduce(x, op, root, out=out, comm=comm, algorithm=algorithm)
        )
    if type(root) is int and type(op) is str:
        what = ("reduce", op, root, algorithm)
        return repeated(
            communicator, what, x, out, lambda own, out: prepare(communicator, own, op, root, out, algorithm)
        )
    return run(prepare(communicator, x, op, root, out, algorithm))


def ireduce(
    x: Any,
    op: OpLike = "sum",
    root: int = 0,
    *,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
) -> Request:
    """Start :func:`reduce` in the background, with the same arguments. The request's value is the result."""
    return start(prepare(resolve(comm), x, op, root, out, algorithm))


def reduce_init(
    x: Any,
    op: OpLike = "sum",
    root: int = 0,
    *,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
) -> Plan:
    """Return :func:`reduce` as a plan for repeated use, with the same arguments. Each run reads `x` again."""
    return Plan(prepare(resolve(comm), x, op, root, out, algorithm))


@names_rank
def prepare(comm: Communicator, x: Any, op: OpLike, root: int, out: Any, algorithm: str | None) -> Operation:
    root = arguments.rank("reduce", "root", root, comm)
    arguments.only_at_root("reduce", out, root, comm)
    buffer, reduction = operand("reduce", x, op)
    mine = comm.rank == root
    target = arguments.result("reduce", out, buffer, buffer.array.shape) if mine else None
    work = Work(buffer, reduction, target, comm.size)

    name = reduction.native or ""

    def native(mpi: Native) -> None:
        source = work.operand()
        mpi.reduce(source, work.array if mine else None, name, root)
        work.store()

    return Operation(
        comm,
        problem(
            "reduce",
            comm,
            algorithm,
            nbytes=buffer.array.nbytes,
            count=work.array.size,
            array=work.array,
            root=root,
            reduction=reduction,
        ),
        algorithm,
        native=native,
        block=buffer,
        buffers=(buffer, target),
        regions=lambda schedule: vector(schedule, work.array),
        result=lambda: None if target is None else target.result(),
        flat=lambda: flat_reduction(buffer, reduction, target, (buffer.array.size,), work),
        combine=reduction.combine,
        reduction=reduction,
        work=work.array,
        load=work.load,
        store=work.store,
        direct=None
        if reduction.changes(buffer.array.dtype)
        else lambda mpi, source, target: mpi.reduce(source, target, name, root),
    )
