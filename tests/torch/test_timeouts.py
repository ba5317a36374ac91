"""torch's timeouts: of a group, of a wait, of a barrier."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.launch import mpirun
from support.process_group import BACKEND, barrier_has_timeout, operations
from torch.distributed.distributed_c10d import _get_default_store, _set_pg_timeout

import mpicoll
import mpicoll.torch as dropin
from mpicoll.config import config

SOON = timedelta(seconds=0.05)
FULL = timedelta(seconds=0.6)
PATIENT = timedelta(seconds=25)


def bound(group: Any = None) -> float:
    return dropin.communicator(group).timeout


@pytest.fixture
def late(request: pytest.FixtureRequest) -> Any:
    """``late(call, given_up)``: rank 0 makes the call when all others have given it up."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if size < 2:
        pytest.skip("needs two ranks")
    store = dist.PrefixStore(request.node.name, _get_default_store())

    def run(call: Any, given_up: Any) -> None:
        if rank == 0:
            store.wait([str(other) for other in range(1, size)])
            call()
        else:
            given_up()
            store.set(str(rank), "")

    return run


@pytest.mark.mpi
@pytest.mark.usefixtures("default_group")
class TestGroups:
    def test_default(self) -> None:
        assert bound() == config().timeout
        assert bound(dist.new_group()) == config().timeout

    def test_new_group(self) -> None:
        group = dist.new_group(timeout=timedelta(seconds=70))
        assert bound(group) == 70
        assert operations(group).options._timeout == timedelta(seconds=70)
        dist.barrier(group)

    def test_split_group(self) -> None:
        everyone = list(range(dist.get_world_size()))
        part = dist.split_group(split_ranks=[everyone], timeout=timedelta(seconds=71))
        assert bound(part) == 71
        # c10d passes its own default.
        assert bound(dist.split_group(part, [everyone])) == (config().timeout if BACKEND else 71)

    @pytest.mark.parametrize("how", ["function", "method"])
    def test_set_timeout(self, how: str) -> None:
        """It holds for the communicators of callbacks too."""
        group = dist.new_group()
        tensor = torch.ones(1)
        work = dist.all_reduce(tensor, group=group, async_op=True)
        work.get_future().then(lambda future: dist.all_reduce(torch.ones(1), group=group)).wait()
        lanes = operations(group)._callback_comms.list_communicators()
        assert len(lanes) == 2
        if how == "function":
            _set_pg_timeout(timedelta(seconds=72), group)
        else:
            group.set_timeout(timedelta(seconds=72))
        assert [lane.timeout for lane in lanes] == [72, 72]
        assert operations(group).options._timeout == timedelta(seconds=72)
        assert bound() == config().timeout

    def test_no_timeout(self) -> None:
        with pytest.raises(mpicoll.ArgumentError, match="must be a positive number of seconds, got -1"):
            dist.group.WORLD.set_timeout(timedelta(seconds=-1))
        assert bound() == config().timeout


