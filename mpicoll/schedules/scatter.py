"""Algorithms for scatter: chunk i is the block for rank i; the root's chunks are only read."""

from __future__ import annotations

from collections.abc import Iterator

from mpicoll.schedules.model import Recv, Round, Send, algorithm
from mpicoll.schedules.patterns import binomial_children, binomial_parent, binomial_subtree, wrap


@algorithm("scatter", rounds="min(1, P - 1)", sent="(P - 1) / P")
def linear(rank: int, size: int, root: int) -> Iterator[Round]:
    """Send each rank its block from the root.

    One round of P-1 messages; the root sends n(P-1)/P bytes, and each block is sent once.
    """
    if rank != root:
        yield Round(recvs=(Recv(root, (rank,)),))
    elif size > 1:
        yield Round(sends=tuple(Send(to, (to,)) for to in range(size) if to != root))


@algorithm("scatter", rounds="lg", sent="(P - 1) / P")
def binomial(rank: int, size: int, root: int) -> Iterator[Round]:
    """Send down a binomial tree, to the largest subtree first.

    lg P rounds; the root sends n(P-1)/P bytes. Thakur, Rabenseifner and Gropp 2005.
    """
    vrank = (rank - root) % size
    if vrank:
        blocks = binomial_subtree(vrank, size)
        yield Round(recvs=(Recv((binomial_parent(vrank) + root) % size, wrap(rank, len(blocks), size)),))
    for child in reversed(binomial_children(vrank, size)):
        blocks = binomial_subtree(child, size)
        yield Round(sends=(Send((child + root) % size, wrap(child + root, len(blocks), size)),))
