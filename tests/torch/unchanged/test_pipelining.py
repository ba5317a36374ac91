"""Pipeline schedules, one stage per rank: gradients, losses and outputs are those of one process."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn.parallel import DistributedDataParallel

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(30)]

BATCHES = 8  # micro-batches: a multiple of the number of stages, as interleaving wants


def _layers(count: int) -> nn.ModuleList:
    torch.manual_seed(4)
    return nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(count)).double()


def _batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = torch.randn(2, 2 * BATCHES, 5, generator=generator, dtype=torch.float64)
    return inputs, targets


def _one_process(layers: nn.ModuleList, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    outputs = nn.Sequential(*layers)(inputs)
    loss = nn.functional.mse_loss(outputs, targets)
    loss.backward()
    return outputs.detach(), loss.detach()


def _check_gradients(got: nn.Module, want: nn.Module) -> None:
    grads = [[parameter.grad for parameter in module.parameters()] for module in (got, want)]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", [ScheduleGPipe, Schedule1F1B])
def test_one_stage_per_rank(several_ranks: None, rank: int, size: int, kind: type) -> None:
    layers = _layers(size)
    one = copy.deepcopy(layers)
    schedule = kind(
        PipelineStage(layers[rank], rank, size, torch.device("cpu")), BATCHES, loss_fn=nn.functional.mse_loss
    )
    for step in range(2):  # the second one finds its buffers made
        layers.zero_grad()
        one.zero_grad()
        inputs, targets = _batch(step)
        wanted_outputs, wanted_loss = _one_process(one, inputs, targets)
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(inputs)
        elif rank < size - 1:
            schedule.step()
        else:
            outputs = schedule.step(target=targets, losses=losses)
            torch.testing.assert_close(outputs, wanted_outputs, rtol=1e-13, atol=1e-13)
            torch.testing.assert_close(torch.stack(losses).mean().detach(), wanted_loss, rtol=1e-13, atol=0)
        _check_gradients(layers[rank], one[rank])


def test_two_stages_per_rank(several_ranks: None, rank: int, size: int) -> None:
    """Rank r holds the stages r and r + size."""
    layers = _layers(2 * size)
    one = copy.deepcopy(layers)
    mine = (rank, rank + size)
    stages = [PipelineStage(layers[index], index, 2 * size, torch.device("cpu")) for index in mine]
    batches = 2 * size
    schedule = ScheduleInterleaved1F1B(stages, batches, loss_fn=nn.functional.mse_loss)
    inputs, targets = (whole[: 2 * batches] for whole in _batch(0))
    _one_process(one, inputs, targets)
    if rank == 0:
        schedule.step(inputs)
    elif rank < size - 1:
        schedule.step()
    else:
        schedule.step(target=targets)
    for index in mine:
        _check_gradients(layers[index], one[index])


def test_stages_of_replicas(four_ranks: None) -> None:
    """Two pipelines of two stages; the gradients of a stage are averaged over its replicas."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    stage, replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    layers = _layers(2)
    one = copy.deepcopy(layers)
    ddp = DistributedDataParallel(layers[stage], process_group=mesh.get_group("dp"))
    schedule = Schedule1F1B(
        PipelineStage(ddp, stage, 2, torch.device("cpu"), group=mesh.get_group("pp")),
        BATCHES // 2,
        loss_fn=nn.functional.mse_loss,
    )
    inputs, targets = _batch(0)
    _one_process(one, inputs, targets)
    if stage == 0:
        schedule.step(inputs.chunk(2)[replica])
    else:
        schedule.step(target=targets.chunk(2)[replica])
    _check_gradients(ddp.module, one[stage])
    assert dist.get_world_size(mesh.get_group("pp")) == 2
