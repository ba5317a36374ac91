"""FSDP2 and HSDP: sharded training ends with the parameters of one process that sees the whole batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(30)]

ROWS = 24  # of a whole batch: whole numbers of rows for 1, 2, 3 and 4 ranks
WIDTH = 12
CPU = torch.device("cpu")


def _model(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Layers of 12, 7 and 3 rows, which not all numbers of ranks divide."""
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def _sharded(model: nn.Sequential, **options: Any) -> FSDPModule:
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


def _batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(200 + step)
    return tuple(torch.randn(ROWS, width, generator=generator, dtype=torch.float64) for width in (6, 3))


def _share(whole: Tensor) -> Tensor:
    """This rank's rows."""
    return whole.chunk(dist.get_world_size())[dist.get_rank()]


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor) -> None:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()


def _train_both(one: nn.Module, sharded: nn.Module, steps: int = 3) -> None:
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.05) for model in (one, sharded)]
    for step in range(steps):
        inputs, targets = _batch(step)
        _step(one, optimizers[0], inputs, targets)
        _step(sharded, optimizers[1], _share(inputs), _share(targets))


def _check(sharded: nn.Module, one: nn.Module) -> None:
    whole = {name: parameter.full_tensor() for name, parameter in sharded.named_parameters()}
    torch.testing.assert_close(whole, dict(one.named_parameters()), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])
def test_fully_shard(size: int, reshard: bool) -> None:
    one = _model()
    sharded = _sharded(copy.deepcopy(one), mesh=init_device_mesh("cpu", (size,)), reshard_after_forward=reshard)
    weight = sharded[0].weight
    assert isinstance(weight, DTensor)
    assert weight.placements == (Shard(0),)
    assert torch.equal(weight.to_local(), _rows_of_rank(one[0].weight))
    _train_both(one, sharded)
    _check(sharded, one)


def _rows_of_rank(whole: Tensor) -> Tensor:
    chunks = whole.chunk(dist.get_world_size())
    return chunks[dist.get_rank()] if dist.get_rank() < len(chunks) else whole[:0]


def test_a_weight_sharded_by_columns(size: int) -> None:
    one = _model()
    sharded = copy.deepcopy(one)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (size,)), shard_placement_fn=_by_columns)
    assert sharded[2].weight.placements == (Shard(1),)
    _train_both(one, sharded)
    _check(sharded, one)


def _by_columns(parameter: nn.Parameter) -> Shard:
    # torch shards evenly only where it is not along rows; the layer of 12 columns is.
    return Shard(1 if parameter.ndim == 2 and parameter.shape[1] == WIDTH else 0)


def test_hybrid(four_ranks: None) -> None:
    """Replicas of two ranks, each of which holds half of every parameter."""
    one = _model()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    sharded = _sharded(copy.deepcopy(one), mesh=mesh)
    assert sharded[0].weight.placements == (Replicate(), Shard(0))
    assert torch.equal(sharded[0].weight.to_local(), one[0].weight.chunk(2)[dist.get_rank() % 2])
    _train_both(one, sharded)
    _check(sharded, one)


def test_gradients_accumulate_without_synchronisation(size: int) -> None:
    one = _model()
    sharded = _sharded(copy.deepcopy(one), mesh=init_device_mesh("cpu", (size,)))
    for step in range(3):
        inputs, targets = _batch(step)
        nn.functional.mse_loss(one(inputs), targets).backward()
        sharded.set_requires_gradient_sync(step == 2)
        nn.functional.mse_loss(sharded(_share(inputs)), _share(targets)).backward()
        assert (sharded[0].weight.grad is None) is (step < 2)
    grads = {name: parameter.grad.full_tensor() for name, parameter in sharded.named_parameters()}
    want = {name: parameter.grad for name, parameter in one.named_parameters()}
    torch.testing.assert_close(grads, want, rtol=1e-12, atol=1e-12)


def test_clipped_gradients(size: int) -> None:
    one = _model()
    sharded = _sharded(copy.deepcopy(one), mesh=init_device_mesh("cpu", (size,)))
    inputs, targets = _batch(0)
    nn.functional.mse_loss(one(inputs), targets).backward()
    nn.functional.mse_loss(sharded(_share(inputs)), _share(targets)).backward()
    norms = [nn.utils.clip_grad_norm_(model.parameters(), 0.1) for model in (one, sharded)]
    assert norms[0] > 0.1
    torch.testing.assert_close(norms[1].full_tensor(), norms[0], rtol=1e-12, atol=0)
    grads = [parameter.grad.full_tensor() for parameter in sharded.parameters()]
    torch.testing.assert_close(grads, [parameter.grad for parameter in one.parameters()], rtol=1e-12, atol=1e-12)


def test_mixed_precision(size: int) -> None:
    """Parameters travel in bfloat16, gradients in float32."""
    one = _model(torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    sharded = _sharded(copy.deepcopy(one), mesh=init_device_mesh("cpu", (size,)), mp_policy=policy)
    inputs, targets = _batch(0)
    nn.functional.mse_loss(sharded(_share(inputs)).float(), _share(targets).float()).backward()
    want = [torch.zeros_like(parameter) for parameter in one.parameters()]
    for some_inputs, some_targets in zip(inputs.chunk(size), targets.chunk(size), strict=True):
        low = copy.deepcopy(one).bfloat16()
        nn.functional.mse_loss(low(some_inputs.bfloat16()).float(), some_targets.float()).backward()
        for total, parameter in zip(want, low.parameters(), strict=True):
            total += parameter.grad.float() / size
    grads = [parameter.grad.full_tensor() for parameter in sharded.parameters()]
    torch.testing.assert_close(grads, want, rtol=1e-5, atol=1e-7)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_first_version() -> None:
    """It resizes the storages that collectives have written to."""
    one = _model()
    wrapped = [
        FullyShardedDataParallel(layer, device_id=CPU) for layer in copy.deepcopy(one) if list(layer.parameters())
    ]
    first, second, third = wrapped
    sharded = FullyShardedDataParallel(nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), third), device_id=CPU)
    _train_both(one, sharded)
    inputs, _ = _batch(9)
    torch.testing.assert_close(sharded(inputs), one(inputs), rtol=1e-11, atol=1e-11)
