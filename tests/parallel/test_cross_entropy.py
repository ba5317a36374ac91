"""Cross entropy over a divided vocabulary against torch's, on the whole logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.ranks import Comms, Ranks
from torch import Tensor
from torch.nn.functional import cross_entropy

import mpicoll
from mpicoll.parallel import cross_entropy as module
from mpicoll.parallel.cross_entropy import vocab_parallel_cross_entropy
from mpicoll.parallel.mappings import (
    linear_map,
    reduce_from_tensor_model_parallel_region,
    scatter_to_tensor_model_parallel_region,
)

PART = 3
"""How many words each rank has."""

REDUCTIONS = ("none", "sum", "mean")


def _random(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The same on all ranks."""
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=dtype)


def _targets(shape: Sequence[int], size: int) -> Tensor:
    return torch.randint(0, PART * size, tuple(shape), generator=torch.Generator().manual_seed(1))


def _own(whole: Tensor, comm: mpicoll.Communicator) -> Tensor:
    return whole[..., comm.rank * PART : (comm.rank + 1) * PART]


def _oracle(logits: Tensor, target: Tensor, smoothing: float, ignore_index: int, reduction: str) -> Tensor:
    losses = cross_entropy(
        logits.reshape(-1, logits.shape[-1]),
        target.reshape(-1),
        label_smoothing=smoothing,
        ignore_index=ignore_index,
        reduction=reduction,
    )
    return losses.view(target.shape) if reduction == "none" else losses


def _close(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one.detach(), other.detach(), rtol=1e-12, atol=1e-12)


def _compare(
    comm: mpicoll.Communicator,
    logits: Tensor,
    target: Tensor,
    smoothing: float,
    *,
    ignore_index: int = -100,
    reduction: str = "none",
) -> None:
    """Values, and derivatives of the first and the second order, by a curved function of the losses."""
    whole = logits.clone().requires_grad_()
    mine = _own(logits, comm).requires_grad_()
    before = mine.detach().clone()
    want = _oracle(whole, target, smoothing, ignore_index, reduction)
    got = vocab_parallel_cross_entropy(
        mine, target, smoothing, ignore_index=ignore_index, reduction=reduction, group=comm
    )
    _close([got], [want])
    weights, direction = _random(want.shape, 2), _random(logits.shape, 3)
    incoming = (2 * weights * want.detach()).requires_grad_()
    kept = incoming.detach().clone()
    _close(torch.autograd.grad(got, mine, incoming, retain_graph=True), [_own(_grad(want, whole, incoming), comm)])
    assert torch.equal(incoming, kept)
    assert incoming._version == mine._version == 0
    first = _grad((weights * want**2).sum(), whole, create_graph=True)
    own = _grad((weights * got**2).sum(), mine, create_graph=True)
    _close([own], [_own(first, comm)])
    # What the ranks have of the directional derivative is a part of it each.
    total = reduce_from_tensor_model_parallel_region((own * _own(direction, comm)).sum(), comm)
    second = _grad((first * direction).sum(), whole)
    _close([_grad(total, mine)], [_own(second, comm)])
    assert torch.equal(mine, before)


def _grad(output: Tensor, x: Tensor, incoming: Tensor | None = None, *, create_graph: bool = False) -> Tensor:
    (gradient,) = torch.autograd.grad(output, x, incoming, retain_graph=True, create_graph=create_graph)
    return gradient


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_values_and_derivatives(ranks: Ranks, smoothing: float, reduction: str) -> None:
    def body() -> None:
        comms = Comms()
        for group in ("world", "split", "group"):
            comm = comms[group]
            if comm is not None:
                shape = (4, 2)
                target = _targets(shape, comm.size)
                target[1, 0] = target[3, 1] = -100
                logits = 3 * _random((*shape, PART * comm.size), 4)
                _compare(comm, logits, target, smoothing, reduction=reduction)
        comms.free()

    ranks(body)


