"""Random numbers that are the same on all ranks, and that are not."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.ranks import Ranks
from torch import Tensor, nn
from torch.nn import functional

import mpicoll
from mpicoll.collectives.allgather import allgather
from mpicoll.errors import ArgumentError
from mpicoll.parallel import random
from mpicoll.parallel.layers import ColumnParallelLinear, RowParallelLinear
from mpicoll.parallel.random import (
    MODEL_PARALLEL,
    ParallelDropout,
    RNGStatesTracker,
    checkpoint,
    get_rng_tracker,
    model_parallel_manual_seed,
    use_rng_tracker,
)


@pytest.fixture
def tracker() -> RNGStatesTracker:
    """With streams "a" and "b"; torch's own is seeded, too."""
    torch.manual_seed(0)
    tracker = RNGStatesTracker()
    tracker.add("a", 1)
    tracker.add("b", 2)
    return tracker


def draw() -> list[float]:
    return torch.rand(3).tolist()


def of(seed: int, number: int) -> list[list[float]]:
    """The first draws of a generator with `seed`."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(3, generator=generator).tolist() for _ in range(number)]


def test_streams_are_apart(tracker: RNGStatesTracker) -> None:
    own, a, b = of(0, 3), of(1, 3), of(2, 2)
    assert draw() == own[0]
    with tracker.fork("a"):
        assert draw() == a[0]
    assert draw() == own[1]
    with tracker.fork("b"):
        assert draw() == b[0]
    with tracker.fork("a"):
        assert draw() == a[1]
        assert draw() == a[2]
    with tracker.fork("b"):
        assert draw() == b[1]
    assert draw() == own[2]


def test_nested(tracker: RNGStatesTracker) -> None:
    own, a, b = of(0, 2), of(1, 5), of(2, 2)
    assert draw() == own[0]
    with tracker.fork("a"):
        assert draw() == a[0]
        with tracker.fork("a"):
            assert draw() == a[1]
        with tracker.fork("b"):
            assert draw() == b[0]
            with tracker.fork("a"):
                assert draw() == a[2]
            assert draw() == b[1]
        assert draw() == a[3]
    assert draw() == own[1]
    with tracker.fork("a"):
        assert draw() == a[4]


def test_after_an_exception(tracker: RNGStatesTracker) -> None:
    def fails() -> None:
        with tracker.fork("a"):
            assert draw() == of(1, 1)[0]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert draw() == of(0, 1)[0]
    with tracker.fork("a"):
        assert draw() == of(1, 2)[1]


def test_saved_and_resumed(tracker: RNGStatesTracker) -> None:
    with tracker.fork("a"):
        draw()
    file = io.BytesIO()
    torch.save(tracker.get_states(), file)
    with tracker.fork("a"):
        expected = draw()
    with tracker.fork("b"):
        draw()
    file.seek(0)
    other = RNGStatesTracker()
    other.add("c", 3)
    other.set_states(torch.load(file, weights_only=True))
    with other.fork("a"):
        assert draw() == expected
    with other.fork("b"):
        assert draw() == of(2, 1)[0]
    with pytest.raises(ArgumentError, match=r"unknown stream 'c', the streams are \['a', 'b'\]"), other.fork("c"):
        pass
    assert other.get_states()["a"]["seed"] == 1


def test_states_are_copies(tracker: RNGStatesTracker) -> None:
    states = tracker.get_states()
    for state in states.values():
        state["cpu"].zero_()
    given = tracker.get_states()
    tracker.set_states(given)
    for state in given.values():
        state["cpu"].zero_()
    with tracker.fork("a"):
        assert draw() == of(1, 1)[0]


def test_states_inside_of_a_fork(tracker: RNGStatesTracker) -> None:
    with tracker.fork("a"):
        draw()
        states = tracker.get_states()
        with pytest.raises(ArgumentError, match=r"set_states\(\) was called inside of fork\('a'\)"):
            tracker.set_states(states)
        with pytest.raises(ArgumentError, match=r"reset\(\) was called inside of fork\('a'\)"):
            tracker.reset()
        draw()
    tracker.set_states(states)
    with tracker.fork("a"):
        assert draw() == of(1, 2)[1]


def test_wrong_names(tracker: RNGStatesTracker) -> None:
    with pytest.raises(ArgumentError, match="a stream 'a' exists already"):
        tracker.add("a", 5)
    with pytest.raises(ArgumentError, match="stream 'b' has the seed 2 already; choose another seed for 'c'"):
        tracker.add("c", 2)
    with pytest.raises(
        ArgumentError, match=r"unknown stream 'model-parallel-rng', the streams are .*model_parallel_manual_seed"
    ):
        tracker.fork().__enter__()
    assert draw() == of(0, 1)[0]
    tracker.reset()
    assert tracker.get_states() == {}
    tracker.add("a", 5)


def test_which_tracker() -> None:
    """One per thread unless a context says otherwise."""
    mine = get_rng_tracker()
    assert get_rng_tracker() is mine
    other = RNGStatesTracker()
    with use_rng_tracker(other) as used:
        assert used is other
        assert get_rng_tracker() is other
    assert get_rng_tracker() is mine
    found: list[RNGStatesTracker] = []
    thread = threading.Thread(target=lambda: found.append(get_rng_tracker()))
    thread.start()
    thread.join()
    assert found[0] is not mine


# --- on several ranks


def _seeds_of_ranks(seed: int, comm: Any = None) -> Tensor:
    tracker = RNGStatesTracker()
    model_parallel_manual_seed(seed, comm, tracker=tracker)
    seeds: Tensor = allgather(torch.tensor([tracker.get_states()[MODEL_PARALLEL]["seed"]]))
    return seeds


def test_seeds(ranks: Ranks) -> None:
    """Each rank has a seed of its own, far from that of the others and from what the next seeds give."""

    def body() -> None:
        size = mpicoll.world().size
        seeds = [one for seed in (0, 1, 2, 1234, -1, 2**63) for one in (seed, *_seeds_of_ranks(seed).tolist())]
        assert len(set(seeds)) == 6 * (size + 1)
        # Deterministic, with bits that a CPU generator looks at.
        assert all(0 <= one < 2**32 for one in _seeds_of_ranks(7).tolist())
        assert torch.equal(_seeds_of_ranks(7), _seeds_of_ranks(7))
        # The group counts, not the world.
        comm = mpicoll.world()
        alone = comm.split(comm.rank)
        assert len(set(_seeds_of_ranks(7, alone).tolist())) == 1
        alone.free()

    ranks(body)


def _masks(sharded: bool, tracker: RNGStatesTracker | None = None) -> list[Tensor]:
    """Those of all ranks, for one input."""
    mask = ParallelDropout(0.5, sharded=sharded, tracker=tracker)(torch.ones(64)) != 0
    assert 10 < mask.sum() < 54
    return list(allgather(mask.unsqueeze(0)))


def _dropout() -> None:
    model_parallel_manual_seed(3)
    for _ in range(2):
        alike, apart = _masks(False), _masks(True)
        assert all(torch.equal(mask, alike[0]) for mask in alike)
        for number, mask in enumerate(apart):
            assert not any(torch.equal(mask, other) for other in apart[number + 1 :])
            assert not torch.equal(mask, alike[0])
    # The same seed gives the same again, and drawing from one stream leaves the other alone.
    model_parallel_manual_seed(3)
    first = _masks(False), _masks(True)
    model_parallel_manual_seed(3)
    second = _masks(True), _masks(False)
    assert torch.equal(torch.stack(first[0]), torch.stack(second[1]))
    assert torch.equal(torch.stack(first[1]), torch.stack(second[0]))
    # So with a tracker that is passed, of which the thread's knows nothing.
    own = RNGStatesTracker()
    model_parallel_manual_seed(3, tracker=own)
    with use_rng_tracker(RNGStatesTracker()):
        assert torch.equal(torch.stack(_masks(True, own)), torch.stack(first[1]))
        with pytest.raises(ArgumentError, match="unknown stream"):
            _masks(True)


def test_dropout_of_one_rank() -> None:
    _dropout()


@pytest.mark.mpi
def test_dropout_on_ranks() -> None:
    _dropout()


def test_dropout_as_a_module() -> None:
    model_parallel_manual_seed(3)
    x = torch.ones(1000, dtype=torch.float64)
    out = ParallelDropout(0.25, sharded=True)(x)
    assert set(out.tolist()) == {0.0, 1 / 0.75}
    assert 150 < (out == 0).sum() < 350
    for dropout in (ParallelDropout(0.25, sharded=True).eval(), ParallelDropout(0.0, sharded=True)):
        assert dropout(x) is x
    assert repr(dropout) == "ParallelDropout(p=0.0, sharded=True)"
    with pytest.raises(ArgumentError, match=r"p must be in \[0, 1\], got 1.5"):
        ParallelDropout(1.5, sharded=False)


# --- recomputation


class Model(nn.Module):
    """Of what both streams are drawn for, some of it inside of the other."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.column = ColumnParallelLinear(6, 4 * size)
        self.row = RowParallelLinear(4 * size, 6, input_is_parallel=True)
        self.whole, self.part = ParallelDropout(sharded=False), ParallelDropout(sharded=True)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        y = self.part(self.column(self.whole(x)))
        with get_rng_tracker().fork():
            y = functional.dropout(torch.tanh(y), 0.3)
        out: Tensor = self.whole(self.row(y)) * scale
        return out


