"""DistributedOptimizer, against the same training in one process and by DDP."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from support.ranks import Ranks
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import mpicoll
from mpicoll.engine.core.queue import OperationQueue
from mpicoll.parallel import Compression, DistributedOptimizer, broadcast_parameters

STEPS, SAMPLES = 20, 12


class Net(nn.Module):
    """`unused` gets no gradient on any rank, `some` none on rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.some, self.unused = nn.Linear(3, 3), nn.Linear(2, 2)
        self.double()

    def forward(self, x: Tensor, *, use_some: bool = False) -> Tensor:
        y: Tensor = self.last(torch.tanh(self.first(x)))
        return y + self.some(y) if use_some else y


def fill(model: nn.Module, seed: int = 0) -> None:
    """Set the parameters, the same on all ranks, which may be threads and share torch's generator."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for one in model.parameters():
            one.copy_(torch.randn(one.shape, generator=random, dtype=torch.float64) / 3)


def make_model(seed: int = 0) -> Net:
    model = Net()
    fill(model, seed)
    return model


def batches(count: int = STEPS) -> Iterator[Tensor]:
    random = torch.Generator().manual_seed(7)
    for _ in range(count):
        yield torch.randn(SAMPLES, 6, generator=random, dtype=torch.float64)


def share(x: Tensor, rank: int, size: int) -> Tensor:
    return x.tensor_split(size)[rank]


def loss_of(model: Callable[..., Tensor], x: Tensor, rank: int, size: int, passes: int) -> Tensor:
    """The sum over the samples of a rank, whose mean over the ranks is the mean over the batch."""
    y = model(share(x, rank, size), use_some=rank > 0)
    return y.square().sum() * size / SAMPLES / passes


def flatten(model: nn.Module) -> Tensor:
    return torch.cat([one.detach().reshape(-1) for one in model.parameters()])


def make_sgd(model: nn.Module) -> torch.optim.SGD:
    # Weight decay changes a parameter with a gradient of zeros, and leaves one without a gradient.
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def train_alone(size: int, *, passes: int = 1, max_norm: float | None = None, steps: int = STEPS) -> Tensor:
    """The parameters after a training in one process, on the batches of all ranks."""
    model = make_model()
    optimizer = make_sgd(model)
    for x in batches(steps):
        optimizer.zero_grad()
        for rank in range(size):
            for _ in range(passes):
                (loss_of(model, x, rank, size, passes) / size).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return flatten(model)


def train(make: Callable[[Net], tuple[Any, Any]], *, passes: int = 1, max_norm: float | None = None) -> Tensor:
    world, model = mpicoll.world(), make_model()
    callee, optimizer = make(model)
    for x in batches():
        optimizer.zero_grad()
        for number in range(passes):
            last = number == passes - 1
            if isinstance(callee, DistributedDataParallel):
                callee.require_backward_grad_sync = last
            loss_of(callee, x, world.rank, world.size, passes).backward()
        if max_norm is not None:
            clip = getattr(optimizer, "clip_grad_norm_", None)
            clip(max_norm) if clip else nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return flatten(model)


def assert_same_bits(own: Tensor) -> None:
    for other in mpicoll.allgather_object(own.numpy().tobytes()):
        assert other == own.numpy().tobytes()


@pytest.mark.parametrize(("passes", "max_norm"), [(1, None), (2, None), (1, 0.1)])
def test_equals_one_process(ranks: Ranks, passes: int, max_norm: float | None) -> None:
    def body() -> None:
        def by_helper(model: Net, megabytes: float) -> tuple[Any, Any]:
            optimizer = make_sgd(model)
            options: dict[str, Any] = {"backward_passes_per_step": passes, "bucket_cap_mb": megabytes}
            return model, DistributedOptimizer(optimizer, model.named_parameters(), **options)

        # One bucket, and buckets of a few parameters each.
        for megabytes in (25, 2**-14):
            own = train(partial(by_helper, megabytes=megabytes), passes=passes, max_norm=max_norm)
            assert_same_bits(own)
            expected = train_alone(mpicoll.world().size, passes=passes, max_norm=max_norm)
            torch.testing.assert_close(own, expected, rtol=0, atol=1e-12)

    ranks(body)


@pytest.mark.mpi
@pytest.mark.parametrize(("passes", "max_norm"), [(1, None), (2, 0.1)])
@pytest.mark.usefixtures("default_group")
def test_equals_ddp(passes: int, max_norm: float | None) -> None:
    def by_ddp(model: Net) -> tuple[Any, Any]:
        return DistributedDataParallel(model, find_unused_parameters=True), make_sgd(model)

    def by_helper(model: Net) -> tuple[Any, Any]:
        return model, DistributedOptimizer(make_sgd(model), backward_passes_per_step=passes)

    expected = train(by_ddp, passes=passes, max_norm=max_norm)
    own = train(by_helper, passes=passes, max_norm=max_norm)
    torch.testing.assert_close(own, expected, rtol=0, atol=1e-12)


@pytest.mark.mpi
@pytest.mark.extension
def test_small_buckets_are_begun_by_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of the queue, which would compete for the interpreter lock, is not woken for each."""
    submitted = [0]
    submit = OperationQueue.submit

    def count(self: OperationQueue, *args: Any) -> Any:
        submitted[0] += 1
        return submit(self, *args)

    monkeypatch.setattr(OperationQueue, "submit", count)
    world = mpicoll.world()
    if world.size > 1:
        train(lambda model: (model, DistributedOptimizer(make_sgd(model))))
        assert 0 < submitted[0] < STEPS / 2


