"""alltoall: send a block from each rank to each rank."""

from __future__ import annotations

from typing import Any

from mpicoll.buffers.device import empty_beside
from mpicoll.buffers.recognise import recognise
from mpicoll.collectives.arguments import (
    Counts,
    block_shape,
    counts_of_whole,
    key_of,
    names_rank,
    problem,
    result,
    row_size,
    send_and_recv_counts,
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
from mpicoll.schedules import Schedule
from mpicoll.transport.base import Native


def alltoall(
    x: Any,
    *,
    counts: tuple[Counts, Counts] | None = None,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
    timeout: float | None = None,
) -> Any:
    """Divide every rank's array along axis 0 into blocks, and send the i-th to rank i.

    Every rank passes `x` of the same shape ``(rows, ...)`` and receives as many rows: block j of the result is from
    rank j. With ``counts=(send, recv)``, where each rank passes its own, ``send[i]`` rows are sent to rank i and
    ``recv[j]`` rows are received from rank j; the result then has ``sum(recv)`` rows. Any dtype of fixed size. Returns
    an array of `x`'s library and dtype: `out` if given. Raises DTypeError, ShapeError, AlgorithmError before any
    message is sent.

    Raises Timeout after `timeout` seconds (see :func:`allreduce`).
    """
    communicator = resolve(comm)
    if timeout is not None:
        return within(
            communicator,
            "alltoall",
            timeout,
            lambda: ialltoall(x, counts=counts, out=out, comm=comm, algorithm=algorithm),
        )
    what = ("alltoall", algorithm, key_of(counts))
    return repeated(communicator, what, x, out, lambda own, out: prepare(communicator, own, counts, out, algorithm))


def ialltoall(
    x: Any,
    *,
    counts: tuple[Counts, Counts] | None = None,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
) -> Request:
    """Start :func:`alltoall` in the background, with the same arguments. The request's value is the result."""
    return start(prepare(resolve(comm), x, counts, out, algorithm))


def alltoall_init(
    x: Any,
    *,
    counts: tuple[Counts, Counts] | None = None,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
) -> Plan:
    """Return :func:`alltoall` as a plan for repeated use, with the same arguments. Each run reads `x` again."""
    return Plan(prepare(resolve(comm), x, counts, out, algorithm))


@names_rank
def prepare(
    comm: Communicator, x: Any, counts: tuple[Counts, Counts] | None, out: Any, algorithm: str | None
) -> Operation:
    buffer = recognise("alltoall", x)
    shape = block_shape(buffer)
    if counts is None:
        send = recv = counts_of_whole("alltoall", shape[0], None, comm)
    else:
        send, recv = send_and_recv_counts("alltoall", shape[0], counts, comm)
    arrived = result("alltoall", out, buffer, (sum(recv), *shape[1:]))
    source, target = Source(buffer, arrived), Target(arrived)
    leave = extents(count * row_size(shape) for count in send)
    arrive = extents(count * row_size(shape) for count in recv)

    raw_source, raw_target = source.raw, target.raw

    def native(mpi: Native) -> None:
        source.load()
        mpi.alltoall(raw_source, raw_target)
        target.store()

    def regions(schedule: Schedule) -> list[Region]:
        laid = [Region(source.array, leave), Region(target.array, arrive)]
        if schedule.scratch:
            # Only algorithms for equal blocks use scratch memory.
            ends = extents([leave[1]] * schedule.scratch)
            laid.append(Region(empty_beside(source.array, ends[-1]), ends))
        return laid

    # With counts, a rank does not have the sizes of the others, so the selection must not depend on any size.
    uneven = (0, 1) if counts is not None else send
    return Operation(
        comm,
        problem(
            "alltoall",
            comm,
            algorithm,
            nbytes=source.array.nbytes if counts is None else None,
            count=source.array.nbytes,
            array=source.array,
            counts=uneven,
            refusal=None if counts is None else "a rank can't know whether MPI's counts hold the blocks of the others",
        ),
        algorithm,
        native=native,
        block=buffer,
        buffers=(buffer, arrived),
        counts=() if counts is None else send,
        arrivals=() if counts is None else recv,
        regions=regions,
        result=arrived.result,
        flat=lambda: Flat(
            raw_source,
            raw_target,
            tuple(count * row_size(shape) * source.array.itemsize for count in send),
            load=source.load,
            store=target.store,
        ),
        load=source.load,
        store=target.store,
        bare=source.own and target.own,
        direct=lambda mpi, source, target: mpi.alltoall(source, target),
    )
