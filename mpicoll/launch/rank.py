"""One rank of a spawned job: ``python rank.py DIRECTORY``, started by the launcher.

The directory holds ``path`` (the parent's sys.path) and ``job`` (function and arguments). The rank writes its process
id to ``<rank>.pid``, and then either its result to ``<rank>.result`` or its error to ``<process id>.failure``. If a
rank ends without a report, another rank writes the reason to ``<rank>.death``.
"""

import json
import os
import pickle
import socket
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path


def main(directory: Path) -> None:
    """Run the job's function as this rank, and end the whole job if the function fails."""
    own = os.getpid()
    rank: int | None = None
    status, failure = 0, None
    try:
        rank = _start(directory)
        result = _run(directory, rank)
    except BaseException as error:  # noqa: BLE001  raised again by the parent
        status, failure = _exit_status(error), error
    if os.getpid() != own:
        # A child that the function forked has returned here: MPI and the job belong to its parent.
        if failure is not None and not isinstance(getattr(failure, "code", None), int):
            traceback.print_exception(failure)
        _flush()
        os._exit(status)
    if failure is None:
        _write(directory / f"{rank}.result", result)
        return
    _write(directory / f"{own}.failure", _serialize_failure(rank, status, failure))
    _flush()
    if "mpi4py.MPI" not in sys.modules:
        sys.exit(status)  # no other rank can be waiting for this one
    from mpicoll.engine.startup import abort_job

    abort_job(failure, status)


def _start(directory: Path) -> int:
    """Join the job, and return the rank."""
    try:
        sys.path[:] = json.loads((directory / "path").read_text())
    except FileNotFoundError as error:
        raise RuntimeError(
            "mpicoll.spawn starts ranks on its own machine only, but the launcher started one on"
            f" {socket.gethostname()}; keep host lists and allocations of several machines from it"
        ) from error
    from mpicoll.engine.startup import report_deaths_to
    from mpicoll.engine.world import world

    def write_death(rank: int, why: str) -> None:
        with suppress(OSError):  # the job must be ended even so
            _write(directory / f"{rank}.death", pickle.dumps({"time": time.time(), "rank": rank, "why": why}))

    rank = world().rank
    report_deaths_to(write_death)
    _write(directory / f"{rank}.pid", str(os.getpid()).encode())
    return rank


def _run(directory: Path, rank: int) -> bytes:
    """Call the function, and return its pickled result."""
    import cloudpickle

    function, args = pickle.loads((directory / "job").read_bytes())
    try:
        result = function(rank, *args)
    except SystemExit as error:
        if _exit_status(error):
            raise
        result = None
    try:
        return bytes(cloudpickle.dumps(result))
    except Exception as error:
        raise TypeError(
            f"rank {rank}: the function returned a {type(result).__name__} that can't be pickled, so it can't be"
            f" returned to the program that called mpicoll.spawn ({error}); return its data instead, or None"
        ) from error


def _exit_status(error: BaseException) -> int:
    """Return the exit status that Python gives to a program that ends by `error`."""
    if not isinstance(error, SystemExit):
        return 1
    if error.code is None:
        return 0
    return (error.code & 0xFF) if isinstance(error.code, int) else 1


def _serialize_failure(rank: int | None, status: int, error: BaseException) -> bytes:
    import cloudpickle

    if isinstance(error, SystemExit):
        # Under MPI, sys.exit raises a subclass of the engine.
        error = SystemExit(error.code).with_traceback(error.__traceback__)
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))
    try:
        pickled = cloudpickle.dumps(error)
    except Exception:  # noqa: BLE001  its text is enough
        pickled = None
    return pickle.dumps({"time": time.time(), "rank": rank, "status": status, "traceback": text, "exception": pickled})


def _write(path: Path, data: bytes) -> None:
    """Write a file atomically."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.draft")  # several ranks may report a death
    draft.write_bytes(data)
    draft.replace(path)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or without a reader
            stream.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
