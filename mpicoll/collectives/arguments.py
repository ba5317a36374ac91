"""Argument checks that several operations share. All of them run before any message is sent."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import wraps
from math import prod
from operator import index
from typing import Any, ParamSpec, TypeVar

from mpicoll.buffers import ops
from mpicoll.buffers.buffer import Buffer
from mpicoll.buffers.device import device_of
from mpicoll.buffers.dtypes import Array
from mpicoll.buffers.ops import OpLike, Reduction
from mpicoll.buffers.pair import PairLibrary, output_pair, recognise_pair
from mpicoll.buffers.recognise import output, recognise
from mpicoll.engine.core.communicator import Communicator
from mpicoll.engine.core.request import Request, seconds
from mpicoll.engine.executors import device as devices
from mpicoll.engine.selection.query import SelectionQuery
from mpicoll.engine.selection.selector import choose
from mpicoll.errors import ArgumentError, DTypeError, RankError, ShapeError

P = ParamSpec("P")
R = TypeVar("R")

Counts = Sequence[int]


def names_rank(prepare: Callable[P, R]) -> Callable[P, R]:
    """Add this rank to the argument errors of `prepare`, whose first argument is the communicator."""

    @wraps(prepare)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return prepare(*args, **kwargs)
        except ArgumentError as error:
            comm: Any = args[0]
            who = f"(rank {comm.rank} of {comm.size})"
            if not str(error).endswith(who):
                error.args = (f"{error} {who}",)
            raise

    return call


def operand(operation: str, x: Any, op: OpLike) -> tuple[Buffer, Reduction]:
    """Return the buffer of `x`, and the reduction `op` for it. Raises DTypeError if `op` does not support its dtype."""
    if op in ("minloc", "maxloc"):
        pair = recognise_pair(operation, x)
        library = pair.library
        assert isinstance(library, PairLibrary)
        return pair, ops.location(operation, str(op), library.values.dtype, library.indices.dtype)
    buffer = recognise(operation, x)
    return buffer, ops.reduction(operation, op, buffer.dtype, buffer.library.wrap, buffer.array.shape)


def result(operation: str, out: Any, like: Buffer, shape: tuple[int, ...]) -> Buffer:
    """Return the buffer of the result: the caller's `out` if that is not None, else a new array like `like`."""
    if out is None:
        return like.library.empty(like, shape)
    make = output_pair if isinstance(like.library, PairLibrary) else output
    return make(operation, out, like, shape)


@names_rank
def within(comm: Communicator, operation: str, timeout: Any, start: Callable[[], Request]) -> Any:
    """Return the value of the request of `start`, waiting at most `timeout` seconds.

    Raises ArgumentError before the request is started if `timeout` is invalid, and Timeout.
    """
    bound = seconds(operation, timeout)
    return start().wait(bound)


@names_rank
def seconds_of(comm: Communicator, operation: str, timeout: Any) -> float:
    """Return the `timeout` of `operation`. Raises ArgumentError if it is not a positive number."""
    return seconds(operation, timeout)


def rank(operation: str, name: str, value: Any, comm: Communicator) -> int:
    """Return `value` as a rank of `comm`. Raises RankError, with the argument's `name`, if it is out of range."""
    number = _integer(value)
    if number is None or not 0 <= number < comm.size:
        raise RankError(f"{operation}: {name} must be a rank in [0, {comm.size}), got {value!r}")
    return number


class _ProcNull(IntEnum):
    """Null process: sending to it has no effect, and receiving from it completes at once and receives nothing."""

    # The value of MPI's standard ABI; unlike -1, a wrong rank + 1 or rank - 1 does not yield it.
    PROC_NULL = -3

    def __repr__(self) -> str:
        return "mpicoll.PROC_NULL"


PROC_NULL = _ProcNull.PROC_NULL


def peer(operation: str, name: str, value: Any, comm: Communicator) -> int:
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
    remedy = f"; to {'send to' if name == 'dest' else 'receive from'} nobody, pass mpicoll.PROC_NULL"
    raise RankError(f"{operation}: {name} must be a rank in [0, {comm.size}), got {value!r}{remedy}")


def tag(operation: str, value: Any, comm: Communicator) -> int:
    """Return `value` as a tag. Raises RankError if it is out of range."""
    number = _integer(value)
    if number is None or not 0 <= number <= comm.transport.max_tag:
        raise RankError(f"{operation}: tag must be in [0, {comm.transport.max_tag}], got {value!r}")
    return number


def _integer(value: Any) -> int | None:
    try:
        return index(value)
    except TypeError:
        return None


def only_at_root(operation: str, out: Any, root: int, comm: Communicator) -> None:
    """Raise ShapeError if a rank that gets no result passes `out`."""
    if out is not None and comm.rank != root:
        raise ShapeError(
            f"{operation}: out is given, but only the root, rank {root}, gets a result; pass out there only"
        )


def no_average(operation: str, op: OpLike) -> None:
    """Raise DTypeError for avg, whose divisor would differ from rank to rank."""
    if op == "avg":
        raise DTypeError(f"{operation}: op 'avg' has no meaning here; take sum and divide by the number of ranks")


def template(operation: str, x: Any, out: Any, argument: str = "x") -> Buffer:
    """Return the buffer with the shape and dtype of the message: that of `x`, or of `out` if `x` is None.

    Raises DTypeError if both are None.
    """
    if x is None and out is None:
        raise DTypeError(
            f"{operation}: pass an array of the shape and dtype of what arrives, as {argument} (its contents don't"
            " matter) or as out="
        )
    return recognise(operation, out if x is None else x, "out" if x is None else argument)


