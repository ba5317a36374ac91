"""Laws of bytes: what passes through the link of each rank in one step of each method, in closed form.

A law gives the bytes that a rank sends as a multiple of N, the bytes of the model; each rank receives as many as it
sends. `mpicoll.schedules.traffic` counts the same from the schedules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from mpicoll.schedules.patterns import binomial_children, ceil_log2, fold, power_below


@dataclass(frozen=True, slots=True)
class Law:
    """`formula` is the law of the busiest rank as text, `source` where the method comes from.

    ``busiest(ranks, servers)`` evaluates the formula; ``of_rank(rank, ranks, servers)`` is the law of any rank.
    """

    formula: str
    source: str
    busiest: Callable[[int, int], Fraction]
    of_rank: Callable[[int, int, int], Fraction]


def _share(ranks: int) -> Fraction:
    """Return what a reduce-scatter and an allgather of minimal traffic send together."""
    return Fraction(2 * (ranks - 1), ranks)


def _halving_doubling(rank: int, ranks: int) -> Fraction:
    """Return the law of a rank: of those beyond a power of two, each passes its vector to another one, and back."""
    _, host, guest = fold(rank, ranks)
    return Fraction(1) if guest else _share(power_below(ranks)) + host


LAWS: dict[str, Law] = {
    "parameter_server": Law(
        "max(1, (P - S) / S) N",
        "Li et al., OSDI 2014",
        lambda ranks, servers: max(Fraction(1), Fraction(ranks - servers, servers)),
        lambda rank, ranks, servers: Fraction(ranks - servers, servers) if rank < servers else Fraction(1),
    ),
    "master_worker": Law(
        "(P - 1) N",
        "the textbook star",
        lambda ranks, _: Fraction(ranks - 1),
        lambda rank, ranks, _: Fraction(1 if rank else ranks - 1),
    ),
    "ring": Law(
        "2 (P - 1) / P N",
        "Patarasuk and Yuan 2009",
        lambda ranks, _: _share(ranks),
        lambda rank, ranks, _: _share(ranks),
    ),
    "tree": Law(
        "ceil(log2 P) N",
        "Thakur, Rabenseifner and Gropp 2005",
        lambda ranks, _: Fraction(ceil_log2(ranks)),
        lambda rank, ranks, _: Fraction(len(binomial_children(rank, ranks)) + (rank > 0)),
    ),
    "halving_doubling": Law(
        "2 (Q - 1) / Q N, + N if P > Q = 2^floor(log2 P)",
        "Rabenseifner 2004",
        lambda ranks, _: _share(power_below(ranks)) + (ranks > power_below(ranks)),
        lambda rank, ranks, _: _halving_doubling(rank, ranks),
    ),
}
"""The law of each method that has one."""
