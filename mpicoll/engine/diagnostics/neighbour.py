"""The next rank on the same host, observed for a SIGTERM that it can't handle.

The handler of SIGTERM is Python code. It does not run while a thread holds the interpreter lock without releasing it,
as in ``sum(range(10**10))`` and in some C code, and neither does the watchdog of that process. Only the signal handler
of faulthandler runs, which writes the stack into a pipe. If the pipe is not empty for some time, this rank ends the
job, or under ULFM the process.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from mpicoll.engine.diagnostics.abort import JobAbort
from mpicoll.engine.diagnostics.deaths import DeathHandler
from mpicoll.engine.diagnostics.peers import Peers
from mpicoll.engine.diagnostics.process_exit import log_to_stderr
from mpicoll.engine.diagnostics.signals import is_readable, sigterm_pipe
from mpicoll.transport.control.events import Message

HANDLE_WITHIN = 1.5
"""Seconds in which a rank handles SIGTERM unless its interpreter lock is held."""

_MAX_STACK = 16 << 10


class Neighbour:
    """The next rank on this host, in the order of ranks and cyclically. Used by the watchdog's thread."""

    def __init__(self, peers: Peers, deaths: DeathHandler, abort: JobAbort) -> None:
        self._peers = peers
        self._deaths = deaths
        self._abort = abort
        self._rank, self._pid = -1, 0
        self._pipe: int | None = None
        self._readable_since = float("inf")

    def find(self, addresses: Sequence[dict[str, Any]]) -> None:
        """Find the neighbour, and let this rank be observed by that of which it is the neighbour."""
        rank = self._peers.rank
        here = [other for other, one in enumerate(addresses) if one["place"] == addresses[rank]["place"]]
        at = here.index(rank)
        self._rank = here[(at + 1) % len(here)]
        self._pid = addresses[self._rank]["pid"]
        pipe = sigterm_pipe()
        if len(here) > 1 and pipe is not None:
            self._peers.send("sigterm pipe", here[at - 1], descriptor=pipe, inode=os.fstat(pipe).st_ino)

    def observe(self, message: Message) -> None:
        """Open the pipe that a rank has named."""
        descriptor, inode = message.body["descriptor"], message.body["inode"]
        if message.source != self._rank or self._pipe is not None:
            return
        with suppress(OSError):  # not permitted, or just gone
            pipe = os.open(f"/proc/{self._pid}/fd/{descriptor}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            if os.fstat(pipe).st_ino == inode:  # else a process of another namespace has this id
                self._pipe = pipe
            else:
                os.close(pipe)

    @property
    def is_late(self) -> bool:
        """True if the neighbour has not handled SIGTERM yet."""
        return self._readable_since < float("inf")

    def check(self, now: float) -> None:
        """End the neighbour, or the job, if the neighbour has received SIGTERM and does not handle it."""
        if self._pipe is None or not is_readable(self._pipe):
            return
        self._readable_since = min(now, self._readable_since)
        if now - self._readable_since < HANDLE_WITHIN:
            return
        stack = os.read(self._pipe, _MAX_STACK).decode("ascii", "replace").rstrip()
        os.close(self._pipe)
        self._pipe, self._readable_since = None, float("inf")
        rank, peers = self._rank, self._peers
        if rank not in peers.reachable():
            return
        died = f"rank {rank} of {peers.size} died of SIGTERM, in code that holds the interpreter lock"
        if peers.fault_tolerant:
            log_to_stderr(f"{died}; the other ranks continue. {stack}", separate=True)
            self._deaths.kill(rank)
        elif not self._abort.is_expected:
            log_to_stderr(f"{died}; the job is ended. {stack}", separate=True)
            self._abort.notify("ends the job")
            self._abort.abort_all(128 + signal.SIGTERM)
