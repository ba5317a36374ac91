"""Megatron's pairs of collectives against the same computation in one process, which plays all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from support.ranks import Comms, Ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import mpicoll
from mpicoll.parallel import mappings


class Case(NamedTuple):
    """One function. ``run(x, comm)`` calls it on every rank, and ``oracle(inputs)`` gives what each rank gets.

    `part` says what a rank passes of a tensor of shape (2P, 3, 2P); None means the whole, the same on all ranks.
    `replicated` means that all get the same. `alias`: its result shares the memory of its input.
    """

    run: Callable[[Tensor, mpicoll.Communicator], Tensor]
    oracle: Callable[[Sequence[Tensor]], list[Tensor]]
    part: Callable[[Tensor, int, int], Tensor] | None = None
    replicated: bool = False
    alias: bool = False


def _shape(size: int) -> tuple[int, ...]:
    return (2 * size, 3, 2 * size)


def _uneven(dim: int, size: int) -> list[int]:
    """Extents of parts, some of them zero, that add up to those of `_shape`."""
    if size == 1:
        return [3 if dim == 1 else 2]
    return [1] + [0] * (size - 2) + [2] if dim == 1 else [0] + [2] * (size - 2) + [4]


def _sent(rank: int, size: int) -> list[int]:
    """How many of its 2P rows a rank sends to each: not what it gets from them."""
    rows = [(rank + 2 * other) % 3 for other in range(size)]
    rows[rank] += 2 * size - sum(rows)
    return rows


def _received(rank: int, size: int) -> list[int]:
    return [_sent(other, size)[rank] for other in range(size)]


def _whole(x: Tensor, rank: int, size: int) -> Tensor:
    return x


def _part(dim: int, *, even: bool = True) -> Callable[[Tensor, int, int], Tensor]:
    return lambda x, rank, size: (x.tensor_split(size, dim) if even else x.split(_uneven(dim, size), dim))[rank]


def _cut(dim: int, *, even: bool = True) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    return lambda xs: [_part(dim, even=even)(x, rank, len(xs)) for rank, x in enumerate(xs)]


def _joined(dim: int) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    return lambda xs: [torch.cat(list(xs), dim)] * len(xs)


def _added(xs: Sequence[Tensor]) -> list[Tensor]:
    return [torch.stack(list(xs)).sum(0)] * len(xs)


def _all_to_all(xs: Sequence[Tensor], *, even: bool = True) -> list[Tensor]:
    size = len(xs)
    blocks = [x.tensor_split(size) if even else x.split(_sent(rank, size)) for rank, x in enumerate(xs)]
    return [torch.cat([blocks[source][rank] for source in range(size)]) for rank in range(size)]


def _to_hidden(xs: Sequence[Tensor]) -> list[Tensor]:
    return list(torch.cat([x.flatten(0, -2) for x in xs]).tensor_split(len(xs), 1))


def _to_tokens(xs: Sequence[Tensor]) -> list[Tensor]:
    return list(torch.cat([x.flatten(0, -2) for x in xs], 1).tensor_split(len(xs)))


def _same(xs: Sequence[Tensor]) -> list[Tensor]:
    return list(xs)


CASES = {
    "copy_to_tensor_model_parallel_region": Case(mappings.copy_to_tensor_model_parallel_region, _same, alias=True),
    "reduce_from_tensor_model_parallel_region": Case(
        mappings.reduce_from_tensor_model_parallel_region, _added, _whole, replicated=True
    ),
    "scatter_to_tensor_model_parallel_region": Case(mappings.scatter_to_tensor_model_parallel_region, _cut(-1)),
    "gather_from_tensor_model_parallel_region": Case(
        mappings.gather_from_tensor_model_parallel_region, _joined(-1), _part(-1), replicated=True
    ),
    "all_gather_last_dim_from_tensor_parallel_region": Case(
        mappings.all_gather_last_dim_from_tensor_parallel_region, _joined(-1), _part(-1)
    ),
    "reduce_scatter_last_dim_to_tensor_parallel_region": Case(
        mappings.reduce_scatter_last_dim_to_tensor_parallel_region, lambda xs: _cut(-1)(_added(xs)), _whole
    ),
    "scatter_to_sequence_parallel_region": Case(mappings.scatter_to_sequence_parallel_region, _cut(0)),
    "gather_from_sequence_parallel_region": Case(
        lambda x, comm: mappings.gather_from_sequence_parallel_region(x, group=comm), _joined(0), _part(0)
    ),
    "gather_from_sequence_parallel_region, replicated": Case(
        lambda x, comm: mappings.gather_from_sequence_parallel_region(x, False, comm),
        _joined(0),
        _part(0),
        replicated=True,
    ),
    "gather_from_sequence_parallel_region, uneven": Case(
        lambda x, comm: mappings.gather_from_sequence_parallel_region(x, True, comm, _uneven(0, comm.size)),
        _joined(0),
        _part(0, even=False),
    ),
    "reduce_scatter_to_sequence_parallel_region": Case(
        mappings.reduce_scatter_to_sequence_parallel_region, lambda xs: _cut(0)(_added(xs)), _whole
    ),
    "reduce_scatter_to_sequence_parallel_region, uneven": Case(
        lambda x, comm: mappings.reduce_scatter_to_sequence_parallel_region(x, comm, _uneven(0, comm.size)),
        lambda xs: _cut(0, even=False)(_added(xs)),
        _whole,
    ),
    "all_to_all": Case(lambda x, comm: mappings.all_to_all(x, group=comm), _all_to_all, _whole),
    "all_to_all, uneven": Case(
        lambda x, comm: mappings.all_to_all(x, _received(comm.rank, comm.size), _sent(comm.rank, comm.size), comm),
        lambda xs: _all_to_all(xs, even=False),
        _whole,
    ),
    "all_to_all_sp2hp": Case(mappings.all_to_all_sp2hp, _to_hidden, _part(0)),
    "all_to_all_hp2sp": Case(mappings.all_to_all_hp2sp, _to_tokens, _part(-1)),
    "split along 1, uneven": Case(
        lambda x, comm: mappings.split(x, 1, comm, _uneven(1, comm.size)), _cut(1, even=False)
    ),
    "split along -3": Case(lambda x, comm: mappings.split(x, -3, comm), _cut(0)),
    "gather along 0, uneven": Case(
        lambda x, comm: mappings.gather(x, 0, comm, _uneven(0, comm.size)),
        _joined(0),
        _part(0, even=False),
        replicated=True,
    ),
    "gather along 1": Case(lambda x, comm: mappings.gather(x, 1, comm), _joined(1), _whole, replicated=True),
    "gather along -1, uneven": Case(
        lambda x, comm: mappings.gather(x, -1, comm, _uneven(2, comm.size)),
        _joined(-1),
        _part(2, even=False),
        replicated=True,
    ),
}


def _random(shape: Sequence[int], *seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The same on whatever rank asks."""
    generator = torch.Generator().manual_seed(sum(number * 1009**place for place, number in enumerate(seed)))
    return torch.randn(tuple(shape), generator=generator, dtype=dtype)


