"""The context manager ``trace`` and MPICOLL_TRACE."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest
from support.ranks import Ranks
from support.traces import names, operations, read

import mpicoll
from mpicoll.cli.trace_summary import summarise
from mpicoll.engine.trace import trace
from mpicoll.engine.tracing import trace_files
from mpicoll.errors import SetupError

Job = Callable[..., "CompletedProcess[str]"]


def traced(folder: Path) -> tuple[Path, int]:
    """What the ranks do in the test below: rank 1 comes late to the second of three all-reduces."""
    world = mpicoll.world()
    mpicoll.allreduce(np.ones(2))
    half = world.split(world.rank % 2)
    assert half is not None
    with trace(folder) as path:
        for number in range(3):
            if world.rank == 1 and number == 1:
                time.sleep(LATE)
            mpicoll.allreduce(np.ones(256, np.float32), algorithm="ring")
            mpicoll.bcast(np.ones(100 + number), root=1)
        mpicoll.barrier(comm=half)
        mpicoll.iallreduce(np.ones(4), op="max").wait()
        if world.rank == 0:
            mpicoll.send(np.ones(3), 1, 7)
        elif world.rank == 1:
            mpicoll.recv(np.ones(3), 0, 7)
    mpicoll.barrier()
    half.free()
    return path, len(half.members)


def test_a_trace_of_ranks(several: Ranks, tmp_path: Path) -> None:
    path = several.share(tmp_path)
    size = several.size
    several(traced, path)
    mpicoll.barrier()
    (file,) = path.glob("*.json")
    assert list(path.iterdir()) == [file]
    events = read(file)
    assert {one["pid"] for one in events} == set(range(size))
    for rank in range(size):
        own = operations(events, rank)
        collectives = [one for one in own if one["cat"] == "collective"]
        assert sorted(one["name"] for one in collectives) == ["allreduce"] * 4 + ["barrier"] + ["bcast"] * 3
        reduced = [one for one in collectives if one["args"].get("algorithm") == "ring"]
        assert [one["args"]["bytes"] for one in reduced] == [1024] * 3
        assert {one["args"]["dtype"] for one in reduced} == {"float32"}
        assert {one["args"]["op"] for one in reduced} == {"sum"}
        sent = [one for one in collectives if one["name"] == "bcast"]
        assert [one["args"]["bytes"] for one in sent] == [800, 808, 816]
        assert {one["args"]["root"] for one in sent} == {1}
        # Some came before: allreduce, split, and other tests.
        in_world = [one["args"]["number"] for one in collectives if one["args"]["communicator"] == "world"]
        assert in_world == list(range(in_world[0], in_world[0] + 7))
        messages = [one for one in own if one["cat"] == "message"]
        assert [one["name"] for one in messages] == {0: ["send"], 1: ["recv"]}.get(rank, [])
    assert [(one["pid"], one["ph"]) for one in events if one["ph"] in "sf"] == [(0, "s"), (1, "f")]
    table = trace_files.load(file)
    ring = np.array([table.calls[one].get("algorithm") == "ring" for one in table.call])
    second = ring & (table.number == sorted(one["args"]["number"] for one in reduced)[1])
    assert table.last[second].tolist() == [1] * size
    late_by_rank(table.wait[second].tolist())


LATE = 0.6
"""Seconds: long beside what a busy machine delays ranks."""


def late_by_rank(waits: list[float]) -> None:
    """Assert that all have waited for rank 1."""
    assert all(wait < LATE / 2 * 1e6 if rank == 1 else wait > LATE / 2 * 1e6 for rank, wait in enumerate(waits)), waits


def test_a_rank_that_fails_leaves_its_part(tmp_path: Path) -> None:
    def body() -> None:
        with trace(tmp_path):
            mpicoll.barrier()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        mpicoll.run_local(body, 2)
    (folder,) = tmp_path.iterdir()
    events = read(trace_files.merge(folder))
    assert [one["name"] for one in operations(events)] == ["barrier"] * 2


def test_a_part_of_the_ranks(several: Ranks, tmp_path: Path) -> None:
    where = several.share(tmp_path)

    def body() -> None:
        world = mpicoll.world()
        part = world.group(range(world.size - 1, 0, -1))
        if part is not None:
            with trace(where, comm=part):
                mpicoll.barrier(comm=part)
            part.free()
        mpicoll.barrier()

    several(body)
    (file,) = where.iterdir()
    events = read(file)
    assert sorted(names(events, "process")) == list(range(1, several.size))
    assert {one["name"] for one in operations(events)} == {"barrier"}


def test_one_trace_inside_another(ranks: Ranks, tmp_path: Path) -> None:
    where = ranks.share(tmp_path)

    def body() -> None:
        with trace(where / "outer"):
            mpicoll.barrier()
            with trace(where / "inner"):
                mpicoll.barrier()
        mpicoll.barrier()

    ranks(body)
    for name, count in (("outer", 2), ("inner", 1)):
        (file,) = (where / name).iterdir()
        # Waiting for what is pending is no operation.
        assert len(operations(read(file))) == count * ranks.size


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def body() -> None:
        with trace(tmp_path / "file" / "folder"):
            raise AssertionError("not reached")

    with pytest.raises(SetupError, match=r"rank 0 can't write its trace to .*; give a folder that it may write to"):
        mpicoll.run_local(body, 1)


PROGRAM = """
import os, sys, time
world = mpicoll.world()
for number in range(3):
    if world.rank == 1 and number == 1:
        time.sleep(0.6)
    mpicoll.allreduce(np.ones(256, np.float32))
