"""Differentiable collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from mpicoll.buffers.ops import OpLike, Premul
from mpicoll.collectives.allgather import allgather
from mpicoll.collectives.allreduce import allreduce
from mpicoll.collectives.alltoall import alltoall
from mpicoll.collectives.bcast import bcast
from mpicoll.collectives.gather import gather as native_gather
from mpicoll.collectives.reduce import reduce as native_reduce
from mpicoll.collectives.reduce_scatter import reduce_scatter as native_reduce_scatter
from mpicoll.collectives.scatter import scatter as native_scatter
from mpicoll.engine.core.communicator import Communicator
from mpicoll.errors import DTypeError, ShapeError
from mpicoll.torch.autograd.arguments import (
    check_list,
    check_tensor,
    convert_op,
    find_weight,
    make_no_gradient_error,
    move_to_front,
    require_weight,
    resolve_root,
)
from mpicoll.torch.autograd.linear_map import Map, add_dependency, apply_linear, as_tensor, is_recorded, scale
from mpicoll.torch.groups import communicator
from mpicoll.torch.no_compile import disable_compile


@disable_compile
def all_reduce(tensor: Tensor, op: Any = "sum", group: Any = None) -> Tensor:
    """Reduce the tensors of all ranks elementwise; every rank gets the result.

    Gradients: of ``sum``, ``avg`` and ``premul_sum`` the sum over ranks, times what the rank's tensor was multiplied
    by; of ``prod`` the sum times the product of the other ranks' tensors, exact where there are zeros; of ``min`` and
    ``max`` the rank that holds the extreme element gets the sum, in equal shares where several ranks hold it, as with
    torch.amax.

    Args:
        tensor: of the same shape and dtype on all ranks.
        op: the reduction, the same on all ranks.
        group: the ranks (see the module).

    Returns:
        A tensor of the shape and dtype of `tensor`.

    Raises:
        ArgumentError: `tensor` requires grad, and `op` has no gradient.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> mpicoll.torch.autograd.all_reduce(x).sum().backward()  # on one rank
        >>> x.grad
        tensor([1., 1.])
    """
    comm = communicator(group)
    check_tensor("all_reduce", tensor, comm)
    op = convert_op(op, "all_reduce", tensor)
    weight = find_weight(op, comm)
    if weight is not None:
        reduce_all: Map = lambda x: as_tensor(allreduce(x, op, comm=comm))  # noqa: E731
        if not isinstance(op, Premul):
            return apply_linear(tensor, reduce_all, reduce_all)
        return apply_linear(tensor, reduce_all, lambda grad: _sum_and_scale(grad, weight, comm))
    if not is_recorded(tensor):
        return as_tensor(allreduce(tensor, op, comm=comm))
    if op not in ("prod", "min", "max"):
        raise make_no_gradient_error("all_reduce", op, comm, "pass tensor.detach()")
    function = _Product if op == "prod" else _Extreme
    return as_tensor(function.apply(tensor, op, comm)[0])


def _sum_and_scale(grad: Tensor, weight: complex, comm: Communicator) -> Tensor:
    """Return the sum over ranks, times `weight`, rounded once: float16 may not hold the sum before it is scaled."""
    wide = grad.float() if grad.dtype in (torch.float16, torch.bfloat16) else grad
    return scale(allreduce(wide, comm=comm), weight).to(grad.dtype)


@disable_compile
def reduce(tensor: Tensor, dst: int, op: Any = "sum", group: Any = None) -> Tensor:
    """Reduce the tensors of all ranks elementwise; rank `dst` gets the result, the others zeros.

    The gradient is that of `dst`, on all ranks.

    Args:
        tensor: of the same shape and dtype on all ranks.
        dst: the root, the same on all ranks.
        op: the reduction, the same on all ranks.
        group: the ranks (see the module).

    Returns:
        A tensor of the shape and dtype of `tensor`.

    Raises:
        ArgumentError: `tensor` requires grad, and `op` is not ``sum``, ``avg`` or ``premul_sum``.
        RankError: `dst` is out of range.

    Example:
        >>> mpicoll.torch.autograd.reduce(torch.ones(2), dst=0)  # on one rank
        tensor([1., 1.])
    """
    comm, root = resolve_root("reduce", "dst", dst, group)
    check_tensor("reduce", tensor, comm)
    op = convert_op(op, "reduce", tensor)
    weight = require_weight("reduce", op, comm, tensor)
    return apply_linear(
        tensor,
        lambda x: _reduce_to_root(x, op, root, comm),
        lambda grad: scale(bcast(grad, root, comm=comm), weight),
    )


@disable_compile
def broadcast(tensor: Tensor, src: int, group: Any = None) -> Tensor:
    """Broadcast the tensor of rank `src` to all ranks.

    The gradient is the sum over ranks on `src`, and zero elsewhere.

    Args:
        tensor: of the same shape and dtype on all ranks. Its contents matter on `src` only, but it must require grad on
            all ranks or on none.
        src: the root, the same on all ranks.
        group: the ranks (see the module).

    Returns:
        The tensor of `src`.

    Raises:
        RankError: `src` is out of range.

    Example:
        >>> mpicoll.torch.autograd.broadcast(torch.ones(2), src=0)  # on one rank
        tensor([1., 1.])
    """
    comm, root = resolve_root("broadcast", "src", src, group)
    check_tensor("broadcast", tensor, comm)
    return apply_linear(
        tensor,
        lambda x: as_tensor(bcast(x, root, comm=comm)),
        lambda grad: _reduce_to_root(grad, "sum", root, comm),
    )


@disable_compile
def all_gather(tensor: Tensor, group: Any = None, *, sizes: Sequence[int] | None = None) -> tuple[Tensor, ...]:
    """Gather the tensors of all ranks on every rank, as a tuple in rank order.

    The gradient is the sum over ranks of the gradients of this rank's part.

    Args:
        tensor: of the same shape and dtype on all ranks; with `sizes`, the first axes differ.
        group: the ranks (see the module).
        sizes: the extent of each rank's first axis, the same on all ranks.

    Returns:
        A tuple whose i-th tensor is that of rank i. The tensors are parts of one.

    Raises:
        ShapeError: `tensor` does not have ``sizes[rank]`` rows.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> mpicoll.torch.autograd.all_gather(x)[0].sum().backward()  # on one rank
        >>> x.grad
        tensor([1., 1.])
    """
    comm = communicator(group)
    check_tensor("all_gather", tensor, comm)
    if sizes is None:
        return tuple(all_gather_single(tensor.unsqueeze(0), group=comm).unbind())
    return tuple(all_gather_single(tensor, group=comm, sizes=sizes).split_with_sizes(list(sizes)))


@disable_compile
def all_gather_single(tensor: Tensor, dim: int = 0, group: Any = None, *, sizes: Sequence[int] | None = None) -> Tensor:
    """Concatenate the tensors of all ranks along axis `dim`, in rank order; every rank gets the result.

    The gradient is the sum over ranks of the gradients of this rank's part.

    Args:
        tensor: of the same shape and dtype on all ranks; with `sizes`, the extents along `dim` differ. A 0-d tensor
            counts as one of one element.
        dim: the axis.
        group: the ranks (see the module).
        sizes: the extent of each rank's tensor along `dim`, the same on all ranks.

    Returns:
        The concatenation, whose extent along `dim` is the sum over ranks.

    Raises:
        ShapeError: `dim` is out of range, or `tensor` does not have the extent ``sizes[rank]``.

    Example:
        >>> mpicoll.torch.autograd.all_gather_single(torch.ones(2), dim=0)  # on one rank
        tensor([1., 1.])
    """
    comm = communicator(group)
    check_tensor("all_gather_single", tensor, comm)
    rows = move_to_front("all_gather_single", tensor, dim, comm)
    whole = apply_linear(
        rows,
        lambda x: as_tensor(allgather(x, counts=sizes, comm=comm)),
        lambda grad: as_tensor(native_reduce_scatter(grad, counts=sizes, comm=comm)),
    )
    return whole.movedim(0, dim)


@disable_compile
def reduce_scatter(tensors: Sequence[Tensor], op: Any = "sum", group: Any = None) -> Tensor:
    """Reduce the i-th tensors of all ranks, and return the result on rank i.

    The gradient of the i-th tensor is that of rank i's result.

    Args:
        tensors: a tensor for each rank, all of one dtype; the i-th has the same shape on all ranks.
        op: the reduction, the same on all ranks.
        group: the ranks (see the module).

    Returns:
        A tensor of the shape of ``tensors[rank]``.

    Raises:
        ArgumentError: a tensor requires grad, and `op` is not ``sum``, ``avg`` or ``premul_sum``.
        ShapeError: the number of tensors is not that of ranks.
        DTypeError: the tensors have different dtypes.

    Example:
        >>> mpicoll.torch.autograd.reduce_scatter([torch.ones(2)])  # on one rank
        tensor([1., 1.])
    """
    comm = communicator(group)
    check_list("reduce_scatter", tensors, comm)
    counts = [one.numel() for one in tensors]
    sizes = counts if len(set(counts)) > 1 else None
    block = reduce_scatter_single(torch.cat([one.reshape(-1) for one in tensors]), op, group=comm, sizes=sizes)
    return block.view(tensors[comm.rank].shape)


@disable_compile
def reduce_scatter_single(
    tensor: Tensor, op: Any = "sum", dim: int = 0, group: Any = None, *, sizes: Sequence[int] | None = None
) -> Tensor:
    """Reduce the tensors of all ranks elementwise, divide the result along axis `dim`, and return the i-th block on
    rank i.

    The gradient is the concatenation of those of all ranks' blocks.

    Args:
        tensor: of the same shape and dtype on all ranks.
        op: the reduction, the same on all ranks.
        dim: the axis.
        group: the ranks (see the module).
        sizes: the extent of each rank's block along `dim`, the same on all ranks; by default blocks are equal.

    Returns:
        This rank's block.

    Raises:
        ArgumentError: `tensor` requires grad, and `op` is not ``sum``, ``avg`` or ``premul_sum``.
        ShapeError: `dim` is out of range, the extent can't be divided equally, or differs from the sum of `sizes`.

    Example:
        >>> mpicoll.torch.autograd.reduce_scatter_single(torch.ones(2))  # on one rank
        tensor([1., 1.])
    """
    comm = communicator(group)
    check_tensor("reduce_scatter_single", tensor, comm)
    op = convert_op(op, "reduce_scatter_single", tensor)
    weight = require_weight("reduce_scatter_single", op, comm, tensor)
    rows = move_to_front("reduce_scatter_single", tensor, dim, comm)
    block = apply_linear(
        rows,
        lambda x: as_tensor(native_reduce_scatter(x, op, counts=sizes, comm=comm)),
        lambda grad: scale(allgather(grad, counts=sizes, comm=comm), weight),
    )
    return block.movedim(0, dim)


@disable_compile
def gather(tensor: Tensor, dst: int = 0, group: Any = None) -> tuple[Tensor, ...]:
    """Gather the tensors of all ranks on rank `dst`, as a tuple in rank order; other ranks get such a tuple of zeros.

    The gradient is that of the rank's part on `dst`.

    Args:
        tensor: of the same shape and dtype on all ranks.
        dst: the root, the same on all ranks.
        group: the ranks (see the module).

    Returns:
        A tuple of a tensor for each rank. The zeros on other ranks than `dst` are expanded from one element, and exist
        so that all ranks can take part in the backward, such as by ``0 * sum(part.sum() for part in result)``.

    Raises:
        RankError: `dst` is out of range.

    Example:
        >>> mpicoll.torch.autograd.gather(torch.ones(2), dst=0)  # on one rank
        (tensor([1., 1.]),)
    """
    comm, root = resolve_root("gather", "dst", dst, group)
    check_tensor("gather", tensor, comm)
    rows = tensor.unsqueeze(0)
    to_root, from_root = _make_root_maps(rows, (comm.size, *tensor.shape), root, comm)
    return tuple(apply_linear(rows, to_root, from_root).unbind())


@disable_compile
def scatter(tensors: Sequence[Tensor] | Tensor, src: int = 0, group: Any = None) -> Tensor:
    """Scatter rank `src`'s tensors: return the i-th of them on rank i.

    The gradient of the i-th tensor is received from rank i; the tensors that the other ranks pass get zeros.

    Args:
        tensors: on `src`, a tensor for each rank, all of one shape and dtype. On every other rank, one tensor of that
            shape and dtype, whose contents don't matter, but which must require grad as those of `src` do.
        src: the root, the same on all ranks.
        group: the ranks (see the module).

    Returns:
        This rank's tensor.

    Raises:
        RankError: `src` is out of range.
        ShapeError: on `src`, the number of tensors is not that of ranks, or their shapes differ.
        DTypeError: `tensors` is not a list of tensors of one dtype on `src`, or not a tensor elsewhere.

    Example:
        >>> mpicoll.torch.autograd.scatter([torch.ones(2)], src=0)  # on one rank
        tensor([1., 1.])
    """
    comm, root = resolve_root("scatter", "src", src, group)
    if comm.rank == root:
        check_list("scatter", tensors, comm, alike=True)
        rows = torch.stack(list(tensors))
    elif isinstance(tensors, Tensor):
        check_tensor("scatter", tensors, comm)
        rows = tensors.unsqueeze(0)
    else:
        raise DTypeError(
            f"scatter: on ranks other than src pass one tensor of the shape of the result, got {type(tensors).__name__}"
            f" (rank {comm.rank} of {comm.size})"
        )
    to_root, from_root = _make_root_maps(rows[:1], rows.shape, root, comm)
    return apply_linear(rows, from_root, to_root).squeeze(0)


@disable_compile
def all_to_all(
    tensors: Sequence[Tensor], output_shapes: Sequence[Sequence[int]] | None = None, group: Any = None
) -> tuple[Tensor, ...]:
    """Send the i-th tensor to rank i, and return a tuple whose j-th tensor was received from rank j.

    Gradients are sent back to the source ranks.

    Args:
        tensors: a tensor for each rank, all of one dtype.
        output_shapes: the shapes that this rank receives from each rank. Every rank passes them unless all tensors have
            the same shape on all ranks.
        group: the ranks (see the module).

    Returns:
        A tuple of a tensor for each rank.

    Raises:
        ShapeError: the number of tensors or shapes is not that of ranks, or shapes differ without `output_shapes`.
        DTypeError: the tensors have different dtypes.

    Example:
        >>> mpicoll.torch.autograd.all_to_all([torch.ones(2)])  # on one rank
        (tensor([1., 1.]),)
    """
    comm = communicator(group)
    check_list("all_to_all", tensors, comm, alike=output_shapes is None, remedy="; pass output_shapes on every rank")
    if output_shapes is None:
        return tuple(all_to_all_single(torch.stack(list(tensors)), group=comm).unbind())
    shapes = [torch.Size(shape) for shape in output_shapes]
    sent, received = [one.numel() for one in tensors], [shape.numel() for shape in shapes]
    # Not as vectors: `cat` drops the graph of empty ones, and a rank that sends nothing would not run later backwards.
    rows = torch.cat([one.reshape(-1, 1) for one in tensors])
    whole = all_to_all_single(rows, received, sent, comm)
    return tuple(part.view(shape) for part, shape in zip(whole.split_with_sizes(received), shapes, strict=True))


@disable_compile
def all_to_all_single(
    tensor: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Any = None,
) -> Tensor:
    """Divide every rank's `tensor` along axis 0, and send the i-th block to rank i.

    Gradients are sent back to the source ranks of the rows.

    Args:
        tensor: of the same shape on all ranks, divided equally, unless every rank passes both sizes.
        output_split_sizes: ``output_split_sizes[j]`` rows are received from rank j.
        input_split_sizes: ``input_split_sizes[i]`` rows are sent to rank i.
        group: the ranks (see the module).

    Returns:
        The received rows, concatenated in rank order.

    Raises:
        ShapeError: only one of the sizes is given, they do not fit, or the rows can't be divided equally.

    Example:
        >>> mpicoll.torch.autograd.all_to_all_single(torch.ones(2))  # on one rank
        tensor([1., 1.])
    """
    comm = communicator(group)
    check_tensor("all_to_all_single", tensor, comm)
    if (output_split_sizes is None) != (input_split_sizes is None):
        raise ShapeError(
            "all_to_all_single: pass both output_split_sizes and input_split_sizes, on every rank, or neither"
            f" (rank {comm.rank} of {comm.size})"
        )
    counts = reverse_counts = None
    if output_split_sizes is not None and input_split_sizes is not None:
        counts, reverse_counts = (input_split_sizes, output_split_sizes), (output_split_sizes, input_split_sizes)
    return apply_linear(
        move_to_front("all_to_all_single", tensor, 0, comm),
        lambda x: as_tensor(alltoall(x, counts=counts, comm=comm)),
        lambda grad: as_tensor(alltoall(grad, counts=reverse_counts, comm=comm)),
    )


class _Product(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, op: str, comm: Communicator) -> tuple[Tensor, Tensor]:
        ctx.comm = comm
        token = tensor.new_zeros(())
        ctx.save_for_backward(tensor, token)
        return as_tensor(allreduce(tensor, op, comm=comm)), token

    @staticmethod
    def backward(ctx: Any, grad: Tensor, token_grad: Tensor) -> Any:
        tensor, token = ctx.saved_tensors
        comm = ctx.comm
        total = all_reduce(add_dependency(grad, token, token_grad), group=comm)
        # Dividing the product by this rank's factor would be wrong where that is zero.
        factors = all_gather_single(tensor.unsqueeze(0), group=comm)
        others = torch.cat([factors[: comm.rank], factors[comm.rank + 1 :]]).prod(0)
        return total * others.conj(), None, None


class _Extreme(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, op: str, comm: Communicator) -> tuple[Tensor, Tensor]:
        ctx.comm = comm
        result, token = as_tensor(allreduce(tensor, op, comm=comm)), tensor.new_zeros(())
        ctx.save_for_backward(tensor, result, token)
        return result, token

    @staticmethod
    def backward(ctx: Any, grad: Tensor, token_grad: Tensor) -> Any:
        tensor, result, token = ctx.saved_tensors
        total = all_reduce(add_dependency(grad, token, token_grad), group=ctx.comm)
        attained = (tensor == result).to(grad.dtype)
        return total * (attained / allreduce(attained, comm=ctx.comm)), None, None


def _reduce_to_root(x: Tensor, op: OpLike, root: int, comm: Communicator) -> Tensor:
    result = native_reduce(x, op, root, comm=comm)
    return x.new_zeros(x.shape) if result is None else as_tensor(result)


def _make_root_maps(block: Tensor, whole: Sequence[int], root: int, comm: Communicator) -> tuple[Map, Map]:
    """Return the maps that gather blocks at the root, with zeros of shape `whole` elsewhere, and scatter them.

    For the scatter only the root's tensor matters.
    """
    shape = block.shape

    def to_root(x: Tensor) -> Tensor:
        result = native_gather(x, root, comm=comm)
        return x.new_zeros(()).expand(whole) if result is None else as_tensor(result)

    def from_root(x: Tensor) -> Tensor:
        return as_tensor(native_scatter(x if comm.rank == root else x.new_empty(shape), root, comm=comm))

    return to_root, from_root
