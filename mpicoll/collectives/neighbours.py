"""Collectives in which each rank communicates with its neighbours only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, overload

import numpy as np

from mpicoll.buffers.buffer import Buffer
from mpicoll.buffers.device import device_of
from mpicoll.buffers.recognise import bind_empty, recognise
from mpicoll.collectives.arguments import (
    ArrayT,
    Counts,
    Scalar,
    adds_rank_to_errors,
    check_timeout,
    get_block_bytes,
    get_block_shape,
    resolve_output,
)
from mpicoll.collectives.call import repeats
from mpicoll.collectives.memory import InputArray, OutputArray
from mpicoll.engine.core.arrays import displacements, do_nothing
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.core.proc_null import PROC_NULL
from mpicoll.engine.core.request import Request
from mpicoll.engine.core.topology import Topology, list_integers
from mpicoll.engine.diagnostics.flight_recorder import Call
from mpicoll.engine.executors.neighbour_exchange import NeighbourExchange
from mpicoll.engine.executors.neighbour_memory import SharedExchange, may_share, slice_box
from mpicoll.engine.executors.staging import DeviceReceive, copy_to_host
from mpicoll.engine.world import CommLike, resolve
from mpicoll.errors import CommunicatorError, ShapeError


@overload
def neighbor_allgather(
    x: Scalar, *, counts: Counts | None = ..., out: Any = ..., comm: CommLike = ..., timeout: float | None = ...
) -> Any: ...
@overload
def neighbor_allgather(
    x: ArrayT, *, counts: Counts | None = ..., out: Any = ..., comm: CommLike = ..., timeout: float | None = ...
) -> ArrayT: ...
@repeats("neighbor_allgather", "counts")
def neighbor_allgather(
    x: Any, *, counts: Counts | None = None, out: Any = None, comm: CommLike = None, timeout: float | None = None
) -> Any:
    """Send this rank's array to all its destinations, and collect the arrays of all its sources.

    The neighbours of a rank are those of ``comm.graph``, or on a grid of ``comm.cart``, for each dimension, the rank
    before this one and the one behind it.

    Args:
        x: this rank's array, of shape ``(n, ...)`` and any dtype of fixed size. Without `counts` its shape is the same
            on every rank.
        counts: the rows of each source's array, in the order of the sources; each rank passes its own. None if all
            arrays have as many rows as `x`.
        out: an array for the result; None creates one. The blocks of sources beyond the border of a grid are not
            changed.
        comm: a communicator with neighbours.
        timeout: seconds to wait (see :func:`mpicoll.allreduce`).

    Returns:
        An array of `x`'s library and dtype with one block for each source, in their order; `out` if given. In a new
        array the blocks of sources beyond the border of a grid are 0.

    Raises:
        DTypeError, ShapeError: an argument is invalid; no message has been sent.
        CommunicatorError: `comm` has no neighbours.
        MismatchError, TruncationError: the sizes of a block differ between its sender and its receiver.
        Timeout: the collective is not complete after `timeout` seconds (see :func:`mpicoll.allreduce`).

    Example:
        >>> ring = mpicoll.world().cart([1], periods=True)  # on one rank
        >>> mpicoll.neighbor_allgather(np.array([1, 2]), comm=ring)
        array([1, 2, 1, 2])
    """
    core = resolve(comm)
    operation = _prepare_allgather(core, "neighbor_allgather", x, counts, out)
    return operation.wait(timeout, ("neighbor_allgather", counts), x)


@overload
def ineighbor_allgather(
    x: Scalar,
    *,
    counts: Counts | None = ...,
    out: Any = ...,
    comm: CommLike = ...,
) -> Request: ...
@overload
def ineighbor_allgather(
    x: ArrayT,
    *,
    counts: Counts | None = ...,
    out: Any = ...,
    comm: CommLike = ...,
) -> Request[ArrayT]: ...
def ineighbor_allgather(x: Any, *, counts: Counts | None = None, out: Any = None, comm: CommLike = None) -> Request:
    """Start :func:`neighbor_allgather` in the background, with the same arguments.

    Returns:
        A request whose value is the result. Until it has completed, `x` must not be changed and `out` must not be used.

    Example:
        >>> ring = mpicoll.world().cart([1], periods=True)  # on one rank
        >>> mpicoll.ineighbor_allgather(np.array([1, 2]), comm=ring).wait()
        array([1, 2, 1, 2])
    """
    return _prepare_allgather(resolve(comm), "neighbor_allgather", x, counts, out).start()


@repeats("neighbor_alltoall", "counts")
def neighbor_alltoall(
    x: ArrayT,
    *,
    counts: tuple[Counts, Counts] | None = None,
    out: Any = None,
    comm: CommLike = None,
    timeout: float | None = None,
) -> ArrayT:
    """Send a block to each destination, and receive one from each source.

    On a grid of ``comm.cart`` the neighbours are, for each dimension, the rank before this one and the one behind it:
    what is sent to the rank before arrives there as the block of the rank behind, also if both are the same rank.

    Args:
        x: the blocks for the destinations, in their order: an array of shape ``(rows, ...)`` and any dtype of fixed
            size. Without `counts` all blocks of all ranks have the same number of rows.
        counts: a pair ``(send, recv)``, where each rank passes its own: the rows for each destination, and those from
            each source. None if all blocks are equal; a rank with sources and no destinations has to pass it, or `out`.
        out: an array for the result; None creates one. The blocks of sources beyond the border of a grid are not
            changed.
        comm: a communicator with neighbours.
        timeout: seconds to wait (see :func:`mpicoll.allreduce`).

    Returns:
        An array of `x`'s library and dtype with one block for each source, in their order; `out` if given. In a new
        array the blocks of sources beyond the border of a grid are 0.

    Raises:
        DTypeError, ShapeError: an argument is invalid; no message has been sent.
        CommunicatorError: `comm` has no neighbours.
        MismatchError, TruncationError: the sizes of a block differ between its sender and its receiver.
        Timeout: the collective is not complete after `timeout` seconds (see :func:`mpicoll.allreduce`).

    Example:
        >>> ring = mpicoll.world().cart([1], periods=True)  # on one rank, both of whose neighbours are itself
        >>> mpicoll.neighbor_alltoall(np.array([1, 2]), comm=ring)
        array([2, 1])
    """
    core = resolve(comm)
    operation = _prepare_alltoall(core, "neighbor_alltoall", x, counts, out)
    result: ArrayT = operation.wait(timeout, ("neighbor_alltoall", counts), x)
    return result


def ineighbor_alltoall(
    x: ArrayT, *, counts: tuple[Counts, Counts] | None = None, out: Any = None, comm: CommLike = None
) -> Request[ArrayT]:
    """Start :func:`neighbor_alltoall` in the background, with the same arguments.

    Returns:
        A request whose value is the result. Until it has completed, `x` must not be changed and `out` must not be used.

    Example:
        >>> ring = mpicoll.world().cart([1], periods=True)  # on one rank
        >>> mpicoll.ineighbor_alltoall(np.array([1, 2]), comm=ring).wait()
        array([2, 1])
    """
    return _prepare_alltoall(resolve(comm), "neighbor_alltoall", x, counts, out).start()


def get_topology(comm: CommunicatorCore, operation: str) -> Topology:
    """Return the neighbours of `comm`. Raises CommunicatorError if it has none."""
    if comm.topology is None:
        raise CommunicatorError(
            f"{operation}: the ranks of {comm.name} have no neighbours; pass comm=, a communicator that cart() or"
            f" graph() has created (rank {comm.rank} of {comm.size})"
        )
    return comm.topology


class NeighbourOperation:
    """Collective on a communicator with neighbours, ready to be run once by its queue. `shared` is what carries it out
    in shared memory, if something does; `makes_result` states that a new array of any contents will do as its output.
    """

    def __init__(
        self,
        comm: CommunicatorCore,
        call: Call,
        run: Callable[[], None],
        output: Buffer,
        shared: SharedExchange | None = None,
        *,
        makes_result: bool = True,
    ) -> None:
        self._comm = comm
        self._call = call
        self._run = run
        self._output = output
        self._shared = shared
        self._makes_result = makes_result

    def wait(self, timeout: float | None, key: tuple[Any, ...], x: Any) -> Any:
        """Carry it out and return its result; with a `timeout`, in the background. Later calls with the same `key`, on
        arrays like `x`, are carried out by the extension, if possible."""
        if timeout is not None:
            bound = check_timeout(self._comm, self._call.operation, timeout)
            return self.start().wait(bound)
        self._comm.queue.run(self._run, self._call)
        result = self._output.result()
        if self._shared is not None:
            self._repeat(self._shared, key, x, result)
        return result

    def _repeat(self, shared: SharedExchange, key: tuple[Any, ...], x: Any, result: Any) -> None:
        carrier, make_result = shared.find_carrier(), bind_empty(result)
        if carrier is None or make_result is None:
            return
        # Lists, which a program may change, are compared with tuples.
        key = tuple(_freeze(value) for value in key)
        self._comm.queue.add_call(
            key,
            x,
            result,
            make_result if self._makes_result else None,
            carrier,
            shared.call,
            in_place=shared.in_place,
        )

    def start(self) -> Request:
        """Start it in the background."""
        return Request(self._comm.queue.submit(self._run, self._call), self._output.result)


def _freeze(value: Any) -> Any:
    """Return `value` with tuples instead of lists."""
    return tuple(_freeze(one) for one in value) if isinstance(value, list | tuple) else value


@adds_rank_to_errors
def _prepare_allgather(comm: CommunicatorCore, name: str, x: Any, counts: Any, out: Any) -> NeighbourOperation:
    topology = get_topology(comm, name)
    buffer = recognise(name, x)
    shape = get_block_shape(buffer)
    recv = _check_rows(name, "counts", counts, topology.sources) if counts is not None else None
    if recv is None:
        recv = (shape[0],) * len(topology.sources)
    output = resolve_output(name, out, buffer, (sum(recv), *shape[1:]))
    send = (shape[0],) * len(topology.destinations)
    (whole,) = get_block_bytes(shape[:1], buffer)
    return _bind(comm, name, buffer, output, [slice(0, whole)] * len(send), send, recv, keeps=out is not None)


@adds_rank_to_errors
def _prepare_alltoall(comm: CommunicatorCore, name: str, x: Any, counts: Any, out: Any) -> NeighbourOperation:
    topology = get_topology(comm, name)
    buffer = recognise(name, x)
    shape = get_block_shape(buffer)
    if counts is not None:
        send, recv = _check_pair(name, counts, topology)
    else:
        count = _find_rows(name, shape[0], out, topology)
        send, recv = (count,) * len(topology.destinations), (count,) * len(topology.sources)
    if sum(send) != shape[0]:
        raise ShapeError(f"{name}: send counts {list(send)} add up to {sum(send)}, but x has {shape[0]} rows")
    output = resolve_output(name, out, buffer, (sum(recv), *shape[1:]))
    return _bind(comm, name, buffer, output, _cut(get_block_bytes(send, buffer)), send, recv, keeps=out is not None)


def _find_rows(name: str, rows: int, out: Any, topology: Topology) -> int:
    """Return the rows of each block, where all are equal."""
    number = len(topology.destinations)
    if number:
        if rows % number:
            raise ShapeError(
                f"{name}: the {rows} rows of x can't be divided evenly among {number} destinations; pass counts="
            )
        return rows // number
    number = len(topology.sources)
    if not number:
        return 0
    if out is None:
        raise ShapeError(
            f"{name}: this rank has {number} sources and no destinations, so x has no rows that show the size of a"
            " block; pass counts= or out="
        )
    rows = get_block_shape(recognise(name, out, "out"))[0]
    return -(-rows // number)


def _check_pair(name: str, counts: Any, topology: Topology) -> tuple[tuple[int, ...], tuple[int, ...]]:
    try:
        send, recv = counts
    except (TypeError, ValueError):
        raise ShapeError(
            f"{name}: counts must be a pair (send, recv) of {len(topology.destinations)} and {len(topology.sources)}"
            f" numbers of rows, got {counts!r}"
        ) from None
    return (
        _check_rows(name, "send counts", send, topology.destinations),
        _check_rows(name, "receive counts", recv, topology.sources),
    )


def _check_rows(name: str, argument: str, counts: Any, neighbours: Sequence[int]) -> tuple[int, ...]:
    """Return `counts` as one number of rows for each of `neighbours`."""
    rows = list_integers(counts)
    if rows is None or len(rows) != len(neighbours) or min(rows, default=0) < 0:
        raise ShapeError(
            f"{name}: {argument} must be {len(neighbours)} numbers of rows >= 0, one for each of the ranks"
            f" {list(neighbours)}, got {counts!r}"
        )
    return rows


def _cut(sizes: Sequence[int]) -> list[slice]:
    """Return the places of blocks of these sizes, one behind the other."""
    ends = displacements(sizes)
    return [slice(begin, end) for begin, end in pairwise(ends)]


def _bind(
    comm: CommunicatorCore,
    name: str,
    buffer: Buffer,
    output: Buffer,
    outgoing: Sequence[slice],
    send: Sequence[int],
    recv: Sequence[int],
    *,
    keeps: bool,
) -> NeighbourOperation:
    """Return the operation that sends the bytes `outgoing` of `buffer`, and receives blocks of `recv` rows in `output`.

    With `keeps`, `output` is the caller's, in which the blocks of PROC_NULL stay as they are.
    """
    topology = get_topology(comm, name)
    incoming = _cut(get_block_bytes(recv, buffer))
    device = device_of(buffer.array)
    target: OutputArray | DeviceReceive
    if device is None:
        source, target = InputArray(buffer, output), OutputArray(output)
        sent, load = source.as_bytes, source.load
        direct = target.is_user_buffer
    else:
        target, direct = DeviceReceive(output, device, direct=False), False
        sent, load = copy_to_host(buffer, device), do_nothing
    received = target.as_bytes
    unfilled = [place for source, place in zip(topology.sources, incoming, strict=True) if source is PROC_NULL]
    kept = None if device is None or not (keeps and unfilled) else copy_to_host(output, device)

    call = Call(
        name,
        None,
        buffer.dtype.text,
        get_block_shape(buffer),
        counts=_add_by_rank(topology.destinations, send, comm.size),
        arrivals=_add_by_rank(topology.sources, recv, comm.size),
        memory="" if device is None else device.kind,
    )
    shared = None
    if device is None and may_share(comm):
        sent_boxes = [
            (dest, slice_box(one.start, one.stop)) for dest, one in zip(topology.destinations, outgoing, strict=True)
        ]
        received_boxes = [
            (topology.sources[at], slice_box(incoming[at].start, incoming[at].stop)) for at in topology.arrivals
        ]
        shared = SharedExchange(
            comm, name, [(sent_boxes, received_boxes)], sent.nbytes, received.nbytes, call, in_place=False
        )

    def run() -> None:
        tag = comm.next_tag()
        load()
        if keeps and unfilled and not direct:
            if kept is None:
                output.load(received.view(output.array.dtype))
            else:
                np.copyto(received, kept)
        elif not keeps:
            for place in unfilled:
                received[place] = 0
        carrier = None if shared is None else shared.find_carrier()
        if carrier is not None:
            carrier.carry_out(sent, received)
            target.store()
            return
        sends = [(dest, sent[place]) for dest, place in zip(topology.destinations, outgoing, strict=True)]
        recvs = [(topology.sources[at], received[incoming[at]]) for at in topology.arrivals]
        NeighbourExchange(comm, name, sends, recvs).run(tag)
        target.store()

    return NeighbourOperation(comm, call, run, output, shared, makes_result=not unfilled)


def _add_by_rank(neighbours: Sequence[int], rows: Sequence[int], size: int) -> tuple[int, ...]:
    """Return the rows for or from each rank, of which the ranks compare the sums before any message is sent."""
    sums = [0] * size
    for rank, count in zip(neighbours, rows, strict=True):
        if rank is not PROC_NULL:
            sums[rank] += count
    return tuple(sums)
