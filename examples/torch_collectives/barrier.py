"""Barrier: no rank continues before all ranks have arrived.

    mpirun -np 3 python examples/torch_collectives/barrier.py              # torch.distributed, backend mpicoll
    mpirun -np 3 python examples/torch_collectives/barrier.py --drop-in    # mpicoll.torch in its place

Both print:

    the first of 3 left after the last had come: True
"""

import sys
import time

if "--drop-in" in sys.argv:
    import mpicoll.torch as dist
else:
    import torch.distributed as dist

dist.init_process_group("mpicoll")
rank, size = dist.get_rank(), dist.get_world_size()

time.sleep(0.2 * rank)  # rank 0 comes first
came = time.time()
dist.barrier()
left = time.time()

times = [None] * size
dist.all_gather_object(times, (came, left))
last_came, first_left = max(came for came, _ in times), min(left for _, left in times)
if rank == 0:
    print(f"the first of {size} left after the last had come: {last_came <= first_left}")

dist.destroy_process_group()
