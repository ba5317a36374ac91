"""Linear map whose weight is sharded by rows, with collectives that overlap its backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from mpicoll.collectives.allgather import allgather, iallgather
from mpicoll.collectives.allreduce import allreduce, iallreduce
from mpicoll.collectives.reduce_scatter import ireduce_scatter, reduce_scatter
from mpicoll.engine.core.communicator import Communicator
from mpicoll.engine.core.request import Request
from mpicoll.errors import ShapeError
from mpicoll.parallel.groups import communicator, describe_rank
from mpicoll.parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from mpicoll.parallel.mappings.arguments import check_tensor
from mpicoll.torch.no_compile import disable_compile

if TYPE_CHECKING:
    pass


MIN_BACKGROUND_BYTES = 64 << 10
"""Bytes from which a collective runs in the background: handing a smaller one to a thread takes longer."""


@disable_compile
def column_parallel_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, sequence_parallel: bool = False, group: Any = None
) -> Tensor:
    """Compute this rank's columns of ``x @ weight.T + bias``, where each rank holds some rows of `weight`.

    The gradient of `x` is summed over the ranks in the background, while that of `weight` is computed. With
    `sequence_parallel` the gathered `x` is not kept: the backward gathers it again, while the gradient of `x` is
    computed. (Tensors smaller than 64 KiB are not worth a thread.) Bytes sent per rank for an `x` of n bytes in all:
    2n(P-1)/P in the backward; with `sequence_parallel` n(P-1)/P in the forward and 2n(P-1)/P in the backward. Inputs
    that require no grad cost nothing. The result can be differentiated twice. Under autocast, it computes and
    communicates in autocast's dtype.

    Args:
        x: ``(..., in)``, the same on all ranks; with `sequence_parallel`, this rank's part of axis 0, of equal size on
            all ranks.
        weight: ``(out / P, in)``, this rank's rows; it may be the weight of a :class:`VocabParallelEmbedding`.
        bias: ``(out / P,)``, or None.
        sequence_parallel: `x` is sharded along axis 0.
        group: the tensor parallel group, by default the axis "model" of the grid in use.

    Returns:
        The tensor ``(..., out / P)`` of the full sequence.

    Raises:
        DTypeError: `x` is not a tensor; raised before any message leaves.
        ShapeError: the last axis of `x` is not that of `weight`; raised before any message leaves.

    Example:
        ::

            column_parallel_linear(torch.ones(3, 8), torch.ones(2, 8))  # (3, 2): this rank's columns
    """
    comm = communicator(group)
    check_features("column_parallel_linear", x, weight.shape[-1], sequence_parallel, comm)
    if comm.size == 1:
        return functional.linear(x, weight, bias)
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = _cast(x, dtype), _cast(weight, dtype)
        bias = None if bias is None else _cast(bias, dtype)
    result: Tensor = _ColumnLinear.apply(x, weight, bias, comm, sequence_parallel)
    return result


class _ColumnLinear(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, comm: Communicator, sequence_parallel: bool
    ) -> Tensor:
        ctx.comm, ctx.sequence_parallel = comm, sequence_parallel
        need_x, need_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if need_weight else None, weight if need_x else None)
        return functional.linear(allgather(x, comm=comm) if sequence_parallel else x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        comm: Communicator = ctx.comm
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        rows = grad.reshape(-1, grad.shape[-1])
        if torch.is_grad_enabled():  # by create_graph
            grad_x, grad_weight = _compute_differentiable_gradients(x, weight, grad, comm, ctx.sequence_parallel)
            return grad_x, grad_weight, rows.sum(0) if need_bias else None, None, None
        grad_weight = gathering = reducing = None
        if need_weight and ctx.sequence_parallel:
            gathering = _start_collective(allgather, iallgather, x, comm=comm)
        if need_x:
            whole = grad @ weight
            if ctx.sequence_parallel:
                reducing = _start_collective(reduce_scatter, ireduce_scatter, whole, comm=comm)
            else:
                reducing = _start_collective(allreduce, iallreduce, whole, out=whole, comm=comm)
        grad_bias = rows.sum(0) if need_bias else None
        if need_weight:
            whole_x = x if gathering is None else gathering()
            grad_weight = rows.t() @ whole_x.reshape(-1, whole_x.shape[-1])
        grad_x = None if reducing is None else reducing()
        return grad_x, grad_weight, grad_bias, None, None


def _start_collective(
    blocking: Callable[..., Tensor], background: Callable[..., Request], x: Tensor, **options: Any
) -> Callable[[], Tensor]:
    """Start a collective, in the background if it is large, and return a function that waits for its result."""
    if x.nbytes < MIN_BACKGROUND_BYTES:
        result = blocking(x, **options)
        return lambda: result
    return background(x, **options).wait


def _compute_differentiable_gradients(
    x: Tensor | None, weight: Tensor | None, grad: Tensor, comm: Communicator, sequence_parallel: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of `x` and `weight` by differentiable operations."""
    grad_x = grad_weight = None
    if weight is not None:
        back = (
            reduce_scatter_to_sequence_parallel_region
            if sequence_parallel
            else reduce_from_tensor_model_parallel_region
        )
        grad_x = back(grad @ weight, comm)
    if x is not None:
        there = gather_from_sequence_parallel_region if sequence_parallel else copy_to_tensor_model_parallel_region
        whole_x = there(x, group=comm)
        grad_weight = grad.reshape(-1, grad.shape[-1]).t() @ whole_x.reshape(-1, whole_x.shape[-1])
    return grad_x, grad_weight


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast `x` as torch's functions do under autocast, which leaves float64 unchanged."""
    return x.to(dtype) if x.is_floating_point() and x.dtype is not torch.float64 else x


def check_features(operation: str, x: Tensor, features: int, sequence_parallel: bool, comm: Communicator) -> None:
    check_tensor(operation, x, comm)
    axes = 2 if sequence_parallel else 1
    if x.dim() < axes or x.shape[-1] != features:
        needed = f"(sequence, ..., {features})" if sequence_parallel else f"(..., {features})"
        raise ShapeError(
            f"{operation}: the input must be of shape {needed}, got {tuple(x.shape)} {describe_rank(comm)}"
        )
