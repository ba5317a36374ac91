"""Norms against the plain ones of torch.nn in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.parallel_layers import B, H, S, check, filled, normal, rows, whole
from support.ranks import Ranks
from torch import nn

import mpicoll
from mpicoll.parallel.layers import (
    LayerNorm,
    RMSNorm,
)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LayerNorm(H),
        lambda: nn.LayerNorm((B, H), eps=0.1),
        lambda: nn.LayerNorm(H, bias=False),
        lambda: nn.LayerNorm(H, elementwise_affine=False),
        lambda: nn.RMSNorm(H),
        lambda: nn.RMSNorm((B, H), eps=0.1),
        lambda: nn.RMSNorm(H, elementwise_affine=False),
    ],
    ids=["layer", "layer-2d", "layer-no-bias", "layer-not-affine", "rms", "rms-2d", "rms-not-affine"],
)
def test_norms(ranks: Ranks, make: Callable[[], Any], sequence_parallel: bool) -> None:
    def body() -> None:
        plain = filled(make())
        ours = LayerNorm if isinstance(plain, nn.LayerNorm) else RMSNorm
        layer = ours.from_norm(plain, sequence_parallel=sequence_parallel)
        part = rows if sequence_parallel else whole
        check(plain, layer, normal(S, B, H).requires_grad_(), mpicoll.world(), part, part)

    ranks(body)


def test_frozen_weight_of_a_norm(several: Ranks) -> None:
    def body() -> None:
        plain = filled(nn.LayerNorm(H))
        plain.weight.requires_grad_(False)
        layer = LayerNorm.from_norm(plain, sequence_parallel=True)
        check(plain, layer, normal(S, B, H).requires_grad_(), mpicoll.world(), rows, rows)

    several(body)
