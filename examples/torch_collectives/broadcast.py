"""Broadcast: every rank gets the tensor of rank 0.

    mpirun -np 3 python examples/torch_collectives/broadcast.py              # torch.distributed, backend mpicoll
    mpirun -np 3 python examples/torch_collectives/broadcast.py --drop-in    # mpicoll.torch in its place

Both print:

    rank 0: [5, 6, 7] -> [5, 6, 7]
    rank 1: [0, 0, 0] -> [5, 6, 7]
    rank 2: [0, 0, 0] -> [5, 6, 7]
"""

import sys

import torch
from say import say

if "--drop-in" in sys.argv:
    import mpicoll.torch as dist
else:
    import torch.distributed as dist

dist.init_process_group("mpicoll")
rank = dist.get_rank()

tensor = torch.tensor([5, 6, 7]) if rank == 0 else torch.zeros(3, dtype=torch.int64)
before = tensor.tolist()
dist.broadcast(tensor, src=0)  # in place: every rank passes a tensor of the same shape and dtype
say(f"{before} -> {tensor.tolist()}")

dist.destroy_process_group()
