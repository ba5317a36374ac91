"""All-reduces beside that of a contiguous float32 tensor of as many bytes: mpirun -np 2 python ci/allreduce_forms.py

* bfloat16, float16: tensors of these dtypes, which are reduced in float32;
* strided: float32 with every second element of a tensor as `out`.

All pass `out`. They run in turns, in blocks of calls that begin with a barrier, so that a drift of the machine meets
all of them. Printed are ratios of medians over the blocks, each the time of its slowest rank.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

import mpicoll
from mpicoll.cli import formatting

SIZES = (8, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
BLOCK = 4e-3  # seconds


def make_calls(nbytes: int) -> dict[str, Callable[[], object]]:
    calls: dict[str, Callable[[], object]] = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.ones(nbytes // dtype.itemsize, dtype=dtype)
        calls[str(dtype).removeprefix("torch.")] = partial(mpicoll.allreduce, x, out=torch.empty_like(x))
    x = torch.ones(nbytes // 4)
    calls["strided"] = partial(mpicoll.allreduce, x, out=torch.empty(2 * x.numel())[::2])
    for call in calls.values():
        result = call()
        assert isinstance(result, torch.Tensor)
        assert (result == mpicoll.world().size).all()
    return calls


def time_block(call: Callable[[], object], calls: int) -> float:
    mpicoll.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls


def time_in_turns(calls: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Return the median seconds of each call."""
    counts = {}
    for name, call in calls.items():
        time_block(call, 40)
        counts[name] = mpicoll.bcast_object(max(1, round(BLOCK / min(time_block(call, 3) for _ in range(3)))))
    blocks = mpicoll.bcast_object(max(11, round(seconds / (BLOCK * len(calls)))))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(blocks):
        for name, call in calls.items():
            times[name].append(time_block(call, counts[name]))
    return {name: median(map(max, zip(*mpicoll.allgather_object(own), strict=True))) for name, own in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0, help="to spend on each size (1)")
    options = parser.parse_args()
    rows = []
    for nbytes in SIZES:
        times = time_in_turns(make_calls(nbytes), options.seconds)
        rows.append([formatting.nbytes(nbytes), *(f"{one / times['float32']:.2f}" for one in list(times.values())[1:])])
    if mpicoll.world().rank == 0:
        table = Table("size", "bfloat16", "float16", "strided", title=f"{mpicoll.world().size} ranks, time / float32")
        for row in rows:
            table.add_row(*row)
        Console().print(table)


if __name__ == "__main__":
    main()
