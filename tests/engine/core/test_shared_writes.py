"""Writes to memory that other ranks read: where they go, and that results do not depend on how they are made."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.data import random

pytest.importorskip("mpicoll._shm", exc_type=ImportError)

import mpicoll
from mpicoll.engine.core.arena import Arena

MANY = 1_000_000


def _arena() -> Arena:
    arena = mpicoll.world()._core.arena()
    assert arena is not None
    return arena


def _unaligned(count: int, offset: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """An array that begins `offset` bytes after the begin of a cache line."""
    memory = np.zeros(count * 8 + 128, np.uint8)
    begin = -memory.ctypes.data % 64 + offset
    return memory[begin : begin + count * 8].view(np.float64)


def _run(count: int) -> list[Any]:
    """The results of all collectives, on pieces that fill the slots and others that do not."""
    comm = mpicoll.world()
    rank, size = comm.rank, comm.size
    x = _unaligned(count * size, 8 * (rank + 1))
    x[:] = random("writes", count, rank).random(count * size)
    out: list[Any] = [
        mpicoll.allreduce(x, algorithm="shm_pipelined/64k"),
        mpicoll.reduce(x, root=size - 1, algorithm="shm_pipelined/64k"),
        mpicoll.allgather(x[1:]),
        mpicoll.gather(x[: count + rank], counts=[count + one for one in range(size)]),
        mpicoll.alltoall(x),
        mpicoll.reduce_scatter(x),
        mpicoll.scan(x),
        mpicoll.exscan(x),
        mpicoll.scatter(x if rank == 0 else None) if rank == 0 else mpicoll.scatter(x[:count]),
    ]
    y = x.copy()
    mpicoll.allreduce(y, out=y, algorithm="shm_pipelined/64k")
    mpicoll.bcast(x, root=1)
    return [*out, y, x.copy()]


@pytest.mark.extension
@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors have ordinary stores only")
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("count", [1100, 30_001])
def test_results_are_the_same(size: int, count: int) -> None:
    def body() -> int:
        arena = _arena()
        arena.streamed_writes = 0
        expected = _run(count)
        arena.streamed_writes, arena.slow_ticks = MANY, 0
        got = _run(count)
        left = arena.streamed_writes
        arena.streamed_writes = 0
        for one, other in zip(got, expected, strict=True):
            assert (one is None) == (other is None)
            assert one is None or one.tobytes() == other.tobytes()
        return left

    for left in mpicoll.run_local(body, size):
        assert MANY - 300 < left < MANY - 5


def _cached_bytes() -> int:
    """Bytes of the L3 cache, as far as they count; 16 MiB where the system does not state them."""
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text("ascii")
    except OSError:
        return 16 << 20
    whole = int(text.rstrip("K\n")) << 10
    return min(max(whole, 4 << 20), max(32 << 20, whole // 10 * 3))


@pytest.mark.extension
@pytest.mark.parametrize(("collective", "arrays"), [("allreduce", 4), ("bcast", 2)])
@pytest.mark.parametrize("streams", [False, True])
def test_outputs_that_the_cache_does_not_hold_are_written_around_it(
    collective: str, arrays: int, streams: bool
) -> None:
    from mpicoll._shm import Collective

    nbytes = (_cached_bytes() // 16 + streams) * 16 // arrays

    def body() -> bool:
        names = ("sum", "float32") if collective == "allreduce" else ("", "")
        return Collective(_arena(), collective, *names, 4, [nbytes // 4], 0, 1 << 20, False, 1).streams

    assert mpicoll.run_local(body, 2)[1] == streams


@pytest.mark.extension
@pytest.mark.parametrize("registered", [False, True])
def test_large_results_are_right(registered: bool) -> None:
    """Where they are not aligned to vectors and pieces, and where the input is the output."""
    count = _cached_bytes() // 16 + (1 << 17) + 5  # of each of two ranks

    def new(elements: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        array = mpicoll.empty((elements + 1,), np.float64) if registered else np.empty(elements + 1)
        array[:] = 0
        return array[1:]

    def body() -> None:
        rank = mpicoll.world().rank
        values = np.arange(count) % 4093
        x, y = new(count), new(2 * count)
        x[:] = values * (rank + 1)
        both = np.concatenate([values, values * 2])
        assert (mpicoll.allreduce(x, out=y[:count]) == values * 3).all()
        assert (mpicoll.scan(x, out=y[:count]) == values * (3 if rank else 1)).all()
        assert (mpicoll.exscan(x, out=y[:count]) == values * rank).all()
        assert (mpicoll.exscan(x, "prod", out=y[:count]) == (values if rank else 1)).all()
        assert (mpicoll.allgather(x, out=y) == both).all()
        z = y.copy()
        assert (mpicoll.alltoall(z, out=y) == np.concatenate([z[rank * count : (rank + 1) * count]] * 2)).all()
        assert (mpicoll.reduce_scatter(z, out=x) == both[rank * count : (rank + 1) * count] * 2).all()
        x[:] = values * (rank + 1)
        reduced = mpicoll.reduce(x, out=y[:count] if rank == 0 else None)
        assert reduced is None or (reduced == values * 3).all()
        mpicoll.allreduce(x, out=x)
        assert (x == values * 3).all()
        assert (mpicoll.allreduce(x, out=y[:count], algorithm="shm_pipelined") == values * 6).all()
        assert (mpicoll.allreduce(x, out=y[:count], algorithm="cma") == values * 6).all()
        x[:] += rank
        mpicoll.bcast(x, out=x)
        assert (x == values * 3).all()

    mpicoll.run_local(body, 2)


@pytest.mark.extension
@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors have ordinary stores only")
def test_streaming_stores_end_where_they_are_not_faster() -> None:
    def body() -> tuple[int, bool]:
        arena = _arena()
        x = np.arange(4096.0)
        arena.stored_writes = 0
        arena.streamed_writes = 40
        arena.slow_ticks = 1  # none is as fast
        for _ in range(9):
            assert (mpicoll.allreduce(x, algorithm="shm_pipelined") == 2 * x).all()
        return arena.streamed_writes, arena.stored_writes > 200

    assert mpicoll.run_local(body, 2) == [(0, True)] * 2


@pytest.mark.extension
def test_small_writes_use_ordinary_stores() -> None:
    def body() -> int:
        arena = _arena()
        arena.streamed_writes = 7
        mpicoll.allreduce(np.ones(900))
        mpicoll.alltoall(np.ones(1800))
        return arena.streamed_writes

    assert mpicoll.run_local(body, 2) == [7, 7]


@pytest.mark.extension
def test_places_of_a_slot_are_used_in_turn() -> None:
    """A later write to a place then finds it in no private cache."""

    def body() -> list[int]:
        x, out = np.ones(4096), np.empty(4096)
        for _ in range(200):
            mpicoll.allreduce(x, out=out)
            assert (out == 2).all()
        arena = _arena()
        return [int(np.count_nonzero(slots[arena.rank].view(np.float64))) for slots in arena.slots]

    for written in mpicoll.run_local(body, 2):
        assert written == [1 << 17] * 2  # 1 MiB of both slots
