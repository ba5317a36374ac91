"""Times of algorithms and of messages."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

from mpicoll.cli.bench.cases import ArrayKind, Case, Workload
from mpicoll.cli.bench.device_arrays import LibraryName
from mpicoll.cli.bench.measure import time_calls
from mpicoll.cli.bench.peers import candidate
from mpicoll.cli.bench.team import Team
from mpicoll.cli.tune.settings import TuneSettings
from mpicoll.engine.world import resolve

HOPELESS = 3.0
"""Ratio to the time of the best algorithm beyond which a first look excludes an algorithm from the measurement."""

_BLOCK = 2e-3
"""Target duration of a block of calls in seconds."""

_BLOCKS = (7, 101)
"""Minimum and maximum number of blocks."""

_TRIAL, _BEHIND = 3, 1.5
"""Number of blocks after which algorithms slower than the best by this factor are dropped, and that factor."""

_MESSAGE = 4 << 20
"""Size in bytes of the messages with which the cost per byte is measured."""


def measure_point(
    team: Team, workload: Workload, names: Sequence[str], kept: str, asked: TuneSettings
) -> tuple[dict[str, float], dict[str, float]]:
    """Return seconds per call: of a first look at all `names`, and the median over blocks of the algorithms that the
    look did not exclude. `kept` is never excluded. All ranks return the same values."""
    case = Case(workload, team.rank, _kind(workload, asked.array))
    calls = {name: candidate(name, kind=case.kind, algorithm=name).prepare(case).call for name in names}
    looks = {name: _measure_briefly(team, call) for name, call in calls.items()}
    limit = HOPELESS * min(looks.values())
    for name, look in looks.items():
        # Other load on the machine may have slowed one look down, but hardly both by so much.
        if limit < look < HOPELESS * limit:
            looks[name] = min(look, _measure_briefly(team, calls[name]))
    entered = [name for name in names if looks[name] <= limit or name == kept]
    repeats = {name: math.ceil(_BLOCK / looks[name]) for name in entered}
    lap = sum(repeats[name] * looks[name] for name in entered)
    blocks = asked.blocks or int(min(max(asked.seconds // lap, _BLOCKS[0]), _BLOCKS[1]))
    own: dict[str, list[float]] = {name: [] for name in entered}
    for turn in range(blocks):
        if turn == _TRIAL:
            trial = {name: float(np.median(team.max_over_ranks(own[name]))) for name in entered}
            entered = [name for name in entered if trial[name] <= _BEHIND * min(trial.values()) or name == kept]
        first = turn % len(entered)
        for name in entered[first:] + entered[:first]:
            own[name].append(time_calls(calls[name], repeats[name], team.barrier))
    return looks, {name: float(np.median(team.max_over_ranks(times))) for name, times in own.items()}


def _kind(workload: Workload, array: LibraryName | None) -> ArrayKind:
    """Return the kind of arrays on which `workload` is measured."""
    if array is not None:
        return "cuda torch" if array == "torch" else "cuda cupy"
    return "torch" if workload.dtype == "bfloat16" and find_spec("torch") is not None else "numpy"


def _measure_briefly(team: Team, call: Callable[[], Any]) -> float:
    """Return seconds per call of the slowest rank. A first call, which creates cached state, is not timed."""
    time_calls(call, 1, team.barrier)
    calls = 1
    while True:
        (per_call,) = team.max_over_ranks([min(time_calls(call, calls, team.barrier) for _ in range(2))])
        if per_call * calls >= _BLOCK / 4 or calls >= 1024:
            return max(per_call, 1e-9)
        calls *= 4


def measure_costs(team: Team) -> dict[str, Any]:
    """Measure the costs of a message inside a node and between nodes, and of reducing a byte while all ranks reduce."""
    nodes = team.comm.nodes
    near = next(((one, nodes.index(node)) for one, node in enumerate(nodes) if nodes.index(node) < one), None)
    far = next(((0, one) for one, node in enumerate(nodes) if node != nodes[0]), None)
    left, right = np.ones(1 << 18, np.float32), np.ones(1 << 18, np.float32)
    add = [time_calls(lambda: np.add(left, right, out=left), 8, team.barrier) for _ in range(11)]
    return {
        "node": None if near is None else _measure_link(team, near),
        "network": None if far is None else _measure_link(team, far),
        "gamma": float(np.median(team.max_over_ranks(add))) / left.nbytes,
    }


def _measure_link(team: Team, pair: tuple[int, int]) -> list[float]:
    """Measure seconds per message and per byte between two ranks that both send, as in the rounds of a schedule."""
    core = resolve(team.comm)
    transport, tag = core.transport, core.next_tag()
    times = []
    for nbytes, calls, blocks in ((8, 100, 11), (_MESSAGE, 1, 11)):
        own = [0.0] * blocks
        if team.rank in pair:
            peer = pair[0] + pair[1] - team.rank
            out, into = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
            own = [_time_exchange(transport, peer, out, into, tag, calls) for _ in range(blocks + 1)][1:]
        times.append(float(np.median(team.max_over_ranks(own))))
    return [times[0], max(0.0, times[1] - times[0]) / _MESSAGE]


def _time_exchange(transport: Any, peer: int, out: Any, into: Any, tag: int, calls: int) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        transport.exchange([(peer, out)], [(peer, into)], tag)
    return (time.perf_counter() - begin) / calls
