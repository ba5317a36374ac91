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
from mpicoll.torch.process_group import ProcessGroupMpicoll


def get_default_group() -> ProcessGroupMpicoll | None:
    """Return torch's default process group if its backend is mpicoll."""
    group = c10d.GroupMember.WORLD
    return group if isinstance(group, ProcessGroupMpicoll) else None


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


def communicator(group: Any = None) -> Communicator:
    """Return the communicator of `group`: a process group of mpicoll, or a communicator of mpicoll or mpi4py.

    Args:
        group: None means torch's default group, or mpicoll's world if torch has no default group.

    Raises:
        CommunicatorError: the process group has another backend, or this process is not a member of it.
    """
    if group is None and dist.is_initialized():
        group = c10d.GroupMember.WORLD
    if isinstance(group, ProcessGroupMpicoll):
        return group.comm
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise CommunicatorError("this process is not a member of the process group; only members may call this")
    if isinstance(group, dist.ProcessGroup):
        raise CommunicatorError(
            f"the process group has the backend {dist.get_backend(group)}; create one by new_group(backend='mpicoll')"
        )
    return as_communicator(group)
