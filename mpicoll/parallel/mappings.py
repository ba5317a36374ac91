"""Megatron's pairs of differentiable collectives at the borders of a model-parallel region.

All ranks of the group compute **one** loss, alike, and it counts once. (In :mod:`mpicoll.torch.autograd`, every rank
has a loss of its own and their sum is differentiated.) In such a computation a tensor is

* **replicated**: the same on all ranks, as is its gradient;
* **sharded**: each rank has a part of it along one dimension, in the order of ranks, and that part of its gradient;
* **partial**: each rank has its own tensor of full shape, such as a summand of a replicated tensor, or a copy that
  only this rank's computation uses; its gradient belongs to this rank alone.

Every function maps a tensor from one of these states to another, and its backward maps the gradient back:

================================================  ==========  ==========  ==============  ==============
function                                          in          out         forward         backward
================================================  ==========  ==========  ==============  ==============
copy_to_tensor_model_parallel_region              replicated  partial     nothing         all-reduce
reduce_from_tensor_model_parallel_region          partial     replicated  all-reduce      nothing
scatter_to_tensor_model_parallel_region           replicated  sharded     own part        all-gather
gather_from_tensor_model_parallel_region          sharded     replicated  all-gather      own part
all_gather_last_dim_from_tensor_parallel_region   sharded     partial     all-gather      reduce-scatter
reduce_scatter_last_dim_to_tensor_parallel_region partial     sharded     reduce-scatter  all-gather
scatter_to_sequence_parallel_region               replicated  sharded     own part        all-gather
gather_from_sequence_parallel_region              sharded     partial     all-gather      reduce-scatter
… with tensor_parallel_output_grad=False          sharded     replicated  all-gather      own part
reduce_scatter_to_sequence_parallel_region        partial     sharded     reduce-scatter  all-gather
all_to_all, all_to_all_sp2hp, all_to_all_hp2sp    sharded     sharded     all-to-all      all-to-all
split, along any dimension                        replicated  sharded     own part        all-gather
gather, along any dimension                       sharded     replicated  all-gather      own part
================================================  ==========  ==========  ==============  ==============

A tensor in the wrong state gives wrong gradients and no error: the result of ``copy_to`` must reach the loss through
``reduce_from`` or a similar function, and a replicated tensor must not be passed to ``reduce_from``, which would count
it once per rank.

Rules for all of them:

* Every rank of the group calls the same functions in the same order, on one thread. The backward is a collective too:
  **on every rank the tensor must require grad, or on none**, and the loss must depend on each result on all ranks, if
  need be by adding ``0 * result.sum()``; otherwise some ranks wait for the others. With ``create_graph=True`` this goes
  for the gradients as well: what the ranks compute in between must be of the same kind everywhere, not linear on one
  rank and curved on another.
* Higher-order derivatives are supported. Without a tensor that requires grad, or under ``torch.no_grad()``, they
  are plain collectives. Any dtype; integers and bool have no gradient; halves are summed in float32 and rounded once.
* They work out of place: neither `x` nor an incoming gradient is ever changed. A result has memory of its own, which
  the caller may change, with two exceptions. Where the forward does nothing, in ``copy_to``, the result shares the
  memory of `x`; if it has a gradient, torch raises RuntimeError when it is changed in place, or when `x` is and the
  result used. A group of one rank returns `x` itself.
* torch.compile does not compile them: the compiled code has a graph break at each.
* Tensors are on the CPU or, on all ranks, on a CUDA device; any strides, negative `dim` and extents of zero are fine.

`group` is a process group of mpicoll, a 1-D DeviceMesh, a Communicator or an mpi4py communicator; by default the axis
"model" of the grid in use (:mod:`mpicoll.parallel.groups`). Wrong arguments raise kinds of ArgumentError before any
message leaves: DTypeError where `x` is not a tensor, ShapeError where a dimension is missing or does not divide.

P is the size of the group. The bytes that a rank sends are those of the ring, which no algorithm undercuts; inside one
machine, where ranks share memory, nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import Function

from mpicoll.collectives.allgather import allgather
from mpicoll.collectives.allreduce import allreduce
from mpicoll.collectives.alltoall import alltoall
from mpicoll.collectives.reduce_scatter import reduce_scatter
from mpicoll.engine.core.communicator import Communicator
from mpicoll.errors import DTypeError, ShapeError
from mpicoll.parallel.groups import communicator
from mpicoll.torch.no_compile import eager

__all__ = [
    "all_gather_last_dim_from_tensor_parallel_region",
    "all_to_all",
    "all_to_all_hp2sp",
    "all_to_all_sp2hp",
    "copy_to_tensor_model_parallel_region",
    "gather",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_last_dim_to_tensor_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
    "split",
]

_Map: TypeAlias = Callable[[Tensor], Tensor]


# --- tensor parallelism


@eager
def copy_to_tensor_model_parallel_region(x: Tensor, group: Any = None) -> Tensor:
    """Pass a replicated tensor to computations that differ from rank to rank. Sends nothing.

    The backward sums the gradients over the ranks: 2n(P-1)/P bytes per rank for an `x` of n bytes.

    Args:
        x: replicated.
        group: the ranks, by default the axis "model" of the grid in use.

    Returns:
        The same values, partial, sharing the memory of `x`.
    """
    comm = _communicator("copy_to_tensor_model_parallel_region", x, group)
    if comm.size == 1:
        return x
    return _apply_linear_map(x, _identity, lambda grad: _allreduce(grad, comm))


@eager
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
    comm = _communicator("reduce_from_tensor_model_parallel_region", x, group)
    if comm.size == 1:
        return x
    return _apply_linear_map(x, lambda x: _allreduce(x, comm), _identity)


@eager
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
    """
    return _split("scatter_to_tensor_model_parallel_region", x, -1, group, None)


