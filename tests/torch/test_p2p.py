"""Messages between two ranks through torch.distributed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as stock
from support.data import COMPLEX, FLOATS, HALVES, INTEGERS, numbers, random, wrap

import mpicoll
import mpicoll.torch as dropin

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("default_group")]

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")


@pytest.fixture(params=[stock, dropin], ids=["stock", "drop-in"])
def dist(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(params=["world", "part", "reversed", "one"])
def group(request: pytest.FixtureRequest, groups: dict[str, Any]) -> Any:
    return groups[request.param]


def outside(group: Any) -> bool:
    return group is stock.GroupMember.NON_GROUP_MEMBER


def around(group: Any) -> tuple[int, int]:
    """The ranks of the group to the right and to the left."""
    rank, size = stock.get_rank(group), stock.get_world_size(group)
    return (rank + 1) % size, (rank - 1) % size


def value(name: str, shape: tuple[int, ...], *what: object) -> torch.Tensor:
    """The same on every rank."""
    rng = random(name, shape, *what)
    if name in FLOAT8:
        return torch.from_numpy(rng.integers(0, 256, shape, np.uint8)).view(getattr(torch, name))
    return wrap("torch", numbers(rng, name, shape))


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Of float8 the bytes, some of which are no number."""
    if one.element_size() == 1 and one.is_floating_point():
        one, other = one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
    return one.dtype is other.dtype and torch.equal(one, other)


def layouts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """`tensor` as it is, and as a part of something larger."""
    made = [tensor.clone()]
    if tensor.ndim >= 2:
        made.append(tensor.transpose(0, -1).contiguous().transpose(0, -1))
    if tensor.ndim >= 1:
        made.append(torch.stack([tensor, tensor], dim=-1)[..., 1])
    return made


@pytest.mark.parametrize("shape", [(5,), (), (0,), (4, 3), (20_001,)], ids=str)
def test_ring_of_every_dtype_and_layout(shape: tuple[int, ...], group: Any, dist: Any) -> None:
    """Also to and from this rank itself, in a group of one."""
    if outside(group):
        return
    rank = stock.get_rank(group)
    right, left = around(group)
    for name in ("bool", *INTEGERS, *HALVES, *FLOATS, *COMPLEX, *FLOAT8):
        mine, wanted = value(name, shape, rank), value(name, shape, left)
        for sent in layouts(mine):
            for filled in layouts(value(name, shape, "garbage")):
                works = [
                    dist.irecv(filled, group=group, group_src=left),
                    dist.isend(sent, group=group, group_dst=right),
                ]
                assert all(work.wait() for work in works)
                assert equal(filled, wanted)
                assert equal(sent, mine)


def test_blocking(group: Any, dist: Any) -> None:
    """A chain, by global ranks; what recv returns is the global rank of the sender."""
    if outside(group):
        return
    ranks = stock.get_process_group_ranks(group)
    rank, size = stock.get_rank(group), len(ranks)
    tensor = torch.full((3, 2), -1.0)
    if rank > 0:
        assert dist.recv(tensor, ranks[rank - 1], group) == ranks[rank - 1]
        assert torch.equal(tensor, torch.full((3, 2), float(rank - 1)))
    if rank < size - 1:
        dist.send(torch.full((2, 3), float(rank)).t(), ranks[rank + 1], group)


def test_tags_tell_messages_apart(group: Any) -> None:
    if outside(group):
        return
    right, left = around(group)
    rank = stock.get_rank(group)
    first, second = torch.zeros(2), torch.zeros(2)
    sends = [stock.isend(torch.full((2,), 10.0 * rank + tag), group=group, group_dst=right, tag=tag) for tag in (1, 2)]
    # the later one first
    stock.irecv(second, group=group, group_src=left, tag=2).wait()
    stock.irecv(first, group=group, group_src=left, tag=1).wait()
    assert first.tolist() == [10.0 * left + 1] * 2
    assert second.tolist() == [10.0 * left + 2] * 2
    for work in sends:
        work.wait()


def test_messages_of_one_tag_keep_their_order(group: Any) -> None:
    if outside(group):
        return
    right, left = around(group)
    sends = [stock.isend(torch.tensor([number]), group=group, group_dst=right) for number in range(20)]
    received = [torch.tensor([-1]) for _ in range(20)]
    for work in [stock.irecv(one, group=group, group_src=left) for one in received] + sends:
        work.wait()
    assert [one.item() for one in received] == list(range(20))


def test_any_source(group: Any) -> None:
    if outside(group):
        return
    ranks = stock.get_process_group_ranks(group)
    rank, size = stock.get_rank(group), len(ranks)
    if rank > 0:
        stock.send(torch.tensor([rank]), group=group, group_dst=0)
    else:
        seen = []
        for number in range(size - 1):
            tensor = torch.tensor([-1])
            if number % 2:
                work = stock.irecv(tensor, group=group)
                work.wait()
                source = ranks[work._source_rank()]
            else:
                source = stock.recv(tensor, group=group)
            assert ranks[tensor.item()] == source
            seen.append(source)
        assert sorted(seen) == sorted(ranks[1:])
    # a message of the next test must not be taken for one of this
    stock.barrier(group)


