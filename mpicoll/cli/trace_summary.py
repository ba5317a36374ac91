"""Summary of a trace: times and waits by kind of operation and by rank, and sentences about them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpicoll.cli import formatting
from mpicoll.engine.tracing.table import Floats, Ints, TraceTable
from mpicoll.wording import count, rank_list

_MUCH = 0.05
"""Fraction of the other ranks' time from which on their waiting for a rank is reported."""

_COLLECTIVES = {
    "all_reduce": "allreduce",
    "all_gather": "allgather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "alltoall",
    "broadcast": "bcast",
}
"""Collectives by the prefix of their names in torch."""


@dataclass(slots=True)
class KindSummary:
    """Operations of one kind: of one name, size, dtype and algorithm, with the same number of ranks.

    Times are in seconds: `total` per rank of the job, `share` of all such totals; `mean`, `median` and `max` per rank
    and call (for nonblocking messages: of the call and of its wait). `algbw` and `busbw` are in bytes per second.
    Ranks waited `waited` per call, which is `wait_share` of their time. `slowest` was the last rank to enter in
    `slowest_calls` of the calls, `late` after the mean of the others. Fields that do not apply are None.
    """

    operation: str
    nbytes: int | None
    dtype: str
    algorithm: str
    ranks: int
    calls: int
    failed: int
    total: float
    share: float
    mean: float
    median: float
    max: float
    algbw: float | None = None
    busbw: float | None = None
    waited: float | None = None
    wait_share: float | None = None
    slowest: int | None = None
    slowest_calls: int | None = None
    late: float | None = None


@dataclass(slots=True)
class Rank:
    """Totals of a rank in seconds: time in communication (concurrent operations are counted once), time spent waiting
    for other ranks, and the sum of the times that other ranks waited for this one."""

    rank: int
    host: str
    operations: int
    communicating: float
    waiting: float
    waited_for: float


@dataclass(slots=True)
class Summary:
    """Summary of a trace. `seconds` is from the begin of the first operation to the end of the last."""

    job: str
    seconds: float
    kinds: list[KindSummary]
    ranks: list[Rank]
    missing: list[int]
    words: list[str] = field(default_factory=list)


def summarise(table: TraceTable) -> Summary:
    """Return the summary of a trace."""
    took = np.nan_to_num(table.end - table.begin) * 1e-6
    ranks = _summarise_ranks(table)
    kinds = [_summarise_kind(table, key, np.array(rows), took) for key, rows in _group_by_kind(table).items()]
    spent = sum(one.total for one in kinds)
    for one in kinds:
        one.total, one.share = one.total / max(len(ranks), 1), one.total / spent if spent else 0.0
    kinds.sort(key=lambda one: -one.total)
    seconds = float(np.fmax(table.begin, table.end).max()) * 1e-6 if len(table) else 0.0
    summary = Summary(table.job, seconds, kinds, ranks, table.missing)
    summary.words = describe(summary)
    return summary


def _group_by_kind(table: TraceTable) -> dict[tuple[Any, ...], list[int]]:
    """Return the rows of each kind of operation."""
    found: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    pairs, where = np.unique(np.stack([table.call, table.comm]), axis=1, return_inverse=True)
    keys = [_make_key(table.calls[call], len(table.comms[comm].members)) for call, comm in pairs.T.tolist()]
    for row, pair in enumerate(where.reshape(-1).tolist()):
        found[(*keys[pair], bool(table.number[row]))].append(row)
    return found


def _make_key(call: dict[str, Any], size: int) -> tuple[Any, ...]:
    one = call if "nbytes" in call else call.get("parts", [call])[0]
    return call["name"], one.get("nbytes"), one.get("dtype", ""), call.get("algorithm", ""), size


def _summarise_kind(table: TraceTable, key: tuple[Any, ...], rows: Ints, took: Floats) -> KindSummary:
    name, nbytes, dtype, algorithm, size, collective = key
    started = np.isnan(table.end[rows])
    times = took[rows[~started]] if not started.all() else np.zeros(1)
    # A nonblocking message has one row for its start and one for its wait.
    calls = max(int(started.sum()), int((~started).sum()))
    failed, total = int((table.error[rows] >= 0).sum()), float(times.sum())
    kind = KindSummary(
        *(name, nbytes, dtype, algorithm, size, calls, failed, total, 0.0),
        *(float(times.mean()), float(np.median(times)), float(times.max())),
    )
    whole = rows[(table.error[rows] < 0) & ~started]
    if collective:
        _add_waits(table, kind, rows, whole, name)
    elif nbytes and len(whole) and not started.any():
        kind.algbw = nbytes / max(float(np.median(took[whole])), 1e-9)
    return kind


