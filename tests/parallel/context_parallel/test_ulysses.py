"""Ulysses attention against attention over the whole sequence in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from support.attention import LAYOUTS, actual, check, expected, mine, plain, whole
from support.ranks import Ranks
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import mpicoll
from mpicoll.parallel import context_parallel as cp


class TestUlyssesAttention:
    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("causal", [False, True])
    def test_is_attention_over_the_whole_sequence(self, ranks: Ranks, causal: bool, layout: cp.Layout) -> None:
        def body() -> None:
            size = mpicoll.world().size
            for shape in ((2, 4 * size, 2 * size, 4, 5), (1, size, size, 2, 3)):
                tensors = whole(shape, size)
                found = actual(cp.ulysses_attention, mine(tensors, layout), causal=causal, layout=layout, scale=0.4)
                check(found, mine(expected(tensors, causal, 0.4), layout), 1e-12)

        ranks(body)

    def test_can_be_differentiated_twice(self, several: Ranks) -> None:
        def twice(attention: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Sequence[Tensor]:
            grads = torch.autograd.grad((attention(*inputs) ** 2).sum(), inputs, create_graph=True)
            return torch.autograd.grad(sum(((one**2).sum() for one in grads), torch.zeros(())), inputs)

        def body() -> None:
            size = mpicoll.world().size
            tensors = whole((1, size, size, 2, 3), size)[:3]
            wanted = twice(plain, [one.clone().requires_grad_() for one in tensors])
            found = twice(cp.ulysses_attention, [one.requires_grad_() for one in mine(tensors)])
            check(found, mine(wanted), 1e-12)

        with sdpa_kernel(SDPBackend.MATH):
            several(body)

    def test_needs_heads_for_every_rank(self, some_more: Ranks) -> None:
        def body() -> None:
            size = mpicoll.world().size
            q, k, v, _ = whole((1, 2 * size, 1, 4, 3), 1)
            with pytest.raises(mpicoll.errors.ShapeError, match=r"the 1 heads of key \(dim 1 .*use ring_attention"):
                cp.ulysses_attention(q, k, v)

        some_more(body)
