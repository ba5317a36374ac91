"""The records of operations as other processes read them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpicoll
from mpicoll.engine.diagnostics.flight_recorder import HISTORY_LENGTH, Call, EntryTuple, Group, list_history, recorder
from mpicoll.engine.diagnostics.record_area import RecordedOperation, RecordedRank, read_ranks

pytestmark = pytest.mark.extension

GROUP = Group("7.7", "some", (3, 4, 5), 1, 60.0)


begun: list[EntryTuple] = []


@pytest.fixture
def memory() -> Iterator[np.ndarray[Any, Any]]:
    """Memory that has the records of this process from now on."""
    whole = np.zeros(recorder.AREA_BYTES + 256, np.uint8)
    found: np.ndarray[Any, Any] = whole[-whole.ctypes.data % 128 :][: recorder.AREA_BYTES]
    recorder.clear_records()
    recorder.place_records(found.data, 1, 3)
    yield found
    for entry in begun:
        recorder.end_entry((entry, None, ""))
    begun.clear()
    recorder.clear_records()


def read(memory: np.ndarray[Any, Any]) -> RecordedRank:
    (rank,) = read_ranks(bytes(memory), bytes(memory))
    return rank


def begin(number: int, call: Call) -> EntryTuple:
    entry: EntryTuple = (GROUP, number, call, time.monotonic(), None)
    recorder.begin_entry(entry)
    begun.append(entry)
    return entry


def test_fields_of_operations(memory: np.ndarray[Any, Any]) -> None:
    recorder.name_job("job ä")
    ring = Call("allreduce", 24, "bfloat16", (3,), op="sum", algorithm="ring")
    begin(1, ring)
    nested = begin(0, Call("recv", None, "complex128", None, peer=np.int64(2), tag=7, collective=False))  # type: ignore[arg-type]
    recorder.end_entry((nested, None, ""))
    failed = begin(2, Call("bcast_of_a_name_that_is_too_long", 1 << 40, "int8", root=1))
    recorder.end_entry((failed, failed[3] + 1.5, "it failed"))
    recorder.end_entry(((GROUP, 3, ring, 1.0, None), 2.0, ""))

    rank = read(memory)
    assert (rank.rank, rank.size, rank.pid, rank.job, rank.left) == (1, 3, os.getpid(), "job ä", False)
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    assert rank.process_start == int(fields[19])
    first, second, third, fourth = rank.operations
    assert (first.state, first.communicator, first.number, first.nbytes) == ("running", GROUP.number, 1, 24)
    assert (first.end, first.late, first.late_count, first.step) == (None, (), 0, 0)
    assert str(first) == "allreduce(bfloat16, op=sum) by ring number 1 on some"
    assert (second.state, second.nbytes, str(second)) == ("started", None, "recv(complex128, peer=2, tag=7) on some")
    assert (third.state, third.nbytes, str(third)) == (
        "failed",
        1 << 40,
        "bcast_of_a_name_that(int8, root=1) number 2 on some",
    )
    assert third.end is not None
    assert third.end - third.begin == pytest.approx(1.5, abs=1e-6)
    assert (fourth.state, fourth.begin, fourth.end) == ("done", 1.0, 2.0)
    assert [record[2] for record in list_history()] == ["", "", "it failed"]
    recorder.mark_left()
    assert read(memory).left


def test_operations_that_have_not_ended_are_kept(memory: np.ndarray[Any, Any]) -> None:
    """However many others begin and end meanwhile."""
    long = begin(1, Call("barrier"))
    for number in range(2, 2 * HISTORY_LENGTH + 2):
        recorder.end_entry(((GROUP, number, Call("allreduce", 8), 1.0, None), time.monotonic(), ""))
    first, *others = read(memory).operations
    assert (first.number, first.state) == (1, "running")
    assert [one.number for one in others] == list(range(HISTORY_LENGTH + 3, 2 * HISTORY_LENGTH + 2))
    assert [entry[1] for entry, _, _ in list_history()] == [one.number for one in others]
    recorder.end_entry((long, time.monotonic(), ""))
    assert read(memory).operations[0].state == "done"


def test_a_waiting_rank_names_the_late_ones(memory: np.ndarray[Any, Any]) -> None:
    go = threading.Event()
    found: list[RecordedOperation] = []

    def program() -> None:
        world = mpicoll.world()
        mpicoll.barrier()
        if world.rank == 1:
            # Not the barrier, in which rank 0 may still be.
            while not (waiting := [one for one in read(memory).operations if one.late and one.name == "allreduce"]):
                time.sleep(0.001)
            found.extend(waiting)
        mpicoll.allreduce(np.ones(2))
        go.wait(10)

    def release() -> None:
        while sum(one.name == "allreduce" and one.state == "done" for one in read(memory).operations) < 2:
            time.sleep(0.001)
        go.set()

    watcher = threading.Thread(target=release)
    watcher.start()
    mpicoll.run_local(program, 2)
    watcher.join(10)
    (one,) = found
    assert (one.name, one.state, one.late, one.late_count, one.step) == ("allreduce", "waiting", (1,), 1, 1)
    assert {one.state for one in read(memory).operations} == {"done"}


def test_a_forked_process_does_not_write(memory: np.ndarray[Any, Any]) -> None:
    program = """
