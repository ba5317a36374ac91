"""Averaging and clipping of gradients, between the backward pass and the optimizer's step."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mpicoll.collectives.allreduce import allreduce, iallreduce
from mpicoll.engine.core.communicator import Communicator
from mpicoll.errors import ArgumentError, DTypeError
from mpicoll.parallel import groups
from mpicoll.parallel.shards import get_shard

BUCKET = 25 << 20
"""Size in bytes of the buckets in which gradients are sent, as in torch's DistributedDataParallel."""


def average_gradients(parameters: Tensor | Iterable[Tensor], group: Any = None) -> None:
    """Replace each gradient by its mean over the ranks of `group`.

    A parameter without a gradient counts as zeros on that rank; where no rank has one, none gets one. Gradients are
    sent in buckets of 25 MiB, each of one dtype and device, which are in flight together: 2n(P-1)/P bytes sent per
    rank. torch's DistributedDataParallel overlaps this with the backward pass; it is the better choice for a model
    without pipeline stages.

    Args:
        parameters: a parameter or an iterable of them, the same ones in the same order on every rank.
        group: the data parallel ranks, by default the ``data`` and ``context`` axes of the grid in use; without a grid,
            all ranks.

    Raises:
        DTypeError: a gradient is sparse, or a parameter is a DTensor (fully_shard averages gradients itself); raised
            before any message leaves.

    Example:
        ::

            model = nn.Linear(4, 2)
            model(torch.ones(3, 4)).sum().backward()
            average_gradients(model.parameters())
    """
    comm = get_replica_communicator(group)
    parameters = [one for one in _as_list(parameters) if one.requires_grad]
    _check_dense("average_gradients", parameters, comm)
    if comm.size == 1 or not parameters:
        return
    _reduce(_collect_gradients(parameters, comm), "avg", comm)


def sum_gradients(parameters: Iterable[Tensor], comm: Communicator) -> None:
    """Replace each gradient by its sum over the ranks of `comm`.

    An absent one, or that of a frozen parameter, counts as zeros; where no rank has one, none gets one.
    """
    _reduce(_collect_gradients(list(parameters), comm), "sum", comm)


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    group: Any = None,
    tensor_group: Any = None,
    counted_elsewhere: Collection[Tensor] = (),
) -> Tensor:
    """Scale all gradients so that the norm of the whole model's gradient is at most `max_norm`.

    The same as :func:`torch.nn.utils.clip_grad_norm_`, for a model whose parts are on several ranks. Parameters that
    :mod:`mpicoll.parallel.layers` has sharded count with each of their shards; the others are the same on all ranks of
    `tensor_group`, and count on its first rank. Costs one all-reduce of 8 bytes.

    Args:
        parameters: the parameters of this rank.
        max_norm: the largest norm.
        norm_type: 2 or ``inf``.
        group: the ranks of one copy of the model, by default the ``pipe`` and ``model`` axes of the grid in use;
            without a grid, all ranks.
        tensor_group: the tensor parallel ranks, by default the ``model`` axis; without a grid, all ranks.
        counted_elsewhere: parameters, such as a copy of a tied embedding, that are scaled but not counted.

    Returns:
        The norm before scaling, a 0-d float64 tensor on the CPU, the same on all ranks.

    Raises:
        ArgumentError: `norm_type` is not supported.
        DTypeError: a gradient is sparse, or a parameter is a DTensor; raised before any message leaves.

    Example:
        ::

            model = nn.Linear(4, 2)
            model(torch.ones(3, 4)).sum().backward()
            norm = clip_grad_norm_(model.parameters(), max_norm=1.0)
    """
    first = groups.communicator(tensor_group, "model").rank == 0
    return clip(
        _as_list(parameters), max_norm, norm_type, _get_model_communicator(group), first=first, copies=counted_elsewhere
    )


