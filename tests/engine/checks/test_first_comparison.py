"""Comparisons of calls between ranks that share no memory."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from support.launch import mpirun

import mpicoll

PROGRAM = """
import numpy as np
import mpicoll
from mpi4py import MPI

def create():
    MPI.COMM_WORLD.Dup().Free()
    world.split(0).free()

world = mpicoll.world()
for first in range(world.size):
    comm = world.duplicate()
    request = mpicoll.iallreduce(np.full(3, 1.0), comm=comm)
    if world.rank == first:
        assert (request.wait(30) == world.size).all()
        create()
    else:
        create()
        assert (request.wait(30) == world.size).all()
print("created by all")
"""

INTERRUPTED = """
import signal, time
import numpy as np
import mpicoll

world = mpicoll.world()
x = np.full(4, 1.0)
plan = mpicoll.allreduce_init(x)
calls = [
    lambda: mpicoll.allreduce(x),
    lambda: mpicoll.iallreduce(x).wait(),
    lambda: mpicoll.allgather_object(1),
    plan,
    lambda: mpicoll.bcast(x, world.rank),  # all ranks raise MismatchError
]
signal.signal(signal.SIGALRM, lambda *signal: 1 / 0)
for call in calls:
    if world.rank == 1:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            call()
        except ZeroDivisionError:
            print("interrupted")
    else:
        time.sleep(0.6)
        try:
            call()
        except mpicoll.MismatchError:
            assert call is calls[-1]
    assert (mpicoll.allreduce(x) == world.size).all()
"""


@pytest.mark.slow
@pytest.mark.parametrize("variables", [{"MPICOLL_SHARED_MEMORY": "off"}, {"MPICOLL_CHECK": "checksum"}], ids=str)
def test_exceptions_of_signal_handlers_wait_for_the_other_ranks(variables: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(INTERRUPTED)
    done = mpirun(3, script, MPICOLL_TIMEOUT="20", **variables)
    assert (done.returncode, done.stdout.split()) == (0, ["interrupted"] * 5), done.stdout


@pytest.mark.slow
def test_communicators_are_created_while_an_operation_waits(tmp_path: Path) -> None:
    """One rank waits for the first operation of a communicator before it takes part in the creation of another one."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    done = mpirun(3, script, MPICOLL_SHARED_MEMORY="off", MPICOLL_TIMEOUT="20")
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("created by all") == 3


def test_calls_after_a_failure_in_the_background_report_it() -> None:
    """The program waits for the second of two operations first."""
    over = threading.Event()

    def program() -> None:
        if mpicoll.world().rank == 0:
            over.wait(10)
            return
        requests = [mpicoll.iallreduce(np.ones(size)) for size in (3, 4)]
        before = r"Before, allreduce\(float64\[3\], op=sum\) .*, rank 1, failed in the background: .*within 0\.2 s"
        with pytest.raises(mpicoll.CommunicatorError, match=rf"an earlier operation was abandoned.*\. {before}"):
            requests[1].wait()
        over.set()

    mpicoll.run_local(program, 2, ranks_per_node=1, timeout=0.2)
