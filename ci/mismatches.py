"""Generated mismatches: ranks that call different collectives, or differ in dtype, shape, op, root, counts or order, or
call on different communicators, or don't come at all. All of them have to be named, on all ranks, and none may hang or
pass.

    python ci/mismatches.py                      all of it: on threads, and in jobs of mpirun
    python ci/mismatches.py --threads 50         so many on threads, and none in jobs unless --jobs or --fatal say so
    python ci/mismatches.py --cases 1 --seed 7   other ones

Under MPICOLL_CHECK most of them are noticed before anything is sent: then one job runs many, since its communicators
stay usable. Those that leave ranks waiting take a job each. Prints a table; the exit status is 0 if all is well.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
os.environ.setdefault("MPICOLL_TUNED", "off")

from support import mismatches
from support.launch import mpirun

import mpicoll

SIZES = (2, 3, 4)

MISSING = {
    "ends": "pass",
    "exits with 0": "sys.exit(0)",
    "exits with 3": "sys.exit(3)",
    "fails": "raise ValueError('bad luck')",
    "vanishes": "os._exit(0)",
    "sleeps": "time.sleep(60)",
    "waits for a message": "mpicoll.recv(np.empty(3), (rank + 1) % size)",
}
"""What a rank may do in the place of a collective."""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--threads", type=int, metavar="N", help="cases on threads")
    parser.add_argument("--jobs", type=int, metavar="N", help="cases in jobs, for each face and number of ranks")
    parser.add_argument("--fatal", type=int, metavar="N", help="cases that take a job each")
    parser.add_argument("--ranks", nargs=3, metavar=("FACE", "FIRST", "COUNT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    given = (arguments.threads, arguments.jobs, arguments.fatal)
    default = (105, 28, 24) if given == (None, None, None) else (0, 0, 0)
    for name, value, other in zip(("threads", "jobs", "fatal"), given, default, strict=True):
        setattr(arguments, name, other if value is None else value)
    return arguments


class Table:
    """What was done, by kind."""

    def __init__(self) -> None:
        self.done: Counter[tuple[str, str]] = Counter()
        self.failures: list[str] = []

    def add(self, where: str, kind: str, failure: str) -> None:
        """One case."""
        self.done[where, kind] += 1
        if failure:
            self.failures.append(failure)
            print(f"FAILED, {where}: {failure}\n", flush=True)

    def show(self) -> None:
        """Print it."""
        wheres = list(dict.fromkeys(where for where, _ in self.done))
        kinds = list(dict.fromkeys(kind for _, kind in self.done))
        width = max(map(len, wheres))
        print(" " * width, *(f"{kind:>9}" for kind in kinds), f"{'all':>9}")
        for where in wheres:
            counts = [self.done[where, kind] for kind in kinds]
            print(f"{where:{width}}", *(f"{count:9}" for count in counts), f"{sum(counts):9}")
        total = sum(self.done.values())
        print(f"{total} mismatches: {total - len(self.failures)} named on all ranks, {len(self.failures)} failures")


def on_threads(seed: str, count: int, table: Table) -> None:
    """`count` cases on threads of this process."""
    for one in mismatches.cases(seed, count, SIZES, "native"):

        def body(wanted: mismatches.Case = one) -> str:
            world = mpicoll.world()
            with mpicoll.debug():
                return mismatches.check(wanted, world, lambda spec, form: mismatches.native(spec, world, form))

        try:
            failure = next(filter(None, mpicoll.run_local(body, one.size, timeout=20.0)), "")
        except Exception as error:  # noqa: BLE001  it is told
            failure = f"{one}\n{type(error).__name__}: {error}"
        table.add("threads, native", one.kind, failure)


def in_jobs(seed: str, count: int, table: Table) -> None:
    """`count` cases for each face and number of ranks, all of one job. One that ends early is a failure."""
    for face in mismatches.FACES:
        for size in SIZES:
            where = f"{size} ranks, {face}"
            command = ["--seed", seed, "--ranks", face, "0", str(count)]
            ended = mpirun(size, Path(__file__), *command, seconds=60 + count, MPICOLL_CHECK="1", MPICOLL_TIMEOUT="30")
            lines = [line for line in ended.stdout.splitlines() if line.startswith("done ")]
            for line in lines:
                _, kind, failure = line.split(" ", 2)
                table.add(where, kind, failure.replace("\\n", "\n").strip())
            if len(lines) != count or ended.returncode:
                table.add(where, "job", f"exit status {ended.returncode} after {len(lines)} cases:\n{ended.stdout}")


def ranks(seed: str, face: str, first: int, count: int) -> None:
    """On the ranks of a job: a line for each case."""
    world: Any = mpicoll.world()
    comm, group = world, None
    if face == "torch":
        import torch.distributed as dist

        from mpicoll.torch import communicator

        dist.init_process_group("mpicoll")
        group = dist.group.WORLD
        comm = communicator(group)

    def call(spec: mismatches.Spec, form: str) -> None:
        if face == "torch":
            mismatches.torch(spec, group, form)
        else:
            mismatches.native(spec, comm, form)

    for number in range(first, first + count):
        one = mismatches.case(seed, number, world.size, face)
        failure = mismatches.check(one, comm, call)
        if world.rank == 0:
            print(f"done {one.kind} {failure!r}"[:-1].replace(" '", " ", 1).replace(' "', " ", 1), flush=True)
    if face == "torch":
        dist.destroy_process_group()


PROGRAM = """
import os, sys, time
import numpy as np
import mpicoll
world = mpicoll.world()
rank, size = world.rank, world.size
{begin}

