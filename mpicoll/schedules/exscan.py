"""Algorithms for exscan: chunk 0 is the vector, chunk 1 ends as the reduction over lower ranks.

Chunk 0 may be overwritten; chunk 1 of rank 0 stays undefined.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpicoll.schedules.model import Recv, Reduce, Round, Send, algorithm
from mpicoll.schedules.patterns import ceil_log2


@algorithm("exscan", scratch=1, ordered=True, rounds="P - 1", sent="min(1, P - 1)")
def linear(rank: int, size: int) -> Iterator[Round]:
    """Pass the sum from rank to rank.

    P-1 rounds; each rank sends n bytes.
    """
    last = rank == size - 1
    if rank:
        yield Round(recvs=(Recv(rank - 1, (1,)),), then=() if last else (Reduce(1, 0),))
    if not last:
        yield Round(sends=(Send(rank + 1, (0,)),))


@algorithm("exscan", scratch=2, ordered=True, rounds="lg", sent="lg")
def recursive_doubling(rank: int, size: int) -> Iterator[Round]:
    """Receive the partial sum of the rank at distance 1, 2, 4, … below, which ends where the rank's own sum begins.

    lg P rounds; rank 0 sends n lg P bytes. Hillis and Steele 1986, with a second sum without the rank's own vector.
    """
    for k in range(ceil_log2(size)):
        below, above = rank - (1 << k), rank + (1 << k)
        sends = (Send(above, (0,)),) if above < size else ()
        if below < 0:
            if sends:
                yield Round(sends)
            continue
        into = 2 if k else 1
        then = [Reduce(into, 1)] if k else []
        if rank + (2 << k) < size:
            then.append(Reduce(into, 0))
        yield Round(sends, (Recv(below, (into,)),), tuple(then))
