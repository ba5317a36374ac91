"""What a step with a synchronous parameter server costs between hosts, beside the bound by the bytes of its links.

    python ci/hosts.py --rate 1gbit 2 1 python ci/parameter_server.py --rate 1gbit
    python ci/hosts.py --rate 1gbit 3 1 python ci/parameter_server.py --rate 1gbit --servers 2

The first ranks are servers, on links of `--rate`. Two tables, both of the median step of the slowest worker:

* throughput: pushes and pulls of numpy arrays of float32, without computing. Through the link of a server pass W/S
  times the model each way, through that of a worker once: the larger one, at the rate of the links, is the bound by
  bytes. The bound by bytes on the wire also has the headers of Ethernet, IP and TCP, 66 of 1,514 bytes.
* hidden: a multilayer perceptron of torch of the same size, whose step begins with a pull. `compute` is a step with
  neither pull nor push, `transfer` one with nothing else, and hidden is the share of `transfer` that a step with all
  three does not take longer than `compute`. `by plain sockets` is what the machine allows: the same share where threads
  that do nothing else send and receive as many bytes by TCP while the same model computes, which needs none of them.
  All take turns in blocks, and the shares are those of each block, so that a drift of the machine affects all alike;
  the median and the quartiles of the blocks are printed. `of best` compares the means of the fastest quarter of each:
  where other programs use the machine, too, its noise is less. `CPU` is the time of the cores that a step takes from
  the worker's own thread beyond that of `compute`, from its other threads, and from the first server in each update.
"""

from __future__ import annotations

import argparse
import copy
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from hosts import PAYLOAD, parse_rate
from rich.console import Console
from rich.table import Table
from torch import nn

import mpicoll
from mpicoll.parallel.parameter_server import SGD, ParameterServer, Worker

_TIMED = 2
"""Timed steps of a function in a block."""


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


class Times(NamedTuple):
    """Seconds of a step: of the clock, of the core that its thread uses, and of those that other threads use."""

    wall: float
    own: float
    other: float


def measure(step: Callable[[], Any], steps: int) -> list[Times]:
    """Return the times of each step."""
    found = []
    for _ in range(steps):
        begin = time.perf_counter(), time.thread_time(), time.process_time()
        step()
        wall, own, process = (
            time.perf_counter() - begin[0],
            time.thread_time() - begin[1],
            time.process_time() - begin[2],
        )
        found.append(Times(wall, own, process - own))
    return found


