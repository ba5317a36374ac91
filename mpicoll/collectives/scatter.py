"""scatter: send each rank its block of one rank's array."""

from __future__ import annotations

from typing import Any

from mpicoll.buffers.recognise import recognise
from mpicoll.collectives import arguments
from mpicoll.collectives.arguments import (
    Counts,
    block_shape,
    counts_of_parts,
    counts_of_whole,
    key_of,
    names_rank,
    native_counts,
    problem,
    result,
    row_size,
    template,
    within,
)
from mpicoll.collectives.memory import Blocks, Source, Target
from mpicoll.engine.call_cache import repeated
from mpicoll.engine.core.communicator import Communicator
from mpicoll.engine.core.request import Request
from mpicoll.engine.operation import Flat, Operation, run, start
from mpicoll.engine.plan import Plan
from mpicoll.engine.world import CommLike, resolve
from mpicoll.transport.base import Native


def scatter(
    x: Any,
    root: int = 0,
    *,
    counts: Counts | None = None,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
    timeout: float | None = None,
) -> Any:
    """Divide rank `root`'s array along axis 0 into blocks, and give rank i the i-th.

    The root passes `x` of shape ``(sum of rows, ...)``. Every other rank passes an array shaped and typed like its
    block, ``(rows, ...)``, whose contents don't matter, or None if `out` is given. Blocks are equal unless `counts`,
    the same on every rank, gives each rank's rows. Any dtype of fixed size. Returns this rank's block, an array like
    `x`: `out` if given. Raises DTypeError, ShapeError, RankError, AlgorithmError before any message is sent.

    Raises Timeout after `timeout` seconds (see :func:`allreduce`).
    """
    communicator = resolve(comm)
    if timeout is not None:
        return within(
            communicator,
            "scatter",
            timeout,
            lambda: iscatter(x, root, counts=counts, out=out, comm=comm, algorithm=algorithm),
        )
    if type(root) is int:
        what = ("scatter", root, algorithm, key_of(counts))
        return repeated(
            communicator, what, x, out, lambda own, out: prepare(communicator, own, root, counts, out, algorithm)
        )
    return run(prepare(communicator, x, root, counts, out, algorithm))


def iscatter(
    x: Any,
    root: int = 0,
    *,
    counts: Counts | None = None,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
) -> Request:
    """Start :func:`scatter` in the background, with the same arguments. The request's value is the result."""
    return start(prepare(resolve(comm), x, root, counts, out, algorithm))


def scatter_init(
    x: Any,
    root: int = 0,
    *,
    counts: Counts | None = None,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
) -> Plan:
    """Return :func:`scatter` as a plan for repeated use, with the same arguments. Each run reads `x` again."""
    return Plan(prepare(resolve(comm), x, root, counts, out, algorithm))


@names_rank
def prepare(comm: Communicator, x: Any, root: int, counts: Counts | None, out: Any, algorithm: str | None) -> Operation:
    root = arguments.rank("scatter", "root", root, comm)
    mine = comm.rank == root
    buffer = recognise("scatter", x) if mine else template("scatter", x, out)
    shape = block_shape(buffer)
    divide = counts_of_whole if mine else counts_of_parts
    rows = divide("scatter", shape[0], counts, comm)
    elements = [count * row_size(shape) for count in rows]
    sizes = native_counts(rows, row_size(shape) * buffer.array.itemsize)
    block = result("scatter", out, buffer, (rows[comm.rank], *shape[1:]))
    target = Target(block)
    source = Source(buffer, block) if mine else None
    blocks = Blocks(elements, comm.rank, target.array, None if source is None else source.array)

    raw_source, raw_target = None if source is None else source.raw, target.raw

    def load() -> None:
        if source is not None:
            source.load()

    def native(mpi: Native) -> None:
        load()
        mpi.scatter(raw_source, raw_target, sizes, root)
        target.store()

    def store() -> None:
        blocks.take(target.array)
        target.store()

    nbytes_of = tuple(count * buffer.array.itemsize for count in elements)
    nbytes = sum(nbytes_of)
    return Operation(
        comm,
        problem("scatter", comm, algorithm, nbytes=nbytes, count=nbytes, array=target.array, root=root, counts=rows),
        algorithm,
        native=native,
        block=block,
        buffers=(buffer, block),
        counts=() if counts is None else rows,
        regions=blocks.regions,
        result=block.result,
        flat=lambda: Flat(raw_source, raw_target, nbytes_of, load=load, store=target.store),
        load=load,
        store=store,
        direct=lambda mpi, source, target: mpi.scatter(source, target, sizes, root),
    )
