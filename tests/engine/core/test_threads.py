"""Threads of a rank that share the work on large arrays."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from support.data import random
from support.ranks import Ranks

pytest.importorskip("mpicoll._shm", exc_type=ImportError)

import mpicoll
from mpicoll.config import Config, config
from mpicoll.engine.core.arena import Arena
from mpicoll.engine.core.threads import count_threads
from mpicoll.transport import cores
from mpicoll.transport.local import LocalJob, transports
from mpicoll.transport.waiting import wait_for

LENGTH = 140_001
"""Of arrays of 4 bytes: several shares, and no whole number of cache lines."""


def _arena() -> Arena:
    arena = mpicoll.world()._core.arena()
    assert arena is not None
    return arena


def _list_workers() -> list[int]:
    found = []
    for one in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            if (one / "comm").read_text() == "mpicoll-worker\n":
                found.append(int(one.name))
    return found


@pytest.mark.parametrize("algorithm", ["shm_pipelined", "cma", "shared"])
def test_each_number_of_threads_gives_the_same_bits(several: Ranks, algorithm: str) -> None:
    """In slots, in private memory of other ranks, and in memory that all ranks map."""

    def body() -> None:
        world, arena = mpicoll.world(), _arena()
        allocate: Callable[..., np.ndarray] = mpicoll.empty if algorithm == "shared" else np.empty
        x, y = allocate(LENGTH, np.float32), allocate(LENGTH * world.size, np.float32)
        inputs = [random("threads", rank).standard_normal(LENGTH).astype(np.float32) for rank in range(world.size)]
        x[:] = inputs[world.rank]
        forced = None if algorithm == "shared" else algorithm
        before = arena.threads
        try:
            results = []
            for threads in (1, 2, 99):
                arena.threads = threads
                mpicoll.allgather(x, out=y, algorithm=forced)
                assert y.tobytes() == b"".join(one.tobytes() for one in inputs)
                rows = [mpicoll.alltoall(y, algorithm=forced), mpicoll.reduce_scatter(y, algorithm=forced)]
                rows += [mpicoll.allreduce(x, algorithm=forced), mpicoll.reduce(x, algorithm=forced)]
                if algorithm == "shm_pipelined":
                    rows += [mpicoll.scan(x), mpicoll.exscan(x), mpicoll.bcast(x, root=1)]
                results.append([None if row is None else row.tobytes() for row in rows])
            total = inputs[0]
            for one in inputs[1:]:
                total = total + one
            assert results[0][2] == total.tobytes()
            assert all(one == results[0] for one in results)
        finally:
            arena.threads = before

    several(body)
    assert wait_for(lambda: _list_workers() or None, 20)  # a thread may not have begun yet


def test_memory_that_a_thread_can_not_read() -> None:
    def body() -> None:
        world, arena, x = mpicoll.world(), _arena(), np.ones(4 * LENGTH, np.float32)
        arena.threads = 3
        for collective in ("allreduce", "alltoall"):
            if world.rank == 1:
                arena.set_processes([1 << 30] * world.size)  # more than the kernel's largest number of a process
            with pytest.raises(mpicoll.CommunicationError, match=r"can't (read|write to) the|failed in this"):
                getattr(mpicoll, collective)(x, algorithm="cma")
            arena.set_processes([0] * world.size)
        np.testing.assert_array_equal(mpicoll.allreduce(x, algorithm="cma"), world.size)

    mpicoll.run_local(body, 2)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a thread can't be bound to fewer cores")
def test_threads_use_the_cores_of_the_caller() -> None:
    """Also after the program has bound the calling thread to others."""

    def body() -> None:
        arena, x, every = _arena(), np.ones(LENGTH, np.float32), os.sched_getaffinity(0)
        arena.threads = 2
        for mask in (every, {max(every)}, {min(every)}, every):
            os.sched_setaffinity(0, mask)
            mpicoll.barrier()
            mpicoll.allreduce(x)
            mpicoll.barrier()
            assert [os.sched_getaffinity(worker) for worker in _list_workers()] == [mask] * len(_list_workers())
            mpicoll.barrier()

    mpicoll.run_local(body, 2)
    assert wait_for(lambda: _list_workers() or None, 20)  # a thread may not have begun yet


_FORK = """
import os
import signal
from pathlib import Path
import numpy as np
import mpicoll
from mpicoll.transport.waiting import wait_for

