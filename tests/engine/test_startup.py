"""The exit of a process of a job."""

from __future__ import annotations

import re
from collections.abc import Callable
from subprocess import CompletedProcess

import pytest

Starter = Callable[..., "CompletedProcess[str]"]


@pytest.mark.slow
def test_pending_operations_complete_at_the_end(job: Starter) -> None:
    """The last rank joins late; the others are at their end by then, with nothing but the operations' own memory."""
    done = job(
        3,
        """
world = mpicoll.world()
part = world.split(0)
for comm in (world, part):
    for number in range(20):
        mpicoll.iallreduce(np.full(50_000, number), comm=comm)
if world.rank == 2:
    total = mpicoll.iallreduce(np.ones(1)).wait()
    print(total[0])
else:
    mpicoll.iallreduce(np.ones(1))
""",
    )
    assert (done.returncode, done.stdout.split()) == (0, ["3.0"])


@pytest.mark.slow
def test_pending_operations_that_can_not_complete(job: Starter) -> None:
    done = job(
        2,
        """
if mpicoll.world().rank == 0:
    mpicoll.iallreduce(np.ones(2))
""",
        MPICOLL_TIMEOUT="1",
    )
    assert done.returncode not in (0, 124), done.stdout
    assert re.search(
        r"mpicoll: (rank 0 of 2 exits while .*world.* holds operations|.* allreduce.* has been waiting"
        r"|rank 0 waits in allreduce.* for rank 1, which has exited)",
        done.stdout,
    )


@pytest.mark.slow
def test_pending_operations_without_mpi(python: Callable[..., CompletedProcess[str]]) -> None:
    done = python("import numpy, mpicoll\nfor _ in range(50): mpicoll.iallreduce(numpy.ones(10_000))")
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.slow
@pytest.mark.long
def test_finalize_does_not_wait_for_ever_for_a_rank_that_does_not_exit(job: Starter) -> None:
    """MPI_Finalize runs without the interpreter lock, so that the watchdog can bound it."""
    done = job(
        2,
        """
import atexit, threading
mpicoll.barrier()
if mpicoll.world().rank == 1:
    atexit.register(threading.Event().wait)
""",
        seconds=40,
        MPICOLL_TIMEOUT="1",
    )
    assert done.returncode not in (0, 124), done.stdout
    assert "mpicoll: rank 0 of 2 has been waiting in MPI_Finalize" in done.stdout
    assert "rank 1 has not exited; the job is ended" in done.stdout
