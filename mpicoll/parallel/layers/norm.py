"""Norms of activations whose sequence is spread over the ranks of a tensor parallel group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn import functional

from mpicoll.parallel.groups import communicator
from mpicoll.parallel.layers.base import ParallelModule, copy_parameter, sum_gradients_in_backward

if TYPE_CHECKING:
    from typing_extensions import Self


class LayerNorm(ParallelModule, nn.LayerNorm):
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
        layer.weight, layer.bias = copy_parameter(norm.weight), copy_parameter(norm.bias)
        return layer.train(norm.training)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = (
            sum_gradients_in_backward(self.comm, self.weight, self.bias)
            if self.sequence_parallel
            else (self.weight, self.bias)
        )
        return functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, sequence_parallel={self.sequence_parallel}"


class RMSNorm(ParallelModule, nn.RMSNorm):
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
        layer.weight = copy_parameter(norm.weight)
        return layer.train(norm.training)

    def forward(self, x: Tensor) -> Tensor:
        (weight,) = sum_gradients_in_backward(self.comm, self.weight) if self.sequence_parallel else (self.weight,)
        return functional.rms_norm(x, self.normalized_shape, weight, self.eps)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, sequence_parallel={self.sequence_parallel}"
