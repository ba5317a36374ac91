"""Agreement of the ranks of a benchmark."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpicoll.engine.core.communicator import Communicator
from mpicoll.errors import MpicollError, SetupError


class Team:
    """Agreement of the ranks, on a communicator separate from those that are measured."""

    def __init__(self, comm: Communicator) -> None:
        """Duplicate the communicator. Collective. Raises SetupError without MPI."""
        if comm.mpi is None:
            raise SetupError("bench measures ranks of MPI, but this world has none; unset MPICOLL_TRANSPORT")
        self.comm = comm
        self.rank = comm.rank
        self.size = comm.size
        self._mpi = comm.mpi.Dup()
        self.barrier: Callable[[], Any] = self._mpi.Barrier

    def agree(self, value: float) -> float:
        """Return rank 0's value."""
        return float(self._mpi.bcast(value))

    def all(self, value: Any) -> list[Any]:
        """Return every rank's value, by rank."""
        return list(self._mpi.allgather(value))

    def report_error(self, error: MpicollError) -> None:
        """Print once an error that all ranks have raised alike."""
        if self.rank == 0:
            sys.stderr.write(f"mpicoll: {error}\n")
            sys.stderr.flush()

    def max_over_ranks(self, times: Sequence[float]) -> list[float]:
        """Return for each of `times`, which were measured together, the maximum over the ranks."""
        return [float(one) for one in np.max(self._mpi.allgather(list(times)), axis=0)]
