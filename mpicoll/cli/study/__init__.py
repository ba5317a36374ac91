"""``mpicoll study sync``: compare ways to synchronise a data-parallel model, on existing ranks or on new ones.

:mod:`~mpicoll.cli.study.methods` defines what is compared, :mod:`~mpicoll.cli.study.laws` states how many bytes each
method moves, :mod:`~mpicoll.cli.study.job` measures on each rank, :mod:`~mpicoll.cli.study.prediction` simulates more
ranks, and :mod:`~mpicoll.cli.study.report` and :mod:`~mpicoll.cli.study.page` show the results.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpicoll.cli import formatting, start_ranks

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001  it has no public name

_DESCRIPTION = """\
Compare ways to synchronise the gradients of a data-parallel model: parameter servers, and several all-reduces. For each
size of the model: the time of a step, the bytes through the link of the busiest rank beside the law, and the time that
the simulator predicts for a cluster.

  mpicoll study sync                          on 2 ranks, then on 4
  mpirun -np 8 mpicoll study sync             on the ranks that are there
  mpicoll study sync --page out               write a page with figures, as Markdown and HTML
  mpicoll study sync --read a.json --page out make the page of earlier measurements
"""

_EPILOG = """\
A step gives all workers the new weights: the gradients are summed, and the weights are updated, by the servers or on
each rank. Computation of gradients is not part of it. The first step of each method is checked. Methods take turns; a
time is the median over blocks of steps of the time of the slowest rank. The exit status is 1 if weights were wrong.
"""


def add(commands: Commands) -> None:
    """Add the command's parser."""
    from mpicoll.cli.simulate import add_costs
    from mpicoll.schedules import Cluster

    parser = commands.add_parser("study", help="compare ways to synchronise a model")
    studies = parser.add_subparsers(title="studies", required=True, metavar="STUDY")
    sync = studies.add_parser(
        "sync",
        help="parameter servers and all-reduces: time, bytes, laws and predictions",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=formatting.HelpFormatter,
    )
    sync.add_argument(
        "--sizes", type=formatting.sizes, default="64k,1m,8m", metavar="SIZES", help="of the model in bytes (64k,1m,8m)"
    )
    sync.add_argument("--ranks", type=_numbers, metavar="N,N", help="ranks of the jobs to start (2,4)")
    sync.add_argument("--algorithms", metavar="NAMES", help="such as parameter_server,ring,native (all)")
    sync.add_argument("--servers", type=_numbers, default="1,2", metavar="S,S", help="of a parameter server (1,2)")
    sync.add_argument("--seconds", type=float, default=2.0, metavar="S", help="to spend on each size (2)")
    sync.add_argument("--limit", type=float, default=600.0, metavar="S", help="end a job that takes longer (600)")
    sync.add_argument(
        "--read", type=Path, action="append", default=[], metavar="FILE", help="measure nothing, show this --json file"
    )
    sync.add_argument("--predict", type=int, default=1024, metavar="P", help="simulate up to P ranks; 0: none (1024)")
    sync.add_argument("--ranks-per-node", type=int, default=1, metavar="N", help="of the simulated cluster (1)")
    add_costs(sync, Cluster(nodes=1024, ranks_per_node=1))
    sync.add_argument("--label", metavar="TEXT", help="what to call this machine or network in tables and figures")
    formatting.add_json(sync)
    sync.add_argument("--page", type=Path, metavar="DIR", help="write synchronisation.md, .html and the figures there")
    sync.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure on the ranks that the launcher has started, or in new jobs; return 1 if a method gave wrong weights.

    Raises ArgumentError for arguments that cannot be measured, SetupError for missing requirements.
    """
    import os
    import sys

    from mpicoll.cli.bench.measure import Wrong
    from mpicoll.cli.study import methods, report
    from mpicoll.engine.world import world
    from mpicoll.errors import ArgumentError
    from mpicoll.transport import launch_env

    names = tuple(args.algorithms.split(",")) if args.algorithms else methods.NAMES
    methods.check_names(names)
    _check(args)
    launched = launch_env.is_launched(os.environ)
    if launched and args.ranks is not None:
        raise ArgumentError("study sync: --ranks is for jobs that the command starts; leave it out under mpirun")
    progress = formatting.shows_progress(args.json)
    try:
        runs = [report.read(file) for file in args.read] if args.read else _measure(args, names, launched, progress)
    except Wrong as error:
        if not launched or world().rank == 0:  # all ranks have raised it alike
            sys.stderr.write(f"mpicoll: {error}\n")
        return 1
    if runs is None:
        return 0  # another rank than the first one
    study: dict[str, Any] = {"runs": [run for one in runs for run in one["runs"]]}
    study["prediction"] = _predict(args, names, progress)
    if args.json != "-":
        report.show(study)
    if args.json is not None:
        formatting.write_json(args.json, study)
    if args.page is not None:
        from mpicoll.cli.study.page import write_page

        for file in write_page(args.page, study):
            if args.json != "-":
                formatting.console().print(f"written to {file}")
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raise ArgumentError for numbers out of range, SetupError or OSError if no page can be written."""
    from mpicoll.errors import ArgumentError

    if args.ranks_per_node < 1 or not args.seconds > 0:
        raise ArgumentError("study sync: --ranks-per-node and --seconds must be more than 0")
    if args.predict < 0:
        raise ArgumentError(f"study sync: --predict must be at least 0, got {args.predict}")
    if not args.limit > 0:
        raise ArgumentError(f"study sync: --limit must be a positive number of seconds, got {args.limit}")
    if args.page is not None:
        formatting.require_matplotlib()
        args.page.mkdir(parents=True, exist_ok=True)  # an error comes before the measurement, not after it


def _measure(
    args: argparse.Namespace, names: tuple[str, ...], launched: bool, progress: bool
) -> list[dict[str, Any]] | None:
    """Return the measurements of one job, or of a job for each number of ranks; None on ranks that have none."""
    from mpicoll.cli.study import job, methods
    from mpicoll.engine.world import world
    from mpicoll.errors import ArgumentError

    sizes = [world().size] if launched else args.ranks or [2, 4]
    if not any(methods.list_methods(names, args.servers, ranks) for ranks in sizes):
        raise ArgumentError(
            f"study sync: --servers {','.join(map(str, args.servers))} leaves no worker on {max(sizes)} ranks; have"
            " fewer servers, or more ranks"
        )
    asked = job.Measurements(names, tuple(args.servers), tuple(args.sizes), args.seconds, progress)
    if launched:
        found = [job.main(0, asked)]
    else:
        found = [start_ranks.start(job.main, (asked,), ranks, args.limit)[0] for ranks in sizes]
    runs = [{"label": args.label, **run} for run in found if run is not None]
    return [{"runs": runs}] if runs else None


def _predict(args: argparse.Namespace, names: tuple[str, ...], progress: bool) -> dict[str, Any] | None:
    from mpicoll.cli.cost_fit import COSTS
    from mpicoll.cli.study.prediction import list_sizes, predict
    from mpicoll.schedules import Cluster

    ranks = list_sizes(args.predict, args.ranks_per_node)
    if not ranks:
        return None
    costs = {name: getattr(args, name) for name in COSTS}
    cluster = Cluster(nodes=ranks[-1] // args.ranks_per_node, ranks_per_node=args.ranks_per_node, **costs)
    with formatting.steps(progress, len(ranks), measures=False) as step:
        return predict(names, args.sizes, ranks, cluster, step)


def _numbers(text: str) -> list[int]:
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 2,4") from None
    if numbers[0] < 1:
        raise argparse.ArgumentTypeError(f"{text} has a number below 1")
    return numbers
