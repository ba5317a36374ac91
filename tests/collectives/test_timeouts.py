"""Waits that are over before another rank has come: who raises what, and that everything is right afterwards."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.launch import mpirun
from support.ranks import Ranks

import mpicoll
from mpicoll.transport import quirks

SOON = 0.05
"""Too short to ask the others."""

FULL = 0.6
"""Long enough for it."""

PATIENT = 25.0


class Case:
    """One collective on float64, in which rank 0 keeps the others waiting."""

    def __init__(self, name: str, **options: Any) -> None:
        self.name = name
        self.options = options

    def __str__(self) -> str:
        return self.name

    def surely_waits(self) -> bool:
        """Whether this rank can't get through without rank 0."""
        world = mpicoll.world()
        return world.rank == self.options["root"] if self.name in ("reduce", "gather") else world.rank != 0

    def out(self) -> Any:
        """Where this rank gets its result."""
        size, rank = mpicoll.world().size, mpicoll.world().rank
        if self.name in ("reduce", "gather") and rank != self.options["root"]:
            return None
        rows = {"reduce_scatter": 2, "scatter": 2, "allgather": 2 * size * size, "gather": 2 * size * size}
        return np.zeros(rows.get(self.name, 2 * size))

    def call(self, out: Any, **more: Any) -> Any:
        world = mpicoll.world()
        size, rank = world.size, world.rank
        x = data(rank, size)
        if self.name == "scatter" and rank:
            x = x[:2]
        return getattr(mpicoll, self.name)(x, out=out, **self.options, **more)

    def expected(self) -> Any:
        """What belongs into `out`."""
        size, rank = mpicoll.world().size, mpicoll.world().rank
        everything = np.array([data(one, size) for one in range(size)])
        mine = slice(2 * rank, 2 * rank + 2)
        return {
            "allreduce": lambda: everything.sum(0),
            "reduce": lambda: everything.sum(0),
            "reduce_scatter": lambda: everything.sum(0)[mine],
            "scan": lambda: everything[: rank + 1].sum(0),
            "exscan": lambda: everything[:rank].sum(0),
            "bcast": lambda: everything[0],
            "scatter": lambda: everything[0][mine],
            "gather": everything.ravel,
            "allgather": everything.ravel,
            "alltoall": everything[:, mine].ravel,
        }[self.name]()


def data(rank: int, size: int) -> Any:
    return np.arange(2.0 * size) ** 2 + 100 * rank


NAMES = (
    "allreduce",
    "reduce",
    "reduce_scatter",
    "scan",
    "exscan",
    "bcast",
    "gather",
    "scatter",
    "allgather",
    "alltoall",
)


def case(name: str) -> Case:
    if name in ("bcast", "scatter"):
        return Case(name, root=0)
    return Case(name, root=mpicoll.world().size - 1) if name in ("reduce", "gather") else Case(name)


def works() -> None:
    """The next collective is right."""
    world = mpicoll.world()
    assert mpicoll.allreduce(np.array([world.rank + 1.0]))[0] == world.size * (world.size + 1) / 2


def give_way(side: mpicoll.Communicator) -> None:
    """Let rank 0 come: this rank has given up."""
    mpicoll.send(np.zeros(1), 0, comm=side)


def come_late(side: mpicoll.Communicator) -> None:
    """On rank 0: return when all others have given up."""
    for _ in range(side.size - 1):
        mpicoll.recv(np.zeros(1), comm=side, timeout=PATIENT)


# --- collectives


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_collective_that_is_given_up_completes_later(name: str, several: Ranks) -> None:
    def main() -> None:
        world, one = mpicoll.world(), case(name)
        side = world.duplicate()
        for _ in range(3):
            # First by the way of a call that was never made, then by that of one that was.
            out, number = one.out(), world._core.queue.number + 1
            if world.rank == 0:
                come_late(side)
                one.call(out)
            else:
                gave_up = False
                begin = time.monotonic()
                try:
                    one.call(out, timeout=SOON)
                except mpicoll.Timeout as error:
                    gave_up = True
                    assert 0.04 < time.monotonic() - begin < 50
                    words = str(error)
                    assert words.startswith(f"{name}(float64[{2 if name == 'scatter' else 2 * world.size}]"), words
                    assert f" number {number} on world ({world.size} ranks), rank {world.rank}: not complete" in words
                    assert words.endswith(" within the timeout of 0.05 s; it is still pending"), words
                assert gave_up or not one.surely_waits()
                give_way(side)
            works()
            if out is not None and (name, world.rank) != ("exscan", 0):
                np.testing.assert_array_equal(out, one.expected())
        side.free()

    several(main)