@pytest.mark.parametrize("by_initial", [True, False])
def test_join(several: Ranks, by_initial: bool) -> None:
    """Rank r has r + 1 batches; the last rank continues alone."""

    def body() -> None:
        world, model = mpicoll.world(), make_model()
        optimizer = DistributedOptimizer(make_sgd(model), divide_by_initial_world_size=by_initial)
        for epoch in range(2):
            for x in batches(world.rank + 1 + epoch):
                optimizer.zero_grad()
                loss_of(model, x, world.rank, world.size, 1).backward()
                optimizer.clip_grad_norm_(0.5)
                optimizer.step()
            assert optimizer.join() == world.size - 1
        assert_same_bits(flatten(model))

        reference = make_model()
        plain = make_sgd(reference)
        for epoch in range(2):
            for number, x in enumerate(batches(world.size + epoch)):
                plain.zero_grad()
                active = [rank for rank in range(world.size) if number <= rank + epoch]
                for rank in active:
                    divisor = world.size if by_initial else len(active)
                    (loss_of(reference, x, rank, world.size, 1) / divisor).backward()
                nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
                plain.step()
        torch.testing.assert_close(flatten(model), flatten(reference), rtol=0, atol=1e-12)
        for one, other in zip(model.parameters(), reference.parameters(), strict=True):
            # The momentum of ranks that have joined earlier as well.
            own, expected = (of.state.get(p, {}) for of, p in ((optimizer, one), (plain, other)))
            assert own.keys() == expected.keys()
            if own:
                torch.testing.assert_close(own["momentum_buffer"], expected["momentum_buffer"], rtol=0, atol=1e-12)

    several(body)


def test_join_without_a_batch(several: Ranks) -> None:
    """Also in the first step, in which buckets are made, and where all ranks have the same number of batches."""

    def body() -> None:
        world, model = mpicoll.world(), nn.Linear(2, 1)
        broadcast_parameters(model.state_dict())
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op="sum")
        if world.rank == 0:
            model(torch.ones(1, 2)).backward()
            optimizer.step()
        assert optimizer.join() == 0
        assert_same_bits(flatten(model))
        assert optimizer.join() == world.size - 1

    several(body)


def test_reduces_during_backward(several: Ranks) -> None:
    """From the second step on, except for buckets without gradients; also with other collectives in between."""

    def body() -> None:
        world, model = mpicoll.world(), make_model()
        optimizer = DistributedOptimizer(make_sgd(model), bucket_cap_mb=2**-14)
        pending = []
        for x in batches(3):
            optimizer.zero_grad()
            model(x).sum().backward()
            pending.append(len(optimizer._reducer._pending))
            assert mpicoll.allreduce(1) == world.size
            optimizer.step()
        used = [one for name, one in model.named_parameters() if name.startswith(("first", "last"))]
        assert pending[0] == 0
        assert pending[1] == pending[2] >= 2
        assert all(one.grad is not None for one in used)
        assert model.unused.weight.grad is None

    several(body)


