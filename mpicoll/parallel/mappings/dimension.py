"""Splitting and gathering along any dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from mpicoll.parallel.mappings.arguments import check_part, check_whole
from mpicoll.parallel.mappings.linear_map import apply_linear_map, concatenate_ranks, copy_local_part, sum_and_scatter
from mpicoll.torch.no_compile import disable_compile


@disable_compile
def split(x: Tensor, dim: int, group: Any = None, sizes: Sequence[int] | None = None) -> Tensor:
    """Keep this rank's part of dimension `dim`. Sends nothing.

    The backward is :func:`gather`, n(P-1)/P bytes per rank for an `x` of n bytes.

    Args:
        x: replicated.
        dim: the dimension to divide.
        group: the ranks, by default the axis "model" of the grid in use.
        sizes: the extent of each rank's part, the same on all ranks; by default equal parts.

    Returns:
        This rank's part, a contiguous copy, so `x` can be freed.

    Raises:
        ShapeError: P does not divide the extent, or the sum of `sizes` differs from it.

    Example:
        ::

            split(torch.ones(2, 12, 3), dim=1)  # (2, 12 / P, 3)
    """
    return split_along("split", x, dim, group, sizes)


@disable_compile
def gather(x: Tensor, dim: int, group: Any = None, sizes: Sequence[int] | None = None) -> Tensor:
    """Concatenate the ranks' parts along dimension `dim`, for computations that are the same on all ranks.

    Sends n(P-1)/P bytes per rank for a result of n bytes. The backward is :func:`split`, which sends nothing.

    Args:
        x: this rank's part, of the same shape on all ranks, or with the extents `sizes` along `dim`.
        dim: the dimension to concatenate.
        group: the ranks, by default the axis "model" of the grid in use.
        sizes: the extent of each rank's part, the same on all ranks.

    Returns:
        The full tensor, replicated.

    Raises:
        ShapeError: this rank's extent differs from `sizes`.

    Example:
        ::

            gather(torch.ones(2, 4, 3), dim=1)  # (2, 4 * P, 3)
    """
    return gather_along("gather", x, dim, group, sizes)


def split_along(operation: str, x: Tensor, dim: int, group: Any, sizes: Sequence[int] | None) -> Tensor:
    comm, dim, sizes = check_whole(operation, x, dim, group, sizes)
    return apply_linear_map(
        comm, x, lambda x: copy_local_part(x, dim, sizes, comm), lambda grad: concatenate_ranks(grad, dim, sizes, comm)
    )


def gather_along(operation: str, x: Tensor, dim: int, group: Any, sizes: Sequence[int] | None) -> Tensor:
    comm, dim, sizes = check_part(operation, x, dim, group, sizes)
    return apply_linear_map(
        comm, x, lambda x: concatenate_ranks(x, dim, sizes, comm), lambda grad: copy_local_part(grad, dim, sizes, comm)
    )


def all_gather_along(operation: str, x: Tensor, dim: int, group: Any, sizes: Sequence[int] | None) -> Tensor:
    comm, dim, sizes = check_part(operation, x, dim, group, sizes)
    return apply_linear_map(
        comm, x, lambda x: concatenate_ranks(x, dim, sizes, comm), lambda grad: sum_and_scatter(grad, dim, sizes, comm)
    )


def reduce_scatter_along(operation: str, x: Tensor, dim: int, group: Any, sizes: Sequence[int] | None) -> Tensor:
    comm, dim, sizes = check_whole(operation, x, dim, group, sizes)
    return apply_linear_map(
        comm, x, lambda x: sum_and_scatter(x, dim, sizes, comm), lambda grad: concatenate_ranks(grad, dim, sizes, comm)
    )
