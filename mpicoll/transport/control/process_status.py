"""Exit status of other processes of this host. Linux."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
from contextlib import suppress

from mpicoll.transport.waiting import wait_for

_GET_INFO = 3 << 30 | 64 << 16 | 0xFF << 8 | 11
"""The ioctl PIDFD_GET_INFO, with a struct of 64 bytes."""

_EXIT = 8
"""PIDFD_INFO_EXIT: asks for the exit status, and says in the answer that it is there."""

_STATUS_DELAY = 0.1
"""Seconds within which the exit status of a process is available after it has closed its descriptors."""


class Process:
    """A process of this host, observed from now on. Raises OSError if no process has this id."""

    def __init__(self, pid: int) -> None:
        self._fd = os.pidfd_open(pid)
        # Before Linux 6.15, which has the ioctl, the status is in this file between the end of the process and the wait
        # of its parent, if the file was opened before.
        self._stat = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Stop observing it."""
        os.close(self._fd)
        os.close(self._stat)

    def kill(self) -> None:
        """Send it SIGKILL."""
        signal.pidfd_send_signal(self._fd, signal.SIGKILL)

    def status(self) -> int | None:
        """Return its exit status, or the negative number of the signal that killed it, as
        :func:`os.waitstatus_to_exitcode` does. None if it is alive or if the status can't be read. Takes at most a
        tenth of a second."""
        found = wait_for(self._query, _STATUS_DELAY)
        return None if found is None else os.waitstatus_to_exitcode(found & ~0x80)  # without the bit for a core dump

    def _query(self) -> int | None:
        status = self._query_kernel()
        return self._read_stat() if status is None else status

    def _query_kernel(self) -> int | None:
        answer = bytearray(64)
        struct.pack_into("Q", answer, 0, _EXIT)
        with suppress(OSError):
            fcntl.ioctl(self._fd, _GET_INFO, answer)
            if struct.unpack_from("Q", answer)[0] & _EXIT:
                return int(struct.unpack_from("i", answer, 60)[0])
        return None

    def _read_stat(self) -> int | None:
        with suppress(OSError):
            # PID (NAME) STATE ... STATUS, where the name may contain anything.
            fields = os.pread(self._stat, 4096, 0).rpartition(b")")[2].split()
            if fields[0] in (b"Z", b"X"):
                return int(fields[-1])
        return None


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGKILL."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
