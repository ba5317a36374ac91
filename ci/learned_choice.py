"""Is the algorithm that calls have learned the best one, and what did learning cost?

    mpirun -np 2 python ci/learned_choice.py
    python ci/hosts.py --rate 1gbit 2 2 python ci/learned_choice.py allreduce bcast --sizes 8,64k,2m    # as root

For each collective and size, the first calls of a program are made, with MPICOLL_TUNE=any unless it is set, and without
a tuned table. Then what they have learned is timed in turns with all algorithms that can serve.

* first: the time of the best algorithm divided by that of the one that the first call takes.
* learned: the same for the one that is taken after `--calls` calls.
* cost: what the calls from the second on took longer than as many later calls, less the same on communicators that
  learn nothing, divided by the time of 1,000 later calls: of the fastest of several communicators each. The first calls
  set up what an algorithm needs.

Rows with `learned` below 95 %, `first` below 80 % or `cost` above 2 % end with <.
"""

from __future__ import annotations

import argparse
import os
import time
from functools import partial
from statistics import median
from typing import Any

import mpicoll
from mpicoll import Communicator
from mpicoll.cli import formatting
from mpicoll.cli.bench.cases import COLLECTIVES, REDUCTIONS, Case, Workload
from mpicoll.cli.bench.measure import time_calls
from mpicoll.cli.bench.team import Team
from mpicoll.cli.tune.measure import measure_point
from mpicoll.cli.tune.settings import TuneSettings
from mpicoll.collectives.explain import make_call_query
from mpicoll.config import TuneMode
from mpicoll.engine.selection.selector import choose, unsupported_reasons
from mpicoll.engine.world import resolve, world

_COMMUNICATORS = 4
"""Communicators of each kind whose first calls are measured."""

_ROW = "{:14} {:>7} {:18} {:>6} {:18} {:>7} {:18} {:>7}"


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("collectives", nargs="*", help="all if left out")
    parser.add_argument("--sizes", default="8,512,8k,64k,512k,2m,16m,64m", help="in bytes")
    parser.add_argument("--calls", type=int, default=50, help="by which a choice has to be learned (50)")
    parser.add_argument("--blocks", type=int, default=9, help="of calls of each algorithm, timed in turns (9)")
    return parser.parse_args()


def measure_first_calls(
    team: Team, case: Case, comm: Communicator, calls: int, algorithm: str | None = None
) -> tuple[float, float]:
    """Return the seconds that the calls after the first took beyond as many later calls, and those of a later one."""
    name = case.workload.collective
    keywords: dict[str, Any] = {} if name == "barrier" else {"out": case.out}
    arguments = () if name == "barrier" else (case.x, "sum") if name in REDUCTIONS else (case.x,)
    call = partial(getattr(mpicoll, name), *arguments, **keywords, algorithm=algorithm, comm=comm)
    team.barrier()
    marks = [time.perf_counter()]
    for _ in range(calls):
        call()
        marks.append(time.perf_counter())
    (took,) = team.max_over_ranks([marks[-1] - marks[1]])
    later = median(team.max_over_ranks([time_calls(call, -(-calls // 9), team.barrier) for _ in range(9)]))
    return took - (calls - 1) * later, later


def check(team: Team, workload: Workload, calls: int, asked: TuneSettings) -> tuple[list[str], bool]:
    """Return the row of a workload, and True if it is as good as it has to be. Collective."""
    core = resolve(team.comm)
    query = make_call_query(workload.collective, workload.nbytes, "sum", "float32", 0, None, core, None)
    first = choose(query, None).name
    case = Case(workload, team.rank, "numpy")
    over: dict[TuneMode, list[float]] = {"off": [], core.tune: []}
    for _ in range(_COMMUNICATORS):
        for mode, found in over.items():
            comm = team.comm.duplicate()
            core = resolve(comm)
            core.tune = mode
            beyond, later = measure_first_calls(team, case, comm, calls)
            found.append(beyond)
    trials = core.trials.get(query)
    learned = first if trials is None else trials.winner
    # Those chosen may have a number of segments.
    names = list(dict.fromkeys((first, learned, *(one for one, why in unsupported_reasons(query).items() if not why))))
    for name in dict.fromkeys((first, learned)):
        # What is fixed by the first calls of an algorithm is timed as later calls are.
        measure_first_calls(team, case, team.comm, calls, name)
    looks, medians = measure_point(team, workload, names, learned, asked)
    # A first choice that a first look excluded keeps the time of that look.
    medians.setdefault(first, looks[first])
    best = min(medians, key=lambda name: medians[name])
    cost = (min(over[core.tune]) - min(over["off"])) / (1000 * later)
    good = {name: medians[best] / medians[name] for name in (first, learned)}
    row = [
        *(workload.collective, formatting.nbytes(workload.nbytes), best, f"{good[first]:.0%}", first),
        *(f"{good[learned]:.0%}", learned, f"{cost:.1%}"),
    ]
    return row, good[learned] >= 0.95 and good[first] >= 0.8 and cost <= 0.02


def main() -> None:
    arguments = read_arguments()
    os.environ["MPICOLL_TUNED"] = "off"
    os.environ.setdefault("MPICOLL_TUNE", "any")
    comm = world()
    team = Team(comm)
    asked = TuneSettings((), (), ("float32",), None, 0.2, arguments.blocks, None, check=False, progress=False)
    if team.rank == 0:
        print(f"{resolve(comm).context.layout}, MPICOLL_TUNE={os.environ['MPICOLL_TUNE']}")
        print(_ROW.format("collective", "size", "best", "first", "", "learned", "", "cost"), flush=True)
    failed = rows = 0
    for collective in arguments.collectives or COLLECTIVES:
        for size in formatting.sizes(arguments.sizes) if collective != "barrier" else (0,):
            workload = Workload(collective, size, "float32", "sum", comm.size)
            row, good = check(team, workload, arguments.calls, asked)
            rows += 1
            failed += not good
            if team.rank == 0:
                print(_ROW.format(*row), "" if good else "<", flush=True)
    if team.rank == 0:
        print(f"{rows - failed} of {rows} as good as asked", flush=True)


if __name__ == "__main__":
    main()
