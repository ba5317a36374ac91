"""Differentiable collectives against the same computation in one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from support.ranks import Comms, Ranks
from torch import Tensor

import mpicoll
from mpicoll.torch import autograd as diff

Outputs = tuple[Tensor, ...]


class Case(NamedTuple):
    """``run(comm, x)`` on every rank, and ``oracle(inputs)``: what each rank gets, from the inputs of all.

    Inputs are of shape (number of ranks, 2).
    """

    run: Callable[[mpicoll.Communicator, Tensor], Outputs]
    oracle: Callable[[Sequence[Tensor]], list[Outputs]]


def _last(comm: mpicoll.Communicator) -> int:
    return comm.size - 1


def _same(value: Callable[[Sequence[Tensor]], Outputs]) -> Callable[[Sequence[Tensor]], list[Outputs]]:
    """Every rank gets the same."""
    return lambda xs: [value(xs)] * len(xs)


def _at_last(value: Callable[[Sequence[Tensor]], Outputs]) -> Callable[[Sequence[Tensor]], list[Outputs]]:
    """The last rank gets `value`, the others zeros."""

    def oracle(xs: Sequence[Tensor]) -> list[Outputs]:
        outputs = value(xs)
        return [tuple(map(torch.zeros_like, outputs))] * (len(xs) - 1) + [outputs]

    return oracle


def _each(value: Callable[[Sequence[Tensor], int], Tensor]) -> Callable[[Sequence[Tensor]], list[Outputs]]:
    return lambda xs: [(value(xs, rank),) for rank in range(len(xs))]


def _sum(xs: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(xs)).sum(0)


def _premul(xs: Sequence[Tensor]) -> Tensor:
    return _sum([x * _factor(rank, x) for rank, x in enumerate(xs)])


def _factor(rank: int, x: Tensor) -> complex:
    return complex(rank + 1, 0.5) if x.is_complex() else 0.5 * (rank + 1)


def _op(comm: mpicoll.Communicator, x: Tensor) -> Any:
    return mpicoll.premul_sum(_factor(comm.rank, x))


def _rows(source: int, dest: int) -> int:
    return (source + 2 * dest) % 3 % 2


def _uneven_sent(x: Tensor, rank: int) -> list[Tensor]:
    return [x[dest, : 1 + _rows(rank, dest)].unsqueeze(0) for dest in range(len(x))]


def _all_to_all_uneven(comm: mpicoll.Communicator, x: Tensor) -> Outputs:
    shapes = [(1, 1 + _rows(source, comm.rank)) for source in range(comm.size)]
    return diff.all_to_all(_uneven_sent(x, comm.rank), shapes, comm)


def _all_to_all_splits(comm: mpicoll.Communicator, x: Tensor) -> Outputs:
    sent = [_rows(comm.rank, other) for other in range(comm.size)]
    received = [_rows(other, comm.rank) for other in range(comm.size)]
    return (diff.all_to_all_single(x[: sum(sent)], received, sent, comm),)


def _all_to_all_splits_oracle(xs: Sequence[Tensor]) -> list[Outputs]:
    everyone = range(len(xs))
    blocks = [
        x[: sum(sent)].split(sent) for rank, x in enumerate(xs) for sent in [[_rows(rank, other) for other in everyone]]
    ]
    return [(torch.cat([blocks[source][rank] for source in everyone]),) for rank in everyone]


def _part(x: Tensor, rank: int) -> Tensor:
    """As many rows as only this rank has."""
    return x[: (rank + 1) % len(x)]


def _ring(comm: mpicoll.Communicator, x: Tensor) -> Outputs:
    return (diff.sendrecv(x, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size, 3, comm),)


def _open_chain(comm: mpicoll.Communicator, x: Tensor, end: int | None = None) -> Outputs:
    """Of another shape to the right, and none at the ends."""
    right = comm.rank + 1 if comm.rank + 1 < comm.size else end
    left = comm.rank - 1 if comm.rank else end
    shape = _part(x, (comm.rank - 1) % comm.size).shape
    return (diff.sendrecv(_part(x, comm.rank), right, left, group=comm, shape=shape),)


def _open_chain_oracle(xs: Sequence[Tensor]) -> list[Outputs]:
    parts = [_part(x, rank) for rank, x in enumerate(xs)]
    return [(torch.zeros_like(parts[-1]),), *((part,) for part in parts[:-1])]


def _pipeline(comm: mpicoll.Communicator, x: Tensor) -> Outputs:
    """Every rank multiplies what comes from the left, and passes it on; twice, so that messages have an order."""
    results = []
    for number in range(2):
        value = (diff.recv(x, comm.rank - 1, group=comm) if comm.rank else x) * (x + number)
        results.append(diff.send(value, comm.rank + 1, group=comm) if comm.rank < _last(comm) else value)
    return tuple(results)


def _pipeline_oracle(xs: Sequence[Tensor]) -> list[Outputs]:
    results = []
    for number in range(2):
        value = xs[0]
        for x in xs:
            value = value * (x + number)
        results.append(value)
    return [(xs[0].new_zeros(()),) * 2] * (len(xs) - 1) + [tuple(results)]


CASES = {
    "all_reduce sum": Case(lambda comm, x: (diff.all_reduce(x, group=comm),), _same(lambda xs: (_sum(xs),))),
    "all_reduce avg": Case(lambda comm, x: (diff.all_reduce(x, "avg", comm),), _same(lambda xs: (_sum(xs) / len(xs),))),
    "all_reduce premul_sum": Case(
        lambda comm, x: (diff.all_reduce(x, _op(comm, x), comm),), _same(lambda xs: (_premul(xs),))
    ),
    "all_reduce prod": Case(
        lambda comm, x: (diff.all_reduce(x, "prod", comm),), _same(lambda xs: (torch.stack(list(xs)).prod(0),))
    ),
    "all_reduce max": Case(
        lambda comm, x: (diff.all_reduce(x, "max", comm),), _same(lambda xs: (torch.stack(list(xs)).amax(0),))
    ),
    "all_reduce min": Case(
        lambda comm, x: (diff.all_reduce(x, "min", comm),), _same(lambda xs: (torch.stack(list(xs)).amin(0),))
    ),
    "reduce": Case(lambda comm, x: (diff.reduce(x, _last(comm), group=comm),), _at_last(lambda xs: (_sum(xs),))),
    "reduce avg": Case(
        lambda comm, x: (diff.reduce(x, _last(comm), "avg", comm),), _at_last(lambda xs: (_sum(xs) / len(xs),))
    ),
    "reduce premul_sum": Case(
        lambda comm, x: (diff.reduce(x, _last(comm), _op(comm, x), comm),), _at_last(lambda xs: (_premul(xs),))
    ),
    "broadcast": Case(lambda comm, x: (diff.broadcast(x, _last(comm), comm),), _same(lambda xs: (xs[-1],))),
    "all_gather": Case(lambda comm, x: diff.all_gather(x, comm), _same(tuple)),
    "all_gather of sizes": Case(
        lambda comm, x: diff.all_gather(
            _part(x, comm.rank), comm, sizes=[(rank + 1) % comm.size for rank in range(comm.size)]
        ),
        _same(lambda xs: tuple(_part(x, rank) for rank, x in enumerate(xs))),
    ),
    "all_gather_single along 1": Case(
        lambda comm, x: (diff.all_gather_single(x, 1, comm),), _same(lambda xs: (torch.cat(list(xs), 1),))
    ),
    "reduce_scatter": Case(
        lambda comm, x: (diff.reduce_scatter(x.unbind(), group=comm),), _each(lambda xs, rank: _sum(xs)[rank])
    ),
    "reduce_scatter of shapes": Case(
        lambda comm, x: (diff.reduce_scatter([row[: 1 + i % 2] for i, row in enumerate(x)], group=comm),),
        _each(lambda xs, rank: _sum(xs)[rank, : 1 + rank % 2]),
    ),
    "reduce_scatter_single avg along -1": Case(
        lambda comm, x: (diff.reduce_scatter_single(x.T, "avg", -1, comm),),
        _each(lambda xs, rank: _sum(xs).T[:, rank : rank + 1] / len(xs)),
    ),
    "reduce_scatter_single premul_sum of sizes": Case(
        lambda comm, x: (
            diff.reduce_scatter_single(x, _op(comm, x), group=comm, sizes=[0] * _last(comm) + [comm.size]),
        ),
        _each(lambda xs, rank: _premul(xs) if rank == len(xs) - 1 else xs[0][:0]),
    ),
    "gather": Case(lambda comm, x: diff.gather(x, _last(comm), comm), _at_last(tuple)),
    "scatter": Case(
        lambda comm, x: (diff.scatter(x.unbind() if comm.rank == _last(comm) else x[0], _last(comm), comm),),
        _each(lambda xs, rank: xs[-1][rank]),
    ),
    "all_to_all": Case(
        lambda comm, x: diff.all_to_all(x.unbind(), group=comm),
        lambda xs: [tuple(x[rank] for x in xs) for rank in range(len(xs))],
    ),
    "all_to_all of shapes": Case(
        _all_to_all_uneven,
        lambda xs: [tuple(_uneven_sent(x, source)[rank] for source, x in enumerate(xs)) for rank in range(len(xs))],
    ),
    "all_to_all_single": Case(
        lambda comm, x: (diff.all_to_all_single(x, group=comm),),
        _each(lambda xs, rank: torch.stack([x[rank] for x in xs])),
    ),
    "all_to_all_single of sizes": Case(_all_to_all_splits, _all_to_all_splits_oracle),
    "sendrecv round the ring": Case(_ring, _each(lambda xs, rank: xs[rank - 1])),
    "sendrecv along an open chain": Case(_open_chain, _open_chain_oracle),
    "sendrecv up to a border": Case(partial(_open_chain, end=mpicoll.PROC_NULL), _open_chain_oracle),
    "send and recv": Case(_pipeline, _pipeline_oracle),
}


def _random(shape: Sequence[int], *seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The same on whatever rank asks."""
    generator = torch.Generator().manual_seed(sum(number * 1009**place for place, number in enumerate(seed)))
    return torch.randn(tuple(shape), generator=generator, dtype=dtype)


