"""Linear maps between the ranks' tensors, and their adjoints for gradients.

None returns a view of memory that it has allocated, because torch forbids to change such a result in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import Function

from mpicoll.collectives.allgather import allgather
from mpicoll.collectives.allreduce import allreduce
from mpicoll.collectives.alltoall import alltoall
from mpicoll.collectives.reduce_scatter import reduce_scatter
from mpicoll.engine.core.communicator import Communicator

Map: TypeAlias = Callable[[Tensor], Tensor]


class _LinearMap(Function):
    """A linear map, and its adjoint for gradients; each is the backward of the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_map: Map, adjoint: Map) -> Tensor:
        ctx.maps = forward_map, adjoint
        return forward_map(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        forward_map, adjoint = ctx.maps
        return _apply(grad, adjoint, forward_map), None, None


def apply_linear_map(comm: Communicator, x: Tensor, forward_map: Map, adjoint: Map) -> Tensor:
    """Return ``forward_map(x)``, differentiable by `adjoint`; `x` itself if `comm` has one rank."""
    return x if comm.size == 1 else _apply(x, forward_map, adjoint)


def _apply(x: Tensor, forward_map: Map, adjoint: Map) -> Tensor:
    if not (x.requires_grad and torch.is_grad_enabled()):
        return forward_map(x)
    result: Tensor = _LinearMap.apply(x, forward_map, adjoint)
    return result


def identity(x: Tensor) -> Tensor:
    return x


def sum_ranks(x: Tensor, comm: Communicator) -> Tensor:
    total: Tensor = allreduce(x, comm=comm)
    return total


def copy_local_part(x: Tensor, dim: int, sizes: tuple[int, ...] | None, comm: Communicator) -> Tensor:
    if sizes is None:
        extent = x.shape[dim] // comm.size
        part = x.narrow(dim, comm.rank * extent, extent)
    else:
        part = x.narrow(dim, sum(sizes[: comm.rank]), sizes[comm.rank])
    return part.clone(memory_format=torch.contiguous_format)


def concatenate_ranks(x: Tensor, dim: int, sizes: tuple[int, ...] | None, comm: Communicator) -> Tensor:
    blocks: Tensor
    if dim == 0:
        blocks = allgather(x, counts=sizes, comm=comm)
        return blocks
    if sizes is None:
        blocks = allgather(x, comm=comm)
        return torch.cat(blocks.view(comm.size, *x.shape).unbind(), dim)
    shapes = [(*x.shape[:dim], size, *x.shape[dim + 1 :]) for size in sizes]
    counts = [torch.Size(shape).numel() for shape in shapes]
    blocks = allgather(x.reshape(-1), counts=counts, comm=comm)
    parts = blocks.split(counts)
    return torch.cat([part.view(shape) for part, shape in zip(parts, shapes, strict=True)], dim)


def sum_and_scatter(x: Tensor, dim: int, sizes: tuple[int, ...] | None, comm: Communicator) -> Tensor:
    """Reduce-scatter along `dim`. Only dimension 0 supports `sizes`."""
    part: Tensor = reduce_scatter(stack_blocks(x, dim, comm) if dim else x, counts=sizes, comm=comm)
    return part


def exchange_blocks(x: Tensor, comm: Communicator, counts: Any) -> Tensor:
    arrived: Tensor = alltoall(x, counts=counts, comm=comm)
    return arrived


def stack_blocks(x: Tensor, dim: int, comm: Communicator) -> Tensor:
    """Stack the ranks' equal parts of `x` along `dim` in dimension 0."""
    blocks: Tensor = x.unflatten(dim, (comm.size, x.shape[dim] // comm.size))
    return blocks.movedim(dim, 0).flatten(0, 1)
