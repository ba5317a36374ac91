"""Detection of an MPI job around this process, from the environment."""

from __future__ import annotations

import sys
from collections.abc import Mapping

_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE")
_BATCH_JOBS = {"Slurm": "SLURM_JOB_ID", "PBS": "PBS_JOBID", "LSF": "LSB_JOBID"}
_SIGNS = (*_SIZES, "PMI_RANK", "PMIX_RANK", "PMI_FD", "PMI_PORT")


def is_launched(environ: Mapping[str, str]) -> bool:
    """Return True if an MPI launcher started this process, or the program has initialised MPI by itself."""
    return "mpi4py.MPI" in sys.modules or any(name in environ for name in _SIGNS)


def is_started_by_mpi(environ: Mapping[str, str]) -> bool:
    """Return True if an MPI launcher, and no other launcher inside of it, started this process.

    The launcher's variables are inherited by all processes that its ranks start: by torchrun under ``srun`` or
    ``mpirun -npernode 1``, by other launchers (detected by a WORLD_SIZE that is not MPI's), and by the processes of
    multiprocessing. Variables of Slurm alone are no evidence: they are set in every allocation.
    """
    size, other = launched_size(environ), environ.get("WORLD_SIZE", "")
    nested = "TORCHELASTIC_RUN_ID" in environ or (size is not None and _parse_number(other) not in (None, size))
    return any(name in environ for name in _SIGNS) and not nested and not is_child()


def is_child() -> bool:
    """Return True if multiprocessing started this process."""
    multiprocessing = sys.modules.get("multiprocessing.process")
    return multiprocessing is not None and multiprocessing.parent_process() is not None


def launched_size(environ: Mapping[str, str]) -> int | None:
    """Return the number of ranks that the launcher specifies, or None."""
    numbers = (_parse_number(environ.get(name, "")) for name in _SIZES)
    return next((number for number in numbers if number is not None), None)


def local_ranks(environ: Mapping[str, str], size: int) -> int:
    """Return the number of the job's ranks on this node if the launcher specifies it, else `size`."""
    numbers = (_parse_number(environ.get(name, "")) for name in _LOCAL_SIZES)
    return next((number for number in numbers if number is not None), size)


def describe_batch_job(environ: Mapping[str, str]) -> str:
    """Return the batch system and its name for the job, such as ``PBS job 12.server``, or an empty string."""
    return next((f"{system} job {environ[name]}" for system, name in _BATCH_JOBS.items() if environ.get(name)), "")


def _parse_number(text: str) -> int | None:
    """Return the number of ranks that a variable holds, or None if it holds none."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None
