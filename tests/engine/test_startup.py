"""The start and the exit of a process of a job."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest

from mpicoll.engine import startup
from mpicoll.engine.diagnostics.flight_recorder import Record, Sink

Starter = Callable[..., "CompletedProcess[str]"]


class _Mute(Exception):
    """An exception of a program that has no text."""

    def __str__(self) -> str:
        raise ZeroDivisionError


class RecordedWatchdog:
    """What `_finish_pending` uses of a watchdog with one queue, and `sinks`; the abort of the job is an exception."""

    def __init__(
        self, *, drained: bool = True, failure: Record | None = None, unretrieved: Exception | None = None
    ) -> None:
        self.calls: list[str] = []
        self.waits = self.abort = self
        self.peers = SimpleNamespace(fault_tolerant=False, dead=set)
        self._drained, self._failure, self._unretrieved = drained, failure, unretrieved

    def __repr__(self) -> str:
        return "<the queue>"

    def queues(self) -> list[RecordedWatchdog]:
        return [self]

    def drain(self, timeout: float) -> bool:
        if self._failure is not None:
            self._sink(self._failure)
        return self._drained

    def compare_unseen_calls(self) -> None:
        pass

    def add(self, sink: Sink) -> None:
        self._sink = sink

    def remove(self, sink: Sink) -> None:
        assert sink is self._sink

    def unreported_failures(self) -> list[Any]:
        return [SimpleNamespace(error=self._unretrieved)] if self._unretrieved else []

    def announce(self, of: str) -> None:
        self.calls.append(of)

    def abort_all(self, status: int) -> NoReturn:
        raise SystemExit(status)

    def leave(self) -> None:
        self.calls.append("left")


FAILED: Any = (None, None, "an error")


@pytest.mark.parametrize(
    ("watch", "announced"),
    [
        (RecordedWatchdog(drained=False), "exits while <the queue> holds operations"),
        (RecordedWatchdog(failure=FAILED), "exits while <the queue> holds operations"),
        (
            RecordedWatchdog(unretrieved=ValueError("no memory")),
            "its error was not retrieved: ValueError: no memory; the job is ended",
        ),
        (RecordedWatchdog(unretrieved=_Mute()), "its error was not retrieved: _Mute; the job is ended"),
    ],
    ids=["not complete", "failed meanwhile", "not retrieved", "without a text"],
)
def test_operations_that_fail_at_exit_are_announced(
    watch: RecordedWatchdog, announced: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "sinks", watch)
    with pytest.raises(SystemExit) as end:
        startup._finish_pending(cast(Any, watch), os.getpid())
    assert end.value.code == 1
    (call,) = watch.calls
    assert announced in call


def test_nothing_is_announced_at_a_normal_exit() -> None:
    watch = RecordedWatchdog()
    startup._finish_pending(cast(Any, watch), os.getpid() + 1)
    assert watch.calls == []
    startup._finish_pending(cast(Any, watch), os.getpid())
    assert watch.calls == ["left"]


@pytest.mark.slow
@pytest.mark.extension
def test_first_operation_does_only_what_it_needs(job: Starter) -> None:
    """Each rank of a job pays for what its first call loads, and for each exchange between the ranks."""
    done = job(
        2,
        """
