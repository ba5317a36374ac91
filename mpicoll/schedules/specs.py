"""Specification of each collective as data: the chunks before and after, the read-only chunks, and their sizes.

==============  ===================  =======================================================  ===============
collective      defined before       promised after                                           read-only
==============  ===================  =======================================================  ===============
allreduce       all, own operand     all, over all ranks
bcast           all at the root      all, the root's                                          all at the root
reduce          all, own operand     all over all ranks, at the root
scan            all, own operand     all, over the ranks up to the own one
exscan          all, own operand     the first scratch ones, over lower ranks; not on rank 0
allgather       own block            all blocks                                               own block
gather          own block            all blocks, at the root                                  own block
scatter         all at the root      own block                                                all at the root
reduce_scatter  all, own operand     own block, over all ranks
alltoall        input blocks 0..P-1  output blocks P..2P-1                                    input blocks
barrier         none                 none; messages lead from each rank to each other rank
==============  ===================  =======================================================  ===============

A step of a parameter server is specified in the same way: before it, the server s of S has chunk s, its weights, and
the workers have all chunks, their gradients; afterwards both have the server's chunk with all workers' reduced into it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import NamedTuple

from mpicoll.collective_kinds import BLOCKS


class Seat(NamedTuple):
    """The point of view of a rank, with the number of chunks of the vector (or of one buffer of blocks)."""

    rank: int
    size: int
    root: int
    chunks: int


class Value(NamedTuple):
    """The content of a chunk: the piece of data, and the set of the contributing ranks as a mask.

    `low` and `high` are the first and the last contributor as long as all between were combined in order; -1 if not.
    """

    piece: Hashable
    ranks: int
    low: int
    high: int


State = dict[int, Value]


@dataclass(frozen=True, slots=True)
class Spec:
    """The specification of one collective for one rank: chunks before, chunks after, and read-only chunks.

    `after` is compared by piece and by the set of contributors. `reached`: a chain of messages must lead from each rank
    to each other rank.
    """

    before: Callable[[Seat], State]
    after: Callable[[Seat], State]
    readonly: Callable[[Seat], range] = lambda seat: range(0)
    reached: bool = False


def _pieces(seat: Seat, low: int, high: int, first: int = 0) -> State:
    """Return all pieces of a vector, in the chunks from `first` on, reduced over the ranks from `low` to `high`."""
    ranks = (1 << high + 1) - (1 << low)
    return {first + piece: Value(piece, ranks, low, high) for piece in range(seat.chunks)}


def _blocks(seat: Seat) -> State:
    """Return all blocks, each contributed by its owner."""
    return {rank: Value(rank, 1 << rank, rank, rank) for rank in range(seat.size)}


def _operand(seat: Seat) -> State:
    return _pieces(seat, seat.rank, seat.rank)


def _total(seat: Seat) -> State:
    return _pieces(seat, 0, seat.size - 1)


def _own(state: Callable[[Seat], State]) -> Callable[[Seat], State]:
    return lambda seat: {seat.rank: state(seat)[seat.rank]}


def _at_root(state: Callable[[Seat], State]) -> Callable[[Seat], State]:
    return lambda seat: state(seat) if seat.rank == seat.root else {}


def _hold_all_blocks(seat: Seat) -> State:
    """Return all blocks as the root holds them, with the root as the contributor of each."""
    return {rank: Value(rank, 1 << seat.root, seat.root, seat.root) for rank in range(seat.size)}


def _input(seat: Seat) -> State:
    return {to: Value((seat.rank, to), 1 << seat.rank, seat.rank, seat.rank) for to in range(seat.size)}


def _output(seat: Seat) -> State:
    return {seat.size + source: Value((source, seat.rank), 1 << source, source, source) for source in range(seat.size)}


def _none(seat: Seat) -> State:
    return {}


def _own_block(seat: Seat) -> range:
    return range(seat.rank, seat.rank + 1)


def _all_at_root(seat: Seat) -> range:
    return range(seat.chunks if seat.rank == seat.root else 0)


def _weights_or_gradients(seat: Seat) -> State:
    """Return the own shard of a server, of which there is one for each chunk, or all chunks of a worker."""
    return _own(_operand)(seat) if seat.rank < seat.chunks else _operand(seat)


def _updated_weights(seat: Seat) -> State:
    """Return the shards that a rank has after a step: the server's weights, with the gradients of all workers."""
    workers = (1 << seat.size) - (1 << min(seat.chunks, seat.size))
    shards = (seat.rank,) if seat.rank < seat.chunks else range(seat.chunks)
    return {shard: Value(shard, workers | 1 << shard, -1, -1) for shard in shards}


SPECS: dict[str, Spec] = {
    "allreduce": Spec(before=_operand, after=_total),
    "bcast": Spec(
        before=_at_root(_operand),
        after=lambda seat: _pieces(seat, seat.root, seat.root),
        readonly=_all_at_root,
    ),
    "reduce": Spec(before=_operand, after=_at_root(_total)),
    "scan": Spec(before=_operand, after=lambda seat: _pieces(seat, 0, seat.rank)),
    "exscan": Spec(
        before=_operand,
        after=lambda seat: _pieces(seat, 0, seat.rank - 1, first=seat.chunks) if seat.rank else {},
    ),
    "allgather": Spec(before=_own(_blocks), after=_blocks, readonly=_own_block),
    "gather": Spec(before=_own(_blocks), after=_at_root(_blocks), readonly=_own_block),
    "scatter": Spec(before=_at_root(_hold_all_blocks), after=_own(_hold_all_blocks), readonly=_all_at_root),
    "reduce_scatter": Spec(before=_operand, after=_own(_total)),
    "alltoall": Spec(before=_input, after=_output, readonly=lambda seat: range(seat.size)),
    "barrier": Spec(before=_none, after=_none, reached=True),
    "parameter_server": Spec(before=_weights_or_gradients, after=_updated_weights),
}
"""Specification of each collective, and of a parameter server."""


def extent(collective: str, uneven: bool, seat: Seat, chunk: int) -> Hashable:
    """Return a key for the size of `chunk`: chunks are known to have the same size only if their keys are equal.

    Vectors are cut into pieces that may differ in size, and scratch follows the pieces; blocks differ if `uneven`.
    """
    if collective not in BLOCKS:
        return chunk % seat.chunks
    if not uneven:
        return 0
    if collective != "alltoall":
        return chunk % seat.size
    if chunk < seat.size:
        return (seat.rank, chunk)
    if chunk < 2 * seat.size:
        return (chunk - seat.size, seat.rank)
    return ("scratch", chunk)