def _inner(x: Tensor, *seed: int) -> Tensor:
    """A curved function, and a different one for each seed."""
    first, second = (_random(x.shape, *seed, order, dtype=x.dtype) for order in range(2))
    return first * x + second * x * x


def _ending(x: Tensor, *seed: int) -> Tensor:
    """Three real numbers of a tensor of any shape, by another curved function for each seed."""
    weights = _random((3, x.numel()), *seed, 7, dtype=x.dtype)
    flat = x.reshape(-1)
    return (weights @ (flat + flat * flat)).real / 8


SHARED = 99
"""The seed of what all ranks compute alike."""


def _once(case: Case, comm: mpicoll.Communicator, x: Tensor) -> Tensor:
    """From the replicated `x` to a replicated result, through what only this rank computes on both sides."""
    result = case.run(_input(case, comm, x), comm)
    return _end(case, comm, result)


def _twice(case: Case, comm: mpicoll.Communicator, x: Tensor) -> Tensor:
    """One input goes into several branches, and one gradient, the very same tensor, comes out of two."""
    value = _input(case, comm, x)
    branches = case.run(value, comm) + case.run(value * value, comm)
    again = case.run(value, comm)
    beside = _ending(value, SHARED if case.part is None else comm.rank, 3)
    if case.part is not None:
        beside = mappings.reduce_from_tensor_model_parallel_region(beside, comm)
    return _end(case, comm, branches) + _end(case, comm, again * again) + beside


