"""bcast: send one rank's array to all ranks."""

from __future__ import annotations

from typing import Any

from mpicoll.buffers.dtypes import Array
from mpicoll.collectives import arguments
from mpicoll.collectives.arguments import names_rank, problem, result, template, within
from mpicoll.collectives.memory import Source, Target, vector
from mpicoll.engine.call_cache import repeated
from mpicoll.engine.core.communicator import Communicator
from mpicoll.engine.core.request import Request
from mpicoll.engine.operation import Flat, Operation, run, start
from mpicoll.engine.plan import Plan
from mpicoll.engine.world import CommLike, resolve
from mpicoll.transport.base import Native


def bcast(
    x: Any,
    root: int = 0,
    *,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
    timeout: float | None = None,
) -> Any:
    """Send rank `root`'s array to all ranks.

    Every rank passes `x` of the same shape and dtype; its contents matter on the root only, and elsewhere it may be
    None if `out` is given. Any dtype of fixed size. Returns an array like `x`, on the root too: `out` if given
    (``out=x`` fills `x` itself). Raises DTypeError, ShapeError, RankError, AlgorithmError before any message is sent.

    Raises Timeout after `timeout` seconds (see :func:`allreduce`).
    """
    communicator = resolve(comm)
    if timeout is not None:
        return within(communicator, "bcast", timeout, lambda: ibcast(x, root, out=out, comm=comm, algorithm=algorithm))
    if type(root) is int:
        what = ("bcast", root, algorithm)
        return repeated(communicator, what, x, out, lambda own, out: prepare(communicator, own, root, out, algorithm))
    return run(prepare(communicator, x, root, out, algorithm))


def ibcast(
    x: Any,
    root: int = 0,
    *,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
) -> Request:
    """Start :func:`bcast` in the background, with the same arguments. The request's value is the result."""
    return start(prepare(resolve(comm), x, root, out, algorithm))


def bcast_init(
    x: Any,
    root: int = 0,
    *,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
) -> Plan:
    """Return :func:`bcast` as a plan for repeated use, with the same arguments. Each run reads `x` again."""
    return Plan(prepare(resolve(comm), x, root, out, algorithm))


@names_rank
def prepare(comm: Communicator, x: Any, root: int, out: Any, algorithm: str | None) -> Operation:
    root = arguments.rank("bcast", "root", root, comm)
    buffer = template("bcast", x, out)
    filled = result("bcast", out, buffer, buffer.array.shape)
    target = Target(filled)
    raw = target.raw
    in_place = target.own and filled.same_memory(buffer)

    def load() -> None:
        if comm.rank == root and not in_place:
            buffer.load(target.array)

    def native(mpi: Native) -> None:
        load()
        mpi.bcast(raw, root)
        target.store()

    def direct(mpi: Native, source: Array | None, into: Array) -> None:
        if comm.rank != root or source is None or source is into:
            mpi.bcast(into, root)
            return
        # In this order: the caches of the other ranks do not hold the memory that is written then.
        mpi.bcast(source, root)
        into[...] = source

    def flat() -> Flat:
        count = (raw.size,)
        if comm.rank != root:
            return Flat(None, raw, count, store=target.store)
        source = Source(buffer, None if in_place else filled)
        return Flat(source.raw, raw, count, load=source.load, store=target.store)

    return Operation(
        comm,
        problem(
            "bcast",
            comm,
            algorithm,
            nbytes=target.array.nbytes,
            count=target.array.nbytes,
            array=target.array,
            root=root,
        ),
        algorithm,
        native=native,
        block=filled,
        buffers=(buffer, filled),
        regions=lambda schedule: vector(schedule, target.array),
        result=filled.result,
        flat=flat,
        load=load,
        store=target.store,
        bare=in_place,
        direct=direct,
    )
