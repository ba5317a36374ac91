"""The next rank on the same host, observed for a SIGTERM that it can't handle.

The handler of SIGTERM is Python code. It does not run while a thread holds the interpreter lock without releasing it,
as in ``sum(range(10**10))`` and in some C code, and neither does the watchdog of that process. Only the signal handler
of faulthandler runs, which writes the stack into a pipe. If the pipe is not empty for some time, this rank ends the
job, or under ULFM the process.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

from mpicoll.engine.diagnostics.abort import JobAbort
from mpicoll.engine.diagnostics.deaths import DeathHandler
from mpicoll.engine.diagnostics.peers import Peers
from mpicoll.engine.diagnostics.process_exit import log_to_stderr
from mpicoll.engine.diagnostics.signals import is_readable

HANDLE_WITHIN = 1.5
"""Seconds in which a rank handles SIGTERM unless its interpreter lock is held."""

_MAX_STACK = 16 << 10


class Neighbour:
    """The next living rank on this host, in the order of ranks and cyclically. Used by the watchdog's thread."""

    def __init__(self, peers: Peers, deaths: DeathHandler, abort: JobAbort) -> None:
        self._peers = peers
        self._deaths = deaths
        self._abort = abort
        self._others: list[tuple[int, dict[str, Any]]] = []  # on this host, the next one first
        self._rank = -1
        self._pipe: int | None = None
        self._readable_since = float("inf")

    def observe(self, addresses: Sequence[dict[str, Any]]) -> None:
        """Observe the neighbour from now on. `addresses` are the addresses of all ranks."""
        rank = self._peers.rank
        own = addresses[rank]
        cyclic = [(rank + distance) % len(addresses) for distance in range(1, len(addresses))]
        # In another PID namespace, the id of a rank is that of a process that has nothing to do with the job.
        self._others = [
            (other, addresses[other])
            for other in cyclic
            if all(addresses[other][name] == own[name] for name in ("place", "pid_namespace"))
        ]

    def _find(self, exits: Collection[int]) -> None:
        """Open the pipe of the next rank if the neighbour is gone. `exits` are the ranks that have ended."""
        if self._rank >= 0 and self._rank not in exits:
            return
        self._close()
        self._rank, address = next(((rank, one) for rank, one in self._others if rank not in exits), (-1, {}))
        if pipe := address.get("sigterm_pipe"):
            descriptor, inode = pipe
            path = f"/proc/{address['pid']}/fd/{descriptor}"
            with suppress(OSError):  # not permitted, or just gone
                # Else another process has this id now; to open its file could have effects, as for a FIFO.
                if os.stat(path).st_ino == inode:  # noqa: PTH116
                    self._pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)

    def _close(self) -> None:
        if self._pipe is not None:
            os.close(self._pipe)
        self._pipe, self._readable_since = None, float("inf")

    @property
    def is_late(self) -> bool:
        """True if the neighbour has not handled SIGTERM yet."""
        return self._readable_since < float("inf")

    def check(self, now: float) -> None:
        """End the neighbour, or the job, if the neighbour has received SIGTERM and does not handle it."""
        network = self._peers.network
        if network is None:  # MPI is finalized, or not started
            self._close()
            return
        self._find(network.exits)
        if self._pipe is None or not is_readable(self._pipe):
            return
        self._readable_since = min(now, self._readable_since)
        if now - self._readable_since < HANDLE_WITHIN:
            return
        stack = os.read(self._pipe, _MAX_STACK).decode("ascii", "replace").rstrip()
        self._close()
        rank, peers = self._rank, self._peers
        if rank not in peers.reachable():
            return
        died = f"rank {rank} of {peers.size} died of SIGTERM, while a thread held its interpreter lock"
        stack = f"The stack of its main thread:\n{stack.partition(chr(10))[2]}"  # without the title
        if peers.fault_tolerant:
            log_to_stderr(f"{died}; the other ranks continue. {stack}", separate=True)
            self._deaths.kill(rank)
        elif not self._abort.is_expected:
            log_to_stderr(f"{died}; the job is ended. {stack}", separate=True)
            self._abort.notify("ends the job")
            self._abort.abort_all(128 + signal.SIGTERM)
