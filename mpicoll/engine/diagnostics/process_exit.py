"""Reports of the end of this process to the other ranks, whatever its cause."""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, NoReturn, Protocol, TypeVar

from mpicoll.errors import MpicollError
from mpicoll.extension import cancel_sigterm_limit
from mpicoll.proc_files import read_file, read_link

_PACKAGE = __file__.rpartition("engine/diagnostics/")[0]

exit_hooks: list[Callable[[], None]] = []
"""Functions that are called before this process ends the job, with a bound on their time."""

_HOOK_TIMEOUT = 1.0
"""Seconds that an exit hook has: it may write to a file system that does not respond."""

_ATEXIT_TIMEOUT = 2.0
"""Seconds that the program's atexit handlers have together on a rank that has raised, before it ends the job."""

_PIDFD_GETFD = 438
"""The number of this system call, on all processors."""

T = TypeVar("T")


class Abort(Protocol):
    """The abort of a job. ``job_survives`` is True if the job goes on without a rank that dies (ULFM)."""

    @property
    def job_survives(self) -> bool: ...

    @property
    def rank_name(self) -> str:
        """This rank, for messages: "rank 1 of 4"."""

    def announce(self, of: str, alike: str = "") -> None:
        """Report that this rank is about to abort the job, because of ``of``.

        Ranks that pass the same non-empty `alike` at the same time are reported once: the call returns at once
        on one of them only.
        """

    def abort_all(self, status: int) -> None:
        """End all ranks with `status`."""


