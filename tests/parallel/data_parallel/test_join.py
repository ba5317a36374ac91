"""DistributedOptimizer.join in further forms: several epochs, sums, closures and sparse gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mpicoll
from mpicoll.parallel import DistributedOptimizer


def test_a_step_after_join_has_gradients() -> None:
    """Where all parameters have gradients, the hooks of the next epoch start its first reduction."""

    def body() -> None:
        model = nn.Linear(3, 1)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        for _ in range(2):
            optimizer.zero_grad()
            before = model.weight.detach().clone()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            assert model.weight.grad is not None
            assert torch.equal(model.weight, before - 2)
            optimizer.join()

    mpicoll.run_local(body, 2)


def test_a_sum_is_not_scaled() -> None:
    def body() -> None:
        weight = nn.Parameter(torch.zeros(2))
        options = {"op": "sum", "divide_by_initial_world_size": False}
        optimizer = DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), **options)
        for _ in range(mpicoll.world().rank):
            weight.sum().backward()
            optimizer.step()
            assert weight.tolist() == [-1, -1]
        assert optimizer.join() == 1

    mpicoll.run_local(body, 2)


def test_closures_are_refused() -> None:
    """On the rank that joins, and on those that take a step with a closure after another rank has joined."""

    def body() -> None:
        rank, weight = mpicoll.world().rank, nn.Parameter(torch.ones(2))
        optimizer = DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = weight.sum()
            loss.backward()
            return loss

        with pytest.raises(mpicoll.ArgumentError, match=rf"after 1 of 2 ranks have called join.*\(rank {rank} of 2\)"):
            optimizer.join() if rank == 1 else optimizer.step(closure)
        if rank == 0:
            with pytest.raises(mpicoll.ArgumentError, match=r"join\(\) after step\(closure\).*\(rank 0 of 2\)"):
                optimizer.join()

    mpicoll.run_local(body, 2, timeout=20)


def test_sparse_momentum() -> None:
    """It is broadcast from the last rank that joins."""

    def body() -> None:
        model = nn.Embedding(4, 2, sparse=True)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        nn.init.ones_(model.weight)
        for _ in range(1 + mpicoll.world().rank):
            optimizer.zero_grad()
            model(torch.tensor([1, 2])).sum().backward()
            optimizer.step()
        assert optimizer.join() == 1
        momentum = optimizer.state[model.weight]["momentum_buffer"]
        assert momentum.is_sparse
        values = [momentum.to_dense().tolist(), model.weight.tolist()]
        assert mpicoll.allgather_object(values) == [values] * 2

    mpicoll.run_local(body, 2)
