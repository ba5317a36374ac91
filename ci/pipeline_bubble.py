"""How long pipeline stages idle, against the formula: mpirun -np 4 python ci/pipeline_bubble.py

Each schedule runs with parts of a model that sleep instead of computing, so that ranks don't compete for cores: --unit
seconds for a stage's forward, and for each half of its backward. What is beyond the formula is what the engine and the
messages cost. The best of --repeat batches, since a machine that does other things makes a stage late at times.

--draw FOLDER draws what was measured.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from mpicoll import parallel, world
from mpicoll.parallel.pipeline import schedules

CASES = [("gpipe", 1), ("1f1b", 1), ("zero_bubble", 1), ("interleaved", 2), ("looped_bfs", 2)]


class Sleep(torch.autograd.Function):
    """The identity, after a while, in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        time.sleep(ctx.backward)
        return grad, None, None


class Part(nn.Module):
    def __init__(self, unit: float) -> None:
        super().__init__()
        self.unit = unit
        self.weight = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        x = x if x.requires_grad else x.requires_grad_()  # so that the first stage has an input half, too
        weight: Tensor = Sleep.apply(self.weight, 0, self.unit)
        moved: Tensor = Sleep.apply(x, self.unit, self.unit)
        return moved + weight


def measure(name: str, chunks: int, options: argparse.Namespace) -> Any:
    parts = [Part(options.unit / chunks) for _ in range(chunks)]
    engine = parallel.PipelineEngine(
        parts, lambda output, target: output.mean(), micro_batches=options.micro_batches, schedule=name
    )
    batch = torch.zeros(options.micro_batches, 8)
    timelines = []
    for _ in range(options.repeat + 1):
        engine.train_batch(batch.clone(), batch)
        timelines.append(engine.timeline())
    engine.free()
    return min(timelines[1:], key=lambda one: one.bubble)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unit", type=float, default=0.02, help="seconds (default: 0.02)")
    parser.add_argument("--micro-batches", type=int, help="a multiple of the ranks (default: twice as many)")
    parser.add_argument("--repeat", type=int, default=3, help="(default: 3)")
    parser.add_argument("--draw", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    torch.set_num_threads(1)
    stages = world().size
    options.micro_batches = options.micro_batches or 2 * stages
    if options.draw:
        options.draw.mkdir(parents=True, exist_ok=True)
    table = Table("schedule", "chunks", "formula", "measured", title=f"bubble of {stages} stages")
    for name, chunks in CASES:
        found = measure(name, chunks, options)
        formula, _ = schedules.evaluate_closed_form(name, stages, options.micro_batches, chunks)
        assert formula is not None
        table.add_row(name, str(chunks), f"{float(formula):.2%}", f"{float(found.bubble):.2%}")
        if options.draw and world().rank == 0:
            parallel.pipeline.draw(found, file=options.draw / f"{name}.png")
    if world().rank == 0:
        Console(color_system=None).print(table)


if __name__ == "__main__":
    main()
