"""The methods of synchronisation: what a training step does with the gradients of all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import repeat
from typing import Any, NamedTuple, TypeAlias

import numpy as np

import mpicoll
from mpicoll.cli.study.laws import LAWS
from mpicoll.errors import ArgumentError
from mpicoll.parallel.parameter_server import SGD, ParameterServer, Worker
from mpicoll.schedules import PARAMETER_SERVER, Algorithm, get, traffic

Vector: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]

LEARNING_RATE = 2.0**-10
"""A power of two, so that the updates of the first step are exact."""

_ALGORITHMS = {
    "master_worker": "master_worker",
    "ring": "ring",
    "tree": "tree",
    "halving_doubling": "halving_doubling",
    "native": "native",
    "shared_memory": "shm_pipelined",
    "hierarchical": "hierarchical",
}
"""The algorithm of allreduce that a method forces."""

NAMES = ("parameter_server", *_ALGORITHMS)


class Method(NamedTuple):
    """A method by its name in `NAMES`; `servers` is 0 but for a parameter server."""

    name: str
    servers: int = 0

    @property
    def label(self) -> str:
        """The name in tables and figures."""
        words = self.name.replace("_", "-" if self.name in ("master_worker", "halving_doubling") else " ")
        return f"{words}, S = {self.servers}" if self.servers else words

    @property
    def schedule(self) -> Algorithm | None:
        """The schedule of the method; None if it has none."""
        if self.servers:
            return PARAMETER_SERVER
        return get("allreduce", _ALGORITHMS[self.name]) if self.name in LAWS else None

    def count_bytes(self, ranks: int) -> Fraction | None:
        """Return what the busiest rank sends by the schedule, as a multiple of N; None without a schedule."""
        if self.schedule is None:
            return None
        return max(max(pair) for pair in traffic(self.schedule, ranks, segments=self.servers or 1))

    def law(self, ranks: int) -> Fraction | None:
        """Return what the busiest rank sends by the closed form, as a multiple of N; None without one."""
        return LAWS[self.name].busiest(ranks, self.servers) if self.name in LAWS else None


def list_methods(names: Sequence[str], servers: Sequence[int], ranks: int) -> list[Method]:
    """Return the methods for `ranks` ranks: a parameter server once for each number of servers that leaves a worker."""
    found = []
    for name in names:
        if name == "parameter_server":
            found += [Method(name, count) for count in servers if count < ranks]
        else:
            found.append(Method(name))
    return found


def list_without_workers(names: Sequence[str], servers: Sequence[int], ranks: int) -> dict[str, str]:
    """Return the labels of the parameter servers that leave no worker among `ranks` ranks, each with that reason."""
    counts = [count for count in servers if count >= ranks] if "parameter_server" in names else []
    return {
        Method("parameter_server", count).label: f"{count} servers of {ranks} ranks leave no worker" for count in counts
    }


def check_names(names: Sequence[str]) -> None:
    """Raise ArgumentError if there is no method of some name."""
    for name in names:
        if name not in NAMES:
            raise ArgumentError(f"study sync: no algorithm {name!r}; there are {', '.join(NAMES)}")


class Model:
    """The weights of this rank, and its gradients: small whole numbers, whose sums are exact."""

    def __init__(self, nbytes: int, rank: int) -> None:
        self.weights: Vector = np.zeros(max(1, nbytes // 4), np.float32)
        self.gradients = self._gradients_of(rank)

    def _gradients_of(self, rank: int) -> Vector:
        gradients = np.arange(self.weights.size, dtype=np.int32) % 7 + rank
        return gradients.astype(np.float32)

    def check(self, ranks: Sequence[int]) -> bool:
        """Return True if the weights are what the first step gives, with the gradients of `ranks`."""
        total = sum(self._gradients_of(rank) for rank in ranks)
        return bool(np.array_equal(self.weights, -np.float32(LEARNING_RATE) * total))


def prepare_block(method: Method, model: Model, count: int) -> Callable[[], float]:
    """Return a function that takes a first step of training, but for the computation of the gradients, and `count` more
    steps, and returns the seconds of the latter on this rank.

    The first step is not timed, as the memory of new servers and workers has not been used before. Raises
    AlgorithmError where the algorithm can't serve these ranks. Collective.
    """
    if method.servers:
        return _prepare_parameter_server(method.servers, model, count)
    total = np.empty_like(model.gradients)
    algorithm = _ALGORITHMS[method.name]

    def step() -> None:
        mpicoll.allreduce(model.gradients, out=total, algorithm=algorithm)
        np.multiply(total, np.float32(-LEARNING_RATE), out=total)
        np.add(model.weights, total, out=model.weights)

    return lambda: _time_steps(step, count)


def _prepare_parameter_server(servers: int, model: Model, count: int) -> Callable[[], float]:
    """Return the block of a server, which takes no time of its own, or of a worker. The first ranks are the servers."""
    if mpicoll.world().rank < servers:
        server = ParameterServer(SGD(lr=LEARNING_RATE), reduction="sum")

        def serve() -> float:
            server.run()
            return 0.0

        return serve
    worker = Worker({"model": model.weights})

    def step() -> None:
        worker.push_gradients({"model": model.gradients})
        worker.pull_weights()

    def work() -> float:
        with worker:
            return _time_steps(step, count)

    return work


def _time_steps(step: Callable[[], None], count: int) -> float:
    step()
    begin = time.perf_counter()
    for _ in repeat(None, count):
        step()
    return time.perf_counter() - begin
