"""All-gather: every rank gets a tensor of each rank.

    mpirun -np 3 python examples/torch_collectives/all_gather.py              # torch.distributed, backend mpicoll
    mpirun -np 3 python examples/torch_collectives/all_gather.py --drop-in    # mpicoll.torch in its place

Both print:

    rank 0: [0, 0] -> [[0, 0], [1, 1], [2, 4]]
    rank 1: [1, 1] -> [[0, 0], [1, 1], [2, 4]]
    rank 2: [2, 4] -> [[0, 0], [1, 1], [2, 4]]
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

mine = torch.tensor([rank, rank**2])
everyone = [torch.empty_like(mine) for _ in range(size)]
dist.all_gather(everyone, mine)
say(f"{mine.tolist()} -> {[tensor.tolist() for tensor in everyone]}")

dist.destroy_process_group()
