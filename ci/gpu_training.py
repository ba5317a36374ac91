"""What a step of training on a GPU costs, by DDP and FSDP2: mpirun -np 4 python ci/gpu_training.py

The model is a transformer encoder in float32, the batch 8 sequences of 64 places for each rank. A step is
``zero_grad``, forward, backward and SGD's ``step``; the times of a block end when the device has completed it. Compared
are

* alone: without synchronisation, which is the bound; ranks that share a device compute in turns;
* DDP and FSDP2 on a process group of mpicoll, and of gloo.

Kinds take turns in blocks of steps that begin with a barrier. Printed are the medians over the blocks of the slowest
rank, in milliseconds, and the largest difference between the losses of DDP and FSDP2 and those of one process that
computes the batches of all ranks.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import mpicoll
import mpicoll.torch

PLACES, SEQUENCES = 64, 8


def make_model(width: int, layers: int, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    # Without dropout, so that all kinds compute the same losses.
    layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).to(device)


def make_batch(rank: int, step: int, width: int, device: torch.device) -> Tensor:
    random = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(SEQUENCES, PLACES, width, generator=random).to(device)


def make_step(model: nn.Module) -> Callable[[Tensor], Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def shard(model: nn.Module, group: Any, kind: str) -> nn.Module:
    mesh = DeviceMesh.from_group(group, kind)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def make_steps(plain: nn.Module, device: torch.device, backends: list[str]) -> dict[str, Callable[[Tensor], Tensor]]:
    steps = {"alone": make_step(copy.deepcopy(plain))}
    for backend in backends:
        group = dist.group.WORLD if backend == "mpicoll" else dist.new_group(backend=backend)
        ids = [device.index] if device.type == "cuda" else None
        ddp = DistributedDataParallel(copy.deepcopy(plain), device_ids=ids, process_group=group)
        steps[f"DDP on {backend}"] = make_step(ddp)
        steps[f"FSDP2 on {backend}"] = make_step(shard(copy.deepcopy(plain), group, device.type))
    return steps


def compare_losses(plain: nn.Module, steps: dict[str, Callable[[Tensor], Tensor]], device: torch.device) -> float:
    """Return the largest difference between the mean losses of five steps and those of one process, relative to the
    latter."""
    rank, size = dist.get_rank(), dist.get_world_size()
    width = plain.layers[0].linear1.in_features
    alone = make_step(copy.deepcopy(plain))
    worst = 0.0
    for number in range(5):
        batches = [make_batch(one, number, width, device) for one in range(size)]
        expected = alone(torch.cat(batches))
        for name, step in steps.items():
            if name != "alone":
                loss = step(batches[rank])
                dist.all_reduce(loss, dist.ReduceOp.AVG)
                worst = max(worst, abs(float(loss / expected) - 1))
    return worst


def measure(steps: dict[str, Callable[[Tensor], Tensor]], x: Tensor, blocks: int, count: int) -> dict[str, float]:
    """Return the milliseconds of a step of each kind."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for block in range(blocks + 1):
        for name, step in steps.items():
            finish(x)
            mpicoll.barrier()
            begin = time.perf_counter()
            for _ in range(count):
                step(x)
            finish(x)
            if block:  # the first one makes buckets and compiles kernels
                times[name].append((time.perf_counter() - begin) / count * 1e3)
    return {name: float(mpicoll.allreduce(median(values), "max")) for name, values in times.items()}


def finish(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)


def main() -> None:
    parser = argparse.ArgumentParser(description="What a step of training on a GPU costs, by DDP and FSDP2.")
    parser.add_argument("--models", default="256x4,1024x8", help="width x layers of each model (%(default)s)")
    parser.add_argument("--backends", default="mpicoll,gloo", help="to compare (%(default)s)")
    parser.add_argument("--blocks", type=int, default=5, help="of steps of each kind (%(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="in a block (%(default)s)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="(%(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    mpicoll.torch.init_process_group()
    device = torch.device("cpu")
    if arguments.device == "cuda":
        device = torch.device("cuda", dist.get_node_local_rank(0) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    rank = dist.get_rank()
    for text in arguments.models.split(","):
        width, layers = map(int, text.split("x"))
        plain = make_model(width, layers, device)
        steps = make_steps(plain, device, arguments.backends.split(","))
        difference = compare_losses(plain, steps, device)
        seen = measure(steps, make_batch(rank, 0, width, device), arguments.blocks, arguments.steps)
        if rank == 0:
            parameters = sum(one.numel() for one in plain.parameters())
            print(f"{text}, {parameters:,} parameters, {dist.get_world_size()} ranks: ms of a step")
            for name, value in seen.items():
                print(f"  {name:20} {value:10.2f}")
            print(f"  losses differ by at most {difference:.1e} from those of one process", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
