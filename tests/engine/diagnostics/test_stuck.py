"""Operations that can never complete fail within MPICOLL_STUCK_AFTER, and those that may complete don't."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from support.launch import mpirun

HEAD = """
import threading, time
import numpy as np, mpicoll
world = mpicoll.world()
rank, size = world.rank, world.size
x, large = np.ones(4), np.ones(20_000)
mpicoll.barrier()
"""

# Where the ranks do not compare their calls first, in shared memory or else. What blocks inside MPI can't raise: the
# job is ended. Each of these is what two ranks call, or three, and what is said.
ENDED = {
    "swapped": (
        """
if rank == 0:
    mpicoll.allreduce(x)
    mpicoll.bcast(x, 0)
else:
    mpicoll.bcast(x, 0)
    mpicoll.allreduce(x)
""",
        ["collective number 2 on world is not the same on all ranks", "rank 0 calls allreduce", "rank 1 calls bcast"],
    ),
    "skipped": (
        """
if rank == 0:
    mpicoll.allreduce(x)
mpicoll.allgather(x)
mpicoll.barrier()
""",
        ["collective number 2 on world is not the same on all ranks", "rank 1 calls allgather"],
    ),
    "a message and a collective": (
        """
if rank == 0:
    mpicoll.allreduce(x)
else:
    mpicoll.recv(x, 0)
""",
        ["ranks 0 and 1 wait for each other", "rank 1 waits in recv(float64[4], peer=0, tag=any)"],
    ),
    "a failure of one rank": (
        """
import signal
signal.signal(signal.SIGALRM, lambda *signal: 1 / 0)
several = np.ones(300_000)
mpicoll.allreduce(several, algorithm="ring")
if rank == 0:
    signal.setitimer(signal.ITIMER_REAL, 1)
    try:
        mpicoll.allreduce(several, algorithm="ring")
    except ZeroDivisionError:
        time.sleep(60)
time.sleep(3)
mpicoll.allreduce(several, algorithm="ring")
""",
        ["rank 1 waits in allreduce(float64[300000], op=sum) number 3", "for rank 0, which failed in it, as its own"],
    ),
    "two receives after messages": (
        """
mpicoll.sendrecv(x, 1 - rank, 1 - rank)
mpicoll.isend(x, 1 - rank, 7).wait()
mpicoll.recv(x, 1 - rank, 5)
""",
        ["ranks 0 and 1 wait for each other", "recv(float64[4], peer=1, tag=5)"],
    ),
    "two receives like earlier ones": (
        """
for _ in range(4):
    sending = mpicoll.isend(x, 1 - rank, 5)
    mpicoll.recv(x, 1 - rank, 5)
    sending.wait()
mpicoll.recv(x, 1 - rank, 5)
""",
        ["ranks 0 and 1 wait for each other", "recv(float64[4], peer=1, tag=5)"],
    ),
    "a receive like earlier ones from a rank that has left": (
        """
for turn in range(4):
    if rank == 0:
        mpicoll.recv(x, 1, 5)
    else:
        mpicoll.send(x, 0, 5)
if rank == 0:
    mpicoll.recv(x, 1, 5)
""",
        ["rank 0 waits in recv(float64[4], peer=1, tag=5)", "for rank 1, which has exited"],
    ),
    "a receive from a rank that has left": (
        """
if rank == 0:
    mpicoll.recv(x, 1)
    mpicoll.recv(x, 1)
else:
    mpicoll.send(x, 0)
""",
        ["rank 0 waits in recv(float64[4], peer=1, tag=any)", "for rank 1, which has exited"],
    ),
    "two ways to make a communicator": (
        """
world.duplicate()
world.duplicate() if rank == 0 else world.group([0, 1])
""",
        [
            "ranks 0 and 1 wait for each other",
            "rank 0 waits in duplicate(tag=0) number 2 on world",
            "rank 1 waits in group(0,1) number 1 on world",
        ],
    ),
    "a communicator that another rank has freed": (
        """
comm = world.duplicate()
if rank == 0:
    comm.duplicate(3)
else:
    comm.free()
    threading.Event().wait(60)
""",
        ["rank 0 waits in duplicate(tag=3) number 1 on world/duplicate", "rank 1, which has not called it: it runs"],
    ),
    "an agreement and a communicator without a third rank": (
        """
from mpi4py import MPI
comm = MPI.COMM_WORLD.Dup()
if rank == 0:
    world.agree(True)
elif rank == 1:
    mpicoll.barrier(comm=comm)
else:
    mpicoll.recv(x, 0)
""",
        [
            "ranks 0-2 wait for each other",
            "rank 0 waits in agree() number 1 on world",
            "rank 1 waits in first use of an mpi4py communicator of ranks (0,1,2) number 1 on world",
        ],
    ),
    "a pipeline and a process group without a third rank": (
        """
