"""A model of numpy arrays that the tests of parameter servers train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mpicoll
from mpicoll.parallel.parameter_server import ParameterServer, Worker

STEPS = 20


def make_model() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {"w": random.standard_normal((6, 4)), "b": random.standard_normal(4), "scale": np.ones(())}


def make_gradients(weights: dict[str, Any], worker: int, step: int) -> dict[str, np.ndarray]:
    """The gradients of one worker's squared error, on samples of its own."""
    random = np.random.default_rng((worker, step))
    x, y = random.standard_normal((5, 6)), random.standard_normal((5, 4))
    linear = x @ weights["w"] + weights["b"]
    error = linear * weights["scale"] - y
    scaled = error * weights["scale"]
    return {"w": x.T @ scaled, "b": scaled.sum(axis=0), "scale": np.array((error * linear).sum())}


def serve_or_work(servers: int, rule: Any, work: Callable[[Worker, int], Any], **options: Any) -> Any:
    """A server's ParameterServer after all workers have left, or what `work` returns; workers count from 0."""
    rank = mpicoll.world().rank
    if rank < servers:
        server = ParameterServer(rule, **options)
        server.run()
        return server
    model = make_model()
    if rank > servers:
        for array in model.values():
            array[...] = np.nan  # only the first worker's values count
    with Worker(model) as worker:
        worker.pull_weights()
        return work(worker, rank - servers) or model


def train(worker: Worker, number: int) -> None:
    model = worker._model.as_dict()
    for step in range(STEPS):
        worker.push_gradients(make_gradients(model, number, step))
        worker.pull_weights()


def raises(expected: type[BaseException], text: str, body: Callable[[], Any]) -> Callable[[], str]:
    def checked() -> str:
        with pytest.raises(expected) as caught:
            body()
        assert text in str(caught.value), str(caught.value)
        return str(caught.value)

    return checked
