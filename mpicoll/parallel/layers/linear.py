"""Linear layers whose weights are sharded over the ranks of a tensor parallel group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter, functional

from mpicoll.errors import ArgumentError, ShapeError
from mpicoll.parallel.groups import communicator, describe_rank
from mpicoll.parallel.layers.base import (
    InitMethod,
    ParallelModule,
    copy_local_block,
    copy_parameter,
    divide_extent,
    gather_full,
    sum_gradients_in_backward,
)
from mpicoll.parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)

if TYPE_CHECKING:
    from typing_extensions import Self
from mpicoll.parallel.layers.functional import check_features, column_parallel_linear


class _ParallelLinear(ParallelModule):
    """Common base of the two linear layers."""

    _sharded_extent: ClassVar[str]
    """Name of the extent that is sharded: in_features or out_features."""
    _shown_flags: ClassVar[tuple[str, ...]]
    """Further options that ``repr`` shows if they are set."""

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
        divide_extent(type(self).__name__, self._sharded_extent, getattr(self, self._sharded_extent), self.comm)
        self._set_parameters(self._make_plain(bias, device, dtype))

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, group: Any = None, **options: Any) -> Self:
        """Make a layer with the values, dtype, device and requires_grad of `linear`.

        Args:
            linear: the plain layer, the same on every rank.
            group: the tensor parallel group, by default the axis "model" of the grid in use.
            options: further keyword arguments of the constructor.
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
        """Return the plain layer with the full weight, on every rank. Collective: sends n(P-1)/P of the weight."""
        linear = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        linear.weight = Parameter(
            gather_full(self.weight, self._shard_dims["weight"], self.comm), self.weight.requires_grad
        )
        if self.bias is not None:
            bias = gather_full(self.bias, 0, self.comm) if "bias" in self._shard_dims else self.bias.detach().clone()
            linear.bias = Parameter(bias, self.bias.requires_grad)
        return linear.train(self.training)

    def reset_parameters(self) -> None:
        """Draw values as the constructor does, for example after ``to_empty``. All ranks of the group must call it."""
        plain = self._make_plain(self.bias is not None, self.weight.device, self.weight.dtype)
        with torch.no_grad():
            for name, value in self._local_parameters(plain).items():
                if value is not None:
                    self.get_parameter(name).copy_(value)

    def _make_plain(self, bias: bool, device: Any, dtype: Any) -> nn.Linear:
        """Return the full plain layer with its initial values."""
        plain = nn.Linear(self.in_features, self.out_features, bias, device=device, dtype=dtype)
        if self.init_method is not None:
            with torch.no_grad():
                self.init_method(plain.weight)
        return plain

    def _set_parameters(self, plain: nn.Linear) -> None:
        for name, value in self._local_parameters(plain).items():
            self.register_parameter(name, value)

    def _local_parameters(self, plain: nn.Linear) -> dict[str, Parameter | None]:
        """Return this rank's parameters of `plain`."""
        params: dict[str, Tensor | None] = {"weight": plain.weight, "bias": plain.bias}
        return {
            name: copy_local_block(param, self._shard_dims[name], self.comm)
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


class ColumnParallelLinear(_ParallelLinear):
    """A linear layer whose outputs are sharded: each rank holds ``out_features / P`` rows of the weight.

    The input is ``(..., in_features)``, the same on all ranks, or with `sequence_parallel` this rank's part of axis 0.
    The output is ``(..., out_features / P)``, or with `gather_output` the full ``(..., out_features)`` on every rank.
    Messages are those of :func:`column_parallel_linear`; `gather_output` adds (P-1)/P of the output.

    A weight of several matrices, such as query, key and value in one, must have its rows ordered so that each rank gets
    some of each: by attention head, not by matrix.

    Args:
        in_features: the number of input features.
        out_features: the number of output features of all ranks together.
        bias: the layer has a bias, sharded like the weight.
        gather_output: return the full output on every rank.
        sequence_parallel: the input is sharded along axis 0.
        skip_bias_add: return a pair, the product and the bias that remains to be added (None without a bias); the bias
            is full if the output is.
        init_method: a function that fills the full weight in place; the bias stays as torch.nn draws it.
        group: the tensor parallel group, by default the axis "model" of the grid in use.
        device: as of torch.nn.Linear.
        dtype: as of torch.nn.Linear.

    Raises:
        ShapeError: the number of ranks does not divide `out_features`.

    Example:
        ::

            up = ColumnParallelLinear(8, 24)
            down = RowParallelLinear(24, 8, input_is_parallel=True)
            y = down(functional.gelu(up(torch.ones(4, 2, 8))))  # (4, 2, 8), the same on all ranks
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


class RowParallelLinear(_ParallelLinear):
    """A linear layer whose inputs are sharded: each rank holds ``in_features / P`` columns of the weight.

    The input is the full ``(..., in_features)`` on every rank, of which the layer takes this rank's part, or with
    `input_is_parallel` that part ``(..., in_features / P)``, as ColumnParallelLinear returns it. The output is the full
    ``(..., out_features)``, summed over the ranks, or with `sequence_parallel` this rank's part of its axis 0. Every
    rank holds the full bias, which is added once, after the sum.

    Bytes sent per rank for an output of n bytes in all: 2n(P-1)/P in the forward; with `sequence_parallel` n(P-1)/P in
    the forward and in the backward, which also sums the gradient of the bias.

    Args:
        in_features: the number of input features of all ranks together.
        out_features: the number of output features.
        bias: the layer has a bias, the same on every rank.
        input_is_parallel: the input is this rank's part of the features.
        sequence_parallel: return this rank's part of axis 0; needs `input_is_parallel`.
        skip_bias_add: return a pair, the sum and the bias that remains to be added (None without a bias).
        init_method: a function that fills the full weight in place; the bias stays as torch.nn draws it.
        group: the tensor parallel group, by default the axis "model" of the grid in use.
        device: as of torch.nn.Linear.
        dtype: as of torch.nn.Linear.

    Raises:
        ShapeError: the number of ranks does not divide `in_features`.
        ArgumentError: `sequence_parallel` without `input_is_parallel`.

    Example:
        ::

            layer = RowParallelLinear(24, 8)
            layer(torch.ones(4, 2, 24))  # (4, 2, 8), the same on all ranks
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
                "RowParallelLinear: sequence_parallel=True needs input_is_parallel=True: the input is sharded by"
                " feature and has the full sequence"
            )
        super().__init__(
            in_features, out_features, bias, sequence_parallel, skip_bias_add, init_method, group, device, dtype
        )
        self.input_is_parallel = input_is_parallel

    def forward(self, x: Tensor) -> Any:
        comm = self.comm
        features = self.in_features // comm.size if self.input_is_parallel else self.in_features
        check_features(type(self).__name__, x, features, self.sequence_parallel, comm)
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
                    f"RowParallelLinear: the sequence, axis 0 of an input of shape {tuple(x.shape)}, can't be divided"
                    f" equally among {comm.size} ranks {describe_rank(self.comm)}"
                )
            out = reduce_scatter_to_sequence_parallel_region(partial, comm)
            (bias,) = sum_gradients_in_backward(comm, bias)
        else:
            out = reduce_from_tensor_model_parallel_region(partial, comm)
        if self.skip_bias_add:
            return out, bias
        # Under autocast the product is of another dtype than the bias.
        return out if bias is None else out + bias.to(out.dtype)
