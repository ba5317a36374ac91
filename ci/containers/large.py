"""Run by ci/containers/prove.sh: collectives on arrays of so many bytes, with the results compared.

mpirun -np 4 python ci/containers/large.py 33554432
"""

import sys

import numpy as np

import mpicoll

world = mpicoll.world()
x = np.arange(max(int(sys.argv[1]) // 8, 1), dtype=np.float64) + world.rank
total = x * world.size - world.rank * world.size + world.size * (world.size - 1) / 2
for _ in range(3):
    np.testing.assert_array_equal(mpicoll.allreduce(x, "sum"), total)
    np.testing.assert_array_equal(mpicoll.bcast(x, root=1), x - world.rank + 1)
    rows = mpicoll.allgather(x[None, :1024])
    np.testing.assert_array_equal(rows[:, 0], np.arange(world.size))
    left = mpicoll.sendrecv(x, dest=(world.rank + 1) % world.size, source=(world.rank - 1) % world.size)
    assert left[0] == (world.rank - 1) % world.size
if world.rank == 0:
    choice = mpicoll.explain("allreduce", x.nbytes)
    print(f"right: {x.nbytes} bytes, allreduce by {choice.name}: {choice.reason}")
