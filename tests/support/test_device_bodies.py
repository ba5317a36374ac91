"""What the bodies of tests of device memory need of the libraries."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from support import data
from support.device_bodies import DTYPES, LAYOUTS, Torch, rows
from support.exercise import REDUCTIONS


def test_torch_captures_one_graph_at_a_time() -> None:
    """Torch refuses a second capture in the process, whatever the stream."""
    under_way: list[Any] = []
    streams: list[Any] = []

    @contextmanager
    def graph(graph: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        assert not under_way, "only one capture may be under way"
        assert capture_error_mode == "thread_local"
        streams.append(stream)
        under_way.append(graph)
        time.sleep(0.02)
        yield
        under_way.remove(graph)

    arrays = Torch.__new__(Torch)
    arrays.torch = SimpleNamespace(cuda=SimpleNamespace(CUDAGraph=object, Stream=object, graph=graph))
    failures: list[BaseException] = []

    def capture() -> None:
        try:
            with arrays.capturing():
                pass
        except BaseException as error:  # noqa: BLE001  raised by the test
            failures.append(error)

    threads = [threading.Thread(target=capture) for _ in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(10)
    assert not failures
    assert len(set(map(id, streams))) == 3


@pytest.mark.parametrize("op", ["user_affine", "user_first", "user_matmul"])
def test_functions_of_users_take_arrays_of_the_device(cuda: ModuleType, op: str) -> None:
    name = "complex64" if op == "user_affine" else "int32"
    values = [data.numbers(data.random(op, rank), name, (2, 2), op) for rank in range(2)]
    got = getattr(data, op)(*map(cuda.array, values))
    assert isinstance(got, cuda.ndarray)
    assert got.dtype == values[0].dtype
    np.testing.assert_allclose(cuda.asnumpy(got), getattr(data, op)(*values), rtol=1e-5)


def test_no_row_asks_for_what_a_library_lacks() -> None:
    """cupy's where has no bfloat16."""
    for collective in REDUCTIONS:
        for row in rows(collective, DTYPES, LAYOUTS, data.USER):
            assert (row["op"], row["dtype"]) != ("user_first", "bfloat16")
