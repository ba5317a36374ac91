"""Algorithms for reduce: chunk c is the c-th piece of the vector; the total ends in the root's chunks."""

from __future__ import annotations

from collections.abc import Iterator

from mpicoll.schedules.model import Recv, Round, Send, algorithm
from mpicoll.schedules.patterns import binomial_children, binomial_parent, fold, halvings, power_below, unfold


@algorithm("reduce", ordered=True, any_root=True, rounds="P - 1", sent="min(1, P - 1)")
def linear(rank: int, size: int, root: int) -> Iterator[Round]:
    """Reduce on the root, which receives the vectors one by one: upwards from its own rank, then downwards from it.

    P-1 rounds; the root receives n(P-1) bytes. Keeps the order of ranks for every root.
    """
    if rank != root:
        yield Round(sends=(Send(root, range(1)),))
        return
    for source in (*range(root + 1, size), *reversed(range(root))):
        yield Round(recvs=(Recv(source, range(1), reduce=True),))


@algorithm("reduce", ordered=True, rounds="P - 1", sent="min(1, P - 1)")
def chain(rank: int, size: int, root: int) -> Iterator[Round]:
    """Pass the partial result from rank to rank, from the last rank counted from the root to the root.

    P - 1 rounds; each rank but the root sends n bytes, and none receives more. With large vectors, a rank passes on one
    piece while the next one arrives. The linear pipeline, as in Sanders, Speck and Träff 2009, section 2.
    """
    vrank = (rank - root) % size
    if vrank < size - 1:
        yield Round(recvs=(Recv((rank + 1) % size, range(1), reduce=True),))
    if vrank:
        yield Round(sends=(Send((rank - 1) % size, range(1)),))


@algorithm("reduce", ordered=True, rounds="lg", sent="min(1, P - 1)")
def binomial(rank: int, size: int, root: int) -> Iterator[Round]:
    """Reduce up a binomial tree, receiving from the smallest subtree first.

    lg P rounds; each rank except the root sends n bytes. Thakur, Rabenseifner and Gropp 2005.
    """
    vrank = (rank - root) % size
    for child in binomial_children(vrank, size):
        yield Round(recvs=(Recv((child + root) % size, range(1), reduce=True),))
    if vrank:
        yield Round(sends=(Send((binomial_parent(vrank) + root) % size, range(1)),))


@algorithm(
    "reduce",
    chunks=lambda size, segments: power_below(size),
    ordered=True,
    rounds="2 * lg - (r > 0)",
    sent="(3 * p2 - 2) / (2 * p2) if P > 1 else 0",
)
def reduce_scatter_gather(rank: int, size: int, root: int) -> Iterator[Round]:
    """Recursive halving reduce-scatter, then binomial gather.

    2 lg P rounds, one less if P is not a power of two; the busiest rank sends n(P-1)/P + n/2 bytes if P is a power of
    two. Rabenseifner 2004.
    """
    count = power_below(size)
    vrank = (rank - root) % size
    virtual, host, guest = fold(vrank, size)
    partner = ((vrank ^ 1) + root) % size
    if guest:
        yield Round(sends=(Send(partner, range(count)),))
        return
    if host:
        yield Round(recvs=(Recv(partner, range(count), reduce=True),))
    steps = halvings(virtual, count)
    for mask, keep, give in steps:
        peer = (unfold(virtual ^ mask, size) + root) % size
        yield Round((Send(peer, give),), (Recv(peer, keep, reduce=True),))
    for mask, keep, give in reversed(steps):
        peer = (unfold(virtual ^ mask, size) + root) % size
        if virtual & mask:
            yield Round(sends=(Send(peer, keep),))
            return
        yield Round(recvs=(Recv(peer, give),))
