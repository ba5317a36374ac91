"""Attention over a whole sequence in one process, to compare with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mpicoll.parallel import context_parallel as cp

LAYOUTS: tuple[cp.Layout, ...] = ("contiguous", "zigzag")

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}
"""Maximum relative difference to the result in float64, in the Euclidean norm."""


def whole(shape: Sequence[int], size: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """query, key, value and the gradient of the result, the same on all ranks."""
    batch, heads, kv_heads, tokens, dim = shape
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(batch, many, tokens * size, dim, generator=generator, dtype=torch.float64).to(dtype)
        for many in (heads, kv_heads, kv_heads, heads)
    ]


def plain(query: Tensor, key: Tensor, value: Tensor, causal: bool = False, scale: float | None = None) -> Tensor:
    """Compute attention by its definition."""
    share = query.shape[1] // key.shape[1]
    key, value = (one.repeat_interleave(share, 1) for one in (key, value))
    scores = query @ key.mT * (query.shape[3] ** -0.5 if scale is None else scale)
    if causal:
        later = torch.arange(key.shape[2])[None, :] > torch.arange(query.shape[2])[:, None]
        scores = scores.masked_fill(later, -math.inf)
    return scores.softmax(-1) @ value


def expected(tensors: Sequence[Tensor], causal: bool = False, scale: float | None = None) -> list[Tensor]:
    """The result and the gradients of query, key and value, in float64, over the whole sequence."""
    inputs = [one.double().requires_grad_() for one in tensors[:3]]
    result = plain(*inputs, causal, scale)
    return [result.detach(), *torch.autograd.grad(result, inputs, tensors[3].double())]


def mine(tensors: Sequence[Tensor], layout: cp.Layout = "contiguous") -> list[Tensor]:
    """This rank's parts."""
    return [cp.split_sequence(one, 2, layout=layout) for one in tensors]


def actual(attention: Callable[..., Tensor], parts: Sequence[Tensor], **options: Any) -> list[Tensor]:
    inputs = [one.requires_grad_() for one in parts[:3]]
    result = attention(*inputs, **options)
    return [result.detach(), *torch.autograd.grad(result, inputs, parts[3])]


def check(found: Sequence[Tensor], wanted: Sequence[Tensor], tolerance: float) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        assert (one.double() - other).norm() <= tolerance * max(1.0, float(other.norm()))
