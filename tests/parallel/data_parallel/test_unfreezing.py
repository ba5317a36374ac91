"""Parameters that are frozen when a DistributedOptimizer is made, and unfrozen later."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mpicoll
from mpicoll.parallel import DistributedOptimizer


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