def test_batch_round_the_ring(group: Any, dist: Any) -> None:
    """8 MiB each way, so that nothing is sent before it is asked for."""
    if outside(group):
        return
    rank = stock.get_rank(group)
    right, left = around(group)
    count = 1 << 20
    to_right, to_left = torch.arange(count) + rank, torch.arange(count) - rank
    from_left, from_right = torch.empty(count, dtype=torch.int64), torch.empty(count, dtype=torch.int64)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, to_right, group=group, group_peer=right, tag=1),
            dist.P2POp(dist.isend, to_left, group=group, group_peer=left, tag=2),
            dist.P2POp(dist.irecv, from_right, group=group, group_peer=right, tag=2),
            dist.P2POp(dist.irecv, from_left, group=group, group_peer=left, tag=1),
        ]
    )
    assert len(works) == 4
    for work in works:
        work.wait()
    assert torch.equal(from_left, torch.arange(count) + left)
    assert torch.equal(from_right, torch.arange(count) - right)


def test_a_message_of_another_size_is_an_error(group: Any) -> None:
    """Too large a message, and too small a one; the message is gone, and the next one comes through."""
    if outside(group):
        return
    right, left = around(group)
    for sent, taken in ((5, 3), (3, 5), (0, 3), (3, 0)):
        send = stock.isend(torch.ones(sent), group=group, group_dst=right)
        work = stock.irecv(torch.zeros(taken), group=group, group_src=left)
        with pytest.raises(mpicoll.TruncationError, match=rf"rank {stock.get_rank(group)}\b"):
            work.wait()
        assert work.is_completed()
        assert not work.is_success()
        assert isinstance(work.exception(), mpicoll.TruncationError)
        send.wait()
    filled = torch.zeros(2)
    send = stock.isend(torch.ones(2), group=group, group_dst=right)
    stock.irecv(filled, group=group, group_src=left).wait()
    assert filled.tolist() == [1.0, 1.0]
    send.wait()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("name", ["isend", "irecv"])
@pytest.mark.parametrize("layout", ["sparse", "nested"])
def test_tensors_without_plain_memory_are_refused(name: str, layout: str) -> None:
    rank, size = stock.get_rank(), stock.get_world_size()
    tensor = torch.eye(2).to_sparse() if layout == "sparse" else torch.nested.nested_tensor([torch.ones(2)])
    with pytest.raises(mpicoll.DTypeError, match=rf"{name[1:]}: pass dense .* \(rank {rank} of {size}\)$"):
        getattr(stock, name)(tensor, rank)


def test_between_collectives(group: Any) -> None:
    """Messages under way don't disturb collectives, nor wait for them."""
    if outside(group):
        return
    right, left = around(group)
    rank, size = stock.get_rank(group), stock.get_world_size(group)
    filled = torch.zeros(300_000)
    receive = stock.irecv(filled, group=group, group_src=left)
    total = torch.tensor([rank + 1.0])
    pending = stock.all_reduce(total, group=group, async_op=True)
    send = stock.isend(torch.full((300_000,), float(rank)), group=group, group_dst=right)
    gathered = [torch.zeros(1) for _ in range(size)]
    stock.all_gather(gathered, torch.tensor([float(rank)]), group)
    for work in (receive, send, pending):
        work.wait()
    assert total.item() == size * (size + 1) / 2
    assert torch.equal(filled, torch.full((300_000,), float(left)))
    assert [one.item() for one in gathered] == list(range(size))


def test_inference_mode(group: Any) -> None:
    if outside(group):
        return
    right, left = around(group)
    rank = stock.get_rank(group)
    with torch.inference_mode():
        sent = torch.full((2, 3), float(rank))
        targets = [torch.zeros(2, 3), torch.zeros(3, 2).t()]
        sends = [stock.isend(sent, group=group, group_dst=right) for _ in range(4)]
        for target in targets:
            stock.irecv(target, group=group, group_src=left).wait()
            assert torch.equal(target, torch.full((2, 3), float(left)))
            target.fill_(-1)
    for target in targets:  # made in inference mode, used outside of it
        stock.irecv(target, group=group, group_src=left).wait()
        assert torch.equal(target.clone(), torch.full((2, 3), float(left)))
    for work in sends:
        work.wait()


def test_objects(group: Any, dist: Any) -> None:
    if outside(group):
        return
    ranks = stock.get_process_group_ranks(group)
    rank, size = stock.get_rank(group), len(ranks)
    if size < 2:
        return  # c10d lets nobody send objects to itself
    made = [{"of": 0, "text": "x" * 5000}, [1, 2, {3}], "€"]
    if rank == 0:
        dist.send_object_list(made, ranks[-1], group)
    elif rank == size - 1:
        found: list[Any] = [None] * 3
        assert dist.recv_object_list(found, ranks[0], group) == ranks[0]
        assert found == made
