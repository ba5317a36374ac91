"""Detection of an MPI job around this process, from the environment."""

from __future__ import annotations

import sys
from collections.abc import Mapping

_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE")
_BATCH_JOBS = {"Slurm": "SLURM_JOB_ID", "PBS": "PBS_JOBID", "LSF": "LSB_JOBID"}
_SIGNS = (*_SIZES, "PMI_RANK", "PMIX_RANK", "PMI_FD", "PMI_PORT")

MPI_STORE = "_MPICOLL_MPI_STORE"
"""Variable with address and port of the store of an MPI job that sets MASTER_ADDR, RANK and so on for torch."""


def is_launched(environ: Mapping[str, str]) -> bool:
    """Return True if an MPI launcher started this process, or the program has initialised MPI by itself."""
    return "mpi4py.MPI" in sys.modules or any(name in environ for name in _SIGNS)


def is_fault_tolerant(environ: Mapping[str, str]) -> bool:
    """Return True if Open MPI's launcher was asked for fault tolerance (``mpirun --with-ft ulfm``)."""
    return environ.get("OMPI_MCA_mpi_ft_enable", "").lower() in ("1", "true", "yes")


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


def find_address_rank(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Return the rank of this process, and the number of ranks, of a job that has an address but no MPI launcher.

    That is what ``env://`` of torch needs: MASTER_ADDR and MASTER_PORT, with RANK and WORLD_SIZE as torchrun sets them,
    or with the variables of ``srun``. None if something is missing, if there is one rank only, or if an MPI job has set
    them for torch: a process that one of its ranks has started may have them without those of MPI.
    """
    address, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT", "")
    if not address or _parse_number(port) is None or environ.get(MPI_STORE) == f"{address}:{port}":
        return None
    for rank_name, size_name in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")):
        rank, size = _parse_number(environ.get(rank_name, "")), _parse_number(environ.get(size_name, ""))
        if rank is not None and size is not None:
            return (rank, size) if size > 1 and rank < size else None
    return None


def is_outside_mpi(environ: Mapping[str, str]) -> bool:
    """Return True if this process is neither a rank of an MPI launcher nor a process that such a rank has started.

    The processes of torchrun are outside, also if an MPI launcher has started torchrun. A rank of a program that has
    initialised MPI itself is not.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() and mpi.COMM_WORLD.size > 1:
        return False
    return "TORCHELASTIC_RUN_ID" in environ or not any(name in environ for name in _SIGNS)


def is_job_without_mpi(environ: Mapping[str, str]) -> bool:
    """Return True if the environment describes a job of several ranks that no MPI launcher started."""
    return is_outside_mpi(environ) and find_address_rank(environ) is not None


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
