"""Patches for functions of torch.distributed that c10d implements for its built-in backends only.

Each patch receives torch's original function and the arguments of the call. Calls that don't concern mpicoll are passed
on unchanged.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import distributed_c10d as c10d

from mpicoll.backend_names import names_mpicoll, replace_mpi
from mpicoll.engine.world import world
from mpicoll.errors import ArgumentError, RankError
from mpicoll.torch import current_device, rendezvous_handler
from mpicoll.torch.ddp_hooks import register_builtin_hook
from mpicoll.torch.group_members import needs_connections
from mpicoll.torch.legacy.c10d_frames import find_c10d_variables
from mpicoll.torch.legacy.mixed_process_group import MixedProcessGroup
from mpicoll.torch.legacy.process_group import ProcessGroupMpicoll

Original = Callable[..., Any]


def rendezvous(original: Original, url: str, rank: int = -1, world_size: int = -1, **kwargs: Any) -> Any:
    """Take rank, size and store from MPI unless the program gives an address, or all values that ``env://`` needs."""
    if url != "env://" or rendezvous_handler.is_environment_complete(rank, world_size, os.environ):
        return original(url, rank, world_size, **kwargs)
    if (found := rendezvous_handler.find_slurm_rank(rank, world_size, os.environ)) is not None:
        return original(url, *found, **kwargs)
    return iter([rendezvous_handler.rendezvous_over_mpi(rank, world_size)])


def _new_process_group_helper(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Take rank, size and store of a default group named "mpi" from MPI, and initialize MPI on all ranks.

    c10d leaves rank, size and store of a default group named "mpi" to MPI. It creates a group on the members only, but
    MPI must be initialized on all ranks or on none.
    """
    call = inspect.signature(original).bind(*args, **kwargs)
    arguments = call.arguments
    arguments["backend"] = replace_mpi(arguments["backend"])
    if not needs_connections(arguments["group_size"]):
        world()
    current_device.register_devices()
    if arguments["group_size"] == -1:
        arguments["store"], arguments["group_rank"], arguments["group_size"] = rendezvous_handler.rendezvous_over_mpi()
    result = original(*call.args, **call.kwargs)
    if not arguments["global_ranks_in_group"]:
        current_device.select_device(find_c10d_variables("init_process_group").get("device_id"))
    return result


def monitored_barrier(original: Original, group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
    """Support mpicoll groups; c10d's function accepts only gloo groups."""
    found = c10d._get_default_group() if group is None else group
    if not isinstance(found, ProcessGroupMpicoll):
        original(group, timeout, wait_all_ranks)
        return
    if isinstance(timeout, float):
        warnings.warn(f"monitored_barrier: timeout={timeout} is interpreted as seconds; pass a timedelta", stacklevel=3)
        timeout = timedelta(seconds=timeout)
    found.monitored_barrier(timeout, wait_all_ranks)


def _set_pg_timeout(original: Original, timeout: timedelta, group: Any = None) -> None:
    """Support mpicoll groups; c10d's function accepts only gloo and nccl groups."""
    found = c10d._get_default_group() if group is None else group
    if isinstance(found, ProcessGroupMpicoll):
        found.set_timeout(timeout)
    else:
        original(timeout, group)


def _maybe_attach_flight_recorder(original: Original, *args: Any, **kwargs: Any) -> None:
    """Skip mpicoll groups: c10d's recorder needs a C++ backend, and mpicoll has its own flight recorder."""
    if not any(isinstance(one, ProcessGroupMpicoll) for one in (*args, *kwargs.values())):
        original(*args, **kwargs)


def split_group(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Split mpicoll groups without a GPU, which c10d's function requires."""
    call = inspect.signature(original).bind(*args, **kwargs)
    arguments = call.arguments
    parent = arguments.get("parent_pg") or c10d._get_default_group()
    if not isinstance(parent, ProcessGroupMpicoll):
        return original(*args, **kwargs)
    wanted = arguments.get("backend")
    if isinstance(parent, MixedProcessGroup) or (wanted is not None and not names_mpicoll(str(wanted))):
        raise ArgumentError(
            f"split_group: can't split a group of {c10d._world.pg_backend_config[parent]} with backend"
            f" {wanted or 'of each device'}; create it by new_group(ranks, backend=...)"
        )
    lists = arguments.get("split_ranks")
    if not lists or any(not part for part in lists):
        raise ArgumentError(f"split_group: split_ranks must be lists of ranks of the parent group, got {lists!r}")
    flat = [rank for part in lists for rank in part]
    if len(set(flat)) != len(flat):
        raise ArgumentError(f"split_group: a rank can be in one group only, got {lists!r}")
    if not set(flat) <= set(range(parent.size())):
        raise RankError(
            f"split_group: split_ranks must be ranks of the parent group, in [0, {parent.size()}), got {lists!r} (rank"
            f" {parent.rank()} of {parent.size()})"
        )
    own_ranks = next((sorted(part) for part in lists if parent.rank() in part), None)
    # Ranks that are not members draw the name too, so that later names agree on all ranks.
    name = c10d._process_group_name(own_ranks or sorted(lists[0]), use_hashed_name=True)
    if own_ranks is None:
        return None
    group = parent.splitGroup(own_ranks, arguments.get("timeout"), None, name, arguments.get("group_desc"))
    assert group is not None
    parent_ranks = {rank: number for number, rank in c10d._world.pg_group_ranks[parent].items()}
    # Renamed in torch 2.13.
    register = getattr(c10d, "_register_pg_in_world", None) or c10d._update_process_group_global_state
    register(
        group,
        backend_name=c10d._world.pg_map[parent][0],
        store=group.get_group_store(),
        group_name=name,
        backend_config=c10d._world.pg_backend_config[parent],
        rank_mapping={parent_ranks[rank]: number for number, rank in enumerate(own_ranks)},
    )
    return group


_register_builtin_comm_hook = register_builtin_hook
