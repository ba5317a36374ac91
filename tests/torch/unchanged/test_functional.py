"""Functional collectives: new tensors, waited for when first used, differentiable."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.timeout(30),
    # New names came with torch 2.13; the old ones are those of all versions.
    pytest.mark.filterwarnings("ignore:`torch.distributed:FutureWarning"),
]

OPS = {
    "sum": lambda parts: parts.sum(0),
    "avg": lambda parts: parts.mean(0),
    "product": lambda parts: parts.prod(0),
    "min": lambda parts: parts.amin(0),
    "max": lambda parts: parts.amax(0),
}


def _parts(size: int, *shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """What each rank starts with, in order of ranks."""
    return torch.randn(size, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(functional.wait_tensor(got), want, rtol=1e-13, atol=1e-13)


@pytest.fixture(autouse=True)
def no_average_on_gloo(request: pytest.FixtureRequest, backend: str) -> None:
    if backend == "gloo" and "avg" in request.node.name:
        pytest.skip("gloo has no average")


@pytest.mark.parametrize("op", OPS)
def test_all_reduce(rank: int, size: int, op: str) -> None:
    parts = _parts(size, 3, 4)
    mine = parts[rank].clone()
    _close(functional.all_reduce(mine, op, dist.group.WORLD), OPS[op](parts))
    assert torch.equal(mine, parts[rank])


def test_result_is_waited_for_by_its_first_use(rank: int, size: int) -> None:
    parts = _parts(size, 1000)
    result = functional.all_reduce(parts[rank], "sum", dist.group.WORLD)
    assert isinstance(result, functional.AsyncCollectiveTensor)
    torch.testing.assert_close(result * 2, parts.sum(0) * 2, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("op", OPS)
def test_all_reduce_coalesced(rank: int, size: int, op: str) -> None:
    pieces = [_parts(size, 3, 4), _parts(size, 5, seed=1), _parts(size, seed=2)]
    results = functional.all_reduce_coalesced([parts[rank] for parts in pieces], op, dist.group.WORLD)
    for result, parts in zip(results, pieces, strict=True):
        _close(result, OPS[op](parts))


@pytest.mark.parametrize("source", [0, -1])
def test_broadcast(rank: int, size: int, source: int) -> None:
    parts = _parts(size, 3, 4)
    source %= size
    assert torch.equal(functional.broadcast(parts[rank], source, dist.group.WORLD), parts[source])


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_all_gather_tensor(rank: int, size: int, dim: int, dtype: torch.dtype) -> None:
    parts = _parts(size, 3, 4, dtype=dtype)
    result = functional.all_gather_tensor(parts[rank], dim, dist.group.WORLD)
    assert torch.equal(result, torch.cat(list(parts), dim))


def test_all_gather_coalesced(rank: int, size: int) -> None:
    pieces = [_parts(size, 3, 4), _parts(size, 5, dtype=torch.float32, seed=1)]
    results = functional.all_gather_into_tensor_coalesced([parts[rank] for parts in pieces], dist.group.WORLD)
    for result, parts in zip(results, pieces, strict=True):
        assert torch.equal(result, parts.flatten(0, 1))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("op", OPS)
def test_reduce_scatter_tensor(rank: int, size: int, op: str, dim: int) -> None:
    parts = _parts(size, 2 * size, 3 * size)
    result = functional.reduce_scatter_tensor(parts[rank], op, dim, dist.group.WORLD)
    _close(result, OPS[op](parts).chunk(size, dim)[rank])


@pytest.mark.parametrize("op", OPS)
def test_reduce_scatter_coalesced(rank: int, size: int, op: str) -> None:
    pieces = [_parts(size, 2 * size, size), _parts(size, size, 3 * size, seed=1)]
    inputs = [parts[rank].clone() for parts in pieces]
    results = functional.reduce_scatter_tensor_coalesced(inputs, op, [0, 1], dist.group.WORLD)
    for dim, (result, parts) in enumerate(zip(results, pieces, strict=True)):
        _close(result, OPS[op](parts).chunk(size, dim)[rank])


def test_all_to_all_single(rank: int, size: int) -> None:
    parts = _parts(size, 2 * size, 3)
    want = torch.cat([part.chunk(size)[rank] for part in parts])
    assert torch.equal(functional.all_to_all_single(parts[rank], None, None, dist.group.WORLD), want)


def test_all_to_all_single_of_uneven_pieces(rank: int, size: int) -> None:
    """Rank i sends i + j rows to rank j: none to itself on rank 0."""
    rows = [[i + j for j in range(size)] for i in range(size)]
    inputs = [_parts(1, sum(rows[i]), 3, seed=i)[0] for i in range(size)]
    got = functional.all_to_all_single(inputs[rank], [rows[i][rank] for i in range(size)], rows[rank], dist.group.WORLD)
    want = torch.cat([inputs[i].split(rows[i])[rank] for i in range(size)])
    assert torch.equal(got, want)


def test_permute_tensor(rank: int, size: int) -> None:
    parts = _parts(size, 5)
    shift = [(source + 1) % size for source in range(size)]
    assert torch.equal(functional.permute_tensor(parts[rank], shift, dist.group.WORLD), parts[rank - 1])


@pytest.mark.filterwarnings("ignore:The combination of ranks:FutureWarning")
def test_groups_of_every_kind(rank: int, size: int) -> None:
    parts = _parts(size, 5)
    mesh = init_device_mesh("cpu", (size,))
    for group in (list(range(size)), mesh, (mesh, 0), mesh.get_group(), mesh.get_group().group_name):
        _close(functional.all_reduce(parts[rank], "sum", group), parts.sum(0))


def test_in_two_dimensions(four_ranks: None, rank: int) -> None:
    parts = _parts(4, 2, 3)
    mesh = init_device_mesh("cpu", (2, 2))
    down, across = [rank % 2, rank % 2 + 2], [rank // 2 * 2, rank // 2 * 2 + 1]
    _close(functional.all_reduce(parts[rank], "sum", (mesh, 0)), parts[down].sum(0))
    gathered = functional.all_gather_tensor(parts[rank], 0, (mesh, 1))
    assert torch.equal(gathered, parts[across].flatten(0, 1))


@pytest.mark.parametrize("async_op", [False, True])
def test_results_are_waited_for_by_other_collectives(rank: int, size: int, async_op: bool) -> None:
    """As inputs, and as outputs, which receive the values of what they stand for."""
    total = size * (size + 1) // 2

    def start(*shape: int) -> Tensor:
        result = functional.all_reduce(torch.full(shape, rank + 1.0), "sum", dist.group.WORLD)
        assert isinstance(result, functional.AsyncCollectiveTensor)
        return result

    def check(call: Callable[..., dist.Work | None], got: Sequence[Tensor], *want: float) -> None:
        work = call()
        if work is not None:
            work.wait()
        for one, value in zip(got, want, strict=True):
            assert torch.equal(one.clone(), torch.full(one.shape, float(value)))

    # later turns are repeated calls
    for _ in range(3):
        x = start(3)
        check(lambda x=x: dist.all_reduce(x, async_op=async_op), [x], total * size)
        x = start(2, 3)
        check(lambda x=x: dist.all_reduce(x[1:], async_op=async_op), x, total, total * size)
        x = start(3)  # gloo changes it on other ranks as well
        check(lambda x=x: dist.reduce(x, 0, async_op=async_op), [x][rank:], *[total * size][rank:])
        many = [start(3), start(2)]
        check(lambda x=many: dist.all_reduce_coalesced(x, async_op=async_op), many, total * size, total * size)
        x, y = start(size * 3), torch.zeros(size * 3)
        check(lambda x=x: dist.all_gather_into_tensor(x, torch.ones(3), async_op=async_op), [x], 1)
        check(lambda y=y: dist.all_gather_into_tensor(y, start(3), async_op=async_op), [y], total)
        x, y = start(3), torch.zeros(3)
        check(lambda x=x: dist.reduce_scatter_tensor(x, torch.ones(3 * size), async_op=async_op), [x], size)
        check(lambda y=y: dist.reduce_scatter_tensor(y, start(3 * size), async_op=async_op), [y], total * size)
        x, y = [start(3) for _ in range(size)], [torch.zeros(3) for _ in range(size)]
        check(lambda x=x: dist.all_gather(x, torch.full((3,), float(rank)), async_op=async_op), x, *range(size))
        check(lambda y=y: dist.all_gather(y, start(3), async_op=async_op), y, *[total] * size)
        check(lambda x=x: dist.broadcast(x[0], size - 1, async_op=async_op), x[:1], 0)


def test_many_at_a_time(rank: int, size: int) -> None:
    """They are waited for in the reverse of the order in which they started."""
    parts = [_parts(size, 100, seed=seed) for seed in range(50)]
    results = [functional.all_reduce(part[rank], "sum", dist.group.WORLD) for part in parts]
    for result, part in zip(reversed(results), reversed(parts), strict=True):
        _close(result, part.sum(0))


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_to_all"])
def test_gradients(rank: int, size: int, name: str) -> None:
    """The whole computation in one process: every rank's result is weighed and all are summed."""
    parts = _parts(size, 2 * size, 3).requires_grad_()
    want = {
        "all_gather": lambda: [parts.flatten(0, 1)] * size,
        "reduce_scatter": lambda: list(parts.sum(0).chunk(size)),
        "all_to_all": lambda: [torch.cat([part.chunk(size)[other] for part in parts]) for other in range(size)],
    }[name]()
    weights = [_parts(1, *result.shape, seed=10 + other)[0] for other, result in enumerate(want)]
    sum((result * weight).sum() for result, weight in zip(want, weights, strict=True)).backward()
    mine = parts.detach()[rank].clone().requires_grad_()
    result = {
        "all_gather": lambda: functional.all_gather_tensor_autograd(mine, 0, dist.group.WORLD),
        "reduce_scatter": lambda: functional.reduce_scatter_tensor_autograd(mine, "sum", 0, dist.group.WORLD),
        "all_to_all": lambda: functional.all_to_all_single_autograd(mine, None, None, dist.group.WORLD),
    }[name]()
    (result * weights[rank]).sum().backward()
    torch.testing.assert_close(mine.grad, parts.grad[rank], rtol=1e-13, atol=1e-13)
