"""Deaths of ranks, in a job that goes on after them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any
from weakref import WeakSet

from mpi4py import MPI

_GLANCE = 0.05
"""Seconds between two looks for deaths, of those who wait."""


# Errors that a death brings about, those that name it first. Not all of them are known to every MPI.
_DEATHS = tuple(
    getattr(MPI, name) for name in ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED") if hasattr(MPI, name)
)
_VAGUE = (MPI.ERR_INTERN, MPI.ERR_OTHER, MPI.ERR_UNKNOWN)


_mourning = threading.RLock()
_dead: set[int] = set()
_transports: WeakSet[Any] = WeakSet()


@lru_cache(maxsize=1)
def survives() -> bool:
    """Whether the job goes on when a rank dies: MPI's fault tolerance is on (``mpirun --with-ft ulfm``)."""
    return (
        os.environ.get("OMPI_MCA_mpi_ft_enable", "").lower() in ("1", "true", "yes")  # noqa: SIM112  it is called so
        and hasattr(MPI.Comm, "Shrink")
        and MPI.Query_thread() == MPI.THREAD_MULTIPLE
    )


def mourn(rank: int) -> None:
    """Rank `rank` of the job has died: whoever waits on a communicator that it belongs to gets RankFailed. For whoever
    learns of it; MPI itself knows only of deaths in its way. Does nothing if the death is known already, or in a job
    that does not survive deaths."""
    if survives() and not MPI.Is_finalized():
        with _mourning:
            if rank in _dead:
                return
            _dead.add(rank)
            for one in list(_transports):
                if rank in one.members:
                    one.revoke()


_glanced = 0.0


def _glance() -> set[int]:
    """The same as :func:`_look`, which it calls now and then."""
    global _glanced  # noqa: PLW0603  the look is one for all
    now = time.monotonic()
    if now - _glanced > _GLANCE:
        _glanced = now
        _look()
    return _dead


def _look() -> set[int]:
    """The ranks of the job that are known to be dead."""
    failed, whole = MPI.COMM_WORLD.Get_failed(), MPI.COMM_WORLD.Get_group()
    ranks = MPI.Group.Translate_ranks(failed, range(failed.size), whole)
    failed.Free()
    whole.Free()
    for rank in set(ranks) - _dead:
        mourn(rank)
    return set(_dead)


_REMEDY = (
    "Nothing goes on this communicator any more; the survivors go on by comm.shrink(), which all of them must call, or"
    " run their loop by mpicoll.resilient"
)


def _who(ranks: Sequence[int]) -> str:
    if not ranks:
        return "another rank has given up the communicator"
    names = ", ".join(map(str, ranks))
    return f"rank {names} of the job has died" if len(ranks) == 1 else f"ranks {names} of the job have died"