import torch.distributed as dist
from mpicoll.parallel.p2p import PipeP2P
p2p = PipeP2P(world, send_recv=False)
if rank == 0:
    p2p.recv(1)
elif rank == 1:
    dist.init_process_group("mpicoll", store=dist.HashStore(), rank=rank, world_size=size)
else:
    mpicoll.recv(x, 0)
""",
        [
            "rank 0 waits in PipeP2P.recv from stage 1",
            "rank 1 waits in init_process_group(1.0) number 1 on world",
        ],
    ),
}

# Collectives on a communicator that rank 0 has freed, while rank 0 runs its own program.
FREED = """
from pathlib import Path
freed = world.duplicate()
mpicoll.barrier(comm=freed)
raised = [Path(__file__).with_name(f"raised-{other}") for other in range(1, size)]
if rank == 0:
    freed.free()
    while not all(one.exists() for one in raised):
        time.sleep(0.01)
else:
    try:
        mpicoll.allreduce(x, comm=freed)
    except mpicoll.MismatchError as failure:
        assert "rank 0 has called free()" in str(failure), failure
    else:
        raise AssertionError("nothing was raised")
    raised[rank - 1].touch()
"""

# Each rank that waits gets an error, on communicators that are used for nothing else.
RAISING = (
    FREED
    + """
from mpicoll.parallel.p2p import PipeP2P

def fails(call, error, *words):
    begin = time.monotonic()
    try:
        call()
    except error as failure:
        assert type(failure) is error, repr(failure)
        assert all(word in str(failure) for word in words), failure
        assert time.monotonic() - begin < 30, time.monotonic() - begin
    else:
        raise AssertionError("nothing was raised")
    mpicoll.barrier()

first, second, third = (world.duplicate() for _ in range(3))
for one in (first, second, third):
    mpicoll.allreduce(large, comm=one, algorithm="shm_flat")
either = first if rank == 0 else second
fails(lambda: mpicoll.allreduce(large, comm=either, algorithm="shm_flat"), mpicoll.CommunicationError,
      "wait for each other", "rank 0 waits in allreduce")

p2p = PipeP2P(world)
p2p.send_forward(None) if rank == 0 else p2p.recv_forward() if rank == 1 else None
fails(lambda: p2p.recv((rank + 1) % size), mpicoll.CommunicationError, "ranks 0-2 wait for each other", "PipeP2P.recv")
mixed = lambda: p2p.recv(2) if rank == 0 else mpicoll.allreduce(large, comm=third, algorithm="shm_flat")
fails(mixed, mpicoll.CommunicationError, "PipeP2P.recv from stage 2", "ranks 1 and 2 wait in allreduce")
if rank == 0:
    pair = [mpicoll.irecv(x, 1, 1), mpicoll.irecv(x, 1, 2)]
if rank == 0:
    for wait in (lambda: p2p.recv(1), lambda: mpicoll.waitany(pair)):
        begin = time.monotonic()
        try:
            wait()
        except mpicoll.CommunicationError as failure:
            assert "for rank 1, which has exited" in str(failure), failure
        else:
            raise AssertionError("nothing was raised")
        assert time.monotonic() - begin < 30
    print("all raised")
"""
)

# The same without shared memory, where collectives are compared first.
BETWEEN = (
    FREED
    + """
other = world.duplicate()
mpicoll.barrier(comm=other)
mine = world if rank == 0 else other
try:
    mpicoll.allreduce(x, comm=mine)
except mpicoll.CommunicationError as failure:
    # Rank 0 may have learnt of it first, and gone on.
    waits = ("allreduce(float64[4], op=sum) number 2 on", "duplicate(tag=0) number 3 on")
    assert any(f"wait for each other: rank 0 waits in {one}" in str(failure) for one in waits[: 1 + rank]), failure
else:
    raise AssertionError("nothing was raised")
try:
    mpicoll.allreduce(x, comm=mine)
except mpicoll.CommunicatorError as failure:
    assert "an earlier operation was abandoned" in str(failure), failure
else:
    raise AssertionError("nothing was raised")
third = world.duplicate()
assert mpicoll.allreduce(rank, comm=third) == 1
if rank == 0:
    print("all raised")
"""
)

# Two operations fail in the background of each rank. The next call tells of the one, and the end of the program of the
# other.
NOBODY_WAITS = """
comms = [world.duplicate() for _ in range(4)]
for comm in comms:
    mpicoll.allreduce(large, comm=comm, algorithm="shm_flat")
mine = comms[2 * rank : 2 * rank + 2]
kept = [mpicoll.iallreduce(large, comm=comm, algorithm="shm_flat") for comm in mine]
try:
    mpicoll.waitany([mpicoll.irecv(x, 1 - rank, tag) for tag in (1, 2)])
except mpicoll.CommunicationError:
    while not all(one.test() for one in kept):
        time.sleep(1e-3)
try:
    mpicoll.allreduce(large, comm=mine[0], algorithm="shm_flat")
