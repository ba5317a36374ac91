"""The bound on waiting."""

from __future__ import annotations

import itertools
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from subprocess import CompletedProcess
from typing import Any, cast

import pytest
from support.watchdogs import FakeQueue, WatchedRank, entry, until

from mpicoll.config import Config
from mpicoll.engine.diagnostics import deaths, run_delay, watchdog
from mpicoll.transport.control.events import PeerExit

Starter = Callable[..., "CompletedProcess[str]"]


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch gives no time to calls that raise by themselves: there are none."""
    monkeypatch.setattr(watchdog, "_TIMEOUT_MARGIN", 0.0)


@pytest.mark.usefixtures("strict")
def test_an_operation_that_waits_too_long(capfd: pytest.CaptureFixture[str]) -> None:
    watched = WatchedRank()
    queue = FakeQueue(entry("allreduce", 0.2))
    watched.watchdog.waits.add(queue)
    assert watched.ended.wait(20)
    assert watched.codes == [1]
    assert capfd.readouterr().err.startswith(
        "\nmpicoll: allreduce(8 bytes) number 1 on world, rank 1 of 2 has been waiting for more than 0.2 s"
        " (MPICOLL_TIMEOUT, or the timeout of its communicator); the job is ended.\n"
    )


@pytest.mark.usefixtures("strict")
def test_a_call_outside_of_the_queues(capfd: pytest.CaptureFixture[str]) -> None:
    watched = WatchedRank()
    watched.watchdog.active[-1] = entry("recv", 0.2), False, False  # of a thread that is not there
    assert watched.ended.wait(20)
    assert "mpicoll: recv(8 bytes) number 1 on world, rank 1 of 2 has been waiting" in capfd.readouterr().err


def test_the_state_names_times_without_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    totals = itertools.count(0.0, 2.0)
    monkeypatch.setattr(run_delay, "_read_run_delay", lambda: next(totals))
    peers = WatchedRank().watchdog.peers
    until(lambda: len(peers.own_state()["run_delay"]) >= 3)
    # The watchdogs of earlier tests may read it too.
    assert all(seconds >= 2.0 for _, seconds in peers.own_state()["run_delay"])


@pytest.mark.usefixtures("strict")
def test_the_bound_is_that_of_the_communicator() -> None:
    watched = WatchedRank()
    patient, hasty = FakeQueue(entry("bcast", 60.0)), FakeQueue()
    watched.watchdog.waits.add(patient)
    watched.watchdog.waits.add(hasty)
    assert not watched.ended.wait(0.3)
    hasty.current = entry("bcast", 0.1)
    assert watched.ended.wait(20)


@pytest.mark.usefixtures("strict")
def test_equal_operations_one_after_the_other_are_several() -> None:
    """The watch looks in between, and sees a call each time; but never the same for long."""
    watched = WatchedRank()
    queue = FakeQueue()
    watched.watchdog.waits.add(queue)
    deadline = time.monotonic() + 1.5
    while time.monotonic() < deadline:
        queue.current = entry("allreduce", 0.6)
        time.sleep(1e-3)
    queue.current = None
    assert not watched.ended.is_set()


def is_main_thread() -> bool:
    """Return False on the threads of watchdogs, also those of other tests."""
    return threading.current_thread() is threading.main_thread()


def test_a_sigterm_before_the_exit_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog's thread may not have handled it yet."""
    ended: list[tuple[int, str]] = []

    def end_by_signal(number: int, of: str) -> None:
        ended.append((number, of))
        raise SystemExit

    monkeypatch.setattr(watchdog, "has_received_sigterm", is_main_thread)
    monkeypatch.setattr(watchdog, "TAKEOVER", 0.0)
    monkeypatch.setattr(watchdog, "end_by_signal", end_by_signal)
    with pytest.raises(SystemExit):
        WatchedRank().watchdog.leave()
    assert ended == [(signal.SIGTERM, "rank 0 of 1 died of SIGTERM")]


WAITS = {
    "native allreduce": ("mpicoll.allreduce(np.ones(5))", "allreduce"),
    "schedule": ("mpicoll.allreduce(np.ones(5), algorithm='ring')", "allreduce"),
    "barrier": ("mpicoll.barrier()", "barrier"),
    "recv": ("mpicoll.recv(np.ones(5), 0)", "recv"),
    "irecv": ("mpicoll.irecv(np.ones(5), 0).wait()", "irecv"),
    "background": ("r = mpicoll.iallreduce(np.ones(5))\nwhile not r.test(): pass", "allreduce"),
}