def list_masks():
    masks = []
    for one in Path("/proc/self/task").iterdir():
        try:
            lines = (one / "status").read_text().splitlines()
        except OSError:  # it has ended
            continue
        values = dict(line.split(":", 1) for line in lines)
        if values["Name"].strip() == "mpicoll-worker":
            masks.append(int(values["SigBlk"], 16))
    return masks

def body():
    x = np.full(1 << 20, 1.0, np.float32)
    for _ in range(5):
        assert (mpicoll.allreduce(x) == 2).all()

assert not list_masks()
mpicoll.run_local(lambda: [mpicoll.allreduce(np.ones(1 << 13)) for _ in range(5)], 2)
assert not list_masks(), "small operations have started threads"
mpicoll.run_local(body, 2)
assert wait_for(lambda: len(list_masks()) == 2 or None, 20)
masks = list_masks()
handled = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD, signal.SIGALRM]
assert all(mask >> one - 1 & 1 for mask in masks for one in handled), masks
child = os.fork()
assert list_masks() == (masks if child else [])
mpicoll.run_local(body, 2)
assert wait_for(lambda: len(list_masks()) == 2 or None, 20)
if child:
    assert os.waitpid(child, 0)[1] == 0
    print("ended")
"""


def test_a_child_starts_threads_of_its_own() -> None:
    """They handle no signals, and nothing waits for them when the process ends."""
    environ = {"MPICOLL_THREADS": "3", "PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _FORK], env=environ, capture_output=True, text=True, timeout=50, check=False
    )
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr


@pytest.mark.parametrize(
    ("masks", "local_ranks", "quota", "count"),
    [
        ([range(16), range(16)], 2, "max 100000", 8),
        ([range(16), range(16)], 4, "max 100000", 4),  # two ranks of which nothing is known
        ([range(1), range(1, 2)], 2, "max 100000", 1),
        ([range(8), range(8, 16), range(8)], 3, "max 100000", 4),
        ([range(8), range(8, 16), None], 3, "max 100000", 4),
        ([range(8), range(4, 8)], 2, "max 100000", 6),
        ([range(3), range(3), range(3)], 3, "max 100000", 1),
        ([range(2), range(2), range(2), range(2)], 4, "max 100000", 1),
        ([range(16), range(16)], 2, "600000 100000", 3),
        ([range(16), range(16)], 2, None, 8),
    ],
)
def test_count_of_cores(
    monkeypatch: pytest.MonkeyPatch, masks: list[range | None], local_ranks: int, quota: str | None, count: int
) -> None:
    def get_mask(process: int) -> set[int]:
        mask = masks[process % 100]
        if mask is None:
            raise ProcessLookupError
        return set(mask)

    def read_file(path: str) -> str:
        if quota is None:
            raise FileNotFoundError(path)
        return quota

    monkeypatch.setattr(cores.os, "sched_getaffinity", get_mask)
    monkeypatch.setattr(cores, "read_file", read_file)
    processes = [100 + rank for rank in range(len(masks))]
    assert cores.count_cores(processes, 0, local_ranks) == count


def test_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    (transport,) = transports(LocalJob(1))
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda process: set(range(64)))
    monkeypatch.setattr(cores, "read_file", lambda path: "max 100000")
    assert count_threads(transport) == 8
    monkeypatch.setattr("mpicoll.engine.core.threads.config", lambda: config()._replace(threads=3))
    assert count_threads(transport) == 3
    assert Config.read({"MPICOLL_THREADS": "8"}).threads == 8
    for value in ("", "0", "9", "-1", "1.5", "all"):
        with pytest.raises(mpicoll.SetupError, match=f"MPICOLL_THREADS='{value}': must be auto, or a number from 1 to"):
            Config.read({"MPICOLL_THREADS": value})


def test_explain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpicoll.engine.core.threads.config", lambda: config()._replace(threads=3))

    def body() -> None:
        assert mpicoll.explain("allreduce", 1 << 22).reason.endswith("; in up to 3 threads of this rank")
        assert "threads" not in mpicoll.explain("allreduce", 1 << 16).reason

    mpicoll.run_local(body, 2)
