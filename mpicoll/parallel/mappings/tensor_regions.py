"""Borders of tensor parallel regions, whose activations are sharded along the last dimension."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mpicoll.parallel.mappings.arguments import resolve_communicator
from mpicoll.parallel.mappings.dimension import all_gather_along, gather_along, reduce_scatter_along, split_along
from mpicoll.parallel.mappings.linear_map import apply_linear_map, identity, sum_ranks
from mpicoll.torch.no_compile import disable_compile


@disable_compile
def copy_to_tensor_model_parallel_region(x: Tensor, group: Any = None) -> Tensor:
    """Pass a replicated tensor to computations that differ from rank to rank. Sends nothing.

    The backward sums the gradients over the ranks: 2n(P-1)/P bytes per rank for an `x` of n bytes.

    Args:
        x: replicated.
        group: the ranks, by default the axis "model" of the grid in use.

    Returns:
        The same values, partial, sharing the memory of `x`.

    Example:
        ::

            x = torch.ones(2, 8, requires_grad=True)
            y = copy_to_tensor_model_parallel_region(x) * 2  # partial: each rank may compute something else
            reduce_from_tensor_model_parallel_region(y).sum().backward()
    """
    comm = resolve_communicator("copy_to_tensor_model_parallel_region", x, group)
    return apply_linear_map(comm, x, identity, lambda grad: sum_ranks(grad, comm))


@disable_compile
def reduce_from_tensor_model_parallel_region(x: Tensor, group: Any = None) -> Tensor:
    """Sum the ranks' partial tensors.

    Sends 2n(P-1)/P bytes per rank for an `x` of n bytes. The backward passes the gradient on, and sends nothing.

    Args:
        x: partial, of the same shape on all ranks.
        group: the ranks, by default the axis "model" of the grid in use.

    Returns:
        The sum over the ranks, replicated, of the shape of `x`.

    Example:
        ::

            x = torch.ones(2, 8, requires_grad=True)
            reduce_from_tensor_model_parallel_region(copy_to_tensor_model_parallel_region(x) * 2).sum().backward()
    """
    comm = resolve_communicator("reduce_from_tensor_model_parallel_region", x, group)
    return apply_linear_map(comm, x, lambda x: sum_ranks(x, comm), identity)


@disable_compile
def scatter_to_tensor_model_parallel_region(x: Tensor, group: Any = None) -> Tensor:
    """Keep this rank's part of the last dimension. Sends nothing.

    The backward is an all-gather, n(P-1)/P bytes per rank for an `x` of n bytes.

    Args:
        x: (..., h), replicated.
        group: the ranks, by default the axis "model" of the grid in use.

    Returns:
        This rank's part (..., h/P), a contiguous copy, so `x` can be freed.

    Raises:
        ShapeError: P does not divide h.

    Example:
        ::

            scatter_to_tensor_model_parallel_region(torch.ones(2, 12))  # (2, 12 / P)
    """
    return split_along("scatter_to_tensor_model_parallel_region", x, -1, group, None)


@disable_compile
def gather_from_tensor_model_parallel_region(x: Tensor, group: Any = None) -> Tensor:
    """Concatenate the ranks' parts along the last dimension, for computations that are the same on all ranks.

    Sends n(P-1)/P bytes per rank for a result of n bytes. The backward keeps this rank's part of the gradient, and
    sends nothing.

    Args:
        x: (..., h/P), this rank's part, of the same shape on all ranks.
        group: the ranks, by default the axis "model" of the grid in use.

    Returns:
        The full tensor (..., h), replicated.

    Example:
        ::

            gather_from_tensor_model_parallel_region(torch.ones(2, 4))  # (2, 4 * P)
    """
    return gather_along("gather_from_tensor_model_parallel_region", x, -1, group, None)


@disable_compile
def all_gather_last_dim_from_tensor_parallel_region(x: Tensor, group: Any = None) -> Tensor:
    """Concatenate the ranks' parts along the last dimension, for computations that differ from rank to rank.

    The backward is a reduce-scatter. Forward and backward each send n(P-1)/P bytes per rank for a result of n bytes.

    Args:
        x: (..., h/P), this rank's part, of the same shape on all ranks.
        group: the ranks, by default the axis "model" of the grid in use.

    Returns:
        The full tensor (..., h), partial.

    Example:
        ::

            all_gather_last_dim_from_tensor_parallel_region(torch.ones(2, 4))  # (2, 4 * P)
    """
    return all_gather_along("all_gather_last_dim_from_tensor_parallel_region", x, -1, group, None)


@disable_compile
def reduce_scatter_last_dim_to_tensor_parallel_region(x: Tensor, group: Any = None) -> Tensor:
    """Sum the ranks' partial tensors, and keep this rank's part of the last dimension of the sum.

    The backward is an all-gather. Forward and backward each send n(P-1)/P bytes per rank for an `x` of n bytes.

    Args:
        x: (..., h), partial, of the same shape on all ranks.
        group: the ranks, by default the axis "model" of the grid in use.

    Returns:
        This rank's part of the sum (..., h/P).

    Raises:
        ShapeError: P does not divide h.

    Example:
        ::

            reduce_scatter_last_dim_to_tensor_parallel_region(torch.ones(2, 12))  # (2, 12 / P), each element P
    """
    return reduce_scatter_along("reduce_scatter_last_dim_to_tensor_parallel_region", x, -1, group, None)
