"""What a data-parallel step costs, by DistributedOptimizer and by DDP: mpirun -np 2 python ci/data_parallel.py

A step is ``zero_grad``, forward, backward and SGD's ``step`` on a batch of this rank, of the same float32 model, by

* helpers: ``mpicoll.parallel.DistributedOptimizer`` on mpicoll's world, without a process group;
* DDP: ``DistributedDataParallel`` on a process group of mpicoll, and the plain optimizer;
* views: the same with ``gradient_as_bucket_view=True``.

The parameters of all are compared first. Then they run in turns, in blocks of steps that begin with a barrier, so that
a drift of the machine meets all of them. Printed are medians over the blocks of rank 0, in milliseconds.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import mpicoll
import mpicoll.torch
from mpicoll.parallel import DistributedOptimizer


class Case(NamedTuple):
    """A multilayer perceptron of `layers` square layers of `width`, and its batch."""

    layers: int
    width: int
    batch: int
    blocks: int
    steps: int


CASES = [Case(2, 64, 32, 41, 50), Case(32, 64, 32, 41, 15), Case(4, 512, 32, 31, 10), Case(6, 2048, 16, 15, 2)]

Step = Callable[[], Tensor]


def make_step(model: nn.Module, optimizer: Any, x: Tensor) -> Step:
    def step() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def make_steps(case: Case) -> dict[str, tuple[nn.Module, Step]]:
    torch.manual_seed(0)
    plain = nn.Sequential(*(one for _ in range(case.layers) for one in (nn.Linear(case.width, case.width), nn.Tanh())))
    random = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(case.batch, case.width, generator=random)
    steps = {}
    for name in ("helpers", "DDP", "views"):
        model = copy.deepcopy(plain)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
        if name == "helpers":
            optimizer = DistributedOptimizer(optimizer, model.named_parameters(), group=mpicoll.world())
            steps[name] = model, make_step(model, optimizer, x)
        else:
            parallel = DistributedDataParallel(model, gradient_as_bucket_view=name == "views")
            steps[name] = model, make_step(parallel, optimizer, x)
    return steps


def measure(case: Case) -> dict[str, float]:
    """Return the milliseconds of a step of each kind."""
    steps = make_steps(case)
    for _, step in steps.values():
        for _ in range(3):
            step()
    reference = list(steps["DDP"][0].parameters())
    for model, _ in steps.values():
        torch.testing.assert_close(list(model.parameters()), reference)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(case.blocks):
        for name, (_, step) in steps.items():
            mpicoll.barrier()
            begin = time.perf_counter()
            for _ in range(case.steps):
                step()
            times[name].append((time.perf_counter() - begin) / case.steps * 1e3)
    return {name: median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="What a data-parallel step costs, by DistributedOptimizer and by DDP.")
    parser.parse_args()
    torch.set_num_threads(1)
    mpicoll.torch.init_process_group()
    table = Table("layers x width", title=f"a step on {dist.get_world_size()} ranks: ms (ratio to DDP)")
    for name in ("parameters", "helpers", "DDP", "views"):
        table.add_column(name, justify="right")
    for case in CASES:
        seen = measure(case)
        figures = [f"{value:.3f} ({value / seen['DDP']:.2f})" for value in seen.values()]
        parameters = case.layers * (case.width + 1) * case.width
        table.add_row(f"{case.layers} x {case.width}", f"{parameters:,}", *figures)
    if dist.get_rank() == 0:
        Console(width=100, color_system=None).print(table)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
