"""Messages through torch.distributed like earlier ones, which the extension starts in the caller's thread."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.launch import mpirun
from support.process_group import BACKEND
from torch.distributed.distributed_c10d import _get_default_store

import mpicoll
import mpicoll.torch as dropin
from mpicoll.collectives.message_buffers import may_be_announced
from mpicoll.engine.core.communicator import core_of
from mpicoll.engine.diagnostics.flight_recorder import list_history
from mpicoll.torch import communicator
from mpicoll.torch.fast_messages import MessageWork

group_tests = pytest.mark.usefixtures("default_group")

TURNS = 4
"""The third message of a kind is started by the extension."""

SHORT = timedelta(seconds=0.05)
LONG = timedelta(seconds=30)


def outside(group: Any) -> bool:
    return group is dist.GroupMember.NON_GROUP_MEMBER


def around(group: Any = None) -> tuple[int, int, int]:
    """This rank of the group, and those to the right and to the left."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    return rank, (rank + 1) % size, (rank - 1) % size


def pass_on(sent: torch.Tensor, filled: torch.Tensor, group: Any = None, tag: int = 0) -> list[Any]:
    """Send to the right and receive from the left, and return the works."""
    _, right, left = around(group)
    works = [
        dist.irecv(filled, group=group, group_src=left, tag=tag),
        dist.isend(sent, group=group, group_dst=right, tag=tag),
    ]
    for work in works:
        assert work.wait() is True
    return works


def repeat(count: int, tag: int, dtype: torch.dtype = torch.float32, group: Any = None) -> None:
    """Have the extension start messages of one kind."""
    for _ in range(TURNS):
        works = pass_on(torch.ones(count, dtype=dtype), torch.empty(count, dtype=dtype), group, tag)
    core = core_of(communicator(group))
    # Python receives what may come from another device, as after tests with devices. From torch 2.15 on, what c10d
    # returns contains our works.
    announced = may_be_announced(core, count * dtype.itemsize)
    if core.queue.calls is not None and not BACKEND and not announced:
        assert all(type(work) is MessageWork for work in works)


@pytest.fixture(params=["world", "part", "reversed", "one"])
def group(request: pytest.FixtureRequest, groups: dict[str, Any]) -> Any:
    return groups[request.param]


@pytest.mark.mpi
@pytest.mark.extension
@group_tests
def test_the_extension_starts_them() -> None:
    from mpicoll._shm import list_records

    _, right, left = around()
    repeat(19, 1)
    entries = [one for one in list_records(True) if one[0][2].nbytes == 76 and one[0][2].tag == 1]
    for name, peer in (("isend", right), ("irecv", left)):
        found = [
            (end is None, error) for entry, end, error in entries if (entry[2].name, entry[2].peer) == (name, peer)
        ]
        # Its start and its wait, of each.
        assert found.count((True, "")) >= TURNS - 2, found
        assert found.count((False, "")) >= TURNS - 2, found
    assert {entry[1] for entry, _, _ in entries} == {0}
    assert all(one in list_history() for one in entries)


@pytest.mark.mpi
@group_tests
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int64", "bool", "complex64", "uint8"])
def test_values(dtype: str, group: Any) -> None:
    """Also to and from this rank itself, in a group of one."""
    if outside(group):
        return
    rank, _, left = around(group)
    kind = getattr(torch, dtype)
    for shape in ((), (0,), (1,), (2, 3), (20_001,)):
        for turn in range(TURNS):
            sent, wanted = (torch.full(shape, who + turn).to(kind) for who in (rank, left))
            filled = torch.zeros(shape, dtype=kind)
            receive, send = pass_on(sent, filled, group, 5)
            assert torch.equal(filled, wanted)
            assert filled.dtype is kind
            assert torch.equal(sent, torch.full(shape, rank + turn).to(kind))
            assert receive.source_rank() == left
            with pytest.raises(TypeError, match="source_rank"):
                send.source_rank()


