"""First steps with mpicoll.

    mpirun -np 3 python examples/hello.py

It also runs without mpirun, as a world of one rank.
"""

import numpy as np

import mpicoll

world = mpicoll.world()  # all ranks that mpirun started
rank, size = world.rank, world.size


def title(text):
    if rank == 0:
        print(f"\n{text}")


def say(value):
    """Print a line for each rank, in the order of ranks: rank 0 gathers them. Any dtype of fixed size can travel."""
    lines = mpicoll.gather(np.array(str(value), dtype="U100"), root=0)
    if rank == 0:  # the other ranks get None
        for number, line in enumerate(lines):
            print(f"  rank {number}: {line}")


title("Ranks and nodes")
say(f"one of {size}, number {world.local_rank} of {world.local_size} on node {world.node}")

title("allreduce: every rank gets the sum of all ranks' arrays")
x = np.arange(3.0) + rank
say(f"{x} -> {mpicoll.allreduce(x, 'sum')}")

title("bcast: every rank gets the array of rank 0")
say(mpicoll.bcast(np.full(3, rank + 7), root=0))

title("allgather: every rank gets all ranks' rows")
say(mpicoll.allgather(np.array([[rank, rank**2]])).tolist())

title("sendrecv: pass something round the ring")
say(f"got {mpicoll.sendrecv(rank, dest=(rank + 1) % size, source=(rank - 1) % size)} from the left")

title("iallreduce: begin now, do something else, take the result later")
request = mpicoll.iallreduce(x, "max")
own = x.sum()
say(f"my own sum is {own}, the maximum over all is {request.wait()}")

title("allreduce_init: a plan to repeat the same operation on the same memory")
value = np.ones(2)
plan = mpicoll.allreduce_init(value, "sum", out=value)
for _ in range(3):
    plan()
say(f"after three runs: {value}")

title("A function as operation: the product of matrices, in the order of ranks")
matrix = np.array([[1, rank + 1], [0, 1]])
say(mpicoll.allreduce(matrix, np.matmul).tolist())

title("Choose an algorithm, and ask which one is taken")
say(mpicoll.allreduce(x, "sum", algorithm="ring"))
if rank == 0:
    choice = mpicoll.explain("allreduce", x.nbytes)
    print(f"  without a wish, {choice.name}: {choice.reason}")
    with mpicoll.algorithms(allreduce="tree"):
        choice = mpicoll.explain("allreduce", x.nbytes)
        print(f"  with a wish, {choice.name}: {choice.reason}")

title("Look at an algorithm")
if rank == 0:
    print(mpicoll.schedules.draw("allreduce/ring", 3))
