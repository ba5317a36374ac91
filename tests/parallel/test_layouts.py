"""The GPT of examples/gpt_3d.py in every layout against the same network in one process, in plain torch.

Each rank trains the plain network on the whole batch beside its part of the divided one, and compares every gradient
and every loss.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from support.launch import ROOT
from torch import Tensor, nn
from torch.nn import functional

import mpicoll
from mpicoll import parallel
from mpicoll.parallel.shards import get_shard

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("default_group")]


class Layout(NamedTuple):
    """How the ranks are divided, and how."""

    ranks: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    sp: bool = False
    schedule: str = "1f1b"
    chunks: int = 1

    def __str__(self) -> str:
        sizes = "".join(f"{name}{size}" for name, size in zip(("tp", "pp", "cp"), self[1:4], strict=True) if size > 1)
        chunks = str(self.chunks) if self.chunks > 1 else ""
        return f"{self.ranks}-{sizes or 'dp'}{'sp' * self.sp}-{self.schedule}{chunks}"


LAYOUTS = [
    Layout(1),
    Layout(1, sp=True, schedule="looped_bfs", chunks=2),
    Layout(2),
    Layout(2, tp=2),
    Layout(2, tp=2, sp=True),
    Layout(2, pp=2, schedule="zero_bubble"),
    Layout(2, cp=2),
    Layout(3),
    Layout(3, pp=3),
    Layout(4),
    Layout(4, tp=2, pp=2),
    Layout(4, tp=2, pp=2, sp=True, schedule="zero_bubble"),
    Layout(4, tp=2),
    Layout(4, tp=2, sp=True),
    Layout(4, tp=4),
    Layout(4, tp=4, sp=True),
    Layout(4, pp=4),
    Layout(4, pp=4, schedule="gpipe"),
    Layout(4, pp=2, schedule="interleaved", chunks=2),
    Layout(4, tp=2, cp=2, sp=True),
    Layout(4, pp=2, cp=2),
]

ROUNDED = [
    Layout(1),
    Layout(2, tp=2, sp=True),
    Layout(2, pp=2, schedule="zero_bubble"),
    Layout(3),
    Layout(4, tp=2, pp=2, sp=True, schedule="zero_bubble"),
    Layout(4, tp=2),
    Layout(4, pp=2, schedule="interleaved", chunks=2),
    Layout(4, tp=2, cp=2, sp=True),
    Layout(4, pp=2, cp=2),
]
"""Those of LAYOUTS in which any two ways to divide the work meet: for lower precision, outside of the long tier."""


def _layouts(usual: list[Layout]) -> list[Any]:
    assert set(usual) <= set(LAYOUTS)
    return [pytest.param(one, id=str(one), marks=[] if one in usual else pytest.mark.long) for one in LAYOUTS]


@pytest.fixture(scope="module")
def steps(request: pytest.FixtureRequest) -> int:
    """Enough for the states of the optimizers to matter; in the long tier, for small errors to grow."""
    return 20 if request.config.getoption("--tier") == "long" else 6


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    folder = ROOT / "examples"
    spec = importlib.util.spec_from_file_location("gpt_3d", folder / "gpt_3d.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(folder))
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(folder))


class PlainBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attend, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        sequences, places, width = x.shape
        parts = self.attend(self.norms[0](x)).view(sequences, places, self.heads, 3, width // self.heads)
        query, key, value = (parts[:, :, :, number].transpose(1, 2) for number in range(3))
        scores = query @ key.transpose(2, 3) / (width // self.heads) ** 0.5
        hidden = torch.ones(places, places, dtype=torch.bool).triu(1)
        seen = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value
        x = x + self.merge(seen.transpose(1, 2).reshape(sequences, places, width))
        return x + self.narrow(functional.gelu(self.widen(self.norms[1](x))))


class Plain(nn.Module):
    """The whole network, with parameters named as in the divided one."""

    def __init__(self, options: Any, values: int) -> None:
        super().__init__()
        self.embedding, self.place = nn.Embedding(values, options.width), nn.Embedding(options.context, options.width)
        self.blocks = nn.ModuleDict(
            {str(number): PlainBlock(options.width, options.heads) for number in range(options.layers)}
        )
        self.norm = nn.LayerNorm(options.width)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text) + self.place.weight[: text.shape[1]]
        for block in self.blocks.values():
            x = block(x)
        return self.norm(x) @ self.embedding.weight.t()


def _options(example: ModuleType, layout: Layout, dtype: str, steps: int) -> Any:
    arguments = ["--tp", layout.tp, "--pp", layout.pp, "--cp", layout.cp, "--steps", steps, "--dtype", dtype]
    arguments += ["--schedule", layout.schedule, "--chunks", layout.chunks, "--layers", 4, "--width", 16, "--heads", 4]
    arguments += ["--context", 16, "--batch", 12, "--micro-batches", 3 if layout.schedule != "interleaved" else 4]
    options, _ = example.options_of([*map(str, arguments), *["--sp"] * layout.sp])
    return options


def _part(whole: Tensor, parameter: Tensor) -> Tensor:
    """What of a whole tensor belongs to `parameter`."""
    shard = get_shard(parameter)
    return whole if shard is None else whole.chunk(shard.comm.size, shard.dim)[shard.comm.rank]


def _plain(example: ModuleType, options: Any) -> Plain:
    """The plain network with the parameters that the other begins with where it is not divided."""
    whole, _ = example.options_of(["--layers", str(options.layers), "--dtype", "float64"])
    whole.width, whole.heads, whole.context, whole.seed = options.width, options.heads, options.context, options.seed
    with (
        mpicoll.world().group([dist.get_rank()]) as alone,
        parallel.PipelineParallelGrid(parallel.ProcessTopology(["model"], [1]), alone) as grid,
        parallel.use(grid),
    ):
        parameters = dict(example.build(whole, grid).named_parameters())
        plain = Plain(options, example.VALUES).double()
        for name, one in plain.named_parameters():
            one.data.copy_(parameters.pop(f"0.{name}").detach())
        assert not parameters
    return plain


def _steps(example: ModuleType, plain: Plain, options: Any) -> Iterator[tuple[float, dict[str, Tensor]]]:
    """The loss of each step of the plain network, and its gradients by name, after clipping."""
    random = torch.Generator().manual_seed(options.seed)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=options.lr)
    for _ in range(options.steps):
        starts = torch.randint(len(_text()) - options.context, (options.batch, 1), generator=random)
        text = _text()[starts + torch.arange(options.context + 1)].long()
        optimizer.zero_grad()
        loss = functional.cross_entropy(plain(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), options.clip)
        yield loss.item(), {name: one.grad.clone() for name, one in plain.named_parameters() if one.grad is not None}
        optimizer.step()


@functools.lru_cache
def _text() -> Tensor:
    return torch.randint(256, (2000,), generator=torch.Generator().manual_seed(5), dtype=torch.uint8)


def _train(
    example: ModuleType, layout: Layout, dtype: str, steps: int
) -> Iterator[tuple[float, float, dict[str, Any]]]:
    """For each step: the loss, the plain network's, and by name the gradients that this rank holds, with the plain
    network's."""
    options = _options(example, layout, dtype, steps)
    plain = _steps(example, _plain(example, options), options)
    with parallel.initialize_model_parallel(layout.tp, layout.pp, layout.cp) as grid, parallel.use(grid):
        model = example.build(options, grid)
        engine = example.engine_for(model, options)
        optimizer = torch.optim.AdamW(engine.parameters(), lr=options.lr)
        for inputs, targets in example.batches(_text(), options, grid):
            optimizer.zero_grad()
            loss = engine.train_batch(inputs, targets).item()
            engine.clip_grad_norm_(options.clip)
            expected, gradients = next(plain)
            pairs = {
                name: (one.grad, _part(gradients[example.global_name(name)], one))
                for name, one in model.named_parameters()
            }
            yield loss, expected, pairs
            optimizer.step()
        engine.free()


