"""Gradients between ranks, against the same computation in one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.ranks import Ranks
from torch import Tensor
from torch.nn import Parameter

import mpicoll
from mpicoll.errors import DTypeError
from mpicoll.parallel import gradients, groups
from mpicoll.parallel.shards import mark
from mpicoll.parallel.topology import PipelineParallelGrid, ProcessTopology

SHAPES = [(3, 4), (), (0, 2), (5,), (7, 3)]


def _parameters(rank: int, dtype: torch.dtype = torch.float64) -> list[Parameter]:
    """With gradients that depend on the rank; rank r has none for the r-th, and nobody for the last."""
    random = torch.Generator().manual_seed(rank)
    made = [Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    for number, one in enumerate(made[:-1]):
        if number != rank:
            one.grad = torch.randn(one.shape, generator=random, dtype=torch.float64).to(dtype)
    return made


def _gradient(rank: int, number: int) -> Tensor:
    grad = _parameters(rank)[number].grad
    return torch.zeros(SHAPES[number], dtype=torch.float64) if grad is None else grad


@pytest.mark.parametrize("bucket", [1, 64, 1 << 20])
def test_average(ranks: Ranks, bucket: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the buckets hold, also where some ranks lack a gradient."""
    monkeypatch.setattr(gradients, "BUCKET", bucket)

    def body() -> None:
        world = mpicoll.world()
        parameters = _parameters(world.rank)
        before = [one.grad for one in parameters]
        gradients.average_gradients(parameters, world)
        for number, one in enumerate(parameters[:-1]):
            if world.size == 1:
                assert one.grad is before[number]
                continue
            mean = sum(_gradient(rank, number) for rank in range(world.size)) / world.size
            if all(_parameters(rank)[number].grad is None for rank in range(world.size)):
                assert one.grad is None
            else:
                assert one.grad is not None
                torch.testing.assert_close(one.grad, mean, rtol=0, atol=1e-15)
                assert before[number] is None or one.grad is before[number], "gradients are filled in place"
        assert parameters[-1].grad is None

    ranks(body)


