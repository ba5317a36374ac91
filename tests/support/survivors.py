"""Jobs with MPI's fault tolerance (ULFM) in which ranks die, and the others continue.

For ci/deaths.py and tests/engine/diagnostics/test_survivors.py. As a program, this is run by each rank of such a job.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

KINDS = ("TERM", "INT", "KILL", "SEGV", "_exit0", "_exit3", "exit3", "TERM-locked")
"""Kinds of death: a signal, ``os._exit`` or ``sys.exit`` with a status, or SIGTERM while the interpreter
lock is held."""

MOMENTS = ("step", "inside", "shrink", "agree", "exit")
"""The rank dies before a collective, in one, in place of calling ``shrink`` or ``agree`` after the death of another
rank, or at exit."""


@dataclass(frozen=True)
class Case:
    """The death of `victim`."""

    kind: str
    moment: str
    victim: int
    size: int = 4

    def __str__(self) -> str:
        return f"{self.kind} {self.moment} {self.victim}/{self.size}"

    @property
    def survivors(self) -> int:
        """Number of ranks that run to the end of the program."""
        return self.size - (self.moment != "exit") - (self.moment in ("shrink", "agree"))


def matrix() -> Iterator[Case]:
    """Every case. The last rank is the one that dies first where two die."""
    for kind, moment, victim in itertools.product(KINDS, MOMENTS, (0, 1)):
        # While the main thread waits in an operation, it does not call sys.exit; Python ends no thread at exit.
        if (kind, moment) not in (("exit3", "inside"), ("exit3", "exit"), ("INT", "exit")):
            yield Case(kind, moment, victim)


def run(case: Case, hosts: Sequence[int] = ()) -> CompletedProcess[str]:
    """Run the job of this case; with `hosts`, on hosts of ci/hosts.py with so many ranks on each."""
    from support import apart
    from support.launch import mpirun

    arguments = (case.kind, case.moment, str(case.victim))
    bounds = {"MPICOLL_TIMEOUT": "60", "MPICOLL_REPORT": "off"}
    if hosts:
        return apart.survive(hosts, __file__, *arguments, seconds=50, **bounds)
    return mpirun(case.size, __file__, *arguments, seconds=50, options=("--with-ft", "ulfm"), **bounds)


def find_problem(case: Case, done: CompletedProcess[str]) -> str:
    """Return in which way the survivors did not continue; "" if they did."""
    ended = done.stdout.count("has finished")
    if done.returncode != 0:
        return f"status {done.returncode}, and {ended} ranks have finished"
    return "" if ended == case.survivors else f"{ended} ranks have finished, not {case.survivors}"


def _die(kind: str) -> None:
    if kind == "C_exit3":  # not in the matrix, for the others do not survive it
        ctypes.CDLL(None)._exit(3)
    if kind.startswith("_exit"):
        os._exit(int(kind[5:]))
    if kind.startswith("exit"):
        sys.exit(int(kind[4:]))
    os.kill(os.getpid(), getattr(signal, f"SIG{kind.removesuffix('-locked')}"))
    if kind.endswith("-locked"):
        sum(range(10**11))
    time.sleep(30)


def main(kind: str, moment: str, victim: int) -> None:
    """Run collectives, and recover from deaths, as a rank."""
    import mpicoll

    world = comm = mpicoll.world()
    rank, size = world.rank, world.size
    pids = mpicoll.allgather(os.getpid()).tolist()

    def die_at(here: str) -> None:
        if (rank, here) == (victim, moment):
            _die(kind)

    while True:
        try:
            if comm is not world:
                die_at("agree")
                assert comm.agree(True)
            _add(comm, 10)
            if comm is world:
                if moment in ("shrink", "agree") and rank == size - 1:
                    _die("KILL")
                die_at("step")
                if moment == "inside" and rank == victim:
                    threading.Timer(0.2, _die, [kind]).start()
                elif moment == "inside":
                    _wait_for_death(pids[victim])
            _add(comm, 10)
            break
        except mpicoll.RankFailed:
            die_at("shrink")
            comm = comm.shrink()
    print(f"rank {rank} of {size} has finished", flush=True)
    if (rank, moment) == (victim, "exit"):
        atexit.register(_die, kind)


def _wait_for_death(pid: int) -> None:
    """Wait until a process is gone or a zombie, at most 20 s."""
    deadline = time.monotonic() + 20
    with suppress(FileNotFoundError, ProcessLookupError):
        while Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z" and time.monotonic() < deadline:
            time.sleep(0.01)


def _add(comm: Any, times: int) -> None:
    import numpy as np

    import mpicoll

    for _ in range(times):
        assert mpicoll.allreduce(np.ones(4), comm=comm)[0] == comm.size


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
