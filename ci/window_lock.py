"""What ``with window.lock(rank)`` and a put of 8 bytes cost, beside Lock, Put and Unlock of mpi4py:
mpirun -np 2 python ci/window_lock.py

The median over blocks of calls of rank 0, in microseconds; the forms take turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import numpy as np
from mpi4py import MPI

import mpicoll

BLOCKS, CALLS = 101, 300


def main() -> None:
    world = mpicoll.world()
    target, x = 1, np.ones(1)
    own, theirs = mpicoll.Window(1024, "float64"), MPI.Win.Allocate(8192, 8, comm=MPI.COMM_WORLD)

    def lock(exclusive: bool) -> Callable[[], None]:
        def call() -> None:
            with own.lock(target, exclusive=exclusive):
                own.put(x, target)

        return call

    def lock_of_mpi(kind: int) -> Callable[[], None]:
        def call() -> None:
            theirs.Lock(target, kind)
            theirs.Put(x, target)
            theirs.Unlock(target)

        return call

    forms = {
        "exclusive": (lock(True), lock_of_mpi(MPI.LOCK_EXCLUSIVE)),
        "shared": (lock(False), lock_of_mpi(MPI.LOCK_SHARED)),
    }
    for name, pair in forms.items():
        times: tuple[list[float], list[float]] = [], []
        for _ in range(BLOCKS):
            for form, found in zip(pair, times, strict=True):
                mpicoll.barrier()
                begin = time.perf_counter()
                for _ in range(CALLS if world.rank == 0 else 0):
                    form()
                found.append((time.perf_counter() - begin) / CALLS)
                mpicoll.barrier()
        if world.rank == 0:
            ours, peer = map(median, times)
            print(f"{name:9}: {1e6 * ours:.2f}, mpi4py {1e6 * peer:.2f}, ratio {ours / peer:.2f}")
    own.free()
    theirs.Free()


if __name__ == "__main__":
    main()