@pytest.mark.mpi
@group_tests
@pytest.mark.parametrize("count", [1, 1000, 1 << 18])
def test_blocking_in_a_chain(count: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for turn in range(TURNS):
        tensor = torch.full((count,), -1.0)
        if rank > 0:
            assert dist.recv(tensor, rank - 1) == rank - 1
            assert torch.equal(tensor, torch.full((count,), float(rank - 1 + turn)))
        if rank < size - 1:
            dist.send(torch.full((count,), float(rank + turn)), rank + 1)
        dist.barrier()


@pytest.mark.mpi
@group_tests
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_drop_in_beside_torch(dtype: str, group: Any) -> None:
    """In a chain of ranks of which every second one uses the drop-in: the same messages match."""
    if outside(group):
        return
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for turn in range(2 * TURNS):
        functions: Any = dropin if (rank + turn) % 2 else dist
        for shape in ((3,), (2, 3), ()):
            tensor = torch.full(shape, -1.0, dtype=getattr(torch, dtype))
            if rank > 0:
                source = rank - 1 if group is None else dist.get_global_rank(group, rank - 1)
                named = {"group_src": rank - 1} if turn % 4 == 3 else {"src": source}
                assert functions.recv(tensor, group=group, **named) == source
                assert torch.equal(tensor, torch.full(shape, rank - 1 + turn).to(tensor.dtype))
            if rank < size - 1:
                tensor = torch.full(shape, rank + turn).to(tensor.dtype)
                functions.send(tensor if shape != (2, 3) else tensor.T.contiguous().T, group=group, group_dst=rank + 1)


@pytest.mark.mpi
@pytest.mark.extension
@group_tests
def test_drop_in_is_carried_out_by_the_extension() -> None:
    from mpicoll._shm import list_records

    rank, size = dist.get_rank(), dist.get_world_size()
    for _ in range(TURNS):
        tensor = torch.zeros(23)
        if rank > 0:
            assert dropin.recv(tensor, rank - 1, tag=2) == rank - 1
        if rank < size - 1:
            dropin.send(tensor, rank + 1, tag=2)
    calls = [one[0][2] for one in list_records(True)]
    counts = {name: sum(call.name == name and call.nbytes == 92 for call in calls) for name in ("send", "recv")}
    assert (counts["send"] >= TURNS - 2) == (rank < size - 1), counts
    assert (counts["recv"] >= TURNS - 2) == (rank > 0), counts


@pytest.mark.mpi
@group_tests
def test_arguments_of_the_drop_in_that_c10d_rejects() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.ones(2)
    for functions in (dist, dropin):
        with pytest.raises(ValueError, match="should not be the same as the rank of the current process"):
            functions.send(tensor, rank)
        with pytest.raises(ValueError, match="both"):
            functions.recv(tensor, 0, group_src=0)
        with pytest.raises(mpicoll.RankError, match=r"dst must be a rank in \[0"):
            functions.send(tensor, group_dst=size)
        if size > 1:
            with pytest.raises(mpicoll.RankError, match="tag must be"):
                functions.send(tensor, (rank + 1) % size, tag=-1)
        with pytest.raises(TypeError, match=r"type torch\.Tensor"):
            functions.send([1], size)


@pytest.mark.mpi
@group_tests
def test_any_source() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for _ in range(TURNS):
        if rank:
            dist.send(torch.tensor([rank]), 0, tag=3)
        else:
            seen = []
            for _ in range(size - 1):
                tensor = torch.tensor([-1])
                seen.append(dist.recv(tensor, tag=3))
                assert tensor.item() == seen[-1]
            assert sorted(seen) == list(range(1, size))
        dist.barrier()


@pytest.mark.mpi
@group_tests
def test_both_ways_match_in_order() -> None:
    """Messages of one tag that the extension starts, and others, of tensors that are not contiguous."""
    rank, right, left = around()
    repeat(6, 7)

    def make(number: int, odd: int, value: float) -> torch.Tensor:
        made = torch.full((6, 2), value)[:, 0] if number % 3 == odd else torch.full((6,), value)
        assert made.is_contiguous() is (number % 3 != odd)
        return made

    for _ in range(3):
        sends = [dist.isend(make(number, 0, 100.0 * rank + number), right, tag=7) for number in range(12)]
        received = [make(number, 1, -1.0) for number in range(12)]
        for work in [dist.irecv(one, left, tag=7) for one in received] + sends:
            work.wait()
        assert [one[5].item() for one in received] == [100.0 * left + number for number in range(12)]
    # Messages of mpicoll's own functions are on the same communicator.
    comm = communicator()
    request = mpicoll.isend(torch.full((6,), 1.0), right, 7, comm=comm)
    filled = torch.zeros(6)
    dist.irecv(filled, left, tag=7).wait()
    request.wait()
    send = dist.isend(torch.full((6,), 2.0), right, tag=7)
    assert mpicoll.recv(filled, left, 7, comm=comm)[0] == 2
    send.wait()
    assert filled[0] == 1


@pytest.mark.mpi
@group_tests
@pytest.mark.parametrize("count", [3, 30_000])
def test_many_waited_for_in_any_order(count: int) -> None:
    rank, right, left = around()
    tags = range(4)
    for tag in tags:
        repeat(count, tag)
    filled = [torch.zeros(count) for _ in range(40)]
    receives = [dist.irecv(one, left, tag=number % 4) for number, one in enumerate(filled)]
    sends = [dist.isend(torch.full((count,), 100.0 * rank + number), right, tag=number % 4) for number in range(40)]
    works = receives + sends
    random.Random(rank).shuffle(works)
    for work in works[::2]:
        work.wait()
    deadline = time.monotonic() + 30
    while not all(work.is_completed() for work in works):
        assert time.monotonic() < deadline
    for work in works:
        assert work.is_success()
        assert work.wait(LONG)
    assert [one[0].item() for one in filled] == [100.0 * left + number for number in range(40)]


@pytest.mark.mpi
@group_tests
def test_batches() -> None:
    rank, right, left = around()
    for turn in range(TURNS):
        filled = [torch.zeros(5), torch.zeros(5)]
        sent = [torch.full((5,), float(rank + turn)), torch.full((5,), float(rank - turn))]
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.irecv, filled[0], left, tag=1),
                dist.P2POp(dist.isend, sent[0], right, tag=1),
                dist.P2POp(dist.isend, sent[1], left, tag=2),
                dist.P2POp(dist.irecv, filled[1], right, tag=2),
            ]
        )
        for work in works:
            work.wait()
        assert filled[0].tolist() == [left + turn] * 5
        assert filled[1].tolist() == [right - turn] * 5


