"""Cross entropy of logits whose vocabulary is sharded among the ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from mpicoll.collectives.allreduce import allreduce
from mpicoll.engine.core.communicator import Communicator
from mpicoll.errors import ArgumentError, DTypeError, ShapeError
from mpicoll.parallel.groups import communicator, describe_rank
from mpicoll.parallel.mappings import copy_to_tensor_model_parallel_region, reduce_from_tensor_model_parallel_region
from mpicoll.torch.no_compile import disable_compile

__all__ = ["vocab_parallel_cross_entropy"]


@disable_compile
def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    *,
    ignore_index: int = -100,
    reduction: str = "none",
    group: Any = None,
) -> Tensor:
    """Compute torch.nn.functional.cross_entropy of logits whose vocabulary is sharded.

    With `label_smoothing` e the target has the weight 1 - e + e/V and every other index e/V, as in torch. (Megatron-LM
    gives 1 - e to the target and e/(V - 1) to every other index, with this rank's V/P for V: its loss then differs from
    rank to rank.) Logits of unused indices, such as padding to a multiple of P, count like any others unless they are
    -inf, where only a loss without smoothing is finite.

    The loss counts once (see :mod:`mpicoll.parallel.mappings`), and the gradient is that of this rank's `logits`. The
    forward has two all-reduces, of one number per position (the maximum, without which the exponentials would overflow)
    and of two, or three with smoothing; the backward has none. It keeps the softmax, as large as `logits` and at least
    float32, and never changes `logits` or a gradient. It can be differentiated again, at the cost of two all-reduces of
    one number per position.

    Args:
        logits: (..., V/P), this rank's part of the vocabulary, in rank order and of the same shape on all P ranks.
        target: (...), integers in [0, V) or `ignore_index`, the same on all ranks.
        label_smoothing: a number in [0, 1].
        ignore_index: the target of positions that do not count.
        reduction: "none", "sum" or "mean".
        group: the tensor parallel group, by default the axis "model" of the grid in use.

    Returns:
        The same on all ranks: for "none" the loss of each position (...), zero where it is ignored; for "sum" the sum
        of these; for "mean" that sum divided by the number of positions that are not ignored (nan if there are none).
        float32 for float16 and bfloat16 logits, whose gradient has their dtype.

    Raises:
        DTypeError: `logits` is not a real floating-point tensor, or `target` not an integer one.
        ShapeError: the shapes do not fit together.
        ArgumentError: a target is out of range, `label_smoothing` outside [0, 1], or `reduction` unknown.

        All are raised before any message leaves.

    Example:
        ::

            logits = torch.randn(5, 8, requires_grad=True)  # this rank's 8 words of the vocabulary
            vocab_parallel_cross_entropy(logits, torch.arange(5), reduction="mean").backward()
    """
    comm = communicator(group)
    target = _check_arguments(logits, target, label_smoothing, ignore_index, reduction, comm)
    losses: Tensor
    losses, _ = _CrossEntropy.apply(logits, target, float(label_smoothing), ignore_index, comm)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / (target != ignore_index).sum()


class _CrossEntropy(Function):
    """The losses, and this rank's part of the softmax: as an output it makes the backward differentiable."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, smoothing: float, ignore_index: int, comm: Communicator
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        greatest = allreduce(logits.amax(-1).to(dtype), "max", comm=comm)
        softmax = logits - greatest.unsqueeze(-1)
        index, own = _locate_targets(target, softmax, comm)
        sums = softmax.new_empty(2 + (smoothing > 0), *target.shape)
        sums[1] = torch.where(own, softmax.gather(-1, index).squeeze(-1), 0)
        if smoothing:
            sums[2] = softmax.sum(-1)
        sums[0] = softmax.exp_().sum(-1)
        sums = allreduce(sums, comm=comm)
        softmax /= sums[0].unsqueeze(-1)
        losses = sums[0].log() - (1 - smoothing) * sums[1]
        if smoothing:
            losses -= smoothing / (comm.size * logits.shape[-1]) * sums[2]
        losses.masked_fill_(target == ignore_index, 0)
        ctx.save_for_backward(softmax, target)
        ctx.dtype, ctx.smoothing, ctx.ignore_index, ctx.comm = logits.dtype, smoothing, ignore_index, comm
        return losses, softmax

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_softmax: Tensor | None) -> Any:
        softmax, target = ctx.saved_tensors
        comm, smoothing = ctx.comm, ctx.smoothing
        result = None
        if grad is not None:
            # What is the same on all ranks meets the rank's own part: only the next backward has to send anything.
            grad = copy_to_tensor_model_parallel_region(grad, comm).masked_fill(target == ctx.ignore_index, 0)
            index, own = _locate_targets(target, softmax, comm)
            result = softmax * grad.unsqueeze(-1)
            result.scatter_add_(-1, index, torch.where(own, (smoothing - 1) * grad, 0).unsqueeze(-1))
            if smoothing:
                result -= smoothing / (comm.size * softmax.shape[-1]) * grad.unsqueeze(-1)
        if grad_softmax is not None:
            own_mean = (softmax * grad_softmax).sum(-1, keepdim=True)
            mean = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(own_mean, comm), comm)
            more = softmax * (grad_softmax - mean)
            result = more if result is None else result + more
        return None if result is None else result.to(ctx.dtype), None, None, None, None