@eager
def gather_from_tensor_model_parallel_region(x: Tensor, group: Any = None) -> Tensor:
    """Concatenate the ranks' parts along the last dimension, for computations that are the same on all ranks.

    Sends n(P-1)/P bytes per rank for a result of n bytes. The backward keeps this rank's part of the gradient, and
    sends nothing.

    Args:
        x: (..., h/P), this rank's part, of the same shape on all ranks.
        group: the ranks, by default the axis "model" of the grid in use.

    Returns:
        The full tensor (..., h), replicated.
    """
    return _gather("gather_from_tensor_model_parallel_region", x, -1, group, None)


@eager
def all_gather_last_dim_from_tensor_parallel_region(x: Tensor, group: Any = None) -> Tensor:
    """Concatenate the ranks' parts along the last dimension, for computations that differ from rank to rank.

    The backward is a reduce-scatter. Forward and backward each send n(P-1)/P bytes per rank for a result of n bytes.

    Args:
        x: (..., h/P), this rank's part, of the same shape on all ranks.
        group: the ranks, by default the axis "model" of the grid in use.

    Returns:
        The full tensor (..., h), partial.
    """
    return _all_gather("all_gather_last_dim_from_tensor_parallel_region", x, -1, group, None)


@eager
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
    """
    return _reduce_scatter("reduce_scatter_last_dim_to_tensor_parallel_region", x, -1, group, None)


# --- sequence parallelism


@eager
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
    """
    return _split("scatter_to_sequence_parallel_region", x, 0, group, None)


@eager
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
    """
    joined = _all_gather if tensor_parallel_output_grad else _gather
    return joined("gather_from_sequence_parallel_region", x, 0, group, output_split_sizes)


@eager
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
    """
    return _reduce_scatter("reduce_scatter_to_sequence_parallel_region", x, 0, group, input_split_sizes)


# --- from one sharding to another


@eager
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
        output_split_sizes: ``output_split_sizes[j]`` rows come from rank j. Every rank passes both sizes, or none does.
        input_split_sizes: ``input_split_sizes[i]`` rows go to rank i.
        group: the ranks, by default the axis "model" of the grid in use.

    Returns:
        The received blocks, concatenated along dimension 0 in rank order.

    Raises:
        ShapeError: P does not divide the rows, or the sizes do not fit.
    """
    comm = _communicator("all_to_all", x, group)
    _normalize_dim("all_to_all", x, 0, comm)
    if output_split_sizes is None and input_split_sizes is None:
        _check_equal("all_to_all", x, 0, comm, "pass both output_split_sizes and input_split_sizes, on every rank")
        there = back = None
    elif output_split_sizes is None or input_split_sizes is None:
        raise ShapeError(
            "all_to_all: pass both output_split_sizes and input_split_sizes, on every rank, or neither" + _where(comm)
        )
    else:
        output = _check_sizes("all_to_all", "output_split_sizes", output_split_sizes, comm)
        input_ = _check_sizes("all_to_all", "input_split_sizes", input_split_sizes, comm)
        _check_sum("all_to_all", "input_split_sizes", input_, x, 0, comm)
        if output[comm.rank] != input_[comm.rank]:
            raise ShapeError(
                f"all_to_all: this rank sends itself {input_[comm.rank]} rows, but expects {output[comm.rank]}"
                f"{_where(comm)}"
            )
        there, back = (input_, output), (output, input_)
    if comm.size == 1:
        return x
    return _apply_linear_map(x, lambda x: _alltoall(x, comm, there), lambda grad: _alltoall(grad, comm, back))


@eager
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
    """
    comm = _communicator("all_to_all_sp2hp", x, group)
    _check_equal("all_to_all_sp2hp", x, _normalize_dim("all_to_all_sp2hp", x, -1, comm), comm, "pad it")
    x = _as_matrix(x)
    if comm.size == 1:
        return x
    return _apply_linear_map(x, lambda x: _to_hidden(x, comm), lambda grad: _to_tokens(grad, comm))


