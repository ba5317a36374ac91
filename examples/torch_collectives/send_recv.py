"""Send and receive: a tensor goes from rank to rank, and each adds its own number.

    mpirun -np 3 python examples/torch_collectives/send_recv.py              # torch.distributed, backend mpicoll
    mpirun -np 3 python examples/torch_collectives/send_recv.py --drop-in    # mpicoll.torch in its place

Both print:

    rank 0: [10, 0, 0]
    rank 1: [10, 11, 0]
    rank 2: [10, 11, 12]
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

tensor = torch.zeros(size, dtype=torch.int64)
if rank > 0:
    dist.recv(tensor, src=rank - 1)  # returns when the tensor has been filled
tensor[rank] = 10 + rank
if rank < size - 1:
    dist.send(tensor, dst=rank + 1)  # returns when the tensor may be changed
say(tensor.tolist())

dist.destroy_process_group()