@pytest.mark.mpi
@group_tests
def test_what_a_work_offers() -> None:
    rank = dist.get_rank()
    repeat(2, 0)
    for _ in range(TURNS):
        tensor, sent = torch.zeros(2), torch.ones(2)
        receive = dist.irecv(tensor, rank)
        assert not receive.is_completed()
        assert not receive.is_success()
        assert receive.exception() is None
        with pytest.raises(mpicoll.Timeout, match=rf"irecv\(float32\[2\], peer={rank}, tag=0\).*0\.05 s; it is still"):
            receive.wait(SHORT)
        future = receive.get_future()
        then = future.then(lambda done: done.value()[0].sum().item())
        send = dist.isend(sent, rank)
        assert send.wait(LONG)
        assert then.wait() == 2.0
        assert receive.wait()
        for work, outputs in ((receive, tensor), (send, sent)):
            assert work.is_completed()
            assert work.is_success()
            assert work.exception() is None
            assert [one.data_ptr() for one in work.result()] == [outputs.data_ptr()]
            assert work.get_future().wait()[0].data_ptr() == outputs.data_ptr()
        assert tensor.tolist() == [1.0, 1.0]


@pytest.mark.mpi
@group_tests
@pytest.mark.parametrize("sent", [1, 9, 1 << 17])
def test_another_size_than_expected(sent: int) -> None:
    rank, right, left = around()
    repeat(4, 0)
    for count in (sent, 4):
        repeat(count, 0)
    target = torch.zeros(1 << 18)
    for _ in range(2):
        send = dist.isend(torch.ones(sent), right)
        receive = dist.irecv(target[:4], left)
        for _ in range(2):
            with pytest.raises(mpicoll.TruncationError, match=rf"rank {rank}\b"):
                receive.wait()
        assert receive.is_completed()
        assert not receive.is_success()
        assert isinstance(receive.exception(), mpicoll.TruncationError)
        future = receive.get_future()
        with pytest.raises(mpicoll.TruncationError):
            future.wait()
        send.wait()
    pass_on(torch.full((4,), 5.0), target[:4])
    assert target[:4].tolist() == [5.0] * 4


