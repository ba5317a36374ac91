"""Algorithms for bcast: chunk c is the c-th piece of the vector; the root's chunks are only read."""

from __future__ import annotations

from collections.abc import Iterator

from mpicoll.schedules.model import Recv, Round, Send, algorithm
from mpicoll.schedules.patterns import binomial_children, binomial_parent, binomial_subtree


@algorithm("bcast", rounds="lg", sent="lg")
def binomial(rank: int, size: int, root: int) -> Iterator[Round]:
    """Send down a binomial tree, to the largest subtree first.

    lg P rounds; the root sends n lg P bytes. Thakur, Rabenseifner and Gropp 2005.
    """
    vrank = (rank - root) % size
    if vrank:
        yield Round(recvs=(Recv((binomial_parent(vrank) + root) % size, range(1)),))
    for child in reversed(binomial_children(vrank, size)):
        yield Round(sends=(Send((child + root) % size, range(1)),))


@algorithm(
    "bcast",
    chunks=lambda size, segments: segments,
    segmented=True,
    rounds="P + S - 2 if P > 1 else 0",
    sent="min(1, P - 1)",
)
def chain(rank: int, size: int, root: int, *, segments: int) -> Iterator[Round]:
    """Pass segments from rank to rank: while one segment is received, the previous one is sent.

    P + S - 2 rounds; each rank sends n bytes. The linear pipeline, as in Sanders, Speck and Träff 2009, section 2.
    """
    vrank = (rank - root) % size
    last = vrank == size - 1
    for time in range(segments + 1 if size > 1 else 0):
        sends = (Send((rank + 1) % size, (time - 1,)),) if time > 0 and not last else ()
        recvs = (Recv((rank - 1) % size, (time,)),) if time < segments and vrank else ()
        if sends or recvs:
            yield Round(sends, recvs)


@algorithm("bcast", chunks=lambda size, segments: size, rounds="lg + P - 1", sent="2 * (P - 1) / P")
def scatter_allgather(rank: int, size: int, root: int) -> Iterator[Round]:
    """Binomial scatter of P pieces, then ring allgather without the pieces that a rank still has from the scatter.

    lg P + P - 1 rounds; the root sends 2n(P-1)/P bytes. Barnett, Gupta, Payne, Shuler, van de Geijn and Watts 1994.
    """
    vrank = (rank - root) % size
    if vrank:
        yield Round(recvs=(Recv((binomial_parent(vrank) + root) % size, binomial_subtree(vrank, size)),))
    for child in reversed(binomial_children(vrank, size)):
        yield Round(sends=(Send((child + root) % size, binomial_subtree(child, size)),))
    has, right_has = binomial_subtree(vrank, size), binomial_subtree((vrank + 1) % size, size)
    for step in range(size - 1):
        mine, theirs = (vrank - step) % size, (vrank - step - 1) % size
        sends = (Send((rank + 1) % size, (mine,)),) if mine not in right_has else ()
        recvs = (Recv((rank - 1) % size, (theirs,)),) if theirs not in has else ()
        if sends or recvs:
            yield Round(sends, recvs)
