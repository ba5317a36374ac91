"""Compression of gradients: what is left out comes later, the bytes are those that are stated, and training works."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.ranks import Ranks
from torch import Tensor, nn
from torch.nn import functional

import mpicoll
from mpicoll.parallel import Compression, DistributedOptimizer
from mpicoll.parallel.data_parallel.compression import Compressor

KINDS: dict[str, Compressor] = {
    "fp16": Compression.fp16,
    "bf16": Compression.bf16,
    "top_k": Compression.top_k(0.1),
    "power_sgd": Compression.power_sgd(2, start=1),
}

ROWS, COLUMNS, BIAS = 16, 20, 5
NUM_FLAGS = 3


def make_optimizer(compression: Compressor, op: str = "avg") -> tuple[nn.Parameter, nn.Parameter, DistributedOptimizer]:
    matrix, bias = nn.Parameter(torch.zeros(ROWS, COLUMNS)), nn.Parameter(torch.zeros(BIAS))
    optimizer = torch.optim.SGD([matrix, bias], lr=1.0)
    return matrix, bias, DistributedOptimizer(optimizer, op=op, compression=compression)


def gradient(shape: Any, rank: int, step: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + rank))


@pytest.mark.parametrize("op", ["avg", "sum"])
@pytest.mark.parametrize("name", ["top_k", "power_sgd"])
def test_nothing_is_lost(several: Ranks, name: str, op: str) -> None:
    """The results of all steps, and the errors that the ranks have left, add up to the gradients of all steps, also of
    those in which no rank has one for the matrix."""

    def body() -> None:
        world = mpicoll.world()
        matrix, bias, optimizer = make_optimizer(KINDS[name], op)
        expected = torch.zeros(ROWS, COLUMNS, dtype=torch.float64)
        for step in range(6):
            optimizer.zero_grad()
            is_used = step not in (2, 4)
            if is_used:
                (matrix * gradient(matrix.shape, world.rank, step)).sum().backward()
                for rank in range(world.size):
                    expected -= gradient(matrix.shape, rank, step).double()
            if world.rank == 0:
                bias.sum().backward()  # no gradient on other ranks
            optimizer.step()
            assert (matrix.grad is not None) == is_used
        exchange: Any = optimizer._reducer._exchanges[0]  # type: ignore[union-attr]
        error = exchange._errors[0] if name == "power_sgd" else exchange._error[: matrix.numel()].view(matrix.shape)
        left = mpicoll.allreduce(error.double())
        scale = world.size if op == "avg" else 1
        torch.testing.assert_close(matrix.double() * scale, expected + left, rtol=0, atol=1e-4)
        assert bias.grad is not None
        for one in (matrix, bias):
            values = mpicoll.allgather(one.detach().reshape(1, -1))
            assert (values == values[0]).all()
        optimizer.close()

    several(body)


@pytest.mark.parametrize(("name", "digit"), [("fp16", 2.0**-10), ("bf16", 2.0**-7)])
def test_half_precision(several: Ranks, name: str, digit: float) -> None:
    """A quarter of the last digit is rounded off in each step, and sent in every fourth one in which any rank has a
    gradient."""

    def body() -> None:
        matrix, bias, optimizer = make_optimizer(KINDS[name])
        for _ in range(16):
            for one in ((matrix, bias), (matrix,), (bias,)):
                optimizer.zero_grad()
                (sum(part.sum() for part in one) * (0.5 + digit / 8)).backward()
                optimizer.step()
        for one in (matrix, bias):
            torch.testing.assert_close(one, torch.full_like(one, -16 - 4 * digit), rtol=0, atol=digit)

    several(body)


@pytest.mark.parametrize("name", KINDS)
def test_bytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted where collectives are planned, and as the optimizer states them."""
    numel = ROWS * COLUMNS + BIAS
    chosen = -(-numel // 10)
    stated = {
        "fp16": 2 * (numel + NUM_FLAGS),
        "bf16": 2 * (numel + NUM_FLAGS),
        # Values, indices and flags of one byte, each aligned to 8.
        "top_k": 2 * -(-4 * chosen // 8) * 8 + 8,
        "power_sgd": 4 * (BIAS + NUM_FLAGS + 2 * (ROWS + COLUMNS)),
    }[name]

    from mpicoll.engine.plan import Plan

    start, counts = Plan.start, [0, 0]

    def count(plan: Plan) -> None:
        counts[mpicoll.world().rank] += plan._operation.block.array.nbytes
        start(plan)

    def body() -> None:
        matrix, bias, optimizer = make_optimizer(KINDS[name])
        rank = mpicoll.world().rank
        for _ in range(3):
            counts[rank] = 0
            optimizer.zero_grad()
            (matrix.sum() + bias.sum()).backward()
            optimizer.step()
        assert counts[rank] == optimizer.bytes_per_step == stated

    monkeypatch.setattr(Plan, "start", count)
    mpicoll.run_local(body, 2)


def test_bytes_without_matrices() -> None:
    """PowerSGD sends such a bucket as it is, not in float32."""

    def body() -> None:
        bias = nn.Parameter(torch.zeros(BIAS, dtype=torch.bfloat16))
        optimizer = DistributedOptimizer(torch.optim.SGD([bias]), compression=Compression.power_sgd(1, start=0))
        bias.sum().backward()
        optimizer.step()
        assert optimizer.bytes_per_step == 2 * (BIAS + 2)

    mpicoll.run_local(body, 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_top_k_of_16_bits(dtype: torch.dtype) -> None:
    """Sums do not overflow, and errors below the last digit of a gradient are not lost."""

    def body() -> None:
        weight = nn.Parameter(torch.zeros(2, dtype=dtype))
        optimizer = DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), compression=Compression.top_k(0.5))
        (weight[0] * 40000).backward()
        optimizer.synchronize()
        assert weight.grad is not None
        assert weight.grad.tolist() == [torch.tensor(40000, dtype=dtype).item(), 0]
        for small in (2048.0, 1.0, 1.0):
            optimizer.zero_grad()
            (weight * torch.tensor([40000.0, small])).sum().backward()
            optimizer.synchronize()
        # 2048 + 1 is 2048 in 16 bits.
        exchange: Any = optimizer._reducer._exchanges[0]  # type: ignore[union-attr]
        assert exchange._error.dtype is torch.float32
        assert exchange._error.tolist() == [0, 2050]

    mpicoll.run_local(body, 2)


def test_top_k_of_complex_numbers() -> None:
    def body() -> None:
        weight = nn.Parameter(torch.ones(8, dtype=torch.complex128))
        optimizer = DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), compression=Compression.top_k(0.5))
        (weight * torch.tensor([2j] * 4 + [1j] * 4).conj()).sum().abs().backward()
        optimizer.step()
        optimizer.close()
        assert weight.grad is not None
        assert weight.grad[4:].tolist() == [0] * 4
        torch.testing.assert_close(weight.grad[:4].abs(), torch.full((4,), 2.0, dtype=torch.float64))

    mpicoll.run_local(body, 2)


