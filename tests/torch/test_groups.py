"""Process groups besides the default one: who is in them, and that their collectives are theirs alone."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.process_group import BACKEND, by_torch, in_given_order

import mpicoll
import mpicoll.torch as dropin
from mpicoll.torch import groups as torch_groups
from mpicoll.torch.legacy import c10d_patches

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("default_group")]


@pytest.fixture
def rank() -> int:
    return dist.get_rank()


@pytest.fixture
def size() -> int:
    return dist.get_world_size()


def check(group: Any, ranks: list[int]) -> None:
    """`group` consists of the global `ranks`, in this order, and works."""
    if dist.get_rank() not in ranks:
        assert group is dist.GroupMember.NON_GROUP_MEMBER
        assert dist.get_rank(group) == -1
        assert dist.get_world_size(group) == -1
        return
    mine = ranks.index(dist.get_rank())
    assert dist.get_rank(group) == mine
    assert dist.get_world_size(group) == len(ranks)
    assert dist.get_process_group_ranks(group) == ranks
    for number, other in enumerate(ranks):
        assert dist.get_group_rank(group, other) == number
        assert dist.get_global_rank(group, number) == other
    total = torch.tensor([2**mine])
    dist.all_reduce(total, group=group)
    assert total.item() == 2 ** len(ranks) - 1
    everyone = [torch.tensor([-1]) for _ in ranks]
    dropin.all_gather(everyone, torch.tensor([dist.get_rank()]), group)
    assert torch.cat(everyone).tolist() == ranks
    for root in (ranks[0], ranks[-1]):
        tensor = torch.tensor([float(dist.get_rank())])
        dropin.broadcast(tensor, root, group)
        assert tensor.item() == root


def test_every_subset(size: int) -> None:
    made = [
        (dist.new_group(list(ranks)), list(ranks))
        for count in range(1, size + 1)
        for ranks in itertools.combinations(range(size), count)
    ]
    for group, ranks in made:
        check(group, ranks)
    # in another order than they were made in
    for group, ranks in reversed(made):
        check(group, ranks)
        if dist.get_rank() in ranks:
            assert dist.get_backend(group) == "mpicoll"
            dist.destroy_process_group(group)


def test_of_rank_0_while_the_others_go_on(rank: int) -> None:
    """No other rank has a part in it."""
    group = dist.new_group([0])
    check(group, [0])


@in_given_order
def test_given_order(size: int) -> None:
    for ranks in ([*range(1, size), 0], list(range(size))[::-1]):
        group = dist.new_group(ranks, sort_ranks=False)
        check(group, ranks)
        dist.destroy_process_group(group)
    group = dist.new_group(list(range(size))[::-1])
    check(group, list(range(size)))
    dist.destroy_process_group(group)


def test_an_order_that_torch_can_not_make(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Is refused, unless it is the ascending one."""
    made = []

    def new_group(ranks: list[int], backend: str | None = None) -> None:
        made.append((ranks, backend))

    monkeypatch.setattr(dist, "new_group", new_group)
    torch_groups.new_group(range(size), backend="mpicoll")
    assert made == [(list(range(size)), "mpicoll")]
    with pytest.raises(mpicoll.SetupError, match=r"the ranks \[1, 0\] of a process group .* use torch 2\.13 or newer"):
        torch_groups.new_group([1, 0])


@by_torch
def test_torch_need_not_record_a_group(rank: int) -> None:
    """From 2.15 on it hooks a recorder into each group, for which one in Python has no place."""
    seen = []
    group = dist.new_group()
    c10d_patches._maybe_attach_flight_recorder(lambda *args: seen.append(args), group, "config", [rank])
    c10d_patches._maybe_attach_flight_recorder(lambda *args: seen.append(args), pg=group, global_ranks=[rank])
    c10d_patches._maybe_attach_flight_recorder(lambda *args: seen.append(args), "another", "config", [rank])
    assert seen == [("another", "config", [rank])]
    dist.destroy_process_group(group)


def test_local_synchronization(rank: int, size: int) -> None:
    """Only members call."""
    for ranks in ([0], list(range(1, size)) or [0], [size - 1], list(range(0, size, 2))):
        if rank in ranks:
            group = dist.new_group(ranks, use_local_synchronization=True)
            check(group, ranks)
            dist.destroy_process_group(group)
    dist.barrier()


def test_groups_side_by_side(rank: int, size: int) -> None:
    """The same members, and operations of both under way at once, waited for in the other order."""
    first, second = dist.new_group(), dist.new_group()
    a, b, c = (torch.full((10_000,), float(rank + number)) for number in range(3))
    works = [
        dist.all_reduce(a, group=first, async_op=True),
        dist.all_reduce(b, group=second, async_op=True),
        dist.all_reduce(c, async_op=True),
    ]
    for work in reversed(works):
        work.wait()
    base = size * (size - 1) // 2
    assert [one[0].item() for one in (a, b, c)] == [base, base + size, base + 2 * size]
    dist.destroy_process_group(first)
    dist.destroy_process_group(second)


def test_split_group(rank: int, size: int) -> None:
    parts = [list(range(0, size, 2)), list(range(1, size, 2))]
    parts = [part for part in parts if part]
    group = dist.split_group(split_ranks=parts, group_desc="halves")
    (mine,) = [part for part in parts if rank in part]
    check(group, mine)
    assert group.group_desc == "halves"
    assert dist.get_backend(group) == "mpicoll"
    again = dist.split_group(parent_pg=group, split_ranks=[[0]])
    if dist.get_rank(group) == 0:
        check(again, mine[:1])
        dist.destroy_process_group(again)
    else:
        assert again is None
    dist.destroy_process_group(group)


