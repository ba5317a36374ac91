"""allgather: gather the blocks of all ranks on every rank."""

from __future__ import annotations

from typing import Any

from mpicoll.buffers.recognise import recognise
from mpicoll.collectives.arguments import (
    Counts,
    block_shape,
    counts_of_parts,
    key_of,
    names_rank,
    native_counts,
    problem,
    result,
    row_size,
    within,
)
from mpicoll.collectives.memory import Source, Target
from mpicoll.engine.call_cache import repeated
from mpicoll.engine.core.communicator import Communicator
from mpicoll.engine.core.request import Request
from mpicoll.engine.executors.schedule import Region, extents
from mpicoll.engine.operation import Flat, Operation, start
from mpicoll.engine.plan import Plan
from mpicoll.engine.world import CommLike, resolve
from mpicoll.transport.base import Native


def allgather(
    x: Any,
    *,
    counts: Counts | None = None,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
    timeout: float | None = None,
) -> Any:
    """Concatenate the blocks of all ranks along axis 0, in rank order, and return the result on every rank.

    Every rank passes `x` of shape ``(rows, ...)``, alike in dtype and in all axes but the first; a 0-d array counts as
    one row. `counts`, the same on every rank, gives each rank's rows if they differ. Any dtype of fixed size.
    Returns an array of `x`'s library and dtype and of shape ``(sum of rows, ...)``: `out` if given. Raises DTypeError,
    ShapeError, AlgorithmError before any message is sent.

    Raises Timeout after `timeout` seconds (see :func:`allreduce`).
    """
    communicator = resolve(comm)
    if timeout is not None:
        return within(
            communicator,
            "allgather",
            timeout,
            lambda: iallgather(x, counts=counts, out=out, comm=comm, algorithm=algorithm),
        )
    what = ("allgather", algorithm, key_of(counts))
    return repeated(communicator, what, x, out, lambda own, out: prepare(communicator, own, counts, out, algorithm))


def iallgather(
    x: Any,
    *,
    counts: Counts | None = None,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
) -> Request:
    """Start :func:`allgather` in the background, with the same arguments. The request's value is the result."""
    return start(prepare(resolve(comm), x, counts, out, algorithm))


def allgather_init(
    x: Any,
    *,
    counts: Counts | None = None,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
) -> Plan:
    """Return :func:`allgather` as a plan for repeated use, with the same arguments. Each run reads `x` again."""
    return Plan(prepare(resolve(comm), x, counts, out, algorithm))


@names_rank
def prepare(comm: Communicator, x: Any, counts: Counts | None, out: Any, algorithm: str | None) -> Operation:
    buffer = recognise("allgather", x)
    shape = block_shape(buffer)
    rows = counts_of_parts("allgather", shape[0], counts, comm)
    whole = result("allgather", out, buffer, (sum(rows), *shape[1:]))
    source, target = Source(buffer, whole), Target(whole)
    offsets = extents(count * row_size(shape) for count in rows)
    row_bytes = row_size(shape) * target.array.itemsize
    sizes = native_counts(rows, row_bytes)
    raw_source, raw_target = source.raw, target.raw

    def load() -> None:
        source.load()
        target.array[offsets[comm.rank] : offsets[comm.rank + 1]] = source.array

    def native(mpi: Native) -> None:
        source.load()
        mpi.allgather(raw_source, raw_target, sizes)
        target.store()

    return Operation(
        comm,
        problem(
            "allgather",
            comm,
            algorithm,
            nbytes=target.array.nbytes,
            count=target.array.nbytes,
            array=target.array,
            counts=rows,
        ),
        algorithm,
        native=native,
        block=buffer,
        buffers=(buffer, whole),
        counts=() if counts is None else rows,
        regions=lambda schedule: [Region(target.array, offsets)],
        result=whole.result,
        flat=lambda: Flat(
            raw_source, raw_target, tuple(count * row_bytes for count in rows), load=source.load, store=target.store
        ),
        load=load,
        store=target.store,
        bare=source.own and target.own,
        direct=lambda mpi, source, target: mpi.allgather(source, target, sizes),
    )
