"""``mpicoll tune``: measure all applicable algorithms, and write the fastest ones to the table of later runs.

:mod:`~mpicoll.cli.tune.settings` checks the arguments, :mod:`~mpicoll.cli.tune.job` is what each rank runs,
:mod:`~mpicoll.cli.tune.measure` times algorithms and messages, and :mod:`~mpicoll.cli.tune.winners` makes rules of the
times.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mpicoll.cli import formatting, start_ranks

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001  it has no public name

_DESCRIPTION = """\
Measure every algorithm that can serve, and write down which one to take: by collective, size, class of dtypes, and
number of ranks and nodes. Later runs on such machines, with this MPI library, go by that table.

  mpicoll tune                        all collectives on 2 ranks
  mpicoll tune allreduce -np 2,4      one collective, on 2 ranks and then on 4
  mpirun -np 8 mpicoll tune           on the ranks that are there
  mpicoll tune --device cuda -np 4    for data on devices such as these, shared by as many ranks

What was measured before for other collectives, sizes and shapes stays in the table.
"""

_EPILOG = """\
What is taken untuned stays unless another algorithm is at least 5 % faster. A time is the median over blocks of calls
of the time of the slowest rank; algorithms take turns. In the tables, "-" is what can't serve, or was left out because
a first look showed it to take more than three times as long as the best; "good" is the time of the best divided by that
of the one that is taken.
"""


def add(commands: Commands) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "tune",
        help="measure which algorithms to take, for later runs",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=formatting.HelpFormatter,
    )
    parser.add_argument("collectives", nargs="*", metavar="COLLECTIVE", help="one or more, or all (all)")
    parser.add_argument("--sizes", default="8-64m", metavar="SIZES", help="in bytes: 8-64m (times --factor), or 8,1k")
    parser.add_argument("--factor", type=int, default=4, metavar="N", help="from size to size in a range (4)")
    parser.add_argument(
        "--dtypes", default="float32", metavar="NAMES", help="one of each class to tune for, such as float32,bfloat16"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="where the arrays are (cpu)")
    parser.add_argument("--array", choices=("torch", "cupy"), help="what they are on a device (torch, if it has CUDA)")
    parser.add_argument("-np", metavar="N", help="ranks to start, where mpirun has not started any: 2 or 2,4,8 (2)")
    parser.add_argument("--seconds", type=float, default=0.2, metavar="S", help="to spend on each size (0.2)")
    parser.add_argument("--blocks", type=int, metavar="N", help="time exactly so many blocks, whatever it takes")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the table to add to (where later runs look)")
    parser.add_argument("--dry-run", action="store_true", help="write nothing, print the rules")
    parser.add_argument("--check", action="store_true", help="measure again, and compare what is taken with the best")
    parser.add_argument("--limit", type=float, default=3600.0, metavar="S", help="end a job that takes longer (3600)")
    formatting.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Tune on the ranks that the launcher has started, or in new jobs.

    Raises ArgumentError for arguments that cannot be tuned, SetupError if a requirement is missing or the table cannot
    be read or written.
    """
    import os

    from mpicoll.cli.tune import job
    from mpicoll.cli.tune.settings import parse_ranks, parse_settings
    from mpicoll.engine.selection import tuned_table
    from mpicoll.errors import ArgumentError
    from mpicoll.transport import launch_env

    asked = parse_settings(args)
    if asked.output is not None:
        tuned_table.load_existing(asked.output)  # before anything is measured
    sizes = parse_ranks(args.np)
    with disable_tuning():
        if launch_env.is_launched(os.environ):
            ended = [job.main(0, asked, sizes)]
        else:
            if 1 in sizes:
                raise ArgumentError("tune: a single rank has nothing to choose; pass -np 2 or more")
            asked.width = formatting.terminal_width()
            ended = [
                one for size in sizes or (2,) for one in start_ranks.start(job.main, (asked, (size,)), size, args.limit)
            ]
    found = [measured for _, measured in ended if measured is not None]
    if args.json is not None and found:  # not on the other ranks
        formatting.write_json(args.json, {"jobs": found})
    return max(status for status, _ in ended)


@contextmanager
def disable_tuning() -> Iterator[None]:
    """Disable forced algorithms and tuned tables, here and in jobs started here, to compare with the untuned choice."""
    import os

    names = ("MPICOLL_TUNE", "MPICOLL_TUNED", "MPICOLL_ALGORITHMS")
    before = {name: os.environ.pop(name, None) for name in names}
    os.environ["MPICOLL_TUNE"] = os.environ["MPICOLL_TUNED"] = "off"
    try:
        yield
    finally:
        del os.environ["MPICOLL_TUNE"], os.environ["MPICOLL_TUNED"]
        os.environ.update({name: value for name, value in before.items() if value is not None})
