"""Memory of collectives is freed with the last reference to it: results and scratch memory may be large."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.ranks import Ranks

import mpicoll

X = np.ones((60, 20))
STRIDED = np.ones((60, 40))[:, ::2]

CALLS: dict[str, Callable[[], Any]] = {
    "allreduce by a schedule": lambda: mpicoll.allreduce(X, algorithm="ring"),
    "allreduce": lambda: mpicoll.allreduce(STRIDED),
    "allreduce in the background": lambda: mpicoll.iallreduce(STRIDED).wait(),
    "reduce": lambda: mpicoll.reduce(STRIDED),
    "scan": lambda: mpicoll.scan(STRIDED),
    "exscan": lambda: mpicoll.exscan(STRIDED),
    "reduce_scatter": lambda: mpicoll.reduce_scatter(STRIDED),
    "allgather": lambda: mpicoll.allgather(STRIDED),
    "gather": lambda: mpicoll.gather(STRIDED),
    "scatter": lambda: mpicoll.scatter(STRIDED),
    "alltoall": lambda: mpicoll.alltoall(STRIDED),
    "bcast": lambda: mpicoll.bcast(STRIDED, out=np.ones((60, 40))[:, ::2]),
}


@pytest.fixture
def collector_off() -> Iterator[None]:
    gc.collect()
    gc.freeze()  # otherwise each collection would look at all tests
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("collector_off")
@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_left_to_the_collector(name: str) -> None:
    """On one rank, whose memory is prepared as on any other."""

    def main() -> int:
        call = CALLS[name]
        call()  # imports and first uses leave cycles
        gc.collect()
        call()
        return gc.collect()

    assert mpicoll.run_local(main, 1, timeout=60) == [0]


@pytest.mark.parametrize("rows", [4, 10_000])
def test_elements_that_are_not_aligned(some: Ranks, rows: int) -> None:
    """MPI's own reductions, which take the caller's memory elsewhere; the larger ones also in later calls."""

    def unaligned(values: np.ndarray) -> np.ndarray:
        array = np.zeros(values.nbytes + 1, np.uint8)[1:].view(values.dtype)
        array[:] = values
        assert not array.flags.aligned
        return array

    def main() -> None:
        size, rank = mpicoll.world().size, mpicoll.world().rank
        x, native = np.arange(float(rows * size)) + rank, None if some.local else "native"
        for collective in ("allreduce", "reduce", "reduce_scatter", "scan", "exscan"):
            call = getattr(mpicoll, collective)
            found = call(unaligned(x), algorithm=native)  # before a call with other memory prepares those of its kind
            out = None if found is None else unaligned(np.zeros_like(found))
            also = call(x, out=out, op="prod", algorithm=native)
            np.testing.assert_array_equal(found, call(x, algorithm=native))
            np.testing.assert_array_equal(also, call(x, op="prod", algorithm=native))
            np.testing.assert_array_equal(found, call(unaligned(x), algorithm=native))

    some(main)
