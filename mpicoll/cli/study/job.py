"""Main function of each rank of a study: time the steps of all methods in rotation, and count the bytes of its links.

The time of a block of steps is that of its slowest rank. All ranks follow the decisions of rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np

from mpicoll.cli import formatting
from mpicoll.cli.bench.measure import Wrong
from mpicoll.cli.bench.report import describe_run
from mpicoll.cli.bench.team import Team
from mpicoll.cli.study.methods import Method, Model, list_methods, list_without_workers, prepare_block
from mpicoll.cli.study.wire import count_link_bytes
from mpicoll.engine.world import world
from mpicoll.errors import AlgorithmError, ArgumentError

_BLOCK = 4e-3
"""Target duration of a block of steps in seconds."""

_BLOCKS = (7, 101)
"""Minimum and maximum number of blocks."""


@dataclass(frozen=True, slots=True)
class Measurements:
    """The names of the methods to measure, the numbers of servers, and the sizes of the model in bytes, with about
    `seconds` for each size. `progress`: draw a progress bar."""

    names: tuple[str, ...]
    servers: tuple[int, ...]
    sizes: tuple[int, ...]
    seconds: float
    progress: bool


def main(rank: int, asked: Measurements) -> dict[str, Any] | None:
    """Measure as one rank; return all measurements on rank 0. `rank` is passed by :func:`mpicoll.spawn` and not used.

    Raises Wrong on all ranks if a method gives wrong weights, ArgumentError if there is only one rank. Collective.
    """
    comm = world()
    if comm.size == 1:
        raise ArgumentError("study sync: a single rank has nothing to synchronise; start 2 or more")
    team = Team(comm)
    methods = list_methods(asked.names, asked.servers, comm.size)
    absent = list_without_workers(asked.names, asked.servers, comm.size)
    points = []
    with formatting.steps(team.rank == 0 and asked.progress, len(asked.sizes) * len(methods) * 2) as step:
        for nbytes in asked.sizes:
            points += _measure_size(team, methods, nbytes, asked.seconds, absent, step)
    team.barrier()
    return {**describe_run(comm), "points": points, "absent": absent} if team.rank == 0 else None


def _measure_size(
    team: Team,
    methods: Sequence[Method],
    nbytes: int,
    seconds: float,
    absent: dict[str, str],
    show: Callable[[str, int], None],
) -> list[dict[str, Any]]:
    """Return the results of all methods at one size of the model; `absent` gets the reasons for those without one."""
    models: dict[Method, Model] = {}
    counts: dict[Method, int] = {}
    lap = 0.0
    label = formatting.nbytes(nbytes)
    for method in methods:
        show(f"{team.size} ranks, {label}, {method.label}", 1)
        model = None if method.label in absent else _prepare_checked(team, method, nbytes, absent)
        if model is not None:
            models[method] = model
            (once,) = team.max_over_ranks([min(_time_steps(team, method, model, 1) for _ in range(2))])
            counts[method] = max(1, min(256, ceil(_BLOCK / once)))
            lap += counts[method] * once
    wires = {method: count_link_bytes(team, method, model) for method, model in models.items()}
    times: dict[Method, list[float]] = {method: [] for method in models}
    turns = list(models)
    for number in range(int(team.agree(min(max(seconds // lap, _BLOCKS[0]), _BLOCKS[1]))) if turns else 0):
        first = number % len(turns)
        for method in turns[first:] + turns[:first]:
            times[method].append(_time_steps(team, method, models[method], counts[method]))
    show(label, len(methods))
    found = []
    for method in turns:
        blocks = team.max_over_ranks(times[method])
        found.append(
            {
                "method": method.name,
                "servers": method.servers,
                "nbytes": nbytes // 4 * 4,
                "seconds": float(np.median(blocks)),
                "blocks": blocks,
                "steps_per_block": counts[method],
                "wire": wires[method],
            }
        )
    return found


def _time_steps(team: Team, method: Method, model: Model, count: int) -> float:
    """Return the seconds per step of a block of `count` steps on this rank."""
    train = prepare_block(method, model, count)
    team.barrier()
    return train() / count


def _prepare_checked(team: Team, method: Method, nbytes: int, absent: dict[str, str]) -> Model | None:
    """Return the model of a method after a first step with the right result; None if it can't serve these ranks."""
    model = Model(nbytes, team.rank)
    reason, right = "", True
    try:
        train = prepare_block(method, model, 0)
        team.barrier()
        train()
        right = team.rank < method.servers or model.check(range(method.servers, team.size))
    except AlgorithmError as error:
        reason = str(error)
    answers = team.all((reason, right))
    reason = next((one for one, _ in answers if one), "")
    if reason:
        absent[method.label] = reason
        return None
    wrong = [rank for rank, (_, right) in enumerate(answers) if not right]
    if wrong:
        raise Wrong(f"study sync: {method.label} of {nbytes} B gives wrong weights on rank {wrong[0]} of {team.size}")
    return model
