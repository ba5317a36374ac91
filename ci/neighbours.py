#!/usr/bin/env python3
"""Time of neighbourhood and one-sided calls, beside those of mpi4py.

    mpirun -np 2 python ci/neighbours.py
    mpirun -np 2 python ci/neighbours.py --sizes 8,65536 --rounds 20

Prints the median of the rounds, in which ours and mpi4py's calls alternate; a round has as many calls as fit in some
milliseconds. Rank 0's times are shown; the results are compared before.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from mpi4py import MPI

import mpicoll

ROUND_SECONDS = 0.02
"""About the time of the calls of one round."""


def list_cases(size: int) -> Iterator[tuple[str, Callable[[], Any], Callable[[], Any]]]:
    """Yield the name of each case, our call and that of mpi4py, for `size` bytes to each neighbour or to the target."""
    world, theirs = mpicoll.world(), MPI.COMM_WORLD.Create_cart([MPI.COMM_WORLD.size], periods=[True])
    ring = world.cart([world.size], periods=True)
    assert ring is not None
    count = max(1, size // 8)
    x, out, other = np.arange(2.0 * count) + world.rank, np.zeros(2 * count), np.zeros(2 * count)
    mpicoll.neighbor_alltoall(x, out=out, comm=ring)
    theirs.Neighbor_alltoall(x, other)
    np.testing.assert_array_equal(out, other)
    yield (
        "neighbor_alltoall",
        lambda: mpicoll.neighbor_alltoall(x, out=out, comm=ring),
        lambda: theirs.Neighbor_alltoall(x, other),
    )
    yield (
        "neighbor_allgather",
        lambda: mpicoll.neighbor_allgather(x[:count], out=out, comm=ring),
        lambda: theirs.Neighbor_allgather(x[:count], other),
    )
    right = (world.rank + 1) % world.size
    window, whole = mpicoll.Window(count, "float64"), MPI.Win.Allocate(8 * count, 8, comm=MPI.COMM_WORLD)
    part, into = x[:count].copy(), np.zeros(count)

    def access(method: Callable[..., object], *more: Any) -> None:
        whole.Lock(right, MPI.LOCK_SHARED)
        method(part if method != whole.Get else into, right, None, *more)
        whole.Unlock(right)

    yield "Window.put", lambda: window.put(part, right), lambda: access(whole.Put)
    yield "Window.get", lambda: window.get(right, out=into), lambda: access(whole.Get)
    yield "Window.accumulate", lambda: window.accumulate(part, right), lambda: access(whole.Accumulate)
    mpicoll.barrier()
    window.free()
    whole.Free()
    ring.free()
    theirs.Free()


def measure(calls: tuple[Callable[[], Any], ...], rounds: int) -> list[float]:
    """Return the median time of each call in seconds. Collective."""
    counts = []
    for call in calls:
        call()
        MPI.COMM_WORLD.Barrier()
        begin = time.perf_counter()
        for _ in range(20):
            call()
        counts.append(MPI.COMM_WORLD.bcast(max(1, int(ROUND_SECONDS * 20 / (time.perf_counter() - begin)))))
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, count, found in zip(calls, counts, times, strict=True):
            MPI.COMM_WORLD.Barrier()
            begin = time.perf_counter()
            for _ in range(count):
                call()
            found.append((time.perf_counter() - begin) / count)
    return [statistics.median(one) for one in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="8,1024,65536,1048576", help="bytes for each neighbour")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    rank = mpicoll.world().rank
    if rank == 0:
        print(f"{'call':<20} {'bytes':>9} {'mpicoll':>11} {'mpi4py':>11} {'ratio':>6}")
    for size in map(int, arguments.sizes.split(",")):
        for name, ours, theirs in list_cases(size):
            mine, peer = measure((ours, theirs), arguments.rounds)
            if rank == 0:
                print(
                    f"{name:<20} {size:>9} {1e6 * mine:>8.1f} us {1e6 * peer:>8.1f} us {mine / peer:>6.2f}", flush=True
                )


if __name__ == "__main__":
    main()
