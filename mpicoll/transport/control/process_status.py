"""How other processes of this host have ended. Linux."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import time
from contextlib import suppress

_GET_INFO = 3 << 30 | 64 << 16 | 0xFF << 8 | 11
"""The ioctl PIDFD_GET_INFO, with a struct of 64 bytes."""

_EXIT = 8
"""PIDFD_INFO_EXIT: asks for the exit status, and says in the answer that it is there."""

_PATIENCE = 0.1
"""Seconds in which the status of a process appears that has just closed its descriptors."""


class Process:
    """A process of this host, watched from now on. Raises OSError if there is none of this number."""

    def __init__(self, pid: int) -> None:
        self._fd = os.pidfd_open(pid)
        # Where the kernel can't be asked (before 6.15), the status stands here from its end until its parent has seen
        # it, for those who had opened the file before.
        self._stat = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Watch it no more."""
        os.close(self._fd)
        os.close(self._stat)

    def status(self) -> int | None:
        """How it has ended, as :func:`os.waitstatus_to_exitcode` says it: its exit status, or the negative number of a
        signal. None if it lives, or if nobody can tell. Takes a tenth of a second at most."""
        deadline = time.monotonic() + _PATIENCE
        while True:
            found = self._asked()
            if found is None:
                found = self._read()
            if found is not None:
                return os.waitstatus_to_exitcode(found & ~0x80)  # without the bit for a core dump
            if time.monotonic() > deadline:
                return None
            time.sleep(1e-3)

    def _asked(self) -> int | None:
        answer = bytearray(64)
        struct.pack_into("Q", answer, 0, _EXIT)
        with suppress(OSError):
            fcntl.ioctl(self._fd, _GET_INFO, answer)
            if struct.unpack_from("Q", answer)[0] & _EXIT:
                return int(struct.unpack_from("i", answer, 60)[0])
        return None

    def _read(self) -> int | None:
        with suppress(OSError):
            # PID (NAME) STATE ... STATUS, where the name may contain anything.
            fields = os.pread(self._stat, 4096, 0).rpartition(b")")[2].split()
            if fields[0] in (b"Z", b"X"):
                return int(fields[-1])
        return None


def signal_name(number: int) -> str:
    """Such as SIGKILL."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
