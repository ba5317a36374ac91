"""Sharded sequences: layouts, positions, splitting and gathering."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from mpicoll.engine.core.communicator import Communicator
from mpicoll.errors import ArgumentError, DTypeError, ShapeError
from mpicoll.parallel.groups import communicator, describe_rank
from mpicoll.torch.autograd import all_gather_single
from mpicoll.torch.no_compile import disable_compile

Layout: TypeAlias = Literal["contiguous", "zigzag"]

LAYOUTS = ("contiguous", "zigzag")


@disable_compile
def split_sequence(x: Tensor, dim: int, *, layout: Layout = "contiguous", group: Any = None) -> Tensor:
    """Return a copy of this rank's part of the full sequence `x`. Sends no messages.

    The gradient of `x` is that of this rank's losses, zero at the tokens of other ranks: like the gradient of a
    parameter, it must be summed over the group if all ranks computed the same `x`.

    Args:
        x: the full sequence, the same on all ranks.
        dim: the dimension of the tokens.
        layout: "contiguous" or "zigzag".
        group: the ranks that share the sequence, by default the axis "context" of the grid in use.

    Raises:
        ShapeError: the tokens can't be divided among P ranks, or with "zigzag" into 2P chunks.
        ArgumentError: `layout` is unknown.

    Example:
        ::

            split_sequence(torch.arange(12), 0)  # 12 / P consecutive numbers
    """
    comm = communicator(group, "context")
    check_layout("split_sequence", layout, comm)
    dim = _normalize_dim("split_sequence", x, dim, comm)
    chunks = comm.size * count_chunks(layout)
    if x.shape[dim] % chunks:
        raise ShapeError(
            f"split_sequence: the {x.shape[dim]} tokens along dim {dim} of shape {tuple(x.shape)} can't be divided into"
            f" {chunks} equal parts, {count_chunks(layout)} for each of {comm.size} ranks (layout {layout}); pad"
            f" them {describe_rank(comm)}"
        )
    return x.index_select(dim, compute_positions(x.shape[dim] // comm.size, layout, comm.rank, comm.size, x.device))


@disable_compile
def gather_sequence(x: Tensor, dim: int, *, layout: Layout = "contiguous", group: Any = None) -> Tensor:
    """Return the full sequence in its order, on every rank; the inverse of :func:`split_sequence`.

    The gradient of `x` is that of the sum of all ranks' losses: where all ranks compute the same loss from the result,
    count it on one rank only, or divide it by the number of ranks. Can be differentiated any number of times. Costs an
    all-gather, and in the backward a reduce-scatter.

    Args:
        x: this rank's part, of the same shape and dtype on all ranks.
        dim: the dimension of the tokens.
        layout: "contiguous" or "zigzag".
        group: the ranks that share the sequence, by default the axis "context" of the grid in use.

    Raises:
        ShapeError: `dim` is out of range, or with "zigzag" the number of tokens is odd.
        ArgumentError: `layout` is unknown.

    Example:
        ::

            gather_sequence(torch.ones(1, 6, 8), 1)  # (1, 6 * P, 8)
    """
    comm = communicator(group, "context")
    check_layout("gather_sequence", layout, comm)
    dim = _normalize_dim("gather_sequence", x, dim, comm)
    check_chunks("gather_sequence", x, dim, "x", layout, comm)
    return order_tokens(all_gather_single(x, dim, comm), dim, layout, comm)


@disable_compile
def position_ids(
    length: int, *, layout: Layout = "contiguous", group: Any = None, device: torch.device | str | None = None
) -> Tensor:
    """Return the positions of this rank's tokens in the full sequence. Sends no messages.

    Args:
        length: the number of tokens of this rank, such as ``x.shape[dim]`` after :func:`split_sequence`.
        layout: "contiguous" or "zigzag".
        group: the ranks that share the sequence, by default the axis "context" of the grid in use.
        device: the device of the result.

    Returns:
        An int64 tensor of shape (length,).

    Raises:
        ShapeError: `length` is negative, or odd with "zigzag".
        ArgumentError: `layout` is unknown.

    Example:
        ::

            position_ids(6)  # 0 to 5 on rank 0, 6 to 11 on rank 1
    """
    comm = communicator(group, "context")
    check_layout("position_ids", layout, comm)
    if length < 0 or length % count_chunks(layout):
        raise ShapeError(
            f"position_ids: length must be 0 or more, and even with zigzag; got {length} ({layout})"
            f" {describe_rank(comm)}"
        )
    return compute_positions(length, layout, comm.rank, comm.size, device)


def count_chunks(layout: Layout) -> int:
    """Return the number of consecutive chunks in a rank's part."""
    return 2 if layout == "zigzag" else 1


def compute_positions(
    length: int, layout: Layout, rank: int, size: int, device: torch.device | str | None = None
) -> Tensor:
    """Return the positions of the `length` tokens of `rank` in the full sequence."""
    chunk = length // count_chunks(layout)
    starts = (rank, 2 * size - 1 - rank) if layout == "zigzag" else (rank,)
    return torch.cat([torch.arange(i * chunk, (i + 1) * chunk, device=device) for i in starts])


def order_tokens(x: Tensor, dim: int, layout: Layout, comm: Communicator) -> Tensor:
    """Reorder the concatenated parts of all ranks along `dim` into the order of the sequence."""
    if layout == "contiguous":
        return x
    places = [
        compute_positions(x.shape[dim] // comm.size, layout, rank, comm.size, x.device) for rank in range(comm.size)
    ]
    return x.index_select(dim, torch.cat(places).argsort())


def check_layout(operation: str, layout: Any, comm: Communicator) -> None:
    if layout not in LAYOUTS:
        raise ArgumentError(f"{operation}: layout must be one of {LAYOUTS}, got {layout!r} {describe_rank(comm)}")


def check_chunks(operation: str, x: Tensor, dim: int, name: str, layout: Layout, comm: Communicator) -> None:
    if x.shape[dim] % count_chunks(layout):
        raise ShapeError(
            f"{operation}: with zigzag each rank has two chunks of equal length, but {name} has {x.shape[dim]} tokens"
            f" (dim {dim} of shape {tuple(x.shape)}) {describe_rank(comm)}"
        )


def _normalize_dim(operation: str, x: Any, dim: Any, comm: Communicator) -> int:
    """Return `dim` as a non-negative number. Raise DTypeError or ShapeError if `x` has no such dimension."""
    if not isinstance(x, Tensor):
        raise DTypeError(f"{operation}: pass a tensor, got {type(x).__name__} {describe_rank(comm)}")
    if not isinstance(dim, int | np.integer) or not -x.dim() <= dim < x.dim():
        raise ShapeError(
            f"{operation}: dim {dim} is not an axis of a tensor of shape {tuple(x.shape)} {describe_rank(comm)}"
        )
    return int(dim) % x.dim()
