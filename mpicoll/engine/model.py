"""What selection knows of a communicator: its shape, what was tuned for it, and what its messages are taken to cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import TypeAlias

from mpicoll.schedules import Algorithm, Cluster, Profile, closed_form, cost, profile
from mpicoll.schedules.model import BLOCKS

Rule: TypeAlias = tuple[float, float, str]
"""From, to (bytes), algorithm."""

Rules: TypeAlias = tuple[tuple[str, tuple[Rule, ...]], ...]
"""Rules by collective. A tuple, so that it can be a cache key."""

_EXACT = 16
"""Up to so many ranks, an algorithm's messages are followed: some milliseconds for all algorithms of a collective."""

_EXACT_MESSAGES = 64
"""Up to so many ranks times segments, likewise."""

_LOOK = 64
"""How many rounds of one rank show how many messages there are in a round."""

_PROXY = 8
"""The number of ranks by which the estimates for more of them are put right."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How many ranks there are, on how many nodes, and how many are on the node that has most."""

    ranks: int
    nodes: int
    per_node: int

    def __str__(self) -> str:
        ranks = f"{self.ranks} rank{'s' * (self.ranks > 1)}"
        if self.nodes == 1:
            return f"{ranks} on 1 node"
        return f"{ranks} on {self.nodes} nodes, {self.per_node} on {'each' if self.even else 'the fullest'}"

    @property
    def even(self) -> bool:
        """Whether all nodes have as many ranks."""
        return self.nodes * self.per_node == self.ranks


@dataclass(frozen=True, slots=True)
class Link:
    """Seconds per message, and per byte."""

    alpha: float
    beta: float


@dataclass(frozen=True, slots=True)
class Costs:
    """What messages cost within a node (`node`) and between nodes (`network`), and seconds per byte reduced."""

    node: Link
    network: Link
    gamma: float
    measured: bool


TYPICAL = Costs(Link(5e-6, 0.15e-9), Link(20e-6, 0.8e-9), 0.1e-9, measured=False)
"""What is assumed until `mpicoll tune` has measured: no machine has just these, but many are like it. Messages go
through Python and shared memory within a node, and through 10 Gbit/s Ethernet between nodes."""


@dataclass(frozen=True, eq=False)
class Table:
    """What was tuned on a machine: for shapes, rules by class of dtypes; and what messages were measured to cost.

    `text` is what it was made of, `source` where that came from."""

    text: str = ""
    source: str = ""
    rules: Mapping[Shape, Mapping[str, Rules]] = field(default_factory=dict)
    costs: Costs = TYPICAL


UNTUNED = Table()
"""Nothing was tuned."""


@dataclass(frozen=True, eq=False)
class Site:
    """Where collectives run. Of equal ones :func:`site` makes one object, so that a cache finds them by identity."""

    shape: Shape
    table: Table


def site(shape: Shape, table: Table = UNTUNED) -> Site:
    """The site of communicators of `shape` for which `table` counts."""
    return _site(shape, table)


_site = lru_cache(maxsize=1024)(Site)


def shape_of(nodes: Sequence[int]) -> Shape:
    """The shape of ranks of which each is on the node of the number in `nodes`."""
    counts: dict[int, int] = {}
    for node in nodes:
        counts[node] = counts.get(node, 0) + 1
    return Shape(len(nodes), len(counts), max(counts.values()))


def predict(algorithm: Algorithm, shape: Shape, nbytes: int, segments: int, costs: Costs) -> float:
    """The seconds that `algorithm` should take.

    Messages are followed where there are few of them. Elsewhere the closed forms say how many there are on the critical
    path, and what the busiest rank sends; how far that is off is taken from a few ranks. The root is rank 0, and nodes
    that differ in their number of ranks count as if each rank had a node of its own.
    """
    segments = segments if algorithm.segmented else 1
    seen = _profile(algorithm, shape, segments)
    if seen is not None:
        return seen.seconds(nbytes, _cluster(shape, costs))
    link = costs.node if shape.nodes == 1 else costs.network
    few = Shape(_PROXY, _PROXY, 1) if shape.nodes > 1 else Shape(_PROXY, 1, _PROXY)
    pieces = min(segments, _EXACT_MESSAGES // _PROXY)
    followed = _profile(algorithm, few, pieces)
    assert followed is not None
    exact = followed.seconds(nbytes, _cluster(few, costs))
    estimate = _estimate(algorithm, _PROXY, pieces, nbytes, link, costs.gamma)
    off = exact / estimate if estimate else 1.0
    return off * _estimate(algorithm, shape.ranks, segments, nbytes, link, costs.gamma)


def _estimate(algorithm: Algorithm, size: int, segments: int, nbytes: int, link: Link, gamma: float) -> float:
    messages, moved, reduced = _bounds(algorithm, size, segments)
    return messages * link.alpha + (moved * link.beta + reduced * gamma) * nbytes


@lru_cache(maxsize=256)
def _cluster(shape: Shape, costs: Costs) -> Cluster:
    return Cluster(
        *_grid(shape), costs.node.alpha, costs.node.beta, costs.network.alpha, costs.network.beta, costs.gamma
    )


def _grid(shape: Shape) -> tuple[int, int]:
    return (shape.nodes, shape.ranks // shape.nodes) if shape.even else (shape.ranks, 1)


@lru_cache(maxsize=1024)
def _profile(algorithm: Algorithm, shape: Shape, segments: int) -> Profile | None:
    """None if there are too many messages."""
    if shape.ranks > _EXACT or shape.ranks * segments > _EXACT_MESSAGES:
        return None
    return profile(algorithm, *_grid(shape), segments=segments)


@lru_cache(maxsize=1024)
def _bounds(algorithm: Algorithm, size: int, segments: int) -> tuple[float, float, float]:
    """Messages on the critical path; lower bounds of what is sent and reduced on it, as multiples of n."""
    rounds, sent = closed_form(algorithm, size, segments)
    # Messages of one round wait for each other where they share a port; the root, if there is one, has most of them.
    seen = list(islice(algorithm.steps(0, size, 0, segments), _LOOK))
    scale = max(1.0, rounds / _LOOK)
    messages = max(float(rounds), scale * sum(max(len(one.sends), len(one.recvs)) for one in seen))
    received = scale * sum(len(recv.chunks) for one in seen for recv in one.recvs)
    # In each round at least one chunk is sent: in trees the busiest rank is not busy all the time.
    chunks = size if algorithm.collective in BLOCKS else algorithm.slots(size, segments)[0]
    moved = max(float(sent), rounds / chunks, received / chunks) if chunks else 0.0
    return messages, moved, moved * _reduced_share(algorithm)


@lru_cache(maxsize=256)
def _reduced_share(algorithm: Algorithm) -> float:
    few = cost(algorithm, _PROXY)
    return float(few.reduced / max(few.sent, few.received)) if few.received else 0.0