def _locate_targets(target: Tensor, part: Tensor, comm: Communicator) -> tuple[Tensor, Tensor]:
    """Return the index of each target in this rank's part (0 for others), and a mask of this rank's targets."""
    local = target - comm.rank * part.shape[-1]
    own = (local >= 0) & (local < part.shape[-1])
    return torch.where(own, local, 0).unsqueeze(-1), own


def _check_arguments(
    logits: Any, target: Any, label_smoothing: float, ignore_index: int, reduction: str, comm: Communicator
) -> Tensor:
    """Check the arguments and return `target` as int64."""
    where = describe_rank(comm)
    name = "vocab_parallel_cross_entropy"
    for what, tensor in (("logits", logits), ("target", target)):
        if not isinstance(tensor, Tensor):
            raise DTypeError(f"{name}: pass {what} as a torch tensor, got {type(tensor).__name__} {where}")
    if not logits.is_floating_point():
        raise DTypeError(f"{name}: logits must be of a floating-point dtype, got {logits.dtype} {where}")
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise DTypeError(
            f"{name}: target must hold indices of an integer dtype, got {target.dtype}; probabilities are not supported"
            f" {where}"
        )
    if not logits.dim() or not logits.shape[-1] or target.shape != logits.shape[:-1]:
        raise ShapeError(
            f"{name}: the last dimension of logits, this rank's part of the vocabulary, must be at least 1, and target"
            f" must have the shape of the other dimensions; got logits {tuple(logits.shape)} and target"
            f" {tuple(target.shape)} {where}"
        )
    if not 0 <= label_smoothing <= 1:
        raise ArgumentError(f"{name}: label_smoothing must be in [0, 1], got {label_smoothing} {where}")
    if reduction not in ("none", "sum", "mean"):
        raise ArgumentError(f"{name}: reduction must be 'none', 'sum' or 'mean', got {reduction!r} {where}")
    indices: Tensor = target.long()
    vocabulary = comm.size * logits.shape[-1]
    wrong = ((indices < 0) | (indices >= vocabulary)) & (indices != ignore_index)
    if wrong.any():
        position = tuple(wrong.nonzero()[0].tolist())
        raise ArgumentError(
            f"{name}: target {indices[position].item()} at position {position} is not in [0, {vocabulary}), the"
            f" vocabulary of {comm.size} ranks with {logits.shape[-1]} each, nor ignore_index {ignore_index} {where}"
        )
    return indices
