"""Main function of each rank of a tuning job."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from math import exp, log
from typing import Any

import mpicoll
from mpicoll.cli import formatting
from mpicoll.cli.bench import device_arrays
from mpicoll.cli.bench.cases import REDUCTIONS, Workload
from mpicoll.cli.bench.device_arrays import LibraryName
from mpicoll.cli.bench.report import describe_run
from mpicoll.cli.bench.team import Team
from mpicoll.cli.tune.measure import measure_costs, measure_point
from mpicoll.cli.tune.settings import TuneSettings
from mpicoll.cli.tune.winners import TunedPoint, choose_winner, is_hopeless, list_candidates, make_rules
from mpicoll.collectives.explain import make_call_query
from mpicoll.engine.core.communicator import core_of
from mpicoll.engine.executors.collective_spec import get_piece_bytes
from mpicoll.engine.selection import tuned_table
from mpicoll.engine.selection.catalogue import NCCL
from mpicoll.engine.selection.query import TunedTable, selection_context
from mpicoll.engine.selection.selector import choose
from mpicoll.engine.world import resolve, world
from mpicoll.errors import AlgorithmError, ArgumentError, SetupError

_LARGE = 64 << 10
"""Bytes of the smallest vector whose ratios predict those of larger vectors."""


def main(rank: int, asked: TuneSettings, ranks: tuple[int, ...] = ()) -> tuple[int, dict[str, Any] | None]:
    """Tune as one rank of the job; return the exit status and, on rank 0, all that was measured. `rank` is passed by
    :func:`mpicoll.spawn` and not used. Collective."""
    # Importing it initialises MPI, which the process that starts the ranks must not do.
    from mpicoll.transport import mpi

    comm = world()
    if ranks not in ((), (comm.size,)):
        raise ArgumentError(f"tune: -np {ranks[0]}, but the launcher has started {comm.size} ranks; leave -np out")
    if comm.size == 1:
        raise ArgumentError("tune: a single rank has nothing to choose; start 2 or more")
    team = Team(comm)
    try:
        device_arrays.give(team, asked.array)
    except SetupError as error:
        team.report_error(error)
        # Ranks that exit with a nonzero status end the job, possibly before rank 0 has written the error.
        team.barrier()
        return 2, None
    groups, library, layout = plan_points(team, asked), mpi.library(), resolve(comm).context.layout
    entries: list[dict[str, Any]] = []
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    with formatting.steps(team.rank == 0 and asked.progress, sum(map(len, groups))) as step:
        costs = measure_costs(team)
        for points in groups:
            _tune_points(team, points, asked, step)
            rules = ((points[0].workload.collective, tuple(make_rules(points))),)
            entry = tuned_table.make_entry(library, layout, {points[0].tuned_class: rules}, costs, now)
            entries = tuned_table.merge_entry(entries, entry)
            if team.rank == 0 and asked.output is not None:
                tuned_table.write(asked.output, entry)  # at once, so that an interrupted run keeps its results
    if team.rank == 0 and not asked.quiet:
        _print_results(asked, groups, [f"{kind}: {text}" for kind, text in entries[0]["rules"].items()])
        _print_costs(asked, costs)
        if asked.output is not None:
            formatting.console(asked.width).print(f"written to {asked.output}")
    checks = None
    if asked.check:
        checks = _check(team, groups, asked, tuned_table.make_table(entries, "what was just tuned"))
    if team.rank != 0:
        return 0, None
    found = {
        **describe_run(comm),
        "points": [_describe(point) for points in groups for point in points],
        "rules": entries[0]["rules"],
        "costs": costs,
        "table": None if asked.output is None else str(asked.output),
        "check": checks,
    }
    return 0, found


def _describe(point: TunedPoint) -> dict[str, Any]:
    """Return a point as JSON has it. Times are in seconds per call."""
    workload = point.workload
    return {
        **{name: getattr(workload, name) for name in ("collective", "nbytes", "dtype", "ranks")},
        **{name: getattr(point, name) for name in ("medians", "winner", "untuned")},
    }


def plan_points(team: Team, asked: TuneSettings) -> list[list[TunedPoint]]:
    """Return the points to be measured, in ascending order of size, for each collective and class of dtypes."""
    like = None if asked.array is None else _exchange_capabilities(asked.array)
    groups: dict[tuple[str, str], dict[int, TunedPoint]] = {}
    for collective in asked.collectives:
        for dtype in asked.dtypes if collective in REDUCTIONS else asked.dtypes[:1]:
            # numpy may lack bfloat16, and both half-precision dtypes belong to one class.
            known = "float16" if dtype == "bfloat16" else dtype
            for size in asked.sizes:
                workload = Workload(collective, size, dtype, "sum", team.size)
                problem = make_call_query(collective, workload.nbytes, "sum", known, 0, None, resolve(team.comm), like)
                points = groups.setdefault((collective, problem.kind), {})
                points.setdefault(workload.nbytes, TunedPoint(workload, problem, choose(problem, None).name))
    return [list(points.values()) for points in groups.values()]


def _exchange_capabilities(library: LibraryName) -> Any:
    """Return an array on this rank's device after the ranks have exchanged the capabilities of their devices.

    Collective.
    """
    x = device_arrays.arrays(library).zeros(1, "float32")
    mpicoll.allreduce(x)
    # The first use of NCCL determines on all ranks alike if it is available.
    with suppress(AlgorithmError):
        mpicoll.allreduce(x, algorithm=NCCL)
    return x


def _tune_points(
    team: Team, points: Sequence[TunedPoint], asked: TuneSettings, step: Callable[[str, int], None]
) -> None:
    """Measure the points of one collective and class, and choose their winners."""
    ratios: dict[str, list[float]] = {}
    previous = ""
    own = get_piece_bytes(team.size, core_of(team.comm).transport.has_own_cores)
    for point in points:
        label = f"{point.workload.collective} {point.workload.dtype} {formatting.nbytes(point.workload.nbytes)}"
        step(label, 0)
        names = [
            name
            for name in list_candidates(point, own)
            if name == point.untuned or not is_hopeless(ratios.get(name, ()))
        ]
        looks, point.medians = measure_point(team, point.workload, names, point.untuned, asked)
        if point.workload.nbytes >= _LARGE:
            best = min(looks.values())
            for name, look in looks.items():
                ratios.setdefault(name, []).append(look / best)
        point.winner = previous = choose_winner(point.medians, point.untuned, previous)
        step(label, 1)


def _check(
    team: Team, groups: Sequence[Sequence[TunedPoint]], asked: TuneSettings, table: TunedTable
) -> list[dict[str, Any]]:
    """Measure again, and print and return the efficiency of the choices by `table` and of the untuned choices."""
    context = resolve(team.comm).context
    here = selection_context(context.layout, table, connects=context.connects)
    rows, found = [], []
    goods: tuple[list[float], list[float]] = ([], [])
    with formatting.steps(team.rank == 0 and asked.progress, sum(map(len, groups))) as step:
        for point in (point for points in groups for point in points):
            label = f"{point.workload.collective} {point.workload.dtype} {formatting.nbytes(point.workload.nbytes)}"
            step(f"checking {label}", 0)
            taken = choose(point.problem._replace(context=here), None).name
            names = list(dict.fromkeys([point.untuned, *point.medians, taken]))
            again = TunedPoint(point.workload, point.problem, point.untuned)
            looks, again.medians = measure_point(team, point.workload, names, taken, asked)
            # An untuned choice that the first look excluded from the blocks keeps the time of that look.
            again.medians.setdefault(point.untuned, looks[point.untuned])
            best = min(again.medians, key=lambda name: again.medians[name])
            for good, name in zip(goods, (taken, point.untuned), strict=True):
                good.append(again.efficiency(name))
            rows.append(
                [label, best, taken, _format_percent(goods[0][-1]), point.untuned, _format_percent(goods[1][-1])]
            )
            found.append({**_describe(again), "winner": best, "tuned": taken})
            step(label, 1)
    if team.rank == 0 and not asked.quiet:
        tuned_good, untuned_good = goods
        caption = (
            f"geometric means: tuned {_format_mean(tuned_good)}, untuned {_format_mean(untuned_good)};"
            f" below 95 % tuned: {sum(good < 0.95 for good in tuned_good)} of {len(rows)};"
            f" below 85 % untuned: {sum(good < 0.85 for good in untuned_good)}"
        )
        columns = ("measured again", "best", "tuned", "good", "untuned", "good")
        formatting.console(asked.width).print(
            formatting.table(f"check, {groups[0][0].where}", columns, rows, caption=caption)
        )
    return found


def _print_results(asked: TuneSettings, groups: Sequence[Sequence[TunedPoint]], rules: Sequence[str]) -> None:
    console = formatting.console(asked.width)
    for points in groups:
        names = list(dict.fromkeys(name for point in points for name in point.medians))
        rows = [
            [
                formatting.nbytes(point.workload.nbytes),
                *(formatting.seconds(point.medians[name]) if name in point.medians else "-" for name in names),
                point.winner,
                point.untuned,
                _format_percent(point.efficiency(point.untuned)),
            ]
            for point in points
        ]
        first = points[0]
        what = first.workload.dtype if first.problem.kind != "moved" else "any dtype"
        caption = f"untuned, geometric mean: {_format_mean([point.efficiency(point.untuned) for point in points])} good"
        title = f"{first.workload.collective}, {what}, {first.where}: median time per call"
        console.print(formatting.table(title, ("size", *names, "winner", "untuned", "good"), rows, caption=caption))
    for line in rules:
        console.print(line)


def _print_costs(asked: TuneSettings, costs: Mapping[str, Any]) -> None:
    links = [
        f"{name}: {formatting.seconds(costs[which][0])} a message,"
        f" {formatting.rate(1 / max(costs[which][1], 1e-15))} GB/s"
        for which, name in (("node", "in a node"), ("network", "between nodes"))
        if costs[which] is not None
    ]
    line = "; ".join([*links, f"sums: {formatting.rate(1 / costs['gamma'])} GB/s"])
    formatting.console(asked.width).print(line)


def _format_percent(part: float) -> str:
    return f"{100 * part:.0f} %"


def _format_mean(goods: Sequence[float]) -> str:
    """Return the geometric mean as text."""
    return _format_percent(exp(sum(map(log, goods)) / len(goods)))
