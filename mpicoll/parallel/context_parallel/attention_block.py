"""Attention of queries to one block of keys, and its gradients."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def get_accumulation_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which partial results of tensors like `x` are accumulated."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def attend(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Compute attention of `query` to one block of keys.

    Returns:
        The result, and for each query the log of the sum of its weights (float32 for half precision).
    """
    if _can_use_fused(query, key, value):
        out, lse = _FUSED(query, key, value, 0.0, causal, scale=scale)
        return out, lse
    return attend_by_matmul(query, key, value, causal, scale)


def attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the contribution of one block of keys to the gradients of queries, keys and values.

    `out` and `lse` are the results over all keys.
    """
    if _can_use_fused(query, key, value):
        grad_query, grad_key, grad_value = _FUSED_BACKWARD(grad, query, key, value, out, lse, 0.0, causal, scale=scale)
        return grad_query, grad_key, grad_value
    return attend_backward_by_matmul(grad, query, key, value, out, lse, causal, scale)


_FUSED: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
_FUSED_BACKWARD: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)


def _can_use_fused(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return True if torch's fused kernels support the tensors. They abort the process for empty tensors."""
    return (
        query.is_cpu
        and _FUSED is not None
        and _FUSED_BACKWARD is not None
        and key.shape[3] == value.shape[3]
        and query.numel() > 0
        and key.numel() > 0
    )


def attend_by_matmul(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Compute :func:`attend` by matrix products, with all weights in memory."""
    q, k, v = (_group_heads(one, key.shape[1]) for one in (query, key, value))
    with _without_autocast(query):
        scores = _compute_scores(q, k, query.shape[1] // key.shape[1], causal, scale)
        lse = scores.logsumexp(-1)
        out = (scores - lse.unsqueeze(-1)).exp() @ v
    return out.view(*query.shape[:3], value.shape[3]), lse.view(query.shape[:3])


def attend_backward_by_matmul(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute :func:`attend_backward` by matrix products."""
    q, k, v, g, o = (_group_heads(one, key.shape[1]) for one in (query, key, value, grad, out))
    with _without_autocast(query):
        scores = _compute_scores(q, k, query.shape[1] // key.shape[1], causal, scale)
        weights = (scores - lse.reshape(q.shape[:3]).unsqueeze(-1)).exp()
        grad_scores = weights * (g @ v.mT - (g * o).sum(-1, keepdim=True)) * scale
        return (grad_scores @ k).view(query.shape), grad_scores.mT @ q, weights.mT @ g


def _without_autocast(x: Tensor) -> torch.autocast:
    """Return a context in which products on the device of `x` are of the accumulation dtype, as in the fused kernels.

    Otherwise the weights that a backward computes, which autocast mostly does not cover, would not be the forward's.
    """
    return torch.autocast(x.device.type, enabled=False)


def _group_heads(x: Tensor, heads: int) -> Tensor:
    """Return `x` in the accumulation dtype, with the rows of query heads that share one of `heads` stacked."""
    return x.to(get_accumulation_dtype(x)).reshape(x.shape[0], heads, x.shape[1] // heads * x.shape[2], x.shape[3])


def _compute_scores(query: Tensor, key: Tensor, share: int, causal: bool, scale: float) -> Tensor:
    scores = query @ key.mT * scale
    if causal:
        hidden = torch.ones(key.shape[2], key.shape[2], dtype=torch.bool, device=key.device).triu(1)
        scores.masked_fill_(hidden.repeat(share, 1), -math.inf)
    return scores
