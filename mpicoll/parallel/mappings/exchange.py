"""All-to-alls between two shardings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mpicoll.engine.core.communicator import Communicator
from mpicoll.errors import ShapeError
from mpicoll.parallel.groups import describe_rank
from mpicoll.parallel.mappings.arguments import check_equal, check_sizes, check_sum, normalize_dim, resolve_communicator
from mpicoll.parallel.mappings.linear_map import apply_linear_map, exchange_blocks, stack_blocks
from mpicoll.torch.no_compile import disable_compile


@disable_compile
def all_to_all(
    x: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Any = None,
) -> Tensor:
    """Divide every rank's `x` along dimension 0, and send block i to rank i.

    The backward sends the gradients the opposite way. Each sends n(P-1)/P bytes per rank for an `x` of n bytes and
    equal blocks.

    Args:
        x: (rows, ...), this rank's own. Without sizes all ranks pass the same shape, and blocks are equal.
        output_split_sizes: ``output_split_sizes[j]`` rows are received from rank j. Every rank passes both sizes, or
            none does.
        input_split_sizes: ``input_split_sizes[i]`` rows are sent to rank i.
        group: the ranks, by default the axis "model" of the grid in use.

    Returns:
        The received blocks, concatenated along dimension 0 in rank order.

    Raises:
        ShapeError: P does not divide the rows, or the sizes do not fit.

    Example:
        ::

            all_to_all(torch.arange(12))  # 12 / P elements from each rank
    """
    comm = resolve_communicator("all_to_all", x, group)
    normalize_dim("all_to_all", x, 0, comm)
    if output_split_sizes is None and input_split_sizes is None:
        check_equal("all_to_all", x, 0, comm, "pass both output_split_sizes and input_split_sizes, on every rank")
        counts = reverse_counts = None
    elif output_split_sizes is None or input_split_sizes is None:
        raise ShapeError(
            "all_to_all: pass both output_split_sizes and input_split_sizes, on every rank, or neither"
            f" {describe_rank(comm)}"
        )
    else:
        output = check_sizes("all_to_all", "output_split_sizes", output_split_sizes, comm)
        input_ = check_sizes("all_to_all", "input_split_sizes", input_split_sizes, comm)
        check_sum("all_to_all", "input_split_sizes", input_, x, 0, comm)
        if output[comm.rank] != input_[comm.rank]:
            raise ShapeError(
                f"all_to_all: this rank sends itself {input_[comm.rank]} rows, but expects {output[comm.rank]}"
                f" {describe_rank(comm)}"
            )
        counts, reverse_counts = (input_, output), (output, input_)
    return apply_linear_map(
        comm, x, lambda x: exchange_blocks(x, comm, counts), lambda grad: exchange_blocks(grad, comm, reverse_counts)
    )


@disable_compile
def all_to_all_sp2hp(x: Tensor, group: Any = None) -> Tensor:
    """Exchange parts of the tokens for parts of the hidden dimension.

    The backward is :func:`all_to_all_hp2sp`. Each sends n(P-1)/P bytes per rank for an `x` of n bytes.

    Args:
        x: (tokens/P, h), this rank's tokens, of the same shape on all ranks; dimensions before the last are flattened
            into one.
        group: the ranks, by default the axis "model" of the grid in use.

    Returns:
        (tokens, h/P), this rank's part of the hidden dimension of all tokens.

    Raises:
        ShapeError: P does not divide h.

    Example:
        ::

            all_to_all_sp2hp(torch.ones(4, 12))  # (4 * P, 12 / P)
    """
    comm = resolve_communicator("all_to_all_sp2hp", x, group)
    check_equal("all_to_all_sp2hp", x, normalize_dim("all_to_all_sp2hp", x, -1, comm), comm, "pad it")
    x = _flatten_to_matrix(x)
    return apply_linear_map(
        comm, x, lambda x: _exchange_to_hidden(x, comm), lambda grad: _exchange_to_tokens(grad, comm)
    )


@disable_compile
def all_to_all_hp2sp(x: Tensor, group: Any = None) -> Tensor:
    """Exchange parts of the hidden dimension for parts of the tokens.

    The backward is :func:`all_to_all_sp2hp`. Each sends n(P-1)/P bytes per rank for an `x` of n bytes.

    Args:
        x: (tokens, h/P), this rank's part of the hidden dimension, of the same shape on all ranks; dimensions before
            the last are flattened into one.
        group: the ranks, by default the axis "model" of the grid in use.

    Returns:
        (tokens/P, h), this rank's tokens.

    Raises:
        ShapeError: P does not divide the tokens.

    Example:
        ::

            all_to_all_hp2sp(torch.ones(12, 4))  # (12 / P, 4 * P)
    """
    comm = resolve_communicator("all_to_all_hp2sp", x, group)
    normalize_dim("all_to_all_hp2sp", x, -1, comm)
    x = _flatten_to_matrix(x)
    check_equal("all_to_all_hp2sp", x, 0, comm, "pad the tokens")
    return apply_linear_map(
        comm, x, lambda x: _exchange_to_tokens(x, comm), lambda grad: _exchange_to_hidden(grad, comm)
    )


def _exchange_to_hidden(x: Tensor, comm: Communicator) -> Tensor:
    return exchange_blocks(stack_blocks(x, 1, comm), comm, None)


def _exchange_to_tokens(x: Tensor, comm: Communicator) -> Tensor:
    arrived = exchange_blocks(x, comm, None)
    return torch.cat(arrived.view(comm.size, x.shape[0] // comm.size, x.shape[1]).unbind(), 1)


def _flatten_to_matrix(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])
