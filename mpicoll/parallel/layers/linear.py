"""Linear layers whose weights are spread over the ranks of a tensor parallel group."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import Parameter, functional

from mpicoll.collectives.allgather import allgather, iallgather
from mpicoll.collectives.allreduce import allreduce, iallreduce
from mpicoll.collectives.reduce_scatter import ireduce_scatter, reduce_scatter
from mpicoll.engine.communicator import Communicator
from mpicoll.engine.request import Request
from mpicoll.errors import ArgumentError, ShapeError
from mpicoll.parallel.groups import communicator
from mpicoll.parallel.layers.base import (
    InitMethod,
    ParallelModule,
    copy_parameter,
    gather_full,
    local_block,
    local_extent,
    sum_gradients_in_backward,
)
from mpicoll.parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from mpicoll.torch.no_compile import eager

if TYPE_CHECKING:
    from typing_extensions import Self

MIN_BACKGROUND_BYTES = 64 << 10
"""Bytes from which a collective runs in the background: handing a smaller one to a thread takes longer than it does."""


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
            grad_x, grad_weight = _differentiable_gradients(x, weight, grad, comm, ctx.sequence_parallel)
            return grad_x, grad_weight, rows.sum(0) if need_bias else None, None, None
        grad_weight = gathering = reducing = None
        if need_weight and ctx.sequence_parallel:
            gathering = _start(allgather, iallgather, x, comm=comm)
        if need_x:
            whole = grad @ weight
            if ctx.sequence_parallel:
                reducing = _start(reduce_scatter, ireduce_scatter, whole, comm=comm)
            else:
                reducing = _start(allreduce, iallreduce, whole, out=whole, comm=comm)
        grad_bias = rows.sum(0) if need_bias else None
        if need_weight:
            whole_x = x if gathering is None else gathering()
            grad_weight = rows.t() @ whole_x.reshape(-1, whole_x.shape[-1])
        grad_x = None if reducing is None else reducing()
        return grad_x, grad_weight, grad_bias, None, None


def _start(
    blocking: Callable[..., Tensor], background: Callable[..., Request], x: Tensor, **options: Any
) -> Callable[[], Tensor]:
    """Begin a collective; what is returned gives its result."""
    if x.nbytes < MIN_BACKGROUND_BYTES:
        result = blocking(x, **options)
        return lambda: result
    return background(x, **options).wait


def _differentiable_gradients(
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


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` as torch's own functions cast it under autocast, which leaves float64 alone."""
    return x.to(dtype) if x.is_floating_point() and x.dtype is not torch.float64 else x


def _check_features(operation: str, x: Tensor, features: int, sequence_parallel: bool, comm: Communicator) -> None:
    axes = 2 if sequence_parallel else 1
    if x.dim() < axes or x.shape[-1] != features:
        needed = f"(sequence, ..., {features})" if sequence_parallel else f"(..., {features})"
        raise ShapeError(
            f"{operation}: the input must be of shape {needed}, got {tuple(x.shape)} (rank {comm.rank} of {comm.size})"
        )


class _Linear(ParallelModule):
    """What the two linear layers share."""

    _sharded_extent: ClassVar[str]
    """Which of the extents is spread over the ranks."""
    _shown_flags: ClassVar[tuple[str, ...]]
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
        init_method: InitMethod | None,
        group: Any,
        device: Any,
        dtype: Any,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.sequence_parallel, self.skip_bias_add = sequence_parallel, skip_bias_add
        self.group, self.comm = group, communicator(group)
        self.init_method = init_method
        local_extent(type(self).__name__, self._sharded_extent, getattr(self, self._sharded_extent), self.comm)
        self._set_parameters(self._make_plain(bias, device, dtype))

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
        layer._set_parameters(linear)
        return layer.train(linear.training)

    def to_linear(self) -> nn.Linear:
        """The plain layer with the whole weight, on every rank. Collective: sends the weight, n(P-1)/P bytes."""
        linear = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        linear.weight = Parameter(
            gather_full(self.weight, self._shard_dims["weight"], self.comm), self.weight.requires_grad
        )
        if self.bias is not None:
            bias = gather_full(self.bias, 0, self.comm) if "bias" in self._shard_dims else self.bias.detach().clone()
            linear.bias = Parameter(bias, self.bias.requires_grad)
        return linear.train(self.training)

    def reset_parameters(self) -> None:
        """Draw values as the constructor does, such as after ``to_empty``. All ranks of the group must call it."""
        plain = self._make_plain(self.bias is not None, self.weight.device, self.weight.dtype)
        with torch.no_grad():
            for name, value in self._local_parameters(plain).items():
                if value is not None:
                    self.get_parameter(name).copy_(value)

    def _make_plain(self, bias: bool, device: Any, dtype: Any) -> nn.Linear:
        """The whole layer, as it starts."""
        plain = nn.Linear(self.in_features, self.out_features, bias, device=device, dtype=dtype)
        if self.init_method is not None:
            with torch.no_grad():
                self.init_method(plain.weight)
        return plain

    def _set_parameters(self, plain: nn.Linear) -> None:
        for name, value in self._local_parameters(plain).items():
            self.register_parameter(name, value)

    def _local_parameters(self, plain: nn.Linear) -> dict[str, Parameter | None]:
        """What this rank holds of `plain`."""
        params: dict[str, Tensor | None] = {"weight": plain.weight, "bias": plain.bias}
        return {
            name: local_block(param, self._shard_dims[name], self.comm)
            if param is not None and name in self._shard_dims
            else copy_parameter(param)
            for name, param in params.items()
        }

    def extra_repr(self) -> str:
        flags = [name for name in ("sequence_parallel", "skip_bias_add", *self._shown_flags) if getattr(self, name)]
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

    _shard_dims: ClassVar = {"weight": 0, "bias": 0}
    _sharded_extent = "out_features"
    _shown_flags = ("gather_output",)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        skip_bias_add: bool = False,
        init_method: InitMethod | None = None,
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

    _shard_dims: ClassVar = {"weight": 1}
    _sharded_extent = "in_features"
    _shown_flags = ("input_is_parallel",)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        input_is_parallel: bool = False,
        sequence_parallel: bool = False,
        skip_bias_add: bool = False,
        init_method: InitMethod | None = None,
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
            (bias,) = sum_gradients_in_backward(comm, bias)
        else:
            out = reduce_from_tensor_model_parallel_region(partial, comm)
        if self.skip_bias_add:
            return out, bias
        # Under autocast the product is of another dtype than the bias.
        return out if bias is None else out + bias.to(out.dtype)
