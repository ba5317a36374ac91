"""SIGINT. SIGTERM is among the cases of test_deaths."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from support.launch import ROOT

Starter = Callable[..., "CompletedProcess[str]"]

LOCKED = ROOT / "tests" / "support" / "locked_interpreter.py"


@pytest.mark.parametrize("handler", ["signal.SIG_DFL", "print", "signals.handle_sigterm"])
def test_what_the_program_installs_for_sigterm_stays(
    handler: str, python: Callable[..., CompletedProcess[str]]
) -> None:
    """At exit and in forked children, whose SIGTERM is not the watchdog's."""
    done = python(f"""
import os, signal
from mpicoll.engine.diagnostics import signals
assert signals.listen_for_signals() is not None
signal.signal(signal.SIGTERM, {handler})
signals.reset_signal_handling()
os.kill(os.getpid(), signal.SIGTERM)
assert not signals.has_received_sigterm()
""")
    assert (done.returncode, bool(done.stdout)) == ((0, True) if handler == "print" else (-signal.SIGTERM, False))


def test_what_the_program_registers_with_faulthandler_for_sigterm_stays(
    python: Callable[..., CompletedProcess[str]], tmp_path: Path
) -> None:
    """It writes the stack to the file of the program, and SIGTERM has the effect that the program asked for."""
    stack = tmp_path / "stack"
    done = python(f"""
import faulthandler, os, signal
faulthandler.register(signal.SIGTERM, file=open({str(stack)!r}, "w"))
from mpicoll.engine.diagnostics import signals
assert signals.listen_for_signals() is not None
os.kill(os.getpid(), signal.SIGTERM)
print("goes on")
""")
    assert (done.returncode, done.stdout) == (0, "goes on\n")
    assert "most recent call first" in stack.read_text()


@pytest.mark.extension
def test_sigterm_ends_a_process_that_holds_its_interpreter_lock() -> None:
    """Without another rank on the host, and also if nobody reads what it writes."""
    command = [sys.executable, str(LOCKED)]
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=30, check=False)
    assert done.returncode == -signal.SIGTERM
    assert "mpicoll: rank 2 of 3 died of SIGTERM, while a thread held its interpreter lock" in done.stderr
    assert done.stderr.count("in hold_interpreter_lock") == 1
    done = subprocess.run([*command, "cancelled"], cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(4096))
    os.set_blocking(writer, True)
    assert subprocess.run(command, cwd=ROOT, stderr=writer, timeout=30, check=False).returncode == -signal.SIGTERM
    os.close(reader)
    os.close(writer)


def test_sigterm_is_recorded_after_the_program_has_restored_the_handler(
    python: Callable[..., CompletedProcess[str]],
) -> None:
    done = python("""
import os, signal
from mpicoll.engine.diagnostics import signals
assert signals.listen_for_signals() is not None
signal.signal(signal.SIGTERM, signal.signal(signal.SIGTERM, print))
signals.renew_sigterm_handling()
os.kill(os.getpid(), signal.SIGTERM)
assert signals.has_received_sigterm()
""")
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.slow
def test_an_interrupt_ends_the_job(job: Starter) -> None:
    done = job(
        3,
        """
import os, signal
if mpicoll.world().rank == 1:
    os.kill(os.getpid(), signal.SIGINT)
mpicoll.barrier()
""",
    )
    assert done.returncode not in (0, 124), done.stdout
    assert "mpicoll: rank 1 of 3 died of KeyboardInterrupt" in done.stdout


@pytest.mark.slow
def test_sigterm_ends_the_job_after_a_loop_of_asyncio_has_handled_signals(job: Starter) -> None:
    """The loop leaves no wakeup descriptor, and while the main thread is in MPI no Python handler runs."""
    done = job(
        2,
        """
import asyncio, os, signal, time
from mpi4py import MPI
world = mpicoll.world()
pids = mpicoll.allgather(np.array([os.getpid()]))

async def handle():
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print)

asyncio.run(handle())
if world.rank == 0:
    MPI.COMM_WORLD.Barrier()
else:
    time.sleep(1)
    os.kill(int(pids[0]), signal.SIGTERM)
    time.sleep(40)
""",
        seconds=35,
    )
    assert done.returncode not in (0, 124), done.stdout
    assert "mpicoll: rank 0 of 2 died of SIGTERM" in done.stdout
