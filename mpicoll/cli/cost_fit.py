"""Costs of a cluster, fitted to what ``mpicoll bench`` has measured."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, log
from typing import Any

import numpy as np

from mpicoll import schedules
from mpicoll.errors import ArgumentError
from mpicoll.schedules import Cluster, Profile

COSTS = ("node_alpha", "node_beta", "net_alpha", "net_beta", "gamma")


@dataclass(frozen=True, slots=True)
class Sample:
    """A measured point, and the profile that predicts it."""

    name: str
    nbytes: int
    seconds: float
    profile: Profile


def read_samples(args: argparse.Namespace, cluster: Cluster) -> tuple[Cluster, list[Sample]]:
    """Return `cluster` with the nodes of the file ``args.measured``, and the file's measurements of schedules, by
    algorithm and size. Raises ArgumentError if the file is not one of ``mpicoll bench --json``."""
    try:
        measured = json.loads(args.measured.read_text())
        ranks, nodes = int(measured["ranks"]), int(measured.get("nodes", 1))
        points = [point for point in measured["points"] if point["collective"] == args.collective]
        timed = [
            (name, int(point["nbytes"]), float(result["median"]))
            for point in points
            for name, result in point["contestants"].items()
            if result.get("median")
        ]
        if ranks < 1 or nodes < 1:
            raise ValueError(f"{ranks} ranks, {nodes} nodes")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ArgumentError(
            f"simulate: {args.measured} is not what `mpicoll bench --json` writes: {error!r}"
        ) from error
    if ranks % nodes:
        raise ArgumentError(f"simulate: {ranks} ranks on {nodes} nodes are not equally many on each")
    cluster = replace(cluster, nodes=nodes, ranks_per_node=ranks // nodes, links=args.links)
    known = schedules.algorithms_of(args.collective)
    wanted = args.algorithms.split(",") if args.algorithms else known
    samples = []
    for name, nbytes, seconds in sorted(timed):
        if name in known and name in wanted:
            forecast = schedules.simulate(
                args.collective, cluster, [nbytes], algorithms=[name], segments=args.segments
            )[0]
            if (point := forecast.points[0]) is not None:
                samples.append(Sample(name, nbytes, seconds, point.profile))
    return cluster, samples


def fit_costs(samples: Sequence[Sample], cluster: Cluster) -> Cluster:
    """Return the cluster with the costs, none below 0, that have the least squares of log(predicted / measured).

    A predicted time is linear in the costs for as long as the same ports decide, so each step finds which ones do and
    solves for the costs; a difference over the geometric mean of both times is what the logarithm of their ratio is to
    second order. Which ports decide depends on where one begins, so this begins with fast and with slow networks.
    """
    best, least = cluster, inf
    for factor in (1, 10, 100, 1000):
        now = replace(cluster, net_alpha=cluster.net_alpha * factor, net_beta=cluster.net_beta * factor)
        for _ in range(40 if cluster.nodes > 1 or factor == 1 else 0):
            predicted = [sample.profile.seconds(sample.nbytes, now) for sample in samples]
            loads = [sample.profile.decisive(sample.nbytes, now) for sample in samples]
            weights = [(p * sample.seconds) ** -0.5 for p, sample in zip(predicted, samples, strict=True)]
            now = replace(
                now, **_name_costs(_solve_nonnegative(loads, [sample.seconds for sample in samples], weights))
            )
            error = _measure_error(samples, now)
            if error < least:
                best, least = now, error
            if error == inf:
                break  # some sample would take no time at all, and has no weight any more
    return best


def _name_costs(costs: Sequence[float]) -> dict[str, Any]:
    return dict(zip(COSTS, costs, strict=True))


def _measure_error(samples: Sequence[Sample], cluster: Cluster) -> float:
    predicted = [sample.profile.seconds(sample.nbytes, cluster) for sample in samples]
    return sum(log(p / s.seconds) ** 2 if p > 0 else inf for p, s in zip(predicted, samples, strict=True))


def _solve_nonnegative(
    loads: Sequence[Sequence[float]], seconds: Sequence[float], weights: Sequence[float]
) -> list[float]:
    """Solve weighted least squares with no unknown below 0: the best solution over all sets of nonzero unknowns."""
    matrix = np.array(loads) * np.array(weights)[:, None]
    target = np.array(seconds) * np.array(weights)
    # Latencies count messages and the rest counts bytes: without scaling, one of them would drown in rounding.
    scale = np.linalg.norm(matrix, axis=0)
    there = np.flatnonzero(scale)
    best, least = np.zeros(len(scale)), float(target @ target)
    for bits in range(1, 1 << len(there)):
        columns = [int(column) for place, column in enumerate(there) if bits >> place & 1]
        found = np.linalg.lstsq(matrix[:, columns] / scale[columns], target, rcond=None)[0]
        rest = matrix[:, columns] / scale[columns] @ found - target
        if (found >= 0).all() and float(rest @ rest) < least:
            best, least = np.zeros(len(scale)), float(rest @ rest)
            best[columns] = found / scale[columns]
    return [float(value) for value in best]
