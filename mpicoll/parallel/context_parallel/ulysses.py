"""Ulysses attention: all-to-alls between parts of the sequence and parts of the heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mpicoll.engine.core.communicator import Communicator
from mpicoll.errors import ShapeError
from mpicoll.parallel.context_parallel.arguments import check_agreement, check_arguments
from mpicoll.parallel.context_parallel.sequence import Layout, compute_positions, order_tokens
from mpicoll.parallel.groups import communicator, describe_rank
from mpicoll.torch.autograd import all_to_all_single
from mpicoll.torch.no_compile import disable_compile


@disable_compile
def ulysses_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    layout: Layout = "contiguous",
    group: Any = None,
) -> Tensor:
    """Compute :func:`ring_attention` by all-to-alls: each rank computes some of the heads over the full sequence.

    An all-to-all gives each rank all tokens of its share of the heads, torch's scaled_dot_product_attention computes,
    and a second all-to-all returns the results (Jacobs et al. 2023, DeepSpeed-Ulysses). It can be differentiated as
    often as torch's attention can. Each of P ranks sends (P-1)/P of its `query`, `key`, `value` and result, and in the
    backward of their gradients; with as many kv_heads as heads that is 2/P and 1/P of what the ring sends.
    Communication does not overlap with computation, and a rank holds the full sequence of its heads in memory.

    Args:
        query, key, value, causal, scale, layout, group: as of :func:`ring_attention`. The number of ranks must divide
            heads and kv_heads.

    Returns:
        This rank's part, as :func:`ring_attention`.

    Raises:
        ShapeError: the number of ranks does not divide the heads.

    All other errors are those of :func:`ring_attention`.

    Example:
        ::

            q, k, v = (torch.randn(1, 12, 6, 8) for _ in range(3))  # 12 heads, this rank's 6 tokens
            ulysses_attention(q, k, v, causal=True)  # (1, 12, 6, 8)
    """
    comm = communicator(group, "context")
    scale = check_arguments("ulysses_attention", comm, query, key, value, causal, scale, layout)
    for name, tensor in (("query", query), ("key", key)):
        if tensor.shape[1] % comm.size:
            raise ShapeError(
                f"ulysses_attention: the {tensor.shape[1]} heads of {name} (dim 1 of shape {tuple(tensor.shape)}) can't"
                f" be divided among {comm.size} ranks; use ring_attention {describe_rank(comm)}"
            )
    check_agreement("ulysses_attention", comm, (query, key, value), causal, scale, layout)
    q, k, v = (_exchange_tokens_for_heads(one, layout, comm) for one in (query, key, value))
    result = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return _exchange_heads_for_tokens(result, layout, comm)


def _exchange_tokens_for_heads(x: Tensor, layout: Layout, comm: Communicator) -> Tensor:
    """Exchange all heads of this rank's tokens for all tokens of this rank's heads."""
    received = all_to_all_single(torch.cat(x.chunk(comm.size, 1)), group=comm)
    return order_tokens(torch.cat(received.chunk(comm.size), 2), 2, layout, comm)


def _exchange_heads_for_tokens(x: Tensor, layout: Layout, comm: Communicator) -> Tensor:
    """Exchange all tokens of this rank's heads for all heads of this rank's tokens."""
    length = x.shape[2] // comm.size
    parts = [
        x.index_select(2, compute_positions(length, layout, rank, comm.size, x.device)) for rank in range(comm.size)
    ]
    received = all_to_all_single(torch.cat(parts), group=comm)
    return torch.cat(received.chunk(comm.size), 1)
