"""allreduce: reduce the arrays of all ranks on every rank."""

from __future__ import annotations

from typing import Any

from mpicoll.buffers.ops import OpLike
from mpicoll.collectives.arguments import names_rank, operand, problem, result, within
from mpicoll.collectives.memory import Work, flat_reduction, vector
from mpicoll.engine.call_cache import repeated
from mpicoll.engine.core.communicator import Communicator
from mpicoll.engine.core.request import Request
from mpicoll.engine.operation import Operation, run, start
from mpicoll.engine.plan import Plan
from mpicoll.engine.world import CommLike, resolve
from mpicoll.transport.base import Native


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

    Every rank passes `x` of the same shape and dtype, and the same `op`:

    * sum, prod, avg (the mean over ranks), premul_sum(factor): numbers, avg only floating ones; float16 and bfloat16
      are accumulated in float32 and rounded once;
    * min, max: real numbers and bool; band, bor, bxor: integers and bool; land, lor, lxor: bool, and integers, where
      the result is 0 or 1;
    * minloc, maxloc: `x` is a pair ``(values, indices)`` of equal shape, as is the result: the extreme values, and the
      lowest index that has each;
    * an :class:`~mpicoll.Op` or a bare associative function of two arrays, applied in the order of ranks.

    Returns an array of `x`'s library, shape and dtype: `out` if given (of that shape and dtype; ``out=x`` works in
    place), else a new one. `algorithm` forces one (see :func:`mpicoll.algorithms`).

    Raises DTypeError, ShapeError, AlgorithmError before any message is sent.

    Raises Timeout if the collective is not complete after `timeout` seconds (see :meth:`Request.wait
    <mpicoll.Request.wait>`). The collective then continues in the background, in queue order: `x` and `out` must not be
    used until the late ranks have entered it. `timeout` may differ between ranks. Without a `timeout` the job is
    aborted when the communicator's ``timeout`` expires.
    """
    communicator = resolve(comm)
    if timeout is not None:
        return within(
            communicator, "allreduce", timeout, lambda: iallreduce(x, op, out=out, comm=comm, algorithm=algorithm)
        )
    if type(op) is str:
        what = ("allreduce", op, algorithm)
        return repeated(communicator, what, x, out, lambda own, out: prepare(communicator, own, op, out, algorithm))
    return run(prepare(communicator, x, op, out, algorithm))


def iallreduce(
    x: Any,
    op: OpLike = "sum",
    *,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
) -> Request:
    """Start :func:`allreduce` in the background, with the same arguments. The request's value is the result."""
    return start(prepare(resolve(comm), x, op, out, algorithm))


def allreduce_init(
    x: Any,
    op: OpLike = "sum",
    *,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
) -> Plan:
    """Return :func:`allreduce` as a plan for repeated use, with the same arguments. Each run reads `x` again."""
    return Plan(prepare(resolve(comm), x, op, out, algorithm))


@names_rank
def prepare(comm: Communicator, x: Any, op: OpLike, out: Any, algorithm: str | None) -> Operation:
    buffer, reduction = operand("allreduce", x, op)
    target = result("allreduce", out, buffer, buffer.array.shape)
    work = Work(buffer, reduction, target, comm.size)

    array, name, direct = work.array, reduction.native or "", work.direct

    def native(mpi: Native) -> None:
        if direct is not None:
            mpi.allreduce(direct, array, name)
        else:
            mpi.allreduce(work.operand(), array, name)
            work.store()

    return Operation(
        comm,
        problem(
            "allreduce",
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
        flat=lambda: flat_reduction(buffer, reduction, target, (buffer.array.size,), work),
        combine=reduction.combine,
        reduction=reduction,
        work=work.array,
        load=work.load,
        store=work.store,
        bare=direct is not None and reduction.native is not None,
        direct=None
        if reduction.changes(buffer.array.dtype)
        else lambda mpi, source, target: mpi.allreduce(source, target, name),
    )
