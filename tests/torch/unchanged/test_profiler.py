"""torch's profiler shows each operation of the backend by its name."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.timeout(30),
    # New names came with torch 2.13; the old ones are those of all versions.
    pytest.mark.filterwarnings("ignore:`torch.distributed:FutureWarning"),
]


def _profiled(body: Callable[[], object]) -> list[Any]:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        body()
    return list(profiler.events())


def _names(backend: str, events: list[Any]) -> Counter[str]:
    """How many events of each name, of those of the backend."""
    return Counter(event.name for event in events if event.name.startswith(f"{backend}:"))


def _row(x: Tensor) -> Tensor:
    return torch.empty(dist.get_world_size() * len(x))


def _blocks(x: Tensor) -> list[Tensor]:
    return list(_row(x).chunk(dist.get_world_size()))


def _blocks_of(root: int, x: Tensor) -> list[Tensor] | None:
    return _blocks(x) if dist.get_rank() == root else None


OPERATIONS: dict[str, Callable[..., Any]] = {
    "all_reduce": dist.all_reduce,
    "broadcast": lambda x, **how: dist.broadcast(x, 0, **how),
    "reduce": lambda x, **how: dist.reduce(x, 0, **how),
    "gather": lambda x, **how: dist.gather(x, _blocks_of(0, x), 0, **how),
    "scatter": lambda x, **how: dist.scatter(x, _blocks_of(0, x), 0, **how),
    "all_gather": lambda x, **how: dist.all_gather(_blocks(x), x, **how),
    "all_gather_single": lambda x, **how: dist.all_gather_into_tensor(_row(x), x, **how),
    "reduce_scatter": lambda x, **how: dist.reduce_scatter(x, _blocks(x), **how),
    "reduce_scatter_single": lambda x, **how: dist.reduce_scatter_tensor(x, _row(x), **how),
    "all_to_all": lambda x, **how: dist.all_to_all(_blocks(x), _blocks(x), **how),
    "all_to_all_single": lambda x, **how: dist.all_to_all_single(_row(x), _row(x), **how),
    "barrier": lambda x, **how: dist.barrier(**how),
}


@pytest.fixture(autouse=True)
def own_names(backend: str) -> None:
    if backend != "mpicoll":
        pytest.skip("other backends have other names for some operations")


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_collectives(backend: str, name: str, asynchronous: bool) -> None:
    def body() -> None:
        for _ in range(3):
            work = OPERATIONS[name](torch.ones(10), async_op=asynchronous)
            if asynchronous:
                work.wait()

    assert _names(backend, _profiled(body)) == {f"{backend}:{name}": 3}


def test_messages(backend: str, rank: int, size: int) -> None:
    def body() -> None:
        received = torch.empty(10)
        works = [dist.isend(torch.ones(10), (rank + 1) % size), dist.irecv(received, (rank - 1) % size)]
        for work in works:
            work.wait()

    assert _names(backend, _profiled(body)) == {f"{backend}:send": 1, f"{backend}:recv": 1}


def test_a_blocking_operation_lasts_until_it_is_complete(several_ranks: None, backend: str, rank: int) -> None:
    """Of one that goes on in the background, only the start is shown: it may outlast the profiler."""

    def body() -> None:
        if rank > 0:
            time.sleep(0.3)
        dist.all_reduce(torch.ones(10))

    dist.barrier()
    (event,) = [event for event in _profiled(body) if event.name == f"{backend}:all_reduce"]
    if rank == 0:
        assert event.time_range.elapsed_us() > 0.2e6


def test_buckets_of_ddp(backend: str) -> None:
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), bucket_cap_mb=1e-5)
    for _ in range(3):  # the buckets are made anew before the second pass
        events = _profiled(lambda: ddp(torch.ones(2, 4)).sum().backward())
    buckets = len(ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(","))
    assert buckets > 1
    assert _names(backend, events)[f"{backend}:all_reduce"] == buckets


def test_drop_in(backend: str) -> None:
    import mpicoll.torch

    def body() -> None:
        mpicoll.torch.all_reduce(torch.ones(10))
        mpicoll.torch.broadcast(torch.ones(10), 0)
        mpicoll.torch.barrier()

    want = {f"{backend}:all_reduce": 1, f"{backend}:broadcast": 1, f"{backend}:barrier": 1}
    assert _names(backend, _profiled(body)) == want
