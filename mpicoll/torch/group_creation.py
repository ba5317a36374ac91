"""Creation of process groups."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import FunctionType
from typing import Any

from mpicoll.engine.core.communicator import Communicator
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
from mpicoll.torch.c10d_frames import c10d_variables
from mpicoll.torch.groups import default_group
from mpicoll.torch.mixed_process_group import MixedProcessGroup, others
from mpicoll.torch.no_compile import eager
from mpicoll.torch.process_group import NAME, ProcessGroupMpicoll

_HELPER = "_new_process_group_helper"


def _hide_from_the_compiler() -> None:
    """Keep torch.compile from looking into the process group."""
    for module in (process_group, c10d_collectives, callback_comms, mixed_process_group, fast_path, sparse, work):
        for holder in (module, *(one for one in vars(module).values() if isinstance(one, type))):
            for value in vars(holder).values():
                if isinstance(value, FunctionType) and value.__module__ == module.__name__:
                    eager(value)


_hide_from_the_compiler()


def create(options: Any, backend_options: Any) -> ProcessGroupMpicoll:
    """Create the process group for torch's `options` (``_DistributedBackendOptions``). Collective over the group.

    Raises SetupError if MPI has fewer ranks than the group.
    """
    if world().transport.native is not None and not world().transport.background:
        raise SetupError(
            "a process group of mpicoll needs MPI_THREAD_MULTIPLE, which this MPI does not give, or the program has not"
            " asked for (mpi4py.rc.thread_level): torch waits for operations in ways that can't carry them on"
        )
    comm = _communicator(options)
    mix = _mix()
    if set(mix.values()) == {NAME}:
        return ProcessGroupMpicoll(comm, options.store, options.timeout)
    return MixedProcessGroup(comm, options.store, options.timeout, others(mix, _unfinished(), options, backend_options))


def _communicator(options: Any) -> Communicator:
    ranks = list(options.global_ranks_in_group)
    if ranks:
        parent = default_group()
        if parent is None:
            # The default group has another backend, so the mapping of its ranks to MPI's is not known yet.
            ranks = _members(options)
            made = world().group(ranks)
        else:
            made = parent.comm.group(ranks)
    else:
        made = world().group(_members(options))
    assert made is not None
    return made


def _members(options: Any) -> list[int]:
    size = options.group_size
    if world().size < size:
        rendezvous_handler.refuse_other_launchers(world().size, os.environ)
        raise SetupError(
            f"a process group of {size} ranks needs as many in MPI, which has {world().size}: start them by"
            f" `mpirun -np {size} python script.py`, or by mpicoll.spawn"
        )
    return rendezvous_handler.members(options.store, options.group_rank, size)


def _mix() -> Mapping[str, str]:
    """Return the backends by device.

    c10d passes to a backend neither its own devices nor the backends of the other devices. A Python process group
    replaces the whole mix, so it needs both.
    """
    config = c10d_variables(_HELPER).get("backend_config")
    return {"cpu": NAME} if config is None else config.get_device_backend_map()


def _unfinished() -> Any:
    """Return the group that c10d is creating, with the backends that precede mpicoll in the mix."""
    return c10d_variables(_HELPER).get("pg")
