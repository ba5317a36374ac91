"""Validation and conversion of the arguments of differentiable operations."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from mpicoll.buffers.ops import OpLike, Premul
from mpicoll.collectives.arguments import adds_rank_to_errors, check_peer, check_rank
from mpicoll.engine.core.communicator import Communicator, core_of
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.core.proc_null import PROC_NULL
from mpicoll.errors import ArgumentError, DTypeError, RankError, ShapeError
from mpicoll.torch.autograd.linear_map import is_recorded
from mpicoll.torch.c10d_collectives import convert_reduce_op
from mpicoll.torch.groups import communicator
from mpicoll.torch.tensors import check_dense


def find_weight(op: OpLike, comm: Communicator) -> complex | None:
    """Return the factor of the gradient of a linear `op`; None if `op` is not linear."""
    if isinstance(op, Premul):
        return op.factor.conjugate()
    return {"sum": 1, "avg": 1 / comm.size}.get(op) if isinstance(op, str) else None


def convert_op(op: Any, operation: str, tensor: Tensor) -> Any:
    return convert_reduce_op(operation, op, tensor.dtype) if isinstance(op, dist.ReduceOp) else op


def require_weight(operation: str, op: OpLike, comm: Communicator, tensor: Tensor) -> complex:
    """Return `find_weight`. Raises ArgumentError if a gradient is required and `op` has none."""
    weight = find_weight(op, comm)
    if weight is None and is_recorded(tensor):
        raise make_no_gradient_error(operation, op, comm, "use all_reduce, which has one for prod, min and max")
    return 1 if weight is None else weight


def make_no_gradient_error(operation: str, op: Any, comm: Communicator, remedy: str) -> ArgumentError:
    return ArgumentError(
        f"{operation}: op {op!r} is not differentiable here, but the tensor requires grad; {remedy} (rank {comm.rank}"
        f" of {comm.size})"
    )


def resolve_root(operation: str, name: str, root: Any, group: Any) -> tuple[Communicator, int]:
    """Return the communicator of `group`, and `root` as a rank of it. `name` is that of the argument, for errors."""
    comm = communicator(group)
    return comm, _check_root(core_of(comm), operation, name, _resolve_rank(operation, root, group, comm))


def resolve_peer(operation: str, name: str, peer: Any, group: Any, comm: Communicator) -> int | None:
    """Return `peer` as a rank of `comm`, or None for PROC_NULL. `name` is that of the argument, for errors."""
    member = peer if peer == PROC_NULL else _resolve_rank(operation, peer, group, comm)
    found = _check_peer(core_of(comm), operation, name, member)
    return None if found is PROC_NULL else found


@adds_rank_to_errors
def _check_root(comm: CommunicatorCore, operation: str, name: str, root: Any) -> int:
    return check_rank(operation, name, root, comm)


@adds_rank_to_errors
def _check_peer(comm: CommunicatorCore, operation: str, name: str, peer: Any) -> int:
    return check_peer(operation, name, peer, comm)


def _resolve_rank(operation: str, rank: Any, group: Any, comm: Communicator) -> Any:
    """Convert `rank` to a rank of `comm`, without a check of its range."""
    where = f"(rank {comm.rank} of {comm.size})"
    if rank is None:
        raise RankError(f"{operation}: pass a rank, got None {where}")
    if not isinstance(group, dist.ProcessGroup):
        return rank
    try:
        return dist.get_group_rank(group, rank)
    except ValueError as error:
        raise RankError(f"{operation}: {error}; pass the global rank of a member of the group {where}") from error


def check_tensor(operation: str, tensor: Any, comm: Communicator) -> None:
    """Raise DTypeError unless `tensor` is a dense one of torch."""
    where = f"(rank {comm.rank} of {comm.size})"
    if not isinstance(tensor, Tensor):
        raise DTypeError(f"{operation}: pass a torch tensor, got {type(tensor).__name__} {where}")
    check_dense(operation, tensor, f" {where}")


def move_to_front(operation: str, tensor: Tensor, dim: Any, comm: Communicator) -> Tensor:
    """Return `tensor` with axis `dim` first."""
    dims = max(tensor.dim(), 1)
    if not isinstance(dim, int | np.integer) or not -dims <= dim < dims:
        raise ShapeError(
            f"{operation}: dim must be an axis of a tensor of shape {tuple(tensor.shape)}, got {dim!r} (rank"
            f" {comm.rank} of {comm.size})"
        )
    return tensor.movedim(int(dim), 0) if tensor.dim() else tensor.reshape(1)


def check_list(operation: str, tensors: Any, comm: Communicator, *, alike: bool = False, remedy: str = "") -> None:
    """Raise unless `tensors` is a sequence of one tensor for each rank, of one dtype, and `alike` in shape."""
    where = f"(rank {comm.rank} of {comm.size})"
    if not isinstance(tensors, list | tuple) or not all(isinstance(one, Tensor) for one in tensors):
        raise DTypeError(f"{operation}: pass a list of tensors, got {type(tensors).__name__} {where}")
    for one in tensors:
        check_tensor(operation, one, comm)
    if len(tensors) != comm.size:
        raise ShapeError(f"{operation}: pass a tensor for each of the {comm.size} ranks, got {len(tensors)} {where}")
    if len({one.dtype for one in tensors}) > 1:
        dtypes = [str(one.dtype) for one in tensors]
        raise DTypeError(f"{operation}: the tensors have different dtypes {dtypes}; pass tensors of one dtype {where}")
    if alike and len({one.shape for one in tensors}) > 1:
        shapes = [tuple(one.shape) for one in tensors]
        raise ShapeError(f"{operation}: the tensors have different shapes {shapes}{remedy} {where}")
