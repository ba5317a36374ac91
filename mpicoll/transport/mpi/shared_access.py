"""Memory that the ranks of a node share or read, as far as they can."""

from __future__ import annotations

import atexit
import os
import platform
import secrets
from collections.abc import Callable
from functools import lru_cache
from typing import TypeAlias, cast

import numpy as np
from mpi4py import MPI

from mpicoll.config import config
from mpicoll.transport import shm

Access: TypeAlias = "tuple[str | None, str | None, bool]"
"""Why the ranks of a node can't share memory, why they can't read each other's, and whether memory needs a name."""


def _probe_access(comm: MPI.Intracomm, nodes: tuple[int, ...]) -> Access:
    """Collective: why the ranks of a node can't share memory or read each other's, found out by doing it."""
    asked = comm.allgather(config().shared_memory)
    named = "named" in asked
    if "off" in asked:
        refusal = f"MPICOLL_SHARED_MEMORY=off on rank {asked.index('off')}"
        return refusal, refusal, named
    node = cast(MPI.Intracomm, comm.Split(nodes[comm.rank], comm.rank))
    try:
        unshared = shm.share(8, node.allgather, node.rank, named=named)[1] or None
        unread = _unread(node, comm.rank)
    finally:
        node.Free()
    told = comm.allgather((unshared, unread))
    first = [next((one for one in why if one), None) for why in zip(*told, strict=True)]
    return first[0], first[1], named


def _unread(node: MPI.Intracomm, rank: int) -> str | None:
    """Collective over a node: why this rank can't read the memory of another one."""
    word, copy = np.array([secrets.randbits(63)]), np.zeros(1, np.int64)
    seen: str | None = None
    for pid, address, value in node.allgather((os.getpid(), word.ctypes.data, int(word[0]))):
        try:
            shm.reader(pid)(address, copy.ctypes.data, 8)
            if copy[0] != value:
                seen = f"rank {rank} sees other processes by the numbers of its peers"
        except OSError as error:
            seen = f"rank {rank} may not read its peers: {error.strerror}"
    node.Barrier()  # nobody's word goes before all have read it
    return seen


@lru_cache(maxsize=1)
def _fence() -> Callable[[], object] | None:
    if platform.machine() in ("x86_64", "AMD64"):
        return None  # these processors keep stores in order, and loads too
    # What orders accesses to windows orders all of a process' accesses.
    window = MPI.Win.Allocate_shared(8, comm=MPI.COMM_SELF)
    window.Lock_all(MPI.MODE_NOCHECK)
    atexit.register(_free_window, window, os.getpid())
    return window.Sync


def _free_window(window: MPI.Win, owner: int) -> None:
    if os.getpid() == owner and not MPI.Is_finalized():
        window.Unlock_all()
        window.Free()
