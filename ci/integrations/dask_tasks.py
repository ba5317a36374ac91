"""Tasks of Dask that call collectives of mpicoll, in a cluster of dask-mpi: python dask_tasks.py"""

from __future__ import annotations

import dask_mpi
import numpy as np
from distributed import Client
from least_squares import fit, make_samples, world

import mpicoll

size = world.size


def total() -> int:
    return int(mpicoll.allreduce(np.full(4, world.rank + 1))[0])


def submit_tasks() -> None:
    inputs, targets = make_samples()
    expected = np.linalg.lstsq(inputs, targets, rcond=None)[0]
    members = range(2, size)
    with Client() as client:
        parts = list(zip(members, np.array_split(inputs, size - 2), np.array_split(targets, size - 2), strict=True))
        for _ in range(5):
            # The name of a worker is its rank.
            tasks = [client.submit(fit, *part, workers=[rank], pure=False) for rank, *part in parts]
            for solution in client.gather(tasks):
                np.testing.assert_allclose(solution, expected, rtol=1e-10)
        # Tasks that Dask places, between them.
        assert client.gather(client.map(pow, range(20), [2] * 20)) == [number**2 for number in range(20)]
    dask_mpi.send_close_signal()


assert total() == size * (size + 1) // 2
if dask_mpi.initialize(dashboard=False, exit=False):  # on rank 1; the others are in Dask's loops, until it closes them
    submit_tasks()
assert total() == size * (size + 1) // 2
if world.rank == 0:
    print(f"{size} ranks")
