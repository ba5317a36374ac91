"""torch.compile of training steps that contain collectives."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import mpicoll.torch

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.every_size,
    pytest.mark.timeout(120),  # inductor starts with an empty cache: its C++ compiler has most of the work
    # New names came with torch 2.13; the old ones are those of all versions.
    pytest.mark.filterwarnings("ignore:`torch.distributed._functional_collectives:FutureWarning"),
    # What torch.compile imports still uses these.
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]

# About the graphs that it breaks, and the tensors that it finds then.
DYNAMO_WARNS = pytest.mark.filterwarnings(
    "ignore:Dynamo does not know how to trace:UserWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning",
)

ROWS = 12  # of a whole batch: whole numbers of rows for 1, 2, 3 and 4 ranks


@pytest.fixture(scope="module")
def cache(module_folder: Path) -> Iterator[None]:
    """An empty cache that the ranks share, so that one of them compiles what all need."""
    # Compiling in this process spares the pool of processes that inductor would start for each rank.
    with fresh_cache(dir=module_folder, delete=False), torch._inductor.config.patch(compile_threads=1):
        yield


@pytest.fixture(autouse=True)
def fresh(size: int, pytestconfig: pytest.Config) -> Iterator[None]:
    """No test finds what another one compiled."""
    if size > 3 and pytestconfig.getoption("--tier") != "long":
        pytest.skip("what is compiled depends little on the number of ranks: at two and three only")
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=["aot_eager", "inductor"])
def compiler(request: pytest.FixtureRequest, size: int) -> str:
    """A backend of torch.compile."""
    if request.param == "inductor":
        if shutil.which("g++") is None and shutil.which("clang++") is None:
            pytest.skip("inductor needs a C++ compiler")
        if size != 2:
            pytest.skip("inductor runs a C++ compiler, which takes its time: at two ranks only")
        request.getfixturevalue("cache")
    return request.param


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _functional_loss(inputs: Tensor, weight: Tensor) -> Tensor:
    hidden = functional.all_gather_tensor_autograd((inputs @ weight).tanh(), 0, dist.group.WORLD)
    piece = functional.reduce_scatter_tensor_autograd(hidden * hidden, "sum", 0, dist.group.WORLD)
    swapped = functional.all_to_all_single_autograd(piece, None, None, dist.group.WORLD)
    return (swapped * inputs[:, :3]).sum()


def test_functional_collectives(rank: int, size: int, compiler: str) -> None:
    inputs = [_random(2 * size, 4, seed=other) for other in range(size)]
    weights = [_random(4, 3, seed=10 + other).requires_grad_() for other in range(size)]
    pieces = [size * (x @ weight).tanh().square() for x, weight in zip(inputs, weights, strict=True)]
    swapped = [torch.cat([piece.chunk(size)[other] for piece in pieces]) for other in range(size)]
    losses = [(part * x[:, :3]).sum() for part, x in zip(swapped, inputs, strict=True)]
    sum(losses).backward()
    mine = weights[rank].detach().requires_grad_()
    loss = torch.compile(_functional_loss, backend=compiler, fullgraph=True)(inputs[rank], mine)
    loss.backward()
    torch.testing.assert_close(loss, losses[rank], rtol=1e-13, atol=0)
    torch.testing.assert_close(mine.grad, weights[rank].grad, rtol=1e-13, atol=1e-13)
    assert counters["stats"]["unique_graphs"] == 1


def _in_place(x: Tensor) -> Tensor:
    total = x * 2
    dist.all_reduce(total)
    gathered = x.new_empty(dist.get_world_size() * len(x))
    dist.all_gather_into_tensor(gathered, total * x)
    piece = torch.empty_like(x)
    dist.reduce_scatter_tensor(piece, gathered.sin())
    return piece + total


def test_collectives_of_distributed_in_one_graph(rank: int, size: int) -> None:
    """torch replaces these by functional ones."""
    parts = _random(size, 6, seed=1)
    got = torch.compile(_in_place, backend="aot_eager", fullgraph=True)(parts[rank])
    total = parts.sum(0) * 2
    torch.testing.assert_close(got, size * (total * parts[rank]).sin() + total, rtol=1e-13, atol=1e-13)


def _broken_graph(x: Tensor) -> Tensor:
    rank, size = dist.get_rank(), dist.get_world_size()
    total = x * 2
    dist.all_reduce(total, async_op=True).wait()
    first = x + total
    dist.broadcast(first, 0)
    every = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(every, first * x)
    dist.barrier()
    maximum = torch.stack(every).sum(0)
    dist.all_reduce(maximum, dist.ReduceOp.MAX)
    left = torch.empty_like(x)
    sent = dist.isend(x.sin(), (rank + 1) % size)
    dist.recv(left, (rank - 1) % size)
    sent.wait()
    return first + maximum * left


@DYNAMO_WARNS
def test_collectives_that_break_the_graph(rank: int, size: int) -> None:
    """The compiler must not look into the backend, which it could where that is written in Python."""
    parts = _random(size, 6, seed=2)
    got = torch.compile(_broken_graph, backend="aot_eager")(parts[rank])
    first = parts[0] + parts.sum(0) * 2
    want = first + (first * parts).sum(0) * parts[rank - 1].sin()
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)
    # Those between the breaks, and none of the backend.
    assert 1 < counters["stats"]["unique_graphs"] < 10


@DYNAMO_WARNS
def test_differentiable_collectives(rank: int, size: int) -> None:
    """They break the graph, too, and take the process group."""

    def function(x: Tensor) -> Tensor:
        whole = (
            mpicoll.torch.autograd.all_reduce(x * 2) * mpicoll.torch.autograd.all_gather_single(x, group=group).sum()
        )
        return whole + mpicoll.torch.autograd.all_reduce(x, group=mpicoll.torch.communicator(group))

    group = dist.distributed_c10d._get_default_group()
    parts = _random(size, 6, seed=3)
    x = parts[rank].clone().requires_grad_()
    got = torch.compile(function, backend="aot_eager")(x)
    total = parts.sum(0)
    torch.testing.assert_close(got.detach(), total * 2 * parts.sum() + total, rtol=1e-12, atol=1e-12)
    got.sum().backward()
    want = size * (2 * parts.sum() + 2 * total.sum() + 1)
    torch.testing.assert_close(x.grad, want.expand(6), rtol=1e-12, atol=1e-12)


class _Model(nn.Module):
    """A class of its own, because dynamo skips the methods of torch's classes once it left the first graph."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.up, self.down, self.head = nn.Linear(6, 24), nn.Linear(24, 6), nn.Linear(6, 3)
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.down(self.up(inputs).tanh()).tanh())


