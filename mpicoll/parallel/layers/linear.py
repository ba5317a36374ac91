"""Layers whose weights are spread over the ranks of a tensor parallel group, and norms for sequence parallelism.

What goes in and comes out of each layer, for activations of shape ``(sequence, batch, hidden)``:

======================  =============================================  ==============================================
layer                   replicated activations                         ``sequence_parallel=True``
======================  =============================================  ==============================================
ColumnParallelLinear    whole in, a part of the features out           a part of the sequence in, all of it, but a part
                                                                       of the features, out
RowParallelLinear       a part of the features in, whole out           a part of the features in, a part of the
                                                                       sequence out
VocabParallelEmbedding  ids in, whole out                              ids in, a part of the sequence out
LayerNorm, RMSNorm      whole in, whole out                            a part of the sequence in, the same out
======================  =============================================  ==============================================

The sequence is always axis 0, and parts are equal and in the order of ranks. Every rank calls the same layers in the
same order, and they must agree on what requires grad: the backward of one layer is a collective.

Gradients are those of one loss that all ranks of the group compute alike, counted once. They are whole when
``backward`` returns: nothing is left to do for the parameters that all ranks hold, such as a norm's weight. Optimizers
that treat each element by itself (SGD, Adam, ...) then do what they do with the plain layers; those that look at whole
matrices or all parameters at once (LBFGS, Adafactor, Muon) would see parts only, and are not for these layers.

That parts are of equal size on all ranks, and of one dtype, is not checked, as it would take another message: where
they are not, a rank may get an error of the communication, or numbers that mean nothing.

Parameters start as those of the plain layers of torch.nn would: every rank draws the whole weight from torch's default
generator, which must be in the same state on all ranks of the group (``torch.manual_seed``), and keeps its part. So the
model is the same for any number of ranks, and for a moment each rank has one whole weight in memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.tensor import DTensor
from torch.nn import Parameter, functional

from mpicoll.collectives.allgather import allgather, iallgather
from mpicoll.collectives.allreduce import allreduce, iallreduce
from mpicoll.collectives.reduce_scatter import ireduce_scatter, reduce_scatter
from mpicoll.engine.communicator import Communicator
from mpicoll.engine.request import Request
from mpicoll.errors import ArgumentError, ShapeError
from mpicoll.parallel.groups import communicator
from mpicoll.parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from mpicoll.parallel.shards import mark, shard_of
from mpicoll.torch.no_compile import eager

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "ColumnParallelLinear",
    "LayerNorm",
    "RMSNorm",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "column_parallel_linear",
    "shard_",
    "whole_state_dict",
]

BACKGROUND = 64 << 10
"""Bytes from which a collective runs in the background: handing a smaller one to a thread takes longer than it does."""

_Init: TypeAlias = Callable[[Tensor], Any]


# --- what layers have in common


class _OnRanks(nn.Module):
    """A module that knows its ranks: ``group`` is what the user passed, ``comm`` what it meant.

    Parameters named in `_cut` are marked as parts, also those that torch makes anew.
    """

    _cut: ClassVar[Mapping[str, int]] = {}

    group: Any
    comm: Communicator

    def register_parameter(self, name: str, param: Parameter | None) -> None:
        super().register_parameter(name, param)
        self.mark_parameters()

    def __delattr__(self, name: str) -> None:
        if name in self._cut and self._parameters.get(name) is not None and self.comm.size > 1:
            raise ArgumentError(
                f"{type(self).__name__}: {name} can't be taken away, nor parametrized, as by weight_norm: it is this"
                f" rank's part of a parameter, and a norm, say, would be that of the part {self._where()}"
            )
        super().__delattr__(name)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.mark_parameters()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo[id(self.group)], memo[id(self.comm)] = self.group, self.comm
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__dict__ = copy.deepcopy(self.__dict__, memo)
        new.mark_parameters()
        return new

    def mark_parameters(self) -> None:
        """Mark what is cut (see :mod:`mpicoll.parallel.shards`), for whoever replaces parameters otherwise."""
        for name, dim in self._cut.items():
            param = self._parameters.get(name)
            if param is not None and shard_of(param) is None:
                mark(param, dim, self.group, self.comm)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"a {type(self).__name__} can't be pickled, as it belongs to the ranks that it was made on; save its"
            " state_dict(), or whole_state_dict(module)"
        )

    def _where(self) -> str:
        return f"(rank {self.comm.rank} of {self.comm.size})"


def _share(layer: str, name: str, extent: int, comm: Communicator) -> int:
    """This rank's part of `extent`."""
    if extent % comm.size:
        above = -(-extent // comm.size) * comm.size
        raise ShapeError(
            f"{layer}: {name} {extent} does not divide among {comm.size} ranks; {above} would"
            f" (rank {comm.rank} of {comm.size})"
        )
    return extent // comm.size


def _block(param: Tensor, dim: int, comm: Communicator) -> Parameter:
    """This rank's block of `param`, with memory of its own."""
    share = param.shape[dim] // comm.size
    block = param.detach().narrow(dim, comm.rank * share, share).clone(memory_format=torch.contiguous_format)
    return Parameter(block, param.requires_grad)


def mark_again(module: nn.Module) -> None:
    """Mark what the parallel layers in `module` hold, where others than they have replaced parameters: fully_shard."""
    for layer in module.modules():
        if isinstance(layer, _OnRanks):
            layer.mark_parameters()


def _whole(param: Tensor, dim: int, comm: Communicator) -> Tensor:
    """The blocks of all ranks, joined. Collective."""
    block = _full(param.detach())
    if comm.size == 1:
        return block.clone()
    counts = allgather(torch.tensor([block.shape[dim]]), comm=comm).tolist()
    joined: Tensor = allgather(block.movedim(dim, 0), counts=counts, comm=comm)
    return joined.movedim(0, dim).contiguous()


def _full(x: Tensor) -> Tensor:
    """`x`, all of it if fully_shard has cut it among the data parallel ranks."""
    if isinstance(x, DTensor):
        x = x.full_tensor()
    return x


def _copy(param: Tensor | None) -> Parameter | None:
    return None if param is None else Parameter(param.detach().clone(), param.requires_grad)


@eager
def _summed(comm: Communicator, *params: Tensor | None) -> list[Tensor | None]:
    """`params`, which all ranks hold alike, for use on activations that differ: their gradients are summed over the
    ranks, in one message."""
    trained = [one for one in params if one is not None and one.requires_grad]
    if comm.size == 1 or not trained or not torch.is_grad_enabled():
        return list(params)
    if len(trained) == 1:
        used = iter([copy_to_tensor_model_parallel_region(trained[0], comm)])
    else:
        flat = copy_to_tensor_model_parallel_region(torch.cat([one.reshape(-1) for one in trained]), comm)
        parts = flat.split([one.numel() for one in trained])
        used = iter([part.view(one.shape) for part, one in zip(parts, trained, strict=True)])
    return [next(used) if one is not None and one.requires_grad else one for one in params]


# --- linear layers


@eager
def column_parallel_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, sequence_parallel: bool = False, group: Any = None
) -> Tensor:
    """``x @ weight.T + bias`` for a `weight` of which each rank holds some rows; the result is this rank's columns.

    `x` is of shape ``(..., in)`` and the same on all ranks, or with `sequence_parallel` a part of axis 0 on each, of
    equal size. `weight` is ``(out / P, in)``, `bias` ``(out / P,)``; the result ``(..., out / P)``. The weight may be
    that of a :class:`VocabParallelEmbedding`.

    The gradient of `x` is summed over the ranks in the background, while that of `weight` is computed. With
    `sequence_parallel` the joined `x` is not kept, but joined again in the backward, while the gradient of `x` is
    computed. (What is smaller than 64 KiB is not worth a thread.) Bytes sent per rank for an `x` of n bytes in all:
    2n(P-1)/P in the backward; with `sequence_parallel` n(P-1)/P in the forward, 2n(P-1)/P in the backward. What
    requires no grad costs nothing. May be differentiated twice. Under autocast it computes and communicates in
    autocast's dtype.

    Raises ShapeError if the last axis of `x` does not fit, before any message leaves.
    """
    comm = communicator(group)
    _check_features("column_parallel_linear", x, weight.shape[-1], sequence_parallel, comm)
    if comm.size == 1:
        return functional.linear(x, weight, bias)
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = _autocast(x, dtype), _autocast(weight, dtype)
        bias = None if bias is None else _autocast(bias, dtype)
    result: Tensor = _Column.apply(x, weight, bias, comm, sequence_parallel)
    return result


