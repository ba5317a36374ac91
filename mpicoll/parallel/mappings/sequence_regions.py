"""Borders of sequence parallel regions, whose activations are sharded along dimension 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from mpicoll.parallel.mappings.dimension import all_gather_along, gather_along, reduce_scatter_along, split_along
from mpicoll.torch.no_compile import disable_compile


@disable_compile
def scatter_to_sequence_parallel_region(x: Tensor, group: Any = None) -> Tensor:
    """Keep this rank's part of dimension 0. Sends nothing.

    The backward is an all-gather, n(P-1)/P bytes per rank for an `x` of n bytes.

    Args:
        x: (s, ...), replicated.
        group: the ranks, by default the axis "model" of the grid in use.

    Returns:
        This rank's part (s/P, ...), a copy, so `x` can be freed.

    Raises:
        ShapeError: P does not divide s.

    Example:
        ::

            scatter_to_sequence_parallel_region(torch.ones(12, 2))  # (12 / P, 2)
    """
    return split_along("scatter_to_sequence_parallel_region", x, 0, group, None)


@disable_compile
def gather_from_sequence_parallel_region(
    x: Tensor,
    tensor_parallel_output_grad: bool = True,
    group: Any = None,
    output_split_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Concatenate the ranks' parts along dimension 0.

    Args:
        x: (s/P, ...), this rank's part, of the same shape on all ranks, or of ``output_split_sizes[rank]`` rows.
        tensor_parallel_output_grad: if True, the result is partial, for computations that differ from rank to rank, and
            the backward is a reduce-scatter, which sends as much as the forward. If False, the result is replicated,
            for computations that are the same on all ranks, and the backward keeps this rank's part of the gradient and
            sends nothing.
        group: the ranks, by default the axis "model" of the grid in use.
        output_split_sizes: the rows of each rank, the same on all ranks.

    Returns:
        The full tensor (s, ...). The forward sends n(P-1)/P bytes per rank for a result of n bytes.

    Example:
        ::

            gather_from_sequence_parallel_region(torch.ones(4, 2))  # (4 * P, 2)
    """
    joined = all_gather_along if tensor_parallel_output_grad else gather_along
    return joined("gather_from_sequence_parallel_region", x, 0, group, output_split_sizes)


@disable_compile
def reduce_scatter_to_sequence_parallel_region(
    x: Tensor, group: Any = None, input_split_sizes: Sequence[int] | None = None
) -> Tensor:
    """Sum the ranks' partial tensors, and keep this rank's part of dimension 0 of the sum.

    The backward is an all-gather. Forward and backward each send n(P-1)/P bytes per rank for an `x` of n bytes.

    Args:
        x: (s, ...), partial, of the same shape on all ranks.
        group: the ranks, by default the axis "model" of the grid in use.
        input_split_sizes: the rows that each rank keeps, the same on all ranks; by default s/P.

    Returns:
        This rank's part of the sum: (s/P, ...), or ``input_split_sizes[rank]`` rows.

    Raises:
        ShapeError: P does not divide s.

    Example:
        ::

            reduce_scatter_to_sequence_parallel_region(torch.ones(12, 2))  # (12 / P, 2), each element P
    """
    return reduce_scatter_along("reduce_scatter_to_sequence_parallel_region", x, 0, group, input_split_sizes)
