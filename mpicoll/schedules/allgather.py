"""Algorithms for allgather: chunk i is the block of rank i; a rank's own chunk is only read."""

from __future__ import annotations

from collections.abc import Iterator

from mpicoll.schedules.model import Recv, Round, Send, algorithm
from mpicoll.schedules.patterns import ceil_log2, fold, power_below, unfold, wrap


@algorithm("allgather", rounds="P - 1", sent="(P - 1) / P")
def ring(rank: int, size: int) -> Iterator[Round]:
    """Pass each block once around the ring.

    P-1 rounds; each rank sends n(P-1)/P bytes, to its right neighbour only. Thakur, Rabenseifner and Gropp 2005.
    """
    left, right = (rank - 1) % size, (rank + 1) % size
    for step in range(size - 1):
        yield Round((Send(right, ((rank - step) % size,)),), (Recv(left, ((rank - step - 1) % size,)),))


@algorithm("allgather", rounds="lg", sent="(P - 1) / P")
def bruck(rank: int, size: int) -> Iterator[Round]:
    """Double, in each round, the run of blocks that starts with the rank's own: receive the run that follows it.

    lg P rounds for every P; each rank sends n(P-1)/P bytes. Bruck, Ho, Kipnis, Upfal and Weathersby 1997; blocks are
    received in their final place, so the last rotation of that algorithm is not needed.
    """
    for k in range(ceil_log2(size)):
        have = 1 << k
        count = min(have, size - have)
        yield Round(
            (Send((rank - have) % size, wrap(rank, count, size)),),
            (Recv((rank + have) % size, wrap(rank + have, count, size)),),
        )


@algorithm(
    "allgather",
    rounds="lg + (r > 0)",
    sent="(p2 - 1 + sum(min(r, 2**k) for k in range(lg - (r > 0))) + (P - 1 if r else 0)) / P",
)
def recursive_doubling(rank: int, size: int) -> Iterator[Round]:
    """Exchange all blocks received so far with the peer at distance 1, 2, 4, …

    lg P rounds and n(P-1)/P bytes per rank if P is a power of two; otherwise guests send their block to their hosts
    first and receive all others at the end: one round more and up to twice the bytes.
    Thakur, Rabenseifner and Gropp 2005.
    """
    virtual, host, guest = fold(rank, size)
    if guest:
        yield Round(sends=(Send(rank ^ 1, range(rank, rank + 1)),))
        yield Round(recvs=(Recv(rank ^ 1, wrap(rank + 1, size - 1, size)),))
        return
    if host:
        yield Round(recvs=(Recv(rank ^ 1, range(rank + 1, rank + 2)),))
    for k in range(ceil_log2(power_below(size))):
        peer = virtual ^ 1 << k
        mine, theirs = virtual >> k << k, peer >> k << k
        yield Round(
            (Send(unfold(peer, size), range(unfold(mine, size), unfold(mine + (1 << k), size))),),
            (Recv(unfold(peer, size), range(unfold(theirs, size), unfold(theirs + (1 << k), size))),),
        )
    if host:
        yield Round(sends=(Send(rank ^ 1, wrap(rank + 2, size - 1, size)),))