class _Column(Function):
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
            grad_x, grad_weight = _differentiable(x, weight, grad, comm, ctx.sequence_parallel)
            return grad_x, grad_weight, rows.sum(0) if need_bias else None, None, None
        grad_weight = gathering = reducing = None
        if need_weight and ctx.sequence_parallel:
            gathering = _begin(allgather, iallgather, x, comm=comm)
        if need_x:
            whole = grad @ weight
            if ctx.sequence_parallel:
                reducing = _begin(reduce_scatter, ireduce_scatter, whole, comm=comm)
            else:
                reducing = _begin(allreduce, iallreduce, whole, out=whole, comm=comm)
        grad_bias = rows.sum(0) if need_bias else None
        if need_weight:
            whole_x = x if gathering is None else gathering()
            grad_weight = rows.t() @ whole_x.reshape(-1, whole_x.shape[-1])
        grad_x = None if reducing is None else reducing()
        return grad_x, grad_weight, grad_bias, None, None


def _begin(
    blocking: Callable[..., Tensor], background: Callable[..., Request], x: Tensor, **options: Any
) -> Callable[[], Tensor]:
    """Begin a collective; what is returned gives its result."""
    if x.nbytes < BACKGROUND:
        result = blocking(x, **options)
        return lambda: result
    return background(x, **options).wait


