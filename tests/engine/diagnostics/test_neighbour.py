"""SIGTERM to a rank whose interpreter lock is held."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from subprocess import CompletedProcess
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
from mpicoll.transport.control.events import Message
from mpicoll.transport.control.process_status import describe_process

BUSY = """
import json, os
from mpicoll.engine.diagnostics import signals
from mpicoll.transport.control.process_status import describe_process
signals.listen_for_signals()
pipe = signals.sigterm_pipe()
print(json.dumps(describe_process()))
print(pipe, os.fstat(pipe).st_ino, flush=True)
sum(range(10**11))
"""


@pytest.mark.parametrize("fault_tolerant", [False, True])
def test_a_rank_that_holds_the_interpreter_lock_is_ended(
    fault_tolerant: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(neighbour, "HANDLE_WITHIN", 0.1)
    monkeypatch.setattr(abort, "run_exit_hooks", lambda: None)  # of a process that has the objects of many tests
    codes: list[int] = []
    peers = Peers(LocalWaits())
    peers.rank, peers.size, peers.fault_tolerant = 0, 2, fault_tolerant
    job_abort = JobAbort(peers, cast(Any, None), codes.append)
    deaths = DeathHandler(peers, cast(Any, None), job_abort)
    one = Neighbour(peers, deaths, job_abort)
    with subprocess.Popen([sys.executable, "-c", BUSY], cwd=ROOT, stdout=subprocess.PIPE, text=True) as busy:
        assert busy.stdout is not None
        try:
            described = describe_process(), json.loads(busy.stdout.readline())
            addresses = [{"place": "here"} | one for one in described]
            job_abort.places = ["here", "here"]
            deaths.observe_processes(addresses)
            one.find(addresses)
            descriptor, inode = map(int, busy.stdout.readline().split())
            for number in (inode + 1, inode):  # the first is not that pipe
                one.observe(Message(1, {"descriptor": descriptor, "inode": number}))
            one.check(time.monotonic())
            assert not one.is_late
            busy.send_signal(signal.SIGTERM)

            def has_acted() -> bool:
                one.check(time.monotonic())
                return bool(codes) or busy.poll() is not None

            until(has_acted)
        finally:
            busy.kill()
    said = capsys.readouterr().err
    assert "mpicoll: rank 1 of 2 died of SIGTERM, in code that holds the interpreter lock" in said
    assert re.search(r'File "<string>", line [89] in <module>', said)
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
    assert "mpicoll: rank 1 of 2 died of SIGTERM, in code that holds the interpreter lock" in done.stdout
