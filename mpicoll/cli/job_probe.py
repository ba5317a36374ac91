"""Probes of a job of this library, for ``mpicoll doctor``: ``-m mpicoll.cli.job_probe job|ports``, on the ranks of a
launcher."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from mpicoll.cli import listening
from mpicoll.transport import launcher, probes


def _allreduce() -> dict[str, Any]:
    """Run an allreduce over the ranks of the job."""
    import mpicoll
    from mpicoll.engine.core.communicator import core_of
    from mpicoll.engine.core.threads import count_threads

    world = mpicoll.world()
    probes.report(step="allreduce")
    total = mpicoll.allreduce(np.arange(1000.0) + world.rank)
    if total.tolist() != (np.arange(1000.0) * world.size + sum(range(world.size))).tolist():
        raise probes.WrongResult(f"allreduce gives {total[:3].tolist()}... on rank {world.rank} of {world.size}")
    return {
        "ranks": world.size,
        "unshared": core_of(world).transport.no_shm_reason,
        "unread": core_of(world).transport.no_cma_reason,
        "threads": count_threads(core_of(world).transport),
    }


def _list_ports() -> dict[str, Any] | None:
    """Return the sockets at which the processes of the job listen, by owner and process; None on ranks other than 0."""
    seen: set[str] = set()

    def list_new() -> list[str]:
        new = [one for one in listening.list_sockets() if one not in seen]
        seen.update(new)
        return new

    list_new()  # inherited from the launcher
    from mpicoll.transport import mpi  # starts MPI

    library = mpi.library()
    by_owner: dict[str, list[str] | None] = {listening.MPI: list_new()}
    import mpicoll

    mpicoll.allreduce(np.ones(3))
    by_owner[listening.CONTROL] = list_new()
    by_owner[listening.STORE] = list_new() if _use_torch() else None
    ranks = mpicoll.gather_object(by_owner)
    if ranks is None:
        return None
    report: dict[str, Any] = {
        owner: None if addresses is None else {f"rank {rank}": one[owner] for rank, one in enumerate(ranks)}
        for owner, addresses in by_owner.items()
    }
    parents = {f"{path.name} ({pid})": listening.list_sockets(pid) for pid, path in launcher.find_parents()}
    return {"ports": report | {listening.LAUNCHER: parents}, "library": library}


def _use_torch() -> bool:
    """Create a process group, which needs a store. Return False if torch is not installed."""
    try:
        from mpicoll import torch
    except ImportError:
        return False
    torch.init_process_group()
    torch.barrier()
    return True


if __name__ == "__main__":
    sys.exit(probes.run({"job": _allreduce, "ports": _list_ports}, *sys.argv[1:]))
