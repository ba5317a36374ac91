"""DeviceMesh, DTensor and tensor parallelism, against plain tensors in one process."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(30)]


@pytest.fixture
def mesh(size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (size,))


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_mesh_of_two_dimensions(four_ranks: None, rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert list(mesh.get_coordinate()) == [rank // 2, rank % 2]
    for name, ranks in (("dp", [rank % 2, rank % 2 + 2]), ("tp", [rank // 2 * 2, rank // 2 * 2 + 1])):
        group = mesh.get_group(name)
        assert dist.get_process_group_ranks(group) == ranks
        assert mesh[name].get_local_rank() == ranks.index(rank)
        total = torch.tensor([float(rank)])
        dist.all_reduce(total, group=group)
        assert total.item() == sum(ranks)
    flat = mesh._flatten("all")
    total = torch.tensor([float(rank)])
    dist.all_reduce(total, group=flat.get_group())
    assert total.item() == 6


def test_mesh_of_existing_groups(size: int, rank: int) -> None:
    group = dist.new_group(list(range(size)))
    mesh = DeviceMesh.from_group(group, "cpu")
    whole = _random(2 * size, 3)
    assert torch.equal(distribute_tensor(whole, mesh, [Shard(0)]).to_local(), whole[2 * rank : 2 * rank + 2])
    dist.destroy_process_group(group)


@pytest.mark.parametrize("rows", [8, 5, 1, 0])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Shard(0), Replicate()),
        (Shard(1), Replicate()),
        (Shard(0), Shard(1)),
        (Shard(1), Shard(0)),
        (Replicate(), Shard(0)),
        (Partial(), Replicate()),
        (Partial("avg"), Replicate()),
        (Partial("max"), Replicate()),
        (Partial(), Shard(0)),
        (Partial(), Shard(1)),
    ],
    ids=lambda placement: str(placement).replace(" ", ""),
)
def test_redistribute(mesh: DeviceMesh, size: int, rank: int, before, after, rows: int) -> None:
    parts = torch.stack([_random(rows, 6, seed=seed) for seed in range(size)])
    if before.is_partial():
        reduce = {"sum": lambda t: t.sum(0), "avg": lambda t: t.mean(0), "max": lambda t: t.amax(0)}[before.reduce_op]
        whole = reduce(parts)
        start = DTensor.from_local(parts[rank].clone(), mesh, [before])
    else:
        whole = parts[0]
        start = distribute_tensor(whole.clone(), mesh, [before])
    end = start.redistribute(mesh, [after])
    assert end.placements == (after,)
    want = whole
    if after.is_shard():
        chunks = whole.chunk(size, after.dim)
        want = chunks[rank] if rank < len(chunks) else whole.narrow(after.dim, 0, 0)
    torch.testing.assert_close(end.to_local(), want, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(end.full_tensor(), whole, rtol=1e-14, atol=1e-14)


def test_redistribute_on_two_dimensions(four_ranks: None, rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    whole = _random(6, 10)
    tensor = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    assert torch.equal(tensor.to_local(), whole.chunk(2)[rank // 2].chunk(2, 1)[rank % 2])
    for placements in ([Shard(1), Shard(0)], [Replicate(), Shard(0)], [Shard(0), Shard(0)], [Shard(1), Replicate()]):
        tensor = tensor.redistribute(mesh, placements)
        assert tensor.placements == tuple(placements)
        assert torch.equal(tensor.full_tensor(), whole)


@pytest.mark.parametrize(
    ("left", "right"), [(Shard(0), Replicate()), (Shard(1), Shard(0)), (Replicate(), Shard(1)), (Shard(0), Shard(1))]
)
def test_product_and_its_gradients(mesh: DeviceMesh, left: Shard, right: Shard) -> None:
    wholes = [_random(5, 7).requires_grad_(), _random(7, 6, seed=1).requires_grad_()]
    factors = [distribute_tensor(whole, mesh, [place]) for whole, place in zip(wholes, (left, right), strict=True)]
    factors = [factor.detach().requires_grad_() for factor in factors]
    product = (factors[0] @ factors[1]).tanh()
    product.square().sum().backward()
    want = (wholes[0] @ wholes[1]).tanh()
    want.square().sum().backward()
    torch.testing.assert_close(product.full_tensor(), want, rtol=1e-13, atol=1e-13)
    for factor, whole in zip(factors, wholes, strict=True):
        torch.testing.assert_close(factor.grad.full_tensor(), whole.grad, rtol=1e-13, atol=1e-13)


class _Block(nn.Module):
    """The feed-forward half of a transformer block, with a head of `classes`."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 24)
        self.down = nn.Linear(24, 8)
        self.head = nn.Linear(8, classes)
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(inputs + self.down(self.up(self.norm(inputs)).relu()))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor) -> float:
    optimizer.zero_grad()
    loss = model(inputs).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def _whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
        for name, parameter in model.named_parameters()
    }