def clip(
    parameters: Sequence[Tensor],
    max_norm: float,
    norm_type: float,
    comm: Communicator,
    *,
    first: bool,
    copies: Collection[Tensor],
) -> Tensor:
    """Run :func:`clip_grad_norm_` on the ranks of `comm`.

    `first` is True on the first rank of each tensor parallel group, where replicated parameters count; `copies` are
    counted on another rank.
    """
    if norm_type not in (2.0, math.inf):
        raise ArgumentError(f"clip_grad_norm_: norm_type must be 2 or inf, got {norm_type}")
    _check_dense("clip_grad_norm_", parameters, comm)
    skipped = {id(one) for one in copies}
    norms = [
        torch.linalg.vector_norm(one.grad.detach(), norm_type, dtype=torch.promote_types(one.dtype, torch.float32))
        for one in parameters
        if one.grad is not None and one.numel() and id(one) not in skipped and (first or get_shard(one) is not None)
    ]
    # On the CPU: a rank without gradients cannot determine the device of the other ranks' gradients.
    own = _to_float64_vector(norms) if norms else torch.zeros(1, dtype=torch.float64)
    total: Tensor
    if norm_type == 2.0:
        total = allreduce(own.square().sum(), comm=comm).sqrt()
    else:
        total = allreduce(own.max(), "max", comm=comm)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for one in parameters:
        if one.grad is not None:
            # In bfloat16 the factor would be off by up to 0.4 %.
            one.grad.mul_(factor.to(torch.promote_types(one.grad.dtype, torch.float32)))
    return total


def _to_float64_vector(tensors: Sequence[Tensor]) -> Tensor:
    """Return 0-d `tensors` as one float64 vector on the CPU, in any order. Waits once for each device."""
    places = dict.fromkeys(one.device for one in tensors)
    return torch.cat([torch.stack([one.double() for one in tensors if one.device == place]).cpu() for place in places])


def _as_list(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """Return `parameters` as a list; torch's functions accept a single tensor, which would iterate over its rows."""
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def _check_dense(operation: str, parameters: Sequence[Tensor], comm: Communicator) -> None:
    for one in parameters:
        found = remedy = None
        if isinstance(one, DTensor):
            found, remedy = "is a DTensor", "use DistributedDataParallel or average_gradients instead of fully_shard"
        elif one.grad is not None and one.grad.layout is not torch.strided:
            found, remedy = f"has a gradient of {one.grad.layout}", "make it dense, such as by Embedding(sparse=False)"
        if found is not None:
            raise DTypeError(
                f"{operation}: a parameter of shape {tuple(one.shape)} {found}; {remedy} {groups.describe_rank(comm)}"
            )


def get_replica_communicator(group: Any = None) -> Communicator:
    """Return the communicator of the data parallel ranks; None is the axes "data" and "context" of the grid in use."""
    grid = groups.get_current_grid()
    return grid.communicator("data", "context") if group is None and grid is not None else groups.communicator(group)


def _get_model_communicator(group: Any) -> Communicator:
    grid = groups.get_current_grid()
    return grid.communicator("pipe", "model") if group is None and grid is not None else groups.communicator(group)


def _collect_gradients(parameters: Sequence[Tensor], comm: Communicator) -> list[Tensor]:
    """Return the gradients that any rank has, the same ones on all ranks. An absent one is made, of zeros."""
    present = torch.tensor([one.requires_grad and one.grad is not None for one in parameters], dtype=torch.uint8)
    found = []
    for one, wanted in zip(parameters, allreduce(present, "max", comm=comm).tolist(), strict=True):
        if wanted:
            if one.grad is None:
                one.grad = torch.zeros_like(one)
            elif not one.requires_grad:
                one.grad.zero_()  # left from before it was frozen, or by the last sum
            found.append(one.grad)
    return found


def _reduce(gradients: list[Tensor], op: str, comm: Communicator) -> None:
    pending = []
    for bucket in iterate_buckets(gradients):
        flat = torch.cat([one.detach().reshape(-1) for one in bucket])
        pending.append((bucket, iallreduce(flat, op, out=flat, comm=comm)))
    for bucket, request in pending:
        parts = request.wait().split([one.numel() for one in bucket])
        for one, part in zip(bucket, parts, strict=True):
            one.detach().copy_(part.view(one.shape))


def iterate_buckets(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield `gradients` in groups of one dtype and device, of at most `BUCKET` bytes or a single larger gradient."""
    for kind in dict.fromkeys((one.dtype, one.device) for one in gradients):
        bucket: list[Tensor] = []
        filled = 0
        for one in (one for one in gradients if (one.dtype, one.device) == kind):
            if bucket and filled + one.nbytes > BUCKET:
                yield bucket
                bucket, filled = [], 0
            bucket.append(one)
            filled += one.nbytes
        yield bucket
