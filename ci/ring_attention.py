"""What ring attention costs, and how much of its traffic it hides: mpirun -np 2 python ci/ring_attention.py

Forward and backward of 12 heads, in turns that begin with a barrier, with one thread in each rank:

* ring: ``ring_attention``;
* alone: the same without messages, each rank keeping what it has: what there is to compute;
* moved: the same messages, without computing anything;
* exposed: what a ring spends in starting messages and in waiting for them, on the rank that waits least, which is the
  one that the others wait for; hidden = 1 - exposed / moved;
* gather: keys and values are gathered on every rank, torch's own attention computes, and their gradients are
  reduce-scattered: the simplest thing that works, with P times the memory;
* ulysses: ``ulysses_attention``.

Printed are medians over the turns, of the slowest rank, in milliseconds. Then what a rank sends to its neighbour in one
forward and backward, against the formula.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import mpicoll
from mpicoll.parallel.context_parallel import position_ids, ring_attention, ulysses_attention
from mpicoll.parallel.context_parallel.ring import RingExchange
from mpicoll.torch.autograd import all_gather_single

TURNS = 9
HEADS = 12

Wait = Callable[[], list[Tensor]]

CASES: tuple[tuple[int, int, torch.dtype, bool, Any], ...] = (
    (256, 64, torch.float32, False, "contiguous"),
    (1024, 64, torch.float32, False, "contiguous"),
    (1024, 64, torch.float32, True, "contiguous"),
    (1024, 64, torch.float32, True, "zigzag"),
    (1024, 64, torch.bfloat16, True, "zigzag"),
    (128, 512, torch.float32, False, "contiguous"),
)
"""Tokens of a rank, head_dim, dtype, causal, layout."""


class Meter:
    """Stands between ring attention and its messages."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.sent: list[int] = []

    @contextmanager
    def timed(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - begin

    @contextmanager
    def between(self) -> Iterator[None]:
        real = RingExchange.shift

        def shift(ring: RingExchange, tensors: Sequence[Tensor]) -> Wait:
            self.sent += [one.nbytes for one in tensors]
            with self.timed():
                wait = real(ring, tensors)

            def timed_wait() -> list[Tensor]:
                with self.timed():
                    return wait()

            return timed_wait

        with passing_on(shift):
            yield


@contextmanager
def passing_on(shift: Callable[[RingExchange, Sequence[Tensor]], Wait]) -> Iterator[None]:
    """Let `shift` be what moves blocks."""
    real = RingExchange.shift
    RingExchange.shift = shift  # type: ignore[assignment, method-assign]
    yield
    RingExchange.shift = real  # type: ignore[method-assign]


def gathered(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, layout: Any) -> Tensor:
    k, v = (all_gather_single(one, 2) for one in (k, v))
    if not causal:
        return scaled_dot_product_attention(q, k, v)
    rows = position_ids(q.shape[2], layout=layout)
    mask = rows[:, None] >= all_gather_single(rows)[None, :]
    return scaled_dot_product_attention(q, k, v, attn_mask=mask)


def moved(shape: Sequence[int], dtype: torch.dtype) -> None:
    """The messages of a forward and a backward."""
    world = mpicoll.world()
    block = [torch.zeros(shape, dtype=dtype) for _ in range(2)]
    sums = [torch.zeros(shape) for _ in range(2)]
    ring = RingExchange(world, "forward")
    for _ in range(world.size - 1):
        ring.shift(block)()
    ring = RingExchange(world, "backward")
    for step in range(world.size):
        travelling = [*(block if step < world.size - 1 else ()), *(sums if step > 1 else ())]
        if travelling:
            ring.shift(travelling)()
    ring.shift(sums)()


def measure(tokens: int, dim: int, dtype: torch.dtype, causal: bool, layout: Any) -> str:
    """A line of the table."""
    world = mpicoll.world()
    shape = (1, HEADS, tokens, dim)
    generator = torch.Generator().manual_seed(world.rank)
    *inputs, grad = (torch.randn(shape, generator=generator).to(dtype) for _ in range(4))
    inputs = [one.requires_grad_() for one in inputs]

    def both(attention: Callable[..., Tensor]) -> None:
        torch.autograd.grad(attention(*inputs, causal=causal, layout=layout), inputs, grad)

    def alone() -> None:
        with passing_on(lambda ring, tensors: lambda: list(tensors)):
            both(ring_attention)

    def metered() -> Meter:
        meter = Meter()
        with meter.between():
            both(ring_attention)
        return meter

    table: dict[str, Callable[[], Any]] = {
        "ring": metered,
        "alone": alone,
        "moved": lambda: moved(shape, dtype),
        "gather": lambda: both(gathered),
        "ulysses": lambda: both(ulysses_attention),
    }
    times: dict[str, list[float]] = {name: [] for name in (*table, "exposed")}
    sent: list[int] = []
    for turn in range(TURNS + 1):
        for name, call in table.items():
            mpicoll.barrier()
            begin = time.perf_counter()
            result = call()
            took = float(mpicoll.allreduce(np.array(time.perf_counter() - begin), op="max"))
            if turn:
                times[name].append(took * 1e3)
            if turn and isinstance(result, Meter):
                sent = result.sent
                times["exposed"].append(float(mpicoll.allreduce(np.array(result.seconds), op="min")) * 1e3)
    seen = {name: median(values) for name, values in times.items()}
    n, hops = math.prod(shape) * dtype.itemsize, world.size - 1
    formula = 4 * n * hops + 2 * n * hops * max(1, 4 // dtype.itemsize)
    return (
        f"{tokens:6} {dim:8} {str(dtype).removeprefix('torch.'):9}{causal!s:7}{layout:11}"
        + "".join(f"{seen[name]:9.2f}" for name in ("ring", "alone", "moved", "exposed", "gather", "ulysses"))
        + f"{seen['gather'] / seen['ring']:12.2f}{1 - seen['exposed'] / seen['moved']:8.0%}"
        + f"{len(sent):5} of {6 * hops} messages,{sum(sent):10} of {formula} bytes"
    )


def main() -> None:
    torch.set_num_threads(1)
    if mpicoll.world().size == 1:
        sys.exit("ring_attention.py: a world of one sends nothing; run it by mpirun -np 2")
    if mpicoll.world().rank == 0:
        print(
            "tokens head_dim dtype    causal layout          ring    alone    moved  exposed   gather  ulysses", end=""
        )
        print(" gather/ring  hidden", flush=True)
    for case in CASES:
        line = measure(*case)
        if mpicoll.world().rank == 0:
            print(line, flush=True)


if __name__ == "__main__":
    main()
