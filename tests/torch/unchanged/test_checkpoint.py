"""Distributed checkpoints: what a sharded model saves, another one loads, sharded otherwise or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(60)]


def _model(seed: int = 6) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 7)).double()


def _sharded(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()


def _whole(model: nn.Module) -> dict[str, Tensor]:
    tensors = model.state_dict()
    return {name: (each.full_tensor() if isinstance(each, DTensor) else each).clone() for name, each in tensors.items()}


def _equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=0)


class _Everything:
    """Model, optimizer and step of a run, as torch's checkpoint tutorial holds them."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int = 0) -> None:
        self.model, self.optimizer, self.step = model, optimizer, step

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.step = state["step"]


def _run(model: nn.Module) -> _Everything:
    return _Everything(model, torch.optim.Adam(model.parameters(), lr=0.05))


def test_training_goes_on_from_a_checkpoint(folder: Path) -> None:
    one, first, second = _run(_sharded(_model())), _run(_sharded(_model())), _run(_sharded(_model(seed=7)))
    _train(one.model, one.optimizer, range(4))
    _train(first.model, first.optimizer, range(2))
    first.step = 2
    checkpoint.save({"run": first}, checkpoint_id=folder)
    checkpoint.load({"run": second}, checkpoint_id=folder)
    assert second.step == 2
    _equal(_whole(second.model), _whole(first.model))
    _train(second.model, second.optimizer, range(2, 4))
    _equal(_whole(second.model), _whole(one.model))


def test_loaded_in_other_shards(folder: Path, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(35.0, dtype=torch.float64).reshape(5, 7)
    state = {"tensor": distribute_tensor(whole, mesh, [Shard(0)]), "plain": whole * 2, "name": "a text"}
    checkpoint.save(state, checkpoint_id=folder)
    for placement in (Shard(0), Shard(1), Replicate()):
        empty = distribute_tensor(torch.zeros_like(whole), mesh, [placement])
        loaded = {"tensor": empty, "plain": torch.zeros_like(whole), "name": ""}
        checkpoint.load(loaded, checkpoint_id=folder)
        assert torch.equal(loaded["tensor"].full_tensor(), whole)
        assert torch.equal(loaded["plain"], whole * 2)
        assert loaded["name"] == "a text"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # as `no_dist` says
def test_loaded_by_one_process(folder: Path, rank: int) -> None:
    model = _sharded(_model())
    checkpoint.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
    whole = _whole(model)
    alone = _model(seed=7)
    state = {"model": alone.state_dict()}
    checkpoint.load(state, checkpoint_id=folder, no_dist=True)
    _equal(state["model"], whole)
    if rank == 0:
        dcp_to_torch_save(folder, folder / "whole.pt")
    dist.barrier()
    _equal(torch.load(folder / "whole.pt", weights_only=True)["model"], whole)


def test_whole_state_on_rank_0(rank: int) -> None:
    model = _sharded(_model())
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    if rank == 0:
        _equal(state, _model().state_dict())
    else:
        assert state == {}
    other = _sharded(_model(seed=7))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, state, options=options)
    _equal(_whole(other), _whole(model))


def test_replicated_model(folder: Path) -> None:
    first = _run(DistributedDataParallel(_model()))
    _train(first.model, first.optimizer, range(2))
    checkpoint.save({"run": first}, checkpoint_id=folder)
    second = _run(_sharded(_model(seed=7)))
    checkpoint.load({"run": second}, checkpoint_id=folder)
    _equal(_whole(second.model), _whole(first.model.module))


@pytest.mark.parametrize("given", [False, True], ids=["default_group", "own_group"])
def test_async_save(folder: Path, given: bool) -> None:
    """Training goes on meanwhile, on the same group or beside it, and what is saved is the state at the call."""
    run = _run(_sharded(_model()))
    _train(run.model, run.optimizer, range(2))
    before = _whole(run.model)
    group = dist.new_group() if given else None
    saved = checkpoint.async_save({"run": run}, checkpoint_id=folder, process_group=group)
    if given:  # two threads with collectives of one group would depend on chance for their order
        _train(run.model, run.optimizer, range(2, 6))
    saved.result()
    if not given:
        _train(run.model, run.optimizer, range(2, 6))
    assert not torch.equal(_whole(run.model)["0.weight"], before["0.weight"])
    other = _run(_sharded(_model(seed=7)))
    checkpoint.load({"run": other}, checkpoint_id=folder)
    _equal(_whole(other.model), before)
    if group is not None:
        dist.destroy_process_group(group)


def test_async_save_by_another_process(two_ranks: None, folder: Path) -> None:
    """torch starts a process beside each rank, with a gloo group of their own."""
    run = _run(_sharded(_model()))
    before = _whole(run.model)
    saved = checkpoint.async_save(
        {"run": run}, checkpoint_id=folder, async_checkpointer_type=AsyncCheckpointerType.PROCESS
    )
    _train(run.model, run.optimizer, range(2))
    saved.result()
    other = _run(_sharded(_model(seed=7)))
    checkpoint.load({"run": other}, checkpoint_id=folder)
    _equal(_whole(other.model), before)