def _states(tracker: RNGStatesTracker) -> list[Any]:
    return [torch.get_rng_state().tolist(), tracker.get_states()[MODEL_PARALLEL]["cpu"].tolist()]


def _recomputes() -> None:
    """Gradients and the streams afterwards are those without recomputation."""
    torch.manual_seed(1)
    model = Model(mpicoll.world().size)
    results = []
    calls: list[Callable[..., Tensor]] = [
        lambda x, scale: model(x, scale=scale),
        lambda x, scale: checkpoint(model, x, scale=scale),
        lambda x, scale: checkpoint(lambda y: checkpoint(model, y, scale=scale), x),
    ]
    for call in calls:
        model.zero_grad()
        model_parallel_manual_seed(5)
        x = torch.linspace(-1, 1, 18).view(3, 6).requires_grad_()
        first = call(x, 2.0)
        with get_rng_tracker().fork():  # once with the generators at that stream
            second = call(first, 3.0)
        between = _states(get_rng_tracker())
        loss = second.square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        assert _states(get_rng_tracker()) == between
        results.append([between, x.grad, *(one.grad for one in model.parameters())])
    for other in results[1:]:
        assert other[0] == results[0][0]
        for got, wanted in zip(other[1:], results[0][1:], strict=True):
            assert got.abs().sum() > 0
            torch.testing.assert_close(got, wanted)


