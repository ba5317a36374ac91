"""Parameters and optimizer state of one rank on all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.ranks import Ranks
from torch import nn

import mpicoll
from mpicoll.parallel import broadcast_object, broadcast_optimizer_state, broadcast_parameters, metric_average

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "asgd": torch.optim.ASGD,
    "nadam": torch.optim.NAdam,
    "lbfgs": torch.optim.LBFGS,
    "tensor rate": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
}


def values_of(state: Any) -> Any:
    """The same with lists in place of tensors, to compare."""
    if isinstance(state, torch.Tensor):
        return str(state.dtype), state.tolist()
    if isinstance(state, dict):
        return {key: values_of(one) for key, one in state.items()}
    return [values_of(one) for one in state] if isinstance(state, (list, tuple)) else state


def test_parameters(several: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2).bfloat16())
        with torch.no_grad():
            for one in model.state_dict().values():
                one.fill_(world.rank)
        root = world.size - 1
        broadcast_parameters(model.state_dict(), root)
        assert all((one == root).all() for one in model.state_dict().values())
        with torch.no_grad():
            for one in model.parameters():
                one.fill_(world.rank)
        broadcast_parameters(model.named_parameters())
        assert all((one == 0).all() for one in model.parameters())
        assert broadcast_object({"epoch": world.rank}) == {"epoch": 0}

    several(body)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state(several: Ranks, name: str, dtype: torch.dtype) -> None:
    """Other ranks have not taken a step, and so have no state. That of some optimizers is float32 for all dtypes."""

    def body() -> list[Any]:
        world = mpicoll.world()
        model = nn.Linear(3, 2, dtype=dtype)
        nn.init.ones_(model.weight)
        optimizer = OPTIMIZERS[name](model.parameters())
        root = world.size - 1

        def closure() -> Any:
            optimizer.zero_grad()
            loss = model(torch.arange(3, dtype=dtype)).square().sum()
            loss.backward()
            return loss

        if world.rank == root:
            for _ in range(2):
                optimizer.step(closure)
            optimizer.param_groups[0]["note"] = ("any", None)
        broadcast_optimizer_state(optimizer, root)
        broadcast_parameters(model.named_parameters(), root)
        states = [values_of(optimizer.state_dict())]
        optimizer.step(closure)
        # What differs between ranks but in memory shows in the next step.
        return [*states, values_of(list(model.parameters()))]

    first, *others = mpicoll.allgather_object(several(body)[0]) if not several.local else several(body)
    assert all(one == first for one in others)
    assert first[0]["param_groups"][0]["note"] is not None
    assert first[0]["state"]


def test_an_optimizer_with_its_own_form_of_the_state(several: Ranks) -> None:
    """It keeps float32 moments, and stores them as a list."""

    class Own(torch.optim.SGD):
        def state_dict(self) -> Any:
            state = super().state_dict()
            return {**state, "state": {key: [*one.values()] for key, one in state["state"].items()}}

        def load_state_dict(self, state_dict: Any) -> None:
            state = {key: {"moment": one[0]} for key, one in state_dict["state"].items()}
            super().load_state_dict({**state_dict, "state": state})

    def body() -> None:
        rank, weight = mpicoll.world().rank, nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        optimizer = Own([weight], lr=0.1)
        if rank == 0:
            optimizer.state[weight]["moment"] = torch.tensor([1 / 3, 3.0])
        broadcast_optimizer_state(optimizer)
        assert torch.equal(optimizer.state[weight]["moment"], torch.tensor([1 / 3, 3.0]))

    several(body)


def test_errors(several: Ranks) -> None:
    def body() -> None:
        rank = mpicoll.world().rank
        with pytest.raises(mpicoll.ArgumentError, match=rf"'extra' is a dict.*broadcast_object.*\(rank {rank} of"):
            broadcast_parameters({"extra": {}})
        with pytest.raises(mpicoll.DTypeError, match=r"'x' is a torch.sparse_coo tensor.*dense"):
            broadcast_parameters({"x": torch.eye(2).to_sparse()})
        with pytest.raises(mpicoll.ShapeError, match=rf"'x' share memory .*clone.*\(rank {rank} of"):
            broadcast_parameters({"x": torch.ones(1).expand(3)})
        for wrong, told in ((3, "int"), (nn.Linear(4, 2).parameters(), "generator"), (nn.Linear(4, 2), "Linear")):
            with pytest.raises(mpicoll.ArgumentError, match=rf"named_parameters\(\), got a {told} \(rank {rank} of"):
                broadcast_parameters(wrong)  # type: ignore[arg-type]
        with pytest.raises(mpicoll.ArgumentError, match=rf"optimizer of torch.optim, got int \(rank {rank} of"):
            broadcast_optimizer_state(3)  # type: ignore[arg-type]
        with pytest.raises(mpicoll.MismatchError, match=r"(?s)entry 1 on.*nothing more"):
            broadcast_parameters({str(number): torch.ones(1) for number in range(1 if rank == 1 else 2)})
        model = nn.Linear(2, 2 if rank else 1)
        with pytest.raises(mpicoll.MismatchError, match=r"broadcast_optimizer_state.*the same optimizer"):
            broadcast_optimizer_state(torch.optim.SGD(model.parameters()))

    several(body)


def test_metrics(ranks: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        mean = (world.size - 1) / 2
        assert metric_average(world.rank) == mean
        got: Any = metric_average({"loss": float(world.rank), "counts": torch.tensor([1, world.rank])})
        assert got["loss"] == mean
        assert got["counts"].tolist() == [1, mean]
        # A rank without samples has the mean of none.
        last = world.rank == world.size - 1
        assert metric_average(torch.tensor(2.0 if last else float("nan")), weight=5 * last) == torch.tensor(2.0)
        array: Any = metric_average(np.array([1, world.rank], np.float32))
        assert (array.dtype, array.tolist()) == (np.float32, [1, mean])
        with pytest.raises(mpicoll.ArgumentError, match=rf"got a list; pass numbers.*\(rank {world.rank} of"):
            metric_average([1.0])
        for complex_one, kind in (
            (1j, "complex"),
            (np.complex64(1j), "complex64"),
            (np.array([1j]), "ndarray of complex128"),
            (torch.tensor(1j, dtype=torch.complex64), "Tensor of torch.complex64"),
        ):
            with pytest.raises(mpicoll.ArgumentError, match=rf"got a {kind}; .* none of them complex"):
                metric_average({"loss": 1.0, "phase": complex_one})
        with pytest.raises(mpicoll.ArgumentError, match=r"add up to 0\.0; pass weights"):
            metric_average(1.0, weight=0)

    ranks(body)