def _input(case: Case, comm: mpicoll.Communicator, x: Tensor) -> Tensor:
    if case.part is None:
        return _inner(x, SHARED)
    copy = mappings.copy_to_tensor_model_parallel_region(x, comm)
    return _inner(case.part(copy, comm.rank, comm.size), comm.rank)


def _end(case: Case, comm: mpicoll.Communicator, result: Tensor) -> Tensor:
    if case.replicated:
        return _ending(result, SHARED)
    return mappings.reduce_from_tensor_model_parallel_region(_ending(result, comm.rank), comm)


def _inputs(case: Case, size: int, x: Tensor) -> list[Tensor]:
    """What `_input` is on each rank."""
    if case.part is None:
        return [_inner(x, SHARED)] * size
    return [_inner(case.part(x, rank, size), rank) for rank in range(size)]


def _oracle_end(case: Case, results: Sequence[Tensor]) -> Tensor:
    if case.replicated:
        return _ending(results[0], SHARED)
    return sum(_ending(result, rank) for rank, result in enumerate(results))


def _twice_alone(case: Case, size: int, x: Tensor) -> Tensor:
    values = _inputs(case, size, x)
    once = case.oracle(values)
    branches = [one + other for one, other in zip(once, case.oracle([x * x for x in values]), strict=True)]
    if case.part is None:
        beside = _ending(values[0], SHARED, 3)
    else:
        beside = sum(_ending(value, rank, 3) for rank, value in enumerate(values))
    return _oracle_end(case, branches) + _oracle_end(case, [one * one for one in once]) + beside


def _derivatives(x: Tensor, result: Tensor) -> list[Tensor]:
    """Of the first and the second order, of a curved function of `result`."""
    loss = (result**3 + _random((3,), 4) * result).sum()
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    (second,) = torch.autograd.grad((first * _random(x.shape, 5, dtype=x.dtype)).sum().real, x)
    return [first.detach(), second]


