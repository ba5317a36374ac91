"""Differentiable collectives on torch tensors, out of place: no input and no incoming gradient is ever changed.

Meaning of a gradient: every rank runs its own graph and calls ``backward`` on its own loss. The differentiated function
is the **sum of these losses over the ranks**: the gradient of a rank's tensor is the derivative of that sum. A loss
that all ranks compute identically therefore counts once per rank; divide it by the number of ranks if it should count
once. (torch.distributed.nn.functional uses the same definition.)

The rules that follow from it:

* The backward of a collective is a collective. **On every rank the tensor must require grad, or on none**, also where
  only its shape matters, as with :func:`broadcast` on a rank that receives. Ranks that disagree wait for each other.
* Every rank must run the backward, and its loss must depend on each result, if need be by adding
  ``0 * result.sum()``. ``torch.autograd.grad(loss, inputs)`` skips nodes that do not lead to one of `inputs`: all
  ranks must pass inputs that lead to the same collectives; on a rank that only receives, this is the tensor that it
  passed to the collective.
* autograd traverses a graph in the reverse order of the calls. If all ranks called the same operations in the
  same order, their backwards meet as well, and messages of :func:`send` and :func:`recv` travel back in the mirrored
  order. So make the calls on one thread per rank, and go back through what was called on all ranks alike by the same
  ``backward`` calls.
* All functions can be differentiated twice or more often. With ``create_graph=True`` every rank records the same
  collectives, even where its own loss is linear or constant and another's is not.
* Without a tensor that requires grad, or under ``torch.no_grad()``, they are plain collectives. Integers and bool have
  no gradient. Gradients of complex tensors follow torch's convention.

`group` is None (torch's default process group if that is mpicoll's, else mpicoll's world), a torch process group of
mpicoll, a Communicator or an mpi4py communicator. `src` and `dst` are global ranks where `group` is a torch process
group, as everywhere in torch, and otherwise ranks of the communicator. `op` is a name that mpicoll knows, a
``premul_sum(factor)``, or a torch ReduceOp. Tensors may have any strides, and lie on the CPU or, on all ranks, on a
CUDA device, where a backward runs on the stream of its forward, as everywhere in torch. Wrong arguments raise kinds of
ArgumentError before any message is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from mpicoll.buffers.ops import OpLike, Premul
from mpicoll.collectives import p2p
from mpicoll.collectives.allgather import allgather
from mpicoll.collectives.allreduce import allreduce
from mpicoll.collectives.alltoall import alltoall
from mpicoll.collectives.bcast import bcast
from mpicoll.collectives.gather import gather as native_gather
from mpicoll.collectives.reduce import reduce as native_reduce
from mpicoll.collectives.reduce_scatter import reduce_scatter as native_reduce_scatter
from mpicoll.collectives.scatter import scatter as native_scatter
from mpicoll.engine.core.communicator import Communicator
from mpicoll.errors import ArgumentError, DTypeError, RankError, ShapeError
from mpicoll.torch.c10d_collectives import op_of
from mpicoll.torch.groups import communicator

__all__ = [
    "all_gather",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "scatter",
    "send",
    "sendrecv",
]

_Map: TypeAlias = Callable[[Tensor], Tensor]


def all_reduce(tensor: Tensor, op: Any = "sum", group: Any = None) -> Tensor:
    """Reduce the tensors of all ranks elementwise; every rank gets the result.

    Every rank passes a `tensor` of the same shape and dtype and the same `op`; the result is like it. Gradients: of
    ``sum``, ``avg`` and ``premul_sum`` the sum over ranks, times what the rank's own tensor was multiplied by; of
    ``prod`` the sum times the product of the other ranks' tensors, exact where there are zeros; of ``min`` and ``max``
    the sum goes to the rank whose element it is, in equal shares where several ranks tie, as with torch.amax. Other
    ops raise ArgumentError if `tensor` requires grad.
    """
    comm = communicator(group)
    op = _native(op, "all_reduce", tensor)
    weight = _weight(op, comm)
    if weight is not None:
        return _linear(
            tensor,
            lambda x: _tensor(allreduce(x, op, comm=comm)),
            lambda grad: _times(allreduce(grad, comm=comm), weight),
        )
    if not _records(tensor):
        return _tensor(allreduce(tensor, op, comm=comm))
    if op not in ("prod", "min", "max"):
        raise _no_gradient("all_reduce", op, comm, "pass tensor.detach()")
    function = _Product if op == "prod" else _Extreme
    return _tensor(function.apply(tensor, op, comm)[0])


def reduce(tensor: Tensor, dst: int, op: Any = "sum", group: Any = None) -> Tensor:
    """Reduce the tensors of all ranks elementwise; rank `dst` gets the result, the others zeros.

    Every rank passes a `tensor` of the same shape and dtype and the same `op` and `dst`; the result is like it. The
    gradient is that of `dst`, on all ranks. Only ``sum``, ``avg`` and ``premul_sum`` have one here; others raise
    ArgumentError if `tensor` requires grad.
    """
    comm, root = _rooted("reduce", dst, group)
    op = _native(op, "reduce", tensor)
    weight = _checked_weight("reduce", op, comm, tensor)
    return _linear(
        tensor,
        lambda x: _reduced(x, op, root, comm),
        lambda grad: _times(bcast(grad, root, comm=comm), weight),
    )


def broadcast(tensor: Tensor, src: int, group: Any = None) -> Tensor:
    """Broadcast the tensor of rank `src` to all ranks.

    Every rank passes a `tensor` of the same shape and dtype; its contents matter on `src` only, but it must require
    grad on all ranks or on none. The gradient is the sum over ranks on `src`, and zero elsewhere.
    """
    comm, root = _rooted("broadcast", src, group)
    return _linear(
        tensor,
        lambda x: _tensor(bcast(x, root, comm=comm)),
        lambda grad: _reduced(grad, "sum", root, comm),
    )


def all_gather(tensor: Tensor, group: Any = None, *, sizes: Sequence[int] | None = None) -> tuple[Tensor, ...]:
    """Gather the tensors of all ranks on every rank, as a tuple in rank order.

    Every rank passes a `tensor` of the same shape and dtype. With `sizes`, the same on all ranks, tensors differ in
    their first axis: ``sizes[i]`` rows come from rank i. The tuple's tensors are parts of one. The gradient is the sum
    over ranks of the gradients of this rank's part.
    """
    comm = communicator(group)
    if sizes is None:
        return tuple(all_gather_single(tensor.unsqueeze(0), group=comm).unbind())
    return tuple(all_gather_single(tensor, group=comm, sizes=sizes).split_with_sizes(list(sizes)))


def all_gather_single(tensor: Tensor, dim: int = 0, group: Any = None, *, sizes: Sequence[int] | None = None) -> Tensor:
    """Join the tensors of all ranks along axis `dim`, in the order of ranks; every rank gets the whole.

    As :func:`all_gather`, where `sizes` are the ranks' extents along `dim`. A 0-d tensor counts as one of one element.
    """
    comm = communicator(group)
    rows = _rows("all_gather_single", tensor, dim, comm)
    whole = _linear(
        rows,
        lambda x: _tensor(allgather(x, counts=sizes, comm=comm)),
        lambda grad: _tensor(native_reduce_scatter(grad, counts=sizes, comm=comm)),
    )
    return whole.movedim(0, dim)


def reduce_scatter(tensors: Sequence[Tensor], op: Any = "sum", group: Any = None) -> Tensor:
    """Reduce the i-th tensors of all ranks, and return the result on rank i.

    Every rank passes a tensor for each rank, all of one dtype; the i-th has the same shape on all ranks. `op` as for
    :func:`reduce`. The gradient of the i-th tensor is that of rank i's result.
    """
    comm = communicator(group)
    _check_list("reduce_scatter", tensors, comm)
    counts = [one.numel() for one in tensors]
    sizes = counts if len(set(counts)) > 1 else None
    block = reduce_scatter_single(torch.cat([one.reshape(-1) for one in tensors]), op, group=comm, sizes=sizes)
    return block.view(tensors[comm.rank].shape)


def reduce_scatter_single(
    tensor: Tensor, op: Any = "sum", dim: int = 0, group: Any = None, *, sizes: Sequence[int] | None = None
) -> Tensor:
    """Reduce the tensors of all ranks elementwise, divide the result along axis `dim`, and give rank i the i-th block.

    Every rank passes a `tensor` of the same shape and dtype. Blocks are equal unless `sizes`, the same on all ranks,
    gives each rank's extent along `dim`. `op` as for :func:`reduce`. The gradient joins those of all ranks' blocks.
    """
    comm = communicator(group)
    op = _native(op, "reduce_scatter_single", tensor)
    weight = _checked_weight("reduce_scatter_single", op, comm, tensor)
    rows = _rows("reduce_scatter_single", tensor, dim, comm)
    block = _linear(
        rows,
        lambda x: _tensor(native_reduce_scatter(x, op, counts=sizes, comm=comm)),
        lambda grad: _times(allgather(grad, counts=sizes, comm=comm), weight),
    )
    return block.movedim(0, dim)


def gather(tensor: Tensor, dst: int = 0, group: Any = None) -> tuple[Tensor, ...]:
    """Gather the tensors of all ranks on rank `dst`, as a tuple in rank order; other ranks get such a tuple of zeros.

    Every rank passes a `tensor` of the same shape and dtype. The zeros have no memory of their own, and are there so
    that all ranks can take part in the backward, such as by ``0 * sum(part.sum() for part in result)``. The gradient
    is that of the rank's part on `dst`.
    """
    comm, root = _rooted("gather", dst, group)
    rows = tensor.unsqueeze(0)
    to_root, from_root = _between(rows, (comm.size, *tensor.shape), root, comm)
    return tuple(_linear(rows, to_root, from_root).unbind())


def scatter(tensors: Sequence[Tensor] | Tensor, src: int = 0, group: Any = None) -> Tensor:
    """Scatter rank `src`'s tensors: return the i-th of them on rank i.

    `src` passes a tensor for each rank, all of one shape and dtype. Every other rank passes one tensor of that shape
    and dtype, whose contents don't matter, but which must require grad as those of `src` do. Gradients: that of the
    i-th tensor is received from rank i; the tensors that the other ranks pass get zeros.
    """
    comm, root = _rooted("scatter", src, group)
    if comm.rank == root:
        _check_list("scatter", tensors, comm, alike=True)
        rows = torch.stack(list(tensors))
    elif isinstance(tensors, Tensor):
        rows = tensors.unsqueeze(0)
    else:
        raise DTypeError(
            f"scatter: on ranks other than src pass one tensor like the block that arrives, got"
            f" {type(tensors).__name__} (rank {comm.rank} of {comm.size})"
        )
    to_root, from_root = _between(rows[:1], rows.shape, root, comm)
    return _linear(rows, from_root, to_root).squeeze(0)


def all_to_all(
    tensors: Sequence[Tensor], output_shapes: Sequence[Sequence[int]] | None = None, group: Any = None
) -> tuple[Tensor, ...]:
    """Send the i-th tensor to rank i, and return a tuple whose j-th tensor was received from rank j.

    Every rank passes a tensor for each rank, all of one dtype. If not all have the same shape on all ranks, every rank
    passes in `output_shapes` the shapes that it receives from each. Gradients are sent back to the source ranks.
    """
    comm = communicator(group)
    _check_list("all_to_all", tensors, comm, alike=output_shapes is None, remedy="; pass output_shapes on every rank")
    if output_shapes is None:
        return tuple(all_to_all_single(torch.stack(list(tensors)), group=comm).unbind())
    shapes = [torch.Size(shape) for shape in output_shapes]
    sent, received = [one.numel() for one in tensors], [shape.numel() for shape in shapes]
    whole = all_to_all_single(torch.cat([one.reshape(-1) for one in tensors]), received, sent, comm)
    return tuple(part.view(shape) for part, shape in zip(whole.split_with_sizes(received), shapes, strict=True))


def all_to_all_single(
    tensor: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Any = None,
) -> Tensor:
    """Divide every rank's `tensor` along axis 0, and send the i-th block to rank i.

    Without sizes all ranks pass the same shape, and blocks are equal. Otherwise every rank passes both:
    ``input_split_sizes[i]`` rows are sent to rank i, ``output_split_sizes[j]`` rows are received from rank j. The
    result concatenates the received rows in rank order. Gradients are sent back to the source ranks of the rows.
    """
    comm = communicator(group)
    if (output_split_sizes is None) != (input_split_sizes is None):
        raise ShapeError(
            "all_to_all_single: pass both output_split_sizes and input_split_sizes, on every rank, or neither"
            f" (rank {comm.rank} of {comm.size})"
        )
    there = back = None
    if output_split_sizes is not None and input_split_sizes is not None:
        there, back = (input_split_sizes, output_split_sizes), (output_split_sizes, input_split_sizes)
    return _linear(
        _rows("all_to_all_single", tensor, 0, comm),
        lambda x: _tensor(alltoall(x, counts=there, comm=comm)),
        lambda grad: _tensor(alltoall(grad, counts=back, comm=comm)),
    )


def sendrecv(
    tensor: Tensor,
    dst: int | None,
    src: int | None,
    tag: int = 0,
    group: Any = None,
    *,
    shape: Sequence[int] | None = None,
) -> Tensor:
    """Send `tensor` to rank `dst`, and get a tensor of the same dtype from rank `src` at once, which can't deadlock.

    `shape` is that of what arrives, by default the shape of `tensor`. With None for `dst` nothing is sent, with None
    for `src` the result is zeros: for the ends of an open chain. The gradient of the result is sent to `src`, and that
    of `tensor` is received from `dst`, with the same `tag`.
    """
    comm = communicator(group)
    to = None if dst is None else _rank("sendrecv", dst, group, comm)
    origin = None if src is None else _rank("sendrecv", src, group, comm)
    return _exchange(tensor, to, origin, tag, tensor.shape if shape is None else shape, comm)


def send(tensor: Tensor, dst: int, tag: int = 0, group: Any = None) -> Tensor:
    """Send `tensor` to rank `dst`, which calls :func:`recv`. Returns a zero, of shape ().

    The zero represents the use of `tensor` on rank `dst`: **add it to this rank's loss**, or call ``backward()`` on
    it if there is no other. Then the gradient is received from `dst`, with the same `tag`. May wait for the receiver,
    both ways; where two ranks send to each other use :func:`sendrecv`.
    """
    comm = communicator(group)
    return _exchange(tensor, _rank("send", dst, group, comm), None, tag, (), comm)


def recv(like: Tensor, src: int, tag: int = 0, group: Any = None) -> Tensor:
    """Receive a tensor of the shape and dtype of `like`, whose contents don't matter, from rank `src`.

    `like` must require grad if what was sent does: then the gradient of the result is sent to `src`, with the same
    `tag`, and `like` gets zeros.
    """
    comm = communicator(group)
    return _exchange(like, None, _rank("recv", src, group, comm), tag, like.shape, comm)


# --- graphs


class _Linear(Function):
    """Linear map between tensors on several ranks. `back` is its transpose, conjugated if complex.

    The second result, a zero, is for the backward: gradients are tied to it.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, there: _Map, back: _Map) -> tuple[Tensor, Tensor]:
        ctx.there, ctx.back = there, back
        token = tensor.new_zeros(())
        ctx.save_for_backward(token)
        return there(tensor), token

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
        (token,) = ctx.saved_tensors
        return _linear(_tied(grad, token), ctx.back, ctx.there), None, None


