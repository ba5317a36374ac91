"""The abort of a job: its announcement to the other ranks, and the rank that carries it out."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn
from zlib import crc32

from mpicoll.engine.diagnostics.peers import QUERY_TIMEOUT, Peers
from mpicoll.engine.diagnostics.process_exit import end_launcher, log_to_stderr, run_exit_hooks
from mpicoll.engine.diagnostics.reporter import BRIEF_QUERY_TIMEOUT, Reporter
from mpicoll.wording import rank_list

TAKEOVER = 3.0
"""Seconds that the other ranks give the coordinator before they abort the job themselves."""

_LAUNCHER_TIMEOUT = 3.0
"""Seconds in which the launcher has ended a job on several hosts, if all hosts reply."""

_SAME_CAUSE = 0.25
"""Seconds in which ranks that end with the same error receive each other's announcements."""

_LONG_WAIT = 10.0
"""Seconds after which an operation is worth a report if the launcher or the batch system ends the job."""

_FLUSH_TIMEOUT = 0.2
"""Seconds for the last messages to be sent."""


class JobAbort:
    """The abort of the job. Except for :meth:`announce` and :meth:`abort_all`, used by the watchdog's thread.

    `abort` ends all ranks that MPI reaches, with an exit status. ``places`` are the hosts of all ranks, and
    ``host_lost`` is True if one of them can't be reached.
    """

    def __init__(self, peers: Peers, reporter: Reporter, abort: Callable[[int], None]) -> None:
        self.places: list[Any] = []
        self.host_lost = False
        self._peers = peers
        self._reporter = reporter
        self._abort = abort
        self._deadline: float | None = None  # time at which this rank aborts the job if no other rank has
        self._why = ""
        self._announcement = threading.Condition()  # guards _by_cause, and Peers.announced with it
        self._by_cause: dict[str, set[int]] = {}  # the ranks that announced the same cause, by its hash

    @property
    def job_survives(self) -> bool:
        """True if the job goes on without a rank that dies (ULFM)."""
        return self._peers.fault_tolerant

    @property
    def rank_name(self) -> str:
        """This rank, for messages."""
        return f"rank {self._peers.rank} of {self._peers.size}"

    @property
    def is_expected(self) -> bool:
        """True if another rank is about to abort the job."""
        return self._deadline is not None

    def announce(self, of: str, alike: str = "") -> None:
        """Report to stderr and to the other ranks that this rank aborts the job, because of `of`.

        Ranks that call it within ``_SAME_CAUSE`` seconds with the same non-empty `alike`, apart from their own rank
        number in it, are reported once, by the lowest of them. Only that rank returns at once, to abort the job.
        If it fails to, the other ranks report themselves and return after ``TAKEOVER`` seconds.
        """
        peers = self._peers
        if not alike or peers.network is None:
            log_to_stderr(f"rank {peers.rank} of {peers.size} {of}", separate=True)
            self.notify(of)
            return
        alike = re.sub(rf"\brank {peers.rank}\b", "rank", alike)
        cause = f"{crc32(alike.encode()):x}"
        self.notify(of, cause)
        with self._announcement:
            self._announcement.wait_for(lambda: len(peers.announced) >= peers.size - 1, _SAME_CAUSE)
            ranks = {peers.rank, *self._by_cause.get(cause, ())}
        if peers.rank != min(ranks):
            time.sleep(TAKEOVER)  # in which this process is ended
            ranks = {peers.rank}
        log_to_stderr(f"{rank_list(ranks)} of {peers.size} {of}", separate=True)

    def notify(self, of: str, cause: str = "") -> None:
        """Send the abort by this rank to the other watchdogs, and run the exit hooks of this process.

        The other ranks then search for no other cause.
        """
        network = self._peers.network
        if network is not None:
            network.send({"kind": "abort", "of": of, "cause": cause})
            network.flush(_FLUSH_TIMEOUT)
        run_exit_hooks()

    def receive(self, source: int, of: str, cause: str) -> None:
        """Record that the rank `source` has announced that it aborts the job."""
        with self._announcement:
            self._peers.announced[source] = of
            self._by_cause.setdefault(cause, set()).add(source)
            self._announcement.notify_all()
        self.expect(f"rank {source} of {self._peers.size} {of.partition('; the job is ')[0]}", 2 * TAKEOVER)

    def expect(self, why: str, seconds: float) -> None:
        """Expect another rank to abort the job; abort it on this rank if it still runs after `seconds`."""
        if self._deadline is None:
            self._deadline, self._why = time.monotonic() + seconds, why

    def abort_if_overdue(self, now: float) -> None:
        """Abort the job if another rank should have done so before `now`."""
        if self._deadline is not None and now > self._deadline:
            self.abort(self._why)

    def request(self, why: str) -> None:
        """Abort the job through the coordinator if possible."""
        if self._deadline is not None:
            return
        peers = self._peers
        coordinator = peers.coordinator()
        if peers.network is None or coordinator == peers.rank:
            self.abort(why)
        peers.send("abort request", coordinator, why=why)
        # If the coordinator does not reply, one rank aborts the job, and the others only if that one fails as well.
        deputy = peers.rank == min(rank for rank in peers.reachable() if rank != coordinator)
        self.expect(why, QUERY_TIMEOUT + TAKEOVER + (0 if deputy else QUERY_TIMEOUT + TAKEOVER))

    def abort(self, why: str) -> NoReturn:
        """Report the states of all ranks, and abort the job."""
        summary, write = self._reporter.examine(why)
        log_to_stderr(f"{why}; the job is ended.\n{summary}".rstrip(), separate=True)
        if where := write():
            log_to_stderr(where)
        self.notify("ends the job")
        self.abort_all(1)
        raise SystemExit  # reached in tests only

    def report_long_waits(self, why: str, log: Callable[[str], None]) -> None:
        """Report the states of all ranks by `log` and in a file if an operation has been waiting for ``_LONG_WAIT``.

        In the little time that a launcher leaves, and not for a program that is ended while it works.
        """
        summary, write = self._reporter.examine(why, BRIEF_QUERY_TIMEOUT, _LONG_WAIT)
        if summary:
            log(summary)
        if where := write():
            log(where)

    def abort_all(self, status: int) -> None:
        """End all reachable ranks with `status`, and the launcher if it would wait for unreachable ones."""
        if self.host_lost:
            if self.places.index(self.places[self._peers.rank]) == self._peers.rank:
                end_launcher()  # one for each host
        elif any(place != self.places[0] for place in self.places):
            end_launcher(_LAUNCHER_TIMEOUT)
        self._abort(status)
