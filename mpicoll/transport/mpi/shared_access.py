"""Access of the ranks of a node to each other's memory."""

from __future__ import annotations

from typing import NamedTuple, cast

from mpi4py import MPI

from mpicoll.config import config
from mpicoll.extension import find_missing_reason
from mpicoll.transport import record_file, shm


class SharedAccess(NamedTuple):
    """Access of the ranks of a node to each other's memory; the same on all ranks of a communicator."""

    no_shm_reason: str | None
    """The reason why they can't share memory; None if they can."""
    no_cma_reason: str | None
    """The reason why they can't read each other's private memory; None if they can."""
    named: bool
    """True if shared memory must have a name in the file system (MPICOLL_SHARED_MEMORY=named)."""


def probe_access(comm: MPI.Intracomm, nodes: tuple[int, ...]) -> SharedAccess:
    """Collective: find out by trying how the ranks of each node reach each other's memory."""
    settings, missing = zip(*comm.allgather((config().shared_memory, find_missing_reason())), strict=True)
    named = "named" in settings
    if "off" in settings:
        reason = f"MPICOLL_SHARED_MEMORY=off on rank {settings.index('off')}"
        return SharedAccess(reason, reason, named)
    for rank, reason in enumerate(missing):
        if reason is not None:
            reason = f"the extension mpicoll._shm can't be imported on rank {rank}: {reason}"
            return SharedAccess(reason, reason, named)
    node = cast(MPI.Intracomm, comm.Split(nodes[comm.rank], comm.rank))
    try:
        world = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
        unshared = record_file.share(node.allgather, node.rank, node.size, world, named=named) or None
        unread = _try_reading_peers(node, comm.rank)
    finally:
        node.Free()
    reasons = comm.allgather((unshared, unread))
    first = [next((one for one in why if one), None) for why in zip(*reasons, strict=True)]
    return SharedAccess(first[0], first[1], named)


def _try_reading_peers(node: MPI.Intracomm, rank: int) -> str | None:
    """Collective over a node: return why this rank can't read the memory of another one, or None."""
    reason: str | None = None
    for process in node.allgather(shm.describe_memory()):
        try:
            shm.ProcessReader(process).check()
        except OSError as error:
            reason = f"rank {rank} can't read the memory of its peers: {error.strerror}"
    return reason
