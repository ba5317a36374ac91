"""A small torch module, and the loss of a worker in a step."""

from __future__ import annotations

import torch
from torch import nn


def make_module() -> nn.Sequential:
    generator = torch.Generator().manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Linear(3, 1, bias=False)).double()
    with torch.no_grad():
        for one in module.parameters():
            one.copy_(torch.randn(one.shape, generator=generator, dtype=one.dtype) / 2)
    return module


def make_loss(module: nn.Module, worker: int, step: int) -> torch.Tensor:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * worker + step), dtype=torch.float64)
    return (module(x) - x.sum(dim=1, keepdim=True)).square().sum()
