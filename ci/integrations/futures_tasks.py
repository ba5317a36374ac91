"""Tasks of mpi4py.futures between collectives of mpicoll: python futures_tasks.py"""

from __future__ import annotations

import numpy as np
from mpi4py import MPI
from mpi4py.futures import MPICommExecutor

import mpicoll

world = mpicoll.world()
size = world.size


def total() -> int:
    return int(mpicoll.allreduce(np.full(4, world.rank + 1))[0])


def find_rank() -> int:
    return mpicoll.world().rank


assert total() == size * (size + 1) // 2
with MPICommExecutor(MPI.COMM_WORLD, root=0) as executor:
    if executor is not None:  # on the root; the other ranks are the workers, until it leaves this block
        squares = list(executor.map(pow, range(20), [2] * 20))
        assert squares == [number**2 for number in range(20)]
        # Each worker is a rank of the same world.
        assert 1 <= executor.submit(find_rank).result() < size
assert total() == size * (size + 1) // 2
if world.rank == 0:
    print(f"{size} ranks")