@pytest.mark.parametrize("ignore_index", [-1, 0, 2])
def test_an_ignored_index(some: Ranks, ignore_index: int) -> None:
    """It may be a word of the vocabulary, or none."""

    def body() -> None:
        comm = mpicoll.world()
        target = _targets((7,), comm.size)
        target[2] = target[4] = ignore_index
        logits = _random((7, PART * comm.size), 5)
        for reduction in REDUCTIONS:
            _compare(comm, logits, target, 0.2, ignore_index=ignore_index, reduction=reduction)
        nothing = torch.full((2,), ignore_index)
        for reduction, want in (("none", [0, 0]), ("sum", 0), ("mean", float("nan"))):
            losses = vocab_parallel_cross_entropy(
                _own(logits[:2], comm), nothing, ignore_index=ignore_index, reduction=reduction
            )
            torch.testing.assert_close(losses, torch.tensor(want, dtype=torch.float64), equal_nan=True)

    some(body)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 0, 3), (2, 1, 3)], ids=str)
def test_shapes(ranks: Ranks, shape: tuple[int, ...]) -> None:
    def body() -> None:
        comm = mpicoll.world()
        target, logits = _targets(shape, comm.size), _random((*shape, PART * comm.size), 6)
        for reduction in ("none", "sum"):
            _compare(comm, logits, target, 0.1, reduction=reduction)

    ranks(body)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_gradcheck(several: Ranks, smoothing: float) -> None:
    """All ranks evaluate one function of the whole logits in step, with the same perturbations."""

    def body() -> None:
        comm = mpicoll.world()
        target = _targets((2,), comm.size)
        weight = _random((PART * comm.size,), 7)

        def function(whole: Tensor) -> Tensor:
            own = scatter_to_tensor_model_parallel_region(whole * weight + whole**2, comm)
            return vocab_parallel_cross_entropy(own, target, smoothing, group=comm)

        whole = _random((2, PART * comm.size), 8).requires_grad_()
        assert torch.autograd.gradcheck(function, whole)
        incoming = _random((2,), 9).requires_grad_()
        assert torch.autograd.gradgradcheck(function, whole, incoming)

    several(body)


def test_large_logits(ranks: Ranks) -> None:
    """Whichever rank has the greatest, nothing overflows, and what is -inf has no weight."""

    def body() -> None:
        comm = mpicoll.world()
        words = PART * comm.size
        masked = _random((words, words), 11)
        masked[:, -1] = -torch.inf
        target = torch.arange(words) % (words - 1)
        for logits in (1e3 * _random((words, words), 10), 1e300 * _random((words, words), 10), masked):
            whole, mine = logits.clone().requires_grad_(), _own(logits, comm).requires_grad_()
            want, got = cross_entropy(whole, target, reduction="none"), vocab_parallel_cross_entropy(mine, target)
            assert got.isfinite().all()
            _close([got, _grad(got.sum(), mine)], [want, _own(_grad(want.sum(), whole), comm)])

    ranks(body)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_halves_are_computed_with_in_float32(some: Ranks, dtype: torch.dtype) -> None:
    """The loss is as good as float32 is; only the gradient is rounded to the dtype of the logits, once."""

    def body() -> None:
        comm = mpicoll.world()
        target = _targets((50,), comm.size)
        logits = (4 * _random((50, PART * comm.size), 12)).to(dtype)
        for smoothing in (0.0, 0.1):
            whole, mine = logits.double().requires_grad_(), _own(logits, comm).requires_grad_()
            want = _oracle(whole, target, smoothing, -100, "none")
            got = vocab_parallel_cross_entropy(mine, target, smoothing)
            assert got.dtype == torch.float32
            torch.testing.assert_close(got.detach().double(), want.detach(), rtol=2e-6, atol=2e-6)
            gradient, exact = _grad(got.sum(), mine), _own(_grad(want.sum(), whole), comm)
            assert gradient.dtype == dtype
            slack = max(torch.finfo(dtype).eps, 2e-6)
            torch.testing.assert_close(gradient.double(), exact, rtol=slack, atol=2e-6)

    some(body)


def test_layouts_and_integers(some: Ranks) -> None:
    """Logits with gaps, which is what a slice is, and targets of any integer dtype; without a gradient as well."""

    def body() -> None:
        comm = mpicoll.world()
        target, logits = _targets((6,), comm.size), _random((6, PART * comm.size), 13)
        want = _oracle(logits, target, 0.1, -100, "none")
        for mine in (_own(logits, comm), _own(logits, comm).clone(), _own(logits, comm).T.contiguous().T):
            for dtype in (torch.uint8, torch.int8, torch.int32, torch.int64):
                got = vocab_parallel_cross_entropy(mine, target.to(dtype), 0.1)
                _close([got], [want])
                assert not got.requires_grad
        with torch.no_grad():
            got = vocab_parallel_cross_entropy(_own(logits, comm).requires_grad_(), target, 0.1)
        assert not got.requires_grad
        _close([got], [want])

    some(body)


