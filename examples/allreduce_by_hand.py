"""Write allreduce by hand in three ways, with send and recv, and look at each step.

    mpirun -np 4 python examples/allreduce_by_hand.py

Every rank has a vector of the same length. After an allreduce every rank has their sum. Data-parallel training needs
one per step: the vectors are the gradients of the ranks.

master-worker  rank 0 receives the vectors, adds them up, and sends the total to each rank. Simple, but all data passes
               through the link of rank 0: (P - 1) N bytes in and as many out, for P ranks and vectors of N bytes.
tree           pairs of ranks add up, then pairs of pairs, and so on; the total takes the same way back. Rank 0 still
               sends most, but only log2(P) N bytes.
ring           each rank sends to its right neighbour only, one chunk of N / P bytes at a time. The chunks collect the
               sum on their way round, then the finished chunks go round once more. Each rank sends 2 (P - 1) / P N
               bytes: less than 2 N, however many ranks there are.

The functions below change `x` in place. They call `after_step` at the end of each step, on all ranks, with what the
calling rank has sent, if anything: a picture can be drawn there, or bytes counted.
"""

import argparse
import time

import numpy as np

import mpicoll
from mpicoll import schedules

DRAWN = 5  # at most so many ranks fit into 80 columns


def do_nothing(x, dest=None, sent="", nbytes=0):
    """Neither draw nor count anything after a step."""


def master_worker(x, after_step=do_nothing):
    """Reduce the vectors on rank 0, in the order of ranks, and send the total back."""
    rank, size = mpicoll.world().rank, mpicoll.world().size
    for worker in range(1, size):
        if rank == 0:
            x += mpicoll.recv(x, worker)
            after_step(x)
        elif rank == worker:
            mpicoll.send(x, 0)
            after_step(x, 0, "all", x.nbytes)
        else:
            after_step(x)
    for worker in range(1, size):
        if rank == 0:
            mpicoll.send(x, worker)
            after_step(x, worker, "all", x.nbytes)
        else:
            if rank == worker:
                mpicoll.recv(out=x, source=0)
            after_step(x)


def tree(x, after_step=do_nothing):
    """Reduce pairs of ranks at distance 1, 2, 4, ... up to rank 0, and send the total the same way down."""
    rank, size = mpicoll.world().rank, mpicoll.world().size
    distance = 1
    while distance < size:
        if rank % (2 * distance) == distance:
            mpicoll.send(x, rank - distance)
            after_step(x, rank - distance, "all", x.nbytes)
        else:
            if rank % (2 * distance) == 0 and rank + distance < size:
                x += mpicoll.recv(x, rank + distance)
            after_step(x)
        distance *= 2
    while distance > 1:
        distance //= 2
        if rank % (2 * distance) == 0 and rank + distance < size:
            mpicoll.send(x, rank + distance)
            after_step(x, rank + distance, "all", x.nbytes)
        else:
            if rank % (2 * distance) == distance:
                mpicoll.recv(out=x, source=rank - distance)
            after_step(x)


def ring(x, after_step=do_nothing):
    """Send chunks to the right and receive chunks from the left: once round to add up, once round to distribute."""
    rank, size = mpicoll.world().rank, mpicoll.world().size
    right, left = (rank + 1) % size, (rank - 1) % size
    chunks = np.array_split(x, size)  # views: to change a chunk is to change x
    for step in range(2 * (size - 1)):
        mine, theirs = (rank - step) % size, (rank - step - 1) % size
        # All ranks send at the same time. A send may wait until its message is received, so it must not be what all
        # ranks wait in: it goes on in the background while this rank receives.
        request = mpicoll.isend(chunks[mine], right)
        if step < size - 1:
            chunks[theirs] += mpicoll.recv(chunks[theirs], left)
        else:
            mpicoll.recv(out=chunks[theirs], source=left)
        request.wait()
        after_step(x, right, f"chunk {mine}", chunks[mine].nbytes)


BY_HAND = {"master-worker": master_worker, "tree": tree, "ring": ring}