def _differentiable(
    x: Tensor | None, weight: Tensor | None, grad: Tensor, comm: Communicator, sequence_parallel: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of `x` and `weight` by operations that have gradients themselves."""
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


def _autocast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` as torch's own functions cast it under autocast, which leaves float64 alone."""
    return x.to(dtype) if x.is_floating_point() and x.dtype is not torch.float64 else x


def _check_features(operation: str, x: Tensor, features: int, sequence_parallel: bool, comm: Communicator) -> None:
    axes = 2 if sequence_parallel else 1
    if x.dim() < axes or x.shape[-1] != features:
        needed = f"(sequence, ..., {features})" if sequence_parallel else f"(..., {features})"
        raise ShapeError(
            f"{operation}: the input must be of shape {needed}, got {tuple(x.shape)} (rank {comm.rank} of {comm.size})"
        )


class _Linear(_OnRanks):
    """What the two linear layers share."""

    _divided: ClassVar[str]
    """Which of the extents is spread over the ranks."""
    _flags: ClassVar[tuple[str, ...]]
    """Options to be shown if they are set, besides those of both layers."""

    weight: Parameter
    bias: Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        sequence_parallel: bool,
        skip_bias_add: bool,
        init_method: _Init | None,
        group: Any,
        device: Any,
        dtype: Any,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.sequence_parallel, self.skip_bias_add = sequence_parallel, skip_bias_add
        self.group, self.comm = group, communicator(group)
        self.init_method = init_method
        _share(type(self).__name__, self._divided, getattr(self, self._divided), self.comm)
        self._take(self._plain(bias, device, dtype))

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, group: Any = None, **options: Any) -> Self:
        """A layer that computes what `linear` does, with its values, dtype and device; every rank passes the same.

        `options` are the constructor's. Whether parameters require grad is taken over, too.
        """
        whole, device = linear.weight, torch.device("meta")
        layer = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            group=group,
            device=device,
            dtype=whole.dtype,
            **options,
        )
        layer._take(linear)
        return layer.train(linear.training)

    def to_linear(self) -> nn.Linear:
        """The plain layer with the whole weight, on every rank. Collective: sends the weight, n(P-1)/P bytes."""
        linear = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        linear.weight = Parameter(_whole(self.weight, self._cut["weight"], self.comm), self.weight.requires_grad)
        if self.bias is not None:
            bias = _whole(self.bias, 0, self.comm) if "bias" in self._cut else self.bias.detach().clone()
            linear.bias = Parameter(bias, self.bias.requires_grad)
        return linear.train(self.training)

    def reset_parameters(self) -> None:
        """Draw values as the constructor does, such as after ``to_empty``. All ranks of the group must call it."""
        plain = self._plain(self.bias is not None, self.weight.device, self.weight.dtype)
        with torch.no_grad():
            for name, value in self._parts(plain).items():
                if value is not None:
                    self.get_parameter(name).copy_(value)

    def _plain(self, bias: bool, device: Any, dtype: Any) -> nn.Linear:
        """The whole layer, as it starts."""
        plain = nn.Linear(self.in_features, self.out_features, bias, device=device, dtype=dtype)
        if self.init_method is not None:
            with torch.no_grad():
                self.init_method(plain.weight)
        return plain

    def _take(self, plain: nn.Linear) -> None:
        for name, value in self._parts(plain).items():
            self.register_parameter(name, value)

    def _parts(self, plain: nn.Linear) -> dict[str, Parameter | None]:
        """What this rank holds of `plain`."""
        params: dict[str, Tensor | None] = {"weight": plain.weight, "bias": plain.bias}
        return {
            name: _block(param, self._cut[name], self.comm) if param is not None and name in self._cut else _copy(param)
            for name, param in params.items()
        }

    def extra_repr(self) -> str:
        flags = [name for name in ("sequence_parallel", "skip_bias_add", *self._flags) if getattr(self, name)]
        return ", ".join(
            [
                f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}",
                *(f"{name}=True" for name in flags),
                f"rank {self.comm.rank} of {self.comm.size}",
            ]
        )


