"""Linear least squares of samples that are divided between the workers of a cluster of dask-mpi, for dask_tasks.py.

Each rank imports this module, as Dask passes the name of a function that is in a module. It would copy one of the main
program to the workers, with the global names of the client, where `workers` is None."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

import mpicoll

ROWS, COLUMNS = 120, 4

world = mpicoll.world()
# Rank 0 is Dask's scheduler, and rank 1 its client.
workers = world.group(range(2, world.size))


def make_samples() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the inputs of shape (ROWS, COLUMNS), and the targets of shape (ROWS,)."""
    inputs = np.random.default_rng(1).standard_normal((ROWS, COLUMNS))
    return inputs, np.sin(inputs).sum(axis=1)


def fit(inputs: NDArray[np.float64], targets: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the solution for the samples of all workers. Collective over them."""
    sums = mpicoll.allreduce(inputs.T @ np.column_stack([inputs, targets]), comm=workers)
    return np.linalg.solve(sums[:, :COLUMNS], sums[:, COLUMNS])
