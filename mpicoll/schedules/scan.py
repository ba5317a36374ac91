"""Algorithms for scan: chunk 0 is the vector, and ends as the reduction over all ranks up to the own one."""

from __future__ import annotations

from collections.abc import Iterator

from mpicoll.schedules.model import Recv, Round, Send, algorithm
from mpicoll.schedules.patterns import ceil_log2


@algorithm("scan", ordered=True, rounds="P - 1", sent="min(1, P - 1)")
def linear(rank: int, size: int) -> Iterator[Round]:
    """Pass the sum from rank to rank.

    P-1 rounds; each rank sends n bytes.
    """
    if rank:
        yield Round(recvs=(Recv(rank - 1, range(1), reduce=True),))
    if rank < size - 1:
        yield Round(sends=(Send(rank + 1, range(1)),))


@algorithm("scan", ordered=True, rounds="lg", sent="lg")
def recursive_doubling(rank: int, size: int) -> Iterator[Round]:
    """Receive the partial sum of the rank at distance 1, 2, 4, … below, which ends where the rank's own sum begins.

    lg P rounds; rank 0 sends n lg P bytes. Hillis and Steele 1986.
    """
    for k in range(ceil_log2(size)):
        below, above = rank - (1 << k), rank + (1 << k)
        sends = (Send(above, range(1)),) if above < size else ()
        recvs = (Recv(below, range(1), reduce=True),) if below >= 0 else ()
        if sends or recvs:
            yield Round(sends, recvs)