def block_shape(buffer: Buffer) -> tuple[int, ...]:
    """Return the shape of the block; a 0-d array counts as one row."""
    return buffer.array.shape or (1,)


def counts_of_parts(operation: str, rows: int, counts: Counts | None, comm: Communicator) -> tuple[int, ...]:
    """Return the rows of every rank's block, given this rank's `rows`. Raises ShapeError if `counts` differs."""
    if counts is None:
        return (rows,) * comm.size
    checked = _checked(operation, counts, comm)
    if checked[comm.rank] != rows:
        raise ShapeError(f"{operation}: counts={list(checked)} says {checked[comm.rank]} rows, but x has {rows}")
    return checked


def counts_of_whole(
    operation: str, rows: int, counts: Counts | None, comm: Communicator, argument: str = "x"
) -> tuple[int, ...]:
    """Return the rows of every rank's block, for an array of `rows`. Raises ShapeError if it can't be divided."""
    if counts is None:
        if rows % comm.size:
            raise ShapeError(
                f"{operation}: the {rows} rows of {argument} can't be divided evenly among {comm.size} ranks;"
                " pass counts="
            )
        return (rows // comm.size,) * comm.size
    checked = _checked(operation, counts, comm)
    if sum(checked) != rows:
        raise ShapeError(
            f"{operation}: counts={list(checked)} add up to {sum(checked)}, but {argument} has {rows} rows"
        )
    return checked


def key_of(counts: Any) -> Any:
    """Return `counts`, or a pair of counts, as part of a cache key. For invalid counts the result is not hashable."""
    if counts is None:
        return None
    try:
        return tuple(map(index, counts)) if hasattr(counts, "__len__") else [counts]
    except TypeError:
        return tuple(map(key_of, counts)) if isinstance(counts, tuple | list) and len(counts) == 2 else [counts]


def send_and_recv_counts(
    operation: str, rows: int, counts: tuple[Counts, Counts], comm: Communicator
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the rows sent to and received from every rank. Raises ShapeError if `counts` does not fit `rows`."""
    try:
        send, recv = counts
    except (TypeError, ValueError):
        raise ShapeError(
            f"{operation}: counts must be a pair (send, recv) of {comm.size} numbers of rows each, got {counts!r}"
        ) from None
    both = _checked(operation, send, comm), _checked(operation, recv, comm)
    if sum(both[0]) != rows:
        raise ShapeError(f"{operation}: send counts {list(both[0])} add up to {sum(both[0])}, but x has {rows} rows")
    if both[0][comm.rank] != both[1][comm.rank]:
        raise ShapeError(
            f"{operation}: this rank sends itself {both[0][comm.rank]} rows but expects {both[1][comm.rank]}"
        )
    return both


def _checked(operation: str, counts: Counts, comm: Communicator) -> tuple[int, ...]:
    try:
        checked = tuple(index(count) for count in counts)
    except TypeError:
        checked = ()
    if len(checked) != comm.size or min(checked) < 0:
        raise ShapeError(
            f"{operation}: counts must be {comm.size} numbers of rows >= 0, one for each rank, got {counts!r}"
        )
    return checked


def problem(
    operation: str,
    comm: Communicator,
    algorithm: str | None,
    *,
    nbytes: int | None,
    count: int,
    array: Array | None = None,
    root: int = 0,
    reduction: Reduction | None = None,
    counts: Counts = (),
    refusal: str | None = None,
) -> SelectionQuery:
    """Return the query for the selection of an algorithm.

    `count` is the largest number of elements that MPI would have to count; with a `reduction` it is the number of
    elements in `nbytes`. `array` is on the device of the data. `refusal` is a further reason why MPI can't be used.

    Raises AlgorithmError if `algorithm` does not exist or does not support the call.
    """
    native = refusal
    if comm.transport.native is None:
        native = "there is no MPI library behind this communicator"
    elif count > comm.transport.native.max_count:
        native = f"{count} elements are more than MPI's counts hold"
    elif reduction is not None and reduction.native is None:
        native = f"op {reduction.name}: MPI has no such reduction"
    elif reduction is not None and refusal is None:
        native = comm.transport.misreduces(reduction.native or "", reduction.work)
    device = device_of(array)
    wanted = SelectionQuery(
        operation,
        nbytes,
        comm.context,
        "moved" if reduction is None else _kind(reduction, nbytes, count),
        root,
        commutative=reduction is None or reduction.commutative,
        elementwise=reduction is None or reduction.elementwise,
        uneven=len(set(counts)) > 1,
        native=native,
        unshared=comm.unshared,
        unread=comm.unread,
        lost=comm.lost,
        allocated=comm.allocated and device is None,
        device=None if device is None else devices.reach(comm, device, operation, reduction),
    )
    if algorithm is not None:
        choose(wanted, algorithm)  # raises now, together with the checks of the other arguments
    return wanted


def _kind(reduction: Reduction, nbytes: int | None, count: int) -> str:
    """Return the class of dtypes for which the reduction is tuned."""
    if nbytes is not None and nbytes < count * reduction.work.itemsize:
        return "half"  # it is reduced in a wider dtype
    return {"f": "float", "c": "complex", "i": "integer", "u": "integer", "b": "integer"}.get(
        reduction.work.kind, "other"
    )


def row_size(shape: tuple[int, ...]) -> int:
    """Return the number of elements of a row."""
    return prod(shape[1:])


def native_counts(rows: Counts, row: int) -> list[int] | None:
    """Return the sizes of the blocks in elements for rows of `row` elements; None if all are equal."""
    return [count * row for count in rows] if len(set(rows)) > 1 else None