mpicoll.iallreduce(np.ones(100_000))
"""


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_a_job(job: Job, tmp_path: Path, size: int) -> None:
    done = job(size, PROGRAM, MPICOLL_TRACE=str(tmp_path / "traces"))
    assert (done.returncode, done.stdout) == (0, "")
    (file,) = (tmp_path / "traces").iterdir()
    events = read(file)
    waits: list[float] = []
    for rank in range(size):
        own = [one for one in operations(events, rank) if one["name"] == "allreduce"]
        assert [one["args"]["bytes"] for one in own] == [1024] * 3 + [800_000]
        assert [one["args"]["number"] for one in own] == list(
            range(own[0]["args"]["number"], own[0]["args"]["number"] + 4)
        )
        waits.append(own[1]["args"]["wait_us"])
        assert own[1]["args"]["last_rank"] == 1
        assert all(one["args"]["algorithm"] for one in own)
    late_by_rank(waits)
    words = summarise(trace_files.load(file)).words
    assert re.fullmatch(r"Rank 1 makes the others wait \d+% of their time in communication\.", words[0])


@pytest.mark.slow
def test_a_job_that_is_killed(job: Job, tmp_path: Path) -> None:
    program = (
        PROGRAM
        + """
time.sleep(1.5)
if world.rank == 1:
    os.kill(os.getpid(), 9)
mpicoll.barrier()
"""
    )
    done = job(2, program, MPICOLL_TRACE=str(tmp_path / "traces"))
    assert done.returncode not in (0, 124)
    (folder,) = (tmp_path / "traces").iterdir()
    assert folder.is_dir()
    events = read(trace_files.merge(folder))
    for rank in range(2):
        assert [one["name"] for one in operations(events, rank)].count("allreduce") == 4


@pytest.mark.slow
def test_what_a_rank_has_done_before_it_fails(job: Job, tmp_path: Path) -> None:
    done = job(
        2, PROGRAM + "\nif world.rank == 1:\n    raise ZeroDivisionError\n", MPICOLL_TRACE=str(tmp_path / "traces")
    )
    assert done.returncode not in (0, 124)
    (folder,) = (tmp_path / "traces").iterdir()
    table = trace_files.load(folder)
    assert [table.calls[one]["name"] for one in table.call[table.rank == 1]].count("allreduce") >= 3


@pytest.mark.slow
def test_a_program_with_communicators_of_its_own(job: Job, tmp_path: Path) -> None:
    program = "from mpi4py import MPI\nmpicoll.barrier(comm=MPI.COMM_WORLD)"
    done = job(2, program, MPICOLL_TRACE=str(tmp_path / "traces"))
    assert (done.returncode, done.stdout) == (0, "")
    (file,) = (tmp_path / "traces").iterdir()
    assert [one["args"]["communicator"] for one in operations(read(file))] == ["mpi4py"] * 2


@pytest.mark.slow
def test_a_job_that_is_not_traced(job: Job, tmp_path: Path) -> None:
    done = job(1, "mpicoll.barrier()\nimport sys\nprint('mpicoll.engine.tracing' in sys.modules)")
    assert done.stdout == "False\n"


@pytest.mark.slow
def test_a_world_of_one_without_mpi(python: Job, tmp_path: Path) -> None:
    program = "import numpy as np, mpicoll\nmpicoll.allreduce(np.ones(4))"
    done = python(program, MPICOLL_TRACE=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "")
    (file,) = tmp_path.iterdir()
    (one,) = operations(read(file))
    assert (one["name"], one["args"]["bytes"]) == ("allreduce", 32)


@pytest.mark.slow
def test_a_variable_on_one_rank_counts_for_all(job: Job, tmp_path: Path) -> None:
    program = f"""
import os
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    os.environ["MPICOLL_TRACE"] = {str(tmp_path / "traces")!r}
mpicoll.barrier()
"""
    done = job(2, program)
    assert (done.returncode, done.stdout) == (0, "")
    (file,) = (tmp_path / "traces").iterdir()
    assert len(operations(read(file))) == 2
