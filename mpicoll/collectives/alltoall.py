"""alltoall: send a block from each rank to each rank."""

from __future__ import annotations

from functools import partial
from typing import Any

from mpicoll.buffers.recognise import recognise
from mpicoll.collectives.arguments import (
    ArrayT,
    Counts,
    adds_rank_to_errors,
    check_alltoall_counts,
    check_scatter_counts,
    get_block_bytes,
    get_block_shape,
    make_counts_key,
    make_query,
    resolve_output,
)
from mpicoll.collectives.call import begins, call, repeats, start
from mpicoll.collectives.memory import InputArray, OutputArray, move_arrays
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.core.operation import Operation
from mpicoll.engine.core.request import Request
from mpicoll.engine.plan import Plan
from mpicoll.engine.world import CommLike, resolve


@repeats("alltoall", "algorithm", "counts")
def alltoall(
    x: ArrayT,
    *,
    counts: tuple[Counts, Counts] | None = None,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
    timeout: float | None = None,
) -> ArrayT:
    """Divide every rank's array along axis 0 into blocks, and send the i-th block to rank i.

    Args:
        x: this rank's array, of shape ``(rows, ...)`` and any dtype of fixed size. Without `counts` its shape is the
            same on every rank, and `rows` is a multiple of the number of ranks.
        counts: a pair ``(send, recv)``, where each rank passes its own: ``send[i]`` rows are sent to rank i, and
            ``recv[j]`` rows are received from rank j. None if all blocks are equal.
        out: an array for the result; None creates one.
        comm: the communicator; None is :func:`mpicoll.world`.
        algorithm: the name of an algorithm to force (see :func:`mpicoll.algorithms`); None has one selected.
        timeout: seconds to wait (see :func:`allreduce`).

    Returns:
        An array of `x`'s library and dtype, whose block j is from rank j; `out` if given. It has as many rows as `x`,
        or ``sum(recv)`` rows.

    Raises:
        DTypeError, ShapeError, AlgorithmError: an argument is invalid; no message has been sent.
        Timeout: the collective is not complete after `timeout` seconds (see :func:`allreduce`).

    Example:
        >>> mpicoll.alltoall(np.array([1, 2]))  # on one rank
        array([1, 2])
    """
    communicator = resolve(comm)
    key = _make_key(algorithm, counts)
    result: ArrayT = call(
        communicator, key, x, out, timeout, partial(prepare, communicator, counts=counts, algorithm=algorithm)
    )
    return result


@begins("alltoall", "algorithm", "counts")
def ialltoall(
    x: ArrayT,
    *,
    counts: tuple[Counts, Counts] | None = None,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
) -> Request[ArrayT]:
    """Start :func:`alltoall` in the background, with the same arguments.

    Returns:
        A request whose value is the result. Until it has completed, `x` must not be changed and `out` must not be used.

    Example:
        >>> mpicoll.ialltoall(np.ones(2)).wait()  # on one rank
        array([1., 1.])
    """
    communicator = resolve(comm)
    key = _make_key(algorithm, counts)
    return start(communicator, key, x, out, partial(prepare, communicator, counts=counts, algorithm=algorithm))


def alltoall_init(
    x: ArrayT,
    *,
    counts: tuple[Counts, Counts] | None = None,
    out: Any = None,
    comm: CommLike = None,
    algorithm: str | None = None,
) -> Plan[ArrayT]:
    """Create a plan for repeated calls of :func:`alltoall` with the same arguments.

    Returns:
        A plan, of which each run reads the contents that `x` has then. While a run is pending, `x` must not be changed
        and `out` must not be used. The plan may return the same array from each run.

    Example:
        >>> plan = mpicoll.alltoall_init(np.ones(2))
        >>> plan()  # on one rank
        array([1., 1.])
    """
    return Plan(prepare(resolve(comm), x, counts, out, algorithm))


def _make_key(algorithm: str | None, counts: Any) -> tuple[Any, ...]:
    """Return the key of a call."""
    counts_key = None if counts is None else make_counts_key(counts)
    return ("alltoall", algorithm, counts_key)


@adds_rank_to_errors
def prepare(
    comm: CommunicatorCore, x: Any, counts: tuple[Counts, Counts] | None, out: Any, algorithm: str | None
) -> Operation:
    buffer = recognise("alltoall", x)
    shape = get_block_shape(buffer)
    if counts is None:
        send = recv = check_scatter_counts("alltoall", shape[0], None, comm)
    else:
        send, recv = check_alltoall_counts("alltoall", shape[0], counts, comm)
    whole = resolve_output("alltoall", out, buffer, (sum(recv), *shape[1:]))
    source, target = InputArray(buffer, whole), OutputArray(whole)
    arrays = move_arrays("alltoall", comm, source, target, get_block_bytes(send, buffer))
    arrays.arrivals = get_block_bytes(recv, buffer)
    arrays.persistent = source.is_user_buffer and target.is_user_buffer
    # With counts, a rank does not have the sizes of the others, so the selection must not depend on any size.
    query = make_query(
        comm,
        arrays,
        algorithm,
        nbytes=source.array.nbytes if counts is None else None,
        uneven=counts is not None,
        refusal=None if counts is None else "a rank can't know whether MPI's counts hold the blocks of the others",
    )
    return Operation(
        comm,
        query,
        algorithm,
        arrays,
        block=buffer,
        buffers=(buffer, whole),
        counts=() if counts is None else send,
        arrivals=() if counts is None else recv,
        output=whole,
    )