COLUMNS_THEN_ROWS = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def test_tensor_parallel(mesh: DeviceMesh, size: int) -> None:
    one = _Block(classes=5)
    model = parallelize_module(copy.deepcopy(one), mesh, COLUMNS_THEN_ROWS)
    assert model.up.weight.placements == (Shard(0),)
    assert model.up.weight.to_local().shape == (24 // size, 8)
    assert model.down.weight.placements == (Shard(1),)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5, foreach=False) for each in (one, model)]
    for step in range(3):
        inputs = _random(4, 6, 8, seed=step)
        losses = [_step(each, optimizer, inputs) for each, optimizer in zip((one, model), optimizers, strict=True)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-12)
    torch.testing.assert_close(_whole_parameters(model), _whole_parameters(one), rtol=1e-12, atol=1e-12)


def test_sequence_parallel(mesh: DeviceMesh) -> None:
    """The sequence is split before the first layer, gathered for the products and scattered again after them."""
    one = _Block(classes=5)
    plan = {
        "": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    model = parallelize_module(copy.deepcopy(one), mesh, plan)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5, foreach=False) for each in (one, model)]
    for step in range(3):
        inputs = _random(2, 12, 8, seed=step)  # a sequence of 12: whole numbers of steps for 1 to 4 ranks
        losses = [_step(each, optimizer, inputs) for each, optimizer in zip((one, model), optimizers, strict=True)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-12)
    torch.testing.assert_close(_whole_parameters(model), _whole_parameters(one), rtol=1e-12, atol=1e-12)


def test_loss_parallel(mesh: DeviceMesh) -> None:
    """Cross entropy of classes that are spread over the ranks."""
    one = _Block(classes=12)
    head = ColwiseParallel(use_local_output=False)
    model = parallelize_module(copy.deepcopy(one), mesh, {**COLUMNS_THEN_ROWS, "head": head})
    inputs, targets = _random(10, 8), torch.arange(10) % 12
    want = nn.functional.cross_entropy(one(inputs), targets)
    want.backward()
    with loss_parallel():
        logits = model(inputs)
        assert logits.placements == (Shard(1),)
        loss = nn.functional.cross_entropy(logits, targets)
        loss.backward()
    torch.testing.assert_close(loss.full_tensor(), want, rtol=1e-13, atol=0)
    grads = [parameter.grad for parameter in model.parameters()]
    grads = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads]
    torch.testing.assert_close(grads, [parameter.grad for parameter in one.parameters()], rtol=1e-12, atol=1e-12)


def test_tensor_parallel_and_fully_sharded(four_ranks: None) -> None:
    one = _Block(classes=5)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(copy.deepcopy(one), mesh["tp"], COLUMNS_THEN_ROWS)
    fully_shard(model.head, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    assert model.up.weight.device_mesh.ndim == 2
    assert model.down.weight.to_local().shape == (4, 12)
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01, foreach=False) for each in (one, model)]
    for step in range(3):
        inputs = _random(8, 8, seed=step)
        _step(one, optimizers[0], inputs)
        _step(model, optimizers[1], inputs.chunk(2)[mesh["dp"].get_local_rank()])
    torch.testing.assert_close(_whole_parameters(model), _whole_parameters(one), rtol=1e-11, atol=1e-11)