@pytest.mark.mpi
@group_tests
def test_progress_while_no_rank_waits(request: pytest.FixtureRequest) -> None:
    """Large messages arrive while their sender does not call MPI."""
    rank, right, left = around()
    store = dist.PrefixStore(request.node.name, _get_default_store())
    count = 1 << 20
    repeat(count, 0)
    repeat(1, 1)
    sent, filled = torch.full((count,), float(rank)), torch.zeros(count)
    send = dist.isend(sent, right)
    arrived = threading.Event()
    if dist.get_world_size() > 1:
        reading = threading.Thread(target=lambda: (dist.irecv(filled, left).wait(), arrived.set()))
        reading.start()
        store.set(f"{rank}", "") if arrived.wait(30) else None
        store.wait([f"{right}", f"{left}"], LONG)
        reading.join(30)
    else:
        dist.irecv(filled, left).wait()
    assert torch.equal(filled, torch.full((count,), float(left)))
    send.wait()
    # A receive and its message, on which no thread calls.
    receive = dist.irecv(filled, left)
    done = threading.Event()
    receive.get_future().add_done_callback(lambda _: done.set())
    dropped = dist.isend(sent, right)
    del dropped
    assert done.wait(30)
    assert receive.is_success()


@pytest.mark.mpi
@group_tests
def test_the_memory_of_dropped_works_lives_until_they_complete() -> None:
    rank, right, left = around()
    count = 60_000
    repeat(count, 2)
    targets = [torch.zeros(count) for _ in range(4)]
    alive = [weakref.ref(one) for one in targets]
    while targets:
        dist.irecv(targets.pop(), left, tag=2)
    gc.collect()
    assert not any(one() is None for one in alive)
    dist.barrier()
    for number in range(4):
        dist.isend(torch.full((count,), number + 1.0), right, tag=2)
    deadline = time.monotonic() + 30
    while any(one() is not None for one in alive):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert rank >= 0


@pytest.mark.mpi
@group_tests
def test_one_message_and_several_threads() -> None:
    def wait(work: Any, results: list[Any]) -> None:
        results.append(work.wait())

    rank, right, left = around()
    repeat(1000, 0)
    for _ in range(5):
        filled = torch.zeros(1000)
        receive = dist.irecv(filled, left)
        results: list[Any] = []
        threads = [threading.Thread(target=wait, args=(receive, results)) for _ in range(3)]
        for thread in threads:
            thread.start()
        send = dist.isend(torch.full((1000,), rank + 1.0), right)
        for thread in threads:
            thread.join(30)
        assert results == [True] * 3
        send.wait()
        assert filled[0] == left + 1


@pytest.mark.mpi
@group_tests
def test_a_group_that_was_destroyed() -> None:
    group = dist.new_group()
    for _ in range(TURNS):
        works = pass_on(torch.ones(3), torch.empty(3), group)
    dist.destroy_process_group(group)
    assert all(work.is_success() for work in works)
    with pytest.raises((ValueError, mpicoll.MpicollError)):
        dist.isend(torch.ones(3), 0, group)


# --- jobs that end

JOB = """
import os, time, torch, torch.distributed as dist
from datetime import timedelta
dist.init_process_group("mpicoll", timeout=timedelta(seconds=TIMEOUT))
rank, t = dist.get_rank(), torch.ones(3)
for _ in range(4):
    dist.send(t, 1 - rank) if rank else dist.recv(t, 1 - rank)
    dist.recv(t, 1 - rank) if rank else dist.send(t, 1 - rank)
dist.barrier()
if rank == 0:
    ENDING
dist.recv(t, 0)
time.sleep(60)
"""


def run_job(tmp_path: Path, timeout: float, ending: str) -> tuple[int, str]:
    script = tmp_path / "program.py"
    script.write_text(JOB.replace("TIMEOUT", f"{timeout}").replace("ENDING", ending))
    done = mpirun(2, script, seconds=60, warm=True, MPICOLL_REPORT="off")
    return done.returncode, done.stdout


@pytest.mark.slow
def test_a_message_that_is_never_sent(tmp_path: Path) -> None:
    status, output = run_job(tmp_path, 0.7, "time.sleep(60)")
    assert status == 1, output
    assert "mpicoll: irecv(float32[3], peer=0, tag=0)" in output
    assert "has been waiting for more than 0.7 s" in output
    assert "runs its own program at program.py:" in output


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["os._exit(3)", "raise ValueError('no such luck')", "os.kill(os.getpid(), 9)"])
def test_a_sender_that_dies(tmp_path: Path, ending: str) -> None:
    status, output = run_job(tmp_path, 50, ending)
    assert status not in (0, 124), output
