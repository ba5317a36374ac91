"""What transports share."""

from __future__ import annotations

import pytest

from mpicoll.transport import launch_env
from mpicoll.transport.base import renumber


@pytest.mark.parametrize(
    ("nodes", "numbers"),
    [([], ()), ([7], (0,)), ([7, 3, 7, 9, 3], (0, 1, 0, 2, 1)), ([0, 1, 2], (0, 1, 2)), ([2, 1, 0], (0, 1, 2))],
)
def test_renumber(nodes: list[int], numbers: tuple[int, ...]) -> None:
    assert renumber(nodes) == numbers


@pytest.mark.parametrize(
    ("environ", "size"),
    [
        ({}, None),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, 4),
        ({"PMI_SIZE": "3"}, 3),
        ({"MV2_COMM_WORLD_SIZE": "2"}, 2),
        ({"OMPI_COMM_WORLD_SIZE": "4", "PMI_SIZE": "1"}, 4),
        ({"PMI_SIZE": "many"}, None),
        ({"PMI_SIZE": ""}, None),
        ({"PMI_SIZE": "²"}, None),
        ({"PMI_SIZE": "9" * 5000}, None),
        ({"PMI_RANK": "1"}, None),
        ({"SLURM_NTASKS": "8"}, None),
        ({"PBS_JOBID": "7", "PBS_NP": "8", "LSB_JOBID": "7", "LSB_DJOB_NUMPROC": "8"}, None),
    ],
)
def test_launched_size(environ: dict[str, str], size: int | None) -> None:
    assert launch_env.launched_size(environ) == size


@pytest.mark.parametrize(
    "name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_RANK", "PMIX_RANK", "PMI_FD", "PMI_PORT", "MV2_COMM_WORLD_SIZE"]
)
def test_signs_of_a_launcher(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_env, "sys", type("NoModules", (), {"modules": {}}))
    assert launch_env.is_launched({name: "0"})
    assert not launch_env.is_launched({f"MY_{name}": "0", "SLURM_NTASKS": "8"})
    assert not launch_env.is_launched({"PBS_JOBID": "7", "PBS_TASKNUM": "1", "LSB_JOBID": "7", "LSB_HOSTS": "a a"})


@pytest.mark.parametrize(
    ("environ", "described"),
    [
        ({"SLURM_JOB_ID": "7"}, "Slurm job 7"),
        ({"PBS_JOBID": "7.server"}, "PBS job 7.server"),
        ({"LSB_JOBID": "7"}, "LSF job 7"),
        ({"PBS_JOBID": "", "OMPI_COMM_WORLD_SIZE": "2"}, ""),
    ],
)
def test_the_batch_job_is_named(environ: dict[str, str], described: str) -> None:
    assert launch_env.describe_batch_job(environ) == described


def test_mpi_that_is_loaded_is_a_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_env, "sys", type("Modules", (), {"modules": {"mpi4py.MPI": None}}))
    assert launch_env.is_launched({})
    monkeypatch.setattr(launch_env, "sys", type("Modules", (), {"modules": {"mpi4py": None}}))
    assert not launch_env.is_launched({})
