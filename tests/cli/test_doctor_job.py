"""``mpicoll doctor --job``: jobs whose ranks are stuck, stopped and killed, examined from outside."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from support.launch import mpirun

from mpicoll.cli import main
from mpicoll.cli.doctor.job import Job, Rank, find_jobs

PROGRAM = """
import os
import sys
from pathlib import Path

import numpy as np

import mpicoll

world = mpicoll.world()
x, out = np.ones(3), np.empty(3)
for _ in range(5):
    mpicoll.allreduce(x, out=out)
path = Path(sys.argv[1], f"rank{world.rank}")
path.with_suffix(".new").write_text(f"{os.getpid()} {os.getppid()}")
path.with_suffix(".new").rename(path)
if world.rank > 0:
    mpicoll.allreduce(x, out=out)
else:
    mpicoll.recv(x, 1, tag=7)
"""


@contextmanager
def start(folder: Path, size: int) -> Iterator[list[int]]:
    """Run PROGRAM; yield the processes of the ranks and of the launcher, which are killed at the end."""
    (folder / "program.py").write_text(PROGRAM)
    pids: list[int] = []
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(mpirun, size, folder / "program.py", folder, seconds=50, MPICOLL_STUCK_AFTER="50")
        try:
            paths = [folder / f"rank{rank}" for rank in range(size)]
            while not all(path.exists() for path in paths):
                assert not job.done(), job.result().stdout
                time.sleep(0.01)
            both = [list(map(int, path.read_text().split())) for path in paths]
            pids += [*(pid for pid, _ in both), both[0][1]]
            yield pids
        finally:
            for pid in reversed(pids):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def find(pids: list[int]) -> Job:
    return next(job for job in find_jobs() if job.ranks[0].recorded.pid == pids[0])


def describe(rank: Rank) -> tuple[str, str, str, tuple[int, ...]]:
    assert rank.operation is not None
    return rank.process, str(rank.operation), rank.operation.state, rank.waits_for


@pytest.mark.extension
def test_stuck_stopped_and_killed_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with start(tmp_path, 3) as pids:
        while [one.operation and one.operation.late for one in find(pids).ranks] != [(), (0,), (0,)]:
            time.sleep(0.01)
        job = find(pids)
        allreduce = "allreduce(float64, op=sum) by shm_flat number 6 on world"
        assert [describe(rank) for rank in job.ranks] == [
            ("runs", "recv(float64, peer=1, tag=7) on world", "running", ()),
            ("runs", allreduce, "waiting", (0,)),
            ("runs", allreduce, "waiting", (0,)),
        ]
        assert [one.pid for one in job.ranks] == pids[:3]
        assert job.behind == [f"rank 0 has not called {allreduce}; its last collective on world is number 5"]

        # The other ranks and the launcher can't react to the death.
        for pid in (pids[3], *pids[:2]):
            os.kill(pid, signal.SIGSTOP)
        os.kill(pids[2], signal.SIGKILL)
        while find(pids).ranks[2].process != "gone":
            time.sleep(0.01)
        assert [describe(rank) for rank in find(pids).ranks] == [
            ("stopped", "recv(float64, peer=1, tag=7) on world", "running", ()),
            ("stopped", allreduce, "waiting", (0,)),
            ("gone", allreduce, "waiting", (0,)),
        ]
        assert main(["doctor", "--job", str(pids[1])]) == 1
        text = capsys.readouterr().out
        assert f"Job {job.name}: 3 ranks" in text
        assert allreduce in text
        assert job.behind[0] in text
        assert main(["doctor", "--json", "--job", job.name]) == 1
        (told,) = json.loads(capsys.readouterr().out)["jobs"]
        assert [one["process"] for one in told["ranks"]] == ["stopped", "stopped", "gone"]
        last = told["ranks"][2]["operations"][-1]
        assert (last["text"], last["nbytes"], last["step"], last["late"]) == (allreduce, 24, 1, [0])
        assert [one["number"] for one in told["ranks"][2]["operations"]] == list(range(1, 7))
    assert main(["doctor", "--job", "no-such-job"]) == 1
    assert "has records of the job no-such-job" in capsys.readouterr().err
