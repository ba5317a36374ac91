"""Run a Python program as a rank of ``mpicoll run``: ``python program.py SCRIPT ARGUMENTS...``, or ``-m MODULE``.

The program runs as Python itself would run it. If it fails, the other ranks are ended: also where it has not started
MPI yet, which MPICH's launcher does not take as a failure, and where it uses mpi4py alone, whose ranks would wait in
MPI_Finalize. Once mpicoll has started MPI, a failure is left to mpicoll.
"""

import builtins
import os
import runpy
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.machinery import SourceFileLoader
from io import open_code
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

_RANK_PROCESS = os.getpid()

_OUTPUT_DELAY = 0.1
"""Seconds in which the launcher forwards the output, which it stops doing when it ends the job."""


def main(words: list[str]) -> None:
    """Run the program that `words` name: a script, or ``-m`` and a module; then its arguments."""
    is_module = words[0] == "-m"
    # The launcher of this file is no place to import from. Python's option -P leaves the place out by itself.
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(Path.cwd()) if is_module else str(Path(words[0]).resolve().parent)
    # Not that of this file, whose names are no business of the program. It remains there: atexit handlers and threads
    # that outlive the last line of the program pickle by it.
    program = sys.modules["__main__"] = ModuleType("__main__")
    program.__dict__.update(__builtins__=builtins, __annotations__={})
    try:
        if is_module:
            sys.argv[:] = ["-m", *words[2:]]
            runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]  # noqa: SLF001  Python's option -m
        else:
            sys.argv[:] = words
            _run_script(Path(words[0]).absolute(), program)
    except SystemExit as error:
        if isinstance(error.code, str):
            sys.stderr.write(f"{error.code}\n")
        status = 0 if error.code is None else error.code & 0xFF if isinstance(error.code, int) else 1
        if status:
            _end_job(status)
        sys.exit(status)
    except BaseException:
        # Not before: the program, and mpicoll, find Python's own hook, and may replace it.
        sys.excepthook = partial(_report_failure, sys.excepthook)
        raise


def _run_script(path: Path, program: ModuleType) -> None:
    """Run the script at the absolute `path` in the module `program`."""
    file = str(path)
    program.__dict__.update(__file__=file, __cached__=None, __loader__=SourceFileLoader("__main__", file))
    with open_code(file) as source:
        code = compile(source.read(), file, "exec", dont_inherit=True)
    exec(code, program.__dict__)


def _report_failure(
    hook: Callable[..., Any], kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Call the program's `hook` with the traceback of the program's own frames, and end the job."""
    own = main.__code__.co_filename
    while trace is not None and (
        trace.tb_frame.f_code.co_filename == own or trace.tb_frame.f_globals.get("__name__") == "runpy"
    ):
        trace = trace.tb_next
    hook(kind, error.with_traceback(trace), trace)
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
