"""A small regression, for the programs beside this file, and the same training in one process of plain torch."""

from __future__ import annotations

import torch
from torch import nn

STEPS, BATCH = 5, 12
"""Optimizer steps, and samples of a step, which 2 and 3 ranks share evenly."""

LR, MOMENTUM = 0.05, 0.9


def make_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Return the model with the same weights on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(dtype)


def make_data(dtype: torch.dtype = torch.float64) -> torch.utils.data.TensorDataset:
    """Return all samples: inputs of shape (8,) and targets of shape (1,)."""
    inputs = torch.randn(STEPS * BATCH, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return torch.utils.data.TensorDataset(inputs.to(dtype), inputs.sin().sum(1, keepdim=True).to(dtype))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)


def train_alone(clip: float | None = None, dtype: torch.dtype = torch.float64) -> tuple[list[float], nn.Module]:
    """Return the losses of all steps and the trained model of one process, with gradients of norm `clip` at most."""
    model = make_model(dtype)
    optimizer = make_optimizer(model)
    losses = []
    for inputs, targets in torch.utils.data.DataLoader(make_data(dtype), batch_size=BATCH):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def check_training(losses: list[float], model: nn.Module, clip: float | None = None) -> None:
    """Raise AssertionError unless the mean losses of the ranks and the model are those of one process."""
    dtype = next(model.parameters()).dtype
    rtol, atol = {torch.float64: (1e-10, 1e-12), torch.float32: (1e-5, 1e-6)}[dtype]
    expected_losses, expected = train_alone(clip, dtype)
    torch.testing.assert_close(losses, expected_losses, rtol=rtol, atol=atol)
    for (name, ours), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=rtol, atol=atol, msg=name)
