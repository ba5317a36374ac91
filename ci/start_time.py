"""What the start of a job costs: whole jobs that do one all-reduce, of bare mpi4py and of mpicoll in turns.

    python ci/start_time.py                                       # 2, 4, 8, 16 and 48 ranks
    python ci/start_time.py --ranks 2,8,32,64 --jobs 3 --memory   # the memory of a rank as well
    python ci/start_time.py --tree before=../other-checkout       # another version of mpicoll beside this one

For each number of ranks it prints the medians over the jobs: seconds from the launch to the end of the all-reduce on
the last rank ("start"), seconds until the launcher has ended ("job"), and processor seconds of all ranks and the
launcher ("cpu"), each as a multiple of bare mpi4py's too. With ``--memory``, MiB of a rank after the all-reduce: those
that are its own ("private"), and those with its share of what several processes map ("pss"). Measure on a machine that
does nothing else.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mpicoll.transport.launcher import find_launcher, job_environment

BARE = "mpi4py"

PROGRAMS = {
    BARE: """
import numpy as np
from mpi4py import MPI
total = np.empty(1)
MPI.COMM_WORLD.Allreduce(np.ones(1), total)
""",
    "mpicoll": """
import numpy as np
import mpicoll
total = mpicoll.allreduce(np.ones(1))
""",
}

REPORT = """
import time
values = [time.monotonic()]
if {memory}:
    with open("/proc/self/smaps_rollup") as file:
        fields = dict(line.split(":", 1) for line in file.read().splitlines()[1:])
    kib = {{name: int(value.split()[0]) for name, value in fields.items()}}
    values += [(kib["Private_Clean"] + kib["Private_Dirty"]) / 1024, kib["Pss"] / 1024]
print(*values, flush=True)
assert total[0] == {ranks}
"""

LIMIT = 120.0
"""Seconds that a job may take."""

UNITS = {"start": "s", "job": "s", "cpu": "s", "private": "MiB", "pss": "MiB"}

Figures = dict[str, float]


def run(program: Path, ranks: int, tree: Path) -> Figures:
    """Run one job, with the package of the folder `tree`, and return what it took."""
    launcher = find_launcher()
    if launcher is None:
        raise SystemExit("there is no launcher for the MPI library of mpi4py")
    environ = job_environment(os.environ, root=os.getuid() == 0) | {"PYTHONPATH": f"{tree}"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begin = time.monotonic()
    done = subprocess.run(
        [launcher, "-np", f"{ranks}", sys.executable, program],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=LIMIT,
        env=environ,
    )
    end = time.monotonic()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    lines = [[float(word) for word in line.split()] for line in done.stdout.splitlines()]
    assert len(lines) == ranks, done.stdout
    moments, *memory = zip(*lines, strict=True)
    figures = {
        "start": max(moments) - begin,
        "job": end - begin,
        "cpu": after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime,
    }
    return figures | {name: statistics.mean(one) for name, one in zip(("private", "pss"), memory, strict=False)}


def print_table(ranks: int, found: dict[str, list[Figures]]) -> None:
    """Print the medians of the jobs of `ranks` ranks, by name."""
    bare = {name: statistics.median(one[name] for one in found[BARE]) for name in found[BARE][0]}
    for what, figures in found.items():
        words = [f"{ranks:5d} ranks  {what:10s}"]
        for name, base in bare.items():
            value = statistics.median(one[name] for one in figures)
            multiple = "" if what == BARE else f"({value / base:.2f}x)"
            words.append(f"{name} {value:6.2f} {UNITS[name]} {multiple:7s}")
        print("  ".join(words).rstrip(), flush=True)


def main() -> None:
    """Measure what the arguments state."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4,8,16,48", help="numbers of ranks (2,4,8,16,48)")
    parser.add_argument("--jobs", type=int, default=5, help="jobs of each kind (5)")
    parser.add_argument("--memory", action="store_true", help="measure the memory of a rank as well")
    parser.add_argument(
        "--tree", action="append", default=[], metavar="NAME=FOLDER", help="another checkout; may be repeated"
    )
    args = parser.parse_args()
    trees = {BARE: Path.cwd(), "mpicoll": Path(__file__).resolve().parent.parent}
    trees |= {name: Path(folder).resolve() for name, folder in (one.split("=", 1) for one in args.tree)}
    with tempfile.TemporaryDirectory() as scratch:
        for ranks in map(int, args.ranks.split(",")):
            found: dict[str, list[Figures]] = {name: [] for name in trees}
            report = REPORT.format(memory=args.memory, ranks=ranks)
            for _ in range(args.jobs):
                for name, tree in trees.items():
                    program = Path(scratch) / f"job_{name}.py"  # else it would be imported in place of mpi4py
                    program.write_text(PROGRAMS.get(name, PROGRAMS["mpicoll"]) + report)
                    found[name].append(run(program, ranks, tree))
            print_table(ranks, found)


if __name__ == "__main__":
    main()