@eager
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
    """
    comm = _communicator("all_to_all_hp2sp", x, group)
    _normalize_dim("all_to_all_hp2sp", x, -1, comm)
    x = _as_matrix(x)
    _check_equal("all_to_all_hp2sp", x, 0, comm, "pad the tokens")
    if comm.size == 1:
        return x
    return _apply_linear_map(x, lambda x: _to_tokens(x, comm), lambda grad: _to_hidden(grad, comm))


# --- any dimension


@eager
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
    """
    return _split("split", x, dim, group, sizes)


@eager
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
    """
    return _gather("gather", x, dim, group, sizes)


# --- the pairs


def _split(operation: str, x: Tensor, dim: int, group: Any, sizes: Sequence[int] | None) -> Tensor:
    comm, dim, sizes = _check_whole(operation, x, dim, group, sizes)
    if comm.size == 1:
        return x
    return _apply_linear_map(
        x, lambda x: _local_part(x, dim, sizes, comm), lambda grad: _concatenate_ranks(grad, dim, sizes, comm)
    )


def _gather(operation: str, x: Tensor, dim: int, group: Any, sizes: Sequence[int] | None) -> Tensor:
    comm, dim, sizes = _check_part(operation, x, dim, group, sizes)
    if comm.size == 1:
        return x
    return _apply_linear_map(
        x, lambda x: _concatenate_ranks(x, dim, sizes, comm), lambda grad: _local_part(grad, dim, sizes, comm)
    )


def _all_gather(operation: str, x: Tensor, dim: int, group: Any, sizes: Sequence[int] | None) -> Tensor:
    comm, dim, sizes = _check_part(operation, x, dim, group, sizes)
    if comm.size == 1:
        return x
    return _apply_linear_map(
        x, lambda x: _concatenate_ranks(x, dim, sizes, comm), lambda grad: _sum_and_scatter(grad, dim, sizes, comm)
    )


def _reduce_scatter(operation: str, x: Tensor, dim: int, group: Any, sizes: Sequence[int] | None) -> Tensor:
    comm, dim, sizes = _check_whole(operation, x, dim, group, sizes)
    if comm.size == 1:
        return x
    return _apply_linear_map(
        x, lambda x: _sum_and_scatter(x, dim, sizes, comm), lambda grad: _concatenate_ranks(grad, dim, sizes, comm)
    )


class _LinearMap(Function):
    """A linear map `there`, and its adjoint `back` for gradients; each is the backward of the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: _Map, back: _Map) -> Tensor:
        ctx.maps = there, back
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        there, back = ctx.maps
        return _apply_linear_map(grad, back, there), None, None


def _apply_linear_map(x: Tensor, there: _Map, back: _Map) -> Tensor:
    if not (x.requires_grad and torch.is_grad_enabled()):
        return there(x)
    result: Tensor = _LinearMap.apply(x, there, back)
    return result


# --- maps: none returns a view of memory that it has made, because torch forbids to change such a result in place


def _identity(x: Tensor) -> Tensor:
    return x


def _allreduce(x: Tensor, comm: Communicator) -> Tensor:
    total: Tensor = allreduce(x, comm=comm)
    return total


def _local_part(x: Tensor, dim: int, sizes: tuple[int, ...] | None, comm: Communicator) -> Tensor:
    if sizes is None:
        extent = x.shape[dim] // comm.size
        part = x.narrow(dim, comm.rank * extent, extent)
    else:
        part = x.narrow(dim, sum(sizes[: comm.rank]), sizes[comm.rank])
    return part.clone(memory_format=torch.contiguous_format)


def _concatenate_ranks(x: Tensor, dim: int, sizes: tuple[int, ...] | None, comm: Communicator) -> Tensor:
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


def _sum_and_scatter(x: Tensor, dim: int, sizes: tuple[int, ...] | None, comm: Communicator) -> Tensor:
    """Reduce-scatter along `dim`. Only dimension 0 supports `sizes`."""
    part: Tensor = reduce_scatter(_blocks(x, dim, comm) if dim else x, counts=sizes, comm=comm)
    return part


