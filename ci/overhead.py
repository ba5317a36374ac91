"""What a native call costs beside the same call of mpi4py: mpirun -np 2 python ci/overhead.py

Both run in turns, in blocks of calls that begin with a barrier, on preallocated input; mpicoll allocates its result,
mpi4py is given one, as its users do. Printed are medians over the blocks of rank 0, in microseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import numpy as np
from mpi4py import MPI

import mpicoll

BLOCKS, CALLS = 41, 400


def pairs(count: int) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """For each operation the call of mpi4py and that of mpicoll, on `count` elements."""
    comm = MPI.COMM_WORLD.Dup()
    peer = comm.size - 1 - comm.rank
    x = np.ones(count, np.float32)
    y, all_blocks = np.empty_like(x), np.empty(comm.size * count, np.float32)
    return {
        "allreduce": (lambda: comm.Allreduce(x, y), lambda: mpicoll.allreduce(x)),
        "allreduce out=": (lambda: comm.Allreduce(x, y), lambda: mpicoll.allreduce(x, out=y)),
        "allreduce plan": (lambda: comm.Allreduce(x, y), mpicoll.allreduce_init(x)),
        "reduce": (lambda: comm.Reduce(x, y), lambda: mpicoll.reduce(x)),
        "bcast": (lambda: comm.Bcast(y), lambda: mpicoll.bcast(x)),
        "allgather": (lambda: comm.Allgather(x, all_blocks), lambda: mpicoll.allgather(x)),
        "alltoall": (lambda: comm.Alltoall(x, y), lambda: mpicoll.alltoall(x)),
        "barrier": (comm.Barrier, mpicoll.barrier),
        "sendrecv": (lambda: comm.Sendrecv(x, peer, 0, y, peer), lambda: mpicoll.sendrecv(x, peer, peer)),
    }


def block(call: Callable[[], object], calls: int) -> float:
    """Microseconds per call."""
    MPI.COMM_WORLD.Barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls * 1e6


def main() -> None:
    size = MPI.COMM_WORLD.size
    rank = MPI.COMM_WORLD.rank
    for nbytes in (8, 1024, 65536):
        calls = CALLS if nbytes < 65536 else CALLS // 8
        table = pairs(nbytes // 4)
        times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in table}
        for _ in range(BLOCKS):
            for name, both in table.items():
                for call, seen in zip(both, times[name], strict=True):
                    seen.append(block(call, calls))
        if rank == 0:
            print(f"\n{nbytes} bytes, {size} ranks\n{'operation':16}{'mpi4py':>10}{'mpicoll':>10}{'ratio':>8}")
            for name, (raw, ours) in times.items():
                print(f"{name:16}{median(raw):10.2f}{median(ours):10.2f}{median(ours) / median(raw):8.2f}")


if __name__ == "__main__":
    main()
