"""Probe of a job of this library, for ``mpicoll doctor``: ``-m mpicoll.cli.job_probe job``, on the ranks of a
launcher."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from mpicoll.transport import probes


def _allreduce() -> dict[str, Any]:
    """Run an allreduce over the ranks of the job."""
    import mpicoll
    from mpicoll.engine.core.communicator import core_of

    world = mpicoll.world()
    probes.report(step="allreduce")
    total = mpicoll.allreduce(np.arange(1000.0) + world.rank)
    if total.tolist() != (np.arange(1000.0) * world.size + sum(range(world.size))).tolist():
        raise probes.WrongResult(f"allreduce gives {total[:3].tolist()}... on rank {world.rank} of {world.size}")
    return {
        "ranks": world.size,
        "unshared": core_of(world).transport.no_shm_reason,
        "unread": core_of(world).transport.no_cma_reason,
    }


if __name__ == "__main__":
    sys.exit(probes.run({"job": _allreduce}, *sys.argv[1:]))
