"""Being installed harms nobody: torch stays as it is until an MPI launcher, or the program, asks for mpicoll."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.launch import ROOT
from support.warm import start_options

from mpicoll.transport import launch_env

PROGRAM = Path(__file__).parent / "support" / "observables.py"
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")

STRAY = {
    "SLURM_JOB_ID": "7",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "1",
    "SLURM_NTASKS_PER_NODE": "1",
    "PMIX_RANK": "0",
    "PMI_RANK": "0",
    "PMI_SIZE": "1",
}
"""What torchrun's processes inherit from ``srun --mpi=pmix torchrun`` or ``mpirun -npernode 1 torchrun``."""


def start(folder: Path, name: str, launcher: tuple[str, ...], *options: str, **variables: str) -> subprocess.Popen[str]:
    ours = ("PMIX_", "PMI_", "OMPI_", "MPICOLL_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCH", "SLURM_")
    environ = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    # torchrun itself is forked with torch, and starts its processes as ever. Two programs run at a time, on two
    # processors or more.
    forked = start_options() if launcher else ()
    return subprocess.Popen(
        [sys.executable, *forked, *launcher, PROGRAM, folder, name, *options],
        cwd=ROOT,
        env=environ | {"OMP_NUM_THREADS": "1"} | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(programs: list[subprocess.Popen[str]]) -> None:
    try:
        outputs = [program.communicate(timeout=60)[0] for program in programs]
    finally:
        for program in programs:
            program.kill()
            program.communicate()
    for program, output in zip(programs, outputs, strict=True):
        assert program.returncode == 0, output


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("torch.multiprocessing", marks=pytest.mark.long)])
def test_a_program_sees_no_difference(launcher: str, tmp_path: Path) -> None:
    """All that torch.distributed shows, and a training on gloo, with and without mpicoll."""
    # torch's variable hides all packages that announce themselves to it: an honest "without" if there is no other.
    assert [one.name for one in importlib.metadata.entry_points(group="torch.backends")] == ["mpicoll"]
    how: Any = {"torchrun": (TORCHRUN,), "torch.multiprocessing": ((), "--spawn")}[launcher]
    stray = STRAY if launcher == "torchrun" else {}
    programs = [
        start(tmp_path, "with", *how, **stray),
        start(tmp_path, "without", *how, **stray, TORCH_DEVICE_BACKEND_AUTOLOAD="0"),
    ]
    finish(programs)
    ranks = [0, 1] if launcher == "torchrun" else [-1, 0, 1]
    for rank in ranks:
        found, expected = (json.loads((tmp_path / f"{name}-{rank}.json").read_text()) for name in ("with", "without"))
        assert found["backend available"]["mpi"] is False
        assert rank < 0 or expected["backend"] == "gloo"
        assert found == expected
    assert len(list(tmp_path.iterdir())) == 2 * len(ranks)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, False),
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4"}, False),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}, False),
        ({"PMIX_RANK": "0"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "3"}, True),
        ({"PMI_FD": "9", "PMI_RANK": "0", "PMI_SIZE": "2", "RANK": "0", "WORLD_SIZE": "2"}, True),
        ({**STRAY, "RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}, False),
        ({"OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "0", "RANK": "5", "WORLD_SIZE": "16"}, False),
    ],
    ids=["nothing", "Slurm", "torchrun", "PMIx", "mpirun", "exported", "torchrun in mpirun", "another in mpirun"],
)
def test_who_started_this_process(variables: dict[str, str], expected: bool) -> None:
    assert launch_env.is_started_by_mpi(variables) is expected


def test_a_child_of_multiprocessing_was_not_started_by_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    import multiprocessing.process

    monkeypatch.setattr(multiprocessing.process, "_parent_process", object())
    assert not launch_env.is_started_by_mpi({"OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "3"})
