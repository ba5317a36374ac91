"""Exit status of other processes of this host. Linux."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
import struct
from contextlib import suppress
from itertools import takewhile

from mpicoll.proc_files import read_file, read_link
from mpicoll.transport.waiting import wait_for

_GET_INFO = 3 << 30 | 64 << 16 | 0xFF << 8 | 11
"""The ioctl PIDFD_GET_INFO, with a struct of 64 bytes."""

_EXIT = 8
"""PIDFD_INFO_EXIT: asks for the exit status, and says in the answer that it is there."""


def _parse_release(text: str) -> tuple[int, ...]:
    """Return the first two numbers of the release of a kernel, such as (6, 15)."""
    return tuple(int("".join(takewhile(str.isdigit, part)) or 0) for part in text.split(".")[:2])


_keeps_status = _parse_release(os.uname().release) >= (6, 15)
"""True if a pidfd keeps the exit status after the parent has waited for the process. Older kernels have the status in
/proc/PID/stat between the two, if that was opened before the process ended."""

_MOST = 1024
"""Number of processes that are observed with a descriptor each, where the limit of descriptors is high."""

_STATUS_DELAY = 0.1
"""Seconds within which the exit status of a process is available after it has closed its descriptors."""


def describe_process() -> dict[str, object]:
    """Return what identifies this process on its host, for the :class:`Process` of other processes."""
    namespace, start = "", 0
    with suppress(OSError, IndexError, ValueError):
        namespace, start = _pid_namespace(), _start_time(read_file("/proc/self/stat").encode())
    return {"pid": os.getpid(), "pid_namespace": namespace, "start": start}


def compute_max_descriptors() -> int:
    """Return the number of processes that may be observed with a descriptor each, so that most are left to the
    program."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MOST if soft == resource.RLIM_INFINITY else min(_MOST, soft // 16)


class Process:
    """A process of this host. With a descriptor it is observed from now on; otherwise its exit status is available only
    until its parent waits for it.

    Its number is that of another process if this one is in another PID namespace, or if it has ended. So the process is
    given by what :func:`describe_process` returned in it. Raises OSError if there is no such process.
    """

    def __init__(self, process: dict[str, object], *, descriptor: bool = True) -> None:
        self._pid = int(str(process["pid"]))
        self._start = process["start"]
        self._pidfd: int | None = None
        self._stat: int | None = None
        if process["pid_namespace"] != _pid_namespace():
            raise ProcessLookupError(errno.ESRCH, "it is in another PID namespace")
        if not descriptor:
            return
        if _keeps_status:
            # A filter of system calls may forbid it; a Python that was built with old headers does not have it.
            with suppress(OSError, AttributeError):
                self._pidfd = os.pidfd_open(self._pid)
        try:
            stat = self._open_stat()
        except OSError:
            self.close()
            raise
        if self._pidfd is None:
            self._stat = stat
        else:
            os.close(stat)

    def _open_stat(self) -> int:
        """Return a descriptor of the file with its state. Raises OSError if the process has ended."""
        stat = os.open(f"/proc/{self._pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if _start_time(os.pread(stat, 4096, 0)) != self._start:
                raise ProcessLookupError(errno.ESRCH, "another process has its number")
        except OSError:
            os.close(stat)
            raise
        return stat

    def close(self) -> None:
        """Stop observing it."""
        for fd in (self._pidfd, self._stat):
            if fd is not None:
                os.close(fd)
        self._pidfd = self._stat = None

    def kill(self) -> None:
        """Send it SIGKILL. Raises OSError if it has ended."""
        if not hasattr(os, "pidfd_open"):
            os.close(self._open_stat())
            os.kill(self._pid, signal.SIGKILL)
            return
        pidfd = os.pidfd_open(self._pid)
        try:
            os.close(self._open_stat())  # the number is still that of the process
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        finally:
            os.close(pidfd)

    def status(self, timeout: float = _STATUS_DELAY) -> int | None:
        """Return its exit status, or the negative number of the signal that killed it, as
        :func:`os.waitstatus_to_exitcode` does. None if it is alive after `timeout` seconds or if the status can't be
        read."""
        found = wait_for(self._query, timeout)
        return None if found is None else os.waitstatus_to_exitcode(found & ~0x80)  # without the bit for a core dump

    def _query(self) -> int | None:
        status = None if self._pidfd is None else self._query_kernel(self._pidfd)
        if status is None and self._stat is None:
            with suppress(OSError):  # a pidfd has the status only after the parent has waited
                self._stat = self._open_stat()
        return self._read_stat() if status is None else status

    def _query_kernel(self, pidfd: int) -> int | None:
        answer = bytearray(64)
        struct.pack_into("Q", answer, 0, _EXIT)
        with suppress(OSError):
            fcntl.ioctl(pidfd, _GET_INFO, answer)
            if struct.unpack_from("Q", answer)[0] & _EXIT:
                return int(struct.unpack_from("i", answer, 60)[0])
        return None

    def _read_stat(self) -> int | None:
        if self._stat is not None:
            with suppress(OSError):
                fields = _fields(os.pread(self._stat, 4096, 0))
                if fields[0] in (b"Z", b"X"):
                    return int(fields[-1])
        return None


def _pid_namespace() -> str:
    return read_link("/proc/self/ns/pid")


def _fields(stat: bytes) -> list[bytes]:
    """Return the fields of /proc/PID/stat from the state on."""
    # PID (NAME) STATE ... STATUS, where the name may contain anything.
    return stat.rpartition(b")")[2].split()


def _start_time(stat: bytes) -> int:
    return int(_fields(stat)[19])


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGKILL."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