class _Product(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, op: str, comm: Communicator) -> tuple[Tensor, Tensor]:
        ctx.comm = comm
        token = tensor.new_zeros(())
        ctx.save_for_backward(tensor, token)
        return _tensor(allreduce(tensor, op, comm=comm)), token

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
        tensor, token = ctx.saved_tensors
        comm = ctx.comm
        total = all_reduce(_tied(grad, token), group=comm)
        # Dividing the product by this rank's factor would be wrong where that is zero.
        factors = all_gather_single(tensor.unsqueeze(0), group=comm)
        others = torch.cat([factors[: comm.rank], factors[comm.rank + 1 :]]).prod(0)
        return total * others.conj(), None, None


class _Extreme(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, op: str, comm: Communicator) -> tuple[Tensor, Tensor]:
        ctx.comm = comm
        result, token = _tensor(allreduce(tensor, op, comm=comm)), tensor.new_zeros(())
        ctx.save_for_backward(tensor, result, token)
        return result, token

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
        tensor, result, token = ctx.saved_tensors
        total = all_reduce(_tied(grad, token), group=ctx.comm)
        attained = (tensor == result).to(grad.dtype)
        return total * (attained / allreduce(attained, comm=ctx.comm)), None, None


def _linear(tensor: Tensor, there: _Map, back: _Map) -> Tensor:
    return _tensor(_Linear.apply(tensor, there, back)[0])


