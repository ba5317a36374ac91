"""``mpicoll bench``: compare the collectives of this library with their peers, on existing ranks or on new ones.

:mod:`~mpicoll.cli.bench.cases` defines the tasks, :mod:`~mpicoll.cli.bench.peers` the contestants,
:mod:`~mpicoll.cli.bench.measure` the method, and :mod:`~mpicoll.cli.bench.job` combines them on each rank.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpicoll.cli import formatting, start_ranks

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001  it has no public name

_DESCRIPTION = """\
Measure collectives: mpicoll's own choice, its other algorithms, and its peers.

  mpicoll bench                     allreduce from 8 B to 64 MiB, beside mpi4py
  mpicoll bench bcast alltoall      other collectives; all: all of them but those of the next line
  mpicoll bench neighbor_alltoall neighbor_allgather exchange_halo put get accumulate
                                    calls between the next ranks in a ring, with so many bytes for each
  mpicoll bench send sendrecv       messages: also isend, torch_send, torch_isend, dropin_send, batch and pipeline
  mpicoll bench overlap             how much of a collective is hidden behind computation
  mpicoll bench overhead            what each form of a call costs, and which are the slowest
  mpicoll bench --device cuda       on device memory, from 4 B to 256 MiB, beside gloo

Runs on the ranks that mpirun has started, or starts mpirun itself. Everything is checked against an oracle before it
is timed; contestants take turns; a time is the median over blocks of calls of the time of the slowest rank. Blocks
have as many calls for all contestants, or fewer for one that takes more than three times as long as the fastest.
"""

_EPILOG = """\
Calls are repeated on one input. Ranks that read it in memory of another rank, as MPI libraries do from some KiB on,
keep it in their caches, which they can't in a program that computes a new input for each call. With --rewrite each
rank writes its input before each call, for all contestants; the times include that, and "write" is that alone.

A call of a message is a round trip between two ranks, in which the second one answers; sendrecv and batch
(batch_isend_irecv) exchange at once. dropin_send is send of mpicoll.torch, pipeline that of mpicoll.parallel.PipeP2P.

put, get and accumulate of mpi4py are between Lock and Unlock, and its exchange_halo is two calls of Sendrecv.

busbw is as nccl-tests define it. "copy" is one copy of the buffer on every rank at once. gloo and nccl are timed apart
from the others, at each size. The exit status is 1 if mpicoll gave a wrong result.