def _train_both(one: nn.Module, model: Callable[[Tensor], Tensor], parameters: list[Tensor], *, split: bool) -> None:
    """Three steps of each; the second model sees its rank's rows only if they are `split`."""
    optimizers = [torch.optim.SGD(each, lr=0.2, foreach=False) for each in (list(one.parameters()), parameters)]
    for step in range(3):
        whole = _random(ROWS, 6, seed=20 + step)
        mine = whole.chunk(dist.get_world_size())[dist.get_rank()] if split else whole
        for each, optimizer, inputs in ((one, optimizers[0], whole), (model, optimizers[1], mine)):
            optimizer.zero_grad()
            each(inputs).square().mean().backward()
            optimizer.step()
    whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in parameters]
    torch.testing.assert_close(whole, list(one.parameters()), rtol=1e-12, atol=1e-12)
    assert counters["stats"]["unique_graphs"] > 0


def test_ddp() -> None:
    one, ddp = _Model(), DistributedDataParallel(_Model())
    _train_both(one, torch.compile(ddp, backend="aot_eager"), list(ddp.parameters()), split=True)


@DYNAMO_WARNS
def test_fully_sharded(size: int) -> None:
    one, model = _Model(), _Model()
    mesh = init_device_mesh("cpu", (size,))
    for layer in (model.up, model.down, model.head):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    _train_both(one, torch.compile(model, backend="aot_eager"), list(model.parameters()), split=True)


def test_tensor_parallel(size: int) -> None:
    one, model = _Model(), _Model()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (size,)), plan)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    _train_both(one, compiled, list(model.parameters()), split=False)
