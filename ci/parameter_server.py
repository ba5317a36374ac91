"""What a step with a synchronous parameter server costs between hosts, beside the bound by the bytes of its links.

    python ci/hosts.py --rate 1gbit 2 1 python ci/parameter_server.py --rate 1gbit
    python ci/hosts.py --rate 1gbit 3 1 python ci/parameter_server.py --rate 1gbit --servers 2

The first ranks are servers, on links of `--rate`. Two tables, both of the median step of the slowest worker:

* throughput: pushes and pulls of numpy arrays of float32, without computing. Through the link of a server pass W/S
  times the model each way, through that of a worker once: the larger one, at the rate of the links, is the bound by
  bytes. The bound by bytes on the wire also has the headers of Ethernet, IP and TCP, 66 of 1,514 bytes.
* hidden: a multilayer perceptron of torch of the same size, whose step begins with a pull. `compute` is a step with
  neither pull nor push, `transfer` one with nothing else, and hidden is the share of `transfer` that a step with all
  three does not take longer than `compute`. The three take turns in blocks, and the share is that of each block, so
  that a drift of the machine affects all three alike; the median and the quartiles of the blocks are printed.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import mean, median, quantiles
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import mpicoll
from mpicoll.parallel.parameter_server import SGD, ParameterServer, Worker

PAYLOAD = 1448 / 1514
"""Share of the data in the frames of a TCP connection with time stamps, at an MTU of 1,500 bytes."""

_TIMED = 2
"""Timed steps of a function in a block."""

RATES = {"gbit": 1e9 / 8, "mbit": 1e6 / 8}


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="1gbit", help="of the links, such as 1gbit: as passed to ci/hosts.py")
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--megabytes", type=int, default=40, help="of the model")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=1024, help="of the perceptron")
    parser.add_argument("--width", type=int, default=1024, help="of the layers of the perceptron")
    parser.add_argument("--only", choices=["throughput", "hidden"])
    parser.add_argument("--default-only", action="store_true", help="of the options of workers, the default alone")
    return parser.parse_args()


def measure(step: Callable[[], Any], steps: int) -> list[float]:
    """Return the seconds of each step."""
    found = []
    for _ in range(steps):
        begin = time.perf_counter()
        step()
        found.append(time.perf_counter() - begin)
    return found


def measure_in_turns(functions: Sequence[Callable[[], Any]], steps: int, members: Any) -> list[list[float]]:
    """Return, for each of several blocks, the mean seconds of each function on the slowest of `members`. The first
    step of a function in a block is not timed."""
    blocks = [[mean(measure(function, 1 + _TIMED)[1:]) for function in functions] for _ in range(-(-steps // _TIMED))]
    everyone = mpicoll.allgather_object(blocks, comm=members)
    return np.max(everyone, axis=0).tolist()


def slowest(seconds: float, workers: Any) -> float:
    return max(mpicoll.allgather_object(seconds, comm=workers))


def measure_throughput(arguments: argparse.Namespace, console: Console) -> None:
    world, servers = mpicoll.world(), arguments.servers
    workers = world.size - servers
    members = world.group(range(servers, world.size))
    if world.rank < servers:
        ParameterServer(SGD(lr=0.1)).run()
        return
    gradient = {"w": np.ones(arguments.megabytes * 250_000, np.float32)}
    with Worker({"w": gradient["w"].copy()}) as worker:
        worker.pull_weights()  # the initial weights, which the first worker sends, take as long as a step

        def step() -> None:
            worker.push_gradients(gradient)
            worker.pull_weights()

        times = measure(step, arguments.steps)
    taken = slowest(median(times), members)
    nbytes = arguments.megabytes * 1e6 * max(1.0, workers / servers)
    bound = nbytes / find_rate(arguments.rate)
    if members.rank == 0:
        table = Table(title=f"{servers} servers, {workers} workers, {arguments.megabytes} MB, {arguments.rate}")
        for column in ("ms of a step", "first steps", "bound by bytes", "of it", "on the wire", "of it"):
            table.add_column(column, justify="right")
        first = " ".join(f"{1e3 * one:.0f}" for one in times[:3])
        wire = bound / PAYLOAD
        row = [f"{1e3 * taken:.1f}", first, f"{1e3 * bound:.1f}", f"{bound / taken:.3f}"]
        table.add_row(*row, f"{1e3 * wire:.1f}", f"{wire / taken:.3f}")
        console.print(table)


def find_rate(text: str) -> float:
    """Return bytes per second."""
    unit = next(one for one in RATES if text.endswith(one))
    return float(text.removesuffix(unit)) * RATES[unit]


def measure_hidden(arguments: argparse.Namespace, console: Console) -> None:
    world, servers = mpicoll.world(), arguments.servers
    members = world.group(range(servers, world.size))
    optimizer = partial(torch.optim.SGD, lr=1e-3)
    rows = []
    choices: list[dict[str, Any]] = [{"prefetch": False}, {}, {"prefetch": True}]
    if arguments.default_only:
        choices = [{}]
    torch.set_num_threads(1)
    width = arguments.width
    layers = max(1, round(arguments.megabytes * 250_000 / width**2))
    for options in choices:
        if world.rank < servers:
            ParameterServer(optimizer=optimizer).run()
            continue
        torch.manual_seed(0)
        plain = nn.Sequential(*(one for _ in range(layers) for one in (nn.Linear(width, width), nn.ReLU())))
        x = torch.randn(arguments.batch, width)

        module = copy.deepcopy(plain)

        def compute_alone(plain: nn.Module = plain, x: torch.Tensor = x) -> None:
            plain(x).square().mean().backward()
            for parameter in plain.parameters():
                parameter.grad = None

        with Worker(module, **options) as worker:

            def transfer(worker: Worker = worker) -> None:
                worker.pull_weights()
                worker.push_gradients()

            def step(worker: Worker = worker, module: nn.Module = module, x: torch.Tensor = x) -> None:
                worker.pull_weights()
                module(x).square().mean().backward()
                worker.push_gradients()

            blocks = measure_in_turns([compute_alone, transfer, step], arguments.steps, members)
        name = ", ".join(f"{key}={value}" for key, value in options.items()) or "default"
        low, middle, high = quantiles([1 - (whole - alone) / moved for alone, moved, whole in blocks], n=4)
        times = [f"{1e3 * median(one):.1f}" for one in zip(*blocks, strict=True)]
        rows.append([name, *times, f"{middle:.2f} ({low:.2f}-{high:.2f})"])
    if world.rank == servers:
        table = Table(title=f"{servers} servers, batch of {arguments.batch}, {layers} layers, {arguments.rate}")
        for column in ("options", "compute", "transfer", "ms of a step", "hidden (quartiles)"):
            table.add_column(column, justify="right")
        for row in rows:
            table.add_row(*row)
        console.print(table)


def main() -> None:
    arguments = read_arguments()
    console = Console(width=120)
    if arguments.only != "hidden":
        measure_throughput(arguments, console)
    if arguments.only != "throughput":
        measure_hidden(arguments, console)


if __name__ == "__main__":
    main()