def _close(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    for one, other in zip(got, want, strict=True):
        scale = max(1.0, other.detach().abs().max().item()) if other.numel() else 1.0
        torch.testing.assert_close(one.detach() / scale, other.detach() / scale, rtol=0, atol=1e-11)


def _compare(case: Case, comm: mpicoll.Communicator, dtype: torch.dtype) -> None:
    x = (_random(_shape(comm.size), 6, dtype=dtype) / 2).requires_grad_()
    inputs = _inputs(case, comm.size, x)
    _close([case.run(inputs[comm.rank], comm)], [case.oracle(inputs)[comm.rank]])
    got, want = _twice(case, comm, x), _twice_alone(case, comm.size, x)
    _close([got, *_derivatives(x, got)], [want, *_derivatives(x, want)])


@pytest.mark.parametrize("name", CASES)
def test_values_and_derivatives(ranks: Ranks, name: str) -> None:
    """With one input that feeds several branches, and one gradient that comes from several."""

    def body() -> None:
        comms = Comms()
        for group in ("world", "split", "group"):
            comm = comms[group]
            if comm is not None:
                _compare(CASES[name], comm, torch.float64)
        comms.free()

    ranks(body)


@pytest.mark.parametrize("name", CASES)
def test_complex_numbers(some_more: Ranks, name: str) -> None:
    some_more(lambda: _compare(CASES[name], mpicoll.world(), torch.complex128))


@pytest.mark.parametrize("name", CASES)
def test_gradcheck(several: Ranks, name: str) -> None:
    """All ranks evaluate one function in step, with the same perturbations: the input moves along a few directions."""
    case = CASES[name]

    def body() -> None:
        comm = mpicoll.world()
        start = _random(_shape(comm.size), 6) / 2
        directions = _random((*start.shape, 2), 8) / 4

        def function(steps: Tensor) -> Tensor:
            return _once(case, comm, start + directions @ steps)

        steps = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(function, steps)
        incoming = _random((3,), 9).requires_grad_()
        assert torch.autograd.gradgradcheck(function, steps, incoming)

    several(body)


def _strided(x: Tensor) -> Tensor:
    """The same values with gaps between them, and the axes in another order in memory."""
    axes = list(range(x.dim()))[::-1]
    return torch.stack([x.permute(axes), torch.full_like(x.permute(axes), float("nan"))], -1)[..., 0].permute(axes)


def _own(case: Case, comm: mpicoll.Communicator, dtype: torch.dtype = torch.float64) -> Tensor:
    """What this rank passes: random numbers, the same on all ranks only where the function wants that."""
    if case.part is None:
        return _random(_shape(comm.size), 10).to(dtype)
    return case.part(_random(_shape(comm.size), comm.rank, 11), comm.rank, comm.size).to(dtype).clone()


def _gradient(case: Case, comm: mpicoll.Communicator, like: Tensor) -> Tensor:
    return _random(like.shape, *(() if case.replicated else (comm.rank,)), 12).to(like.dtype)


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_changed_whatever_the_strides(some: Ranks, name: str) -> None:
    case = CASES[name]

    def body() -> None:
        comm = mpicoll.world()
        kept = []
        for layout in (torch.clone, _strided):
            x = layout(_own(case, comm)).requires_grad_()
            result = case.run(x, comm)
            incoming = layout(_gradient(case, comm, result))
            before = [one.detach().clone() for one in (x, incoming, result)]
            result.backward(incoming)
            assert all(
                torch.equal(one, other.detach()) for one, other in zip(before, (x, incoming, result), strict=True)
            )
            assert x._version == incoming._version == 0
            if comm.size > 1 and x.numel():
                assert x.grad.untyped_storage().data_ptr() != incoming.untyped_storage().data_ptr()
                assert (result.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()) == case.alias
                assert case.alias or result.is_contiguous()
            # A gradient without memory of its own, as that of a sum.
            (ones,) = torch.autograd.grad(case.run(x, comm).sum(), x)
            kept.append([result, x.grad, ones])
        _close(*kept)

    some(body)


@pytest.mark.parametrize("name", CASES)
def test_results_may_be_changed_in_place(several: Ranks, name: str) -> None:
    """Or torch says that they may not: nothing goes wrong in silence."""
    case = CASES[name]

    def body() -> None:
        comm = mpicoll.world()
        x = _own(case, comm).requires_grad_()
        before = x.detach().clone()
        value = x * 1
        result = case.run(value, comm)
        if case.alias:
            with pytest.raises(RuntimeError, match="modified inplace"):
                result.mul_(2)
            value.mul_(2)
            with pytest.raises(RuntimeError, match="modified inplace"):
                result.sum().backward()
            return
        want = case.run(x, comm)
        result.mul_(2)
        _close([result, value, x], [2 * want, before, before])
        incoming = _gradient(case, comm, result)
        (got,) = torch.autograd.grad(result, x, incoming)
        _close([got], torch.autograd.grad(want, x, 2 * incoming))

    several(body)


@pytest.mark.parametrize("name", CASES)
def test_dtypes(some: Ranks, name: str) -> None:
    case = CASES[name]

    def body() -> None:
        comm = mpicoll.world()
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            x = _own(case, comm, dtype).requires_grad_()
            wide = x.detach().double().requires_grad_()
            result, want = case.run(x, comm), case.run(wide, comm)
            incoming = _gradient(case, comm, result)
            result.backward(incoming)
            want.backward(incoming.double())
            assert result.dtype == x.grad.dtype == dtype
            # Summed in a wider dtype, and rounded once.
            slack = torch.finfo(dtype).eps * (1 if dtype != torch.float32 else 4)
            for one, other in ((result, want), (x.grad, wide.grad)):
                torch.testing.assert_close(one.detach().double(), other.detach(), rtol=slack, atol=slack / 4)
        for dtype in (torch.int64, torch.uint8, torch.bool):
            if dtype == torch.bool and "reduce" in name:
                continue
            x = (_own(case, comm).abs() * 3).to(dtype)
            result = case.run(x, comm)
            assert result.dtype == dtype
            assert not result.requires_grad
            assert torch.equal(result.double(), case.run(x.double(), comm))

    some(body)


@pytest.mark.parametrize("name", CASES)
def test_without_gradients_there_is_no_graph(some: Ranks, name: str) -> None:
    case = CASES[name]

    def body() -> None:
        comm = mpicoll.world()
        x = _own(case, comm).requires_grad_()
        with torch.no_grad():
            results = [case.run(x, comm)]
        results.append(case.run(x.detach(), comm))
        with torch.inference_mode():
            results.append(case.run(x.detach(), comm))
        assert all(one.grad_fn is None for one in results)
        assert comm.size == 1 or case.alias or not any(one.requires_grad for one in results)
        want = case.run(x, comm)
        _close(results, [want] * 3)
        _close([case.run(torch.nn.Parameter(x.detach()), comm)], [want])

    some(body)


def test_a_group_of_one_returns_its_input() -> None:
    for name, case in CASES.items():
        x = torch.ones((3, 2) if "hp" in name else (2, 3, 2), requires_grad=True)
        assert case.run(x, mpicoll.world()) is x
    x = torch.arange(24).view(2, 3, 4)
    for function in (mappings.all_to_all_sp2hp, mappings.all_to_all_hp2sp):
        assert torch.equal(function(x), x.view(6, 4))


ALONG = {
    "scatter_to_tensor_model_parallel_region": -1,
    "gather_from_tensor_model_parallel_region": -1,
    "all_gather_last_dim_from_tensor_parallel_region": -1,
    "reduce_scatter_last_dim_to_tensor_parallel_region": -1,
    "scatter_to_sequence_parallel_region": 0,
    "gather_from_sequence_parallel_region": 0,
    "reduce_scatter_to_sequence_parallel_region": 0,
    "all_to_all": 0,
    "all_to_all_sp2hp": -1,
    "all_to_all_hp2sp": 0,
}
"""The dimension that a function divides or joins."""

ANY = ("copy_to_tensor_model_parallel_region", "reduce_from_tensor_model_parallel_region")


@pytest.mark.parametrize("name", [*ALONG, *ANY])
def test_vectors_and_empty_tensors(ranks: Ranks, name: str) -> None:
    """And matrices of one row, and where they mean something single numbers."""
    case = CASES[name]

    def body() -> None:
        comm = mpicoll.world()
        size = comm.size
        shapes = [(1, size), (0, size), (size, 0), (2, 1, 3, size), (2, 0, 3, size)]
        if "hp" in name:
            shapes = shapes[:3]
        else:
            shapes += [(size,), (0,)]
        if ALONG.get(name) == 0:
            shapes = [shape[::-1] for shape in shapes]
        if name in ANY:
            shapes.append(())
        for shape in shapes:
            xs = [_random(shape, 0 if case.part is None else rank, 13).requires_grad_() for rank in range(size)]
            x = xs[comm.rank]
            result = case.run(x, comm)
            _close([result], [case.oracle(xs)[comm.rank]])
            result.sum().backward()
            assert x.grad.shape == shape

    ranks(body)


def _refused(kind: type[Exception], words: Sequence[str], call: Callable[..., object], *args: object) -> None:
    """The call raises `kind` with a message that holds `words` and the rank; nothing was sent."""
    world = mpicoll.world()
    with pytest.raises(kind) as caught:
        call(*args)
    assert isinstance(caught.value, mpicoll.ArgumentError)
    for word in words:
        assert word in str(caught.value)
    assert mpicoll.allreduce(world.rank) == sum(range(world.size))


def test_wrong_arguments(some: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        rank, size = world.rank, world.size
        here = f"(rank {rank} of {size})"
        number, x = torch.ones(()), torch.ones(size, 3, size)
        split, gather, all_to_all = mappings.split, mappings.gather, mappings.all_to_all
        for name in (*ALONG, *ANY):
            _refused(mpicoll.DTypeError, [name, "ndarray", here], CASES[name].run, x.numpy(), world)
        for name in ALONG:
            _refused(mpicoll.ShapeError, [name, "()", "out of range", here], CASES[name].run, number, world)
        for function in (split, gather):
            for dim in (3, -4, None, 1.0):
                words = [function.__name__, f"dimension {dim}", str((size, 3, size)), here]
                _refused(mpicoll.ShapeError, words, function, x, dim)
            for sizes in ([1] * (size + 1), [2 * size - 1] + [-1] * size, [-size] * size, [0.5] * size, 3):
                words = [function.__name__, "sizes", f"{size} integers", repr(sizes), here]
                _refused(mpicoll.ShapeError, words, function, x, 0, None, sizes)
        words = ["split", f"adds up to {2 * size}", "dimension 0", f"extent {size}", here]
        _refused(mpicoll.ShapeError, words, split, x, 0, None, [2] * size)
        words = ["gather", "dimension 1", "extent 3", f"has {4 + rank}", here]
        _refused(mpicoll.ShapeError, words, gather, x, 1, None, range(4, 4 + size))
        ones = [1] * size
        _refused(mpicoll.ShapeError, ["all_to_all", "both", here], all_to_all, x, ones)
        _refused(mpicoll.ShapeError, ["all_to_all", "both", here], all_to_all, x, None, ones)
        for wrong in ([*ones, 1], ["1"] * size):
            words = ["all_to_all", f"{size} integers", here]
            _refused(mpicoll.ShapeError, ["output_split_sizes", *words], all_to_all, x, wrong, ones)
            _refused(mpicoll.ShapeError, ["input_split_sizes", *words], all_to_all, x, ones, wrong)
        words = ["all_to_all", "input_split_sizes", f"adds up to {2 * size}", f"extent {size}", here]
        _refused(mpicoll.ShapeError, words, all_to_all, x, ones, [2] * size)
        expected = [1 + (other == rank) for other in range(size)]
        words = ["all_to_all", "sends itself 1 ", "expects 2", here]
        _refused(mpicoll.ShapeError, words, all_to_all, x, expected, ones)

    some(body)


@pytest.mark.mpi
@pytest.mark.parametrize("name", [*ALONG, *ANY])
def test_process_groups(default_group: None, name: str) -> None:
    """By default the functions work in torch's process group; a mesh of one dimension will do as well."""
    case = CASES[name]
    world = mpicoll.world()
    mesh = init_device_mesh("cpu", (world.size,))
    x = _own(case, world).requires_grad_()
    want = case.run(x, world)
    incoming = _gradient(case, world, want)
    (gradient,) = torch.autograd.grad(want, x, incoming)
    for group in (None, torch.distributed.group.WORLD, mesh):
        arguments: Any = group
        result = case.run(x, arguments)
        _close([result, *torch.autograd.grad(result, x, incoming)], [want, gradient])


@pytest.mark.parametrize(
    ("name", "dim", "remedy"),
    [
        ("scatter_to_tensor_model_parallel_region", 2, "pad it"),
        ("reduce_scatter_last_dim_to_tensor_parallel_region", 2, "pad it"),
        ("scatter_to_sequence_parallel_region", 0, "pad it"),
        ("reduce_scatter_to_sequence_parallel_region", 0, "pad it"),
        ("all_to_all", 0, "input_split_sizes"),
        ("all_to_all_sp2hp", 2, "pad it"),
        ("all_to_all_hp2sp", 0, "pad the tokens"),
        ("split along -3", 0, "sizes"),
    ],
)
def test_a_dimension_that_does_not_divide_is_named(several: Ranks, name: str, dim: int, remedy: str) -> None:
    def body() -> None:
        world = mpicoll.world()
        size = world.size
        x = torch.ones(size + 1, 1, 2 * size + 1)
        words = [
            name.split(maxsplit=1)[0],
            f"dimension {dim} ",
            f"extent {x.shape[dim]}",
            f"{size} ranks",
            remedy,
            f"(rank {world.rank} of {size})",
        ]
        _refused(mpicoll.ShapeError, words, CASES[name].run, x, world)

    several(body)
