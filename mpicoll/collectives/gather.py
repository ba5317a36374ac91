"""gather: gather the blocks of all ranks on one rank."""

from __future__ import annotations

from typing import Any

from mpicoll.buffers.recognise import recognise
from mpicoll.collectives import arguments
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
from mpicoll.collectives.memory import Blocks, Source, Target
from mpicoll.engine.call_cache import repeated
from mpicoll.engine.core.communicator import Communicator
from mpicoll.engine.core.request import Request
from mpicoll.engine.operation import Flat, Operation, run, start
from mpicoll.engine.plan import Plan
from mpicoll.engine.world import CommLike, resolve
from mpicoll.transport.base import Native


def gather(
    x: Any,
    root: int = 0,
    *,
    counts: Counts | None = None,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
    timeout: float | None = None,
) -> Any:
    """Concatenate the blocks of all ranks along axis 0, in rank order, on rank `root`; other ranks return None.

    Every rank passes `x` of shape ``(rows, ...)``, alike in dtype and in all axes but the first; a 0-d array counts as
    one row. `counts`, the same on every rank, gives each rank's rows if they differ. Any dtype of fixed size. The root
    returns an array of `x`'s library and dtype and of shape ``(sum of rows, ...)``: `out` if given, which is for the
    root only. Raises DTypeError, ShapeError, RankError, AlgorithmError before any message is sent.

    Raises Timeout after `timeout` seconds (see :func:`allreduce`).
    """
    communicator = resolve(comm)
    if timeout is not None:
        return within(
            communicator,
            "gather",
            timeout,
            lambda: igather(x, root, counts=counts, out=out, comm=comm, algorithm=algorithm),
        )
    if type(root) is int:
        what = ("gather", root, algorithm, key_of(counts))
        return repeated(
            communicator, what, x, out, lambda own, out: prepare(communicator, own, root, counts, out, algorithm)
        )
    return run(prepare(communicator, x, root, counts, out, algorithm))


def igather(
    x: Any,
    root: int = 0,
    *,
    counts: Counts | None = None,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
) -> Request:
    """Start :func:`gather` in the background, with the same arguments. The request's value is the result."""
    return start(prepare(resolve(comm), x, root, counts, out, algorithm))


def gather_init(
    x: Any,
    root: int = 0,
    *,
    counts: Counts | None = None,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
) -> Plan:
    """Return :func:`gather` as a plan for repeated use, with the same arguments. Each run reads `x` again."""
    return Plan(prepare(resolve(comm), x, root, counts, out, algorithm))


@names_rank
def prepare(comm: Communicator, x: Any, root: int, counts: Counts | None, out: Any, algorithm: str | None) -> Operation:
    root = arguments.rank("gather", "root", root, comm)
    arguments.only_at_root("gather", out, root, comm)
    buffer = recognise("gather", x)
    shape = block_shape(buffer)
    rows = counts_of_parts("gather", shape[0], counts, comm)
    elements = [count * row_size(shape) for count in rows]
    sizes = native_counts(rows, row_size(shape) * buffer.array.itemsize)
    whole = result("gather", out, buffer, (sum(rows), *shape[1:])) if comm.rank == root else None
    target = None if whole is None else Target(whole)
    source = Source(buffer, whole)
    blocks = Blocks(elements, comm.rank, source.array, None if target is None else target.array)

    raw_source, raw_target = source.raw, None if target is None else target.raw

    def load() -> None:
        source.load()
        blocks.place(source.array)

    def native(mpi: Native) -> None:
        source.load()
        mpi.gather(raw_source, raw_target, sizes, root)
        store()

    def store() -> None:
        if target is not None:
            target.store()

    nbytes_of = tuple(count * buffer.array.itemsize for count in elements)
    nbytes = sum(nbytes_of)
    return Operation(
        comm,
        problem("gather", comm, algorithm, nbytes=nbytes, count=nbytes, array=source.array, root=root, counts=rows),
        algorithm,
        native=native,
        block=buffer,
        buffers=(buffer, whole),
        counts=() if counts is None else rows,
        regions=blocks.regions,
        result=lambda: None if whole is None else whole.result(),
        flat=lambda: Flat(raw_source, raw_target, nbytes_of, load=source.load, store=store),
        load=load,
        store=store,
        direct=lambda mpi, source, target: mpi.gather(source, target, sizes, root),
    )