def measure_in_turns(functions: Sequence[Callable[[], Any]], steps: int, members: Any) -> Any:
    """Return, for each of several blocks, the mean times of each function on the slowest of `members`. The first step
    of a function in a block is not timed."""
    blocks = [
        [np.mean(measure(function, 1 + _TIMED)[1:], axis=0) for function in functions]
        for _ in range(-(-steps // _TIMED))
    ]
    everyone = mpicoll.allgather_object(np.array(blocks), comm=members)
    return np.max(everyone, axis=0)


class PlainSockets:
    """Connections by TCP of each worker with each server, on which threads move `nbytes` each way. Collective over all
    ranks, of which the first `servers` are servers."""

    def __init__(self, servers: int, nbytes: int) -> None:
        world = mpicoll.world()
        self._data, self._memory = np.ones(nbytes, np.uint8), np.empty(nbytes, np.uint8)
        with socket.create_server(("", 0)) as listener:
            place = socket.gethostbyname(socket.gethostname()), listener.getsockname()[1]
            places = mpicoll.allgather_object(place)
            if world.rank >= servers:
                self._connections = [socket.create_connection(place) for place in places[:servers]]
            else:
                self._connections = [listener.accept()[0] for _ in range(servers, world.size)]
                for connection in self._connections:
                    threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Answer what arrives by as many bytes, until the worker closes the connection."""
        while connection.recv(1, socket.MSG_PEEK):
            for thread in self._start(connection):
                thread.join()

    def _start(self, connection: socket.socket) -> list[threading.Thread]:
        threads = [
            threading.Thread(target=connection.sendall, args=(self._data,)),
            threading.Thread(target=self._receive, args=(connection,)),
        ]
        for thread in threads:
            thread.start()
        return threads

    def _receive(self, connection: socket.socket) -> None:
        left = memoryview(self._memory)
        while left:
            left = left[connection.recv_into(left, len(left), socket.MSG_WAITALL) :]

    def move(self, compute: Callable[[], Any]) -> None:
        """Send and receive on a worker, while `compute` runs."""
        threads = [thread for connection in self._connections for thread in self._start(connection)]
        compute()
        for thread in threads:
            thread.join()

    def close(self) -> None:
        """Close the connections of a worker, which ends the threads of the servers."""
        for connection in self._connections:
            connection.close()


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

        times = [one.wall for one in measure(step, arguments.steps)]
    taken = slowest(median(times), members)
    nbytes = arguments.megabytes * 1e6 * max(1.0, workers / servers)
    bound = nbytes / parse_rate(arguments.rate)
    if members.rank == 0:
        table = Table(title=f"{servers} servers, {workers} workers, {arguments.megabytes} MB, {arguments.rate}")
        for column in ("ms of a step", "first steps", "bound by bytes", "of it", "on the wire", "of it"):
            table.add_column(column, justify="right")
        first = " ".join(f"{1e3 * one:.0f}" for one in times[:3])
        wire = bound / PAYLOAD
        row = [f"{1e3 * taken:.1f}", first, f"{1e3 * bound:.1f}", f"{bound / taken:.3f}"]
        table.add_row(*row, f"{1e3 * wire:.1f}", f"{wire / taken:.3f}")
        console.print(table)


def measure_hidden(arguments: argparse.Namespace, console: Console) -> None:
    world, servers = mpicoll.world(), arguments.servers
    members = world.group(range(servers, world.size))
    rows = []
    choices: list[dict[str, Any]] = [{"prefetch": False}, {}, {"prefetch": True}]
    if arguments.default_only:
        choices = [{}]
    torch.set_num_threads(1)
    width = arguments.width
    layers = max(1, round(arguments.megabytes * 250_000 / width**2))
    for options in choices:
        sockets = PlainSockets(servers, 4 * layers * (width + 1) * width // servers)
        blocks, used = None, 0.0
        if world.rank < servers:
            used = serve(ParameterServer(optimizer=partial(torch.optim.SGD, lr=1e-3)))
        else:
            torch.manual_seed(0)
            module = nn.Sequential(*(one for _ in range(layers) for one in (nn.Linear(width, width), nn.ReLU())))
            x = torch.randn(arguments.batch, width)
            blocks = measure_worker(module, x, options, sockets, arguments.steps, members)
        used = mpicoll.bcast_object(used, root=0)
        if blocks is not None:
            rows.append([", ".join(f"{key}={value}" for key, value in options.items()) or "default"])
            rows[-1] += describe(blocks, used)
    if world.rank == servers:
        table = Table(title=f"{servers} servers, batch of {arguments.batch}, {layers} layers, {arguments.rate}")
        columns = ("options", "compute", "transfer", "ms of a step", "hidden (quartiles)", "of best")
        for column in (*columns, "by plain sockets", "of best", "CPU"):
            table.add_column(column, justify="right")
        for row in rows:
            table.add_row(*row)
        console.print(table)


def serve(server: ParameterServer) -> float:
    """Serve until all workers have left. Return the seconds of a core that an update takes, a median."""
    used = []
    begin = time.process_time()
    while server.update_model():
        used.append(time.process_time() - begin)
        begin += used[-1]
    return median(used)


def measure_worker(
    module: nn.Module, x: torch.Tensor, options: dict[str, Any], sockets: PlainSockets, steps: int, members: Any
) -> Any:
    """Return the times of computing, of transferring, of both, and of computing beside plain sockets, in blocks."""
    plain = copy.deepcopy(module)

    def compute() -> None:
        plain(x).square().mean().backward()
        for parameter in plain.parameters():
            parameter.grad = None

    with Worker(module, **options) as worker:

        def transfer() -> None:
            worker.pull_weights()
            worker.push_gradients()

        def step() -> None:
            worker.pull_weights()
            module(x).square().mean().backward()
            worker.push_gradients()

        blocks = measure_in_turns([compute, transfer, step, partial(sockets.move, compute)], steps, members)
    sockets.close()
    return blocks


def describe(blocks: Any, used: float) -> list[str]:
    """Return the cells of a table for blocks of times, in seconds, and for the time of a core that a server uses."""
    wall = blocks[:, :, Times._fields.index("wall")]
    best = np.sort(wall, axis=0)[: max(1, len(wall) // 4)].mean(axis=0)
    cells = [f"{1e3 * one:.1f}" for one in np.median(wall, axis=0)[:3]]
    for whole in (2, 3):
        share = 1 - (wall[:, whole] - wall[:, 0]) / wall[:, 1]
        low, middle, high = np.quantile(share, (0.25, 0.5, 0.75))
        cells.append(f"{middle:.2f} ({low:.2f}-{high:.2f})")
        cells.append(f"{1 - (best[whole] - best[0]) / best[1]:.2f}")
    _, own, other = np.median(blocks[:, 2], axis=0) - np.median(blocks[:, 0], axis=0)
    cells.append(f"{1e3 * own:.0f}, {1e3 * other:.0f}, {1e3 * used:.0f}")
    return cells


def main() -> None:
    arguments = read_arguments()
    console = Console(width=120)
    if arguments.only != "hidden":
        measure_throughput(arguments, console)
    if arguments.only != "throughput":
        measure_hidden(arguments, console)


if __name__ == "__main__":
    main()