# Without shared memory `empty` does not wait for the other ranks.
@pytest.mark.parametrize("name", ["barrier", pytest.param("empty", marks=pytest.mark.extension)])
def test_barrier_and_empty(several: Ranks, name: str) -> None:
    def call(**more: Any) -> None:
        mpicoll.barrier(**more) if name == "barrier" else mpicoll.empty(5, **more)

    def main() -> None:
        world = mpicoll.world()
        side = world.duplicate()
        if world.rank == 0:
            come_late(side)
            call()
        else:
            with pytest.raises(mpicoll.Timeout, match=rf"^{name}\(.*number \d+ on world .*within the timeout of 0.05"):
                call(timeout=SOON)
            give_way(side)
        works()
        assert mpicoll.barrier(timeout=PATIENT) is None
        memory = mpicoll.empty((2, 3), "float32", timeout=PATIENT)
        assert (memory.shape, memory.dtype) == ((2, 3), np.dtype("float32"))
        memory[...] = world.rank + 1
        np.testing.assert_array_equal(
            mpicoll.allreduce(memory, timeout=PATIENT), np.full((2, 3), world.size * (world.size + 1) / 2)
        )
        side.free()

    several(main)


@pytest.mark.parametrize("name", NAMES)
def test_in_time(name: str, several: Ranks) -> None:
    """Some ranks with a bound, others without."""

    def main() -> None:
        one = case(name)
        for _ in range(3):
            out = one.out()
            result = one.call(out, timeout=PATIENT) if mpicoll.world().rank % 2 else one.call(out)
            assert result is out or name == "exscan"
            if out is not None and (name, mpicoll.world().rank) != ("exscan", 0):
                np.testing.assert_array_equal(out, one.expected())

    several(main)


@pytest.mark.parametrize("algorithm", ["ring", pytest.param("shm_flat", marks=pytest.mark.extension), "native"])
def test_it_names_the_missing_ranks(algorithm: str, several: Ranks, request: pytest.FixtureRequest) -> None:
    def main() -> None:
        world = mpicoll.world()
        if algorithm == "native" and world._core.transport.native is None:
            return
        side = world.duplicate()
        x = np.ones(6)
        mpicoll.allreduce(x, algorithm=algorithm)
        number = world._core.queue.number + 1
        if world.rank == 0:
            come_late(side)
            mpicoll.allreduce(x, algorithm=algorithm)
        else:
            with pytest.raises(mpicoll.Timeout) as caught:
                mpicoll.allreduce(x, algorithm=algorithm, timeout=FULL)
            words = str(caught.value)
            assert words.startswith(f"allreduce(float64[6], op=sum) by {algorithm} number {number} "), words
            give_way(side)
            if world._core.transport.native is not None:
                assert "waits for rank 0, which has not called it" in words, words
                assert "come_late" in words, words
            elif algorithm == "shm_flat":
                assert "(in shared memory: waits for rank 0)" in words, words
            else:
                assert "of allreduce/ring: " in words, words
                assert f"from rank {world.rank - 1}" in words, words
        works()
        side.free()

    if algorithm == "ring" and several.local:
        # A collective begins with a comparison, on one node in shared memory, whatever its algorithm is.
        request.getfixturevalue("uncompared")
        mpicoll.run_local(main, several.local, ranks_per_node=1)
    else:
        several(main)


