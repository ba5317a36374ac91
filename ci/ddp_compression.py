"""Measure steps of DistributedDataParallel between hosts, with gloo and with each compression of mpicoll. As root:

    python ci/hosts.py --rate 1gbit 2 1 python ci/ddp_compression.py gpt --steps 10

All take turns in one run, each on a model of its own that begins with the same parameters. The times are medians over
steps of the slowest rank; the losses are means over ranks and the last fifth of the steps. `compute`, if it is one of
the ways, is a step in which each rank keeps its own gradients. `digits` trains the network
of examples/ddp_digits.py, `gpt` a transformer of 11 million parameters on the text of this repository's documentation.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mpicoll.torch import CompressionState, compression_hook

_FIRST = 24
"""Steps that are not timed: DDP makes its buckets in them, and mpicoll tries algorithms."""


def _make_digits() -> tuple[nn.Module, Callable[[torch.Generator], tuple[Tensor, Tensor]]]:
    from sklearn.datasets import load_digits

    images, digits = (torch.from_numpy(one) for one in load_digits(return_X_y=True))

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(len(digits), (32,), generator=generator)
        return images[chosen].float() / 16, digits[chosen]

    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), draw


class _GPT(nn.Module):
    def __init__(self, width: int = 384, layers: int = 6, length: int = 32) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Parameter(torch.zeros(length, width))
        block = nn.TransformerEncoderLayer(width, 6, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, text: Tensor) -> Tensor:
        hidden: Tensor = self.blocks(self.tokens(text) + self.places, mask=self.mask, is_causal=True)
        return self.head(hidden).transpose(1, 2)  # type: ignore[no-any-return]


def _make_gpt() -> tuple[nn.Module, Callable[[torch.Generator], tuple[Tensor, Tensor]]]:
    pages = sorted(Path(__file__).resolve().parents[1].glob("docs/*.md"))
    text = torch.tensor(list("".join(page.read_text() for page in pages).encode()))

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(text) - 33, (2,), generator=generator)
        rows = torch.stack([text[start : start + 33] for start in starts.tolist()])
        return rows[:, :-1], rows[:, 1:]

    return _GPT(), draw


def _step(model: Any, optimizer: Any, batch: tuple[Tensor, Tensor]) -> tuple[float, Tensor]:
    dist.barrier()
    begin = time.perf_counter()
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    seconds = torch.tensor(time.perf_counter() - begin)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    dist.all_reduce(mean := loss.detach(), dist.ReduceOp.AVG)
    return seconds.item(), mean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=("digits", "gpt"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ways", default="gloo,none,bf16,int8", help="of these")
    options = parser.parse_args()
    os.environ.setdefault("MPICOLL_TUNED", "off")
    torch.set_num_threads(1)
    dist.init_process_group("mpicoll")
    make = {"digits": _make_digits, "gpt": _make_gpt}[options.model]
    trained = {}
    for way in options.ways.split(","):
        torch.manual_seed(0)
        module, draw = make()
        group = dist.new_group(backend="gloo") if way == "gloo" else None
        model = module if way == "compute" else DistributedDataParallel(module, process_group=group)
        if way in ("bf16", "int8"):
            model.register_comm_hook(CompressionState(compression=way), compression_hook)
        trained[way] = model, torch.optim.Adam(module.parameters(), lr=1e-3)
    times: dict[str, list[float]] = {way: [] for way in trained}
    losses: dict[str, list[float]] = {way: [] for way in trained}
    generator = torch.Generator().manual_seed(dist.get_rank())
    for number in range(options.steps + _FIRST):
        batch = draw(generator)
        for way, (model, optimizer) in trained.items():
            seconds, loss = _step(model, optimizer, batch)
            if number >= _FIRST:
                times[way].append(seconds)
            losses[way].append(loss.item())
    for way in trained if dist.get_rank() == 0 else ():
        last = statistics.mean(losses[way][-max(1, options.steps // 5) :])
        curve = " ".join(f"{one:.3f}" for one in losses[way][:: max(1, len(losses[way]) // 8)])
        milliseconds = statistics.median(times[way]) * 1e3
        print(f"{options.model} {way:7} {milliseconds:8.2f} ms a step, loss {last:.4f} at the end; {curve}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
