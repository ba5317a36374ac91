"""``mpicoll simulate``: predict the times of the schedules of a collective on a described cluster."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from mpicoll import schedules
from mpicoll.cli import formatting
from mpicoll.errors import ArgumentError
from mpicoll.schedules import Cluster, Forecast
from mpicoll.schedules.draw import picture_type

_SCALES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "ps": 1e-12}
_RATES = {"gb/s": 1e9, "mb/s": 1e6, "gbit/s": 1e9 / 8, "mbit/s": 1e6 / 8}
_DEFAULT = Cluster(nodes=1024, ranks_per_node=128)


def add(commands: Any) -> None:
    """Add the parser of this command."""
    parser = commands.add_parser(
        "simulate",
        help="time and traffic of every algorithm on a described cluster",
        description=(
            "Price every algorithm of a collective at every size on a described cluster: nodes of ranks, a latency "
            "alpha and a time per byte beta for each class of links, gamma per byte reduced. Ranks of a node that send "
            "to other nodes at the same time share its network links. mpicoll.schedules.simulate states the model."
        ),
    )
    parser.add_argument("collective", nargs="?", default="allreduce", help="default: allreduce")
    parser.add_argument("--nodes", type=int, help=f"default: {_DEFAULT.nodes}")
    parser.add_argument("--ranks-per-node", type=int, help=f"default: {_DEFAULT.ranks_per_node}; with --ranks: 1")
    parser.add_argument("--ranks", type=int, metavar="P", help="all ranks, in place of --nodes")
    parser.add_argument("--sizes", type=formatting.sizes, default="8-1g", metavar="8-1g|8,1k", help="bytes")
    add_costs(parser, _DEFAULT)
    parser.add_argument("--links", type=int, default=1, help="network links that the ranks of a node share; default: 1")
    parser.add_argument("--algorithms", metavar="NAME,NAME", help="default: all of the collective")
    parser.add_argument("--segments", type=int, help="pieces of a pipeline; default: of 128 KiB each, up to 64")
    parser.add_argument("--budget", type=int, help="messages to follow per algorithm before giving it up")
    parser.add_argument(
        "--measured",
        type=Path,
        metavar="FILE",
        help="what `mpicoll bench --json FILE` wrote: fit the costs to half of it and predict the other half",
    )
    formatting.add_json(parser)
    parser.add_argument("--plot", metavar="FILE", help="draw time against size, as PNG or SVG")
    parser.set_defaults(run=run)


def add_costs(parser: argparse.ArgumentParser, default: Cluster) -> None:
    """Add an option for each cost of a cluster, with the costs of `default`."""
    for name, what in (
        ("node_alpha", "latency within a node"),
        ("node_beta", "time per byte within a node"),
        ("net_alpha", "latency between nodes"),
        ("net_beta", "time per byte of a link between nodes"),
        ("gamma", "time per byte reduced"),
    ):
        value = getattr(default, name)
        shown = formatting.seconds(value) if name.endswith("alpha") else f"{value * 1e9:g}ns"
        units = "0.5us" if name.endswith("alpha") else "0.1ns or 10GB/s"
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=_parse_time,
            default=value,
            metavar="TIME",
            help=f"{what}, such as {units}; default: {shown}",
        )


def _parse_time(text: str) -> float:
    """Parse seconds (per message or per byte) from ``0.5us``, ``2e-6``, or a rate such as ``10GB/s``."""
    match = re.fullmatch(r"([0-9.]+(?:e[+-]?\d+)?)\s*([a-zµ/]*)", text.strip().lower())
    try:
        value = float(match[1]) if match else -1.0
    except ValueError:
        value = -1.0
    unit = (match[2] if match else "") or "s"
    if value >= 0 and unit in _SCALES:
        return value * _SCALES[unit]
    if value > 0 and unit in _RATES:
        return 1 / (value * _RATES[unit])
    raise argparse.ArgumentTypeError(f"{text!r} is not a time; write for example 0.5us, 0.1ns, 2e-6 or 10GB/s")


def run(args: argparse.Namespace) -> int:
    """Predict times or, with ``--measured``, fit costs to measurements and compare."""
    if args.plot:
        formatting.require_matplotlib()
        picture_type(args.plot)
    return _compare(args) if args.measured else _predict(args)


def _predict(args: argparse.Namespace) -> int:
    cluster = _make_cluster(args)
    began = time.perf_counter()
    forecasts = _simulate(args, cluster)
    took = time.perf_counter() - began
    wins = _find_fastest(forecasts, args.sizes)
    if args.json != "-":
        _print_forecasts(args, cluster, forecasts, wins, took)
    if args.json:
        formatting.write_json(
            args.json,
            {
                "collective": args.collective,
                "cluster": asdict(cluster),
                "seconds_taken": took,
                "algorithms": [_encode(forecast) for forecast in forecasts],
                "wins": [{"algorithm": name, "from": low, "to": high} for name, low, high in wins],
            },
        )
    if args.plot:
        lines = {
            forecast.algorithm.name: [(p.nbytes, p.seconds) for p in forecast.points if p] for forecast in forecasts
        }
        _plot(args.plot, f"{args.collective} on {_describe_cluster(cluster)}, simulated", lines, {})
    return 0


def _simulate(args: argparse.Namespace, cluster: Cluster) -> list[Forecast]:
    """Simulate one algorithm after another, with a progress bar."""
    names = args.algorithms.split(",") if args.algorithms else None
    if names is None and args.collective in schedules.collectives():
        names = list(schedules.algorithms_of(args.collective))
    budget = {} if args.budget is None else {"budget": args.budget}
    forecasts: list[Forecast] = []
    # An unknown collective is an error of the one call that it makes.
    calls = [None] if names is None else [(name,) for name in names]
    with formatting.steps(formatting.shows_progress(args.json), len(calls), measures=False) as step:
        for call in calls:
            step("" if call is None else f"simulating {call[0]}", 0)
            forecasts += schedules.simulate(
                args.collective, cluster, args.sizes, algorithms=call, segments=args.segments, **budget
            )
            step("", 1)
    return forecasts


def _make_cluster(args: argparse.Namespace) -> Cluster:
    nodes, per_node, ranks = args.nodes, args.ranks_per_node, args.ranks
    for option, number in (("--nodes", nodes), ("--ranks-per-node", per_node), ("--ranks", ranks)):
        if number is not None and number < 1:
            raise ArgumentError(f"simulate: {option} must be at least 1, got {number}")
    if ranks is not None:
        per_node = per_node or 1
        if (nodes is not None and nodes * per_node != ranks) or ranks % per_node:
            raise ArgumentError(
                f"simulate: {ranks} ranks are not {nodes or 'a whole number of'} nodes times {per_node}; give two of"
                " --ranks, --nodes and --ranks-per-node that fit"
            )
        nodes = ranks // per_node
    from mpicoll.cli.cost_fit import COSTS

    costs = {name: getattr(args, name) for name in COSTS}
    return Cluster(
        nodes=_DEFAULT.nodes if nodes is None else nodes,
        ranks_per_node=_DEFAULT.ranks_per_node if per_node is None else per_node,
        links=args.links,
        **costs,
    )


def _describe_cluster(cluster: Cluster) -> str:
    return f"{cluster.size} ranks: {cluster.nodes} nodes of {cluster.ranks_per_node}"


def _find_fastest(forecasts: Sequence[Forecast], sizes: Sequence[int]) -> list[tuple[str, int, int]]:
    """Return the fastest algorithms, each with its first and its last size."""
    fastest = []
    for place, nbytes in enumerate(sizes):
        times = {f.algorithm.name: p.seconds for f in forecasts if (p := f.points[place]) is not None}
        if times:
            fastest.append((min(times, key=lambda name: times[name]), nbytes))
    runs = [(name, [nbytes for _, nbytes in group]) for name, group in groupby(fastest, key=lambda pair: pair[0])]
    return [(name, group[0], group[-1]) for name, group in runs]


_SEEN = {"one": "one rank, all do alike", "all": "every rank", "sample": "a sample of ranks"}


def _print_forecasts(
    args: argparse.Namespace,
    cluster: Cluster,
    forecasts: Sequence[Forecast],
    wins: Sequence[tuple[str, int, int]],
    took: float,
) -> None:
    console = formatting.console()
    names = [forecast.algorithm.name for forecast in forecasts]
    rows = []
    for place, nbytes in enumerate(args.sizes):
        best = next((name for name, low, high in wins if low <= nbytes <= high), "-")
        points = [forecast.points[place] for forecast in forecasts]
        rows.append(
            [
                formatting.nbytes(nbytes),
                *(formatting.seconds(p.seconds) if p else "not simulated" for p in points),
                best,
            ]
        )
    console.print(
        formatting.table(f"{args.collective} on {_describe_cluster(cluster)}: time", ["size", *names, "fastest"], rows)
    )
    rows, notes = [], []
    for forecast in forecasts:
        last = next((p for p in reversed(forecast.points) if p), None)
        if forecast.reason:
            notes.append(f"{forecast.algorithm.name}: {forecast.reason}")
        if last is None:
            rows.append([forecast.algorithm.name, *["not simulated"] * 5])
            continue
        rows.append(
            [
                forecast.algorithm.name,
                formatting.nbytes(last.nbytes),
                str(last.profile.rounds),
                f"{formatting.nbytes(last.sent)} = {float(last.profile.sent):.4g} n",
                f"{formatting.nbytes(last.crossing)} = {float(last.profile.crossing):.4g} n",
                _SEEN[last.profile.seen],
            ]
        )
    columns = ["algorithm", "n", "rounds", "sent by the busiest rank", "through the busiest node's links", "seen"]
    console.print(formatting.table("traffic at the largest size simulated", columns, rows))
    for name, low, high in wins:
        span = formatting.nbytes(low) if low == high else f"{formatting.nbytes(low)} to {formatting.nbytes(high)}"
        console.print(f"{span}: {name}")
    for note in notes:
        console.print(f"not simulated at all sizes: {note}")
    console.print(f"simulated in {formatting.seconds(took)}")


def _encode(forecast: Forecast) -> dict[str, Any]:
    return {
        "name": forecast.algorithm.name,
        "reason": forecast.reason,
        "points": [
            point
            and {
                "nbytes": point.nbytes,
                "seconds": point.seconds,
                "sent": point.sent,
                "crossing": point.crossing,
                "rounds": point.profile.rounds,
                "segments": point.profile.segments,
                "seen": point.profile.seen,
            }
            for point in forecast.points
        ],
    }


def _plot(
    file: str,
    title: str,
    lines: dict[str, list[tuple[int, float]]],
    marks: dict[str, list[tuple[int, float]]],
) -> None:
    """`lines` as curves, `marks` of the same names as points in the same colours."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure = Figure((8, 5), layout="constrained")
    axes = figure.add_subplot()
    for number, (name, points) in enumerate(lines.items()):
        colour = formatting.COLOURS[number % len(formatting.COLOURS)]
        if points:
            dashes = ("-", "--", "-.", ":")[number % 4]
            axes.plot(*zip(*points, strict=True), label=name, color=colour, linestyle=dashes, linewidth=1.6)
        if marked := marks.get(name):
            axes.plot(*zip(*marked, strict=True), color=colour, marker="o", linestyle="none", markersize=4)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: formatting.nbytes(size)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda seconds, _: formatting.seconds(seconds)))
    axes.set_xlabel("size")
    axes.set_ylabel("time per call")
    axes.set_title(title)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=150)


