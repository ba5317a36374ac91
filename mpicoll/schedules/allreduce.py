"""Algorithms for allreduce: chunk c is the c-th piece of the vector, and is reduced in place on every rank."""

from __future__ import annotations

from collections.abc import Iterator

from mpicoll.schedules import patterns
from mpicoll.schedules.model import Chunks, Recv, Round, Send, algorithm
from mpicoll.schedules.patterns import (
    binomial_children,
    binomial_parent,
    ceil_log2,
    fold,
    halvings,
    power_below,
    unfold,
)


@algorithm("allreduce", ordered=True, rounds="P if P > 1 else 0", sent="P - 1")
def master_worker(rank: int, size: int) -> Iterator[Round]:
    """Reduce on rank 0, which receives the vectors one by one in the order of ranks, and sends the total to all ranks.

    P rounds; rank 0 sends and receives n(P-1) bytes. One vector arrives at a time, so rank 0 needs memory for one.
    The textbook star: it keeps the order of ranks, and is the baseline of the others.
    """
    if rank:
        yield Round(sends=(Send(0, range(1)),))
        yield Round(recvs=(Recv(0, range(1)),))
        return
    for worker in range(1, size):
        yield Round(recvs=(Recv(worker, range(1), reduce=True),))
    if size > 1:
        yield Round(sends=tuple(Send(worker, range(1)) for worker in range(1, size)))


@algorithm("allreduce", chunks=lambda size, segments: size, rounds="2 * (P - 1)", sent="2 * (P - 1) / P")
def ring(rank: int, size: int) -> Iterator[Round]:
    """Ring reduce-scatter, then ring allgather, of P pieces.

    2(P-1) rounds; each rank sends 2n(P-1)/P bytes, the minimum. Patarasuk and Yuan 2009.
    """
    left, right = (rank - 1) % size, (rank + 1) % size
    for step in range(2 * (size - 1)):
        mine, theirs = (rank - step) % size, (rank - step - 1) % size
        yield Round((Send(right, (mine,)),), (Recv(left, (theirs,), reduce=step < size - 1),))


@algorithm("allreduce", ordered=True, rounds="2 * lg", sent="lg")
def tree(rank: int, size: int) -> Iterator[Round]:
    """Binomial reduce to rank 0, then binomial broadcast from it.

    2 lg P rounds; rank 0 sends n lg P bytes. The textbook composition; Thakur, Rabenseifner and Gropp 2005, section 3.
    """
    children = binomial_children(rank, size)
    for child in children:
        yield Round(recvs=(Recv(child, range(1), reduce=True),))
    if rank:
        yield Round(sends=(Send(binomial_parent(rank), range(1)),))
        yield Round(recvs=(Recv(binomial_parent(rank), range(1)),))
    for child in reversed(children):
        yield Round(sends=(Send(child, range(1)),))


@algorithm(
    "allreduce",
    chunks=lambda size, segments: 2 * segments,
    segmented=True,
    ordered=True,
    rounds="S + 2 * (lg - (0 < r < p2 - 1)) - 1 if P > 1 else 0",
    sent="min(2, P / 2) if P > 1 else 0",
)
def double_tree(rank: int, size: int, *, segments: int) -> Iterator[Round]:
    """Reduce segments up two binary trees, one for each half of the vector, and broadcast the results down behind them.

    S + 2h - 1 rounds for trees of height h = floor(lg(P+1)); each rank sends at most 2n bytes, because a rank with
    children in one tree is a leaf of the other. Sanders, Speck and Träff 2009.
    """
    if size == 1:
        return
    trees = patterns.double_tree(rank, size)
    for time in range(segments + 2 * max(tree.height for tree in trees)):
        sends: list[Send] = []
        recvs: list[Recv] = []
        for half, (parent, children, depth, height) in enumerate(trees):
            first = half * segments
            # At this time every rank of a level handles the same segment; the one behind it is arriving meanwhile.
            up, down = time - height + depth, time - height - depth
            if parent is not None and 0 <= up < segments:
                sends.append(Send(parent, (first + up,)))
            if -1 <= up < segments - 1:
                recvs += [Recv(child, (first + up + 1,), reduce=True) for child in children]
            if 0 <= down < segments:
                sends += [Send(child, (first + down,)) for child in children]
            if parent is not None and -1 <= down < segments - 1:
                recvs.append(Recv(parent, (first + down + 1,)))
        if sends or recvs:
            yield Round(tuple(sends), tuple(recvs))


@algorithm("allreduce", ordered=True, rounds="lg + (r > 0)", sent="lg")
def recursive_doubling(rank: int, size: int) -> Iterator[Round]:
    """Exchange the whole vector with the peer at distance 1, 2, 4, …

    lg P rounds, one more if P is not a power of two; a rank sends n lg P bytes. Thakur, Rabenseifner and Gropp 2005.
    """
    virtual, _, guest = fold(rank, size)
    yield from _fold_in(rank, size, range(1))
    for k in range(0 if guest else ceil_log2(power_below(size))):
        peer = unfold(virtual ^ 1 << k, size)
        yield Round((Send(peer, range(1)),), (Recv(peer, range(1), reduce=True),))
    yield from _fold_out(rank, size, range(1))


@algorithm(
    "allreduce",
    chunks=lambda size, segments: power_below(size),
    ordered=True,
    rounds="2 * lg",
    sent="2 * (p2 - 1) / p2 + (r > 0)",
)
def halving_doubling(rank: int, size: int) -> Iterator[Round]:
    """Recursive halving reduce-scatter, then recursive doubling allgather.

    2 lg P rounds; a rank sends 2n(P-1)/P bytes if P is a power of two, otherwise up to n more. Rabenseifner 2004.
    """
    count = power_below(size)
    virtual, _, guest = fold(rank, size)
    steps = [] if guest else halvings(virtual, count)
    yield from _fold_in(rank, size, range(count))
    for mask, keep, give in steps:
        peer = unfold(virtual ^ mask, size)
        yield Round((Send(peer, give),), (Recv(peer, keep, reduce=True),))
    for mask, keep, give in reversed(steps):
        peer = unfold(virtual ^ mask, size)
        yield Round((Send(peer, keep),), (Recv(peer, give),))
    yield from _fold_out(rank, size, range(count))


def _fold_in(rank: int, size: int, chunks: Chunks) -> Iterator[Round]:
    """Send the vectors of guests to their hosts."""
    _, host, guest = fold(rank, size)
    if host:
        yield Round(recvs=(Recv(rank ^ 1, chunks, reduce=True),))
    if guest:
        yield Round(sends=(Send(rank ^ 1, chunks),))


def _fold_out(rank: int, size: int, chunks: Chunks) -> Iterator[Round]:
    """Send the total from hosts to their guests."""
    _, host, guest = fold(rank, size)
    if host:
        yield Round(sends=(Send(rank ^ 1, chunks),))
    if guest:
        yield Round(recvs=(Recv(rank ^ 1, chunks),))
