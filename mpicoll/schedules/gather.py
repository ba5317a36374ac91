"""Algorithms for gather: chunk i is the block of rank i; a rank's own chunk is only read."""

from __future__ import annotations

from collections.abc import Iterator

from mpicoll.schedules.model import Recv, Round, Send, algorithm
from mpicoll.schedules.patterns import binomial_children, binomial_parent, binomial_subtree, wrap


@algorithm("gather", rounds="min(1, P - 1)", sent="min(1, P - 1) / P")
def linear(rank: int, size: int, root: int) -> Iterator[Round]:
    """Send each block to the root, which posts all receives at once.

    One round of P-1 messages; each rank sends n/P bytes, and each block is sent once.
    """
    if rank != root:
        yield Round(sends=(Send(root, (rank,)),))
    elif size > 1:
        yield Round(recvs=tuple(Recv(source, (source,)) for source in range(size) if source != root))


@algorithm("gather", rounds="lg", sent="max(p2 / 2, r) / P if P > 1 else 0")
def binomial(rank: int, size: int, root: int) -> Iterator[Round]:
    """Send up a binomial tree, receiving from the smallest subtree first.

    lg P rounds; the busiest rank sends n/2 bytes if P is a power of two. For small blocks.
    Thakur, Rabenseifner and Gropp 2005.
    """
    vrank = (rank - root) % size
    for child in binomial_children(vrank, size):
        blocks = binomial_subtree(child, size)
        yield Round(recvs=(Recv((child + root) % size, wrap(child + root, len(blocks), size)),))
    if vrank:
        blocks = binomial_subtree(vrank, size)
        yield Round(sends=(Send((binomial_parent(vrank) + root) % size, wrap(rank, len(blocks), size)),))
