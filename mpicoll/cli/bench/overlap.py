"""Measurement of the part of a collective that is hidden behind computation, as osu_iallreduce defines it.

``pure`` is the time of the i-form and its wait; ``compute`` that of a computation of the same duration; ``total`` is
the time of the i-form, the computation and the wait. The hidden part is ``1 - (total - compute) / pure``, at least 0.

Ranks that share their cores with others have none left for messages while all of them compute; so it can be measured
with fewer ranks that compute.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

import numpy as np

from mpicoll.cli.bench.cases import Case, Workload
from mpicoll.cli.bench.measure import prepare_verified, time_calls
from mpicoll.cli.bench.peers import Contestant, TimedCall
from mpicoll.cli.bench.team import Team

_ROUNDS = (11, 101)
"""Minimum and maximum number of measurements."""

_CALIBRATIONS = 4
"""Maximum number of measurements of a computation that is to take as long as the collective, or up to 5 % longer."""

_BLOCK = 2e-3
"""Minimum duration of a measurement of collectives in seconds."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """Medians in seconds over measurements of the slowest rank, and the percentage that was hidden."""

    workload: Workload
    pure: float
    compute: float
    total: float
    rounds: int

    @property
    def percent(self) -> float:
        return max(0.0, 100 * (1 - (self.total - self.compute) / self.pure))


def overlap(
    team: Team, workload: Workload, contestant: Contestant, computation: str, seconds: float, computing: int | None
) -> Overlap:
    """Measure the overlap in about `seconds`. The contestant's call returns a request to wait for. The first
    `computing` ranks compute; None: all. Collective.

    Raises Wrong on all ranks if the result is wrong.
    """
    begin = prepare_verified(team, contestant, Case(workload, team.rank, contestant.kind)).call

    def pure() -> None:
        begin().wait()

    def block(call: TimedCall, calls: int) -> float:
        return time_calls(call, calls, contestant.barrier or team.barrier)

    def length(calls: int) -> float:
        return float(np.median([team.max_over_ranks([block(pure, calls)])[0] for _ in range(_ROUNDS[0])]))

    calls = ceil(_BLOCK / length(1))
    expected = length(calls)
    compute = _calibrate_computation(team, computation, expected, team.size if computing is None else computing)

    def total() -> None:
        request = begin()
        compute()
        request.wait()

    rounds = int(min(max(seconds // (4 * calls * expected), _ROUNDS[0]), _ROUNDS[1]))
    times = np.array(
        [team.max_over_ranks([block(one, calls) for one in (pure, compute, total)]) for _ in range(rounds)]
    )
    medians = [float(one) for one in np.median(times, axis=0)]
    return Overlap(workload, medians[0], medians[1], medians[2], rounds)


def _calibrate_computation(team: Team, computation: str, seconds: float, computing: int) -> TimedCall:
    """Return a computation that takes about `seconds` on the slowest rank while the first `computing` ranks compute. On
    the other ranks it does nothing."""
    if computation == "sleep":
        return lambda: time.sleep(seconds if team.rank < computing else 0.0)
    work = {"numpy": _vectors, "python": _numbers}[computation]() if team.rank < computing else _do_nothing

    def measure(turns: int) -> float:
        # The least of some: a computation that other programs have slowed down would be too short later.
        return min(team.max_over_ranks([time_calls(lambda: work(turns), 1, team.barrier) for _ in range(3)]))

    turns = 1
    while (took := measure(turns)) <= seconds / 4 and turns < 1 << 24:
        turns *= 2
    # A core that has computed for longer may be faster or slower.
    for _ in range(_CALIBRATIONS):
        chosen = max(1, round(turns * seconds / took))
        turns, took = chosen, measure(chosen)
        if seconds <= took <= 1.05 * seconds:
            break
    return lambda: work(turns)


def _do_nothing(turns: int) -> None:
    pass


def _vectors() -> Callable[[int], None]:
    """Return vector operations on data that stays in a core's cache; numpy releases the GIL in each.

    Each takes some microseconds. While shorter ones follow each other, no other thread gets the GIL within the time
    for which it is free.
    """
    values = np.ones(1 << 16, np.float32)

    def work(turns: int) -> None:
        for _ in range(turns):
            np.multiply(values, 1.0, out=values)

    return work


def _numbers() -> Callable[[int], None]:
    """Return a loop of bytecode, which holds the GIL until another thread requests it."""

    def work(turns: int) -> None:
        total = 0
        for number in range(turns):
            total += number

    return work
