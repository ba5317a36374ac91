"""The watchdog thread of a rank, which bounds waits, detects failed ranks and aborts the job.

A blocking MPI call can't be left, and does not report which ranks it waits for. So each rank runs this thread, which
communicates with the watchdogs of the other ranks beside MPI (:mod:`mpicoll.transport.control.network`). The lowest
living rank is the *coordinator*: it collects the states of all ranks, writes the report, and prints the reason to
stderr once for the whole job.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from mpicoll.config import config
from mpicoll.engine.diagnostics.abort import TAKEOVER, JobAbort
from mpicoll.engine.diagnostics.deaths import GRACE, DeathHandler
from mpicoll.engine.diagnostics.flight_recorder import Entry, Group, recorder
from mpicoll.engine.diagnostics.late_imports import load_analysis
from mpicoll.engine.diagnostics.local_waits import LocalWaits, describe_wait
from mpicoll.engine.diagnostics.mailbox import Mailbox
from mpicoll.engine.diagnostics.neighbour import Neighbour
from mpicoll.engine.diagnostics.peers import Peers
from mpicoll.engine.diagnostics.process_exit import end_by_signal, log_to_stderr
from mpicoll.engine.diagnostics.reporter import Reporter
from mpicoll.engine.diagnostics.signals import (
    SignalMonitor,
    has_received_sigterm,
    renew_sigterm_handling,
    reset_signal_handling,
)
from mpicoll.engine.diagnostics.unsatisfiable import Cause, UnsatisfiableWaits
from mpicoll.errors import RankFailed
from mpicoll.logs import get_logger
from mpicoll.transport.control.events import Message, PeerExit
from mpicoll.transport.control.network import ControlNetwork
from mpicoll.wording import ranks_and_verb

_TIMEOUT_MARGIN = 2.0
"""Seconds that a call has to raise Timeout by itself, where it can."""

_LOAD_ANALYSIS_AFTER = 2.0
"""Seconds after its start at which the watchdog imports what analyses the states of the ranks."""

MIN_REPORTED_TIMEOUT = 0.5
"""Shortest bound, in seconds, that is worth a report: with a shorter one a program only polls for a message."""


class Watchdog:
    """The watchdog of a rank.

    It aborts the job when an operation has been waiting for longer than the timeout of its communicator, when an
    operation can never complete, or when a rank has died, unless ranks may die (ULFM).

    `period` is the maximum number of seconds between two checks. `abort` ends all ranks that MPI reaches, with an exit
    status. `signals`, from :func:`~mpicoll.engine.diagnostics.signals.listen_for_signals`, lets the watchdog abort
    the job when Ctrl-C can't interrupt a blocked thread, and report which ranks SIGTERM has ended.
    """

    def __init__(self, period: float, abort: Callable[[int], None], signals: int | None = None) -> None:
        self.waits = LocalWaits()
        self.peers = Peers(self.waits)
        self.reporter = Reporter(self.peers)
        self.mailbox = Mailbox(self.peers)
        self.abort = JobAbort(self.peers, self.reporter, abort)
        self.deaths = DeathHandler(self.peers, self.reporter, self.abort)
        self.unsatisfiable = UnsatisfiableWaits(self.waits, self.peers, self.abort)
        self._neighbour = Neighbour(self.peers, self.deaths, self.abort)
        # For each wait and each poll of it, without the cost of another attribute.
        self.active = self.waits.active
        self.check = self.unsatisfiable.check
        self._signals = SignalMonitor(signals, self.peers, self.deaths, self.abort, self._handle)
        self._joined = threading.Event()
        self.is_finalizing: Callable[[], bool] = lambda: False
        """A function that returns True during MPI_Finalize."""
        self.is_closed_at_exit = False
        """True if :meth:`close` is called after MPI_Finalize."""
        self._period = period
        self._leaving = False
        self._left_at = 0.0
        self._ending = threading.Lock()
        self._load_analysis_at = time.monotonic() + _LOAD_ANALYSIS_AFTER
        threading.Thread(target=self._run, name="mpicoll-watch", daemon=True).start()

    def join(
        self,
        network: ControlNetwork,
        addresses: Sequence[dict[str, Any]],
        job: str,
        folder: str | None,
        *,
        fault_tolerant: bool,
    ) -> None:
        """Communicate with the other ranks through `network` from now on.

        `addresses` are the addresses of all ranks, by rank. `job` names the job. Reports are written to
        `folder` unless it is None. `fault_tolerant` is True if ranks may die (ULFM).
        """
        peers = self.peers
        peers.rank, peers.size, peers.fault_tolerant = network.rank, network.size, fault_tolerant
        self.reporter.job, self.reporter.folder = job, folder
        recorder.name_job(job)
        self.abort.places = [sys.intern(one["place"]) for one in addresses]  # few in many ranks
        self.deaths.observe_processes(addresses)
        if network.crash_fd is not None and not faulthandler.is_enabled():
            faulthandler.enable(file=network.crash_fd)
        peers.network = network
        self._signals.wake_network()
        self._neighbour.observe(addresses)
        self._joined.set()

    def leave(self) -> None:
        """Announce to the other ranks that this rank makes no more calls."""
        if self.peers.fault_tolerant or not self.is_closed_at_exit:
            reset_signal_handling()
        else:
            renew_sigterm_handling()  # for the SIGTERM of the launcher that follows the death of a rank
        if has_received_sigterm():
            time.sleep(TAKEOVER)  # in which the watchdog's thread ends this process
            end_by_signal(signal.SIGTERM, f"{self.abort.rank_name} died of SIGTERM")
        network, self._leaving, self._left_at = self.peers.network, True, time.monotonic()
        recorder.mark_left()
        if network is not None:
            network.leave({"kind": "left"} | self.waits.final_state(self.peers.rank))
            network.wake()  # the launcher kills a rank that does not react to SIGTERM within a second

    def close(self) -> None:
        """Close the control network after all ranks have left and MPI is finalized."""
        reset_signal_handling()
        if has_received_sigterm():
            self._end_by_sigterm()
        network, self.peers.network = self.peers.network, None
        self._joined.clear()
        if network is not None:
            network.close()

    def check_deaths(self, group: Group) -> None:
        """Raise RankFailed if a rank of `group` has died."""
        peers = self.peers
        dead = peers.dead() & set(group.members)
        if dead:
            what = f"{ranks_and_verb(dead, 'has', 'have')} died"
            raise RankFailed(f"rank {peers.rank} of {peers.size}: {what}", tuple(sorted(dead)))

    def _run(self) -> None:
        while True:
            try:
                self._turn()
            except Exception:  # noqa: BLE001  without this thread nothing would be bounded any more
                get_logger().exception("rank %d: the watchdog continues after an error", self.peers.rank)
                time.sleep(self._period)

    def _turn(self) -> None:
        """Wait for messages of other ranks, handle them, and check the waits of this rank."""
        events = self._wait(self._pause())
        if self._leaving:  # this rank still forwards messages, but handles none
            if has_received_sigterm():
                self._end_by_sigterm()
            self._check_finalize(time.monotonic())
            self._neighbour.check(time.monotonic())
            return
        self.peers.run_delay.update()
        while self.peers.deferred:
            self._handle(self.peers.deferred.popleft())
        for event in events:
            self._handle(event)
        now = time.monotonic()
        if now >= self._load_analysis_at:
            self._load_analysis_at = float("inf")
            load_analysis()
        waiting = self.waits.entries()
        self._check_deadlines([*waiting, *self.waits.submitted()], now)
        self._check_recovery(waiting, now)
        self._signals.check(waiting, now)
        self._neighbour.check(now)
        if not self._neighbour.is_late:  # it would not reply to the queries of an examination
            self.unsatisfiable.update(waiting, now)
        self.reporter.serve_requests()
        self.abort.abort_if_overdue(now)

    def _pause(self) -> float:
        """Return the seconds until the next check."""
        waiting, now = self.waits.entries(), time.monotonic()
        bounds = [entry.group.timeout / 4 for entry in (*waiting, *self.waits.submitted())]
        bounds += self.unsatisfiable.seconds_to_next(waiting, now)
        if self._leaving or self.abort.is_expected or self.deaths.suspicion or self._neighbour.is_late:
            bounds.append(0.05)  # after a suspicion the launcher's SIGTERM follows, and leaves little time
        return min(self._period, *bounds) if bounds else self._period

    def _wait(self, seconds: float) -> list[Message | PeerExit]:
        network = self.peers.network
        if network is not None:
            return network.poll(seconds)
        self._joined.wait(seconds)
        return []

    def _handle(self, event: Message | PeerExit) -> None:
        """Handle a message of another rank, or its exit."""
        if isinstance(event, PeerExit):
            self.deaths.handle(event)
            return
        if self.peers.handle_query(event):
            return
        body, source = event.body, event.source
        match body.get("kind"):
            case "abort":
                self.abort.receive(source, body["of"], body["cause"])
            case "left":
                self.peers.left[source] = {name: body[name] for name in ("numbers", "sent", "calls")}
            case "abort request":
                self.abort.abort(body["why"])
            case "examination request":
                self.unsatisfiable.request_examination()
            case "mail":
                self.mailbox.put(source, body["subject"], body["number"], body["text"])
            case "sigterm":
                self._signals.record_sigterm(source)
            case "death reported":
                self.deaths.mark_reported(body["ranks"])
            case "unsatisfiable":
                self.unsatisfiable.mark(body["waits"], Cause(body["why"], body["mismatch"]))

    def _find_missing(self) -> set[int]:
        """Return the ranks that are not known to have left or died."""
        network = self.peers.network
        known = () if network is None else network.exits
        return set(range(self.peers.size)) - {self.peers.rank, *known}

    def _end_by_sigterm(self) -> NoReturn:
        """End this process, which has left, by the SIGTERM that it has received.

        If the launcher has sent that after the death of a rank on this host, report which one died: the control network
        reports no deaths to ranks that have left.
        """
        with self._ending:  # in which the other thread waits for the end of the process
            # The end of a connection may have been seen before the signal of the launcher.
            dead = self.peers.dead()
            died = self.deaths.report_ended(self._find_missing() | dead) or dead
            end_by_signal(signal.SIGTERM, "" if died else f"{self.abort.rank_name} died of SIGTERM at its exit")

    def _check_finalize(self, now: float) -> None:
        """Abort the job if MPI_Finalize has been waiting for too long for ranks that have not left."""
        peers, bound = self.peers, config().timeout + _TIMEOUT_MARGIN
        if peers.network is None or peers.fault_tolerant or now - self._left_at <= bound or not self.is_finalizing():
            return
        missing = self._find_missing()
        # The other ranks that have left do so only if the lowest one has failed to.
        is_lowest = peers.rank == min(set(range(peers.size)) - missing)
        if missing and (is_lowest or now - self._left_at > bound + TAKEOVER):
            log_to_stderr(
                f"{self.abort.rank_name} has been waiting in MPI_Finalize for more than {config().timeout:g} s"
                f" (MPICOLL_TIMEOUT; raise it for programs that work for so long after others have ended);"
                f" {ranks_and_verb(missing, 'has', 'have')} not exited; the job is ended",
                separate=True,
            )
            self.abort.abort_all(1)

    def _check_recovery(self, waiting: list[Entry], now: float) -> None:
        """Abort the job if MPI's recovery waits for a rank whose death MPI does not detect."""
        entry = next((one for one in waiting if one.call.name in ("shrink", "agree")), None)
        if entry is not None and (dead := self.deaths.find_overdue(now)):
            self.abort.request(
                f"{describe_wait(entry, self.peers.own_state())} can't complete: {ranks_and_verb(dead, 'has', 'have')}"
                " died, but Open MPI's launcher has not reported it, as for a process that C code ends with an exit"
                " status other than 0"
            )

    def _check_deadlines(self, waiting: list[Entry], now: float) -> None:
        """Abort the job if an operation has been waiting for longer than its bound."""
        for entry in waiting:
            # A thread that waits in shared memory raises by itself, and meanwhile requests a report.
            bound = entry.group.timeout
            if any(entry.call is one for one in self.waits.timed_out):
                bound = max(bound, config().timeout)
            if now - entry.begin > bound + _TIMEOUT_MARGIN and now > self.reporter.last_served + GRACE:
                self.abort.request(
                    f"{describe_wait(entry, self.peers.own_state())} has been waiting for more than"
                    f" {entry.group.timeout:g} s (MPICOLL_TIMEOUT, or the timeout of its communicator)"
                )
