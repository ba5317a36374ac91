"""Parameters that are frozen when a DistributedOptimizer is made, and unfrozen later."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.ranks import Ranks
from torch import nn

import mpicoll
from mpicoll.parallel import Compression, DistributedOptimizer


@pytest.mark.parametrize("passes", [1, 2])
def test_unfrozen_parameters_are_reduced(passes: int) -> None:
    def body() -> None:
        rank = mpicoll.world().rank
        one, late = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3), requires_grad=False)
        optimizer = DistributedOptimizer(
            torch.optim.SGD([one, late], lr=1.0), op="sum", backward_passes_per_step=passes
        )
        for step in range(4):
            late.requires_grad_(step > 0)
            optimizer.zero_grad()
            for _ in range(passes):
                ((one.sum() + late.sum()) * (rank + 1)).backward()
            optimizer.step()
            assert one.tolist() == [-3 * passes * (step + 1)] * 2
            assert late.tolist() == [-3 * passes * step] * 3

    mpicoll.run_local(body, 2)


@pytest.mark.parametrize("compression", [Compression.none, Compression.bf16], ids=str)
def test_unfreezing_after_a_rank_has_joined_is_an_error_on_all(several: Ranks, compression: Any) -> None:
    def body() -> None:
        world = mpicoll.world()
        one, late = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3), requires_grad=False)
        optimizer = DistributedOptimizer(torch.optim.SGD([one, late], lr=1.0), compression=compression)
        one.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        here = rf"\(rank {world.rank} of {world.size}\)"
        told = rf"unfrozen after 1 of {world.size} ranks have called join\(\).* {here}$"
        if world.rank > 0:
            late.requires_grad_()
            (one.sum() + late.sum()).backward()
        with pytest.raises(mpicoll.ArgumentError, match=told):
            (optimizer.step if world.rank else optimizer.join)()
        assert mpicoll.allreduce(1) == world.size

    several(body)