def test_what_waits_behind_another(several: Ranks) -> None:
    def main() -> None:
        world = mpicoll.world()
        side = world.duplicate()
        x = np.ones(3)
        first = world._core.queue.number + 1
        if world.rank == 0:
            come_late(side)
            requests = [mpicoll.iallreduce(x * number) for number in (1, 2)]
        else:
            requests = [mpicoll.iallreduce(x * number) for number in (1, 2)]
            with pytest.raises(mpicoll.Timeout, match=rf"^allreduce\(.* number {first} on .*still pending$"):
                requests[0].wait(SOON)
            with pytest.raises(
                mpicoll.Timeout, match=rf" number {first + 1} \(behind allreduce\(.* number {first}\) on"
            ):
                requests[1].wait(SOON)
            with pytest.raises(mpicoll.Timeout, match=rf" number {first} .*not complete within the timeout of 0\.05 s"):
                mpicoll.waitall(requests, SOON)
            give_way(side)
        sums = [value[0] for value in mpicoll.waitall(requests, PATIENT)]
        assert sums == [world.size, 2 * world.size]
        side.free()

    several(main)


WRONG = (0, -1.0, float("nan"), "1", timedelta(seconds=1))


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_wrong_timeouts(wrong: Any, some: Ranks) -> None:
    def main() -> None:
        world = mpicoll.world()
        x = np.ones(world.size)
        calls = [lambda name=name: case(name).call(case(name).out(), timeout=wrong) for name in NAMES]
        calls += [
            lambda: mpicoll.barrier(timeout=wrong),
            lambda: mpicoll.empty(3, timeout=wrong),
            lambda: mpicoll.send(x, 0, timeout=wrong),
            lambda: mpicoll.recv(x, 0, timeout=wrong),
            lambda: mpicoll.sendrecv(x, 0, timeout=wrong),
            lambda: mpicoll.probe(0, timeout=wrong),
        ]
        for call in calls:
            with pytest.raises(mpicoll.ArgumentError) as caught:
                call()
            assert "timeout must be a positive number of seconds or None, got" in str(caught.value)
            assert f"(rank {world.rank} of {world.size})" in str(caught.value)
        with pytest.raises(mpicoll.ArgumentError):
            world.timeout = wrong if isinstance(wrong, (int, float)) else -1
        works()
        assert mpicoll.iprobe() is None

    some(main)


# --- messages


