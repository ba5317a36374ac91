"""Argument checks that several operations share. All of them run before any message is sent."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from math import prod
from operator import index
from typing import Any, ParamSpec, TypeAlias, TypeVar

import numpy as np

from mpicoll.buffers import ops
from mpicoll.buffers.buffer import Buffer
from mpicoll.buffers.device import device_of
from mpicoll.buffers.dtypes import Array
from mpicoll.buffers.ops import OpLike, Reduction
from mpicoll.buffers.pair import PairLibrary, output_pair, recognise_pair
from mpicoll.buffers.recognise import output, recognise
from mpicoll.engine.core.arrays import CollectiveArrays
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.core.proc_null import PROC_NULL
from mpicoll.engine.core.request import Request, seconds
from mpicoll.engine.dispatch import get_device_capabilities
from mpicoll.engine.selection.query import SelectionQuery
from mpicoll.engine.selection.selector import choose
from mpicoll.errors import ArgumentError, DTypeError, RankError, ShapeError

P = ParamSpec("P")
R = TypeVar("R")

ArrayT = TypeVar("ArrayT")
"""The type of an array or a number, which the result of a reduction has too; of an array, that of most others."""

Scalar: TypeAlias = complex | np.generic
"""For type checkers, what counts as an array without axes, whose blocks are arrays of another type."""

Counts = Sequence[int]


def adds_rank_to_errors(prepare: Callable[P, R]) -> Callable[P, R]:
    """Add this rank to the argument errors of `prepare`, whose first argument is the communicator."""

    @wraps(prepare)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return prepare(*args, **kwargs)
        except ArgumentError as error:
            comm: Any = args[0]
            location = f"(rank {comm.rank} of {comm.size})"
            if not str(error).endswith(location):
                error.args = (f"{error} {location}",)
            raise

    return call


def recognise_operand(operation: str, x: Any, op: OpLike) -> tuple[Buffer, Reduction]:
    """Return the buffer of `x`, and the reduction `op` for it. Raises DTypeError if `op` does not support its dtype."""
    if op in ("minloc", "maxloc"):
        pair = recognise_pair(operation, x)
        library = pair.library
        assert isinstance(library, PairLibrary)
        return pair, ops.location(operation, str(op), library.values.dtype, library.indices.dtype)
    buffer = recognise(operation, x)
    return buffer, ops.reduction(operation, op, buffer.dtype, buffer.library.wrap, buffer.array.shape)


def resolve_output(operation: str, out: Any, like: Buffer, shape: tuple[int, ...]) -> Buffer:
    """Return the buffer of the result: the caller's `out` if that is not None, else a new array like `like`."""
    if out is None:
        return like.library.empty(like, shape)
    make = output_pair if isinstance(like.library, PairLibrary) else output
    return make(operation, out, like, shape)


@adds_rank_to_errors
def call_with_timeout(comm: CommunicatorCore, operation: str, timeout: Any, start: Callable[[], Request]) -> Any:
    """Return the value of the request of `start`, waiting at most `timeout` seconds.

    Raises ArgumentError before the request is started if `timeout` is invalid, and Timeout.
    """
    bound = seconds(operation, timeout)
    return start().wait(bound)


@adds_rank_to_errors
def check_timeout(comm: CommunicatorCore, operation: str, timeout: Any) -> float:
    """Return the `timeout` of `operation`. Raises ArgumentError if it is not a positive number."""
    return seconds(operation, timeout)


def check_rank(operation: str, name: str, value: Any, comm: CommunicatorCore) -> int:
    """Return `value` as a rank of `comm`. Raises RankError, with the argument's `name`, if it is out of range."""
    number = _integer(value)
    if number is None or not 0 <= number < comm.size:
        raise RankError(f"{operation}: {name} must be a rank in [0, {comm.size}), got {value!r}")
    return number


def check_peer(operation: str, name: str, value: Any, comm: CommunicatorCore) -> int:
    """Return `value` as a rank of `comm`, or PROC_NULL if it is mpicoll's or mpi4py's PROC_NULL.

    Raises RankError, with the argument's `name`, for all other values.
    """
    number = _integer(value)
    if number is not None and 0 <= number < comm.size:
        return number
    # The value of mpi4py's PROC_NULL depends on the MPI library. A program that uses it has imported mpi4py.
    mpi = sys.modules.get("mpi4py.MPI")
    if number is not None and (number == PROC_NULL or (mpi is not None and number == mpi.PROC_NULL)):
        return PROC_NULL
    remedy = f"; to {'send' if name in ('dest', 'dst') else 'receive'} nothing, pass mpicoll.PROC_NULL"
    if name == "source":
        remedy = f"; to receive from any rank, pass None{remedy}"
    raise RankError(f"{operation}: {name} must be a rank in [0, {comm.size}), got {value!r}{remedy}")