except mpicoll.CommunicationError as error:
    print(error, flush=True)
"""

# Ranks that are late, or that only look as if they waited for ever.
LATE = """
from mpi4py import MPI

def later(rank_, call):
    if rank == rank_:
        time.sleep(1.5)
    return call()

later(1, lambda: mpicoll.allreduce(x))
later(2, lambda: mpicoll.allreduce(large, algorithm="shm_flat"))
if rank == 0:
    mpicoll.recv(x)  # from any rank
elif rank == 2:
    time.sleep(1.5)
    mpicoll.send(x, 0)
# In MPI by the program's own hand.
if rank == 0:
    MPI.COMM_WORLD.Recv(x, 1)
    mpicoll.send(x, 2)
elif rank == 1:
    time.sleep(1.5)
    MPI.COMM_WORLD.Send(x, 0)
else:
    mpicoll.recv(x, 0)
# A message on mpicoll's communicator that mpicoll has not sent.
if rank == 0:
    mpicoll.recv(x, 1, 3)
elif rank == 1:
    threading.Timer(1.5, lambda: world.mpi.Send(x, 0, 3)).start()
    mpicoll.recv(x, 0, 4)
if rank == 0:
    mpicoll.send(x, 1, 4)
# Another thread does what the main one does not.
other = world.duplicate()
if rank == 0:
    thread = threading.Thread(target=lambda: (time.sleep(1.5), mpicoll.barrier(comm=other)))
    thread.start()
    mpicoll.recv(x, 1, 5)
    thread.join()
else:
    mpicoll.barrier(comm=other)
    if rank == 1:
        mpicoll.send(x, 0, 5)
# Started, and waited for later.
request = mpicoll.iallreduce(x, comm=other)
mpicoll.barrier()
request.wait()
if rank == 0:
    print("all done")
"""


def _run(folder: Path, size: int, body: str, after: str, **environ: str) -> CompletedProcess[str]:
    script = folder / "program.py"
    script.write_text(HEAD + body)
    warm = "import torch" in body
    return mpirun(size, script, seconds=90, warm=warm, MPICOLL_STUCK_AFTER=after, MPICOLL_REPORT="off", **environ)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[CompletedProcess[str]]]]:
    """All jobs, two at a time: most of the time they wait."""
    with ThreadPoolExecutor(2) as pool:
        folder = tmp_path_factory.mktemp
        unshared = {"MPICOLL_SHARED_MEMORY": "off"}
        uncompared = unshared | {"MPICOLL_CHECK": "off"}
        yield {
            "late": pool.submit(_run, folder("late"), 3, LATE, "0.5"),
            "raising": pool.submit(_run, folder("raising"), 3, RAISING, "1"),
            "between": pool.submit(_run, folder("between"), 2, BETWEEN, "1", **unshared),
            "nobody waits": pool.submit(_run, folder("nobody"), 2, NOBODY_WAITS, "1"),
        } | {
            name: pool.submit(_run, folder("ended"), 3 if "third" in name else 2, body, "0.5", **uncompared)
            for name, (body, _) in ENDED.items()
        }


@pytest.mark.slow
@pytest.mark.parametrize("name", ENDED)
def test_the_job_is_ended(jobs: dict[str, Future[CompletedProcess[str]]], name: str) -> None:
    done = jobs[name].result()
    assert done.returncode not in (0, 124), done.stdout
    # By an operation that blocks, by the exception of one that does not, or by both at the same time.
    assert re.search(r"; the job is ended\.?$", done.stdout, re.MULTILINE), done.stdout
    for word in ENDED[name][1]:
        assert word in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("raising", marks=pytest.mark.extension), "between"])
def test_waits_that_can_raise_do(jobs: dict[str, Future[CompletedProcess[str]]], name: str) -> None:
    done = jobs[name].result()
    assert done.returncode == 0, done.stdout
    assert "all raised" in done.stdout.split("\n"), done.stdout


@pytest.mark.slow
@pytest.mark.extension
def test_an_error_that_no_rank_waits_for_ends_the_job(jobs: dict[str, Future[CompletedProcess[str]]]) -> None:
    done = jobs["nobody waits"].result()
    what = r"allreduce\(float64\[20000\], op=sum\) by shm_flat on world/duplicate \(2 ranks\)"
    error = "CommunicationError: deadlock: ranks 0 and 1"
    assert re.search(rf"Before, {what}, rank \d, failed in the background: {error}", done.stdout)
    assert re.search(rf"rank \d of 2 exits though {what} failed, and its error was not retrieved: {error}", done.stdout)
    assert done.returncode not in (0, 124)


@pytest.mark.slow
@pytest.mark.extension
def test_what_may_still_complete_is_left_alone(jobs: dict[str, Future[CompletedProcess[str]]]) -> None:
    done = jobs["late"].result()
    assert (done.returncode, done.stdout) == (0, "all done\n")
