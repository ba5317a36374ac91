"""Deaths of other ranks."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

from mpicoll.engine.diagnostics.abort import JobAbort
from mpicoll.engine.diagnostics.peers import Peers
from mpicoll.engine.diagnostics.process_exit import log_to_stderr
from mpicoll.engine.diagnostics.reporter import BRIEF_QUERY_TIMEOUT, Reporter
from mpicoll.transport.control.events import PeerExit
from mpicoll.transport.control.process_status import Process, compute_max_descriptors, signal_name
from mpicoll.transport.waiting import wait_for
from mpicoll.wording import rank_list

GRACE = 1.0
"""Seconds that a rank has to raise Timeout after it has the report, and the coordinator to abort after a death."""

_MPI_DETECTION_TIME = 8.0
"""Seconds within which Open MPI's launcher reports a death to MPI on the other ranks, if it does."""

_STATUS_TIMEOUT = 0.2
"""Seconds in which the exit status of a process is available after the launcher's reaction to it."""


class DeathHandler:
    """Handler of ranks that end unannounced: they end the job, unless ranks may die (ULFM).

    ``report`` is called on the coordinator, before it aborts the job, with the rank and the reason, and on ranks that
    report a death as the launcher's SIGTERM ends them; ``mark_dead`` with a rank that has died in a job in which ranks
    may die. ``find_undetected_failures`` returns the dead ranks whose death MPI has not detected. ``suspicion`` is the
    reason why the launcher may be about to end the job.
    """

    def __init__(self, peers: Peers, reporter: Reporter, abort: JobAbort) -> None:
        self.report: Callable[[int, str], None] = lambda rank, why: None
        self.mark_dead: Callable[[int], None] = lambda rank: None
        self.find_undetected_failures: Callable[[], set[int]] = set
        self._died_at: dict[int, float] = {}  # in a job in which ranks may die
        self._unreported: dict[int, str] = {}  # how ranks died, for the coordinator to report
        self._reported: set[int] = set()  # those that it has reported
        self.suspicion = ""
        self._peers = peers
        self._reporter = reporter
        self._abort = abort
        self._processes: dict[int, Process] = {}
        self._exits: dict[int, PeerExit] = {}  # of these processes, should they end

    def observe_processes(self, addresses: Sequence[dict[str, Any]]) -> None:
        """Observe the processes of the ranks on this host. `addresses` are the addresses of all ranks."""
        most = compute_max_descriptors()
        for rank, one in enumerate(addresses):
            if rank != self._peers.rank and one["place"] == addresses[self._peers.rank]["place"]:
                with suppress(OSError):  # of another PID namespace, or just ended
                    self._processes[rank] = Process(one, descriptor=len(self._processes) < most)
                    self._exits[rank] = PeerExit(rank, "closed", "", one["pid"], one["host"])

    def find_overdue(self, now: float) -> set[int]:
        """Return the ranks that have died in a job in which ranks may die, that MPI has not detected in time."""
        late = {rank for rank, since in self._died_at.items() if now - since > _MPI_DETECTION_TIME}
        return late & self.find_undetected_failures() if late else set()

    def kill(self, rank: int) -> None:
        """End the process of a rank of this host."""
        process = self._processes.get(rank)
        if process is not None:
            with suppress(OSError):  # it has just ended
                process.kill()

    def report_ended(self, ranks: Collection[int]) -> bool:
        """Report those of `ranks` on this host whose processes have failed. Return True if a process of this host has.

        Only the lowest of the other ranks on this host reports, or if the launcher has killed that, the next one. A
        rank that SIGTERM has ended has reported that itself.
        """
        peers = self._peers
        here = {rank: process for rank, process in self._processes.items() if rank in ranks}
        lower = [process for rank, process in self._processes.items() if rank < peers.rank and rank not in here]
        ended: dict[int, int] = {}

        def report_all() -> bool | None:
            ended.update((rank, status) for rank in here if (status := here[rank].status(0.0)) is not None)
            if not all(process.status(0.0) == -signal.SIGKILL for process in lower):
                return None
            for rank in sorted(ended):
                process = here.pop(rank, None)
                if process is not None and ended[rank] not in (0, -signal.SIGTERM):
                    why = self._describe_death(self._exits[rank], ended[rank])
                    self.report(rank, why)
                    log_to_stderr(f"{why}; the job is ended", separate=True)
            return None if here else True

        wait_for(report_all, _STATUS_TIMEOUT)
        statuses = {*ended.values(), *(process.status(0.0) for process in lower)}
        return bool(statuses - {0, None})

    def mark_reported(self, ranks: Collection[int]) -> None:
        """Record that the coordinator has reported the deaths of `ranks`."""
        self._reported.update(ranks)

    def report_unreported(self, excluded: Collection[int]) -> bool:
        """Report the deaths that the coordinator has not reported, as the launcher's SIGTERM ends this rank too.

        The coordinator may get no processor in that time. As it forwards the exits of other ranks, the processes of
        this host are examined as well. `excluded` are ranks that the launcher has ended. Return True if there is such
        a death.
        """
        peers = self._peers
        known = {*excluded, *peers.announced, *peers.left, *self._reported}
        for rank in sorted(set(self._processes) - known):
            status = self._processes[rank].status(0.0)
            if status not in (None, 0, -signal.SIGTERM, 128 + signal.SIGTERM):
                self._unreported[rank] = self._describe_death(self._exits[rank], status)
        unreported = {rank: why for rank, why in self._unreported.items() if rank not in self._reported}
        for rank, why in unreported.items():
            self.report(rank, why)
        for why in sorted(set(unreported.values())):
            log_to_stderr(f"{why}; the job is ended", separate=True)
        return bool(unreported)

    def _describe_death(self, gone: PeerExit, status: int | None) -> str:
        where = f" (process {gone.pid} on {gone.host})" if gone.pid else ""
        return f"rank {gone.rank} of {self._peers.size}{where} {describe_exit(gone, status)}"

    def handle(self, gone: PeerExit) -> None:
        """Handle the exit of a rank."""
        peers = self._peers
        if gone.why == "left":
            return
        if peers.fault_tolerant:
            self._died_at[gone.rank] = time.monotonic()
            self.mark_dead(gone.rank)
            return
        if gone.rank in peers.announced or gone.rank in peers.left:
            return
        process = self._processes.pop(gone.rank, None)
        status = None if process is None else process.status()
        if process is not None:
            process.close()
        why = self._describe_death(gone, status)
        if peers.coordinator() == peers.rank:
            self.report(gone.rank, why)
        if status == 0:
            # If its farewell was lost, this is a normal exit; if it did not finalize MPI, the launcher ends the job.
            self.suspicion = self.suspicion or f"{why}; the job is ended"
            return
        lost = [gone.rank]
        if gone.why == "unreachable":  # and so are all ranks on its host
            self._abort.host_lost = True
            places = self._abort.places
            lost = [rank for rank, place in enumerate(places) if place == places[gone.rank]]
            why = f"{rank_list(lost)} of {peers.size} can no longer be reached: {gone.host} does not respond"
        peers.announced.update(dict.fromkeys(lost, why))
        if peers.coordinator() != peers.rank:
            self._unreported |= dict.fromkeys(lost, why)
            self._abort.expect(why, GRACE)
            return
        log_to_stderr(
            f"{why}; the job is ended" + (f". Its stacks:\n{gone.crash_output}" if gone.crash_output else ""),
            separate=True,
        )
        peers.send("death reported", ranks=lost)
        self._reporter.examine(why, BRIEF_QUERY_TIMEOUT)[1]()
        self._abort.notify("ends the job")
        self._abort.abort_all(1 if status is None else status if status > 0 else 128 - status)


def describe_exit(gone: PeerExit, status: int | None) -> str:
    """Return a description of how a rank ended. `status` is its exit status, negative for a signal, None if unknown."""
    if status is None and gone.crash_output:
        return f"has crashed ({gone.crash_output.splitlines()[0]})"
    if status is None:
        return "ended without notice: killed, or ended by os._exit"
    if status >= 0:
        return f"ended with exit status {status} without notice (os._exit?)"
    name = signal_name(-status)
    hint = " (kill -9, or the kernel's out-of-memory killer)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}" if not gone.crash_output else f"died of {name}"
