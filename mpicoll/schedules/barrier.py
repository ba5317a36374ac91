"""Algorithms for barrier: messages are tokens without chunks."""

from __future__ import annotations

from collections.abc import Iterator

from mpicoll.schedules.model import Recv, Round, Send, algorithm
from mpicoll.schedules.patterns import ceil_log2


@algorithm("barrier", chunks=0, rounds="lg", sent="0")
def dissemination(rank: int, size: int) -> Iterator[Round]:
    """Send a token to the rank at distance 1, 2, 4, … above, for all ranks known to have entered.

    lg P rounds of P tokens. Hensgen, Finkel and Manber 1988.
    """
    for k in range(ceil_log2(size)):
        yield Round((Send((rank + (1 << k)) % size),), (Recv((rank - (1 << k)) % size),))