def _tied(grad: Tensor, token: Tensor) -> Tensor:
    """Return `grad` with a dependency on `token`, for graphs of second order.

    An incoming gradient may have a graph on some ranks only, depending on the rank's own loss. With a dependency on a
    result of the forward it has a graph on all ranks, so all ranks run the collectives of the next backward.
    """
    return grad + token if torch.is_grad_enabled() else grad


def _records(tensor: Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


# --- maps


def _reduced(x: Tensor, op: OpLike, root: int, comm: Communicator) -> Tensor:
    result = native_reduce(x, op, root, comm=comm)
    return x.new_zeros(x.shape) if result is None else _tensor(result)


def _between(block: Tensor, whole: Sequence[int], root: int, comm: Communicator) -> tuple[_Map, _Map]:
    """Return the maps that gather blocks at the root, with zeros of shape `whole` elsewhere, and scatter them.

    For the scatter only the root's tensor matters.
    """
    shape = block.shape

    def to_root(x: Tensor) -> Tensor:
        result = native_gather(x, root, comm=comm)
        return x.new_zeros(()).expand(whole) if result is None else _tensor(result)

    def from_root(x: Tensor) -> Tensor:
        return _tensor(native_scatter(x if comm.rank == root else x.new_empty(shape), root, comm=comm))

    return to_root, from_root


def _exchange(
    tensor: Tensor, dst: int | None, src: int | None, tag: int, shape: Sequence[int], comm: Communicator
) -> Tensor:
    def move(x: Tensor, to: int | None, origin: int | None, shape: Sequence[int]) -> Tensor:
        if origin is None:
            if to is not None:
                p2p.send(x, to, tag, comm=comm)
            return x.new_zeros(shape)
        like = x.new_empty(shape)
        if to is None:
            return _tensor(p2p.recv(like, origin, tag, comm=comm))
        return _tensor(p2p.sendrecv(x, to, origin, tag, tag, like=like, comm=comm))

    own = tensor.shape
    return _linear(tensor, lambda x: move(x, dst, src, shape), lambda grad: move(grad, src, dst, own))


def _weight(op: OpLike, comm: Communicator) -> complex | None:
    """Return the factor of the gradient of a linear `op`; None if `op` is not linear."""
    if isinstance(op, Premul):
        return op.factor.conjugate()
    return {"sum": 1, "avg": 1 / comm.size}.get(op) if isinstance(op, str) else None


def _times(x: Any, weight: complex) -> Tensor:
    return _tensor(x if weight == 1 else x * weight)


def _tensor(x: Any) -> Tensor:
    assert isinstance(x, Tensor)
    return x


# --- arguments


def _native(op: Any, operation: str, tensor: Tensor) -> Any:
    return op_of(operation, op, tensor.dtype) if isinstance(op, dist.ReduceOp) else op


def _checked_weight(operation: str, op: OpLike, comm: Communicator, tensor: Tensor) -> complex:
    """Return `_weight`. Raises ArgumentError if a gradient is required and `op` has none."""
    weight = _weight(op, comm)
    if weight is None and _records(tensor):
        raise _no_gradient(operation, op, comm, "take all_reduce, which knows that of prod, min and max")
    return 1 if weight is None else weight


def _no_gradient(operation: str, op: Any, comm: Communicator, remedy: str) -> ArgumentError:
    return ArgumentError(
        f"{operation}: op {op!r} has no gradient here, but the tensor requires grad; {remedy}"
        f" (rank {comm.rank} of {comm.size})"
    )


def _rooted(operation: str, root: Any, group: Any) -> tuple[Communicator, int]:
    comm = communicator(group)
    return comm, _rank(operation, root, group, comm)


def _rank(operation: str, rank: Any, group: Any, comm: Communicator) -> Any:
    """Convert `rank` to a rank of `comm`. The native operations check the range."""
    where = f"(rank {comm.rank} of {comm.size})"
    if rank is None:
        raise RankError(f"{operation}: a rank is needed, got None {where}")
    if not isinstance(group, dist.ProcessGroup):
        return rank
    try:
        return dist.get_group_rank(group, rank)
    except ValueError as error:
        raise RankError(f"{operation}: {error}; pass the global rank of a member of the group {where}") from error


def _rows(operation: str, tensor: Tensor, dim: int, comm: Communicator) -> Tensor:
    """Return `tensor` with axis `dim` first."""
    if not -max(tensor.dim(), 1) <= dim < max(tensor.dim(), 1):
        raise ShapeError(
            f"{operation}: dim {dim} is no axis of a tensor of shape {tuple(tensor.shape)}"
            f" (rank {comm.rank} of {comm.size})"
        )
    return tensor.movedim(dim, 0) if tensor.dim() else tensor.reshape(1)


def _check_list(operation: str, tensors: Any, comm: Communicator, *, alike: bool = False, remedy: str = "") -> None:
    """Raise unless `tensors` is a sequence of one tensor for each rank, of one dtype, and `alike` in shape."""
    where = f"(rank {comm.rank} of {comm.size})"
    if not isinstance(tensors, list | tuple) or not all(isinstance(one, Tensor) for one in tensors):
        raise DTypeError(f"{operation}: pass a list of tensors, got {type(tensors).__name__} {where}")
    if len(tensors) != comm.size:
        raise ShapeError(f"{operation}: pass a tensor for each of the {comm.size} ranks, got {len(tensors)} {where}")
    if len({one.dtype for one in tensors}) > 1:
        dtypes = [str(one.dtype) for one in tensors]
        raise DTypeError(f"{operation}: the tensors are of several dtypes, {dtypes}; pass them in one {where}")
    if alike and len({one.shape for one in tensors}) > 1:
        shapes = [tuple(one.shape) for one in tensors]
        raise ShapeError(f"{operation}: the tensors are of several shapes, {shapes}{remedy} {where}")
