"""The abort of a job, and its announcement."""

from __future__ import annotations

import queue
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from subprocess import CompletedProcess
from typing import Any, cast

import pytest
from support.watchdogs import WatchedRank

from mpicoll.engine.diagnostics import abort
from mpicoll.transport.control.events import Message

Starter = Callable[..., "CompletedProcess[str]"]


class Wire:
    """A control network between two ranks of one process."""

    def __init__(self, rank: int) -> None:
        self.rank, self.size, self.exits = rank, 2, dict[int, Any]()
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.other: Wire | None = None

    def send(self, body: dict[str, Any], to: int | None = None) -> None:
        if self.other is not None:
            self.other.inbox.put(Message(self.rank, body))

    def flush(self, timeout: float) -> bool:
        return True

    def poll(self, timeout: float) -> list[Message]:
        with suppress(queue.Empty):
            return [self.inbox.get(timeout=timeout)]
        return []


def die(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *texts: str, joined: bool) -> list[str]:
    """What two ranks say that die of these at the same time, each of which waits for the other to end the job."""
    monkeypatch.setattr(abort, "TAKEOVER", 1.0)
    monkeypatch.setattr(abort, "run_exit_hooks", lambda: None)  # of a process that has the objects of many tests
    wires, watches = [Wire(0), Wire(1)], []
    if joined:
        wires[0].other, wires[1].other = wires[1], wires[0]
    for wire in wires:
        one = WatchedRank().watchdog
        one.peers.rank, one.peers.size, one.peers.network = wire.rank, 2, cast(Any, wire)
        one._joined.set()
        watches.append(one)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda one, text: one.abort.announce(f"died of {text}", text), watches, texts))
    for one in watches:
        one._leaving = True
    return [line for line in capsys.readouterr().err.splitlines() if line]


@pytest.mark.parametrize(
    ("texts", "joined", "said"),
    [
        # The second says it again, as nobody has ended it.
        (
            ("x (rank 0 of 2)", "x (rank 1 of 2)"),
            True,
            ["ranks 0 and 1 of 2 died of x (rank 0 of 2)", "rank 1 of 2 died of x (rank 1 of 2)"],
        ),
        (("x", "x"), False, ["rank 0 of 2 died of x", "rank 1 of 2 died of x"]),
        (("x", "y"), True, ["rank 0 of 2 died of x", "rank 1 of 2 died of y"]),
    ],
    ids=["alike", "out of touch", "not alike"],
)
def test_ranks_that_die_alike_say_it_once(
    texts: tuple[str, str],
    joined: bool,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = die(monkeypatch, capsys, *texts, joined=joined)
    assert sorted(found) == sorted(f"mpicoll: {one}" for one in said)


@pytest.mark.slow
def test_a_stopped_rank_0_is_the_suspect_also_without_a_report(job: Starter) -> None:
    """It passes on what the others say, so nothing is heard of them; and the folder for reports can't be made."""
    done = job(
        3,
        """
import os, signal, threading
pids = mpicoll.allgather(np.array([os.getpid()]))
mpicoll.barrier()
if mpicoll.world().rank == 1:
    os.kill(int(pids[0]), signal.SIGSTOP)
elif mpicoll.world().rank == 0:
    threading.Event().wait()
mpicoll.barrier()
""",
        seconds=50,
        MPICOLL_TIMEOUT="1",
        MPICOLL_REPORT="/proc/none",
        MPICOLL_SHARED_MEMORY="off",  # who waits there raises by itself
    )
    assert done.returncode not in (0, 124), done.stdout
    said = done.stdout[done.stdout.index("mpicoll: ") :].split("mpicoll: ")
    assert "has been waiting for more than 1 s" in said[1]
    assert "rank 0 does not respond (stopped, frozen or without a core?); it relays" in said[1]
    assert "so nothing is known about rank 2" in said[1]
    assert re.search(r"barrier\(\) number \d+ on world waits for rank 0, which", said[1]), said[1]
    assert said[2].startswith("The report can't be written to /proc/none (FileNotFoundError")
