"""The load profile of an algorithm, which prices it on a described cluster."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from mpicoll.schedules.model import Algorithm


@dataclass(frozen=True, slots=True)
class Cluster:
    """`nodes` times `ranks_per_node` ranks, and the costs of messages: seconds per message and per byte.

    `gamma` is the seconds per byte reduced; `links` the number of network links, each of `net_beta`, that the ranks of
    a node share. A rank uses one link at a time.

    Example:
        >>> cluster = mpicoll.schedules.Cluster(nodes=16, ranks_per_node=8, net_alpha=2e-6, net_beta=1 / 12.5e9)
        >>> cluster.size
        128
    """

    nodes: int
    ranks_per_node: int
    node_alpha: float = 0.5e-6
    node_beta: float = 0.1e-9
    net_alpha: float = 2e-6
    net_beta: float = 0.04e-9
    gamma: float = 0.05e-9
    links: int = 1

    @property
    def size(self) -> int:
        return self.nodes * self.ranks_per_node


class Load(NamedTuple):
    """The load of a port on one level: messages and chunks per link class, and chunks to reduce at the end."""

    node_messages: float = 0
    node_chunks: float = 0
    net_messages: float = 0
    net_chunks: float = 0
    reduced: float = 0


@dataclass(frozen=True, slots=True)
class Profile:
    """The summary of an algorithm on a given number of ranks: loads by level, which price any size.

    `levels` pairs sets of loads, of which the heaviest determines the duration of a level, with the number of levels
    that have exactly these loads. `sent` (by the busiest rank) and `crossing` (in one direction through the links of
    the busiest node, on all levels together) are multiples of n, the bytes of the vector or of all P blocks of one
    buffer; `chunks` is the number of chunks of n. `seen` names the ranks examined: ``one``, ``all`` or ``sample``.

    Example:
        >>> profile = mpicoll.schedules.profile("allreduce/ring", nodes=2, ranks_per_node=4)
        >>> profile.size, profile.rounds, profile.sent
        (8, 14, Fraction(7, 4))
    """

    algorithm: Algorithm
    size: int
    segments: int
    chunks: int
    rounds: int
    levels: tuple[tuple[tuple[Load, ...], int], ...]
    sent: Fraction
    crossing: Fraction
    seen: str

    def seconds(self, nbytes: float, cluster: Cluster) -> float:
        """Return the time for `nbytes` = n. The cluster must have the shape that the profile was made for."""
        weights = self._weights(nbytes, cluster)
        return sum(count * max(_dot(load, weights) for load in loads) for loads, count in self.levels)

    def decisive(self, nbytes: float, cluster: Cluster) -> Load:
        """Return the sum of the loads that determined the levels, in bytes instead of chunks; its product with the
        cluster's costs is :meth:`seconds`."""
        weights = self._weights(nbytes, cluster)
        total = [0.0] * 5
        for loads, count in self.levels:
            heaviest = max(loads, key=lambda load: _dot(load, weights))
            total = [old + count * new for old, new in zip(total, heaviest, strict=True)]
        chunk = nbytes / self.chunks
        return Load(total[0], total[1] * chunk, total[2], total[3] * chunk, total[4] * chunk)

    def _weights(self, nbytes: float, cluster: Cluster) -> Load:
        chunk = nbytes / self.chunks
        return Load(
            cluster.node_alpha,
            cluster.node_beta * chunk,
            cluster.net_alpha,
            cluster.net_beta * chunk,
            cluster.gamma * chunk,
        )


def total_load(messages: Iterable[tuple[bool, int]], reduced: int) -> Load:
    """Return the load of one port; each message is a pair: True if it leaves the node, and its chunks."""
    near = near_chunks = far = far_chunks = 0
    for leaves, n in messages:
        if leaves:
            far, far_chunks = far + 1, far_chunks + n
        else:
            near, near_chunks = near + 1, near_chunks + n
    return Load(near, near_chunks, far, far_chunks, reduced)


def _dot(load: Load, weights: Load) -> float:
    a, b, c, d, e = load
    v, w, x, y, z = weights
    return a * v + b * w + c * x + d * y + e * z


def pareto_front(loads: Iterable[Load]) -> tuple[Load, ...]:
    """Return the loads that are the heaviest for some costs: those that no other load dominates in all components."""
    front: list[Load] = []
    for load in sorted(loads, reverse=True):
        if not any(all(a >= b for a, b in zip(other, load, strict=True)) for other in front):
            front.append(load)
    return tuple(front)
