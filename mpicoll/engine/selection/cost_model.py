"""Prediction of the time that a schedule takes (alpha-beta model: seconds per message and per byte)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

from mpicoll.engine.selection.layout import NodeLayout
from mpicoll.schedules import Algorithm, Cluster, Profile, closed_form, cost, profile
from mpicoll.schedules.model import BLOCKS

_EXACT = 16
"""Largest number of ranks at which each message is simulated: milliseconds for all algorithms of a collective."""

_EXACT_MESSAGES = 64
"""Largest product of ranks and segments, likewise."""

_LOOK = 64
"""Number of rounds of one rank from which the number of messages per round is estimated."""

_PROXY = 8
"""Number of ranks at which estimates are calibrated by a simulation."""


@dataclass(frozen=True, slots=True)
class Link:
    """Seconds per message, and per byte."""

    alpha: float
    beta: float


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of messages within a node (`node`) and between nodes (`network`); seconds per byte reduced (`gamma`)."""

    node: Link
    network: Link
    gamma: float
    measured: bool


TYPICAL = Costs(Link(5e-6, 0.15e-9), Link(20e-6, 0.8e-9), 0.1e-9, measured=False)
"""Costs assumed until `mpicoll tune` has measured: messages through Python and shared memory within a node, and through
10 Gbit/s Ethernet between nodes."""


def predict(algorithm: Algorithm, shape: NodeLayout, nbytes: int, segments: int, costs: Costs) -> float:
    """Return the predicted seconds of `algorithm`.

    Each message is simulated where there are few of them. Otherwise the closed forms give the number of messages on the
    critical path and the bytes that the busiest rank sends; a simulation of a few ranks calibrates the estimate. The
    root is rank 0, and nodes that differ in their number of ranks count as if each rank had a node of its own.
    """
    segments = segments if algorithm.segmented else 1
    seen = _profile(algorithm, shape, segments)
    if seen is not None:
        return seen.seconds(nbytes, _cluster(shape, costs))
    link = costs.node if shape.nodes == 1 else costs.network
    few = NodeLayout(_PROXY, _PROXY, 1) if shape.nodes > 1 else NodeLayout(_PROXY, 1, _PROXY)
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
def _cluster(shape: NodeLayout, costs: Costs) -> Cluster:
    return Cluster(
        *_grid(shape), costs.node.alpha, costs.node.beta, costs.network.alpha, costs.network.beta, costs.gamma
    )


def _grid(shape: NodeLayout) -> tuple[int, int]:
    return (shape.nodes, shape.ranks // shape.nodes) if shape.even else (shape.ranks, 1)


@lru_cache(maxsize=1024)
def _profile(algorithm: Algorithm, shape: NodeLayout, segments: int) -> Profile | None:
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