class ColumnParallelLinear(_Linear):
    """A linear layer whose outputs are spread over the ranks: each holds ``out_features / P`` rows of the weight.

    The input is ``(..., in_features)``, the same on all ranks, or with `sequence_parallel` a part of axis 0 on each.
    The output is ``(..., out_features / P)``, or with `gather_output` the whole ``(..., out_features)`` on every rank.
    With `skip_bias_add` the result is a pair, the product and the bias that is still to be added (None without), whole
    if the output is. `init_method` is called with the whole weight, to be filled in place; the bias stays as torch.nn
    draws it. What it sends: see :func:`column_parallel_linear`; `gather_output` adds (P-1)/P of the output.

    A weight of several matrices, such as query, key and value in one, must have its rows in an order that gives each
    rank some of each: by attention head, not by matrix.

    Raises ShapeError if `out_features` does not divide.
    """

    _cut: ClassVar = {"weight": 0, "bias": 0}
    _divided = "out_features"
    _flags = ("gather_output",)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        skip_bias_add: bool = False,
        init_method: _Init | None = None,
        group: Any = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            in_features, out_features, bias, sequence_parallel, skip_bias_add, init_method, group, device, dtype
        )
        self.gather_output = gather_output

    def forward(self, x: Tensor) -> Any:
        bias = None if self.skip_bias_add else self.bias
        out = column_parallel_linear(x, self.weight, bias, sequence_parallel=self.sequence_parallel, group=self.comm)
        if self.gather_output:
            out = gather_from_tensor_model_parallel_region(out, self.comm)
        if not self.skip_bias_add:
            return out
        if self.gather_output and self.bias is not None:
            return out, gather_from_tensor_model_parallel_region(self.bias, self.comm)
        return out, self.bias


