"""Algorithms for reduce_scatter: chunk i is the block of rank i; the own chunk ends as the total, others may go."""

from __future__ import annotations

from collections.abc import Iterator

from mpicoll.schedules.model import Recv, Round, Send, algorithm
from mpicoll.schedules.patterns import ceil_log2, fold, power_below, unfold


@algorithm("reduce_scatter", rounds="P - 1", sent="(P - 1) / P")
def ring(rank: int, size: int) -> Iterator[Round]:
    """Pass each block once around the ring, from the rank after its owner to its owner, reducing it at each rank.

    P-1 rounds; each rank sends n(P-1)/P bytes, to its right neighbour only. Patarasuk and Yuan 2009.
    """
    left, right = (rank - 1) % size, (rank + 1) % size
    for step in range(size - 1):
        mine, theirs = (rank - step - 1) % size, (rank - step - 2) % size
        yield Round((Send(right, (mine,)),), (Recv(left, (theirs,), reduce=True),))


@algorithm("reduce_scatter", rounds="P - 1", sent="(P - 1) / P")
def pairwise(rank: int, size: int) -> Iterator[Round]:
    """Send each rank its block directly, the nearest first, and reduce the rank's own block.

    P-1 rounds; each rank sends n(P-1)/P bytes. Only the rank's own chunk is written.
    Thakur, Rabenseifner and Gropp 2005.
    """
    for step in range(1, size):
        to, source = (rank + step) % size, (rank - step) % size
        yield Round((Send(to, (to,)),), (Recv(source, (rank,), reduce=True),))


@algorithm("reduce_scatter", rounds="lg + (r > 0)", sent="1 if r else (P - 1) / P")
def recursive_halving(rank: int, size: int) -> Iterator[Round]:
    """Exchange half of the remaining blocks with the peer at distance P/2, P/4, …

    lg P rounds and n(P-1)/P bytes per rank if P is a power of two; otherwise guests send their operand to their hosts
    first and receive their block at the end: one round more and n bytes. Thakur, Rabenseifner and Gropp 2005.
    """
    virtual, host, guest = fold(rank, size)
    if guest:
        yield Round(sends=(Send(rank ^ 1, range(size)),))
        yield Round(recvs=(Recv(rank ^ 1, range(rank, rank + 1)),))
        return
    if host:
        yield Round(recvs=(Recv(rank ^ 1, range(size), reduce=True),))
    for k in reversed(range(ceil_log2(power_below(size)))):
        peer = virtual ^ 1 << k
        mine, theirs = virtual >> k << k, peer >> k << k
        yield Round(
            (Send(unfold(peer, size), range(unfold(theirs, size), unfold(theirs + (1 << k), size))),),
            (Recv(unfold(peer, size), range(unfold(mine, size), unfold(mine + (1 << k), size)), reduce=True),),
        )
    if host:
        yield Round(sends=(Send(rank ^ 1, range(rank + 1, rank + 2)),))


@algorithm("reduce_scatter", ordered=True, rounds="P - 1", sent="(P - 1) / P")
def linear(rank: int, size: int) -> Iterator[Round]:
    """Send each rank its block directly; reduce the rank's own block upwards from its own rank, then downwards from it.

    P-1 rounds; each rank sends n(P-1)/P bytes, those for higher ranks at once. Only the rank's own chunk is written,
    and the order of ranks is kept.
    """
    for step in range(1, size):
        sends = [Send(rank - step, (rank - step,))] if step <= rank else []
        if step == size - 1 - rank:
            sends += [Send(to, (to,)) for to in range(rank + 1, size)]
        source = rank + step if rank + step < size else size - 1 - step
        yield Round(tuple(sends), (Recv(source, (rank,), reduce=True),))
