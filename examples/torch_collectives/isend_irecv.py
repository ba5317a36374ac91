"""Isend and irecv: swap tensors with the neighbours on both sides, and do something meanwhile.

    mpirun -np 3 python examples/torch_collectives/isend_irecv.py              # torch.distributed, backend mpicoll
    mpirun -np 3 python examples/torch_collectives/isend_irecv.py --drop-in    # mpicoll.torch in its place

Both print:

    rank 0: own sum 0, of the neighbours [2]
    rank 1: own sum 2, of the neighbours [0, 6]
    rank 2: own sum 6, of the neighbours [2]
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
neighbours = [other for other in (rank - 1, rank + 1) if 0 <= other < size]
theirs = {other: torch.empty_like(mine) for other in neighbours}

# These calls return at once. With recv and send in their place, every rank would wait for another one.
works = [dist.irecv(tensor, src=other) for other, tensor in theirs.items()]
works += [dist.isend(mine, dst=other) for other in neighbours]
own = mine.sum().item()
for work in works:
    work.wait()  # only now may the tensors be looked at, or changed
say(f"own sum {own}, of the neighbours {[tensor.sum().item() for tensor in theirs.values()]}")

dist.destroy_process_group()