@pytest.fixture(scope="module")
def waiting(
    job_in: Starter, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[CompletedProcess[str]]]]:
    """A job for each of WAITS. They do nothing but wait, so several of them run at the same time."""

    def run(call: str) -> CompletedProcess[str]:
        program = f"""
import threading
def waits_here():
    {call.replace(chr(10), chr(10) + "    ")}
if mpicoll.world().rank == 0:
    threading.Event().wait()
waits_here()
"""
        return job_in(tmp_path_factory.mktemp("waits"), 2, program, seconds=20, MPICOLL_TIMEOUT="1")

    with ThreadPoolExecutor(3) as pool:
        yield {name: pool.submit(run, call) for name, (call, _) in WAITS.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", WAITS)
def test_a_rank_that_never_joins(waiting: dict[str, Future[CompletedProcess[str]]], name: str) -> None:
    """Rank 0 does something else for ever; what the others wait for is named, with their stacks."""
    what = WAITS[name][1]
    done = waiting[name].result()
    assert done.returncode not in (0, 124), done.stdout
    # In the background nobody has taken down where it was called.
    at = "" if name == "background" else r", called at .*program.py:\d+ in waits_here,"
    waits = rf"mpicoll: {what}\(.* on world, rank 1 of 2{at} has been waiting for more than 1 s \(MPICOLL_TIMEOUT"
    assert re.search(waits, done.stdout), done.stdout


@pytest.mark.slow
def test_many_short_operations_are_no_long_one(job: Starter) -> None:
    done = job(
        2,
        """
import time
from mpicoll.engine.diagnostics import deaths, watchdog
watchdog._TIMEOUT_MARGIN = 0.5  # the loop takes longer than this and the bound
x, begin = np.ones(2), time.monotonic()
go_on = True
while go_on:
    for _ in range(200):
        mpicoll.allreduce(x)
        mpicoll.iallreduce(x).wait()
        mpicoll.sendrecv(x, 1 - mpicoll.world().rank)
    go_on = mpicoll.bcast(np.array(time.monotonic() - begin < 2.5))
print("done")
""",
        MPICOLL_TIMEOUT="1",
    )
    assert (done.returncode, done.stdout.split()) == (0, ["done"] * 2)


class FinalizingNetwork:
    """The control network of rank `rank` of 4, of which ranks 0 and 1 have left."""

    size, hub = 4, 0

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.exits = {other: PeerExit(other, "left", "", 0, "") for other in (0, 1) if other != rank}

    def poll(self, timeout: float) -> list[object]:
        time.sleep(min(timeout, 0.01))
        return []


def finalizing_watchdog(rank: int, monkeypatch: pytest.MonkeyPatch) -> WatchedRank:
    monkeypatch.setattr(watchdog, "TAKEOVER", 0.3)
    monkeypatch.setattr(watchdog, "config", lambda: Config(timeout=0.2))
    watched = WatchedRank()
    one = watched.watchdog
    one.peers.rank, one.peers.size, one.peers.network = rank, 4, cast(Any, FinalizingNetwork(rank))
    one._joined.set()
    one._left_at, one._leaving = time.monotonic(), True
    return watched


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("rank", [0, 1])
def test_finalize_is_bounded(rank: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Rank 1 ends the job if rank 0 has failed to."""
    watched = finalizing_watchdog(rank, monkeypatch)
    begin = time.monotonic()
    assert not watched.ended.wait(0.4)
    watched.watchdog.is_finalizing = lambda: True
    assert watched.ended.wait(20)
    assert time.monotonic() - begin > (0.2 if rank == 0 else 0.5)
    assert watched.codes == [1]
    assert capfd.readouterr().err.startswith(
        f"\nmpicoll: rank {rank} of 4 has been waiting in MPI_Finalize for more than 0.2 s (MPICOLL_TIMEOUT;"
        " raise it for programs that work for so long after others have ended);"
        " ranks 2 and 3 have not exited; the job is ended\n"
    )


class FakeProcess:
    """A process with a fixed exit status."""

    def __init__(self, status: int | None) -> None:
        self._status = status

    def status(self, timeout: float) -> int | None:
        return self._status


def end_in_finalize(watched: WatchedRank, statuses: dict[int, int | None], monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the text with which a rank ends at SIGTERM. `statuses` are those of the ranks of the host."""
    ended: list[tuple[int, str]] = []

    def end(number: int, of: str = "") -> None:
        ended.append((number, of))
        sys.exit()

    rank = watched.watchdog.peers.rank
    processes = {other: FakeProcess(status) for other, status in statuses.items() if other != rank}
    exits = {other: PeerExit(other, "closed", "", 0, "") for other in processes}
    monkeypatch.setattr(watched.watchdog.deaths, "_processes", processes)
    monkeypatch.setattr(watched.watchdog.deaths, "_exits", exits)
    monkeypatch.setattr(watchdog, "end_by_signal", end)
    monkeypatch.setattr(watchdog, "has_received_sigterm", is_main_thread)
    with pytest.raises(SystemExit):
        watched.watchdog._turn()
    [(number, of)] = ended
    assert number == signal.SIGTERM
    return of


class SleepingNetwork(FinalizingNetwork):
    """One whose poll lasts as long as it may, unless it is woken."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.timeouts: list[float] = []
        self._awake = threading.Event()
        self.wake = self._awake.set

    def poll(self, timeout: float) -> list[object]:
        self.timeouts.append(timeout)
        self._awake.wait(timeout)
        self._awake.clear()
        return []

    def leave(self, body: object) -> None:
        pass


def test_a_rank_that_has_left_looks_for_sigterm_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher ends it a second later."""
    monkeypatch.setattr(watchdog, "reset_signal_handling", lambda: None)
    watched, network = WatchedRank(), SleepingNetwork(1)
    watched.watchdog._period = 300.0
    watched.watchdog.peers.network = cast(Any, network)
    watched.watchdog._joined.set()
    until(lambda: 300.0 in network.timeouts)
    watched.watchdog.leave()
    until(lambda: network.timeouts[-1] < 1.0)


@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_during_finalize_is_reported(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it follows no death: it was sent to this rank, or to the launcher."""
    watched = finalizing_watchdog(rank, monkeypatch)
    of = end_in_finalize(watched, {0: None, 1: None, 2: 0, 3: None}, monkeypatch)
    assert of == f"rank {rank} of 4 died of SIGTERM at its exit"
    # It is also sent by the launcher, when it has ended another rank.
    assert end_in_finalize(watched, {0: None, 1: None, 2: 0, 3: -signal.SIGTERM}, monkeypatch) == ""


@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize(
    ("rank", "lowest", "said"),
    [(0, None, True), (1, None, False), (1, -signal.SIGTERM, False), (1, -signal.SIGKILL, True)],
)
def test_a_death_during_finalize_is_reported_at_the_sigterm_that_follows(
    rank: int,
    lowest: int | None,
    said: bool,
    seen: bool,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The lowest rank reports that rank 2 was killed, whose connection may have been seen to end; rank 1 does if the
    launcher has killed rank 0. Rank 3 is ended by the launcher."""
    watched = finalizing_watchdog(rank, monkeypatch)
    reports: list[tuple[int, str]] = []
    watched.watchdog.deaths.report = lambda *report: reports.append(report)
    if seen:
        cast(Any, watched.watchdog.peers.network).exits[2] = PeerExit(2, "closed", "", 0, "")
    statuses = {0: lowest, 1: None, 2: -signal.SIGKILL, 3: -signal.SIGTERM}
    assert end_in_finalize(watched, statuses, monkeypatch) == ""
    why = "rank 2 of 4 was killed by SIGKILL (kill -9, or the kernel's out-of-memory killer)"
    assert (f"\nmpicoll: {why}; the job is ended\n" in capfd.readouterr().err) == said
    assert reports == [(2, why)] * said


@pytest.mark.parametrize(
    ("operation", "unknown", "ends"), [("shrink", {2}, True), ("shrink", set(), False), ("allreduce", {2}, False)]
)
def test_recovery_that_waits_for_a_rank_whose_death_mpi_has_not_detected(
    operation: str,
    unknown: set[int],
    ends: bool,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(deaths, "_MPI_DETECTION_TIME", 0.2)
    watched = WatchedRank()
    one = watched.watchdog
    one.peers.fault_tolerant = True
    one.deaths.find_undetected_failures = lambda: unknown
    queue = FakeQueue(entry(operation, 60.0))
    one.waits.add(queue)
    assert not watched.ended.wait(0.2)
    one.deaths.handle(PeerExit(2, "closed", "", 0, ""))
    assert watched.ended.wait(20 if ends else 0.5) == ends
    if ends:
        assert "mpicoll: shrink(8 bytes) number 1 on world, rank 1 of 2 can't complete: rank 2 has died, but" in (
            capfd.readouterr().err
        )
