"""Gradients that are sent as rows: steps and servers without rows, rows of one element, and the numbers of updates."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import mpicoll
from mpicoll.parallel.parameter_server import SGD, Adam, ParameterServer, Worker

STEPS = ([0], [0], [0, 1], [3], [])


def train_table(servers: int, rule: Any, **options: Any) -> Any:
    """The rows of a table after `STEPS`, whose gradients are ones."""

    def body() -> Any:
        if mpicoll.world().rank < servers:
            return ParameterServer(rule, **options).run()
        with Worker({"table": np.zeros((4, 2))}, sparse=["table"]) as worker:
            for rows in STEPS:
                worker.push_gradients({"table": (rows, np.ones((len(rows), 2)))})
            return worker.get_weights()["table"]

    return mpicoll.run_local(body, servers + 1, timeout=20)[-1]


@pytest.mark.parametrize("rule", [Adam(0.1), SGD(lambda step: float(step <= 2)), SGD(0.1, momentum=0.5)])
def test_weights_of_arrays_do_not_depend_on_the_number_of_servers(rule: Any) -> None:
    expected = train_table(1, rule)
    assert (expected[0] != 0).all()
    np.testing.assert_array_equal(train_table(2, rule), expected)


def train_embedding(servers: int, dim: int, optimizer: Any, save: Path | None = None) -> Any:
    def body() -> Any:
        rank = mpicoll.world().rank
        if rank < servers:
            with ParameterServer(optimizer=optimizer) as server:
                for _ in STEPS:
                    server.update_model()
                if save is not None:
                    server.save(save)
            return None
        module = nn.Embedding(4, dim, sparse=True)
        nn.init.zeros_(module.weight)
        with Worker(module) as worker:
            for rows in STEPS:
                # The gradient of a sum is expanded from one element.
                module(torch.tensor(rows, dtype=torch.long)).sum().backward()
                worker.push_gradients()
                worker.pull_weights(rows={"weight": rows})
            worker.pull_weights()
        return module.weight.detach()

    return mpicoll.run_local(body, servers + 1, timeout=20)[-1]


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize(
    "optimizer",
    [
        partial(torch.optim.SGD, lr=0.1, momentum=0.5),
        lambda named: torch.optim.SparseAdam([one for _, one in named], lr=0.1),
    ],
)
def test_weights_of_embeddings_are_those_of_one_process(dim: int, optimizer: Any) -> None:
    module = nn.Embedding(4, dim, sparse=True)
    nn.init.zeros_(module.weight)
    alone = optimizer(list(module.named_parameters()))
    for rows in STEPS:
        alone.zero_grad()
        # Torch's momentum would be wrong if its first value were an expanded gradient.
        (module(torch.tensor(rows, dtype=torch.long)) * torch.ones(dim)).sum().backward()
        alone.step()
    for servers in (1, 2):
        torch.testing.assert_close(train_embedding(servers, dim, optimizer), module.weight.detach())


def test_the_momentum_of_sparse_gradients_is_saved(tmp_path: Path) -> None:
    train_embedding(2, 2, partial(torch.optim.SGD, lr=0.1, momentum=0.5), tmp_path)
    state = {"optimizer.state.weight.momentum_buffer": torch.zeros(4, 2)}
    with pytest.warns(UserWarning, match="assuming the intent is to load in a single process"):
        dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path), no_dist=True)
    (buffer,) = state.values()
    # Of the five steps, row 0 has gradients in the first three, row 1 in the third, and row 3 in the fourth.
    assert buffer[:, 0].tolist() == [0.4375, 0.25, 0, 0.5]


def test_rows_do_not_wait_for_the_next_gradients_of_dense_tensors() -> None:
    def body() -> Any:
        if mpicoll.world().rank == 0:
            return ParameterServer(optimizer=partial(torch.optim.SGD, lr=0.5), bucket_bytes=16).run()
        module = nn.Sequential(nn.Embedding(4, 4, sparse=True), nn.Linear(4, 8, bias=False))
        for parameter in module.parameters():
            nn.init.ones_(parameter)
        with Worker(module) as worker:
            for _ in range(2):
                worker.pull_weights()
                module(torch.tensor([1])).sum().backward()
                # The server updates the dense tensor, and expects its next gradients, before the rows are announced.
                time.sleep(0.2)
                worker.push_gradients()
            worker.pull_weights()
        return module[0].weight.detach()

    expected = torch.ones(4, 4)
    expected[1] = 1 - 0.5 * (8 + 4)
    assert torch.equal(mpicoll.run_local(body, 2, timeout=5)[-1], expected)
