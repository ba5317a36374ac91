"""DDP's buckets in memory that all ranks reach: the same gradients, without copies."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import mpicoll
from mpicoll.torch import communicator, share_buckets

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("default_group")]


def model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(40, 300), torch.nn.Tanh(), torch.nn.Linear(300, 300), torch.nn.Linear(300, 5)
    )


def steps(wrapped: Any, count: int) -> list[torch.Tensor]:
    """Train a little on data of this rank's own; the parameters afterwards."""
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(count):
        optimizer.zero_grad()
        wrapped(torch.randn(8, 40, generator=generator)).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in wrapped.parameters()]


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("megabytes", [25, 0.1])
def test_the_same_parameters(view: bool, megabytes: float) -> None:
    options = {"gradient_as_bucket_view": view, "bucket_cap_mb": megabytes}
    plain = model()
    shared = DistributedDataParallel(copy.deepcopy(plain), **options)
    share_buckets(shared)
    want = steps(DistributedDataParallel(plain, **options), 4)
    for got, wanted in zip(steps(shared, 4), want, strict=True):
        torch.testing.assert_close(got, wanted)
    for parameter in want:
        everywhere = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, parameter)
        assert all(torch.equal(one, parameter) for one in everywhere)


@pytest.mark.extension
def test_buckets_lie_where_all_ranks_reach_them() -> None:
    if dist.get_world_size() == 1:
        pytest.skip("one rank shares nothing")
    where: list[int] = []

    def hook(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        arena = communicator(group)._core.arena()
        assert arena is not None
        where.append(arena.find_segment(bucket.buffer().data_ptr())[0])
        return allreduce_hook(group, bucket)

    hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
    shared = DistributedDataParallel(model())
    share_buckets(shared, hook)
    steps(shared, 3)
    assert where
    assert all(where)


def test_a_group_of_another_backend() -> None:
    gloo = dist.new_group(backend="gloo")
    with pytest.raises(mpicoll.CommunicatorError, match="gloo"):
        share_buckets(DistributedDataParallel(model(), process_group=gloo))
    dist.destroy_process_group(gloo)