class RowParallelLinear(_Linear):
    """A linear layer whose inputs are spread over the ranks: each holds ``in_features / P`` columns of the weight.

    The input is the whole ``(..., in_features)`` on every rank, of which it takes its part, or with `input_is_parallel`
    that part ``(..., in_features / P)``, as ColumnParallelLinear gives it. The output is the whole ``(...,
    out_features)``, summed over the ranks, or with `sequence_parallel` (which needs `input_is_parallel`) this rank's
    part of axis 0. Every rank holds the whole bias, which is added once, after the sum. With `skip_bias_add` the result
    is a pair, the sum and the bias that is still to be added (None without). `init_method` is called with the whole
    weight, to be filled in place; the bias stays as torch.nn draws it.

    Bytes sent per rank for an output of n bytes in all: 2n(P-1)/P in the forward; with `sequence_parallel` n(P-1)/P in
    the forward and in the backward, where the bias's gradient is summed as well.

    Raises ShapeError if `in_features` does not divide.
    """

    _cut: ClassVar = {"weight": 1}
    _divided = "in_features"
    _flags = ("input_is_parallel",)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        input_is_parallel: bool = False,
        sequence_parallel: bool = False,
        skip_bias_add: bool = False,
        init_method: _Init | None = None,
        group: Any = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        if sequence_parallel and not input_is_parallel:
            raise ArgumentError(
                "RowParallelLinear: sequence_parallel=True needs input_is_parallel=True: the input is a part of the"
                " features for all of the sequence"
            )
        super().__init__(
            in_features, out_features, bias, sequence_parallel, skip_bias_add, init_method, group, device, dtype
        )
        self.input_is_parallel = input_is_parallel

    def forward(self, x: Tensor) -> Any:
        comm = self.comm
        features = self.in_features // comm.size if self.input_is_parallel else self.in_features
        _check_features(type(self).__name__, x, features, self.sequence_parallel, comm)
        if comm.size == 1:
            return (
                (functional.linear(x, self.weight), self.bias)
                if self.skip_bias_add
                else functional.linear(x, self.weight, self.bias)
            )
        if not self.input_is_parallel:
            x = scatter_to_tensor_model_parallel_region(x, comm)
        partial = functional.linear(x, self.weight)
        bias = self.bias
        if self.sequence_parallel:
            if partial.shape[0] % comm.size:
                raise ShapeError(
                    f"RowParallelLinear: the sequence, axis 0 of an input of shape {tuple(x.shape)}, does not divide"
                    f" among {comm.size} ranks {self._where()}"
                )
            out = reduce_scatter_to_sequence_parallel_region(partial, comm)
            (bias,) = _summed(comm, bias)
        else:
            out = reduce_from_tensor_model_parallel_region(partial, comm)
        if self.skip_bias_add:
            return out, bias
        # Under autocast the product is of another dtype than the bias.
        return out if bias is None else out + bias.to(out.dtype)


# --- embedding


