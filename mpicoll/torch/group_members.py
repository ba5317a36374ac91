"""Communicators of new process groups."""

from __future__ import annotations

import os
from typing import Any

from mpicoll.engine.core.communicator import Communicator, core_of
from mpicoll.engine.world import can_connect_world, world
from mpicoll.errors import SetupError
from mpicoll.torch import connected_groups, rendezvous_handler
from mpicoll.torch.groups import communicator, get_default_group
from mpicoll.transport import launch_env


def create_communicator(options: Any) -> Communicator:
    """Create the communicator of a group for torch's `options` (``_DistributedBackendOptions``). Collective.

    Raises SetupError if MPI has fewer ranks than the group.
    """
    ranks = list(options.global_ranks_in_group)
    parent = get_default_group() if ranks else None
    if parent is None and needs_connections(options.group_size):
        return connected_groups.connect(options.store, options.group_rank, options.group_size, ranks)
    transport = core_of(world()).transport
    if transport.native is not None and not transport.background:
        raise SetupError(
            "a process group of mpicoll needs MPI_THREAD_MULTIPLE, because torch waits for operations without calling"
            " MPI; this MPI does not provide it, or the program did not request it (mpi4py.rc.thread_level)"
        )
    # If the default group has another backend, the mapping of its ranks to MPI's is not known yet.
    comm = world().group(_find_members(options)) if parent is None else communicator(parent).group(ranks)
    assert comm is not None
    return comm


def needs_connections(size: int) -> bool:
    """Return True if the ranks of a group of `size`, which has no parent of mpicoll, are not ranks of MPI, nor of a
    world that has been connected before: they connect by the group's store."""
    # A group of one rank needs no other world than that of one, unless the environment describes a larger one.
    return can_connect_world() and (size > 1 or launch_env.is_job_without_mpi(os.environ))


def _find_members(options: Any) -> list[int]:
    size = options.group_size
    if world().size < size:
        rendezvous_handler.reject_other_launchers(world().size, os.environ)
        raise SetupError(
            f"a process group of {size} ranks needs {size} ranks of MPI, which has {world().size}: start them by"
            f" `mpirun -np {size} python script.py`, or by mpicoll.spawn"
        )
    return rendezvous_handler.find_world_ranks(options.store, options.group_rank, size)
