"""reduce_scatter: reduce the arrays of all ranks, and scatter the result."""

from __future__ import annotations

from typing import Any

from mpicoll.buffers.device import empty_beside
from mpicoll.buffers.dtypes import Array
from mpicoll.buffers.ops import OpLike
from mpicoll.collectives import arguments
from mpicoll.collectives.arguments import (
    Counts,
    counts_of_whole,
    key_of,
    names_rank,
    native_counts,
    operand,
    problem,
    result,
    row_size,
    within,
)
from mpicoll.collectives.memory import Target, Work, flat_reduction
from mpicoll.engine.call_cache import repeated
from mpicoll.engine.core.communicator import Communicator
from mpicoll.engine.core.request import Request
from mpicoll.engine.executors.schedule import Region, extents
from mpicoll.engine.operation import Flat, Operation, run, start
from mpicoll.engine.plan import Plan
from mpicoll.engine.world import CommLike, resolve
from mpicoll.errors import DTypeError
from mpicoll.transport.base import Native


def reduce_scatter(
    x: Any,
    op: OpLike = "sum",
    *,
    counts: Counts | None = None,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
    timeout: float | None = None,
) -> Any:
    """Reduce the arrays of all ranks elementwise, divide the result along axis 0 into blocks, and give rank i the i-th.

    Every rank passes `x` of the same shape ``(sum of rows, ...)`` and dtype and the same `op` (see :func:`allreduce`; a
    function must be elementwise). Blocks are equal unless `counts`, the same on every rank, gives each rank's rows.
    Returns this rank's block, an array of `x`'s library and dtype and of shape ``(rows, ...)``: `out` if given. Raises
    DTypeError, ShapeError, AlgorithmError before any message is sent.

    Raises Timeout after `timeout` seconds (see :func:`allreduce`).
    """
    communicator = resolve(comm)
    if timeout is not None:
        return within(
            communicator,
            "reduce_scatter",
            timeout,
            lambda: ireduce_scatter(x, op, counts=counts, out=out, comm=comm, algorithm=algorithm),
        )
    if type(op) is str:
        what = ("reduce_scatter", op, algorithm, key_of(counts))
        return repeated(
            communicator, what, x, out, lambda own, out: prepare(communicator, own, op, counts, out, algorithm)
        )
    return run(prepare(communicator, x, op, counts, out, algorithm))


def ireduce_scatter(
    x: Any,
    op: OpLike = "sum",
    *,
    counts: Counts | None = None,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
) -> Request:
    """Start :func:`reduce_scatter` in the background, with the same arguments. The request's value is the result."""
    return start(prepare(resolve(comm), x, op, counts, out, algorithm))


def reduce_scatter_init(
    x: Any,
    op: OpLike = "sum",
    *,
    counts: Counts | None = None,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
) -> Plan:
    """Return :func:`reduce_scatter` as a plan for repeated use, with the same arguments. Each run reads `x` again."""
    return Plan(prepare(resolve(comm), x, op, counts, out, algorithm))


@names_rank
def prepare(
    comm: Communicator, x: Any, op: OpLike, counts: Counts | None, out: Any, algorithm: str | None
) -> Operation:
    buffer, reduction = operand("reduce_scatter", x, op)
    if not reduction.elementwise:
        raise DTypeError(
            f"reduce_scatter: op {reduction.name} is not declared elementwise, so it can't be applied to blocks;"
            " pass mpicoll.Op(function, elementwise=True), or reduce, then scatter"
        )
    shape = arguments.block_shape(buffer)
    rows = counts_of_whole("reduce_scatter", shape[0], counts, comm)
    block = result("reduce_scatter", out, buffer, (rows[comm.rank], *shape[1:]))
    elements = [count * row_size(shape) for count in rows]
    sizes = native_counts(rows, row_size(shape))
    offsets = extents(elements)
    work, target = Work(buffer, reduction, None, comm.size, avoid=block), Target(block)
    # MPI writes the block to the output if that has the dtype of the reduction.
    part = target.array if block.array.dtype == reduction.work else empty_beside(work.array, elements[comm.rank])

    name = reduction.native or ""

    def native(mpi: Native) -> None:
        source = work.operand()
        mpi.reduce_scatter(source, part, sizes, name)
        store()

    def direct(mpi: Native, source: Array, target: Array) -> None:
        mpi.reduce_scatter(source, target, sizes, name)

    def scheduled_store() -> None:
        part[...] = work.array[offsets[comm.rank] : offsets[comm.rank + 1]]
        store()

    def store() -> None:
        work.finish(part)
        if part is target.array:
            target.store()
        else:
            block.store(part)

    def flat() -> Flat:
        made = flat_reduction(buffer, reduction, block, elements, work, part)
        if made.source is work.array:
            made.store = store
        return made

    return Operation(
        comm,
        problem(
            "reduce_scatter",
            comm,
            algorithm,
            nbytes=buffer.array.nbytes,
            count=work.array.size,
            array=work.array,
            reduction=reduction,
            counts=rows,
        ),
        algorithm,
        native=native,
        block=buffer,
        buffers=(buffer, block),
        counts=() if counts is None else rows,
        regions=lambda schedule: [Region(work.array, offsets)],
        result=block.result,
        flat=flat,
        combine=reduction.combine,
        reduction=reduction,
        work=work.array,
        load=work.load,
        store=scheduled_store,
        direct=None if reduction.changes(buffer.array.dtype) else direct,
    )