@pytest.mark.parametrize("name", KINDS)
def test_not_finite(name: str) -> None:
    """What an AMP scaler is to see is there, and does not stay in the error."""

    def body() -> None:
        matrix, bias, optimizer = make_optimizer(KINDS[name])
        finite = []
        for step in range(5):
            optimizer.zero_grad()
            factor = torch.inf if step == 2 and mpicoll.world().rank == 0 else 1.0
            (matrix * torch.full((ROWS, COLUMNS), factor)).sum().backward()
            bias.sum().backward()
            optimizer.synchronize()
            assert matrix.grad is not None
            finite.append(bool(matrix.grad.isfinite().all()))
        assert finite == [True, True, False, True, True]

    mpicoll.run_local(body, 2)


def test_options() -> None:
    for make in (lambda: Compression.top_k(0), lambda: Compression.top_k(1.5), lambda: Compression.power_sgd(0)):
        with pytest.raises(mpicoll.ArgumentError, match=r"density must be in \(0, 1\]|rank must be at least 1"):
            make()
    assert repr(Compression.top_k(0.1)) == "Compression.top_k(0.1)"


def train_on_digits(compression: Compressor) -> float:
    from sklearn.datasets import load_digits

    world = mpicoll.world()
    values, targets = load_digits(return_X_y=True)
    images, digits = torch.from_numpy(values).float() / 16, torch.from_numpy(targets)
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
    held_out, rest = order[:450], order[450:]
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for one in model.parameters():
            one.copy_(torch.randn(one.shape, generator=random) / 8)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), compression=compression)
    for epoch in range(4):
        shuffled = rest[torch.randperm(len(rest), generator=torch.Generator().manual_seed(epoch))]
        for batch in shuffled.split(64)[:-1]:
            optimizer.zero_grad()
            mine = batch[world.rank :: world.size]
            functional.cross_entropy(model(images[mine]), digits[mine]).backward()
            optimizer.step()
    with torch.no_grad():
        return (model(images[held_out]).argmax(1) == digits[held_out]).float().mean().item()


@pytest.mark.slow
@pytest.mark.parametrize("names", [["top_k"], pytest.param(["fp16", "bf16", "power_sgd"], marks=pytest.mark.long)])
def test_convergence_on_digits(names: list[str]) -> None:
    """The accuracy is within 1 % of that without compression."""
    dense, *others = (
        mpicoll.run_local(train_on_digits, 2, one)[0] for one in (Compression.none, *(KINDS[name] for name in names))
    )
    assert dense > 0.94
    for name, accuracy in zip(names, others, strict=True):
        assert accuracy > dense - 0.01, name