def test_split_group_without_some(rank: int, size: int) -> None:
    if BACKEND and rank < size - 1:
        # torch would crash.
        with pytest.raises(mpicoll.ArgumentError, match=f"split_group: rank {rank} is in none of the groups"):
            dist.split_group(split_ranks=[[size - 1]])
    else:
        group = dist.split_group(split_ranks=[[size - 1]])
    if rank == size - 1:
        check(group, [size - 1])
        dist.destroy_process_group(group)
    elif not BACKEND:
        assert group is None
    # whoever was left out draws the same names afterwards
    group = dist.new_group()
    check(group, list(range(size)))
    dist.destroy_process_group(group)


@by_torch
@pytest.mark.parametrize("parts", [[], [[]], [[0], [0]], [[0, 99]], [[0], [-1]]], ids=str)
def test_split_group_refuses(parts: list[list[int]], rank: int) -> None:
    """On all ranks, also those of no group."""
    with pytest.raises(mpicoll.ArgumentError, match="split_group"):
        dist.split_group(split_ranks=parts)
    check(dist.group.WORLD, list(range(dist.get_world_size())))


def test_new_subgroups(rank: int, size: int) -> None:
    for count in (one for one in range(1, size + 1) if size % one == 0):
        mine, everyone = dist.new_subgroups(count)
        assert len(everyone) == size // count
        first = rank // count * count
        check(mine, list(range(first, first + count)))
        dist.destroy_process_group(mine)


def test_new_subgroups_by_enumeration(rank: int, size: int) -> None:
    lists = [list(range(size // 2 + 1)), list(range(size // 2 + 1, size))]
    mine, everyone = dist.new_subgroups_by_enumeration([one for one in lists if one])
    check(mine, lists[0] if rank in lists[0] else lists[1])
    assert len(everyone) == len([one for one in lists if one])
    dist.destroy_process_group(mine)


def test_gloo_beside(rank: int, size: int) -> None:
    other = dist.new_group(backend="gloo")
    assert dist.get_backend(other) == "gloo"
    ours = dist.new_group(backend="mpicoll")
    for group in (other, ours, None):
        tensor = torch.tensor([rank + 1.0])
        dropin.all_reduce(tensor, group=group)
        assert tensor.item() == size * (size + 1) / 2
    with pytest.raises(mpicoll.CommunicatorError, match="gloo"):
        dropin.communicator(other)
    dist.destroy_process_group(other)
    dist.destroy_process_group(ours)


@in_given_order
def test_the_communicator_of_a_group(rank: int, size: int) -> None:
    ranks = list(range(size))[::-1]
    group = dist.new_group(ranks, sort_ranks=False)
    for made, order in ((dropin.communicator(group), ranks), (dropin.communicator(), ranks[::-1])):
        assert isinstance(made, mpicoll.Communicator)
        assert mpicoll.allgather(torch.tensor([rank]), comm=made).tolist() == order
    with pytest.raises(mpicoll.CommunicatorError, match="not a member"):
        dropin.communicator(dist.GroupMember.NON_GROUP_MEMBER)
    of_group = dropin.communicator(group)
    dist.destroy_process_group(group)
    with pytest.raises(mpicoll.CommunicatorError, match="freed"):
        mpicoll.allreduce(np.ones(1), comm=of_group)


def test_many_one_after_the_other(rank: int, size: int) -> None:
    for number in range(40):
        group = dist.new_group()
        tensor = torch.tensor([rank + number])
        dist.all_reduce(tensor, group=group)
        assert tensor.item() == size * (size - 1) // 2 + size * number
        dist.destroy_process_group(group)


def test_a_destroyed_group_can_not_be_used(size: int) -> None:
    group = dist.new_group()
    dist.destroy_process_group(group)
    for call in (lambda: group.allreduce([torch.ones(1)]), group.barrier):
        with pytest.raises(mpicoll.CommunicatorError, match="freed"):
            call()


def test_a_pending_operation_of_a_destroyed_group_completes(rank: int, size: int) -> None:
    group = dist.new_group()
    tensor = torch.full((50_000,), rank + 1.0)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    dist.destroy_process_group(group)
    assert work.wait()
    assert torch.equal(tensor, torch.full((50_000,), size * (size + 1) / 2))


def test_calls_of_non_members(rank: int, size: int) -> None:
    """torch warns and does nothing."""
    if size < 2:
        pytest.skip("needs two ranks")
    group = dist.new_group([0])
    tensor = torch.tensor([float(rank)])
    if rank == 0:
        dropin.all_reduce(tensor, group=group)
    else:
        with pytest.warns(UserWarning, match="does not belong to the given group"):
            dropin.all_reduce(tensor, group=group)
    assert tensor.item() == rank


@pytest.mark.skipif(torch.cuda.is_available(), reason="a group stands for the device then, which is taken first")
@pytest.mark.filterwarnings("ignore:Please use DTensor:FutureWarning")
def test_sharded_tensors_are_gathered_on_the_cpu(rank: int, size: int) -> None:
    """torch asks the backend's devices where to gather, and takes the first one that is not the CPU."""
    from torch.distributed._shard import sharded_tensor, sharding_spec

    spec = sharding_spec.ChunkShardingSpec(dim=0, placements=[f"rank:{one}/cpu" for one in range(size)])
    tensor = sharded_tensor.full(spec, (2 * size, 3), 7.0)
    tensor.local_shards()[0].tensor.add_(rank)
    out = torch.empty(2 * size, 3) if rank == 0 else None
    tensor.gather(0, out)
    if out is not None:
        assert torch.equal(out, 7.0 + torch.arange(size).repeat_interleave(2)[:, None].expand(-1, 3))