def test_checkpoint_on_one_rank() -> None:
    _recomputes()


@pytest.mark.mpi
def test_checkpoint_on_ranks() -> None:
    _recomputes()


def test_checkpoint_inside_of_a_backward_that_draws(tracker: RNGStatesTracker) -> None:
    """Recomputed while the generators are at another stream, which goes on as if nothing had been."""
    masks = []

    def function(x: Tensor) -> Tensor:
        with tracker.fork("a"):
            y = functional.dropout(x.sin(), 0.5)
            masks.append(y.detach() != 0)
            return y.exp()

    out = checkpoint(function, torch.ones(20, requires_grad=True), tracker=tracker)
    after = tracker.get_states()["a"]["cpu"]
    with tracker.fork("b"):
        first = draw()
        out.sum().backward()
        assert [first, draw()] == of(2, 2)
    assert torch.equal(*masks)
    assert torch.equal(tracker.get_states()["a"]["cpu"], after)


def test_a_failing_recomputation_puts_the_streams_back(tracker: RNGStatesTracker) -> None:
    fail = False

    def function(x: Tensor) -> Tensor:
        with tracker.fork("a"):
            y = functional.dropout(x.sin(), 0.5)
            if fail:
                raise ZeroDivisionError
            return y.exp()

    out = checkpoint(function, torch.ones(5, requires_grad=True), tracker=tracker)
    before = tracker.get_states()["a"]["cpu"]
    own = torch.get_rng_state()
    fail = True
    with pytest.raises(ZeroDivisionError):
        out.sum().backward()
    assert torch.equal(tracker.get_states()["a"]["cpu"], before)
    assert torch.equal(torch.get_rng_state(), own)


