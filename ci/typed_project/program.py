"""A program that uses the API with types, for mypy and pyright in their strict modes: ci/release.sh checks and runs it.

It has calls of each kind once. `assert_type` states the type that a checker must infer.
"""

from __future__ import annotations

from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import assert_type

import mpicoll

Vector = NDArray[np.float64]
AnyArray = np.ndarray[Any, Any]  # a dtype that is passed as a value


def fill(rank: int) -> Vector:
    return np.full(4, float(rank))  # whose type older versions of numpy don't state


def average(x: Vector) -> Vector:
    result = mpicoll.allreduce(x, "avg")
    assert_type(result, Vector)
    return result


def exchange(world: mpicoll.Communicator, x: Vector) -> Vector:
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    received: Vector = mpicoll.sendrecv(x, right, left)
    assert_type(mpicoll.sendrecv(x, right, left), Vector | Any)  # None where a neighbour is PROC_NULL
    assert_type(mpicoll.sendrecv(x, right, left, out=received), Vector)
    request = mpicoll.isend(x, right)
    assert_type(mpicoll.recv(source=left, out=received), Vector)
    assert_type(request.wait(), None)
    arrival = mpicoll.irecv(source=left, out=received)
    mpicoll.isend(x, right).wait()
    assert_type(arrival.wait(), Vector)
    assert_type(mpicoll.allgather_object(world.rank), list[int])
    assert_type(mpicoll.gather_object("rank"), list[str] | None)
    assert_type(mpicoll.scatter_object([1.5] * world.size if world.rank == 0 else None), float)
    assert_type(mpicoll.alltoall_object([1.5] * world.size), list[float])
    return received


def store(world: mpicoll.Communicator, x: Vector, folder: str) -> None:
    mpicoll.save(f"{folder}/x.npy", x)
    assert_type(mpicoll.load(f"{folder}/x.npy"), AnyArray)
    assert_type(mpicoll.load(f"{folder}/x.npy", out=x), Vector)
    with mpicoll.File.open(f"{folder}/x.bin", "w+") as file:
        file.write_subarray_all(0, x, len(x) * world.size, len(x) * world.rank)
        file.sync()
        mpicoll.barrier()
        assert_type(file.read_at(0, len(x), x.dtype), AnyArray)
        assert_type(file.read_at_all(0, out=x), Vector)
        assert_type(file.read_subarray_all(0, len(x), 0, len(x), x.dtype), AnyArray)
        assert_type(file.read_subarray_all(0, len(x), 0, out=x), Vector)


def main() -> None:
    world = mpicoll.world()
    assert_type(world, mpicoll.Communicator)
    x = fill(world.rank)
    mean = average(x)
    blocks = mpicoll.gather(x)
    assert_type(blocks, Vector | None)
    assert_type(mpicoll.allgather(x), Vector)
    assert_type(mpicoll.allgather(1.0), Any)  # an array, by the library of the operand: numpy for numbers
    assert_type(mpicoll.alltoall(x[: world.size]), Vector)
    assert_type(mpicoll.reduce_scatter(x[: world.size]), Vector)
    assert_type(mpicoll.bcast(x), Vector)
    assert_type(mpicoll.bcast(x if world.rank == 0 else None, out=x), Vector)
    assert_type(mpicoll.scatter(x[: world.size] if world.rank == 0 else None, out=x[:1]), Vector)
    request = mpicoll.iallreduce(x, "max")
    largest = request.wait()
    assert_type(largest, Vector)
    pending: list[mpicoll.Request[Vector]] = [mpicoll.iscan(x), mpicoll.ibcast(x)]
    assert_type(mpicoll.waitall(pending), list[Vector])
    assert_type(mpicoll.ireduce(x).wait(), Vector | None)  # None on all ranks but the root
    barrier: mpicoll.Request = mpicoll.ibarrier()
    barrier.wait()
    settings = mpicoll.bcast_object({"rate": 0.1} if world.rank == 0 else None)
    assert_type(settings, dict[str, float] | Any)  # whatever the root passes, None too
    plan = mpicoll.allreduce_init(x, "sum", out=x)
    assert_type(plan(), Vector)
    half = world.split(world.rank % 2)
    assert_type(half, mpicoll.Communicator)
    first = world.split(0 if world.rank == 0 else None)
    assert_type(first, mpicoll.Communicator | None)  # None where a rank passes no color
    received = exchange(world, x)
    with TemporaryDirectory() as folder:
        store(world, x.copy(), mpicoll.bcast_object(folder))
        mpicoll.barrier()
    mpicoll.barrier(comm=half)
    ring = world.cart([world.size], periods=True)
    assert_type(ring, mpicoll.CartesianCommunicator | None)  # None on ranks beyond the grid
    if ring is not None:
        assert_type(mpicoll.neighbor_allgather(x, comm=ring), Vector)
        ring.free()
    assert_type(mpicoll.empty(3, "float64"), np.ndarray[Any, Any])
    with mpicoll.Window(4, x.dtype) as window:
        assert_type(window.get(0, out=received), Vector)
    try:
        mpicoll.allreduce(x, algorithm="unknown")
    except mpicoll.AlgorithmError:
        if world.rank == 0:
            assert blocks is not None
            print(mean.tolist(), float(np.max(largest)), settings["rate"], received[0], blocks.shape)
    else:
        raise AssertionError
    half.free()
    if first is not None:
        first.free()


if __name__ == "__main__":
    main()