def _inputs(size: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [_random((size, 2), rank, dtype=dtype).requires_grad_() for rank in range(size)]


def _loss(outputs: Outputs, rank: int, size: int, *, alone: bool = False) -> Tensor:
    """A real number. Its second derivatives differ in kind from rank to rank: it is linear on odd ranks, or, with
    `alone`, zero on all but the last."""
    if alone and rank < size - 1:
        return sum(0 * output.sum().real for output in outputs)
    total = torch.zeros((), dtype=torch.float64)
    for number, output in enumerate(outputs):
        weights = [_random(output.shape, rank, number, order, dtype=output.dtype) for order in range(2)]
        curved = alone or rank % 2 == 0
        value = weights[0] * output + (weights[1] * output**3 if curved else 0)
        total = total + value.sum().real
    return total


def _direction(rank: int, like: Tensor) -> Tensor:
    return _random(like.shape, rank, 77, dtype=like.dtype)


def _project(gradient: Tensor, rank: int) -> Tensor:
    return (gradient * _direction(rank, gradient)).sum().real


def _oracle(
    case: Case, size: int, dtype: torch.dtype, *, alone: bool
) -> tuple[list[Outputs], list[Tensor], list[Tensor]]:
    """What each rank gets, and the derivatives of first and second order, by one graph."""
    xs = _inputs(size, dtype)
    outputs = case.oracle(xs)
    # Zero, with zero derivatives by whatever the losses don't depend on.
    nothing = sum(0 * (x**2).sum().real for x in xs)
    loss = sum(_loss(mine, rank, size, alone=alone) for rank, mine in enumerate(outputs)) + nothing
    first = torch.autograd.grad(loss, xs, create_graph=True)
    second = torch.autograd.grad(sum(_project(one, rank) for rank, one in enumerate(first)), xs)
    return outputs, [one.detach() for one in first], list(second)


def _close(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    got, want = [one.detach() for one in got], [one.detach() for one in want]
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float64) for name in CASES]
    + [(name, torch.complex128) for name in CASES if name not in ("all_reduce max", "all_reduce min")],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_values_and_derivatives(ranks: Ranks, name: str, dtype: torch.dtype) -> None:
    case = CASES[name]

    def body() -> None:
        comms = Comms()
        for group in ("world", "split", "group"):
            comm = comms[group]
            for alone in (False, True):
                if comm is None:
                    continue
                outputs, first, second = _oracle(case, comm.size, dtype, alone=alone)
                x = _inputs(comm.size, dtype)[comm.rank]
                got = case.run(comm, x)
                _close(got, outputs[comm.rank])
                loss = _loss(got, comm.rank, comm.size, alone=alone)
                (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
                _close([gradient], [first[comm.rank]])
                (again,) = torch.autograd.grad(_project(gradient, comm.rank), x)
                _close([again], [second[comm.rank]])
        comms.free()

    ranks(body)


class Copy(torch.autograd.Function):
    """Every rank's own copy of a tensor that is the same on all ranks. Its gradient is the sum of the ranks'."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return Total.apply(gradient)


class Total(torch.autograd.Function):
    """The sum of what the ranks have, the same on all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return mpicoll.allreduce(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return Copy.apply(gradient)


@pytest.mark.parametrize("name", CASES)
def test_gradcheck(some: Ranks, name: str) -> None:
    """All ranks evaluate one function of the inputs of all, in step: the same perturbation, the same sum of losses.

    The inputs move along a few random directions, which costs less than each element by itself.
    """
    case = CASES[name]

    def body() -> None:
        comm = mpicoll.world()
        start = torch.stack(_inputs(comm.size)).detach()
        directions = _random((*start.shape, 3), 5)

        def function(steps: Tensor) -> Tensor:
            everything = start + directions @ steps
            outputs = case.run(comm, Copy.apply(everything)[comm.rank])
            return Total.apply(_loss(outputs, comm.rank, comm.size))

        steps = torch.zeros(3, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(function, steps)
        incoming = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradgradcheck(function, steps, incoming)

    some(body)


def _strided(x: Tensor) -> Tensor:
    """The same values with gaps between them."""
    return torch.stack([x, torch.full_like(x, float("nan"))], -1)[..., 0]


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_changed_or_shared_whatever_the_strides(ranks: Ranks, name: str) -> None:
    case = CASES[name]

    def body() -> None:
        comm = mpicoll.world()
        kept = []
        for layout in (torch.clone, _strided):
            x = layout(_inputs(comm.size)[comm.rank].detach()).requires_grad_()
            outputs = case.run(comm, x)
            gradients = [layout(_direction(comm.rank, output)) for output in outputs]
            before = [one.detach().clone() for one in (x, *gradients)]
            values = [output.detach().clone() for output in outputs]
            torch.autograd.backward(outputs, gradients)
            after = [one.detach() for one in (x, *gradients)]
            assert all(map(torch.equal, before, after))
            assert all(map(torch.equal, values, outputs))
            assert x._version == 0
            places = [one.untyped_storage().data_ptr() for one in (x, x.grad, outputs[0], *gradients) if one.numel()]
            assert len(set(places)) == len(places)
            kept.append([*values, x.grad])
        _close(*kept)

    ranks(body)


@pytest.mark.parametrize("name", CASES)
def test_other_dtypes(ranks: Ranks, name: str) -> None:
    case = CASES[name]

    def body() -> None:
        comm = mpicoll.world()
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            xs = [x.detach().to(dtype) for x in _inputs(comm.size)]
            wide = [x.double().requires_grad_() for x in xs]
            outputs = case.oracle(wide)
            total = sum(output.sum() for mine in outputs for output in mine) + sum(0 * one.sum() for one in wide)
            (want,) = torch.autograd.grad(total, wide[comm.rank])
            x = xs[comm.rank].requires_grad_()
            got = case.run(comm, x)
            sum(output.sum() for output in got).backward()
            assert {one.dtype for one in (*got, x.grad)} == {dtype}
            slack = 16 * torch.finfo(dtype).eps
            for one, other in zip((*got, x.grad), (*outputs[comm.rank], want), strict=True):
                torch.testing.assert_close(one.detach().double(), other.detach(), rtol=slack, atol=slack)

    ranks(body)


def test_half_precision_is_summed_as_without_gradients(ranks: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        for dtype in (torch.float16, torch.bfloat16):
            x = _random((100,), world.rank).to(dtype).requires_grad_()
            for op in ("sum", "avg", "prod", "max"):
                assert torch.equal(diff.all_reduce(x, op), mpicoll.allreduce(x.detach(), op))

    ranks(body)


def test_gradients_whose_sum_float16_does_not_hold(several: Ranks) -> None:
    """They are as large with the loss scaling of mixed precision."""

    def body() -> None:
        size = mpicoll.world().size
        for op in ("avg", mpicoll.premul_sum(1 / size)):
            x = torch.ones(3, dtype=torch.float16, requires_grad=True)
            diff.all_reduce(x, op).backward(torch.full((3,), 40000.0, dtype=torch.float16))
            assert x.grad is not None
            assert x.grad.tolist() == pytest.approx([40000.0] * 3, rel=1e-3)

    several(body)


@pytest.mark.parametrize("name", CASES)
def test_without_gradients_there_is_no_graph(ranks: Ranks, name: str) -> None:
    case = CASES[name]

    def body() -> None:
        comm = mpicoll.world()
        x = _inputs(comm.size)[comm.rank]
        with torch.no_grad():
            outputs = case.run(comm, x)
        others = case.run(comm, x.detach())
        assert all(one.grad_fn is None and not one.requires_grad for one in (*outputs, *others))
        _close(outputs, others)

    ranks(body)


def test_integers_and_all_ops_without_gradients(ranks: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        x = torch.arange(world.size) + world.rank
        for op in ("sum", "prod", "min", "max", "band", "bor", "lxor"):
            assert torch.equal(diff.all_reduce(x, op), mpicoll.allreduce(x, op))
            assert torch.equal(diff.reduce_scatter_single(x, op), mpicoll.reduce_scatter(x, op))
            want = mpicoll.reduce(x, op, 0)
            assert torch.equal(diff.reduce(x, 0, op), torch.zeros_like(x) if want is None else want)
        assert [one.tolist() for one in diff.all_gather(x > 1)] == [
            (torch.arange(world.size) + rank > 1).tolist() for rank in range(world.size)
        ]
        x = _random((2,), world.rank)
        assert torch.equal(diff.all_reduce(x, torch.maximum), mpicoll.allreduce(x, "max"))

    ranks(body)


def test_torch_ops(ranks: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        ops = torch.distributed.ReduceOp
        x = _random((world.size, 2), world.rank).requires_grad_()
        premul = torch.distributed._make_nccl_premul_sum(0.5)
        for op, name in (
            (ops.SUM, "sum"),
            (ops(ops.SUM), "sum"),
            (ops.AVG, "avg"),
            (ops.PRODUCT, "prod"),
            (ops.MIN, "min"),
            (ops.MAX, "max"),
            (premul, mpicoll.premul_sum(0.5)),
        ):
            results = [diff.all_reduce(x, one) for one in (op, name)]
            gradients = [torch.autograd.grad(result.sum(), x)[0] for result in results]
            _close([results[0], gradients[0]], [results[1], gradients[1]])
        _close([diff.reduce_scatter_single(x, premul)], [0.5 * diff.reduce_scatter_single(x)])
        _close([diff.reduce(x, 0, ops.AVG)], [diff.reduce(x, 0, "avg")])

    ranks(body)


def test_ties_share_the_gradient_as_in_amax(ranks: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        # Ties of all ranks, of those but the first, and of none.
        xs = [torch.tensor([1.0, min(rank, 1), rank], dtype=torch.float64) for rank in range(world.size)]
        for op, oracle in (("max", torch.amax), ("min", torch.amin)):
            together = torch.stack(xs).requires_grad_()
            (3 * world.size * oracle(together, 0)).sum().backward()
            x = xs[world.rank].clone().requires_grad_()
            (3 * diff.all_reduce(x, op)).sum().backward()
            _close([x.grad], [together.grad[world.rank]])

    ranks(body)


def test_product_with_zeros(ranks: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        # No zero, one, two, and all.
        xs = [torch.tensor([2.0, rank, rank // 2, 0], dtype=torch.float64) for rank in range(world.size)]
        together = torch.stack(xs).requires_grad_()
        (first,) = torch.autograd.grad((together.prod(0) ** 2 + together.prod(0)).sum(), together, create_graph=True)
        directions = torch.stack([_direction(rank, x) for rank, x in enumerate(xs)])
        (second,) = torch.autograd.grad((first * directions).sum(), together)
        x = xs[world.rank].clone().requires_grad_()
        result = diff.all_reduce(x, "prod")
        loss = (result**2 + result).sum() / world.size
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        _close([gradient], [first[world.rank]])
        (again,) = torch.autograd.grad(_project(gradient, world.rank), x)
        _close([again], [second[world.rank]])

    ranks(body)


SHAPED = {
    "all_reduce": lambda x: [diff.all_reduce(x)],
    "prod": lambda x: [diff.all_reduce(x, "prod")],
    "max": lambda x: [diff.all_reduce(x, "max")],
    "reduce": lambda x: [diff.reduce(x, 0)],
    "broadcast": lambda x: [diff.broadcast(x, 0)],
    "all_gather": diff.all_gather,
    "all_gather_single": lambda x: [diff.all_gather_single(x)],
    "reduce_scatter": lambda x: [diff.reduce_scatter([x] * mpicoll.world().size)],
    "gather": diff.gather,
    "scatter": lambda x: [diff.scatter(x if mpicoll.world().rank else [x] * mpicoll.world().size)],
    "all_to_all": lambda x: diff.all_to_all([x] * mpicoll.world().size),
    "sendrecv": lambda x: [diff.sendrecv(x, 0, 0) if mpicoll.world().size == 1 else _ring(mpicoll.world(), x)[0]],
}
"""Each turns tensors of ones into ones, or into the number of ranks, or into zeros where there is no result."""


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (2, 0)], ids=str)
@pytest.mark.parametrize("name", SHAPED)
def test_scalars_and_empty_tensors(ranks: Ranks, name: str, shape: tuple[int, ...]) -> None:
    def body() -> None:
        world = mpicoll.world()
        x = torch.ones(shape, dtype=torch.float64, requires_grad=True)
        outputs = SHAPED[name](x)
        count = world.size if name in ("all_gather", "gather", "all_to_all") else 1
        joined = (world.size * (shape or (1,))[0], *shape[1:])
        want = joined if name == "all_gather_single" else shape
        assert [output.shape for output in outputs] == [want] * count
        sum(output.sum() for output in outputs).backward()
        assert x.grad.shape == shape
        if shape == ():
            total = mpicoll.allreduce(x.grad)
            value = sum(output.sum() for output in outputs).detach()
            # The functions are homogeneous, the product of degree P.
            degree = world.size if name == "prod" else 1
            _close([total], [degree * mpicoll.allreduce(value)])

    ranks(body)


def test_stages_of_a_pipeline(several: Ranks) -> None:
    """Each rank has one layer; messages are so large that they wait for their receivers; all forwards come first."""
    width, rows, batches = 100, 200, 3

    def layer(rank: int) -> torch.nn.Module:
        made = torch.nn.Linear(width, width, dtype=torch.float64)
        with torch.no_grad():
            made.weight.copy_(_random((width, width), rank) / width**0.5)
            made.bias.copy_(_random((width,), rank, 1))
        return torch.nn.Sequential(made, torch.nn.Tanh())

    def body() -> None:
        world = mpicoll.world()
        rank, last = world.rank, world.size - 1
        inputs = [_random((rows, width), 50 + number) for number in range(batches)]
        mine = layer(rank)
        losses = []
        for x in inputs:
            value = mine(x if rank == 0 else diff.recv(torch.empty_like(x, requires_grad=True), rank - 1, 7))
            losses.append(value.square().mean() if rank == last else diff.send(value, rank + 1, 7))
        for loss in losses:
            loss.backward()
        layers = [layer(one) for one in range(world.size)]
        whole = torch.nn.Sequential(*layers)
        wanted = [whole(x).square().mean() for x in inputs]
        sum(wanted).backward()
        if rank == last:
            _close(losses, wanted)
        _close([one.grad for one in mine.parameters()], [one.grad for one in layers[rank].parameters()])

    several(body)


def test_a_message_to_oneself(ranks: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        x = _random((3,), world.rank).requires_grad_()
        result = diff.sendrecv(x, world.rank, world.rank)
        (result * (world.rank + 2)).sum().backward()
        _close([result, x.grad], [x, torch.full_like(x, world.rank + 2)])
        alone = diff.sendrecv(x, None, None, shape=(2, 2))
        assert torch.equal(alone, torch.zeros((2, 2), dtype=x.dtype))

    ranks(body)


def test_a_message_beyond_a_border(ranks: Ranks) -> None:
    def body() -> None:
        x = _random((3,), mpicoll.world().rank).requires_grad_()
        result = diff.recv(x, mpicoll.PROC_NULL) + diff.send(x, mpicoll.PROC_NULL)
        result.sum().backward()
        _close([result, x.grad], [torch.zeros_like(x), torch.zeros_like(x)])

    ranks(body)


def _refused(kind: type[Exception], words: Sequence[str], call: Callable[[], Any]) -> None:
    """`call` raises `kind` with a message that holds `words` and the rank; nothing was sent."""
    world = mpicoll.world()
    with pytest.raises(kind) as caught:
        call()
    assert isinstance(caught.value, mpicoll.ArgumentError)
    for word in (f"rank {world.rank}", *words):
        assert word in str(caught.value)
    assert mpicoll.allreduce(world.rank) == sum(range(world.size))


OF_A_TENSOR: dict[str, Callable[[Any], Any]] = {
    "all_reduce": diff.all_reduce,
    "reduce": partial(diff.reduce, dst=0),
    "broadcast": partial(diff.broadcast, src=0),
    "all_gather": diff.all_gather,
    "all_gather_single": diff.all_gather_single,
    "reduce_scatter_single": diff.reduce_scatter_single,
    "gather": diff.gather,
    "all_to_all_single": diff.all_to_all_single,
    "sendrecv": partial(diff.sendrecv, dst=0, src=0),
    "send": partial(diff.send, dst=0),
    "recv": partial(diff.recv, src=0),
}


def test_wrong_arguments(some: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        rank, size = world.rank, world.size
        x = torch.zeros(size, 2, requires_grad=True)
        parts = list(x.unbind())
        no_gradient = mpicoll.ArgumentError, ["op", "not differentiable"]
        checks: list[tuple[type[Exception], list[str], Callable[[], Any]]] = [
            (*no_gradient, lambda: diff.all_reduce(x, torch.maximum)),
            (*no_gradient, lambda: diff.all_reduce(x, torch.distributed.ReduceOp.BAND)),
            (no_gradient[0], ["all_reduce", "'prod'"], lambda: diff.reduce(x, 0, "prod")),
            (no_gradient[0], ["all_reduce", "'max'"], lambda: diff.reduce_scatter(parts, "max")),
            (mpicoll.DTypeError, ["'median'"], lambda: diff.all_reduce(x.detach(), "median")),
            (mpicoll.DTypeError, ["avg", "int64"], lambda: diff.all_reduce(x.detach().long(), "avg")),
            (
                mpicoll.RankError,
                [f"broadcast: src must be a rank in [0, {size}), got {size}"],
                lambda: diff.broadcast(x, size),
            ),
            (mpicoll.RankError, ["broadcast", "None"], lambda: diff.broadcast(x, None)),
            (mpicoll.RankError, ["gather: dst", "-1"], lambda: diff.gather(x, -1)),
            (mpicoll.RankError, ["recv", "None"], lambda: diff.recv(x, None)),
            (mpicoll.RankError, ["send: dst", str(size), "to send nothing"], lambda: diff.send(x, size)),
            (mpicoll.RankError, ["sendrecv: src", "to receive nothing"], lambda: diff.sendrecv(x, rank, -1)),
            (mpicoll.RankError, ["tag", "-1"], lambda: diff.sendrecv(x, 0, 0, -1)),
            (mpicoll.RankError, ["irecv"], lambda: diff.send(x, rank)),
            (mpicoll.ShapeError, ["all_gather_single", "2"], lambda: diff.all_gather_single(x, 2)),
            (mpicoll.ShapeError, ["counts"], lambda: diff.all_gather(x, sizes=[size + 1] * size)),
            (mpicoll.ShapeError, ["counts"], lambda: diff.reduce_scatter_single(x, sizes=[2] * size)),
            (mpicoll.ShapeError, [str(size + 1)], lambda: diff.reduce_scatter([*parts, parts[0]])),
            (mpicoll.ShapeError, [str(size + 1)], lambda: diff.scatter([*parts, parts[0]], rank)),
            (mpicoll.DTypeError, ["list", "Tensor"], lambda: diff.scatter(x, rank)),
            (mpicoll.DTypeError, ["list", "NoneType"], lambda: diff.scatter(None, rank)),
            (mpicoll.DTypeError, ["list of tensors"], lambda: diff.all_to_all([1.0] * size)),
            (mpicoll.ShapeError, ["counts"], lambda: diff.all_to_all(parts, [(3,)] * (size + 1))),
            (mpicoll.ShapeError, ["both"], lambda: diff.all_to_all_single(x, [1] * size)),
            (
                mpicoll.ShapeError,
                [str(size + 1)],
                lambda: diff.all_to_all_single(x, [1] * size, [2] + [1] * (size - 1)),
            ),
        ]
        for name, function in OF_A_TENSOR.items():
            for wrong in ([1.0], x.detach().numpy(), None):
                words = [f"{name}: pass a torch tensor, got {type(wrong).__name__}"]
                checks.append((mpicoll.DTypeError, words, partial(function, wrong)))
        sparse = torch.eye(2).to_sparse()
        for name, call in {
            **{name: partial(function, sparse) for name, function in OF_A_TENSOR.items()},
            "reduce_scatter": partial(diff.reduce_scatter, [sparse] * size),
            "scatter": partial(diff.scatter, [sparse] * size, rank),
            "all_to_all": partial(diff.all_to_all, [sparse] * size),
        }.items():
            checks.append((mpicoll.DTypeError, [f"{name}: pass dense tensors, got a sparse_coo one"], call))
        for name in ("all_gather_single", "reduce_scatter_single"):
            for dim in (None, 1.0, "0"):
                words = [f"{name}: dim", repr(dim)]
                checks.append((mpicoll.ShapeError, words, partial(getattr(diff, name), x, dim=dim)))
        if size > 1:
            mixed = [parts[0].double(), *parts[1:]]
            uneven = [parts[0][:1], *parts[1:]]
            other = (rank + 1) % size
            checks += [
                (mpicoll.DTypeError, ["float64", "float32"], lambda: diff.all_to_all(mixed)),
                (mpicoll.ShapeError, ["(1,)", "output_shapes"], lambda: diff.all_to_all(uneven)),
                (mpicoll.ShapeError, ["(1,)", "scatter"], lambda: diff.scatter(uneven, rank)),
                (mpicoll.DTypeError, ["scatter", "list"], lambda: diff.scatter(parts, other)),
            ]
        for check in checks:
            _refused(*check)

    some(body)


@pytest.fixture
def process_group() -> Iterator[None]:
    """The default process group, for one test: the others are about communicators."""
    torch.distributed.init_process_group("mpicoll")
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.mpi
def test_process_groups_and_global_ranks(process_group: None) -> None:
    world = mpicoll.world()
    # All but rank 0, if there are others.
    members = list(range(1, world.size)) or [0]
    group = torch.distributed.new_group(members)
    x = _inputs(world.size)[world.rank]
    assert torch.equal(diff.broadcast(x, members[-1]), _inputs(world.size)[members[-1]])
    assert torch.equal(diff.broadcast(x, members[-1], torch.distributed.group.WORLD), _inputs(world.size)[members[-1]])
    if world.rank not in members:
        with pytest.raises(mpicoll.CommunicatorError):
            diff.broadcast(x, members[-1], group)
        return
    result = diff.broadcast(x, members[-1], group)
    result.sum().backward()
    mine = world.rank == members[-1]
    _close([result, x.grad], [_inputs(world.size)[members[-1]], torch.full_like(x, len(members) if mine else 0)])
    right, left = (members[(members.index(world.rank) + step) % len(members)] for step in (1, -1))
    assert torch.equal(diff.sendrecv(x, right, left, group=group), _inputs(world.size)[left])
    gathered = diff.gather(x, members[0], group)
    assert torch.equal(gathered[-1], _inputs(world.size)[members[-1]] if world.rank == members[0] else 0 * x)
    if world.size > 1:
        for call in (diff.broadcast, diff.reduce, diff.gather, diff.send, diff.recv):
            with pytest.raises(mpicoll.RankError, match="global rank of a member"):
                call(x, 0, group=group)


def test_ranks_that_are_threads_run_their_own_backward_passes() -> None:
    """On devices torch would run those of all threads on one thread, where they would wait for each other."""

    def main() -> tuple[bool, bool]:
        ran: list[threading.Thread] = []
        x = torch.ones(3, requires_grad=True)
        x.register_hook(lambda grad: ran.append(threading.current_thread()))
        diff.all_reduce(x).sum().backward()
        return torch._C._is_multithreading_enabled(), ran == [threading.current_thread()]

    assert mpicoll.run_local(main, 2) == [(False, True)] * 2
    assert torch._C._is_multithreading_enabled()


def _differentiate(
    run: Callable[[], Sequence[Tensor]], xs: Sequence[Tensor], loss: Callable[[list[Tensor]], Tensor]
) -> Any:
    """The derivatives of the first three orders, each of the loss of the previous ones."""
    found = [list(run())]
    for _ in range(3):
        found.append(list(torch.autograd.grad(loss(found[-1]), xs, create_graph=True)))
    return found


THIRD_ORDER: dict[str, tuple[Callable[[mpicoll.Communicator, Tensor], Tensor], Callable[[Sequence[Tensor]], Any]]] = {
    "sum": (lambda comm, x: diff.all_reduce(x, group=comm), lambda xs: [_sum(xs)] * len(xs)),
    "prod": (lambda comm, x: diff.all_reduce(x, "prod", comm), lambda xs: [torch.stack([*xs]).prod(0)] * len(xs)),
    "max": (lambda comm, x: diff.all_reduce(x, "max", comm), lambda xs: [torch.stack([*xs]).amax(0)] * len(xs)),
    "nothing is sent": (
        lambda comm, x: torch.cat(
            diff.all_to_all(
                [x[: comm.rank] for _ in range(comm.size)], [(min(source, 2),) for source in range(comm.size)], comm
            )
        ),
        lambda xs: [torch.cat([x[:source] for source, x in enumerate(xs)])] * len(xs),
    ),
}


@pytest.mark.parametrize("name", THIRD_ORDER)
def test_losses_of_different_degree_on_the_ranks(several: Ranks, name: str) -> None:
    """Every rank runs the same collectives, although all derivatives of the first one are constant."""
    collective, oracle = THIRD_ORDER[name]

    def loss(of_rank: Tensor, rank: int) -> Tensor:
        return (of_rank ** (4 if rank else 1)).sum()

    def body() -> None:
        comm = mpicoll.world()
        x = _random((2,), comm.rank).requires_grad_()
        own = _differentiate(lambda: [collective(comm, x) + x.sum()], [x], lambda of: loss(of[0], comm.rank))
        xs = [_random((2,), rank).requires_grad_() for rank in range(comm.size)]
        expected = _differentiate(
            lambda: [y + one.sum() for y, one in zip(oracle(xs), xs, strict=True)],
            xs,
            lambda of: _sum([loss(y, rank) for rank, y in enumerate(of)]),
        )
        for (found,), of_ranks in zip(own, expected, strict=True):
            _close([found], [of_ranks[comm.rank]])

    several(body)