import os, mmap
import numpy as np
from mpicoll.engine.diagnostics.flight_recorder import Call, Group, recorder
whole = np.frombuffer(mmap.mmap(-1, recorder.AREA_BYTES), np.uint8)
recorder.place_records(whole.data, 0, 1)
entry = (Group("1", "some", (0,), 0, 1.0), 1, Call("barrier"), 1.0, None)
recorder.begin_entry(entry)
before = bytes(whole)
if os.fork() == 0:
    recorder.end_entry((entry, 2.0, ""))
    recorder.end_entry((entry[:1] + (2,) + entry[2:], 2.0, ""))
    os._exit(0)
os.wait()
assert bytes(whole) == before
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=60)


def test_a_forked_process_has_no_records_of_its_parent() -> None:
    """Those in the private area are older than the Python objects beside them."""
    program = """
import os, mmap
import numpy as np
from mpicoll.engine.diagnostics.flight_recorder import Call, Group, recorder
group = Group("1", "some", (0,), 0, 1.0)
def record(number):
    entry = group, number, Call("barrier"), 1.0, None
    recorder.begin_entry(entry)
    recorder.end_entry((entry, 2.0, ""))
for number in range(3):
    record(number)
whole = np.frombuffer(mmap.mmap(-1, recorder.AREA_BYTES), np.uint8)
recorder.place_records(whole.data, 0, 1)
recorder.clear_records()
child = os.fork()
if child == 0:
    before = len(recorder.list_records(False))
    record(7)
    os._exit(10 * before + len(recorder.list_records(False)))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=60)


@pytest.mark.parametrize("seed", range(20))
def test_any_bytes_are_read(memory: np.ndarray[Any, Any], seed: int) -> None:
    for number in range(1, 30):
        begin(number, Call("barrier"))
    randoms = np.random.default_rng(seed)
    other = np.concatenate([np.zeros(1024, np.uint8), memory, memory])
    places = randoms.integers(0, other.nbytes if seed % 2 else 2048, 500)
    other[places] = randoms.integers(0, 256, places.size)
    for rank in read_ranks(bytes(other), bytes(other)):
        assert all(str(one).isprintable() for one in rank.operations)
    cut = bytes(other[: int(randoms.integers(0, other.nbytes))])
    list(read_ranks(cut, cut))


def test_records_that_change_are_left_out(memory: np.ndarray[Any, Any]) -> None:
    for number in (1, 2):
        begin(number, Call("barrier"))
    before = bytes(memory)
    begin(3, Call("barrier"))
    (rank,) = read_ranks(before, bytes(memory))
    assert [one.number for one in rank.operations] == [1, 2]
