"""What a tensor-parallel layer costs, forward and backward: mpirun -np 2 python ci/tensor_parallel.py

The same float32 model, cut in the same way, by

* mpicoll: ``mpicoll.parallel.shard_``;
* torch on mpicoll: ``torch.distributed.tensor.parallel.parallelize_module`` on a process group of mpicoll;
* torch on gloo: the same on one of gloo.

First each one's output and gradients are compared with the plain model's. Then they run in turns, in blocks of calls
that begin with a barrier, so that a drift of the machine meets all of them. They wait differently: gloo's threads sleep
on sockets, mpicoll polls for a moment and then yields; none works while another has its turn. Printed are medians over
the blocks of rank 0, in milliseconds. ``--only "torch on gloo"`` runs one by itself.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from mpi4py import MPI
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

import mpicoll.torch
from mpicoll.parallel.layers import shard_
from mpicoll.parallel.shards import get_shard

HEAD = 64
PLAN = {"qkv": "column", "proj": "row", "fc1": "column", "fc2": "row"}


class MLP(nn.Module):
    def __init__(self, h: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc2(functional.gelu(self.fc1(x)))
        return y


class Block(nn.Module):
    """Of a transformer; query, key and value are one matrix, its rows ordered by head."""

    def __init__(self, h: int) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.proj = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.fc1, self.fc2 = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.ln1(x))
        s, b, features = qkv.shape
        q, k, v = qkv.view(s, b, features // (3 * HEAD), 3, HEAD).permute(3, 1, 2, 0, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.permute(2, 0, 1, 3).reshape(s, b, features // 3))
        return x + self.fc2(functional.gelu(self.fc1(self.ln2(x))))


class Case(NamedTuple):
    model: type[nn.Module]
    sequence: int
    batch: int
    hidden: int
    blocks: int
    calls: int


CASES = [
    Case(MLP, 1, 1, 512, 41, 20),
    Case(MLP, 256, 1, 512, 31, 3),
    Case(MLP, 1024, 1, 1024, 9, 1),
    Case(Block, 1, 1, 512, 41, 10),
    Case(Block, 256, 1, 512, 31, 2),
    Case(Block, 256, 2, 1024, 9, 1),
]


def by_torch(plain: nn.Module, mesh: DeviceMesh) -> nn.Module:
    styles = {"column": ColwiseParallel, "row": RowwiseParallel}
    names = dict(plain.named_children())
    return parallelize_module(plain, mesh, {name: styles[what]() for name, what in PLAN.items() if name in names})


def by_mpicoll(plain: nn.Module) -> nn.Module:
    names = dict(plain.named_children())
    return shard_(plain, {name: what for name, what in PLAN.items() if name in names})


def whole(param: Tensor, grad: Tensor) -> Tensor:
    if isinstance(grad, DTensor):
        return grad.full_tensor()
    shard = get_shard(param)
    if shard is None:
        return grad
    parts = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, grad)
    return torch.cat(parts, shard.dim)


def compare(name: str, plain: nn.Module, model: nn.Module, x: Tensor, grad: Tensor) -> None:
    """Raise unless `model` computes what `plain` does, and its gradients."""
    results = []
    for one in (plain, model):
        own = x.clone().requires_grad_()
        out = one(own)
        out.backward(grad)
        grads = {key: whole(param, param.grad) for key, param in one.named_parameters() if param.grad is not None}
        assert own.grad is not None
        results.append({"output": out.detach(), "gradient of the input": own.grad, **grads})
        one.zero_grad()
    assert results[0].keys() == results[1].keys(), name
    for key, wanted in results[0].items():
        error = ((results[1][key] - wanted).norm() / wanted.norm()).item()
        if not error < 1e-5:
            raise SystemExit(f"{name}: {key} of {type(plain).__name__} differs by {error:.1e} of its norm")


def block(step: Callable[[], None], calls: int) -> float:
    """Milliseconds per call."""
    MPI.COMM_WORLD.Barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        step()
    return (time.perf_counter() - begin) / calls * 1e3


def stepper(model: nn.Module, x: Tensor, grad: Tensor) -> Callable[[], None]:
    own = x.clone().requires_grad_()

    def step() -> None:
        own.grad = None
        model.zero_grad()
        out = model(own)
        # torch waits for the last all-reduce when the result is read.
        if isinstance(out, AsyncCollectiveTensor):
            out.wait()
        out.backward(grad)

    return step


def measure(case: Case, gloo: DeviceMesh, ours: DeviceMesh, only: str) -> dict[str, float]:
    torch.manual_seed(0)
    plain = case.model(case.hidden)
    x = torch.randn(case.sequence, case.batch, case.hidden)
    grad = torch.randn_like(x)
    makers: dict[str, Callable[[nn.Module], nn.Module]] = {
        "mpicoll": by_mpicoll,
        "torch on mpicoll": lambda plain: by_torch(plain, ours),
        "torch on gloo": lambda plain: by_torch(plain, gloo),
    }
    models = {name: make(copy.deepcopy(plain)) for name, make in makers.items() if only in ("", name)}
    for name, model in models.items():
        compare(name, plain, model, x, grad)
    steps = {name: stepper(model, x, grad) for name, model in models.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(case.blocks + 2):
        for name, step in steps.items():
            taken = block(step, case.calls)
            if number >= 2:
                times[name].append(taken)
    return {name: median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="What a tensor-parallel layer costs, on mpicoll and on gloo.")
    parser.add_argument("--only", default="", choices=["mpicoll", "torch on mpicoll", "torch on gloo"])
    only = parser.parse_args().only
    torch.set_num_threads(1)
    mpicoll.torch.init_process_group()
    size = dist.get_world_size()
    ours = dist.init_device_mesh("cpu", (size,))
    gloo = DeviceMesh.from_group(dist.new_group(backend="gloo"), "cpu")
    table = Table("model", "s x b x h", title=f"forward and backward on {size} ranks: ms (ratio to the last)")
    for case in CASES:
        seen = measure(case, gloo, ours, only)
        if not table.rows:
            for name in seen:
                table.add_column(name, justify="right")
        *_, last = seen.values()
        figures = [f"{value:.2f} ({value / last:.2f})" for value in seen.values()]
        table.add_row(case.model.__name__, f"{case.sequence} x {case.batch} x {case.hidden}", *figures)
    if dist.get_rank() == 0:
        Console(width=120, color_system=None).print(table)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