def test_sparse_gradients(several: Ranks) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.rare = nn.Embedding(7, 3, sparse=True), nn.Embedding(4, 3, sparse=True)
            self.last = nn.Linear(3, 1)
            self.double()

        def forward(self, rank: int) -> Tensor:
            x = self.words(torch.tensor([rank, 1])).sum(0)
            if rank == 1:
                x = x + self.rare(torch.tensor(2))
            y: Tensor = self.last(x)
            return y.sum()

    def body() -> None:
        world = mpicoll.world()
        model = Words()
        fill(model)
        reference = copy.deepcopy(model)
        reference.words.sparse = reference.rare.sparse = False
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        plain = torch.optim.SGD(reference.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(world.rank).backward()
            norm = optimizer.clip_grad_norm_(0.5)
            assert norm > 0.5
            optimizer.step()
            assert model.words.weight.grad is not None
            assert model.words.weight.grad.is_sparse
            plain.zero_grad()
            (sum(reference(rank) for rank in range(world.size)) / world.size).backward()
            torch.testing.assert_close(nn.utils.clip_grad_norm_(reference.parameters(), 0.5), norm)
            plain.step()
        assert_same_bits(flatten(model))
        torch.testing.assert_close(flatten(model), flatten(reference), rtol=0, atol=1e-12)

    several(body)


def test_kinds_of_parameters(several: Ranks) -> None:
    """Several dtypes, strides, a frozen one, a group that is added, and gradients that are zeroed and not removed."""

    def body() -> None:
        world = mpicoll.world()
        one, half = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        last = nn.Parameter(torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last))
        frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        optimizer = DistributedOptimizer(torch.optim.SGD([one, half, last, frozen], lr=1.0), op="sum")
        late = nn.Parameter(torch.ones(2, 2).t())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        for number in range(3):
            optimizer.zero_grad(set_to_none=number == 0)
            loss = (one.sum() + half.sum().float() + last.sum()) * (world.rank + 1)
            (loss + late.sum() if number else loss).backward()
            optimizer.step()
            schedule.step()
            if number == 0:
                optimizer.add_param_group({"params": [late]})
        total = world.size * (world.size + 1) / 2
        assert one.tolist() == [1 - total * 1.75] * 3
        assert half.tolist() == [1 - total * 1.75] * 2
        assert torch.equal(last, torch.full_like(last, 1 - total * 1.75))
        assert last.grad is not None
        assert last.grad.stride() == last.stride()
        assert late.detach().unique().tolist() == [1 - world.size * 1.5]
        assert frozen.tolist() == [1, 1]
        optimizer.close()

    several(body)


def test_closure(several: Ranks) -> None:
    """LBFGS evaluates several times in a step, and decides by the loss."""

    def body() -> None:
        world = mpicoll.world()
        random = torch.Generator().manual_seed(1)
        x, y = (torch.randn(12, n, generator=random, dtype=torch.float64) for n in (4, 1))
        results = []
        for data in (slice(None), slice(world.rank, None, world.size)):
            model = nn.Linear(4, 1).double()
            nn.init.zeros_(model.weight)
            nn.init.zeros_(model.bias)
            optimizer: Any = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe")
            if data != slice(None):
                optimizer = DistributedOptimizer(optimizer)

            def closure(model: Any = model, optimizer: Any = optimizer, data: slice = data) -> Tensor:
                optimizer.zero_grad()
                loss = functional.mse_loss(model(x[data]), y[data])
                loss.backward()
                return loss

            for _ in range(2):
                optimizer.step(closure)
            results.append(flatten(model))
        assert_same_bits(results[1])
        torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-8)

    several(body)


def test_clip_then_skip(several: Ranks) -> None:
    """Horovod's form: synchronize, clip, and step without a second reduction; also without the block."""

    def body() -> None:
        world = mpicoll.world()
        results = []
        for skips in (True, False):
            model = make_model()
            optimizer = DistributedOptimizer(make_sgd(model), op="sum")
            for x in batches(3):
                loss_of(model, x, world.rank, world.size, 1).backward()
                optimizer.synchronize()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                if skips:
                    with optimizer.skip_synchronize():
                        optimizer.step()
                else:
                    optimizer.step()
                optimizer.zero_grad()
            results.append(flatten(model))
        assert torch.equal(*results)

    several(body)


