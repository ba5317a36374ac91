"""Names of torch's backends: which of them mean mpicoll."""

from __future__ import annotations

from typing import Any


def names_mpicoll(backend: Any) -> bool:
    """Return True if the name of a backend asks for mpicoll: ``mpicoll``, ``cpu:mpicoll,cuda:nccl`` or, in a torch that
    was built without MPI, ``mpi``."""
    return isinstance(backend, str) and any(name == "mpicoll" for _, _, name in _split_names(backend))


def replace_mpi(backend: str) -> str:
    """Return the name of a backend, with mpicoll for ``mpi`` in a torch that was built without MPI."""
    return ",".join("".join(part) for part in _split_names(backend))


def _split_names(backend: str) -> list[tuple[str, str, str]]:
    """Return device, colon and name of each part of ``cpu:mpicoll,cuda:nccl``; of a plain name the name only."""
    from torch.distributed import distributed_c10d as c10d

    built_in = hasattr(c10d, "ProcessGroupMPI")
    parts = [part.rpartition(":") for part in backend.lower().split(",")]
    return [(device, colon, "mpicoll" if name == "mpi" and not built_in else name) for device, colon, name in parts]
