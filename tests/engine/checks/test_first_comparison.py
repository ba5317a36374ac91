"""Comparisons of calls between ranks that share no memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.launch import mpirun

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


@pytest.mark.slow
def test_communicators_are_created_while_an_operation_waits(tmp_path: Path) -> None:
    """One rank waits for the first operation of a communicator before it takes part in the creation of another one."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    done = mpirun(3, script, MPICOLL_SHARED_MEMORY="off", MPICOLL_TIMEOUT="20")
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("created by all") == 3