def test_a_receive_that_is_given_up_swallows_nothing(several: Ranks) -> None:
    def main() -> None:
        world = mpicoll.world()
        side = world.duplicate()
        for nbytes in (16, 1 << 20):
            x = np.arange(nbytes // 8) + 10.0 * world.rank
            if world.rank == 0:
                come_late(side)
                for other in range(1, world.size):
                    mpicoll.send(x, other, 5)
            else:
                out = np.zeros(nbytes // 8)
                words = (
                    rf"^irecv\(float64\[{nbytes // 8}\], peer=0, tag=5\) on world .*, rank {world.rank}: not complete"
                )
                with pytest.raises(mpicoll.Timeout, match=words):
                    mpicoll.recv(x, 0, 5, out=out, timeout=SOON)
                give_way(side)
                status = mpicoll.Status()
                np.testing.assert_array_equal(
                    mpicoll.recv(x, 0, status=status, timeout=PATIENT), np.arange(nbytes // 8)
                )
                assert (status.source, status.tag, status.nbytes) == (0, 5, nbytes)
                assert not out.any()
        mpicoll.barrier()
        assert mpicoll.iprobe() is None
        side.free()

    several(main)


def test_sendrecv_and_probe(several: Ranks) -> None:
    def main() -> None:
        world = mpicoll.world()
        side = world.duplicate()
        x = np.full(3, world.rank + 1.0)
        if world.rank == 0:
            come_late(side)
            for other in range(1, world.size):
                mpicoll.send(x, other, 7)
                # What they have sent is still on its way.
                assert mpicoll.recv(x, other, 7, timeout=PATIENT)[0] == other + 1
        else:
            with pytest.raises(
                mpicoll.Timeout, match=r"^probe\(peer=0, tag=7\) on world .* within the timeout of 0\.05 s$"
            ):
                mpicoll.probe(0, 7, timeout=SOON)
            with pytest.raises(
                mpicoll.Timeout, match=r"irecv\(float64\[3\], peer=0, tag=7\).*within the timeout of 0\.05 s"
            ):
                mpicoll.sendrecv(x, 0, 0, 7, 7, timeout=SOON)
            give_way(side)
            assert mpicoll.probe(0, 7, timeout=PATIENT).nbytes == 24
            assert mpicoll.recv(x, 0, 7, timeout=PATIENT)[0] == 1.0
        right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
        assert mpicoll.sendrecv(x, right, left, timeout=PATIENT)[0] == left + 1
        mpicoll.barrier()
        assert mpicoll.iprobe() is None
        side.free()

    several(main)


def buffers_sends() -> bool:
    """Return True if a send may complete without a receive, whatever its size."""
    from mpi4py import MPI

    return quirks.BUFFERED_SENDS.applies_to(MPI.Get_library_version())


def test_a_send_that_no_rank_receives_in_time(several: Ranks) -> None:
    """A large one, which waits for its receiver; where it doesn't, it is received all the same."""

    def main() -> None:
        world = mpicoll.world()
        side = world.duplicate()
        x = np.full(1 << 20, world.rank + 1.0)
        if world.rank == 0:
            come_late(side)
            for other in range(1, world.size):
                assert (mpicoll.recv(x, other, timeout=PATIENT) == other + 1).all()
        else:
            if world._core.transport.native is None:
                mpicoll.send(x, 0, timeout=SOON)  # copied into the mailbox
            elif buffers_sends():
                with suppress(mpicoll.Timeout):
                    mpicoll.send(x, 0, timeout=SOON)
            else:
                with pytest.raises(mpicoll.Timeout, match=r"^isend\(float64\[1048576\], peer=0, tag=0\) on world"):
                    mpicoll.send(x, 0, timeout=SOON)
            give_way(side)
        mpicoll.barrier()
        works()
        side.free()

    several(main)


def test_a_receive_says_where_the_sender_is(several: Ranks) -> None:
    def main() -> None:
        world = mpicoll.world()
        side = world.duplicate()
        if world.rank == 0:
            come_late(side)
        else:
            with pytest.raises(mpicoll.Timeout) as caught:
                mpicoll.recv(np.zeros(2), 0, timeout=FULL)
            give_way(side)
            if world._core.transport.native is not None:
                assert "come_late" in str(caught.value), str(caught.value)
        works()
        side.free()

    several(main)


# --- the bound of a communicator


@pytest.mark.parametrize(
    ("algorithm", "ranks_per_node", "words"),
    [
        ("ring", 1, "nothing within 0.1 s"),
        *(
            pytest.param(one, 2, "rank 1 did not arrive within 0.1 s", marks=pytest.mark.extension)
            for one in ("ring", "shm_flat")
        ),
    ],
)
def test_a_communicator_bounds_its_waits(algorithm: str, ranks_per_node: int, words: str) -> None:
    """On threads a wait can always be left. Rank 1 does not come."""

    def main() -> None:
        world = mpicoll.world()
        assert world.timeout == 60
        comm = world.duplicate()
        assert comm.timeout == world.timeout
        comm.timeout = 70
        part = comm.split(0)
        assert part is not None
        assert part.timeout == 70
        mpicoll.allreduce(np.ones(3), comm=part, algorithm=algorithm)
        comm.timeout = part.timeout = 0.1
        if world.rank == 0:
            begin = time.monotonic()
            with pytest.raises(mpicoll.Timeout) as caught:
                mpicoll.allreduce(np.ones(3), comm=part, algorithm=algorithm)
            assert 0.1 <= time.monotonic() - begin < 50
            text = str(caught.value)
            assert text.startswith(f"allreduce(float64[3], op=sum) by {algorithm} number 2 on world/duplicate/split(0)")
            assert words in text
            with pytest.raises(
                mpicoll.Timeout, match=r"irecv\(.*\) on world/duplicate .* within the timeout of 0\.1 s"
            ):
                mpicoll.irecv(np.ones(3), 1, comm=comm).wait()
            with pytest.raises(
                mpicoll.Timeout, match=r"waitany on 2 requests: not complete within the timeout of 0\.1 s"
            ):
                mpicoll.waitany([mpicoll.irecv(np.ones(3), 1, tag, comm=comm) for tag in (1, 2)])
            with pytest.raises(mpicoll.Timeout, match=r"^split\(\) .*rank 1\b"):
                comm.split(0)
        works()

    mpicoll.run_local(main, 2, ranks_per_node=ranks_per_node, timeout=60)


@pytest.mark.extension
def test_a_rank_too_late_for_shared_memory_gets_an_error() -> None:
    def main() -> None:
        world = mpicoll.world()
        comm = world.duplicate()
        mpicoll.allreduce(np.ones(3), comm=comm, algorithm="shm_flat")
        comm.timeout = 0.1
        if world.rank == 0:
            with pytest.raises(mpicoll.Timeout):
                mpicoll.allreduce(np.ones(3), comm=comm, algorithm="shm_flat")
            mpicoll.send(np.ones(1), 1)
        else:
            mpicoll.recv(np.ones(1), 0)
            with pytest.raises(mpicoll.CommunicationError, match="rank 0"):
                mpicoll.allreduce(np.ones(3), comm=comm, algorithm="shm_flat")
        with pytest.raises(mpicoll.CommunicationError, match="create another communicator"):
            mpicoll.allreduce(np.ones(3), comm=comm, algorithm="shm_flat")
        works()

    mpicoll.run_local(main, 2, timeout=20)


IN_SHARED_MEMORY = """
import time
import numpy as np
import mpicoll
world = mpicoll.world()
comm = world.duplicate()
x = np.ones(3)
mpicoll.allreduce(x, comm=comm, algorithm="shm_flat")
comm.timeout = 0.6
late = world.rank == world.size - 1
if late:
    mpicoll.recv(x, 0, timeout=20)
try:
    mpicoll.allreduce(x, comm=comm, algorithm="shm_flat")
except mpicoll.Timeout as error:
    assert not late
    words = str(error)
    assert words.startswith(f"allreduce(float64[3], op=sum) by shm_flat number 2 on world/duplicate"), words
    assert f"in shared memory, rank {world.size - 1} did not arrive within 0.6 s" in words, words
    assert f"waits for rank {world.size - 1}, which has not called it" in words, words
except mpicoll.CommunicationError as error:
    assert late
    assert "has abandoned this operation" in str(error), error
if world.rank == 1:
    mpicoll.send(x, 0)
if world.rank == 0:
    mpicoll.recv(x, 1, timeout=20)  # or the last one would come while rank 1 is still waiting
    mpicoll.send(x, world.size - 1)
try:
    mpicoll.allreduce(x, comm=comm, algorithm="shm_flat")
except mpicoll.CommunicationError as error:
    assert "create another communicator" in str(error)
again = world.duplicate()
assert mpicoll.allreduce(x, comm=again, algorithm="shm_flat")[0] == world.size
print("went on")
"""

NATIVE = """
import time
import numpy as np
import mpicoll
world = mpicoll.world()
comm = world.split(0)
comm.timeout = 0.6
if world.rank == 0:
    time.sleep(60)
OPERATION
"""


def run(tmp_path: Path, size: int, program: str) -> tuple[int, str]:
    script = tmp_path / "program.py"
    script.write_text(program)
    done = mpirun(size, script, seconds=40, MPICOLL_REPORT="off")
    return done.returncode, done.stdout


@pytest.mark.slow
@pytest.mark.extension
def test_who_waits_in_shared_memory_for_too_long_can_go_on(tmp_path: Path) -> None:
    status, output = run(tmp_path, 3, IN_SHARED_MEMORY)
    assert status == 0, output
    assert output.count("went on") == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "operation",
    ["mpicoll.allreduce(np.ones(3), comm=comm)", "mpicoll.iallreduce(np.ones(3), comm=comm); time.sleep(60)"],
    ids=["blocking", "in the background"],
)
def test_who_waits_inside_mpi_for_too_long_has_the_job_ended(tmp_path: Path, operation: str) -> None:
    status, output = run(tmp_path, 2, NATIVE.replace("OPERATION", operation))
    assert status == 1, output
    assert "has been waiting for more than 0.6 s" in output
    assert "waits for rank 0, which has not called it: it runs its own program at program.py:9" in output
