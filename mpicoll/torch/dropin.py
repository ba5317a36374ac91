"""Common collectives and messages that bypass c10d if that changes nothing but their run time.

Each has the signature and the meaning of the function of the same name in torch.distributed. A blocking call on a plain
CPU tensor and a process group of mpicoll bypasses c10d; all other calls are passed to torch.distributed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from mpicoll.torch.fast_path import FastPath
from mpicoll.torch.group_operations import direct_operations
from mpicoll.torch.groups import find_direct


def _find_fast_path(group: Any) -> FastPath | None:
    """Return the fast path of `group`, or None if c10d must process the call."""
    world = c10d._world
    process_group = world.default_pg if group is None else group
    if world.pg_coalesce_state or torch.compiler.is_compiling():
        return None
    # find_direct(), inlined for all calls but the first one.
    operations = direct_operations.get(process_group) or find_direct(process_group)
    return None if operations is None else operations.get_fast_path()


def _find_root(group: Any, rank: Any, group_rank: Any) -> Any:
    """Return the rank in `group` of the root that a caller has passed as a global `rank` or as a `group_rank`; None if
    c10d must process the call."""
    if rank is None or group_rank is not None:
        return group_rank if rank is None else None
    # The default group's ranks are the global ones.
    if group is None or group is c10d._world.default_pg or rank.__class__ is not int:
        return rank
    return c10d._world.pg_group_ranks.get(group, {}).get(rank)


def all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
    """Reduce as :func:`torch.distributed.all_reduce` does, in place.

    Example:
        >>> x = torch.ones(2)
        >>> dist.all_reduce(x)
        >>> x / dist.get_world_size()
        tensor([1., 1.])
    """
    if not async_op:
        fast_path = _find_fast_path(group)
        if fast_path is not None and fast_path.all_reduce(tensor, op):
            return None
    return dist.all_reduce(tensor, op, group, async_op)


def broadcast(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Any:
    """Broadcast as :func:`torch.distributed.broadcast` does, in place.

    Example:
        >>> x = torch.full((2,), float(dist.get_rank()))
        >>> dist.broadcast(x, src=0)
        >>> x
        tensor([0., 0.])
    """
    if not async_op:
        fast_path = _find_fast_path(group)
        if fast_path is not None and fast_path.broadcast(tensor, _find_root(group, src, group_src)):
            return None
    return dist.broadcast(tensor, src, group, async_op, group_src)


def reduce(
    tensor: torch.Tensor,
    dst: int | None = None,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Any:
    """Reduce as :func:`torch.distributed.reduce` does, in place at the destination.

    Example:
        >>> x = torch.ones(2)
        >>> dist.reduce(x, dst=0)
    """
    if not async_op:
        fast_path = _find_fast_path(group)
        if fast_path is not None and fast_path.reduce(tensor, op, _find_root(group, dst, group_dst)):
            return None
    return dist.reduce(tensor, dst, op, group, async_op, group_dst)


def all_gather_into_tensor(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any = None, async_op: bool = False
) -> Any:
    """Gather as :func:`torch.distributed.all_gather_into_tensor` does.

    Example:
        >>> gathered = torch.empty(2 * dist.get_world_size())
        >>> dist.all_gather_into_tensor(gathered, torch.ones(2))
        >>> gathered.mean()
        tensor(1.)
    """
    if not async_op:
        fast_path = _find_fast_path(group)
        if fast_path is not None and fast_path.all_gather_single(output_tensor, input_tensor):
            return None
    return _all_gather_single(output_tensor, input_tensor, group, async_op)


def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,  # torch's name
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Reduce and scatter as :func:`torch.distributed.reduce_scatter_tensor` does.

    Example:
        >>> block = torch.empty(2)
        >>> dist.reduce_scatter_tensor(block, torch.ones(2 * dist.get_world_size()))
        >>> block / dist.get_world_size()
        tensor([1., 1.])
    """
    if not async_op:
        fast_path = _find_fast_path(group)
        if fast_path is not None and fast_path.reduce_scatter_single(output, input, op):
            return None
    return _reduce_scatter_single(output, input, op, group, async_op)


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Exchange splits as :func:`torch.distributed.all_to_all_single` does.

    Example:
        >>> received = torch.empty(dist.get_world_size())
        >>> dist.all_to_all_single(received, torch.full((dist.get_world_size(),), float(dist.get_rank())))
        >>> received[0]
        tensor(0.)
    """
    if not async_op and not output_split_sizes and not input_split_sizes:
        fast_path = _find_fast_path(group)
        if fast_path is not None and fast_path.all_to_all_single(output, input):
            return None
    return dist.all_to_all_single(output, input, output_split_sizes, input_split_sizes, group, async_op)


def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None, timeout: Any = None) -> Any:
    """Synchronize as :func:`torch.distributed.barrier` does.

    Example:
        >>> dist.barrier()
    """
    if not async_op and device_ids is None and timeout is None:
        fast_path = _find_fast_path(group)
        if fast_path is not None and fast_path.barrier():
            return None
    # It accepts a timeout since torch 2.13.
    return dist.barrier(group, async_op, device_ids, **({} if timeout is None else {"timeout": timeout}))


def send(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    """Send as :func:`torch.distributed.send` does.

    Example:
        >>> if dist.get_world_size() > 1 and dist.get_rank() == 0:
        ...     dist.send(torch.ones(2), dst=1)
        >>> if dist.get_rank() == 1:
        ...     source = dist.recv(torch.empty(2), src=0)
    """
    fast_path = _find_fast_path(group)
    if fast_path is not None and fast_path.send(tensor, _find_root(group, dst, group_dst), tag):
        return
    dist.send(tensor, dst, group, tag, group_dst)


def recv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """Receive as :func:`torch.distributed.recv` does, and return the rank of the sender; see :func:`send`.

    Example:
        >>> request = dist.isend(torch.ones(2), dst=0)
        >>> x = torch.empty(2)
        >>> dist.recv(x, src=0)  # on one rank
        0
        >>> request.wait()
        True
    """
    fast_path = _find_fast_path(group)
    if fast_path is not None and src is not None and fast_path.recv(tensor, _find_root(group, src, group_src), tag):
        return src
    return dist.recv(tensor, src, group, tag, group_src)


# Renamed in torch 2.13, which warns about the old names.
_all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

all_gather_single = all_gather_into_tensor
reduce_scatter_single = reduce_scatter_tensor
