"""Translation of torch process groups to communicators."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from mpicoll.engine.core.communicator import Communicator
from mpicoll.engine.world import as_communicator
from mpicoll.errors import CommunicatorError, SetupError
from mpicoll.torch.group_operations import GroupOperations, direct_operations
from mpicoll.torch.no_compile import disable_compile


@disable_compile
def find_operations(group: Any) -> GroupOperations | None:
    """Return the operations of `group` if it is a process group of mpicoll, else None.

    That is the group itself, or the backend that c10d's process group calls: if it has several, the first of mpicoll.
    """
    if isinstance(group, GroupOperations) or not isinstance(group, dist.ProcessGroup):
        return group if isinstance(group, GroupOperations) else None
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL c10d wraps backends.
    backends = (getattr(one, "wrapped_pg", one) for one in map(group._get_backend, group._device_types))
    return next((one for one in backends if isinstance(one, GroupOperations)), None)


@disable_compile
def find_direct(group: Any) -> GroupOperations | None:
    """Return the operations of `group` if calls on them do the same as calls of c10d on the group, else None.

    That is not so if the group has other backends as well, or if c10d checks calls.
    """
    found = direct_operations.get(group)
    if found is None:
        found = find_operations(group)
        if found is None:
            return None
        if found is group:
            found = found if found.serves_all_devices else None
        elif any(group._get_backend(device) is not found for device in group._device_types):
            found = None
        if found is not None and not found.is_shut_down:
            direct_operations[group] = found
    return found


def get_default_group() -> dist.ProcessGroup | None:
    """Return torch's default process group if its backend is mpicoll."""
    group = c10d.GroupMember.WORLD
    return None if find_operations(group) is None else group


def new_group(ranks: Sequence[int], **options: Any) -> Any:
    """Return :func:`torch.distributed.new_group` of `ranks`, in their order.

    Raises:
        SetupError: this version of torch can't keep the order.
    """
    if list(ranks) != sorted(ranks):
        if "sort_ranks" not in signature(dist.new_group).parameters:
            raise SetupError(
                f"the ranks {list(ranks)} of a process group are not in ascending order, which torch"
                f" {torch.__version__} does not support; use torch 2.13 or newer"
            )
        options["sort_ranks"] = False
    return dist.new_group(list(ranks), **options)


@disable_compile
def communicator(group: Any = None) -> Communicator:
    """Return the communicator of `group`: a process group of mpicoll, or a communicator of mpicoll or mpi4py.

    Args:
        group: None means torch's default group, or mpicoll's world if torch has no default group.

    Raises:
        CommunicatorError: the process group has another backend, or this process is not a member of it.

    Example:
        >>> mpicoll.torch.communicator().size  # on one rank
        1
    """
    if group is None and dist.is_initialized():
        group = c10d.GroupMember.WORLD
    operations = find_operations(group)
    if operations is not None:
        return operations.comm
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise CommunicatorError("this process is not a member of the process group; only members may call this")
    if isinstance(group, dist.ProcessGroup):
        raise CommunicatorError(
            f"the process group has the backend {dist.get_backend(group)}; create one by new_group(backend='mpicoll')"
        )
    return as_communicator(group)
