"""What torch's all_reduce costs on mpicoll and its peers: mpirun -np 2 python ci/overhead_torch.py

In turns, in blocks of calls that begin with a barrier, all on float32 CPU tensors, in place:

* native: ``mpicoll.allreduce(array, out=array)`` on a numpy array;
* drop-in: ``mpicoll.torch.all_reduce``;
* c10d: ``torch.distributed.all_reduce`` on a process group of mpicoll;
* minimal: the same on the least process group that can be written by hand, which knows nothing but float32 sums;
* gloo: the same on gloo.

Printed are medians over the blocks of rank 0, in microseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as stock
from mpi4py import MPI

import mpicoll
import mpicoll.torch as dist

BLOCKS, CALLS = 31, 300


def block(call: Callable[[], object], calls: int) -> float:
    """Microseconds per call."""
    MPI.COMM_WORLD.Barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls * 1e6


class Minimal(stock.ProcessGroup):
    """The yardstick."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._comm = MPI.COMM_WORLD.Dup()

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> None:
        if opts.asyncOp or opts.reduceOp != stock.ReduceOp.SUM:
            raise NotImplementedError
        tensor = tensors[0]
        memory = MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)
        self._comm.Allreduce(MPI.IN_PLACE, (memory, MPI.FLOAT), MPI.SUM)

    def getBackendName(self) -> str:  # noqa: N802  torch's name
        return "minimal"


def create(options: Any, backend_options: Any) -> Minimal:
    return Minimal(options.group_rank, options.group_size)


def main() -> None:
    stock.Backend.register_backend("minimal", create, extended_api=True, devices=["cpu"])
    dist.init_process_group()
    gloo, minimal = stock.new_group(backend="gloo"), stock.new_group(backend="minimal")
    if stock.get_rank() == 0:
        print(f"{'bytes':>10}{'native':>10}{'drop-in':>10}{'c10d':>10}{'minimal':>10}{'gloo':>10}", end="")
        print("   drop-in/native   c10d/minimal   c10d/gloo")
    for nbytes in (8, 1024, 16 * 1024, 256 * 1024, 4 * 1024 * 1024):
        tensor = torch.zeros(nbytes // 4)
        array = tensor.numpy()
        table: dict[str, Callable[[], object]] = {
            "native": lambda array=array: mpicoll.allreduce(array, out=array),
            "drop-in": lambda tensor=tensor: dist.all_reduce(tensor),
            "c10d": lambda tensor=tensor: stock.all_reduce(tensor),
            "minimal": lambda tensor=tensor: stock.all_reduce(tensor, group=minimal),
            "gloo": lambda tensor=tensor: stock.all_reduce(tensor, group=gloo),
        }
        times: dict[str, list[float]] = {name: [] for name in table}
        calls = max(3, CALLS * 1024 // (1024 + nbytes // 16))
        for _ in range(BLOCKS):
            for name, call in table.items():
                times[name].append(block(call, max(3, calls // 10) if name == "gloo" else calls))
        if stock.get_rank() == 0:
            seen = {name: median(values) for name, values in times.items()}
            print(f"{nbytes:10}" + "".join(f"{value:10.2f}" for value in seen.values()), end="")
            print(f"{seen['drop-in'] / seen['native']:17.2f}{seen['c10d'] / seen['minimal']:15.2f}", end="")
            print(f"{seen['c10d'] / seen['gloo']:12.4f}", flush=True)
    stock.destroy_process_group()


if __name__ == "__main__":
    main()
