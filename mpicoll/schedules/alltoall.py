"""Algorithms for alltoall: chunk d is the block for rank d and only read, chunk P + s the block from rank s."""

from __future__ import annotations

from collections.abc import Iterator

from mpicoll.schedules.model import Copy, Recv, Round, Send, algorithm
from mpicoll.schedules.patterns import ceil_log2


@algorithm("alltoall", rounds="P - 1", sent="(P - 1) / P")
def pairwise(rank: int, size: int) -> Iterator[Round]:
    """Exchange one block per round, with the rank at distance 1, 2, 3, …

    P-1 rounds; each rank sends n(P-1)/P bytes, the minimum. Thakur, Rabenseifner and Gropp 2005.
    """
    yield Round(then=(Copy(rank, size + rank),))
    for step in range(1, size):
        to, source = (rank + step) % size, (rank - step) % size
        yield Round((Send(to, (to,)),), (Recv(source, (size + source,)),))


@algorithm(
    "alltoall",
    scratch=lambda size, segments: size,
    uneven=False,
    rounds="lg",
    sent="sum(P // 2**(k + 1) * 2**k + max(0, P % 2**(k + 1) - 2**k) for k in range(lg)) / P",
)
def bruck(rank: int, size: int) -> Iterator[Round]:
    """Move each block by the powers of two that make up its distance, all blocks with the same power together.

    lg P rounds; each rank sends (n/2) lg P bytes if P is a power of two. For small blocks. Bruck, Ho, Kipnis, Upfal and
    Weathersby 1997.
    """
    yield Round(then=(Copy(rank, size + rank),))
    for k in range(ceil_log2(size)):
        hop = 1 << k
        moving = [distance for distance in range(size) if distance & hop]
        yield Round(
            (Send((rank + hop) % size, tuple(_place(rank, size, d, d & (hop - 1)) for d in moving)),),
            (Recv((rank - hop) % size, tuple(_place(rank, size, d, d & (2 * hop - 1)) for d in moving)),),
        )


def _place(rank: int, size: int, distance: int, gone: int) -> int:
    """Return the chunk in which `rank` keeps the block that goes `distance` ranks far and has `gone` that far by now.

    A block that arrives and the one that leaves in the same round must not meet in one chunk: the number of hops that
    are left decides between the block's final place and scratch, and it is even (none) at the end.
    """
    if not gone:
        return (rank + distance) % size
    if (distance - gone).bit_count() % 2 == 0:
        return size + (rank - distance) % size
    return 2 * size + distance
