"""``mpicoll trace``: summarise a trace, merge the parts of an unfinished trace, or print the report of a failed job."""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpicoll.cli import formatting

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from mpicoll.engine.timeline import Timeline

    Floats = npt.NDArray[np.float64]
    Ints = npt.NDArray[np.int64]
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001  it has no public name

_DESCRIPTION = """\
Traces are made by MPICOLL_TRACE=DIR, or in a program by `with mpicoll.trace("DIR")`: one file DIR/JOB.json for all
ranks of a job, to be looked at in https://ui.perfetto.dev or chrome://tracing.
"""

_EPILOG = """\
A rank waits in a collective until the last one has come. Bandwidth is that from then on until the last one is done;
busbw as nccl-tests define it. Times are per rank and call; of the total, the mean over all ranks of the job.
"""

_SHOWN = 25
"""Default number of rows of the table."""

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


def add(commands: Commands) -> None:
    """Add the parsers of this command."""
    parser = commands.add_parser(
        "trace",
        help="sum up a trace, make one of its parts, or read a report",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(title="what to do", required=True, metavar="ACTION")
    summary = actions.add_parser(
        "summary",
        help="time, bytes, bandwidth and the slowest rank of each kind of operation",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    summary.add_argument("path", type=Path, metavar="DIR_OR_FILE", help="a trace, or a folder: its newest one")
    summary.add_argument("--rows", type=int, default=_SHOWN, metavar="N", help=f"of the table ({_SHOWN})")
    summary.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="write all numbers, to stdout if no file is named"
    )
    summary.set_defaults(action=_summary)
    merge = actions.add_parser("merge", help="make the file of a job that ended before it could")
    merge.add_argument("path", type=Path, metavar="DIR", help="the folder of traces, or of the parts of one job")
    merge.set_defaults(action=_merge)
    report = actions.add_parser("report", help="say in words what the report of a job that failed has found")
    report.add_argument("path", type=Path, metavar="FILE", help="its JSON")
    report.set_defaults(action=_report)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the requested action. Raise SetupError if the file or trace does not exist."""
    return int(args.action(args))


def _merge(args: argparse.Namespace) -> int:
    from mpicoll.engine import timeline
    from mpicoll.errors import SetupError

    folders = [one for one in timeline.jobs(args.path) if one.is_dir()]
    if not folders:
        raise SetupError(f"{args.path}: there are no parts of a trace of which there is no file yet")
    for folder in folders:
        print(timeline.merge(folder))
    return 0


def _report(args: argparse.Namespace) -> int:
    from mpicoll.engine.diagnostics.report_file import words_of

    print(words_of(args.path))
    return 0


def _summary(args: argparse.Namespace) -> int:
    from mpicoll.engine import timeline

    summary = summarise(timeline.load(args.path))
    if args.json is not None:
        text = json.dumps(asdict(summary), indent=1) + "\n"
        if args.json == "-":
            sys.stdout.write(text)
            return 0
        Path(args.json).write_text(text)
    _show(summary, args.rows)
    others = timeline.jobs(args.path)[:-1]
    if others:
        print(f"Older traces there: {', '.join(str(one) for one in others)}")
    return 0


# --- the numbers


@dataclass(slots=True)
class Kind:
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
    kinds: list[Kind]
    ranks: list[Rank]
    missing: list[int]
    words: list[str] = field(default_factory=list)


def summarise(line: Timeline) -> Summary:
    """Return the summary of a timeline."""
    import numpy as np

    took = np.nan_to_num(line.end - line.begin) * 1e-6
    ranks = _ranks(line)
    kinds = [_kind(line, key, np.array(rows), took) for key, rows in _by_kind(line).items()]
    spent = sum(one.total for one in kinds)
    for one in kinds:
        one.total, one.share = one.total / max(len(ranks), 1), one.total / spent if spent else 0.0
    kinds.sort(key=lambda one: -one.total)
    seconds = float(np.fmax(line.begin, line.end).max()) * 1e-6 if len(line) else 0.0
    summary = Summary(line.job, seconds, kinds, ranks, line.missing)
    summary.words = _words(summary)
    return summary


def _by_kind(line: Timeline) -> dict[tuple[Any, ...], list[int]]:
    """Return the rows of each kind of operation."""
    import numpy as np

    found: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    pairs, where = np.unique(np.stack([line.call, line.comm]), axis=1, return_inverse=True)
    keys = [_key(line.calls[call], len(line.comms[comm].members)) for call, comm in pairs.T.tolist()]
    for row, pair in enumerate(where.reshape(-1).tolist()):
        found[(*keys[pair], bool(line.number[row]))].append(row)
    return found


def _key(call: dict[str, Any], size: int) -> tuple[Any, ...]:
    one = call if "nbytes" in call else call.get("parts", [call])[0]
    return call["name"], one.get("nbytes"), one.get("dtype", ""), call.get("algorithm", ""), size


def _kind(line: Timeline, key: tuple[Any, ...], rows: Ints, took: Floats) -> Kind:
    import numpy as np

    name, nbytes, dtype, algorithm, size, collective = key
    started = np.isnan(line.end[rows])
    times = took[rows[~started]] if not started.all() else np.zeros(1)
    # A nonblocking message has one row for its start and one for its wait.
    calls = max(int(started.sum()), int((~started).sum()))
    failed, total = int((line.error[rows] >= 0).sum()), float(times.sum())
    kind = Kind(
        *(name, nbytes, dtype, algorithm, size, calls, failed, total, 0.0),
        *(float(times.mean()), float(np.median(times)), float(times.max())),
    )
    whole = rows[(line.error[rows] < 0) & ~started]
    if collective:
        _meet(line, kind, rows, whole, name)
    elif nbytes and len(whole) and not started.any():
        kind.algbw = nbytes / max(float(np.median(took[whole])), 1e-9)
    return kind


def _meet(line: Timeline, kind: Kind, rows: Ints, whole: Ints, name: str) -> None:
    """Add to `kind` the values that need the rows of all ranks of each collective."""
    import numpy as np

    from mpicoll.cli.bench.cases import bus_factor
    from mpicoll.engine.timeline import instances

    where, kind.calls = instances(line, rows)
    wait = line.wait[rows] * 1e-6
    kind.waited = float(wait.mean())
    kind.wait_share = float(wait.sum()) / (kind.mean * len(rows)) if kind.mean else 0.0
    if kind.nbytes and len(whole):
        at, count = instances(line, whole)
        latest, done = np.full(count, -np.inf), np.full(count, -np.inf)
        np.maximum.at(latest, at, line.begin[whole])
        np.maximum.at(done, at, line.end[whole])
        kind.algbw = kind.nbytes / max(float(np.median(done - latest)) * 1e-6, 1e-9)
        kind.busbw = kind.algbw * bus_factor(_collective(name), kind.ranks)
    if kind.ranks > 1:
        caused = np.bincount(line.last[rows], wait)
        kind.slowest = int(caused.argmax())
        mine = line.last[rows] == kind.slowest
        own = mine & (line.rank[rows] == kind.slowest)
        others = mine & ~own
        kind.slowest_calls = int(own.sum())
        if others.any():
            # Means over calls: the begin of the slowest rank relative to the mean begin of the others.
            sums, counts = np.zeros(kind.calls), np.zeros(kind.calls)
            np.add.at(sums, where[others], line.begin[rows][others])
            np.add.at(counts, where[others], 1)
            late = line.begin[rows][own] - (sums / np.maximum(counts, 1))[where[own]]
            kind.late = float(late[counts[where[own]] > 0].mean()) * 1e-6


def _collective(name: str) -> str:
    """Return the name of an operation in mpicoll."""
    return next((ours for theirs, ours in _COLLECTIVES.items() if name.startswith(theirs)), name)


def _ranks(line: Timeline) -> list[Rank]:
    import numpy as np

    found = []
    wait = np.nan_to_num(line.wait) * 1e-6
    for process in sorted(line.processes, key=lambda one: one.rank):
        own = line.rank == process.rank
        timed = own & ~np.isnan(line.end)
        found.append(
            Rank(
                process.rank,
                process.host,
                int(own.sum()),
                _union(line.begin[timed], line.end[timed]) * 1e-6,
                float(wait[own].sum()),
                float(wait[line.last == process.rank].sum()),
            )
        )
    return found


def _union(begin: Floats, end: Floats) -> float:
    """Return the total length of the union of the intervals."""
    import numpy as np

    order = np.argsort(begin)
    begin, end = begin[order], np.maximum.accumulate(end[order])
    # The part of each interval beyond all earlier ones.
    before = np.concatenate([begin[:1], end[:-1]])
    return float(np.maximum(end - np.maximum(begin, before), 0).sum())


# --- the words


def _words(summary: Summary) -> list[str]:
    """Return sentences on missing ranks, waiting, the dominant kind and failed calls."""
    said = []
    if summary.missing:
        said.append(f"There is no trace of {_listed(summary.missing)}.")
    if not summary.kinds:
        return [*said, "There are no operations."]
    spent = sum(one.communicating for one in summary.ranks)
    waiting = sum(one.waiting for one in summary.ranks)
    if len(summary.ranks) > 1 and spent:
        said.append(_about_waiting(summary, spent, waiting))
    first = summary.kinds[0]
    if len(summary.kinds) > 1 and first.share >= 0.5:
        said.append(f"{_named(first)} takes {first.share:.0%} of the time of all operations.")
    if summary.seconds and summary.ranks:
        most = max(summary.ranks, key=lambda one: one.communicating)
        mean = spent / len(summary.ranks)
        said.append(
            f"Ranks spend {mean / summary.seconds:.0%} of the {formatting.seconds(summary.seconds)} in communication,"
            f" rank {most.rank} the most: {formatting.seconds(most.communicating)}."
        )
    said += [
        f"{one.failed} call{'s' if one.failed > 1 else ''} of {_named(one)} failed."
        for one in summary.kinds
        if one.failed
    ]
    return said


def _about_waiting(summary: Summary, spent: float, waiting: float) -> str:
    worst = max(summary.ranks, key=lambda one: one.waited_for)
    others = spent - worst.communicating
    share = worst.waited_for / others if others else 0.0
    if share >= _MUCH:
        return f"Rank {worst.rank} makes the others wait {share:.0%} of their time in communication."
    return f"No rank makes the others wait for long: they wait {waiting / spent:.1%} of their time in communication."


def _named(kind: Kind) -> str:
    size = "" if kind.nbytes is None else f" of {formatting.nbytes(kind.nbytes)}"
    by = f" by {kind.algorithm}" if kind.algorithm else ""
    return f"{kind.operation}{size}{by} on {kind.ranks} ranks"


def _listed(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


# --- the tables


def _show(summary: Summary, rows: int) -> None:
    console = formatting.console()
    columns = ["operation", "bytes", "dtype", "algorithm", "ranks", "calls", "total", "mean", "median", "max"]
    columns += ["GB/s", "busbw", "waiting", "slowest rank"]
    shown, left = summary.kinds[:rows], summary.kinds[rows:]
    caption = None
    if left:
        caption = f"and {len(left)} kinds of operation that take {sum(one.share for one in left):.1%} of the time"
    title = f"trace {summary.job}: {len(summary.ranks)} ranks, {formatting.seconds(summary.seconds)}"
    if shown:
        console.print(formatting.table(title, columns, [_cells(one) for one in shown], caption=caption))
    columns = ["rank", "host", "operations", "in communication", "waiting", "others wait for it"]
    cells = [
        [
            str(one.rank),
            one.host,
            str(one.operations),
            formatting.seconds(one.communicating),
            _part(one.waiting, one.communicating),
            formatting.seconds(one.waited_for),
        ]
        for one in summary.ranks
    ]
    console.print(formatting.table("ranks", columns, cells))
    for text in summary.words:
        console.print(text)


def _cells(kind: Kind) -> list[str]:
    slowest = ""
    if kind.slowest is not None and kind.late is not None:
        slowest = f"{kind.slowest} (+{formatting.seconds(kind.late)}, {kind.slowest_calls} of {kind.calls})"
    return [
        kind.operation,
        "" if kind.nbytes is None else formatting.nbytes(kind.nbytes),
        kind.dtype,
        kind.algorithm,
        str(kind.ranks),
        str(kind.calls),
        f"{formatting.seconds(kind.total)} {kind.share:4.0%}",
        *(formatting.seconds(one) for one in (kind.mean, kind.median, kind.max)),
        "" if kind.algbw is None else formatting.rate(kind.algbw),
        "" if kind.busbw is None else formatting.rate(kind.busbw),
        "" if kind.waited is None else f"{formatting.seconds(kind.waited)} {kind.wait_share:4.0%}",
        slowest,
    ]


def _part(some: float, whole: float) -> str:
    return f"{formatting.seconds(some)} {some / whole if whole else 0.0:4.0%}"