def test_wrong_use(several: Ranks) -> None:
    def body() -> None:
        model = nn.Linear(2, 1)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        here = rf"\(rank {mpicoll.world().rank} of {mpicoll.world().size}\)"
        model(torch.ones(1, 2)).backward()
        with pytest.raises(mpicoll.ArgumentError, match=rf"zero_grad\(\) after a backward pass.*step\(\).*{here}"):
            optimizer.zero_grad()
        unreduced = rf"skip_synchronize\(\).*call synchronize\(\) before {here}"
        with pytest.raises(mpicoll.ArgumentError, match=unreduced), optimizer.skip_synchronize():
            optimizer.step()
        with pytest.raises(mpicoll.ArgumentError, match=rf"join\(\).*{here}"):
            optimizer.join()
        with pytest.raises(mpicoll.ArgumentError, match=r"'(weight|bias)' was computed 2 times.*larger number"):
            model(torch.ones(1, 2)).backward()
        for arguments, message in (
            ({"op": "adasum"}, "op must be 'avg' or 'sum', got 'adasum'"),
            ({"backward_passes_per_step": 0}, "must be at least 1"),
            ({"compression": "fp16"}, "compression must be one of parallel.Compression, got 'fp16'"),
            ({"named_parameters": model.parameters()}, r"model.named_parameters\(\), got a generator"),
        ):
            with pytest.raises(mpicoll.ArgumentError, match=message):
                DistributedOptimizer(torch.optim.SGD(model.parameters()), **arguments)
        with pytest.raises(TypeError, match=r"state_dict\(\), and wrap"):
            copy.deepcopy(optimizer)
        with pytest.raises(mpicoll.ArgumentError, match=f"pass an optimizer of torch.optim, got int {here}"):
            DistributedOptimizer(3)  # type: ignore[arg-type]
        with pytest.raises(mpicoll.ArgumentError, match="already"):
            DistributedOptimizer(optimizer)
        nothing = nn.Parameter(torch.ones(1), requires_grad=False)
        with pytest.raises(mpicoll.ArgumentError, match="no parameters"):
            DistributedOptimizer(torch.optim.SGD([nothing]))

    several(body)


def test_models_that_differ(several: Ranks) -> None:
    """All ranks raise the same error, and the communicator stays usable."""

    def body() -> str:
        rank = mpicoll.world().rank
        model = nn.Linear(2, 3 if rank == 1 else 4)
        with pytest.raises(mpicoll.MismatchError) as found:
            DistributedOptimizer(torch.optim.SGD(model.parameters()), model.named_parameters())
        assert found.value.ranks == (1,) or mpicoll.world().size == 2
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()  # without hooks
        same = nn.Linear(2, 3)
        compression = Compression.bf16 if rank == 1 else Compression.none
        with pytest.raises(mpicoll.MismatchError, match=r"rank 1 has op avg.*Compression\.bf16"):
            DistributedOptimizer(torch.optim.SGD(same.parameters()), compression=compression)
        layout = torch.channels_last if rank == 1 else torch.contiguous_format
        image = nn.Parameter(torch.ones(1, 2, 2, 2).to(memory_format=layout))
        with pytest.raises(mpicoll.MismatchError, match=r"rank 1 has .* shape \(1, 2, 2, 2\), strides \(8, 1, 4, 2\)"):
            DistributedOptimizer(torch.optim.SGD([image]))
        assert mpicoll.allreduce(1) == mpicoll.world().size
        return str(found.value)

    messages = several(body)
    assert len(set(messages)) == 1
    assert "DistributedOptimizer: the ranks disagree" in messages[0]
    assert "rank 1 has 'weight', float32 of shape (3, 2)" in messages[0]


def test_hooks_end_with_the_optimizer() -> None:
    def body() -> None:
        model = nn.Linear(2, 1)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        del optimizer
        for _ in range(2):
            model(torch.ones(1, 2)).backward()
        assert not model.weight._post_accumulate_grad_hooks

    mpicoll.run_local(body, 2)