def _compare(args: argparse.Namespace) -> int:
    """Fit the costs to every other size of each algorithm, and predict the sizes between."""
    from mpicoll.cli.cost_fit import fit_costs, read_samples

    cluster, samples = read_samples(args, _DEFAULT)
    ours, theirs = samples[::2], samples[1::2]
    if not ours or not theirs:
        raise ArgumentError(
            f"simulate: {args.measured} has {len(samples)} timed points of schedules of {args.collective}, and at least"
            " 2 are needed; measure some by `mpicoll bench --algorithms all --json FILE`"
        )
    fitted = fit_costs(ours, cluster)
    predicted = [sample.profile.seconds(sample.nbytes, fitted) for sample in theirs]
    errors = [abs(p / sample.seconds - 1) for p, sample in zip(predicted, theirs, strict=True)]
    if args.json != "-":
        console = formatting.console()
        rows = [
            [
                s.name,
                formatting.nbytes(s.nbytes),
                formatting.seconds(s.seconds),
                formatting.seconds(p),
                f"{p / s.seconds - 1:+.0%}",
            ]
            for s, p in zip(theirs, predicted, strict=True)
        ]
        columns = ["algorithm", "size", "measured", "predicted", "error"]
        console.print(formatting.table(f"{args.collective} on {_describe_cluster(cluster)}", columns, rows))
        console.print(f"fitted to {len(ours)} other points: {_describe_costs(fitted)}")
        console.print(f"median error of {len(theirs)} predictions: {median(errors):.0%}")
    if args.json:
        formatting.write_json(
            args.json,
            {
                "collective": args.collective,
                "cluster": asdict(fitted),
                "fitted_to": len(ours),
                "median_error": median(errors),
                "points": [
                    {"algorithm": s.name, "nbytes": s.nbytes, "measured": s.seconds, "predicted": p}
                    for s, p in zip(theirs, predicted, strict=True)
                ],
            },
        )
    if args.plot:
        names = dict.fromkeys(sample.name for sample in samples)
        curves = {n: [(s.nbytes, s.profile.seconds(s.nbytes, fitted)) for s in samples if s.name == n] for n in names}
        marks = {n: [(s.nbytes, s.seconds) for s in theirs if s.name == n] for n in names}
        _plot(
            args.plot, f"{args.collective} on {_describe_cluster(cluster)}: predicted (lines), measured", curves, marks
        )
    return 0


def _describe_costs(cluster: Cluster) -> str:
    parts = [f"gamma {cluster.gamma * 1e9:.3g} ns/B"]
    classes = (("node", cluster.ranks_per_node > 1), ("net", cluster.nodes > 1))
    for name, there in reversed(classes):
        if there:
            alpha, beta = getattr(cluster, f"{name}_alpha"), getattr(cluster, f"{name}_beta")
            parts.insert(0, f"{name} alpha {formatting.seconds(alpha)}, {name} beta {beta * 1e9:.3g} ns/B")
    return ", ".join(parts)
