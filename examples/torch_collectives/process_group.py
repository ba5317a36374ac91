"""Process group: who takes part, and smaller groups.

    mpirun -np 3 python examples/torch_collectives/process_group.py              # torch.distributed, backend mpicoll
    mpirun -np 3 python examples/torch_collectives/process_group.py --drop-in    # mpicoll.torch in its place

Without mpirun it is a world of one rank; so it is for the other examples. Both ways print:

    rank 0: 0 of 3 in the world, 0 of 2 among the even ones
    rank 1: 1 of 3 in the world, not among the even ones
    rank 2: 2 of 3 in the world, 1 of 2 among the even ones
"""

import sys

from say import say

if "--drop-in" in sys.argv:
    import mpicoll.torch as dist
else:
    import torch.distributed as dist

dist.init_process_group("mpicoll")
rank, size = dist.get_rank(), dist.get_world_size()

# Every rank makes the group, also those that are not in it.
even = dist.new_group(range(0, size, 2))
if rank % 2 == 0:
    place = f"{dist.get_rank(even)} of {dist.get_world_size(even)} among the even ones"
else:
    place = "not among the even ones"
say(f"{rank} of {size} in the world, {place}")

dist.destroy_process_group()