On a device, all contestants work on memory of the rank's device and take turns, and each call ends when its result is
there. Ranks of which several share a device all read and write its memory: copy is the bound for their allreduce.
"""

_ONLY = {
    "compute": ("overlap",),
    "computing": ("overlap",),
    "against": ("sweep", "messages"),
    "algorithms": ("sweep",),
    "plan": ("sweep",),
    "registered": ("sweep",),
    "rewrite": ("sweep",),
    "plot": ("sweep",),
    "draw": ("sweep",),
    "blocks": ("sweep", "messages", "overhead"),
    "like": ("sweep", "messages", "overlap"),
    "device": ("sweep",),
    "array": ("sweep",),
}
"""Kinds of measurement that accept an option, for options that not all of them accept."""


def add(commands: Commands) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "bench",
        help="measure collectives against their peers",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=formatting.HelpFormatter,
    )
    parser.add_argument("what", nargs="*", metavar="COLLECTIVE", help="one or more, or all; see above (allreduce)")
    parser.add_argument("--sizes", metavar="SIZES", help="in bytes: 8-64m (times --factor), or 8,1k,1m")
    parser.add_argument("--factor", type=_at_least_2, default=2, metavar="N", help="from size to size in a range (2)")
    parser.add_argument(
        "--against",
        metavar="PEERS",
        help="of mpi4py, gloo, nccl, copy; none; (mpi4py; of messages also gloo, on a device gloo,nccl,copy)",
    )
    parser.add_argument(
        "--algorithms", metavar="NAMES", help="candidates beside mpicoll's own choice; all: all of them"
    )
    parser.add_argument("--dtype", default="float32", help="(float32)")
    parser.add_argument("--op", default="sum", help="sum, avg, prod, min or max (sum)")
    parser.add_argument("--like", choices=("numpy", "torch"), help="what the arrays are (numpy)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="where the arrays are (cpu)")
    parser.add_argument("--array", choices=("torch", "cupy"), help="what they are on a device (torch, if it has CUDA)")
    parser.add_argument("--plan", action="store_const", const=True, help="measure mpicoll's ..._init form")
    parser.add_argument(
        "--registered", action="store_const", const=True, help="mpicoll works on arrays of mpicoll.empty"
    )
    parser.add_argument(
        "--rewrite", action="store_const", const=True, help="write the input before each call; see below"
    )
    parser.add_argument("--compute", choices=("numpy", "python", "sleep"), help="overlap: what is computed (numpy)")
    parser.add_argument("--computing", type=_at_least_1, metavar="N", help="overlap: ranks that compute (all)")
    parser.add_argument("--seconds", type=_positive, default=0.5, metavar="S", help="to spend on each size (0.5)")
    parser.add_argument(
        "--blocks", type=_at_least_2, metavar="N", help="time exactly so many blocks, whatever it takes"
    )
    parser.add_argument("-np", type=int, metavar="N", help="ranks to start, where mpirun has not started any (2)")
    parser.add_argument(
        "--limit", type=_positive, default=3600.0, metavar="S", help="end a job that takes longer (3600)"
    )
    formatting.add_json(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it: .png, .svg or .pdf")
    parser.add_argument("--draw", choices=("time", "busbw"), help="what the plot shows (time)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure on the ranks that the launcher has started, or in a new job; return 1 if mpicoll gave a wrong result.

    Raises ArgumentError or AlgorithmError for arguments that cannot be measured, SetupError for missing requirements.
    """
    import os
    import shlex
    import sys

    from mpicoll.cli.bench import job
    from mpicoll.transport import launch_env

    settings = job.parse_settings(_fill_defaults(args))
    settings.command = shlex.join(["mpicoll", *sys.argv[1:]])
    settings.progress = formatting.shows_progress(settings.json)
    if launch_env.is_launched(os.environ):
        return job.main(0, settings)
    settings.width = formatting.terminal_width()
    return int(max(start_ranks.start(job.main, (settings,), settings.ranks or 2, settings.limit)))


def _fill_defaults(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments with their defaults, and with `kind`: sweep, messages, overlap or overhead."""
    from mpicoll.cli.bench.cases import MESSAGES
    from mpicoll.errors import ArgumentError

    given = vars(args).copy()
    what = given.pop("what")
    kind = what[0] if what and what[0] in ("overlap", "overhead") else "sweep"
    given["collectives"] = what[1:] if kind != "sweep" else what
    if what and what[0] in MESSAGES:
        kind = "messages"
    for option, kinds in _ONLY.items():
        if given[option] is not None and kind not in kinds:
            raise ArgumentError(f"bench {kind}: --{option} is for {' and '.join(kinds)} only; leave it out")
    sizes = {"sweep": "8-64m", "messages": "8,64k,16m", "overlap": "64k,1m,16m", "overhead": "8,1k,64k"}[kind]
    if given["device"] == "cuda":
        sizes = "4,64,1k,4k,16k,64k,256k,1m,4m,16m,64m,256m"
    try:
        given["sizes"] = formatting.sizes(given["sizes"] or sizes, given.pop("factor"))
    except argparse.ArgumentTypeError as error:
        raise ArgumentError(f"--sizes: {error}") from error
    return given | {"kind": kind}


def _at_least_1(text: str) -> int:
    return _at_least(1, text)


def _at_least_2(text: str) -> int:
    return _at_least(2, text)


def _at_least(least: int, text: str) -> int:
    number = int(text)
    if number < least:
        raise argparse.ArgumentTypeError(f"{text} is less than {least}")
    return number


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of seconds")
    return number