class Picture:
    """The chunks of all ranks after each step, printed by rank 0. A chunk is one number here."""

    def __init__(self, x):
        self.step = 0
        self.before = mpicoll.gather(x[np.newaxis])
        if self.before is not None:
            width = 9 * self.before.shape[1]
            print(f"{'':34}{'chunks'.rjust(width)}")
            self.print_lines(["begins with"] * len(self.before), self.before)

    def draw(self, x, dest=None, sent="", nbytes=0):
        """Print the messages of a step, and the chunks after it."""
        self.step += 1
        text = "" if dest is None else f"sends {sent} to rank {dest}"
        texts = mpicoll.gather(np.array([text], dtype="U40"))
        state = mpicoll.gather(x[np.newaxis])
        if texts is not None:
            print(f"  step {self.step}")
            self.print_lines(texts, state)
            self.before = state

    def print_lines(self, texts, state):
        for rank, (text, now, old) in enumerate(zip(texts, state, self.before, strict=True)):
            cells = [f"{'*' if a != b else ''}{a:.0f}".rjust(9) for a, b in zip(now, old, strict=True)]
            print(f"    rank {rank} {text:<23}" + "".join(cells))


class Count:
    """The bytes that this rank sends."""

    def __init__(self):
        self.nbytes = 0

    def add(self, x, dest=None, sent="", nbytes=0):
        """Add the bytes that were sent in a step."""
        self.nbytes += nbytes


def draw(name):
    """Run an algorithm on one number per chunk. The digits of a sum show which ranks it has in it."""
    world = mpicoll.world()
    if world.rank == 0:
        print(f"\n{name}: rank r begins with 10**r; * marks what a step has changed\n")
    x = np.full(world.size, 10.0**world.rank)
    BY_HAND[name](x, Picture(x).draw)
    assert (x == sum(10.0**rank for rank in range(world.size))).all()


def measure(call, repeats):
    """Return the median time of a call in seconds; the slowest rank counts."""
    times = []
    for _ in range(repeats):
        mpicoll.barrier()
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return float(np.median(mpicoll.allreduce(np.array(times), "max")))


def compare(numbers, repeats):
    """Compare the functions above with mpicoll.allreduce: results, bytes and time."""
    world = mpicoll.world()
    given = np.random.default_rng(world.rank).integers(0, 1000, numbers).astype(np.float64)
    total = mpicoll.allreduce(given)
    choice = mpicoll.explain("allreduce", given.nbytes, dtype="float64")
    if world.rank == 0:
        print(f"\n{world.size} ranks, vectors of N = {given.nbytes / 2**20:.1f} MiB, {repeats} runs each, medians\n")
        print("                                sent by the         by hand   mpicoll.allreduce")
        print("                result         busiest rank            time   same algorithm")
    for name, function in BY_HAND.items():
        x, count = given.copy(), Count()
        function(x, count.add)
        equal = mpicoll.allreduce(bool((x == total).all()), "land")
        most = mpicoll.allreduce(count.nbytes, "max") / given.nbytes
        algorithm = name.replace("-", "_")
        law = float(schedules.cost(f"allreduce/{algorithm}", world.size).sent)
        x[:] = 0  # repeated sums of anything else would grow
        by_hand = measure(lambda function=function, x=x: function(x), repeats)
        ours = measure(lambda x=x, algorithm=algorithm: mpicoll.allreduce(x, out=x, algorithm=algorithm), repeats)
        if world.rank == 0:
            result = "equal" if equal else "DIFFERS"
            print(f"{name:<16}{result:<8}{most:6.2f} N, law {law:4.2f} N {by_hand * 1e3:9.2f} ms {ours * 1e3:9.2f} ms")
        if not equal:
            raise SystemExit(f"{name} and mpicoll.allreduce differ")
    best = measure(lambda: mpicoll.allreduce(given), repeats)
    if world.rank == 0:
        print(f"\nmpicoll.allreduce by itself takes {choice.name}: {best * 1e3:.2f} ms")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numbers", type=int, default=1 << 17, help="length of the vectors to compare (131072)")
    parser.add_argument("--repeats", type=int, default=11, help="runs to take the median of (11)")
    options = parser.parse_args()
    if options.numbers < 1 or options.repeats < 1:
        parser.error("--numbers and --repeats must be at least 1")
    world = mpicoll.world()
    if world.size == 1:
        raise SystemExit("one rank has nothing to add up: start more by mpirun -np 4")
    if world.size <= DRAWN:
        for name in BY_HAND:
            draw(name)
    elif world.rank == 0:
        print(f"The steps are drawn for at most {DRAWN} ranks.")
    compare(options.numbers, options.repeats)


if __name__ == "__main__":
    main()