def test_average_of_several_dtypes(several: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        one, two = Parameter(torch.zeros(3)), Parameter(torch.zeros(4, dtype=torch.bfloat16))
        one.grad, two.grad = torch.full((3,), world.rank + 1.0), torch.full((4,), 3.0, dtype=torch.bfloat16)
        strided = Parameter(torch.zeros(4, 3).t())
        strided.grad = torch.full((4, 3), float(world.rank)).t()
        gradients.average_gradients([one, two, strided], world)
        assert one.grad.tolist() == [(world.size + 1) / 2] * 3
        assert two.grad.dtype is torch.bfloat16
        assert two.grad.tolist() == [3.0] * 4
        assert torch.equal(strided.grad, torch.full((3, 4), (world.size - 1) / 2))

    several(body)


def test_frozen_and_sparse(some: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        frozen = Parameter(torch.zeros(2), requires_grad=False)
        gradients.average_gradients([frozen], world)
        assert frozen.grad is None
        embedding = torch.nn.Embedding(4, 2, sparse=True)
        embedding(torch.tensor([1])).sum().backward()
        with pytest.raises(mpicoll.DTypeError, match=r"average_gradients.*shape \(4, 2\).*sparse=False"):
            gradients.average_gradients(embedding.parameters(), world)

    some(body)


def test_sum(ranks: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        last = world.rank == world.size - 1
        one, absent, unused, frozen, partly = (Parameter(torch.zeros(2)) for _ in range(5))
        parameters = [one, absent, unused, frozen, partly]
        for parameter in (one, frozen, partly, *([absent] if last else [])):
            parameter.grad = torch.full((2,), world.rank + 1.0)
        frozen.requires_grad_(False)
        partly.requires_grad_(last)
        gradients.sum_gradients(parameters, world)
        total = world.size * (world.size + 1) / 2
        # What is frozen everywhere is nobody's; what is trained somewhere must stay equal everywhere.
        expected = [[total] * 2, [float(world.size)] * 2, None, [world.rank + 1.0] * 2, [float(world.size)] * 2]
        assert [None if parameter.grad is None else parameter.grad.tolist() for parameter in parameters] == expected

    ranks(body)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clip_in_a_tensor_parallel_group(ranks: Ranks, norm_type: float, max_norm: float) -> None:
    """Each rank holds rows of one parameter, and a whole copy of another."""

    def body() -> None:
        world = mpicoll.world()
        whole, same = torch.randn(4 * world.size, 3, generator=torch.Generator().manual_seed(1)), torch.arange(5.0)
        expected = [Parameter(torch.zeros_like(whole)), Parameter(torch.zeros(5))]
        expected[0].grad, expected[1].grad = whole.clone(), same.clone()
        norm = torch.nn.utils.clip_grad_norm_(expected, max_norm, norm_type)

        rows = slice(4 * world.rank, 4 * world.rank + 4)
        shard, copy = Parameter(torch.zeros(4, 3)), Parameter(torch.zeros(5))
        none, empty = Parameter(torch.zeros(1)), Parameter(torch.zeros(0))
        empty.grad = torch.zeros(0)
        mark(shard, 0, world, world)
        shard.grad, copy.grad = whole[rows].clone(), same.clone()
        parameters = [shard, copy, none, empty]
        got = gradients.clip_grad_norm_(parameters, max_norm, norm_type, group=world, tensor_group=world)
        assert got.dtype is torch.float64
        torch.testing.assert_close(got.float(), norm, rtol=1e-5, atol=0)
        torch.testing.assert_close(shard.grad, expected[0].grad[rows])
        torch.testing.assert_close(copy.grad, expected[1].grad)

    ranks(body)


def test_clip_in_a_grid() -> None:
    """pipe x model: on each stage a shard, a copy, and a tied parameter, of which one copy counts."""

    def body() -> float:
        with PipelineParallelGrid(ProcessTopology(["pipe", "model"], [2, 2])) as grid, groups.use(grid):
            pipe, model = grid.get_pipe_parallel_rank(), grid.communicator("model")
            shard, copy, tied = (Parameter(torch.zeros(2)) for _ in range(3))
            mark(shard, 0, None, model)
            shard.grad = torch.full((2,), 1.0 + pipe + 2 * model.rank)
            copy.grad, tied.grad = torch.full((2,), 5.0 + pipe), torch.full((2,), 7.0)
            elsewhere = [tied] if pipe else []
            return gradients.clip_grad_norm_([shard, copy, tied], 1.0, counted_elsewhere=elsewhere).item()

    shards = sum(2 * (1.0 + pipe + 2 * model) ** 2 for pipe in range(2) for model in range(2))
    total = shards + 2 * 25.0 + 2 * 36.0 + 2 * 49.0
    assert mpicoll.run_local(body, 4) == pytest.approx([math.sqrt(total)] * 4)


def test_clip_refuses_other_norms(some: Ranks) -> None:
    def body() -> None:
        with pytest.raises(mpicoll.ArgumentError, match="norm_type must be 2 or inf, got 1"):
            gradients.clip_grad_norm_([], 1.0, 1)

    some(body)


def test_clip_in_bfloat16(ranks: Ranks) -> None:
    """Rounding of the gradients has a mean of zero; that of a factor would not."""

    def body() -> None:
        world = mpicoll.world()
        random = torch.Generator().manual_seed(world.rank)
        one = Parameter(torch.zeros(20_000, dtype=torch.bfloat16))
        mark(one, 0, world, world)
        for max_norm in (0.7, 1.0, 1.3):
            one.grad = torch.randn(20_000, generator=random).bfloat16()
            gradients.clip_grad_norm_(one, max_norm, group=world, tensor_group=world)
            assert one.grad.dtype is torch.bfloat16
            norm = mpicoll.allreduce(one.grad.double().square().sum()).sqrt().item()
            assert norm == pytest.approx(max_norm, rel=1e-3)

    ranks(body)


def test_clip_without_gradients(some: Ranks) -> None:
    def body() -> Any:
        return gradients.clip_grad_norm_([Parameter(torch.zeros(1))], 1.0).item()

    assert set(some(body)) == {0.0}


@pytest.mark.parametrize("make", [Parameter, Tensor.requires_grad_])
def test_a_single_parameter(ranks: Ranks, make: Callable[[Tensor], Tensor]) -> None:
    """It counts as itself, not as the list of its rows."""

    def body() -> None:
        world = mpicoll.world()
        one = make(torch.zeros(2, 3))
        one.grad = torch.full((2, 3), float(world.rank))
        gradients.average_gradients(one, world)
        mean = (world.size - 1) / 2
        assert torch.equal(one.grad, torch.full((2, 3), mean))
        norm = gradients.clip_grad_norm_(one, 1e-3, group=world)
        torch.testing.assert_close(norm, torch.tensor(mean * math.sqrt(6), dtype=torch.float64))
        assert one.grad.norm() < 1.01e-3

    ranks(body)


def test_gradients_that_can_not_be_clipped(some_more: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        one = Parameter(torch.zeros(2, 3))
        one.grad = torch.eye(2, 3).to_sparse()
        with pytest.raises(
            DTypeError, match=r"clip_grad_norm_: a parameter of shape \(2, 3\) has a gradient of .*dense"
        ):
            gradients.clip_grad_norm_(one, 1.0, group=world)

    some_more(body)
