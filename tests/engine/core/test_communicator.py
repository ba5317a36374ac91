"""Communicators: who is in them, how long they live, and that they are apart from each other."""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any
from weakref import ref

import numpy as np
import pytest
from support.descriptors import count_descriptors
from support.ranks import Ranks

import mpicoll
from mpicoll.engine.world import as_communicator, resolve

Job = Callable[..., "CompletedProcess[str]"]


def members(comm: mpicoll.Communicator) -> list[int]:
    """Which ranks of the world are in `comm`, in its order, told by messages through it."""
    return mpicoll.allgather(np.array([mpicoll.world().rank]), comm=comm).tolist()


# --- the world


def test_world(ranks: Ranks) -> None:
    def main() -> None:
        world = mpicoll.world()
        assert world.size == ranks.size
        assert members(world) == list(range(ranks.size))
        assert mpicoll.world() is world

    ranks(main)


def test_world_can_not_be_freed(ranks: Ranks) -> None:
    def main() -> None:
        with pytest.raises(mpicoll.CommunicatorError, match=r"world.*can't be freed"):
            mpicoll.world().free()
        assert members(mpicoll.world()) == list(range(ranks.size))

    ranks(main)


@pytest.mark.parametrize("per_node", [1, 2, 3, 9])
def test_nodes(per_node: int) -> None:
    def main() -> None:
        world = mpicoll.world()
        node = world.rank // per_node
        assert world.nodes == tuple(rank // per_node for rank in range(5))
        assert world.node == node
        assert world.num_nodes == -(-5 // per_node)
        assert world.local_rank == world.rank % per_node
        assert world.local_size == min(per_node, 5 - node * per_node)
        with world.node_comm() as local:
            assert (local.rank, local.size) == (world.local_rank, world.local_size)
            assert members(local) == [rank for rank in range(5) if rank // per_node == node]
            assert (local.nodes, local.num_nodes) == ((0,) * local.size, 1)

    mpicoll.run_local(main, 5, ranks_per_node=per_node)


def test_nodes_are_numbered_anew_in_a_part() -> None:
    def main() -> None:
        world = mpicoll.world()
        reverse = world.split(0, key=-world.rank)
        assert reverse is not None
        assert reverse.nodes == (0, 1, 1, 2, 2)
        outer = world.group([4, 0])
        if world.rank in (0, 4):
            assert outer is not None
            assert outer.nodes == (0, 1)
            assert (outer.local_rank, outer.local_size) == (0, 1)

    mpicoll.run_local(main, 5, ranks_per_node=2)


@pytest.mark.mpi
def test_one_node_under_mpirun() -> None:
    world = mpicoll.world()
    assert world.nodes == (0,) * world.size
    assert (world.node, world.num_nodes, world.local_rank, world.local_size) == (0, 1, world.rank, world.size)
    with world.node_comm() as local:
        assert members(local) == list(range(world.size))


def test_repr(ranks: Ranks) -> None:
    def main() -> None:
        world = mpicoll.world()
        assert repr(world) == f"<mpicoll.Communicator world: rank {world.rank} of {world.size}>"
        part = world.split(7)
        assert part is not None
        assert repr(part) == f"<mpicoll.Communicator world/split(7): rank {world.rank} of {world.size}>"
        part.free()
        assert repr(part).endswith(", freed>")

    ranks(main)


# --- split


def test_split_by_color(ranks: Ranks) -> None:
    def main() -> None:
        world = mpicoll.world()
        with world.split(world.rank % 2) as part:
            assert members(part) == list(range(world.rank % 2, world.size, 2))
            assert part.rank == world.rank // 2

    ranks(main)


def test_split_orders_by_key(ranks: Ranks) -> None:
    def main() -> None:
        world = mpicoll.world()
        with world.split(0, key=-world.rank) as reverse:
            assert members(reverse) == list(range(world.size))[::-1]
            assert reverse.rank == world.size - 1 - world.rank
        with world.split(0, key=world.rank % 2) as even_first:
            assert members(even_first) == sorted(range(world.size), key=lambda rank: rank % 2)

    ranks(main)


def test_split_without_a_color(ranks: Ranks) -> None:
    def main() -> None:
        world = mpicoll.world()
        part = world.split(None if world.rank == world.size - 1 else 3)
        if world.rank == world.size - 1:
            assert part is None
        else:
            assert part is not None
            assert members(part) == list(range(world.size - 1))
            part.free()
        assert world.split(None) is None

    ranks(main)


def test_split_of_a_split(ranks: Ranks) -> None:
    def main() -> None:
        world = mpicoll.world()
        with world.split(world.rank % 2, key=-world.rank) as half, half.split(half.rank % 2) as quarter:
            expected = list(range(world.rank % 2, world.size, 2))[::-1][half.rank % 2 :: 2]
            assert members(quarter) == expected
            assert quarter.name == f"world/split({world.rank % 2})/split({half.rank % 2})"

    ranks(main)


def test_duplicates_of_both_halves(several: Ranks) -> None:
    """The groups of one split are duplicated at the same time, and don't meet each other."""

    def body() -> None:
        world = mpicoll.world()
        for _ in range(20):
            with world.split(world.rank % 2) as half, half.duplicate() as other:
                found = mpicoll.allgather(world.rank, comm=other)
                assert found.tolist() == list(range(world.rank % 2, world.size, 2))

    several(body)


def test_duplicate(ranks: Ranks) -> None:
    """It has the same ranks, and takes no turn among the collectives of the other."""

    def body() -> None:
        world = mpicoll.world()
        pending = mpicoll.iallreduce(np.full(3, world.rank))
        with world.duplicate() as other:
            assert (other.rank, other.size) == (world.rank, world.size)
            assert mpicoll.allreduce(1, comm=other) == world.size
        assert pending.wait(20).tolist() == [sum(range(world.size))] * 3

    ranks(body)


@pytest.mark.parametrize("color", [-2, 1 << 31, 1.0, "a"])
def test_invalid_color(ranks: Ranks, color: Any) -> None:
    def main() -> None:
        world = mpicoll.world()
        words = re.escape(f"split: color must be an integer in [0, 2**31) or None, got {color!r} on rank {world.rank}")
        with pytest.raises(mpicoll.RankError, match=words):
            world.split(color)
        assert members(world) == list(range(world.size))

    ranks(main)


def test_range_of_colors_and_keys(ranks: Ranks) -> None:
    def main() -> None:
        world = mpicoll.world()
        with world.split((1 << 31) - 1 - world.rank % 2, key=-(1 << 31)) as part:
            assert members(part) == list(range(world.rank % 2, world.size, 2))
        with world.split(np.bool_(world.rank > 0), key=np.int16(-world.rank)) as part:  # type: ignore[arg-type]
            assert members(part) == (list(range(world.size))[:0:-1] if world.rank else [0])
        for key in (1 << 31, 1.5, None):
            with pytest.raises(mpicoll.RankError, match=r"split: key must be an integer in \[-2147483648, 2\*\*31\)"):
                world.split(0, key=key)  # type: ignore[arg-type]

    ranks(main)


# --- group


def test_groups_of_every_kind(several: Ranks) -> None:
    def main() -> None:
        world = mpicoll.world()
        everyone = list(range(world.size))
        for chosen in ([0], [world.size - 1], everyone, everyone[::-1], [*everyone[1:], 0], everyone[::2]):
            group = world.group(chosen)
            assert (group is None) == (world.rank not in chosen)
            if group is not None:
                assert members(group) == chosen
                assert group.rank == chosen.index(world.rank)
                group.free()

    several(main)


def test_group_takes_arrays_of_ranks(ranks: Ranks) -> None:
    def main() -> None:
        with mpicoll.world().group(np.arange(ranks.size)) as group:
            assert members(group) == list(range(ranks.size))

    ranks(main)


def test_others_take_no_part_in_a_group(several: Ranks) -> None:
    """Rank 0 alone makes the group, while the others wait for the message that it sends afterwards."""

    def main() -> None:
        world = mpicoll.world()
        if world.rank:
            assert mpicoll.recv(np.zeros(1), 0).tolist() == [1.0]
            assert world.group([0]) is None
        else:
            group = world.group([0])
            assert group is not None
            total = mpicoll.allreduce(np.ones(1), comm=group)
            for peer in range(1, world.size):
                mpicoll.send(total, peer)
            group.free()
        mpicoll.barrier()

    several(main)


def test_two_groups_at_once(several: Ranks) -> None:
    def main() -> None:
        world = mpicoll.world()
        chosen = [rank for rank in range(world.size) if rank % 2 == world.rank % 2]
        for _ in range(10):
            with world.group(chosen) as first, world.group(chosen[::-1]) as second:
                assert members(first) == chosen
                assert members(second) == chosen[::-1]

    several(main)


@pytest.mark.parametrize("chosen", [[], [0, 0], [-1], [99], [0, 99]], ids=str)
def test_group_of_wrong_ranks(ranks: Ranks, chosen: list[int]) -> None:
    def main() -> None:
        world = mpicoll.world()
        with pytest.raises(mpicoll.RankError) as caught:
            world.group(chosen)
        assert str(caught.value) == (
            f"group: ranks must be distinct, at least one, and in [0, {world.size}), got {chosen} on rank {world.rank}"
        )

    ranks(main)


@pytest.mark.mpi
def test_handles_of_groups_and_splits_are_given_back() -> None:
    """MPI numbers its communicators, and takes the numbers of freed ones again."""
    world = mpicoll.world()
    numbers = set()
    for turn in range(200):
        part = world.group(range(world.size)) if turn % 2 else world.split(0)
        assert part is not None
        numbers |= {part._core.transport.mpi.py2f(), part._core.transport._collective.py2f()}
        if turn % 20 == 0:
            assert members(part) == list(range(world.size))
        part.free()
    assert len(numbers) < 20


# --- lifetime

CALLS: dict[str, Callable[[mpicoll.Communicator], Any]] = {
    **{
        name: lambda comm, name=name: getattr(mpicoll, name)(*([] if "barrier" in name else [np.ones(12)]), comm=comm)
        for collective in mpicoll.schedules.collectives()
        for name in (collective, f"i{collective}", f"{collective}_init")
    },
    "send": lambda comm: mpicoll.send(np.ones(1), 0, comm=comm),
    "recv": lambda comm: mpicoll.recv(np.ones(1), comm=comm),
    "sendrecv": lambda comm: mpicoll.sendrecv(np.ones(1), 0, comm=comm),
    "isend": lambda comm: mpicoll.isend(np.ones(1), 0, comm=comm),
    "irecv": lambda comm: mpicoll.irecv(np.ones(1), comm=comm),
    "probe": lambda comm: mpicoll.probe(comm=comm),
    "iprobe": lambda comm: mpicoll.iprobe(comm=comm),
    "explain": lambda comm: mpicoll.explain("bcast", 8, comm=comm),
    "split": lambda comm: comm.split(0),
    "group": lambda comm: comm.group([0]),
    "node_comm": lambda comm: comm.node_comm(),
    "mpi": lambda comm: comm.mpi,
    "with": lambda comm: comm.__enter__(),
    "check": lambda comm: comm._core.check(),
}


def test_a_freed_communicator_refuses_everything(ranks: Ranks) -> None:
    def main() -> None:
        part = mpicoll.world().split(5)
        assert part is not None
        plan = mpicoll.allreduce_init(np.ones(3), comm=part)
        mpicoll.allreduce(np.ones(3), comm=part)  # leaves a prepared operation
        part.free()
        calls = {
            **CALLS,
            "plan": lambda comm: plan(),
            "plan.start": lambda comm: plan.start(),
            "again": lambda comm: mpicoll.allreduce(np.ones(3), comm=comm),
        }
        for name, call in calls.items():
            with pytest.raises(mpicoll.CommunicatorError) as caught:
                call(part)
            where = f"rank {part.rank} of {part.size}"
            assert str(caught.value) == (
                f"<mpicoll.Communicator world/split(5): {where}, freed> can't be used any more: it was freed"
            ), name
        assert members(mpicoll.world()) == list(range(ranks.size))

    ranks(main)


def test_free_twice(ranks: Ranks) -> None:
    def main() -> None:
        with mpicoll.world().split(0) as part:
            part.free()
        part.free()

    ranks(main)


def test_free_completes_what_is_pending(ranks: Ranks) -> None:
    def main() -> None:
        part = mpicoll.world().split(0)
        assert part is not None
        pending = [mpicoll.iallreduce(np.full(4, i), comm=part) for i in range(20)]
        part.free()
        assert all(one.test() for one in pending)
        assert [one.wait()[0] for one in pending] == [i * ranks.size for i in range(20)]

    ranks(main)


def test_with_frees(ranks: Ranks) -> None:
    def main() -> None:
        with mpicoll.world().split(0) as part:
            part._core.check()
        with pytest.raises(mpicoll.CommunicatorError, match="freed"):
            part._core.check()

    ranks(main)


def test_with_does_not_free_after_an_exception(ranks: Ranks) -> None:
    """Freeing is collective, and the exception may be this rank's alone."""

    def main() -> None:
        part = mpicoll.world().split(0)
        assert part is not None
        with pytest.raises(ZeroDivisionError), part:
            raise ZeroDivisionError
        assert members(part) == list(range(ranks.size))
        part.free()

    ranks(main)


@pytest.mark.slow
def test_an_exception_on_one_rank_inside_with_does_not_hang(job: Job) -> None:
    done = job(
        3,
        """
world = mpicoll.world()
with world.split(0) as part:
    mpicoll.barrier(comm=part)
    if world.rank == 1:
        raise ZeroDivisionError("of rank 1")
    mpicoll.barrier(comm=part)
""",
    )
    assert done.returncode not in (0, 124), done.stdout
    assert "ZeroDivisionError: of rank 1" in done.stdout


# --- apart from each other


def test_messages_stay_in_their_communicator(several: Ranks) -> None:
    """Equal ranks, equal tags; sent in the opposite order of that in which they are awaited."""

    def main() -> None:
        world = mpicoll.world()
        with world.split(0) as first, world.split(0) as second, world.group(range(world.size)) as third:
            comms = [first, second, third, world]
            left, right = (world.rank - 1) % world.size, (world.rank + 1) % world.size
            awaited = [mpicoll.irecv(np.zeros(1, int), comm=comm) for comm in comms]
            sent = [
                mpicoll.isend(np.array([10 * number + world.rank]), right, comm=comms[number])
                for number in (3, 1, 2, 0)
            ]
            assert [one.wait()[0] for one in awaited] == [10 * number + left for number in range(4)]
            mpicoll.waitall(sent)

    several(main)


def test_collectives_on_two_communicators_in_different_order(several: Ranks) -> None:
    def main() -> None:
        world = mpicoll.world()
        with world.split(0) as first, world.split(0, key=-world.rank) as second:
            for turn in range(20):
                order = [(first, 1), (second, 100)] if (world.rank + turn) % 2 else [(second, 100), (first, 1)]
                pending = [mpicoll.iallreduce(np.full(1000, factor * world.rank), comm=comm) for comm, factor in order]
                values = [one.wait()[0] for one in pending]
                total = sum(range(world.size))
                assert values == [total * factor for _, factor in order]

    several(main)


def test_a_blocking_call_beside_a_pending_one_on_another_communicator(several: Ranks) -> None:
    def main() -> None:
        world = mpicoll.world()
        with world.split(0) as part:
            if world.rank == 0:
                pending = mpicoll.iallreduce(np.ones(5), comm=part)
                assert mpicoll.bcast(np.arange(3)).tolist() == [0, 1, 2]
            else:
                assert mpicoll.bcast(np.zeros(3, int)).tolist() == [0, 1, 2]
                pending = mpicoll.iallreduce(np.ones(5), comm=part)
            assert pending.wait()[0] == world.size

    several(main)


# --- MPI's own communicators


def test_no_mpi_object_without_mpi() -> None:
    assert mpicoll.run_local(lambda: mpicoll.world().mpi, 2) == [None, None]


def every_collective(comm: mpicoll.Communicator | None) -> None:
    """One call of each algorithm of each collective."""
    world = mpicoll.world()
    rows = np.arange(12.0 * world.size)
    for collective in mpicoll.schedules.collectives():
        for algorithm in ("native", *mpicoll.schedules.algorithms_of(collective)):
            block = collective == "scatter" and world.rank > 0
            arrays = [] if collective == "barrier" else [rows[:12] if block else rows]
            getattr(mpicoll, collective)(*arrays, comm=comm, algorithm=algorithm)


@pytest.mark.mpi
def test_a_callers_receive_of_anything_sees_no_message_of_ours() -> None:
    """Of collectives on the communicator's own ``mpi`` either, on which only messages from rank to rank travel."""
    from mpi4py import MPI

    world = mpicoll.world()
    left, right = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    with world.split(0) as part:
        theirs = [MPI.COMM_WORLD, world.mpi, part.mpi]
        buffers = [np.zeros(1, np.int64) for _ in theirs]
        requests = [
            comm.Irecv(buffer, MPI.ANY_SOURCE, MPI.ANY_TAG) for comm, buffer in zip(theirs, buffers, strict=True)
        ]
        for comm in (None, part):
            every_collective(comm)
            mpicoll.iallreduce(np.ones(8), comm=comm).wait()
        assert not any(request.Test() for request in requests)
        mpicoll.barrier()
        for number, comm in enumerate(theirs):
            comm.Send(np.array([10 * number + world.rank]), right, tag=number)
        statuses = [MPI.Status() for _ in theirs]
        for request, status in zip(requests, statuses, strict=True):
            request.Wait(status)
        assert [buffer[0] for buffer in buffers] == [10 * number + left for number in range(3)]
        assert [status.Get_source() for status in statuses] == [left] * 3
        assert [status.Get_tag() for status in statuses] == [0, 1, 2]


@pytest.mark.mpi
def test_messages_from_rank_to_rank_are_apart_from_comm_world() -> None:
    from mpi4py import MPI

    world = mpicoll.world()
    right = (world.rank + 1) % world.size
    ours = mpicoll.irecv(np.zeros(1))
    theirs = np.zeros(1)
    receive = MPI.COMM_WORLD.Irecv(theirs, MPI.ANY_SOURCE, MPI.ANY_TAG)
    MPI.COMM_WORLD.Send(np.full(1, -1.0), right)
    mpicoll.isend(np.full(1, 5.0), right).wait(20)
    assert ours.wait(20)[0] == 5.0
    receive.Wait()
    assert theirs[0] == -1.0


@pytest.mark.mpi
def test_mpi_object_has_the_same_ranks() -> None:
    world = mpicoll.world()
    with world.split(0, key=-world.rank) as reverse:
        assert (reverse.mpi.rank, reverse.mpi.size) == (reverse.rank, reverse.size)
        assert reverse.mpi.allgather(world.rank) == members(reverse)


@pytest.mark.mpi
def test_mpi4py_communicators_are_duplicated_once() -> None:
    from mpi4py import MPI

    theirs = MPI.COMM_WORLD.Split(0, -MPI.COMM_WORLD.rank)
    ours = as_communicator(theirs)
    assert as_communicator(theirs) is ours
    assert (ours.rank, ours.size) == (theirs.rank, theirs.size)
    assert members(ours) == list(range(theirs.size))[::-1]
    assert mpicoll.allreduce(np.ones(2), comm=theirs)[0] == theirs.size
    again = MPI.Comm.f2py(theirs.py2f())
    assert as_communicator(again) is ours, "another object, the same communicator"
    theirs.Free()
    with pytest.raises(mpicoll.CommunicatorError, match=r"mpi4py.*freed"):
        mpicoll.barrier(comm=ours)


@pytest.mark.mpi
def test_an_mpi4py_duplicate_is_another_communicator() -> None:
    """MPI may copy what is attached to a communicator to its duplicates; ours must not be."""
    from mpi4py import MPI

    ours = as_communicator(MPI.COMM_WORLD)
    duplicate = MPI.COMM_WORLD.Dup()
    other = as_communicator(duplicate)
    assert other is not ours
    duplicate.Free()
    assert members(ours) == list(range(ours.size))


@pytest.mark.mpi
def test_handles_are_freed_with_an_mpi4py_communicator() -> None:
    from mpi4py import MPI

    numbers = set()
    for _ in range(50):
        theirs = MPI.COMM_WORLD.Dup()
        numbers |= {resolve(theirs).transport.mpi.py2f(), theirs.py2f()}
        theirs.Free()
    assert len(numbers) < 20


@pytest.mark.mpi
def test_comm_self() -> None:
    from mpi4py import MPI

    rank = mpicoll.world().rank
    assert mpicoll.allreduce(np.full(2, rank), comm=MPI.COMM_SELF).tolist() == [rank, rank]
    assert mpicoll.allreduce(np.full(2, rank), comm=MPI.COMM_SELF, algorithm="ring").tolist() == [rank, rank]
    assert mpicoll.sendrecv(np.array([rank]), 0, 0, comm=MPI.COMM_SELF).tolist() == [rank]


@pytest.mark.mpi
def test_comm_null() -> None:
    from mpi4py import MPI

    with pytest.raises(mpicoll.CommunicatorError, match="COMM_NULL"):
        mpicoll.barrier(comm=MPI.COMM_NULL)


@pytest.mark.mpi
def test_intercommunicator() -> None:
    from mpi4py import MPI

    if MPI.COMM_WORLD.size < 2:
        pytest.skip("an intercommunicator needs two ranks")
    side = int(MPI.COMM_WORLD.rank > 0)
    half = MPI.COMM_WORLD.Split(side)
    both = half.Create_intercomm(0, MPI.COMM_WORLD, 1 - side)
    with pytest.raises(mpicoll.CommunicatorError, match=r"intercommunicator; merge it first"):
        mpicoll.barrier(comm=both)
    merged = both.Merge(bool(side))
    assert mpicoll.allreduce(np.ones(1), comm=merged)[0] == MPI.COMM_WORLD.size
    for comm in (merged, both, half):
        comm.Free()


@pytest.mark.parametrize("wrong", [0, "world", [0], object()], ids=["int", "str", "list", "object"])
def test_no_communicator_at_all(wrong: object) -> None:
    with pytest.raises(mpicoll.CommunicatorError, match=rf"comm must be .* got {type(wrong).__name__}$"):
        mpicoll.barrier(comm=wrong)


@pytest.mark.slow
def test_first_use_of_an_mpi4py_communicator_needs_its_members_only(job: Job) -> None:
    done = job(
        3,
        """
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 0:
    assert mpicoll.allreduce(np.ones(2), comm=MPI.COMM_SELF).tolist() == [1, 1]
part = MPI.COMM_WORLD.Split(0 if MPI.COMM_WORLD.rank else MPI.UNDEFINED)
if part != MPI.COMM_NULL:
    assert mpicoll.allreduce(np.ones(2), comm=part, algorithm="ring").tolist() == [2, 2]
    MPI.COMM_WORLD.send(None, 0) if MPI.COMM_WORLD.rank == 1 else None
else:
    MPI.COMM_WORLD.recv()
mpicoll.barrier()
print("done", flush=True)
""",
        seconds=40,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.split() == ["done"] * 3


def test_dropped_communicators_release_their_memory(ranks: Ranks) -> None:
    """MPI keeps its own, since MPI_Comm_free is collective."""

    def main() -> None:
        world, x = mpicoll.world(), np.ones(1000)

        def use_and_drop() -> ref[Any]:
            comm = world.duplicate()
            for _ in range(4):  # prepared operations are kept from the third on
                mpicoll.allreduce(x, comm=comm)
            plan = mpicoll.allreduce_init(x, comm=comm)
            assert plan()[0] == world.size
            assert mpicoll.iallreduce(x, comm=comm).wait()[0] == world.size
            return ref(comm._core)

        use_and_drop()
        gc.collect()
        mapped, opened = count_mappings(), count_descriptors("mpicoll")
        dropped = [use_and_drop() for _ in range(5)]
        gc.collect()
        assert [one() for one in dropped] == [None] * 5
        assert (count_mappings(), count_descriptors("mpicoll")) == (mapped, opened)

    ranks(main)


def count_mappings() -> int:
    """Count the mappings of shared memory of mpicoll."""
    return len(re.findall(r"/memfd:mpicoll|/dev/shm/mpicoll", Path("/proc/self/maps").read_text()))


@pytest.mark.slow
@pytest.mark.long
def test_others_do_not_wait_for_a_rank_that_has_dropped_the_communicator(job: Job) -> None:
    done = job(
        3,
        """
import gc
world = mpicoll.world()
comm = world.duplicate()
for _ in range(4):
    mpicoll.allreduce(np.ones(4), comm=comm)
if world.rank == 1:
    del comm
    gc.collect()
else:
    try:
        mpicoll.allreduce(np.ones(4), comm=comm)
    except mpicoll.CommunicationError as error:
        assert "rank 1" in str(error), error
        print("an error")
mpicoll.barrier()
""",
        MPICOLL_STUCK_AFTER="1",
    )
    assert (done.returncode, done.stdout.split()) == (0, ["an", "error"] * 2), done.stdout


@pytest.mark.slow
def test_communicators_that_are_still_there_at_the_end(job: Job) -> None:
    done = job(
        2,
        """
from mpi4py import MPI
world = mpicoll.world()
kept = world.split(0), world.group([0]), MPI.COMM_WORLD.Dup()
for comm in (kept[0], MPI.COMM_WORLD, MPI.COMM_SELF, kept[2]):
    mpicoll.iallreduce(np.ones(2), comm=comm).wait()
    mpicoll.allreduce(np.ones(2), comm=comm)
""",
    )
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.slow
def test_without_threads_in_mpi(job: Job) -> None:
    """Then there is no background: testing is what makes progress."""
    done = job(
        2,
        """
import mpi4py
mpi4py.rc.thread_level = "serialized"
world = mpicoll.world()
assert not world._core.transport.background
pending = [mpicoll.iallreduce(np.full(3, i)) for i in range(5)]
while not pending[3].test():
    pass
assert [one.test() for one in pending[:4]] == [True] * 4
assert mpicoll.allreduce(np.ones(1)).tolist() == [2.0]  # runs the last one before itself
assert [one.wait(5)[0] for one in pending] == [0, 2, 4, 6, 8]
mpicoll.iallreduce(np.ones(3))  # completes at the exit
""",
    )
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("algorithm", ["ring", "shm_flat"])
@pytest.mark.extension
def test_a_communicator_that_was_given_up_can_be_freed(algorithm: str) -> None:
    given_up, tried = threading.Event(), threading.Event()

    def main() -> None:
        comm = mpicoll.world().duplicate()
        mpicoll.allreduce(np.ones(2), comm=comm, algorithm=algorithm)
        if comm.rank == 0:
            comm.timeout = 0.1
            with pytest.raises(mpicoll.Timeout):
                mpicoll.allreduce(np.ones(2), comm=comm, algorithm=algorithm)
            given_up.set()
            assert tried.wait(20)
        else:
            assert given_up.wait(20)
            with pytest.raises(mpicoll.CommunicationError, match="rank 0 has abandoned this operation"):
                mpicoll.allreduce(np.ones(2), comm=comm, algorithm=algorithm)
            tried.set()
        comm.free()

    mpicoll.run_local(main, 2, timeout=10)


def test_a_failure_that_is_seen_while_it_is_freed() -> None:
    """As by the thread that looks after devices: a rank that has freed the communicator may have ended."""

    def refuse(call: object) -> None:
        raise mpicoll.RankFailed("rank 1: rank 0 has exited")

    def body() -> None:
        part = mpicoll.world().split(0)
        core = part._core
        release = core._release_resources

        def fail_meanwhile() -> None:
            core.queue.match = refuse
            release()

        core._release_resources = fail_meanwhile  # type: ignore[method-assign]
        part.free()

    mpicoll.run_local(body, 2)
