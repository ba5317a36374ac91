"""Commit, restore and sync; tests/examples/test_resilient.py has a job in which a rank dies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.ranks import Ranks
from torch import nn

import mpicoll
from mpicoll.parallel import DistributedOptimizer, elastic
from mpicoll.transport.local import Kill


def make_state() -> Any:
    model = nn.Linear(2, 1)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    return elastic.TorchState(model, optimizer, epoch=0, history=[], array=np.zeros(2))


def step(state: Any) -> None:
    state.optimizer.zero_grad()
    state.model(torch.ones(1, 2)).sum().backward()
    state.optimizer.step()
    state.epoch += 1
    state.history.append(state.epoch)
    state.array += 1


def values_of(state: Any) -> list[Any]:
    buffers = [one["momentum_buffer"].tolist() for one in state.optimizer.state.values()]
    parameters = [one.tolist() for one in state.model.parameters()]
    return [state.epoch, list(state.history), state.array.tolist(), parameters, buffers]


def test_restore(some: Ranks) -> None:
    def body() -> None:
        state = make_state()
        state.sync()
        assert len({str(one) for one in mpicoll.allgather_object(values_of(state))}) == 1
        step(state)
        state.commit()
        committed = values_of(state)
        step(state)
        assert values_of(state) != committed
        state.restore()
        assert values_of(state) == committed

    some(body)


def test_sync_takes_the_latest_commit(several: Ranks) -> None:
    def body() -> None:
        rank = mpicoll.world().rank
        state = elastic.TorchState(nn.Linear(2, 1), epoch=rank)
        state.commit()
        if rank == 1:
            state.epoch = 10
            nn.init.ones_(state.model.weight)
            state.commit()
        state.epoch = -1
        state.sync()
        assert state.epoch == 10
        assert state.model.weight.tolist() == [[1, 1]]

    several(body)


def test_run(several: Ranks) -> None:
    def body() -> None:
        @elastic.run
        def train(state: Any, steps: int, *, scale: int) -> int:
            for _ in range(steps):
                step(state)
            return scale * int(state.epoch)

        state = make_state()
        assert train(state, 2, scale=5) == 10
        state.restore()
        assert state.epoch == 2
        assert len({str(one) for one in mpicoll.allgather_object(values_of(state))}) == 1

    several(body)


def test_reset_goes_on_with_other_ranks(several: Ranks) -> None:
    """As after a death, in the middle of a step."""

    def body() -> None:
        world = mpicoll.world()
        state = make_state()
        state.reset(world)
        for _ in range(2):
            step(state)
        state.optimizer.zero_grad()
        state.commit()
        part = world.split(0 if world.rank else None)
        if part is None:
            return
        state.reset(part)
        step(state)
        assert state.epoch == 3
        assert len({str(one) for one in mpicoll.allgather_object(values_of(state), comm=part)}) == 1

    several(body)


STEPS = 6


def run_resilient(state: Any, loss: Any) -> None:
    def step(state: Any, number: int, comm: mpicoll.Communicator) -> None:
        loss().backward()
        for one in state["model"].parameters():
            mpicoll.allreduce(one.grad, out=one.grad, comm=comm)
        state["optimizer"].step()
        state["optimizer"].zero_grad()

    mpicoll.resilient(step, {"model": state.model, "optimizer": state.optimizer}, STEPS)


def run_elastic(state: Any, loss: Any) -> None:
    state.optimizer = DistributedOptimizer(state.optimizer, op="sum")

    @elastic.run
    def train(state: Any) -> None:
        while state.epoch < STEPS:
            loss().backward()
            state.optimizer.step()
            state.optimizer.zero_grad()
            state.epoch += 1
            state.commit()

    train(state)


def run_tensor(state: Any, loss: Any) -> None:
    """A tensor in the state, without a module."""
    weight = state.model.weight

    def step(state: Any, number: int, comm: mpicoll.Communicator) -> None:
        loss().backward()
        mpicoll.allreduce(weight.grad, out=weight.grad, comm=comm)
        with torch.no_grad():
            weight.sub_(0.1 * weight.grad)
        weight.grad = None

    mpicoll.resilient(step, {"weight": weight}, STEPS)


@pytest.mark.parametrize(("train", "sends"), [(run_resilient, 3), (run_elastic, 9), (run_tensor, 3)])
def test_gradients_of_an_abandoned_step_do_not_count(train: Any, sends: int) -> None:
    """Where the program sets gradients to None at the end of a step."""

    def body() -> Any:
        model = nn.Linear(2, 1, bias=False)
        nn.init.ones_(model.weight)
        state: Any = elastic.TorchState(model, torch.optim.SGD(model.parameters(), lr=0.1), epoch=0)
        # The sum of the gradients does not depend on the number of ranks.
        train(state, lambda: model(torch.ones(1, 2)).square().sum() / mpicoll.world().size)
        return model.weight.detach()

    expected = mpicoll.run_local(body, 1)[0]
    found = mpicoll.run_local(body, 3, faults=[Kill(2, sends)], timeout=20)
    assert found[2] is None
    for one in found[:2]:
        torch.testing.assert_close(one, expected)


def test_names(some: Ranks) -> None:
    def body() -> None:
        with pytest.raises(mpicoll.ArgumentError, match="commit can't be the name of a value"):
            elastic.TorchState(commit=1)
        with pytest.raises(AttributeError, match="no value 'epoch'"):
            print(elastic.TorchState().epoch)

    some(body)