def call_within(seconds: float, function: Callable[[], T]) -> T | None:
    """Return the result of `function`, or None if it raises or takes more than `seconds`.

    In the latter case it continues in a thread of its own. For what may wait for a file system, which must not prevent
    the end of a job.
    """
    results: list[T] = []

    def call() -> None:
        with suppress(Exception):
            results.append(function())

    thread = threading.Thread(target=call, name="mpicoll-bounded", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no thread can be started at interpreter shutdown
        call()
    else:
        thread.join(seconds)
    return results[0] if results else None


def run_exit_hooks() -> None:
    """Call the exit hooks and write the buffers of open files, with a bound on the time of each."""
    for hook in (*exit_hooks, _flush_files):
        call_within(_HOOK_TIMEOUT, hook)


def _run_atexit_handlers(abort: Abort) -> None:
    """Run the program's atexit handlers, as Python would have after an uncaught exception.

    If they take more than ``_ATEXIT_TIMEOUT`` seconds, the job is ended meanwhile. Threads are not waited for.
    """

    def abort_late() -> None:
        call_within(_HOOK_TIMEOUT, _flush_files)
        abort.abort_all(1)

    timer = threading.Timer(_ATEXIT_TIMEOUT, abort_late)
    timer.daemon = True
    try:
        timer.start()
    except RuntimeError:  # no thread can be started, so nothing would bound the handlers
        return
    atexit._run_exitfuncs()  # noqa: SLF001  multiprocessing calls it likewise
    _flush()
    _flush_files()
    timer.cancel()


def _flush_files() -> None:
    """Write the buffers of all open files, which the abort of a job would lose."""
    for kinds in ((io.TextIOWrapper,), (io.BufferedWriter, io.BufferedRandom)):
        for file in gc.get_objects():
            if type(file) in kinds:
                with suppress(OSError, ValueError):  # closed, detached or read-only
                    file.flush()


def end_by_signal(number: int, of: str = "") -> NoReturn:
    """End this process by the default action of a signal, after a line on stderr that this rank died of `of`.

    In a job that survives deaths (ULFM), Open MPI's launcher reports a death by a signal to MPI on the other ranks, but
    not an exit with a status other than 0: ``shrink`` and ``agree`` would wait for this rank without limit.
    """
    cancel_sigterm_limit()
    if of:
        log_to_stderr(of, separate=True)
    run_exit_hooks()
    _flush()
    libc = ctypes.CDLL(None)
    for one in (number, signal.SIGKILL):
        # Python's own function is for the main thread only.
        libc.signal(one, None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {one})
        os.kill(os.getpid(), one)
        time.sleep(1)  # the signal may arrive on another thread
    os._exit(128 + number)


def make_exits_deaths() -> None:
    """Make ``os._exit`` with a status other than 0 a death by a signal, in this process (see :func:`end_by_signal`)."""
    exit_at_once, owner = os._exit, os.getpid()

    def exit_or_die(status: int) -> NoReturn:
        if status & 0xFF and os.getpid() == owner:
            end_by_signal(signal.SIGKILL)
        exit_at_once(status)

    os._exit = exit_or_die


def end_launcher(after: float = 0.0) -> None:
    """End the launcher's process on this host after `after` seconds, if it is Open MPI's and still runs.

    The launcher waits for a lost host as long as TCP retransmits, a quarter of an hour, and for a frozen one
    without limit. A separate process sends the signals, since the end of the launcher ends this process.
    """
    launcher = os.getppid()
    with suppress(OSError, ImportError, IndexError):  # a file can't be opened, for one, if all descriptors are in use
        # PID (NAME) STATE PARENT ..., where the name may contain anything.
        name, _, rest = read_file(f"/proc/{launcher}/stat").partition("(")[2].rpartition(")")
        if name in ("prted", "prterun"):
            import subprocess  # late: only this needs it

            program = _END_LAUNCHER.format(pid=launcher, start=rest.split()[19], polls=round(5 * after))
            subprocess.Popen(
                ["/bin/sh", "-c", program],
                start_new_session=True,
                # A reader of the job's output must not wait for this process.
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )


# Open MPI's launcher needs three requests, as with three Ctrl-C. The start time distinguishes it from a later process
# with the same id.
_END_LAUNCHER = """\
goes_on() {{ read -r stat < /proc/{pid}/stat && [ "$(echo "$stat" | cut -d ' ' -f 22)" = {start} ]; }}
polls={polls}
while [ $polls -gt 0 ]; do goes_on || exit; sleep 0.2; polls=$((polls - 1)); done
for request in 1 2 3; do goes_on || exit; kill -TERM {pid}; sleep 0.3; done
sleep 2
goes_on && kill -KILL {pid}
"""


def log_to_stderr(text: str, *, separate: bool = False) -> None:
    """Write `text` as a line to stderr, after what is buffered there.

    `separate` it by a newline where the launcher may have written before: Open MPI's launcher ends its messages
    with a zero byte and no newline.
    """
    stream = sys.stderr
    with suppress(OSError, ValueError, AttributeError):  # stderr is closed or None
        if isinstance(stream, io.StringIO) and sys.__stderr__ is not None:
            # torch.distributed collects the output of other hooks, and prints it when they have returned.
            stream = sys.__stderr__
        stream.write(f"{chr(10) if separate else ''}mpicoll: {text}\n")
        stream.flush()


def log_after_sigterm(text: str) -> None:
    """Write `text` as a separate line to stderr, after the launcher may have sent SIGTERM to all ranks.

    Open MPI 5's launcher reads no output of the ranks any more once it has received SIGTERM itself, and sends SIGKILL a
    quarter of a second later. So the line is written to the stderr of the launcher if this process is on its host.
    """
    launcher = os.getppid()
    if _is_read_by_prterun(launcher):
        with suppress(OSError):  # it is closed, or a socket
            descriptor = _open_stderr_of(launcher)
            try:
                os.write(descriptor, f"\nmpicoll: {text}\n".encode(errors="replace"))
                return
            finally:
                os.close(descriptor)
    log_to_stderr(text, separate=True)


def _is_read_by_prterun(launcher: int) -> bool:
    """Return True if the process `launcher` is Open MPI 5's launcher, and reads the stderr of this process."""
    with suppress(OSError):
        if read_file(f"/proc/{launcher}/comm").strip() == "prterun":
            own = read_link("/proc/self/fd/2")
            descriptors = os.listdir(f"/proc/{launcher}/fd")  # noqa: PTH208
            return own.startswith("pipe:") and own in {_read_link(f"/proc/{launcher}/fd/{one}") for one in descriptors}
    return False


def _open_stderr_of(process: int) -> int:
    """Return a descriptor of the stderr of `process`. Raises OSError."""
    # A copy of its descriptor has the same position in a file, which the launcher goes on to write to. The kernel may
    # permit it to root only.
    pidfd = os.pidfd_open(process)
    try:
        copy = int(ctypes.CDLL(None).syscall(_PIDFD_GETFD, pidfd, 2, 0))
    finally:
        os.close(pidfd)
    return copy if copy >= 0 else os.open(f"/proc/{process}/fd/2", os.O_WRONLY | os.O_APPEND | os.O_NOCTTY)


def _read_link(path: str) -> str:
    """Return what a symbolic link of the kernel refers to, "" if it is gone."""
    with suppress(OSError):
        return read_link(path)
    return ""


def abort_on_failure(abort: Abort, cancel_exit: Callable[[], None]) -> None:
    """End the whole job on an uncaught exception, or on SystemExit with a status other than 0.

    Otherwise the other ranks would wait for this rank without limit. `cancel_exit` unregisters the atexit handlers that
    communicate with the other ranks.
    """
    previous = sys.excepthook
    owner = os.getpid()

    def hook(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        if os.getpid() != owner:
            previous(kind, error, traceback)
            return  # the end of a forked child does not concern the job
        if abort.job_survives and isinstance(error, KeyboardInterrupt):
            previous(kind, error, traceback)
            end_by_signal(signal.SIGINT, f"{abort.rank_name} {describe_failure(error)}; the other ranks continue")
        folded, shown = traceback, ""
        with suppress(Exception):  # a failure here, such as of add_note, must not keep the job from being ended
            folded = _fold(error, traceback)
            # A hook of the program is called on every rank, since it may not write to stderr.
            if previous is sys.__excepthook__:
                from traceback import format_exception  # late: most ranks end well

                shown = "".join(format_exception(kind, error, folded))
        abort.announce(f"{describe_failure(error)}; the job is ended", shown)
        previous(kind, error, folded)
        _flush()
        if isinstance(sys.stderr, io.StringIO) and sys.__stderr__ is not None:
            sys.__stderr__.write(sys.stderr.getvalue())
            sys.__stderr__.flush()
        cancel_exit()
        atexit.unregister(abort_if_failed)
        try:
            _run_atexit_handlers(abort)
        finally:  # also where this process has no memory to find its open files
            abort.abort_all(1)

    sys.excepthook = hook
    sys.exit = _exit
    _observe_exit_code()

    def abort_if_failed() -> None:
        if os.getpid() != owner:
            return
        status = _exit_status(*_exit_code)
        of = f"left by sys.exit with status {status}"
        # A hook that has replaced the one above has been called instead of it.
        error = None if _exit_code else _uncaught_exception()
        if error is not None:
            status, of = 1, describe_failure(error)
        if status:
            _flush()
            if abort.job_survives and (error is None or isinstance(error, KeyboardInterrupt)):
                number = signal.SIGKILL if error is None else signal.SIGINT
                end_by_signal(number, f"{abort.rank_name} {of}; the other ranks continue")
            of = f"{of}; the job is ended"
            abort.announce(of, of)
            abort.abort_all(status)

    atexit.register(abort_if_failed)


def _fold(error: BaseException, traceback: TracebackType | None) -> TracebackType | None:
    """Return `traceback` without the frames of this package where these are of no use to the program's author.

    The frames of the errors that led to `error` are removed likewise. A note states how many were removed. All are
    kept with ``python -X dev``.
    """
    hidden = 0
    folded, known = traceback, set()
    one: BaseException | None = error
    while one is not None and id(one) not in known and not sys.flags.dev_mode:
        known.add(id(one))
        frames: list[TracebackType] = []
        at = traceback if one is error else one.__traceback__
        while at is not None:
            frames.append(at)
            at = at.tb_next
        kept = [frame for frame in frames if not frame.tb_frame.f_code.co_filename.startswith(_PACKAGE)]
        # An error of another type that is raised in the package is a bug in it or in code that it calls.
        if any(isinstance(x, MpicollError) for x in (error, one)) or (frames and kept[-1:] == frames[-1:]):
            hidden += len(frames) - len(kept)
            chain: TracebackType | None = None
            for frame in reversed(kept):
                chain = TracebackType(chain, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
            if one is error:
                folded = chain
            one.with_traceback(chain)
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
    if hidden and sys.version_info >= (3, 11):
        error.add_note(f"[{hidden} frames of mpicoll are not shown; python -X dev shows them]")
    return folded


def describe_failure(error: BaseException) -> str:
    """Return a description of how a rank ended whose program has raised `error`."""
    if isinstance(error, SystemExit):
        return f"left by sys.exit with status {error.code}"
    text, name = "", type(error).__name__
    with suppress(Exception):  # it is the program's code that makes the text
        text = str(error).strip()
    return f"died of {name}: {text.splitlines()[0]}" if text else f"died of {name}"


def _uncaught_exception() -> BaseException | None:
    """Return the exception that has ended the program, or None. For atexit handlers.

    Python keeps it before it calls ``sys.excepthook``. An interactive interpreter, pytest and others keep those that
    they show in the same place; but only one that ends the program has left the outermost frame of it.
    """
    trace = getattr(sys, "last_traceback", None)
    if trace is None or hasattr(sys, "ps1"):  # which an interactive interpreter sets
        return None
    frame = trace.tb_frame
    # The outermost function of a thread that a library in C has started has no caller either.
    is_outermost = frame.f_back is None and frame.f_code.co_name in ("<module>", "_run_module_as_main")
    return sys.last_value if is_outermost else None


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()


_exit_code: list[object] = []
"""Argument of the SystemExit of the main thread, once that ends the interpreter."""

_CODE: Any = SystemExit.__dict__["code"]


def _observe_exit_code() -> None:
    """Record the code of the exception with which the interpreter exits.

    Python does not expose it, and SystemExit reaches no hook. But the interpreter reads the attribute ``code`` of that
    exception when no Python code is left to run. The attribute of a built-in class can be replaced in the dictionary of
    the class only. In a Python that does not show it to the garbage collector nothing is recorded: the other ranks then
    end the job because this one has exited.
    """
    for attributes in gc.get_referents(SystemExit.__dict__):
        attributes["code"] = property(_read_code, _CODE.__set__, _CODE.__delete__)
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))


def _read_code(error: SystemExit) -> object:
    """Return ``error.code``, and record it if it was not Python code that has asked."""
    code: object = _CODE.__get__(error)
    try:
        sys._getframe(1)  # noqa: SLF001  there is no other way to ask
    except ValueError:
        if threading.current_thread() is threading.main_thread():
            _exit_code[:] = [code]
    return code


def _exit_status(code: object = None) -> int:
    """Return the status with which ``sys.exit(code)`` ends a process of a failed job: 0 for 0 and None only.

    The system keeps the lowest 8 bits, so that 256 would be 0.
    """
    return (code & 0xFF or 1) if isinstance(code, int) and code else int(code is not None and code != 0)


def _exit(status: object = None, /) -> NoReturn:
    """Exit the interpreter by raising SystemExit(status).

    Python's own function creates the exception only where Python code catches it, before Python 3.12.
    """
    raise SystemExit(status)
