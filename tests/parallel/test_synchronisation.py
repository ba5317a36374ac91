"""Every way to synchronise a data-parallel model gives the parameters of one process that sees the whole batch."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.launch import ROOT
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import mpicoll
from mpicoll.parallel.data_parallel import DistributedOptimizer
from mpicoll.parallel.parameter_server import ParameterServer, Worker

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(60), pytest.mark.usefixtures("default_group")]

STEPS = 20
ROWS = 12
"""Rows of a whole batch: equal shares for 1 to 4 workers."""

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def find_loss(model: nn.Module, step: int, worker: int = 0, workers: int = 1) -> Tensor:
    """Return the loss of a worker's share of the batch of a step."""
    generator = torch.Generator().manual_seed(100 + step)
    inputs = torch.randn(ROWS, 6, generator=generator, dtype=torch.float64)
    targets = torch.randn(ROWS, 3, generator=generator, dtype=torch.float64)
    return nn.functional.mse_loss(model(inputs.chunk(workers)[worker]), targets.chunk(workers)[worker])


def train(model: nn.Module, optimizer: Any, synchronise: Callable[[], None] = lambda: None) -> None:
    world = mpicoll.world()
    for step in range(STEPS):
        optimizer.zero_grad()
        find_loss(model, step, world.rank, world.size).backward()
        synchronise()
        optimizer.step()


def compare_with_one_process(model: nn.Module) -> None:
    alone = make_model()
    optimizer = SGD(alone.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        find_loss(alone, step).backward()
        optimizer.step()
    torch.testing.assert_close(list(model.parameters()), list(alone.parameters()), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["master-worker", "tree", "ring"])
def test_allreduce_by_hand(name: str) -> None:
    reduce_in_place = runpy.run_path(str(ROOT / "examples" / "allreduce_by_hand.py"))["BY_HAND"][name]
    model = make_model()

    def average_gradients() -> None:
        gradients = [parameter.grad for parameter in model.parameters()]
        flat = np.concatenate([one.numpy().ravel() for one in gradients if one is not None])
        reduce_in_place(flat)
        flat /= mpicoll.world().size
        parts = np.split(flat, np.cumsum([one.numel() for one in model.parameters()])[:-1])
        for parameter, part in zip(model.parameters(), parts, strict=True):
            parameter.grad = torch.from_numpy(part).view_as(parameter)

    train(model, SGD(model.parameters()), average_gradients)
    compare_with_one_process(model)


def test_distributed_optimizer() -> None:
    model = make_model()
    train(model, DistributedOptimizer(SGD(model.parameters())))
    compare_with_one_process(model)


def test_ddp() -> None:
    model = make_model()
    train(DistributedDataParallel(model), SGD(model.parameters()))
    compare_with_one_process(model)


@pytest.mark.parametrize("servers", [1, 2])
def test_parameter_server(servers: int) -> None:
    """The first ranks are servers; fewer workers have larger shares of the same batch."""
    world = mpicoll.world()
    workers = world.size - servers
    if workers < 1:
        pytest.skip(f"{servers} servers leave no worker")
    if world.rank < servers:
        server = ParameterServer(optimizer=SGD)
        server.run()
        assert server.updates == STEPS
        return
    model = make_model()
    with Worker(model) as worker:
        for step in range(STEPS):
            find_loss(model, step, world.rank - servers, workers).backward()
            worker.push_gradients()
            worker.pull_weights()
    compare_with_one_process(model)
