"""Is there an MPI job around this process, and is it the one that the MPI library belongs to?"""

from __future__ import annotations

import sys
from collections.abc import Mapping

_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
_SIGNS = (*_SIZES, "PMI_RANK", "PMIX_RANK", "PMI_FD", "PMI_PORT")


def launched(environ: Mapping[str, str]) -> bool:
    """Whether an MPI launcher started this process, or the program has initialised MPI by itself."""
    return "mpi4py.MPI" in sys.modules or any(name in environ for name in _SIGNS)


def launched_size(environ: Mapping[str, str]) -> int | None:
    """How many ranks the launcher says there are, if it says so."""
    for name in _SIZES:
        if environ.get(name, "").isdigit():
            return int(environ[name])
    return None