def _alltoall(x: Tensor, comm: Communicator, counts: Any) -> Tensor:
    arrived: Tensor = alltoall(x, counts=counts, comm=comm)
    return arrived


def _to_hidden(x: Tensor, comm: Communicator) -> Tensor:
    return _alltoall(_blocks(x, 1, comm), comm, None)


def _to_tokens(x: Tensor, comm: Communicator) -> Tensor:
    arrived = _alltoall(x, comm, None)
    return torch.cat(arrived.view(comm.size, x.shape[0] // comm.size, x.shape[1]).unbind(), 1)


def _blocks(x: Tensor, dim: int, comm: Communicator) -> Tensor:
    """Stack the ranks' equal parts of `x` along `dim` in dimension 0."""
    blocks: Tensor = x.unflatten(dim, (comm.size, x.shape[dim] // comm.size))
    return blocks.movedim(dim, 0).flatten(0, 1)


def _as_matrix(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])


# --- arguments

_Checked: TypeAlias = "tuple[Communicator, int, tuple[int, ...] | None]"


def _check_whole(operation: str, x: Tensor, dim: int, group: Any, sizes: Sequence[int] | None) -> _Checked:
    """Check the arguments for a tensor to be divided; return communicator, dimension and sizes."""
    comm = _communicator(operation, x, group)
    dim = _normalize_dim(operation, x, dim, comm)
    if sizes is None:
        remedy = "pass the extents that the ranks get as sizes" if operation == "split" else "pad it"
        _check_equal(operation, x, dim, comm, remedy)
        return comm, dim, None
    sizes = _check_sizes(operation, "sizes", sizes, comm)
    _check_sum(operation, "sizes", sizes, x, dim, comm)
    return comm, dim, sizes


def _check_part(operation: str, x: Tensor, dim: int, group: Any, sizes: Sequence[int] | None) -> _Checked:
    """Check the arguments for a part of a tensor; return communicator, dimension and sizes."""
    comm = _communicator(operation, x, group)
    dim = _normalize_dim(operation, x, dim, comm)
    if sizes is None:
        return comm, dim, None
    sizes = _check_sizes(operation, "sizes", sizes, comm)
    if x.shape[dim] != sizes[comm.rank]:
        raise ShapeError(
            f"{operation}: dimension {dim} of a tensor of shape {tuple(x.shape)} has extent {x.shape[dim]}, but sizes"
            f" {sizes} says {sizes[comm.rank]} for this rank; pass the same sizes on all ranks{_where(comm)}"
        )
    return comm, dim, sizes


def _communicator(operation: str, x: Any, group: Any) -> Communicator:
    if not isinstance(x, Tensor):
        raise DTypeError(f"{operation}: pass a torch tensor, got {type(x).__name__}")
    return communicator(group)


def _normalize_dim(operation: str, x: Tensor, dim: int, comm: Communicator) -> int:
    """Return `dim` as a non-negative number. Raise ShapeError if `x` has no such dimension."""
    dims = x.dim()
    if not -dims <= dim < dims:
        raise ShapeError(
            f"{operation}: dimension {dim} is none of a tensor of shape {tuple(x.shape)}"
            f"{'' if dims else ', which is a single number'}{_where(comm)}"
        )
    return dim % dims


def _check_equal(operation: str, x: Tensor, dim: int, comm: Communicator, remedy: str) -> None:
    if x.shape[dim] % comm.size:
        raise ShapeError(
            f"{operation}: dimension {dim} of a tensor of shape {tuple(x.shape)} has extent {x.shape[dim]}, which does"
            f" not divide by the group's {comm.size} ranks; {remedy}{_where(comm)}"
        )


def _check_sizes(operation: str, name: str, sizes: Sequence[int], comm: Communicator) -> tuple[int, ...]:
    try:
        checked = tuple(map(index, sizes))
    except TypeError:
        checked = ()
    if len(checked) != comm.size or min(checked) < 0:
        raise ShapeError(
            f"{operation}: {name} must be {comm.size} integers >= 0, one for each rank, got {sizes!r}{_where(comm)}"
        )
    return checked


def _check_sum(operation: str, name: str, sizes: tuple[int, ...], x: Tensor, dim: int, comm: Communicator) -> None:
    if sum(sizes) != x.shape[dim]:
        raise ShapeError(
            f"{operation}: {name} {sizes} adds up to {sum(sizes)}, but dimension {dim} of a tensor of shape"
            f" {tuple(x.shape)} has extent {x.shape[dim]}{_where(comm)}"
        )


def _where(comm: Communicator) -> str:
    return f" (rank {comm.rank} of {comm.size})"
