"""Run a Python program as a rank of ``mpicoll run``: ``python program.py SCRIPT ARGUMENTS...``, or ``-m MODULE``.

The program runs as Python itself would run it. If it fails, the other ranks are ended: also where it has not started
MPI yet, which MPICH's launcher does not take as a failure, and where it uses mpi4py alone, whose ranks would wait in
MPI_Finalize. Once mpicoll has started MPI, a failure is left to mpicoll.
"""

import os
import runpy
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

_RANK_PROCESS = os.getpid()

_OUTPUT_DELAY = 0.1
"""Seconds in which the launcher forwards the output, which it stops doing when it ends the job."""


def main(words: list[str]) -> None:
    """Run the program that `words` name: a script, or ``-m`` and a module; then its arguments."""
    sys.excepthook = _report_failure
    is_module = words[0] == "-m"
    # The launcher of this file is no place to import from. Python's option -P leaves the place out by itself.
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(Path.cwd()) if is_module else str(Path(words[0]).resolve().parent)
    sys.argv[:] = words[is_module:]
    try:
        if is_module:
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as error:
        if isinstance(error.code, str):
            sys.stderr.write(f"{error.code}\n")
        status = 0 if error.code is None else error.code & 0xFF if isinstance(error.code, int) else 1
        if status:
            _end_job(status)
        sys.exit(status)


def _report_failure(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback of the program's own frames, and end the job."""
    own = main.__code__.co_filename
    while trace is not None and (
        trace.tb_frame.f_code.co_filename == own or trace.tb_frame.f_globals.get("__name__") == "runpy"
    ):
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)
    _end_job(1)


def _end_job(status: int) -> None:
    """End all ranks with exit status `status`, unless mpicoll does so by itself."""
    if "mpicoll.transport.mpi" in sys.modules or os.getpid() != _RANK_PROCESS:  # MPI belongs to a child's parent
        return
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(_OUTPUT_DELAY)
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None:
        if mpi.Is_initialized() and not mpi.Is_finalized():
            mpi.COMM_WORLD.Abort(status)
    elif "PMI_FD" in os.environ:
        # A launcher of MPICH's family: the rank's connection to it takes this command of PMI-1 before MPI starts.
        with suppress(OSError, ValueError):  # the launcher has ended, and the job with it
            os.write(int(os.environ["PMI_FD"]), b"cmd=abort exitcode=%d\n" % status)


if __name__ == "__main__":
    main(sys.argv[1:])
