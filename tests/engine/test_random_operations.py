"""Some hundred random operations for each number of ranks, and some thousand in a row: the small forms of
ci/random_operations.py and ci/soak.py."""

from __future__ import annotations

from collections.abc import Callable
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest
from support import random_programs
from support.launch import ROOT, mpirun

import mpicoll
from mpicoll.engine.selection.catalogue import algorithms_of
from mpicoll.extension import find_missing_reason

PROGRAMS = 6
"""Programs of 40 operations for each configuration."""


@pytest.mark.parametrize("delays", [False, True], ids=["swift", "delayed"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_on_threads(size: int, delays: bool) -> None:
    for number in range(PROGRAMS):
        mpicoll.run_local(
            lambda number=number: random_programs.run("threads", number, sleeps=delays),
            size,
            faults=random_programs.faults("threads", number, size) if delays else (),
            ranks_per_node=(None, 1, 2)[number % 3],
        )


@pytest.mark.mpi
@pytest.mark.parametrize("delays", [False, True], ids=["swift", "delayed"])
def test_on_mpi(delays: bool) -> None:
    for number in range(PROGRAMS):
        random_programs.run("mpi", number, sleeps=delays)


@pytest.mark.slow
def test_every_algorithm_has_its_turn() -> None:
    """What refuses everything would never be wrong."""
    collectives = set(mpicoll.schedules.collectives()) - {"barrier"}
    # there is no MPI behind threads, and the data is on the host
    missing = {name for collective in collectives for name in algorithms_of(collective)} - {"native", "nccl", "ipc"}
    if find_missing_reason() is not None:
        missing -= {"shm_flat", "shm_pipelined", "cma", "shm_or_cma"}
    number = 0
    while missing and number < 60:
        everyone = mpicoll.run_local(random_programs.run, 4, "names", number, ranks_per_node=(4, 2)[number % 2])
        missing -= {name for done in everyone for name in missing if done[f"algorithm: {name}"]}
        number += 1
    assert not missing


def test_a_wrong_result_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    right = mpicoll.allgather

    def wrong(x: Any, **options: Any) -> Any:
        result = right(x, **options)
        if isinstance(result, np.ndarray) and result.size and mpicoll.world().rank == 1:
            result.reshape(-1).view(np.uint8)[-1] ^= 1
        return result

    def programs() -> None:
        for number in range(PROGRAMS):
            mpicoll.run_local(random_programs.run, 2, "threads", number)

    monkeypatch.setattr(mpicoll, "allgather", wrong)
    with pytest.raises(AssertionError, match=r"program \d+ of seed threads, operation \d+, rank 1 of 2: .*allgather"):
        programs()


@pytest.mark.slow
def test_the_command() -> None:
    """On MPI and by torch, and what it prints."""
    ran = mpirun(2, ROOT / "ci" / "random_operations.py", "--operations", "40", "--torch", seconds=110, warm=True)
    assert ran.returncode == 0, ran.stdout
    assert ran.stdout.count("40 operations, 0 wrong") == 2, ran.stdout


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("1000",), ("250", "--torch")], ids=["native", "torch"])
def test_soak(arguments: tuple[str, ...]) -> None:
    # in so few operations memory does not come to rest
    ran = mpirun(2, ROOT / "ci" / "soak.py", "--growth", "8", "--operations", *arguments, seconds=110, warm=True)
    assert ran.returncode == 0, ran.stdout
    assert "after the warm-up" in ran.stdout


@pytest.mark.slow
def test_a_leak_is_reported(python: Callable[..., CompletedProcess[str]]) -> None:
    ran = python(
        f"""
import sys, numpy as np
sys.path.insert(0, {str(ROOT / "ci")!r})
import soak

class Leaking(soak.Soak):
    kept = []
    def step(self):
        super().step()
        self.kept.append(np.ones(2000))
        if self.number % 200 == 0:
            self.kept.append(open("/dev/null"))

resident, descriptors, *_ = soak.run(Leaking("1"), 2000)
assert resident > 8, resident
assert descriptors > 3, descriptors
"""
    )
    assert ran.returncode == 0, ran.stdout
