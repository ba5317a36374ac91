"""Random operations, each compared with an oracle: every collective, operation, dtype, form and algorithm, messages,
plans, requests under way in any number, groups made and freed.

    python ci/random_operations.py --operations 10000 --seed 1                  on threads, 1 to 5 ranks
    mpirun -np 4 python ci/random_operations.py --operations 10000 --seed 1     on MPI
    mpirun -np 4 python ci/random_operations.py --operations 5000 --torch       torch.distributed on mpicoll
    torchrun --nproc-per-node 4 ci/random_operations.py --operations 5000       without MPI
    python ci/hosts.py 2 2 python ci/random_operations.py --operations 5000     between hosts, with --torch too

Everything is done twice: as fast as it goes, and with delays, of messages (on threads) and of ranks that sleep before
some of their calls. The operations come in programs that know nothing of each other: what fails is repeated by
``--only``, whose number is in the message. The exit status is 0 if every result was right.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
os.environ.setdefault("MPICOLL_TIMEOUT", "120")
os.environ.setdefault("MPICOLL_TUNED", "off")

from support import random_programs

import mpicoll


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=1000, help="for each number of ranks, and each kind of delay")
    parser.add_argument("--seed", default="1")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 3, 4, 5], help="numbers of ranks, on threads")
    parser.add_argument("--delays", choices=("off", "on", "both"), default="both")
    parser.add_argument("--only", type=int, nargs="+", metavar="NUMBER", help="of the programs to run")
    parser.add_argument("--torch", action="store_true", help="through torch.distributed")
    return parser.parse_args()


def _on_threads(seed: str, number: int, size: int, delays: bool) -> Counter[str]:
    """One program. Three in turn say how many ranks share a node: all, one, two."""
    everyone = mpicoll.run_local(
        lambda: random_programs.run(seed, number, sleeps=delays),
        size,
        faults=random_programs.faults(seed, number, size) if delays else (),
        ranks_per_node=(None, 1, 2)[number % 3],
    )
    return sum(everyone, Counter())


def _runs(arguments: argparse.Namespace) -> Iterable[tuple[str, bool, Callable[[int, bool], Counter[str]]]]:
    """What there is to run: its name, whether there are delays, and a function of a program's number and that."""
    kinds = {"off": [False], "on": [True], "both": [False, True]}[arguments.delays]
    world = mpicoll.world()
    for delays in kinds:
        if arguments.torch:
            from support import random_torch

            yield f"torch, {world.size} ranks", delays, lambda n, d: random_torch.run(arguments.seed, n, sleeps=d)
        elif world.mpi is not None or world.size > 1:
            yield (
                f"{'tcp' if world.mpi is None else 'mpi'}, {world.size} ranks",
                delays,
                lambda n, d: random_programs.run(arguments.seed, n, sleeps=d),
            )
        else:
            for size in arguments.sizes:
                name = f"threads, {size} ranks"
                yield name, delays, lambda n, d, size=size: _on_threads(arguments.seed, n, size, d)


def _table(done: Counter[str]) -> str:
    """Rows of what was done how often, by the first words of the names."""
    kinds: dict[str, list[str]] = {}
    for name, count in sorted(done.items()):
        kind, _, rest = name.rpartition(": ")
        kinds.setdefault(kind, []).append(f"{rest} {count}")
    return "\n".join(f"  {kind}: {', '.join(rows)}" for kind, rows in kinds.items())


def main() -> None:
    arguments = _arguments()
    world = mpicoll.world()
    first = world.rank == 0
    done: Counter[str] = Counter()
    numbers = arguments.only or range(-(-arguments.operations // random_programs.OPERATIONS))
    for name, delays, program in _runs(arguments):
        begin = time.monotonic()
        for number in numbers:
            try:
                done += program(number, delays)
            except Exception as error:
                word = f"--seed {arguments.seed} --only {number} --delays {'on' if delays else 'off'}"
                word += " --torch" if arguments.torch else "" if world.size > 1 else f" --sizes {name.split()[1]}"
                sys.stderr.write(f"\nWRONG on rank {world.rank}; again by: {word}\n{error}\n\n")
                raise
        if first:
            operations = len(numbers) * random_programs.OPERATIONS
            seconds = time.monotonic() - begin
            word = "delays" if delays else "no delays"
            print(
                f"{name}, {word}, seed {arguments.seed}: {operations} operations, 0 wrong, {seconds:.0f} s", flush=True
            )
    if first:
        print("what the ranks of this process did:")
        print(_table(done))
    if arguments.torch:
        import torch.distributed

        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