def test_recomputation_sees_the_context_of_the_call() -> None:
    """Also where autograd runs it on a thread of its own, as it does for GPUs."""
    used = RNGStatesTracker()
    used.add("a", 1)
    seen = []

    def function(x: Tensor) -> Tensor:
        seen.append(get_rng_tracker())
        with get_rng_tracker().fork("a"):
            return functional.dropout(x.sin(), 0.5).exp()

    with use_rng_tracker(used):
        out = checkpoint(function, torch.ones(3, requires_grad=True))
    thread = threading.Thread(target=lambda: out.sum().backward())
    thread.start()
    thread.join()
    assert seen == [used, used]


# --- CUDA


class FakeCuda:
    """Stands for torch.cuda where there is no GPU: the current device's generator is one of the CPU."""

    def __init__(self) -> None:
        self.initialized = True
        self.generator = torch.Generator().manual_seed(0)

    def is_initialized(self) -> bool:
        return self.initialized

    def get_rng_state(self) -> Tensor:
        assert self.initialized
        return self.generator.get_state()

    def set_rng_state(self, state: Tensor) -> None:
        assert self.initialized
        self.generator.set_state(state)

    def manual_seed(self, seed: int) -> None:
        assert self.initialized
        self.generator.manual_seed(seed)

    def draw(self) -> list[float]:
        drawn: list[float] = torch.rand(3, generator=self.generator).tolist()
        return drawn


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    for name in ("is_initialized", "get_rng_state", "set_rng_state", "manual_seed"):
        monkeypatch.setattr(random.torch.cuda, name, getattr(fake, name))
    return fake


def test_generators_of_a_gpu(tracker: RNGStatesTracker, cuda: FakeCuda) -> None:
    own, a = of(0, 2), of(1, 3)
    assert (draw(), cuda.draw()) == (own[0], own[0])
    with tracker.fork("a"):
        assert (draw(), cuda.draw(), cuda.draw()) == (a[0], a[0], a[1])
    assert (draw(), cuda.draw()) == (own[1], own[1])
    states = tracker.get_states()
    with tracker.fork("a"):
        assert (draw(), cuda.draw()) == (a[1], a[2])
    other = RNGStatesTracker()
    other.set_states(states)
    with other.fork("a"):
        assert (draw(), cuda.draw()) == (a[1], a[2])


def test_a_gpu_that_comes_into_use_between_forks(tracker: RNGStatesTracker, cuda: FakeCuda) -> None:
    cuda.initialized = False
    with tracker.fork("a"):
        draw()
    cuda.initialized = True
    with tracker.fork("a"):
        assert (draw(), cuda.draw()) == (of(1, 2)[1], of(1, 1)[0])
    assert cuda.draw() == of(0, 1)[0]


def test_a_gpu_that_comes_into_use_inside_of_a_fork(tracker: RNGStatesTracker, cuda: FakeCuda) -> None:
    cuda.initialized = False

    def fails() -> None:
        with tracker.fork("a"):
            draw()
            cuda.initialized = True

    with pytest.raises(ArgumentError, match=r"CUDA was first used inside of fork\('a'\).*torch.cuda.init\(\)"):
        fails()
    assert draw() == of(0, 1)[0]
