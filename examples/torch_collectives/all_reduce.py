"""All-reduce: every rank gets the sum, and the maximum, over all ranks.

    mpirun -np 3 python examples/torch_collectives/all_reduce.py              # torch.distributed, backend mpicoll
    mpirun -np 3 python examples/torch_collectives/all_reduce.py --drop-in    # mpicoll.torch in its place

Both print:

    rank 0: [1.0, 2.0] -> sum [6.0, 12.0], max [3.0, 6.0]
    rank 1: [2.0, 4.0] -> sum [6.0, 12.0], max [3.0, 6.0]
    rank 2: [3.0, 6.0] -> sum [6.0, 12.0], max [3.0, 6.0]
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

mine = torch.tensor([1.0, 2.0]) * (rank + 1)
total, largest = mine.clone(), mine.clone()
dist.all_reduce(total, op=dist.ReduceOp.SUM)  # in place
dist.all_reduce(largest, op=dist.ReduceOp.MAX)
say(f"{mine.tolist()} -> sum {total.tolist()}, max {largest.tolist()}")

dist.destroy_process_group()