import sys
from mpicoll.engine import startup
from mpicoll.engine.diagnostics import watchdog
from mpicoll.transport.waiting import wait_for
watchdog._LOAD_ANALYSIS_AFTER = 1000
from mpicoll.transport.mpi import MpiTransport
original, texts = MpiTransport.allgather_text, []
MpiTransport.allgather_text = lambda self, text: texts.append(text) or original(self, text)
original_share, shares = MpiTransport.share, []
MpiTransport.share = lambda self, nbytes: shares.append(nbytes > 0) or original_share(self, nbytes)
mpicoll.allreduce(np.ones(1))
assert len(texts) == 2, texts  # to connect the ranks, the first one with their settings
assert shares == [mpicoll.world().rank == 0], shares  # flags and slots are in one piece of memory
engine = "checks.call_check core.call_comparison core.call_mismatch executors.hierarchical executors.nccl"
engine += " executors.schedule executors.slots diagnostics.deadlock diagnostics.rank_state diagnostics.report_file"
engine += " diagnostics.stacks"
late = "transport.control.address_choice schedules"
unneeded = {f"mpicoll.{one}" for one in [*(f"engine.{one}" for one in engine.split()), *late.split()]}
unneeded |= {"dataclasses", "logging", "pathlib", "secrets", "shutil", "subprocess", "sysconfig", "traceback"}
unneeded |= {"hashlib", "hmac"}  # which load OpenSSL
assert not unneeded & set(sys.modules), unneeded & set(sys.modules)
import typing
modules = [one for name, one in sys.modules.items() if name.startswith("mpicoll.")]
slow = [one for one in modules if getattr(one, "NamedTuple", None) is typing.NamedTuple]
assert not slow, slow  # that of mpicoll.named_tuple takes a tenth of the time
# What a failing job needs is imported while there are file descriptors.
watch = startup.start_watchdog()
watch._load_analysis_at = 0.0
watch.peers.network.wake()
assert wait_for(lambda: "mpicoll.engine.diagnostics.report_file" in sys.modules or None, 30)
""",
    )
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.slow
def test_pending_operations_complete_at_the_end(job: Starter) -> None:
    """The last rank joins late; the others are at their end by then, with nothing but the operations' own memory."""
    done = job(
        3,
        """
world = mpicoll.world()
part = world.split(0)
for comm in (world, part):
    for number in range(20):
        mpicoll.iallreduce(np.full(50_000, number), comm=comm)
if world.rank == 2:
    total = mpicoll.iallreduce(np.ones(1)).wait()
    print(total[0])
else:
    mpicoll.iallreduce(np.ones(1))
""",
    )
    assert (done.returncode, done.stdout.split()) == (0, ["3.0"])


@pytest.mark.slow
def test_pending_operations_that_can_not_complete(job: Starter) -> None:
    done = job(
        2,
        """
if mpicoll.world().rank == 0:
    mpicoll.iallreduce(np.ones(2))
""",
        MPICOLL_TIMEOUT="1",
    )
    assert done.returncode not in (0, 124), done.stdout
    assert re.search(
        r"mpicoll: (rank 0 of 2 exits while .*world.* holds operations|.* allreduce.* has been waiting"
        r"|rank 0 waits in allreduce.* for rank 1, which has exited)",
        done.stdout,
    )


@pytest.mark.slow
def test_pending_operations_without_mpi(python: Callable[..., CompletedProcess[str]]) -> None:
    done = python("import numpy, mpicoll\nfor _ in range(50): mpicoll.iallreduce(numpy.ones(10_000))")
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.slow
@pytest.mark.long
def test_finalize_does_not_wait_for_ever_for_a_rank_that_does_not_exit(job: Starter) -> None:
    """MPI_Finalize runs without the interpreter lock, so that the watchdog can bound it."""
    done = job(
        2,
        """
import atexit, threading
mpicoll.barrier()
if mpicoll.world().rank == 1:
    atexit.register(threading.Event().wait)
""",
        seconds=40,
        MPICOLL_TIMEOUT="1",
    )
    assert done.returncode not in (0, 124), done.stdout
    assert "mpicoll: rank 0 of 2 has been waiting in MPI_Finalize" in done.stdout
    assert "rank 1 has not exited; the job is ended" in done.stdout


@pytest.mark.slow
@pytest.mark.long
def test_a_death_during_finalize_of_the_others_is_reported(job: Starter) -> None:
    done = job(
        3,
        """
import atexit, os, signal, time

def die():
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)

mpicoll.barrier()
if mpicoll.world().rank == 2:
    atexit.register(die)
""",
        seconds=40,
    )
    assert done.returncode == 128 + signal.SIGKILL, done.stdout
    # Rank 0 may not have left yet, and then also states the process.
    assert re.search(r"mpicoll: rank 2 of 3 (\(.*\) )?was killed by SIGKILL", done.stdout), done.stdout