def _add_waits(table: TraceTable, kind: KindSummary, rows: Ints, whole: Ints, name: str) -> None:
    """Add to `kind` the values that need the rows of all ranks of each collective."""
    from mpicoll.cli.bench.cases import bus_factor
    from mpicoll.engine.tracing.wait_analysis import number_collectives

    where, kind.calls = number_collectives(table, rows)
    wait = table.wait[rows] * 1e-6
    kind.waited = float(wait.mean())
    kind.wait_share = float(wait.sum()) / (kind.mean * len(rows)) if kind.mean else 0.0
    if kind.nbytes and len(whole):
        at, count = number_collectives(table, whole)
        latest, done = np.full(count, -np.inf), np.full(count, -np.inf)
        np.maximum.at(latest, at, table.begin[whole])
        np.maximum.at(done, at, table.end[whole])
        kind.algbw = kind.nbytes / max(float(np.median(done - latest)) * 1e-6, 1e-9)
        kind.busbw = kind.algbw * bus_factor(_find_collective(name), kind.ranks)
    if kind.ranks > 1:
        caused = np.bincount(table.last[rows], wait)
        kind.slowest = int(caused.argmax())
        mine = table.last[rows] == kind.slowest
        own = mine & (table.rank[rows] == kind.slowest)
        others = mine & ~own
        kind.slowest_calls = int(own.sum())
        if others.any():
            # Means over calls: the begin of the slowest rank relative to the mean begin of the others.
            sums, counts = np.zeros(kind.calls), np.zeros(kind.calls)
            np.add.at(sums, where[others], table.begin[rows][others])
            np.add.at(counts, where[others], 1)
            late = table.begin[rows][own] - (sums / np.maximum(counts, 1))[where[own]]
            kind.late = float(late[counts[where[own]] > 0].mean()) * 1e-6


def _find_collective(name: str) -> str:
    """Return the name of an operation in mpicoll."""
    return next((ours for theirs, ours in _COLLECTIVES.items() if name.startswith(theirs)), name)


def _summarise_ranks(table: TraceTable) -> list[Rank]:
    found = []
    wait = np.nan_to_num(table.wait) * 1e-6
    for process in sorted(table.ranks, key=lambda one: one.rank):
        own = table.rank == process.rank
        timed = own & ~np.isnan(table.end)
        found.append(
            Rank(
                process.rank,
                process.host,
                int(own.sum()),
                _measure_union(table.begin[timed], table.end[timed]) * 1e-6,
                float(wait[own].sum()),
                float(wait[table.last == process.rank].sum()),
            )
        )
    return found


def _measure_union(begin: Floats, end: Floats) -> float:
    """Return the total length of the union of the intervals."""
    order = np.argsort(begin)
    begin, end = begin[order], np.maximum.accumulate(end[order])
    # The part of each interval beyond all earlier ones.
    before = np.concatenate([begin[:1], end[:-1]])
    return float(np.maximum(end - np.maximum(begin, before), 0).sum())


def describe(summary: Summary) -> list[str]:
    """Return sentences on missing ranks, waiting, the dominant kind and failed calls."""
    said = []
    if summary.missing:
        said.append(f"There is no trace of {rank_list(summary.missing)}.")
    if not summary.kinds:
        return [*said, "There are no operations."]
    spent = sum(one.communicating for one in summary.ranks)
    waiting = sum(one.waiting for one in summary.ranks)
    if len(summary.ranks) > 1 and spent:
        said.append(_describe_waiting(summary, spent, waiting))
    first = summary.kinds[0]
    if len(summary.kinds) > 1 and first.share >= 0.5:
        said.append(f"{_describe_kind(first)} takes {first.share:.0%} of the time of all operations.")
    if summary.seconds and summary.ranks:
        most = max(summary.ranks, key=lambda one: one.communicating)
        mean = spent / len(summary.ranks)
        said.append(
            f"Ranks spend {mean / summary.seconds:.0%} of the {formatting.seconds(summary.seconds)} in communication,"
            f" rank {most.rank} the most: {formatting.seconds(most.communicating)}."
        )
    said += [f"{count(one.failed, 'call')} of {_describe_kind(one)} failed." for one in summary.kinds if one.failed]
    return said


def _describe_waiting(summary: Summary, spent: float, waiting: float) -> str:
    worst = max(summary.ranks, key=lambda one: one.waited_for)
    others = spent - worst.communicating
    share = worst.waited_for / others if others else 0.0
    if share >= _MUCH:
        return f"Rank {worst.rank} makes the others wait {share:.0%} of their time in communication."
    return f"No rank makes the others wait for long: they wait {waiting / spent:.1%} of their time in communication."


def _describe_kind(kind: KindSummary) -> str:
    size = "" if kind.nbytes is None else f" of {formatting.nbytes(kind.nbytes)}"
    by = f" by {kind.algorithm}" if kind.algorithm else ""
    return f"{kind.operation}{size}{by} on {kind.ranks} ranks"
