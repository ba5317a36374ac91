"""Run a launcher, and end all processes of its job if the program that started it ends.

Started as a script (``python -I -S guard.py PARENT GRACE DIRECTORY COMMAND...``), with nothing but the standard
library, since it runs as long as the job. It exits with the launcher's exit status.
"""

import ctypes
import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_STOP = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


def main() -> int:
    """Run the command. End its job on SIGTERM, SIGINT or SIGHUP, or when the parent has ended."""
    parent, grace, directory, command = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3], sys.argv[4:]
    # Orphaned processes of the job become children of this process, which can then wait for them and end them.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # Where the parent ignores SIGCHLD, the kernel would reap the launcher, and its status would be lost.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {*_STOP, signal.SIGCHLD})
    job = os.posix_spawn(command[0], command, _make_environment(Path(command[0])), setsigmask=[])
    kill_at: float | None = None
    status: int | None = None
    while status is None:
        # The parent's process id is polled: PR_SET_PDEATHSIG would fire when the thread ends that started this process,
        # and a pipe stays open in children that the parent has forked.
        got = signal.sigtimedwait({*_STOP, signal.SIGCHLD}, 0.25)
        orphan = os.getppid() != parent
        if kill_at is None and (orphan or (got is not None and got.si_signo in _STOP)):
            kill_at = time.monotonic() + grace
            os.kill(job, signal.SIGTERM)
        elif kill_at is not None and time.monotonic() > kill_at:
            os.kill(job, signal.SIGKILL)
        status = _reap(job)
    if kill_at is not None:
        # Intel MPI's mpirun is a script, which ends without a word to the launcher that it has started.
        for pid in _children():
            with suppress(OSError):  # it has ended, or runs as another user
                os.kill(pid, signal.SIGTERM)
    _end_leftovers(time.monotonic() + grace)
    if os.getppid() != parent:
        shutil.rmtree(directory, ignore_errors=True)
    return status


def _make_environment(program: Path) -> dict[str, str]:
    """Return the environment of the launcher.

    Intel MPI's mpirun is a script that runs the first mpiexec.hydra in PATH, which may be that of another MPI.
    """
    with suppress(OSError), program.open("rb") as file:
        if file.read(2) == b"#!" and program.with_name("mpiexec.hydra").exists():
            return {**os.environ, "PATH": os.pathsep.join([str(program.parent), os.environ.get("PATH", os.defpath)])}
    return dict(os.environ)


def _reap(job: int) -> int | None:
    """Return the exit status of `job`, as a shell would, if it has ended; reap other children that have ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return None
        if pid == 0:
            return None
        if pid == job:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _end_leftovers(kill_at: float) -> None:
    """Wait until `kill_at` for children that exit by themselves, such as multiprocessing's resource tracker; then send
    SIGKILL to the others."""
    while (left := _children()) and time.monotonic() < kill_at + 5:
        if time.monotonic() > kill_at:
            for pid in left:
                with suppress(PermissionError):  # it now runs as another user
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
        _reap(0)


def _children() -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # PID (NAME) STATE PARENT ..., where the name may contain anything.
            parent = stat.read_text(errors="replace").rpartition(")")[2].split()[1]
        except OSError:
            continue
        if int(parent) == os.getpid():
            found.append(int(stat.parent.name))
    return found


if __name__ == "__main__":
    sys.exit(main())