def check_tag(operation: str, value: Any, comm: CommunicatorCore) -> int:
    """Return `value` as a tag. Raises RankError if it is out of range."""
    number = _integer(value)
    if number is None or not 0 <= number <= comm.transport.max_tag:
        raise RankError(f"{operation}: tag must be in [0, {comm.transport.max_tag}], got {value!r}")
    return number


def check_nbytes(operation: str, value: Any) -> int:
    """Return `value` as a number of bytes. Raises ArgumentError if it is none."""
    number = _integer(value)
    if number is None or number < 0:
        shown = f"an object of type {type(value).__name__}" if number is None else number
        raise ArgumentError(f"{operation}: nbytes must be a number of bytes from 0 on, such as x.nbytes, got {shown}")
    return number


def _integer(value: Any) -> int | None:
    try:
        return index(value)
    except TypeError:
        return None


def check_only_at_root(operation: str, out: Any, root: int, comm: CommunicatorCore) -> None:
    """Raise ShapeError if a rank that gets no result passes `out`."""
    if out is not None and comm.rank != root:
        raise ShapeError(
            f"{operation}: out is given, but only the root, rank {root}, gets a result; pass out there only"
        )


def reject_average(operation: str, op: OpLike) -> None:
    """Raise DTypeError for avg, whose divisor would differ from rank to rank."""
    if op == "avg":
        raise DTypeError(f"{operation}: op 'avg' has no meaning here; take sum and divide by the number of ranks")


def recognise_prototype(operation: str, x: Any, out: Any, argument: str = "x") -> Buffer:
    """Return the buffer with the shape and dtype of the message: that of `x`, or of `out` if `x` is None.

    Raises DTypeError if both are None.
    """
    if x is None and out is None:
        raise DTypeError(
            f"{operation}: pass an array of the shape and dtype of the message to receive, as {argument} (its contents"
            " don't matter) or as out="
        )
    return recognise(operation, out if x is None else x, "out" if x is None else argument)


def get_block_shape(buffer: Buffer) -> tuple[int, ...]:
    """Return the shape of the block; a 0-d array counts as one row."""
    return buffer.array.shape or (1,)


def check_gather_counts(operation: str, rows: int, counts: Counts | None, comm: CommunicatorCore) -> tuple[int, ...]:
    """Return the rows of every rank's block, given this rank's `rows`. Raises ShapeError if `counts` differs."""
    if counts is None:
        return (rows,) * comm.size
    by_rank = _check_counts(operation, counts, comm)
    if by_rank[comm.rank] != rows:
        raise ShapeError(f"{operation}: counts={list(by_rank)} says {by_rank[comm.rank]} rows, but x has {rows}")
    return by_rank


