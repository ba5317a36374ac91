"""SIGTERM to a rank whose interpreter lock is held."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.launch import ROOT
from support.watchdogs import until

from mpicoll.engine.diagnostics import abort, neighbour
from mpicoll.engine.diagnostics.abort import JobAbort
from mpicoll.engine.diagnostics.deaths import DeathHandler
from mpicoll.engine.diagnostics.local_waits import LocalWaits
from mpicoll.engine.diagnostics.neighbour import Neighbour
from mpicoll.engine.diagnostics.peers import Peers
from mpicoll.transport.control.process_status import describe_process

BUSY = """
import json
from mpicoll.engine.diagnostics import signals
from mpicoll.transport.control.process_status import describe_process
signals.listen_for_signals()
print(json.dumps(describe_process() | {"sigterm_pipe": signals.describe_sigterm_pipe()}), flush=True)
sum(range(10**11))
"""


@pytest.mark.parametrize("fault_tolerant", [False, True])
def test_a_rank_that_holds_the_interpreter_lock_is_ended(
    fault_tolerant: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 1 has another id, and rank 2 is in another PID namespace: their files are not opened. Rank 3 is ended."""
    monkeypatch.setattr(neighbour, "HANDLE_WITHIN", 0.1)
    monkeypatch.setattr(abort, "run_exit_hooks", lambda: None)  # of a process that has the objects of many tests
    codes: list[int] = []
    network = SimpleNamespace(exits={}, send=lambda body: None, flush=lambda timeout: True)
    peers = Peers(LocalWaits())
    peers.rank, peers.size, peers.fault_tolerant, peers.network = 0, 4, fault_tolerant, cast(Any, network)
    job_abort = JobAbort(peers, cast(Any, None), codes.append)
    deaths = DeathHandler(peers, cast(Any, None), job_abort)
    one = Neighbour(peers, deaths, job_abort)
    with subprocess.Popen([sys.executable, "-c", BUSY], cwd=ROOT, stdout=subprocess.PIPE, text=True) as busy:
        assert busy.stdout is not None
        try:
            own, other = describe_process(), json.loads(busy.stdout.readline())
            descriptor, inode = other["sigterm_pipe"]
            wrong = other | {"sigterm_pipe": [descriptor, inode + 1]}
            foreign = other | {"pid_namespace": "pid:[1]"}
            addresses = [{"place": "here", "host": "node1"} | process for process in (own, wrong, foreign, other)]
            job_abort.places = ["here"] * 4
            deaths.observe_processes(addresses)
            one.observe(addresses)
            with monkeypatch.context() as patch:
                patch.setattr(os, "open", lambda *_: pytest.fail("opened"))
                peers.network = None  # as after MPI_Finalize
                network.exits[1] = None
                one.check(time.monotonic())
                peers.network = cast(Any, network)
                del network.exits[1]
                one.check(time.monotonic())
            network.exits[1] = None
            busy.send_signal(signal.SIGTERM)

            def has_acted() -> bool:
                one.check(time.monotonic())
                return bool(codes) or busy.poll() is not None

            until(has_acted)
        finally:
            busy.kill()
    said = capsys.readouterr().err
    assert "mpicoll: rank 3 of 4 died of SIGTERM, while a thread held its interpreter lock" in said
    assert re.search(r'File "<string>", line \d in <module>', said)
    assert codes == ([] if fault_tolerant else [128 + signal.SIGTERM])
    assert busy.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_sigterm_ends_a_job_while_the_interpreter_lock_is_held(job: Callable[..., CompletedProcess[str]]) -> None:
    done = job(
        2,
        """
import os, signal
mpicoll.barrier()
if mpicoll.world().rank == 1:
    os.kill(os.getpid(), signal.SIGTERM)
    sum(range(10**11))
mpicoll.barrier()
""",
        seconds=40,
    )
    assert done.returncode == 128 + signal.SIGTERM, done.stdout
    assert "mpicoll: rank 1 of 2 died of SIGTERM, while a thread held its interpreter lock" in done.stdout