class VocabParallelEmbedding(_OnRanks):
    """An embedding whose rows are spread over the ranks: each holds ``num_embeddings / P`` of them.

    The input is a tensor of ids in ``[0, num_embeddings)``, the same on all ranks; the output the rows, ``(*ids.shape,
    embedding_dim)``, or with `sequence_parallel` this rank's part of axis 0. `padding_idx` and the initial values are
    as of torch.nn.Embedding; `init_method` is called with the whole weight, to be filled in place. Sends 2n(P-1)/P
    bytes per rank for an output of n bytes in the forward; with `sequence_parallel` n(P-1)/P in forward and backward.

    Raises ShapeError if `num_embeddings` does not divide, IndexError for an id out of range.
    """

    _cut: ClassVar = {"weight": 0}

    weight: Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        padding_idx: int | None = None,
        sequence_parallel: bool = False,
        init_method: _Init | None = None,
        group: Any = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.sequence_parallel = sequence_parallel
        self.group, self.comm = group, communicator(group)
        share = _share(type(self).__name__, "num_embeddings", num_embeddings, self.comm)
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ArgumentError(
                f"VocabParallelEmbedding: padding_idx {padding_idx} is no row of {num_embeddings} {self._where()}"
            )
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.start = self.comm.rank * share
        self.stop = self.start + share
        self.init_method = init_method
        self.weight = _block(self._plain(device, dtype), 0, self.comm)

    @classmethod
    def from_embedding(cls, embedding: nn.Embedding, *, group: Any = None, **options: Any) -> Self:
        """A layer that computes what `embedding` does, with its values, dtype and device; every rank passes the same.

        `options` are the constructor's. Raises ArgumentError if it has a max_norm, scale_grad_by_freq or sparse, which
        there is not here.
        """
        for name in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(embedding, name):
                raise ArgumentError(f"VocabParallelEmbedding: an Embedding with {name} can't be spread over ranks")
        whole = embedding.weight
        layer = cls(
            embedding.num_embeddings,
            embedding.embedding_dim,
            padding_idx=embedding.padding_idx,
            group=group,
            device=torch.device("meta"),
            dtype=whole.dtype,
            **options,
        )
        layer.weight = _block(whole, 0, layer.comm)
        return layer.train(embedding.training)

    def to_embedding(self) -> nn.Embedding:
        """The plain layer with the whole weight, on every rank. Collective: sends the weight, n(P-1)/P bytes."""
        embedding = nn.Embedding(self.num_embeddings, self.embedding_dim, self.padding_idx, device="meta")
        embedding.weight = Parameter(_whole(self.weight, 0, self.comm), self.weight.requires_grad)
        return embedding.train(self.training)

    def reset_parameters(self) -> None:
        """Draw values as the constructor does, such as after ``to_empty``. All ranks of the group must call it."""
        with torch.no_grad():
            self.weight.copy_(_block(self._plain(self.weight.device, self.weight.dtype), 0, self.comm))

    def _plain(self, device: Any, dtype: Any) -> Tensor:
        """The whole weight, as it starts."""
        plain = nn.Embedding(self.num_embeddings, self.embedding_dim, self.padding_idx, device=device, dtype=dtype)
        if self.init_method is not None:
            with torch.no_grad():
                self.init_method(plain.weight)
        return plain.weight

    def forward(self, ids: Tensor) -> Tensor:
        comm = self.comm
        if self.sequence_parallel and (ids.dim() == 0 or ids.shape[0] % comm.size):
            raise ShapeError(
                f"VocabParallelEmbedding: the sequence, axis 0 of ids of shape {tuple(ids.shape)}, does not divide"
                f" among {comm.size} ranks {self._where()}"
            )
        if comm.size == 1:
            return self._rows(ids, ids, self.padding_idx)
        padding = self.padding_idx
        local = padding - self.start if padding is not None and self.start <= padding < self.stop else None
        # An id of another rank stands for row 0 and is blanked; one of no rank stays outside, where it is an error.
        elsewhere = ((ids >= 0) & (ids < self.start)) | ((ids >= self.stop) & (ids < self.num_embeddings))
        rows = self._rows((ids - self.start).masked_fill(elsewhere, 0), ids, local)
        rows = rows.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(rows, comm)
        return reduce_from_tensor_model_parallel_region(rows, comm)

    def _rows(self, local: Tensor, ids: Tensor, padding_idx: int | None) -> Tensor:
        try:
            return functional.embedding(local, self.weight, padding_idx)
        except IndexError as error:
            raise IndexError(
                f"VocabParallelEmbedding: ids must be in [0, {self.num_embeddings}), got some in"
                f" [{int(ids.min())}, {int(ids.max())}] {self._where()}"
            ) from error

    def extra_repr(self) -> str:
        return ", ".join(
            [
                f"{self.num_embeddings}, {self.embedding_dim}",
                *([] if self.padding_idx is None else [f"padding_idx={self.padding_idx}"]),
                *(["sequence_parallel=True"] if self.sequence_parallel else []),
                f"rank {self.comm.rank} of {self.comm.size}",
            ]
        )


# --- norms


class LayerNorm(_OnRanks, nn.LayerNorm):
    """torch.nn.LayerNorm that may see a part of the sequence on each rank.

    With `sequence_parallel` the gradients of weight and bias, which all ranks hold, are summed over the ranks of
    `group` in the backward, in one message of both.
    """

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        sequence_parallel: bool = False,
        group: Any = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        self.sequence_parallel = sequence_parallel
        self.group, self.comm = group, communicator(group)

    @classmethod
    def from_norm(cls, norm: nn.LayerNorm, *, sequence_parallel: bool = False, group: Any = None) -> Self:
        """A layer that computes what `norm` does, with its values."""
        layer = cls(
            norm.normalized_shape,
            norm.eps,
            norm.elementwise_affine,
            norm.bias is not None,
            device="meta",
            sequence_parallel=sequence_parallel,
            group=group,
        )
        layer.weight, layer.bias = _copy(norm.weight), _copy(norm.bias)
        return layer.train(norm.training)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = (
            _summed(self.comm, self.weight, self.bias) if self.sequence_parallel else (self.weight, self.bias)
        )
        return functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, sequence_parallel={self.sequence_parallel}"


