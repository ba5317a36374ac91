"""Reduce-scatter: each rank gets its part of the sum over all ranks.

    mpirun -np 3 python examples/torch_collectives/reduce_scatter.py              # torch.distributed, backend mpicoll
    mpirun -np 3 python examples/torch_collectives/reduce_scatter.py --drop-in    # mpicoll.torch in its place

Both print:

    rank 0: [0, 1, 2, 3, 4, 5] -> [300, 303]
    rank 1: [100, 101, 102, 103, 104, 105] -> [306, 309]
    rank 2: [200, 201, 202, 203, 204, 205] -> [312, 315]
"""

import sys

import torch
from say import say

if "--drop-in" in sys.argv:
    import mpicoll.torch as dist
else:
    import torch.distributed as dist

dist.init_process_group("mpicoll")
rank, size = dist.get_rank(), dist.get_world_size()

mine = torch.arange(2 * size) + 100 * rank
part = torch.empty(2, dtype=torch.int64)
dist.reduce_scatter(part, list(mine.split(2)), op=dist.ReduceOp.SUM)  # a list with a tensor for each rank
say(f"{mine.tolist()} -> {part.tolist()}")

dist.destroy_process_group()