def collective(comm=world):
    {call}

{body}
"""

TORCH_BEGIN = """
import torch
import torch.distributed as dist
dist.init_process_group("mpicoll")
"""


def fatal(count: int, table: Table, folder: Path) -> None:
    """`count` cases that leave ranks waiting, each in a separate job."""
    wanted = []
    for number in range(count):
        size, face, form = SIZES[number % 3], mismatches.FACES[number // 3 % 2], mismatches.FORMS[number // 2 % 2]
        checked = number % 5 != 0  # without checks, too
        later = form == "background"
        if number % 3 == 2:
            wanted.append(_groups(number, size, face, later, checked))
        else:
            how = list(MISSING)[number * 2 // 3 % len(MISSING)]
            wanted.append(_missing(number, size, face, later, checked, how))
    for kind, where, size, program, checked, words in wanted:
        path = folder / "program.py"
        path.write_text(program)
        begin = time.monotonic()
        ended = mpirun(
            size, path, seconds=40, cwd=folder, MPICOLL_TIMEOUT="4", **({"MPICOLL_CHECK": "1"} if checked else {})
        )
        seconds = time.monotonic() - begin
        absent = [word for word in words if word not in ended.stdout]
        failure = ""
        if ended.returncode in (0, 124, 137) or "passed silently" in ended.stdout or absent:
            failure = f"exit status {ended.returncode} after {seconds:.0f} s, absent: {absent}\n{program}{ended.stdout}"
        table.add(where, kind, failure)


def _call(face: str, later: bool) -> tuple[str, str]:
    """A line that calls a collective on ``comm``, and how messages name it."""
    if face == "torch":
        line = "dist.all_reduce(torch.ones(3), async_op=True).wait()" if later else "dist.all_reduce(torch.ones(3))"
        return line, "all_reduce("
    line = "mpicoll.iallreduce(np.ones(3), comm=comm).wait()" if later else "mpicoll.allreduce(np.ones(3), comm=comm)"
    return line, "allreduce("


def _missing(number: int, size: int, face: str, later: bool, checked: bool, how: str) -> Any:
    """The last rank does something else than to call."""
    call, name = _call(face, later)
    body = f"""
collective()
if rank == size - 1:
    {MISSING[how]}
else:
    collective()
    print("passed silently")
"""
    where = f"job each, {face}"
    program = PROGRAM.format(begin=TORCH_BEGIN if face == "torch" else "", call=call, body=body)
    # A rank that fails ends the job by itself, and its traceback says why.
    words = {"fails": ["bad luck"], "exits with 3": ["3"]}.get(how, [name, f"rank {size - 1}"])
    return "missing", where, size, program, checked, words


def _groups(number: int, size: int, face: str, later: bool, checked: bool) -> Any:
    """The ranks call on two communicators, one of them on the other one first; or each on one alone."""
    call, name = _call("native", later)
    first, second = ("one", "other") if number % 2 else ("other", "one")
    also = "" if number % 4 < 2 else f"\ncollective({second} if rank == 0 else {first})"
    body = f"""
one, other = world.split(0), world.split(0)
collective({first} if rank == 0 else {second}){also}
print("passed silently")
"""
    return "group", "job each, native", size, PROGRAM.format(begin="", call=call, body=body), checked, [name, "rank 0"]


def main() -> None:
    arguments = _arguments()
    if arguments.ranks is not None:
        face, first, count = arguments.ranks
        ranks(arguments.seed, face, int(first), int(count))
        return
    table, begin = Table(), time.monotonic()
    on_threads(arguments.seed, arguments.threads, table)
    if arguments.jobs:
        in_jobs(arguments.seed, arguments.jobs, table)
    if arguments.fatal:
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            fatal(arguments.fatal, table, Path(folder))
    table.show()
    print(f"{time.monotonic() - begin:.0f} s")
    sys.exit(bool(table.failures))


if __name__ == "__main__":
    main()
