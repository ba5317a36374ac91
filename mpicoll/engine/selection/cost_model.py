"""Prediction of the time that a schedule takes (alpha-beta model: seconds per message and per byte)."""

from __future__ import annotations

from functools import lru_cache
from itertools import islice

from mpicoll.collective_kinds import BLOCKS
from mpicoll.engine.selection.costs import Costs, Link
from mpicoll.engine.selection.layout import NodeLayout
from mpicoll.schedules import Algorithm, Cluster, Profile, closed_form, cost, profile

_MAX_SIMULATED_RANKS = 16
"""Largest number of ranks at which each message is simulated: milliseconds for all algorithms of a collective."""

_MAX_SIMULATED_MESSAGES = 64
"""Largest product of ranks and segments, likewise."""

_SAMPLED_ROUNDS = 64
"""Number of rounds of one rank from which the number of messages per round is estimated."""

_CALIBRATION_RANKS = 8
"""Number of ranks at which estimates are calibrated by a simulation."""


def predict(algorithm: Algorithm, shape: NodeLayout, nbytes: int, segments: int, costs: Costs) -> float:
    """Return the predicted seconds of `algorithm`.

    Each message is simulated where there are few of them. Otherwise the closed forms give the number of messages on the
    critical path and the bytes that the busiest rank sends; a simulation of a few ranks calibrates the estimate. The
    root is rank 0, and nodes that differ in their number of ranks count as if each rank were on a separate node.
    """
    segments = segments if algorithm.segmented else 1
    simulated = _get_profile(algorithm, shape, segments)
    if simulated is not None:
        return simulated.seconds(nbytes, _make_cluster(shape, costs))
    link = costs.node if shape.nodes == 1 else costs.network
    ranks = _CALIBRATION_RANKS
    proxy = NodeLayout(ranks, ranks, 1) if shape.nodes > 1 else NodeLayout(ranks, 1, ranks)
    pieces = min(segments, _MAX_SIMULATED_MESSAGES // _CALIBRATION_RANKS)
    calibration = _get_profile(algorithm, proxy, pieces)
    assert calibration is not None
    exact = calibration.seconds(nbytes, _make_cluster(proxy, costs))
    estimate = _estimate_seconds(algorithm, _CALIBRATION_RANKS, pieces, nbytes, link, costs.gamma)
    correction = exact / estimate if estimate else 1.0
    return correction * _estimate_seconds(algorithm, shape.ranks, segments, nbytes, link, costs.gamma)


def _estimate_seconds(algorithm: Algorithm, size: int, segments: int, nbytes: int, link: Link, gamma: float) -> float:
    messages, moved, reduced = _compute_bounds(algorithm, size, segments)
    return messages * link.alpha + (moved * link.beta + reduced * gamma) * nbytes


@lru_cache(maxsize=256)
def _make_cluster(shape: NodeLayout, costs: Costs) -> Cluster:
    return Cluster(
        *_get_grid(shape), costs.node.alpha, costs.node.beta, costs.network.alpha, costs.network.beta, costs.gamma
    )


def _get_grid(shape: NodeLayout) -> tuple[int, int]:
    return (shape.nodes, shape.ranks // shape.nodes) if shape.even else (shape.ranks, 1)


@lru_cache(maxsize=1024)
def _get_profile(algorithm: Algorithm, shape: NodeLayout, segments: int) -> Profile | None:
    """Return the simulated profile of `algorithm`; None if there are too many messages to simulate."""
    if shape.ranks > _MAX_SIMULATED_RANKS or shape.ranks * segments > _MAX_SIMULATED_MESSAGES:
        return None
    return profile(algorithm, *_get_grid(shape), segments=segments)


@lru_cache(maxsize=1024)
def _compute_bounds(algorithm: Algorithm, size: int, segments: int) -> tuple[float, float, float]:
    """Return the messages on the critical path, and lower bounds of the bytes sent and reduced, in units of n."""
    rounds, sent = closed_form(algorithm, size, segments)
    # Messages of one round wait for each other where they share a port; the root, if there is one, has most of them.
    first_rounds = list(islice(algorithm.steps(0, size, 0, segments), _SAMPLED_ROUNDS))
    scale = max(1.0, rounds / _SAMPLED_ROUNDS)
    messages = max(float(rounds), scale * sum(max(len(one.sends), len(one.recvs)) for one in first_rounds))
    received = scale * sum(len(recv.chunks) for one in first_rounds for recv in one.recvs)
    # In each round at least one chunk is sent: in trees the busiest rank is not busy all the time.
    chunks = size if algorithm.collective in BLOCKS else algorithm.slots(size, segments)[0]
    moved = max(float(sent), rounds / chunks, received / chunks) if chunks else 0.0
    return messages, moved, moved * _compute_reduced_share(algorithm)


@lru_cache(maxsize=256)
def _compute_reduced_share(algorithm: Algorithm) -> float:
    total = cost(algorithm, _CALIBRATION_RANKS)
    return float(total.reduced / max(total.sent, total.received)) if total.received else 0.0
