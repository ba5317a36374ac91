"""bcast: send one rank's array to all ranks."""

from __future__ import annotations

from functools import partial
from typing import Any, overload

from mpicoll.collectives import arguments
from mpicoll.collectives.arguments import (
    ArrayT,
    adds_rank_to_errors,
    make_query,
    recognise_prototype,
    resolve_output,
)
from mpicoll.collectives.call import UNCACHED, begins, call, repeats, start
from mpicoll.collectives.memory import InputArray, OutputArray, move_arrays
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.core.operation import Operation
from mpicoll.engine.core.request import Request
from mpicoll.engine.plan import Plan
from mpicoll.engine.world import CommLike, resolve


@overload
def bcast(
    x: ArrayT,
    root: int = ...,
    *,
    out: None = ...,
    comm: CommLike = ...,
    algorithm: str | None = ...,
    timeout: float | None = ...,
) -> ArrayT: ...
@overload
def bcast(
    x: Any,
    root: int = ...,
    *,
    out: ArrayT,
    comm: CommLike = ...,
    algorithm: str | None = ...,
    timeout: float | None = ...,
) -> ArrayT: ...
@repeats("bcast", "root", "algorithm")
def bcast(
    x: Any,
    root: int = 0,
    *,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
    timeout: float | None = None,
) -> Any:
    """Send the array of rank `root` to all ranks.

    Args:
        x: an array of the same shape and dtype on every rank, of any dtype of fixed size. Its contents matter on the
            root only; on other ranks it may be None if `out` is given.
        root: the rank whose array is sent, the same on every rank.
        out: an array for the result; None creates one. ``out=x`` overwrites `x` itself.
        comm: the communicator; None is :func:`mpicoll.world`.
        algorithm: the name of an algorithm to force (see :func:`mpicoll.algorithms`); None has one selected.
        timeout: seconds to wait (see :func:`allreduce`).

    Returns:
        An array of `x`'s library, shape and dtype, on the root too; `out` if given.

    Raises:
        DTypeError, ShapeError, RankError, AlgorithmError: an argument is invalid; no message has been sent.
        Timeout: the collective is not complete after `timeout` seconds (see :func:`allreduce`).

    Example:
        >>> mpicoll.bcast(np.array([7.0]), root=0)  # on one rank
        array([7.])
    """
    communicator = resolve(comm)
    key = _make_key(root, algorithm)
    return call(communicator, key, x, out, timeout, partial(prepare, communicator, root=root, algorithm=algorithm))


@overload
def ibcast(
    x: ArrayT,
    root: int = ...,
    *,
    out: None = ...,
    comm: CommLike = ...,
    algorithm: str | None = ...,
) -> Request[ArrayT]: ...
@overload
def ibcast(
    x: Any,
    root: int = ...,
    *,
    out: ArrayT,
    comm: CommLike = ...,
    algorithm: str | None = ...,
) -> Request[ArrayT]: ...
@begins("bcast", "root", "algorithm")
def ibcast(
    x: Any,
    root: int = 0,
    *,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
) -> Request:
    """Start :func:`bcast` in the background, with the same arguments.

    Returns:
        A request whose value is the result. Until it has completed, `x` must not be changed and `out` must not be used.

    Example:
        >>> mpicoll.ibcast(np.ones(2)).wait()  # on one rank
        array([1., 1.])
    """
    communicator = resolve(comm)
    key = _make_key(root, algorithm)
    return start(communicator, key, x, out, partial(prepare, communicator, root=root, algorithm=algorithm))


@overload
def bcast_init(
    x: ArrayT,
    root: int = ...,
    *,
    out: None = ...,
    comm: CommLike = ...,
    algorithm: str | None = ...,
) -> Plan[ArrayT]: ...
@overload
def bcast_init(
    x: Any,
    root: int = ...,
    *,
    out: ArrayT,
    comm: CommLike = ...,
    algorithm: str | None = ...,
) -> Plan[ArrayT]: ...
def bcast_init(
    x: Any,
    root: int = 0,
    *,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
) -> Plan:
    """Create a plan for repeated calls of :func:`bcast` with the same arguments.

    Returns:
        A plan, of which each run reads the contents that `x` has then. While a run is pending, `x` must not be changed
        and `out` must not be used. The plan may return the same array from each run.

    Example:
        >>> plan = mpicoll.bcast_init(np.ones(2))
        >>> plan()  # on one rank
        array([1., 1.])
    """
    return Plan(prepare(resolve(comm), x, root, out, algorithm))


def _make_key(root: Any, algorithm: str | None) -> tuple[Any, ...]:
    """Return the key of a call."""
    return ("bcast", root, algorithm) if type(root) is int else ("bcast", UNCACHED)


@adds_rank_to_errors
def prepare(comm: CommunicatorCore, x: Any, root: int, out: Any, algorithm: str | None) -> Operation:
    root = arguments.check_rank("bcast", "root", root, comm)
    buffer = recognise_prototype("bcast", x, out)
    output = resolve_output("bcast", out, buffer, buffer.array.shape)
    target, in_place = OutputArray(output), output.same_memory(buffer)
    source = InputArray(buffer, None if in_place else output) if comm.rank == root else None
    arrays = move_arrays("bcast", comm, source, target, (target.array.nbytes,), root)
    if in_place and target.is_user_buffer:
        arrays.persistent = True
        arrays.source = None if source is None else arrays.target
    query = make_query(comm, arrays, algorithm, nbytes=target.array.nbytes)
    return Operation(comm, query, algorithm, arrays, block=output, buffers=(buffer, output), output=output)
