"""Check each contestant against the oracle, then time all of them in rotation.

All ranks follow the decisions of rank 0. The time of a block of calls is that of its slowest rank.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from math import ceil, inf
from typing import Any

import numpy as np

import mpicoll
from mpicoll.cli.bench.cases import COLLECTIVES, ArrayKind, Case, Workload
from mpicoll.cli.bench.peers import Contestant, Ready, TimedCall, Unavailable
from mpicoll.cli.bench.team import Team
from mpicoll.errors import AlgorithmError, MpicollError

_BLOCK = 4e-3
"""Target duration of a block of calls in seconds."""

_BLOCKS = (11, 501)
"""Minimum and maximum number of blocks."""

_LONGEST_BLOCK = 3 * _BLOCK
"""Target duration of the longest blocks: of contestants that are slower than the fastest one, since what a block costs
besides its calls, as while other programs have the cores, must count for all alike."""

_MOST_CALLS = 4096
"""Maximum number of calls in a block during calibration."""


class Wrong(MpicollError):
    """A candidate of mpicoll gave a wrong result."""


@dataclass(slots=True)
class Result:
    """The result of a contestant: seconds per call of each block on the slowest rank, or the reason for their absence.

    `state` is "timed", "wrong" or "absent"; `note` is the reason. `takes` is the algorithm.
    """

    state: str
    note: str = ""
    takes: str = ""
    phase: str = ""
    calls: int = 0
    blocks: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return float(np.median(self.blocks))

    @property
    def p99(self) -> float:
        return float(np.percentile(self.blocks, 99))


@dataclass(slots=True)
class Point:
    """A workload and the result of each contestant, by name."""

    workload: Workload
    results: dict[str, Result]


def time_calls(call: TimedCall, calls: int, barrier: TimedCall, finish: TimedCall | None = None) -> float:
    """Return seconds per call on this rank in a block of `calls`."""
    barrier()
    begin = time.perf_counter()
    for _ in repeat(None, calls):
        call()
    if finish is not None:
        finish()
    return (time.perf_counter() - begin) / calls


def measure(
    team: Team,
    workload: Workload,
    contestants: Sequence[Contestant],
    *,
    seconds: float,
    blocks: int | None = None,
    step: Callable[[str], None] = lambda name: None,
) -> Point:
    """Measure all `contestants` at `workload`, in about `seconds` or in exactly `blocks` blocks. Collective.

    Raises Wrong on all ranks if a candidate of mpicoll returns a wrong result. A wrong result of a peer, or a missing
    operation, is recorded in its Result.
    """
    cases: dict[ArrayKind, Case] = {}
    for kind in dict.fromkeys(one.kind for one in contestants):
        cases[kind] = Case(workload, team.rank, kind)
    results: dict[str, Result] = {}
    phases: defaultdict[str, list[tuple[Contestant, Ready]]] = defaultdict(list)
    for one in contestants:
        results[one.name], ready = _check_contestant(team, one, cases[one.kind])
        if ready is not None:
            phases[one.phase].append((one, ready))
    for phase in phases.values():
        for case in cases.values():
            case.reset()  # some peers overwrite their input
        share = seconds * len(phase) / len(contestants)
        _time(team, phase, results, share, blocks, step)
    return Point(workload, results)


def _check_contestant(team: Team, contestant: Contestant, case: Case) -> tuple[Result, Ready | None]:
    """Run `contestant` once, and compare the result. The second value is None if it is not to be timed."""
    try:
        ready = prepare_verified(team, contestant, case)
    except Unavailable as error:
        return Result("absent", str(error)), None
    except Wrong as error:
        if contestant.ours:
            raise
        return Result("wrong", str(error)), None
    return Result("timed", phase=contestant.phase, takes=_find_algorithm(contestant, case)), ready


def prepare_verified(team: Team, contestant: Contestant, case: Case) -> Ready:
    """Return the contestant, ready to be timed on `case`, after one run with a correct result on every rank.

    Collective. Raises on all ranks: Wrong if a result is wrong, Unavailable if the contestant lacks the operation.
    """
    case.reset()
    team.barrier()
    wrong, absent, ready = None, None, None
    try:
        ready = contestant.prepare(case)
        got = _first_run(contestant, ready)
        wrong = None if got is None else contestant.check(case, got)
        if wrong is None and contestant.ours:
            wrong = case.workload.check_operand(case.rank, case.x)
    except (Unavailable, AlgorithmError) as error:
        absent = str(error)
    except Exception as error:
        # Peers raise arbitrary exceptions for unsupported operations.
        if contestant.ours:
            raise
        absent = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    workload = case.workload
    for rank, (bad, missing) in enumerate(team.all((wrong, absent))):
        if missing is not None:
            raise Unavailable(missing)
        if bad is not None:
            raise Wrong(
                f"{contestant.name} is wrong: {workload.collective} of {workload.nbytes} B, {workload.dtype},"
                f" {workload.op}, on rank {rank} of {team.size}: {bad}"
            )
    assert ready is not None
    return ready


def _first_run(contestant: Contestant, ready: Ready) -> Any:
    """Run once and return the result; None if this rank receives none."""
    value = ready.call()
    if hasattr(value, "wait"):
        value.wait()
        value = None
    if contestant.finish is not None:
        contestant.finish()
    return ready.result if value is None else value


def _find_algorithm(contestant: Contestant, case: Case) -> str:
    """Return the algorithm that mpicoll chooses by itself."""
    workload = case.workload
    if contestant.name != "mpicoll" or workload.collective not in COLLECTIVES:
        return ""
    # numpy may lack bfloat16; both half-precision dtypes have the same choices.
    dtype = "float16" if workload.dtype == "bfloat16" else workload.dtype
    like = None if case.on_device is None else case.x
    return str(mpicoll.explain(workload.collective, workload.nbytes, op=workload.op, dtype=dtype, like=like).name)


def _time(
    team: Team,
    phase: Sequence[tuple[Contestant, Ready]],
    results: dict[str, Result],
    seconds: float,
    blocks: int | None,
    step: Callable[[str], None],
) -> None:
    """Time blocks of calls of all contestants in rotation, of as many calls unless that takes one of them too long; the
    first contestant changes from block to block."""

    def block(one: Contestant, ready: Ready, calls: int) -> float:
        return time_calls(ready.call, calls, one.barrier or team.barrier, one.finish)

    per_call: list[float] = []
    for one, ready in phase:
        step(one.name)
        per_call.append(_calibrate(team, lambda calls, one=one, ready=ready: block(one, ready, calls)))  # type: ignore[misc]
    most = ceil(_BLOCK / min(per_call))
    turns: list[tuple[Contestant, Ready, int]] = []
    lap = 0.0
    for (one, ready), seconds_each in zip(phase, per_call, strict=True):
        calls = min(most, ceil(_LONGEST_BLOCK / seconds_each))
        lap += calls * seconds_each
        turns.append((one, ready, calls))
        results[one.name].calls = calls
    if blocks is None:
        blocks = int(team.agree(min(max(seconds // lap, _BLOCKS[0]), _BLOCKS[1])))
    own: dict[str, list[float]] = {one.name: [] for one, _ in phase}
    for lap_number in range(blocks):
        first = lap_number % len(turns)
        for one, ready, calls in turns[first:] + turns[:first]:
            own[one.name].append(block(one, ready, calls))
    for name, times in own.items():
        results[name].blocks = team.max_over_ranks(times)


def _calibrate(team: Team, block: Callable[[int], float]) -> float:
    """Return rank 0's seconds per call after a warm-up. A minimum, so disturbances do not shorten blocks. Where other
    programs have the cores, a block of one call takes about as long as one of many."""
    calls = 1
    block(calls)
    former = inf
    while True:
        per_call = team.agree(min(block(calls) for _ in range(3)))
        seconds = per_call * calls
        if calls >= _MOST_CALLS or seconds >= _LONGEST_BLOCK or (seconds >= _BLOCK / 4 and per_call > former / 2):
            return per_call
        calls = min(max(4 * calls, ceil(_BLOCK / 4 / per_call)), _MOST_CALLS)
        former = per_call