def check_scatter_counts(
    operation: str, rows: int, counts: Counts | None, comm: CommunicatorCore, argument: str = "x"
) -> tuple[int, ...]:
    """Return the rows of every rank's block, for an array of `rows`. Raises ShapeError if it can't be divided."""
    if counts is None:
        if rows % comm.size:
            raise ShapeError(
                f"{operation}: the {rows} rows of {argument} can't be divided evenly among {comm.size} ranks;"
                " pass counts="
            )
        return (rows // comm.size,) * comm.size
    by_rank = _check_counts(operation, counts, comm)
    if sum(by_rank) != rows:
        raise ShapeError(
            f"{operation}: counts={list(by_rank)} add up to {sum(by_rank)}, but {argument} has {rows} rows"
        )
    return by_rank


def make_counts_key(counts: Any) -> Any:
    """Return `counts`, or a pair of counts, as part of a cache key. For invalid counts the result is not hashable."""
    if counts is None:
        return None
    try:
        return tuple(map(index, counts)) if hasattr(counts, "__len__") else [counts]
    except TypeError:
        return (
            tuple(map(make_counts_key, counts)) if isinstance(counts, tuple | list) and len(counts) == 2 else [counts]
        )


def check_alltoall_counts(
    operation: str, rows: int, counts: tuple[Counts, Counts], comm: CommunicatorCore
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the rows sent to and received from every rank. Raises ShapeError if `counts` does not fit `rows`."""
    try:
        send, recv = counts
    except (TypeError, ValueError):
        raise ShapeError(
            f"{operation}: counts must be a pair (send, recv) of {comm.size} numbers of rows each, got {counts!r}"
        ) from None
    sent, received = _check_counts(operation, send, comm), _check_counts(operation, recv, comm)
    if sum(sent) != rows:
        raise ShapeError(f"{operation}: send counts {list(sent)} add up to {sum(sent)}, but x has {rows} rows")
    if sent[comm.rank] != received[comm.rank]:
        raise ShapeError(
            f"{operation}: this rank sends itself {sent[comm.rank]} rows but expects {received[comm.rank]}"
        )
    return sent, received


def _check_counts(operation: str, counts: Counts, comm: CommunicatorCore) -> tuple[int, ...]:
    try:
        rows = tuple(index(count) for count in counts)
    except TypeError:
        rows = ()
    if len(rows) != comm.size or min(rows) < 0:
        raise ShapeError(
            f"{operation}: counts must be {comm.size} numbers of rows >= 0, one for each rank, got {counts!r}"
        )
    return rows


def make_query(
    comm: CommunicatorCore,
    arrays: CollectiveArrays,
    algorithm: str | None,
    *,
    nbytes: int | None,
    uneven: bool | None = None,
    refusal: str | None = None,
) -> SelectionQuery:
    """Return the query for the selection of an algorithm for `arrays`; see :func:`make_selection_query`.

    `uneven` states whether the sizes of blocks may differ, if that does not follow from the counts.
    """
    return make_selection_query(
        arrays.collective,
        comm,
        algorithm,
        nbytes=nbytes,
        count=sum(arrays.counts),
        array=arrays.source if arrays.target is None else arrays.target,
        root=arrays.root,
        reduction=arrays.reduction,
        uneven=len(set(arrays.counts)) > 1 if uneven is None else uneven,
        refusal=refusal,
    )


def make_selection_query(
    collective: str,
    comm: CommunicatorCore,
    algorithm: str | None,
    *,
    nbytes: int | None,
    count: int,
    array: Array | None = None,
    root: int = 0,
    reduction: Reduction | None = None,
    uneven: bool = False,
    refusal: str | None = None,
) -> SelectionQuery:
    """Return the query for the selection of an algorithm.

    `count` is the largest number of elements that MPI would have to count; with a `reduction` it is the number of
    elements in `nbytes`. `array` is on the device of the data. `refusal` is a further reason why MPI can't be used.

    Raises AlgorithmError if `algorithm` does not exist or does not support the call.
    """
    native = refusal
    if comm.transport.native is None:
        native = "this communicator does not use an MPI library"
    elif count > comm.transport.native.max_count:
        native = f"{count} elements are more than MPI's counts hold"
    elif reduction is not None and reduction.native is None:
        native = f"op {reduction.name}: MPI has no such reduction"
    elif refusal is None and reduction is not None:
        native = comm.transport.find_native_defect(collective, reduction.native or "", reduction.work)
    elif refusal is None:
        native = comm.transport.find_native_defect(collective, uneven=uneven)
    device = device_of(array)
    query = SelectionQuery(
        collective,
        nbytes,
        comm.context,
        "moved" if reduction is None else _get_dtype_class(reduction, nbytes, count),
        root,
        commutative=reduction is None or reduction.commutative,
        elementwise=reduction is None or reduction.elementwise,
        has_kernel=reduction is None or reduction.has_kernel,
        uneven=uneven,
        native=native,
        no_shm_reason=comm.no_shm_reason,
        no_cma_reason=comm.no_cma_reason,
        shm_failed_reason=comm.shm_failed_reason,
        allocated=comm.has_user_segments and device is None,
        device=None if device is None else get_device_capabilities(comm, device, collective, reduction),
    )
    if algorithm is not None:
        choose(query, algorithm)  # raises now, together with the checks of the other arguments
    return query


def _get_dtype_class(reduction: Reduction, nbytes: int | None, count: int) -> str:
    """Return the class of dtypes for which the reduction is tuned."""
    if nbytes is not None and nbytes < count * reduction.work.itemsize:
        return "half"  # it is reduced in a wider dtype
    return {"f": "float", "c": "complex", "i": "integer", "u": "integer", "b": "integer"}.get(
        reduction.work.kind, "other"
    )


def get_row_size(shape: tuple[int, ...]) -> int:
    """Return the number of elements of a row."""
    return prod(shape[1:])


def get_block_bytes(rows: Counts, buffer: Buffer) -> tuple[int, ...]:
    """Return the bytes of the blocks of `rows` rows of all ranks; `buffer` holds a block or all of them."""
    row = get_row_size(get_block_shape(buffer)) * buffer.array.itemsize
    return tuple(count * row for count in rows)
