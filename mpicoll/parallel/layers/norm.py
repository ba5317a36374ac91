"""Norms of activations whose sequence is sharded over the ranks of a tensor parallel group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn import functional

from mpicoll.parallel.groups import communicator
from mpicoll.parallel.layers.base import ParallelModule, copy_parameter, sum_gradients_in_backward

if TYPE_CHECKING:
    from typing_extensions import Self


class LayerNorm(ParallelModule, nn.LayerNorm):
    """torch.nn.LayerNorm, also for activations of which each rank has a part of the sequence.

    Args:
        normalized_shape, eps, elementwise_affine, bias, device, dtype: as of torch.nn.LayerNorm.
        sequence_parallel: the input is sharded by sequence; the backward then sums the gradients of weight and bias,
            which are replicated, over the ranks of `group` in one message.
        group: the tensor parallel group, by default the axis "model" of the grid in use.

    Example:
        ::

            norm = LayerNorm(8, sequence_parallel=True)
            norm(torch.ones(4, 2, 8)).sum().backward()  # sums the gradients of weight and bias over the ranks
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
        """Make a layer with the values of `norm`, which must be the same on all ranks."""
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
    """torch.nn.RMSNorm, also for activations of which each rank has a part of the sequence.

    Args:
        normalized_shape, eps, elementwise_affine, device, dtype: as of torch.nn.RMSNorm.
        sequence_parallel: the input is sharded by sequence; the backward then sums the gradient of the weight, which is
            replicated, over the ranks of `group`.
        group: the tensor parallel group, by default the axis "model" of the grid in use.

    Example:
        ::

            norm = RMSNorm(8, sequence_parallel=True)
            norm(torch.ones(4, 2, 8)).sum().backward()  # sums the gradient of the weight over the ranks
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
        """Make a layer with the values of `norm`, which must be the same on all ranks."""
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
