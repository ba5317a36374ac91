"""One rank dies: the others end soon, the first line says of what, and nothing is left. All cases: ci/deaths.py."""

from __future__ import annotations

import os
import re
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from support import apart, dying
from support.descriptors import count_process_descriptors
from support.patches import patch_within

from mpicoll.engine.diagnostics.abort import JobAbort
from mpicoll.engine.diagnostics.deaths import DeathHandler
from mpicoll.engine.diagnostics.local_waits import LocalWaits
from mpicoll.engine.diagnostics.peers import Peers
from mpicoll.engine.diagnostics.reporter import Reporter
from mpicoll.transport.control import process_status
from mpicoll.transport.control.process_status import Process, describe_process

CASES = [
    dying.Case("KILL", "import", 3, 1),
    dying.Case("KILL", "before", 3, 0),
    dying.Case("exception", "native", 3, 1),
    dying.Case("exit3", "schedule", 3, 2),
    dying.Case("_exit3", "shared", 3, 0),
    dying.Case("_exit0", "background", 3, 1),
    dying.Case("TERM", "p2p", 4, 3),
    dying.Case("SEGV", "in native", 3, 0),
    dying.Case("TERM", "in schedule", 3, 2),
    dying.Case("KILL", "in shared", 4, 2),
    dying.Case("ABRT", "in background", 3, 2),
    dying.Case("KILL", "in p2p", 4, 0),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.extension] if case.moment in ("shared", "in shared") else [])
        for case in CASES
    ],
    ids=str,
)
def test_death(case: dying.Case) -> None:
    outcome = dying.run(case)
    assert not outcome.problems, f"{outcome.problems}\nstdout:\n{outcome.out}\nstderr:\n{outcome.err}"


@pytest.mark.slow
def test_death_between_hosts() -> None:
    """Open MPI notices the end of a connection at once, and aborts: not before the cause is reported."""
    if why := apart.possible():
        pytest.skip(f"this machine can't play hosts: {why}")
    outcome = dying.run(dying.Case("_exit0", "schedule", 3, 1), hosts=(2, 1))
    assert not outcome.problems, f"{outcome.problems}\nstdout:\n{outcome.out}\nstderr:\n{outcome.err}"


def test_the_matrix_has_each_kind_at_each_moment() -> None:
    cases = list(dying.matrix())
    assert set(CASES) <= set(cases)
    assert len(cases) == len(set(cases))
    met = {(case.kind, case.moment) for case in cases}
    assert {kind for kind, _ in met} == set(dying.KINDS)
    assert {moment for _, moment in met} == set(dying.MOMENTS)
    # What can't be is named, and nothing else is left out.
    missing = {(kind, moment) for kind in dying.KINDS for moment in dying.MOMENTS} - met
    inside = {(kind, moment) for kind in ("exception", "exit3") for moment in dying.INSIDE}
    assert missing == inside | {("_exit0", "import")}


def test_only_files_of_the_job_are_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    other = Path(f"/dev/shm/mpicoll-{os.getpid()}-of-another-job")

    def run_no_job(case: dying.Case, folder: Path, *args: object) -> None:
        for path in (other, folder / "shared" / "mpicoll-own", folder / "out", folder / "err"):
            path.touch()

    monkeypatch.setattr(dying, "_watch_job", run_no_job)
    try:
        outcome = dying.run(dying.Case("KILL", "before", 3, 0))
    finally:
        other.unlink()
    left = [problem for problem in outcome.problems if problem.startswith("left behind")]
    assert [problem.rpartition("/")[2] for problem in left] == ["mpicoll-own"]


def test_ranks_of_a_large_node_leave_descriptors_to_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_within(monkeypatch, process_status, resource, getrlimit=lambda what: (256, 256))
    peers = Peers(LocalWaits())
    peers.size = 100
    reporter = Reporter(peers)
    deaths = DeathHandler(peers, reporter, JobAbort(peers, reporter, lambda status: None))
    before = count_process_descriptors()
    deaths.observe_processes([describe_process() | {"place": "here", "host": "node1"}] * 100)
    assert count_process_descriptors() == before + 16
    assert len(deaths._processes) == 99
    for process in deaths._processes.values():
        process.close()


def test_a_death_that_a_rank_reports_as_sigterm_ends_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """``spawn`` names it then too."""
    peers = Peers(LocalWaits())
    peers.rank, peers.size = 2, 3
    reporter = Reporter(peers)
    deaths = DeathHandler(peers, reporter, JobAbort(peers, reporter, lambda status: None))
    monkeypatch.setattr(Process, "status", lambda self, timeout=0.0: -signal.SIGKILL)
    deaths.observe_processes([describe_process() | {"place": "here", "host": "node1"}] * 3)
    reports: list[tuple[int, str]] = []
    deaths.report = lambda *report: reports.append(report)
    assert deaths.report_unreported({0})  # which the launcher has ended
    why = f"rank 1 of 3 (process {os.getpid()} on node1) was killed by SIGKILL"
    assert [(rank, text.partition(" (kill -9")[0]) for rank, text in reports] == [(1, why)]
    assert capfd.readouterr().err.startswith(f"\nmpicoll: {why}")
    deaths.mark_reported([1])
    assert not deaths.report_unreported({0})
    for process in deaths._processes.values():
        process.close()


@pytest.mark.slow
def test_a_death_is_reported_although_the_coordinator_runs_no_python(job: Callable[..., CompletedProcess[str]]) -> None:
    """It holds its interpreter lock until the launcher kills it, as if it had no processor, and forwards nothing."""
    done = job(
        3,
        """
import itertools, os, signal, threading, time
mpicoll.barrier()
rank = mpicoll.world().rank
if rank == 0:
    mpicoll.send(np.zeros(1), 1)
    sum(itertools.repeat(0, 10**9))
if rank == 1:
    mpicoll.recv(np.zeros(1), 0)
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGKILL)
threading.Event().wait()
""",
    )
    assert done.returncode not in (0, 124), done.stdout
    assert re.search(r"mpicoll: rank 1 of 3 .*was killed by SIGKILL", done.stdout), done.stdout
    assert "died of SIGTERM" not in done.stdout
