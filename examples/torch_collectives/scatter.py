"""Scatter: rank 0 deals out a list of tensors, one to each rank.

    mpirun -np 3 python examples/torch_collectives/scatter.py              # torch.distributed, backend mpicoll
    mpirun -np 3 python examples/torch_collectives/scatter.py --drop-in    # mpicoll.torch in its place

Both print:

    rank 0: [0, 1]
    rank 1: [2, 3]
    rank 2: [4, 5]
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

hand = torch.empty(2, dtype=torch.int64)
deck = list(torch.arange(2 * size).split(2)) if rank == 0 else None  # a tensor for each rank, also for rank 0 itself
dist.scatter(hand, deck, src=0)
say(hand.tolist())

dist.destroy_process_group()