@pytest.mark.every_size
@pytest.mark.parametrize("layout", _layouts(LAYOUTS))
def test_float64(example: ModuleType, layout: Layout, steps: int) -> None:
    """Losses and gradients of all steps to 1e-10."""
    _skip_unless(layout)
    count = 0
    for loss, expected, pairs in _train(example, layout, "float64", steps):
        assert loss == pytest.approx(expected, rel=0, abs=1e-10)
        for name, (one, other) in pairs.items():
            torch.testing.assert_close(one, other, rtol=0, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")
        count += 1
    assert count == steps


@pytest.mark.every_size
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        pytest.param("float32", 2e-4, id="float32", marks=pytest.mark.long),
        pytest.param("bfloat16", 0.1, id="bfloat16"),
    ],
)
@pytest.mark.parametrize("layout", _layouts(ROUNDED))
def test_lower_precision(example: ModuleType, layout: Layout, dtype: str, tolerance: float, steps: int) -> None:
    """Losses to `tolerance`, which is what rounding changes in 20 steps; gradients of the first step to the same,
    relative to their norm."""
    _skip_unless(layout)
    first = True
    for loss, expected, pairs in _train(example, layout, dtype, steps):
        assert loss == pytest.approx(expected, rel=tolerance)
        if first:
            for name, (one, other) in pairs.items():
                assert (one - other).norm() <= tolerance * other.norm() + 1e-6, name
        first = False


def _skip_unless(layout: Layout) -> None:
    if layout.ranks != dist.get_world_size():
        pytest.skip(f"needs {layout.ranks} ranks")