def test_one_loss_in_two_branches(several: Ranks) -> None:
    """Logits that feed two losses, and losses that feed two branches, as in one process."""

    def body() -> None:
        comm = mpicoll.world()
        target, logits = _targets((5,), comm.size), _random((5, PART * comm.size), 14)
        whole, mine = logits.clone().requires_grad_(), _own(logits, comm).requires_grad_()
        want = _oracle(whole, target, 0.0, -100, "none")
        want = want + _oracle(whole**2, target, 0.1, -100, "none") + want**2
        got = vocab_parallel_cross_entropy(mine, target)
        got = got + vocab_parallel_cross_entropy(mine**2, target, 0.1) + got**2
        weights = _random((5,), 15)
        _close([got, _grad((got * weights).sum(), mine)], [want, _own(_grad((want * weights).sum(), whole), comm)])

    several(body)


def test_wrong_arguments(some: Ranks) -> None:
    def body() -> None:
        comm = mpicoll.world()
        logits, target = torch.zeros(2, 2, PART), torch.zeros(2, 2, dtype=torch.long)
        words = PART * comm.size
        high, low = target.clone(), target.clone()
        high[1, 0], low[0, 1] = words, -2
        shape, dtype, other = mpicoll.ShapeError, mpicoll.DTypeError, mpicoll.ArgumentError
        checks = [
            (dtype, ["logits", "ndarray"], (logits.numpy(), target), {}),
            (dtype, ["target", "list"], (logits, [0]), {}),
            (dtype, ["logits", "int64"], (logits.long(), target), {}),
            (dtype, ["logits", "complex64"], (logits.to(torch.complex64), target), {}),
            (dtype, ["target", "float32", "probabilities"], (logits, target.float()), {}),
            (dtype, ["target", "bool"], (logits, target.bool()), {}),
            (shape, ["(2, 2, 3)", "(2,)"], (logits, target[0]), {}),
            (shape, ["(2, 2, 0)"], (logits[..., :0], target), {}),
            (shape, ["()"], (logits[0, 0, 0], target[0, 0]), {}),
            (other, ["label_smoothing", "1.5"], (logits, target, 1.5), {}),
            (other, ["label_smoothing", "nan"], (logits, target, float("nan")), {}),
            (other, ["reduction", "'max'"], (logits, target), {"reduction": "max"}),
            (other, [f"target {words} at position (1, 0)", f"[0, {words})", "-100"], (logits, high), {}),
            (other, ["target -2 at position (0, 1)", "-7"], (logits, low), {"ignore_index": -7}),
        ]
        for kind, texts, arguments, options in checks:
            with pytest.raises(kind) as caught:
                vocab_parallel_cross_entropy(*arguments, **options)
            for text in ("vocab_parallel_cross_entropy", f"(rank {comm.rank} of {comm.size})", *texts):
                assert text in str(caught.value)
        # Nothing was sent.
        assert mpicoll.allreduce(comm.rank) == sum(range(comm.size))

    some(body)


def test_messages_of_forward_and_backward(several: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two small all-reduces forward, and none backward."""
    sent: list[tuple[int, tuple[int, ...]]] = []

    def counted(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append((mpicoll.world().rank, tuple(x.shape)))
        return mpicoll.allreduce(x, *args, **kwargs)

    monkeypatch.setattr(module, "allreduce", counted)
    monkeypatch.setattr(linear_map, "allreduce", counted)

    def body() -> None:
        comm = mpicoll.world()
        logits, target = _random((5, PART), 16).requires_grad_(), _targets((5,), comm.size)
        vocab_parallel_cross_entropy(logits, target).sum().backward()
        vocab_parallel_cross_entropy(logits, target, 0.1).sum().backward()
        assert [shape for rank, shape in sent if rank == comm.rank] == [(5,), (2, 5), (5,), (3, 5)]

    several(body)
