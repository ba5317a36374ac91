"""``mpicoll trace``: summarise a trace, merge the parts of an unfinished trace, or print the report of a failed job."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from mpicoll.cli import formatting

if TYPE_CHECKING:
    from mpicoll.cli.trace_summary import KindSummary, Summary

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


def add(commands: Commands) -> None:
    """Add the parsers of this command."""
    parser = commands.add_parser(
        "trace",
        help="sum up a trace, make one of its parts, or read a report",
        description=_DESCRIPTION,
        formatter_class=formatting.HelpFormatter,
    )
    actions = parser.add_subparsers(title="what to do", required=True, metavar="ACTION")
    summary = actions.add_parser(
        "summary",
        help="time, bytes, bandwidth and the slowest rank of each kind of operation",
        epilog=_EPILOG,
        formatter_class=formatting.HelpFormatter,
    )
    summary.add_argument("path", type=Path, metavar="DIR_OR_FILE", help="a trace, or a folder: its newest one")
    summary.add_argument("--rows", type=int, default=_SHOWN, metavar="N", help=f"of the table ({_SHOWN})")
    formatting.add_json(summary)
    summary.set_defaults(action=_summarise)
    merge = actions.add_parser("merge", help="make the file of a job that ended before it could")
    merge.add_argument("path", type=Path, metavar="DIR", help="the folder of traces, or of the parts of one job")
    formatting.add_json(merge)
    merge.set_defaults(action=_merge)
    report = actions.add_parser("report", help="say in words what the report of a job that failed has found")
    report.add_argument("path", type=Path, metavar="FILE", help="its JSON")
    formatting.add_json(report)
    report.set_defaults(action=_report)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the requested action. Raise SetupError if the file or trace does not exist."""
    return int(args.action(args))


def _merge(args: argparse.Namespace) -> int:
    from mpicoll.engine.tracing import trace_files
    from mpicoll.errors import SetupError

    folders = [one for one in trace_files.find_traces(args.path) if one.is_dir()]
    if not folders:
        raise SetupError(f"{args.path}: there is no trace that has still to be merged")
    made = []
    with formatting.steps(formatting.shows_progress(args.json), len(folders), measures=False) as step:
        for folder in folders:
            step(folder.name, 0)
            made.append(str(trace_files.merge(folder)))
            step(folder.name, 1)
    if args.json != "-":
        print("\n".join(made))
    if args.json is not None:
        formatting.write_json(args.json, {"traces": made})
    return 0


def _report(args: argparse.Namespace) -> int:
    from mpicoll.engine.diagnostics.report_file import read_analysis, summarize

    text = summarize(args.path)
    if args.json != "-":
        print(text)
    if args.json is not None:
        formatting.write_json(args.json, read_analysis(args.path))
    return 0


def _summarise(args: argparse.Namespace) -> int:
    from mpicoll.cli.trace_summary import summarise
    from mpicoll.engine.tracing import trace_files

    with formatting.steps(formatting.shows_progress(args.json), 2, measures=False) as step:
        step("reading the trace", 0)
        table = trace_files.load(args.path)
        step("adding up", 1)
        summary = summarise(table)
    if args.json is not None:
        formatting.write_json(args.json, asdict(summary))
        if args.json == "-":
            return 0
    _print_tables(summary, args.rows)
    others = trace_files.find_traces(args.path)[:-1]
    if others:
        print(f"Older traces there: {', '.join(str(one) for one in others)}")
    return 0


def _print_tables(summary: Summary, rows: int) -> None:
    console = formatting.console()
    columns = ["operation", "bytes", "dtype", "algorithm", "ranks", "calls", "total", "mean", "median", "max"]
    columns += ["GB/s", "busbw", "waiting", "slowest rank"]
    shown, left = summary.kinds[:rows], summary.kinds[rows:]
    caption = None
    if left:
        caption = f"and {len(left)} kinds of operation that take {sum(one.share for one in left):.1%} of the time"
    title = f"trace {summary.job}: {len(summary.ranks)} ranks, {formatting.seconds(summary.seconds)}"
    if shown:
        console.print(formatting.table(title, columns, [_format_cells(one) for one in shown], caption=caption))
    columns = ["rank", "host", "operations", "in communication", "waiting", "others wait for it"]
    cells = [
        [
            str(one.rank),
            one.host,
            str(one.operations),
            formatting.seconds(one.communicating),
            _format_part(one.waiting, one.communicating),
            formatting.seconds(one.waited_for),
        ]
        for one in summary.ranks
    ]
    console.print(formatting.table("ranks", columns, cells))
    for text in summary.words:
        console.print(text)


def _format_cells(kind: KindSummary) -> list[str]:
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


def _format_part(some: float, whole: float) -> str:
    return f"{formatting.seconds(some)} {some / whole if whole else 0.0:4.0%}"
