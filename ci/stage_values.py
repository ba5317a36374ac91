"""What a value between two pipeline stages costs: mpirun -np 2 python ci/stage_values.py

Half a round trip between two ranks, in microseconds, and its ratio to that of ``mpicoll.send`` and ``mpicoll.recv``.
Values are a tensor, or the tuples that PipelineEngine sends, with one or two tensors of half the size. The forms take
turns; a time is the median over blocks of round trips, of the slower rank. The first of all arguments, if there is one,
are the sizes in bytes, separated by commas.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median

import torch

import mpicoll
from mpicoll.parallel.p2p import PipeP2P

SIZES = "8,4096,65536,1048576"

BLOCKS = 41

BLOCK = 2e-3
"""Duration of a block in seconds."""


def take_turns(forms: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the seconds of half a call of each form, on the slower rank."""

    def block(form: Callable[[], object], calls: int) -> float:
        mpicoll.barrier()
        begin = time.perf_counter()
        for _ in range(calls):
            form()
        return (time.perf_counter() - begin) / calls / 2

    calls: dict[str, int] = {}
    for name, form in forms.items():
        block(form, 20)
        took = max(mpicoll.allgather_object(block(form, 20)))
        calls[name] = max(1, round(BLOCK / took / 2))
    times: dict[str, list[float]] = {name: [] for name in forms}
    for turn in range(BLOCKS):
        for name in [*forms][turn % len(forms) :] + [*forms][: turn % len(forms)]:
            times[name].append(block(forms[name], calls[name]))
    return {
        name: median(max(both) for both in zip(*mpicoll.allgather_object(own), strict=True))
        for name, own in times.items()
    }


def measure(p2p: PipeP2P, size: int) -> str:
    """Return a line of the table."""
    rank, other = p2p.stage, 1 - p2p.stage
    whole, into = torch.ones(max(1, size // 4)), torch.empty(max(1, size // 4))
    halves = [torch.ones(max(1, size // 8)) for _ in range(2)]
    one, two = (rank, "train_batch", whole), (rank, "train_batch", halves)

    def bounce(send: Callable[[], object], recv: Callable[[], object]) -> Callable[[], object]:
        first, second = (send, recv) if rank == 0 else (recv, send)

        def both() -> None:
            first()
            second()

        return both

    found = take_turns(
        {
            "native": bounce(lambda: mpicoll.send(whole, other, 5), lambda: mpicoll.recv(None, other, 5, out=into)),
            "tensor": bounce(lambda: p2p.send(whole, other), lambda: p2p.recv(other)),
            "tuple": bounce(lambda: p2p.send(one, other, channel=1), lambda: p2p.recv(other, channel=1)),
            "engine": bounce(lambda: p2p.isend(one, other, channel=2), lambda: p2p.recv(other, channel=2)),
            "engine, 2 tensors": bounce(lambda: p2p.isend(two, other, channel=3), lambda: p2p.recv(other, channel=3)),
        }
    )
    p2p.wait()
    shown = (f"{name} {1e6 * took:.1f} ({took / found['native']:.2f})" for name, took in found.items())
    return f"{size:9d} B: {', '.join(shown)}"


def main() -> None:
    p2p = PipeP2P(mpicoll.world())
    for size in map(int, (sys.argv[1] if len(sys.argv) > 1 else SIZES).split(",")):
        line = measure(p2p, size)
        if p2p.stage == 0:
            print(line, flush=True)
    p2p.close()


if __name__ == "__main__":
    main()
