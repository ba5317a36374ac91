"""Creation of process groups."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import FunctionType
from typing import Any

from mpicoll.engine.core.communicator import Communicator, core_of
from mpicoll.engine.world import world
from mpicoll.errors import SetupError
from mpicoll.torch import (
    c10d_collectives,
    callback_comms,
    fast_path,
    mixed_process_group,
    process_group,
    rendezvous_handler,
    sparse,
    work,
)
from mpicoll.torch.c10d_frames import find_c10d_variables
from mpicoll.torch.groups import get_default_group
from mpicoll.torch.mixed_process_group import MixedProcessGroup, create_other_backends
from mpicoll.torch.no_compile import disable_compile
from mpicoll.torch.process_group import NAME, ProcessGroupMpicoll

_HELPER = "_new_process_group_helper"


def _disable_compile() -> None:
    """Keep torch.compile from looking into the process group."""
    for module in (process_group, c10d_collectives, callback_comms, mixed_process_group, fast_path, sparse, work):
        for holder in (module, *(one for one in vars(module).values() if isinstance(one, type))):
            for value in vars(holder).values():
                if isinstance(value, FunctionType) and value.__module__ == module.__name__:
                    disable_compile(value)


_disable_compile()


def create(options: Any, backend_options: Any) -> ProcessGroupMpicoll:
    """Create the process group for torch's `options` (``_DistributedBackendOptions``). Collective over the group.

    Raises SetupError if MPI has fewer ranks than the group.
    """
    transport = core_of(world()).transport
    if transport.native is not None and not transport.background:
        raise SetupError(
            "a process group of mpicoll needs MPI_THREAD_MULTIPLE, because torch waits for operations without calling"
            " MPI; this MPI does not provide it, or the program did not request it (mpi4py.rc.thread_level)"
        )
    comm = _create_communicator(options)
    backends = _find_backends()
    if set(backends.values()) == {NAME}:
        return ProcessGroupMpicoll(comm, options.store, options.timeout)
    others = create_other_backends(backends, _find_unfinished_group(), options, backend_options)
    return MixedProcessGroup(comm, options.store, options.timeout, others)


def _create_communicator(options: Any) -> Communicator:
    ranks = list(options.global_ranks_in_group)
    if ranks:
        parent = get_default_group()
        if parent is None:
            # The default group has another backend, so the mapping of its ranks to MPI's is not known yet.
            ranks = _find_members(options)
            comm = world().group(ranks)
        else:
            comm = parent.comm.group(ranks)
    else:
        comm = world().group(_find_members(options))
    assert comm is not None
    return comm


def _find_members(options: Any) -> list[int]:
    size = options.group_size
    if world().size < size:
        rendezvous_handler.reject_other_launchers(world().size, os.environ)
        raise SetupError(
            f"a process group of {size} ranks needs {size} ranks of MPI, which has {world().size}: start them by"
            f" `mpirun -np {size} python script.py`, or by mpicoll.spawn"
        )
    return rendezvous_handler.find_world_ranks(options.store, options.group_rank, size)


def _find_backends() -> Mapping[str, str]:
    """Return the backends by device.

    c10d passes to a backend neither its own devices nor the backends of the other devices. A Python process group
    replaces all of them, so it needs both.
    """
    config = find_c10d_variables(_HELPER).get("backend_config")
    return {"cpu": NAME} if config is None else config.get_device_backend_map()


def _find_unfinished_group() -> Any:
    """Return the group that c10d is creating, with the backends that precede mpicoll."""
    return find_c10d_variables(_HELPER).get("pg")