class RMSNorm(_OnRanks, nn.RMSNorm):
    """torch.nn.RMSNorm that may see a part of the sequence on each rank.

    With `sequence_parallel` the gradient of the weight, which all ranks hold, is summed over the ranks of `group` in
    the backward.
    """

    def __init__(
        self,
        normalized_shape: Any,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        sequence_parallel: bool = False,
        group: Any = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        self.sequence_parallel = sequence_parallel
        self.group, self.comm = group, communicator(group)

    @classmethod
    def from_norm(cls, norm: nn.RMSNorm, *, sequence_parallel: bool = False, group: Any = None) -> Self:
        """A layer that computes what `norm` does, with its values."""
        layer = cls(
            norm.normalized_shape,
            norm.eps,
            norm.elementwise_affine,
            device="meta",
            sequence_parallel=sequence_parallel,
            group=group,
        )
        layer.weight = _copy(norm.weight)
        return layer.train(norm.training)

    def forward(self, x: Tensor) -> Tensor:
        (weight,) = _summed(self.comm, self.weight) if self.sequence_parallel else (self.weight,)
        return functional.rms_norm(x, self.normalized_shape, weight, self.eps)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, sequence_parallel={self.sequence_parallel}"


# --- whole models


def shard_(
    module: nn.Module,
    plan: Mapping[str, str | Mapping[str, Any]],
    group: Any = None,
    *,
    sequence_parallel: bool = False,
) -> nn.Module:
    """Replace submodules of `module` by parallel layers with the same values, in place; returns `module`.

    `plan` maps patterns of names (as of ``named_modules``; ``*`` matches dots, too; the first pattern that fits counts)
    to what the submodules become:

    * ``"column"``: an nn.Linear becomes a ColumnParallelLinear;
    * ``"row"``: an nn.Linear becomes a RowParallelLinear with ``input_is_parallel=True``;
    * ``"vocab"``: an nn.Embedding becomes a VocabParallelEmbedding;
    * ``"norm"``: an nn.LayerNorm or nn.RMSNorm becomes ours;
    * a dict ``{"layer": one of these, ...}`` with further options of that layer.

    `sequence_parallel` is the default for all of them. Every rank passes the same module, and no message is sent. A
    weight that two of the submodules share stays shared. Make optimizers afterwards: parameters are new ones. Hooks of
    what is replaced are not taken over.

    Raises ArgumentError, with `module` unchanged, for a pattern that fits nothing, a submodule of another class than
    named above, and a parameter that is shared with what is not replaced; ShapeError for what does not divide.
    """
    chosen = _chosen(module, plan)
    _check_shared(module, chosen)
    made: dict[nn.Module, nn.Module] = {}
    cuts: dict[Parameter, tuple[str, Parameter]] = {}
    for name, (plain, what) in chosen.items():
        if plain in made:
            continue
        options = {"layer": what} if isinstance(what, str) else dict(what)
        layer = made[plain] = _converted(name, plain, options, sequence_parallel, group)
        for key, param in plain.named_parameters(recurse=False):
            first, cut = cuts.setdefault(param, (name, getattr(layer, key)))
            if _lie(cut) != _lie(getattr(layer, key)):
                raise ArgumentError(
                    f"shard_: {first} and {name} share their {key}, but it would be cut in two ways; convert them alike"
                )
            setattr(layer, key, cut)
    for name, (plain, _) in chosen.items():
        module.set_submodule(name, made[plain])
    return module


def whole_state_dict(module: nn.Module) -> dict[str, Any]:
    """The state_dict of the plain model: what parallel layers have cut is joined, on every rank. Collective over the
    ranks of the layers' groups; sends every weight, n(P-1)/P bytes. What fully_shard has cut besides is joined as well.

    Parameters that are shared stay so; what is not cut is the module's own memory, as in ``state_dict()``.
    """
    mark_again(module)
    joined: dict[int, Tensor] = {}

    def whole(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        shard = shard_of(value)
        if shard is None:
            return _full(value.detach())
        if id(value) not in joined:
            joined[id(value)] = _whole(value, shard.dim, shard.comm)
        return joined[id(value)]

    return {name: whole(value) for name, value in module.state_dict(keep_vars=True).items()}


_PLAIN: dict[str, tuple[type[nn.Module], ...]] = {
    "column": (nn.Linear,),
    "row": (nn.Linear,),
    "vocab": (nn.Embedding,),
    "norm": (nn.LayerNorm, nn.RMSNorm),
}

_Chosen: TypeAlias = "dict[str, tuple[nn.Module, str | Mapping[str, Any]]]"


def _chosen(module: nn.Module, plan: Mapping[str, str | Mapping[str, Any]]) -> _Chosen:
    """The submodules that `plan` names, and what they become."""
    named = dict(module.named_modules(remove_duplicate=False))
    del named[""]
    chosen: _Chosen = {}
    for pattern, what in plan.items():
        fitting = [name for name in named if fnmatchcase(name, pattern)]
        if not fitting:
            raise ArgumentError(f"shard_: no submodule fits {pattern!r}; there are {sorted(named)}")
        kind = what if isinstance(what, str) else what.get("layer")
        if kind not in _PLAIN:
            raise ArgumentError(f"shard_: {pattern!r} must become one of {sorted(_PLAIN)}, got {what!r}")
        for name in fitting:
            # Subclasses may compute something else.
            if name not in chosen and type(named[name]) not in _PLAIN[kind]:
                wanted = " or ".join(one.__name__ for one in _PLAIN[kind])
                raise ArgumentError(
                    f"shard_: {name!r}, which {pattern!r} fits, is a {type(named[name]).__name__}; {kind!r} needs a"
                    f" {wanted}"
                )
            chosen.setdefault(name, (named[name], what))
    return chosen


def _check_shared(module: nn.Module, chosen: _Chosen) -> None:
    """Raise if a parameter of what is replaced belongs to something else as well."""
    replaced = {plain: name for name, (plain, _) in chosen.items()}
    owner = {param: name for plain, name in replaced.items() for param in plain.parameters(recurse=False)}
    for name, other in module.named_modules(remove_duplicate=False):
        if other in replaced and name not in chosen:
            raise ArgumentError(f"shard_: {replaced[other]!r} is the same module as {name!r}, which no pattern fits")
        for key, param in other.named_parameters(recurse=False):
            if other not in replaced and param in owner:
                raise ArgumentError(
                    f"shard_: {name!r} shares its {key} with {owner[param]!r}, but no pattern fits it; convert both"
                )


def _converted(name: str, plain: nn.Module, options: dict[str, Any], sequence_parallel: bool, group: Any) -> nn.Module:
    options = {"sequence_parallel": sequence_parallel, **options}
    kind = options.pop("layer")
    try:
        if isinstance(plain, nn.Embedding):
            return VocabParallelEmbedding.from_embedding(plain, group=group, **options)
        if isinstance(plain, nn.LayerNorm):
            return LayerNorm.from_norm(plain, group=group, **options)
        if isinstance(plain, nn.RMSNorm):
            return RMSNorm.from_norm(plain, group=group, **options)
        assert isinstance(plain, nn.Linear)
        if kind == "column":
            return ColumnParallelLinear.from_linear(plain, group=group, **options)
        return RowParallelLinear.from_linear(plain, group=group, **{"input_is_parallel": True, **options})
    except TypeError as error:
        raise ArgumentError(f"shard_: {name!r} can't become {kind!r} with the options {options}: {error}") from error


def _lie(param: Tensor) -> tuple[int | None, torch.Size]:
    shard = shard_of(param)
    return (None if shard is None else shard.dim), param.shape
