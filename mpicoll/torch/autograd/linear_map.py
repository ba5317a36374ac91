"""Linear maps between tensors on several ranks, whose gradients are maps between ranks as well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import Function

Map: TypeAlias = Callable[[Tensor], Tensor]


class _LinearCollective(Function):
    """Linear map between tensors on several ranks. `adjoint` is its transpose, conjugated if complex.

    The second result, a zero, is for the backward: gradients get a dependency on it, and on its own gradient (see
    :func:`add_dependency`).
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forward_map: Map, adjoint: Map) -> tuple[Tensor, Tensor]:
        ctx.forward_map, ctx.adjoint = forward_map, adjoint
        token = tensor.new_zeros(())
        ctx.save_for_backward(token)
        return forward_map(tensor), token

    @staticmethod
    def backward(ctx: Any, grad: Tensor, token_grad: Tensor) -> Any:
        (token,) = ctx.saved_tensors
        return apply_linear(add_dependency(grad, token, token_grad), ctx.adjoint, ctx.forward_map), None, None


def apply_linear(tensor: Tensor, forward_map: Map, adjoint: Map) -> Tensor:
    return as_tensor(_LinearCollective.apply(tensor, forward_map, adjoint)[0])


def add_dependency(grad: Tensor, token: Tensor, token_grad: Tensor) -> Tensor:
    """Return `grad` with dependencies on `token` and `token_grad`, for graphs of second and higher order.

    An incoming gradient may have a graph on some ranks only, depending on the rank's own loss. With a dependency on a
    result of the forward it has a graph on all ranks, so all ranks run the collectives of the next backward. In that
    one, the results of collectives may lead to `token_grad` only.
    """
    # The sum of no element is a zero also if it depends on an infinite one.
    return grad + token + token_grad.expand(0).sum() if torch.is_grad_enabled() else grad


def is_recorded(tensor: Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


def scale(x: Any, weight: complex) -> Tensor:
    return as_tensor(x if weight == 1 else x * weight)


def as_tensor(x: Any) -> Tensor:
    assert isinstance(x, Tensor)
    return x
