"""The placement of an algorithm on the nodes of a cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

from mpicoll.errors import AlgorithmError
from mpicoll.schedules.cost import chunks_in_n, closed_form
from mpicoll.schedules.load_profile import Load, Profile, pareto_front
from mpicoll.schedules.model import Algorithm, Round


class Placement(NamedTuple):
    """An algorithm on `nodes` nodes of `per_node` ranks and `links` network links each."""

    algorithm: Algorithm
    nodes: int
    per_node: int
    links: int
    segments: int

    @property
    def size(self) -> int:
        return self.nodes * self.per_node

    def steps(self, rank: int) -> Iterator[Round]:
        return self.algorithm.steps(rank, self.size, 0, self.segments)

    def agrees(self, found: Profile) -> bool:
        """Return True if the closed forms agree with the profile of a sample of the ranks."""
        return (found.rounds, found.sent) == closed_form(self.algorithm, self.size, self.segments)

    def budget_error(self, budget: int) -> AlgorithmError:
        """Return the error for more than `budget` messages to follow."""
        name = f"{self.algorithm.collective}/{self.algorithm.name}"
        pieces = f" in {self.segments} segments" if self.algorithm.segmented else ""
        less = ", or fewer segments" if self.algorithm.segmented else ""
        return AlgorithmError(
            f"{name} on {self.size} ranks{pieces} has more than {budget} messages to follow; give a larger budget{less}"
        )

    def profile(self, levels: Counter[frozenset[Load]], rounds: int, sent: int, crossing: int, seen: str) -> Profile:
        """Return the profile with the given loads by level, each level with its count."""
        chunks = chunks_in_n(self.algorithm, self.size, self.segments)
        fronts: Counter[tuple[Load, ...]] = Counter()
        for loads, count in levels.items():
            fronts[pareto_front(loads)] += count
        return Profile(
            algorithm=self.algorithm,
            size=self.size,
            segments=self.segments,
            chunks=chunks,
            rounds=rounds,
            levels=tuple(fronts.items()),
            sent=Fraction(sent, chunks),
            crossing=Fraction(crossing, chunks),
            seen=seen,
        )