@pytest.mark.mpi
@pytest.mark.usefixtures("default_group")
class TestWaits:
    def test_a_wait_names_the_missing_ranks(self, late: Any) -> None:
        tensor = torch.tensor([dist.get_rank() + 1.0])

        def call() -> None:
            dist.all_reduce(tensor)

        def given_up() -> None:
            work = dist.all_reduce(tensor, async_op=True)
            with pytest.raises(mpicoll.Timeout) as caught:
                work.wait(FULL)
            words = str(caught.value)
            assert words.startswith("all_reduce(float32[1], op=sum)"), words
            assert "not complete within the timeout of 0.6 s; it is still pending" in words, words
            assert "waits for rank 0, which has not called it" in words, words
            pending.append(work)

        pending: list[Any] = []
        late(call, given_up)
        for work in pending:
            assert work.wait(PATIENT)
        size = dist.get_world_size()
        assert tensor.item() == size * (size + 1) / 2

    def test_coalesced_works_share_the_time(self, late: Any) -> None:
        """That of the whole is what the error tells."""
        peer = 0
        tensors = [torch.zeros(2), torch.zeros(2)]
        pending: list[Any] = []

        def call() -> None:
            for other in range(1, dist.get_world_size()):
                for number in (1, 2):
                    dist.send(torch.full((2,), float(number)), other)

        def given_up() -> None:
            operations = [dist.P2POp(dist.irecv, tensor, peer) for tensor in tensors]
            (work,) = dist.batch_isend_irecv(operations)[-1:]
            with pytest.raises(mpicoll.Timeout, match=r"irecv\(float32\[2\], peer=0.* within the timeout of 0\.05 s"):
                work.wait(SOON)
            pending.append(work)

        late(call, given_up)
        for work in pending:
            assert work.wait(PATIENT)
            assert [tensor[0].item() for tensor in tensors][-1] == 2.0

    @barrier_has_timeout
    @pytest.mark.parametrize("way", ["blocking", "async", "drop-in"])
    def test_barrier(self, way: str, late: Any) -> None:
        given = dropin if way == "drop-in" else dist

        def given_up() -> None:
            wait = given.barrier
            if way == "async":
                wait = dist.barrier(async_op=True, timeout=SOON).wait
            with pytest.raises(
                mpicoll.Timeout, match=r"^barrier\(\).* within the timeout of 0\.05 s; it is still pending$"
            ):
                wait() if way == "async" else wait(timeout=SOON)

        late(lambda: given.barrier(timeout=PATIENT), given_up)
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == dist.get_world_size()

    @pytest.mark.parametrize("everybody", [False, True])
    @pytest.mark.filterwarnings("ignore")
    def test_monitored_barrier(self, everybody: bool, request: pytest.FixtureRequest) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        if size < 2:
            pytest.skip("needs two ranks")
        store = dist.PrefixStore(request.node.name, _get_default_store())
        if rank == 0:
            with pytest.raises(mpicoll.Timeout) as caught:
                dist.monitored_barrier(timeout=FULL, wait_all_ranks=everybody)
            missing = "Ranks " + ", ".join(map(str, range(1, size))) if everybody else "Rank 1"
            first, *more = str(caught.value).splitlines()
            assert first == (f"monitored_barrier: [Rank 0]: {missing} failed to pass monitoredBarrier in {600} ms"), (
                first
            )
            assert more
            store.set("given up", "")
        else:
            store.wait(["given up"])
            with pytest.raises(mpicoll.Timeout, match=rf"^monitored_barrier: \[Rank {rank}\].*failed to pass"):
                dist.monitored_barrier(timeout=FULL, wait_all_ranks=everybody)
        dist.monitored_barrier(timeout=PATIENT)


# --- groups that end the job

BEGIN = """
import time, torch, torch.distributed as dist
from datetime import timedelta
SETUP
t = torch.ones(3)
dist.all_reduce(t)
if dist.get_rank() == 0:
    time.sleep(60)
OPERATION
time.sleep(60)
"""

INIT = 'dist.init_process_group("mpicoll", timeout=timedelta(seconds=0.7))'
SET = """dist.init_process_group("mpicoll")
dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.7))"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setup", "operation", "words"),
    [
        (INIT, "dist.all_reduce(t)", "all_reduce(float32[3], op=sum) by native number 2"),
        (SET, "dist.all_reduce(t, async_op=True)", "all_reduce(float32[3], op=sum) by native number 2"),
        (INIT, "dist.recv(t, 0)", "irecv(float32[3], peer=0, tag=0)"),
    ],
    ids=["blocking", "nobody waits", "receive"],
)
def test_over_its_timeout_a_group_ends_the_job(tmp_path: Path, setup: str, operation: str, words: str) -> None:
    script = tmp_path / "program.py"
    script.write_text(BEGIN.replace("SETUP", setup).replace("OPERATION", operation))
    # A rank that waits in shared memory raises Timeout itself.
    done = mpirun(2, script, seconds=40, warm=True, MPICOLL_REPORT="off", MPICOLL_SHARED_MEMORY="off")
    assert done.returncode == 1, done.stdout
    assert f"mpicoll: {words}" in done.stdout
    assert "has been waiting for more than 0.7 s" in done.stdout
    assert "runs its own program at program.py:" in done.stdout
