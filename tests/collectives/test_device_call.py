"""Repeated calls on arrays of a device, which are bound once for all arrays of a kind."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from support import fake_cuda

import mpicoll
from mpicoll.collectives import device_call
from mpicoll.errors import CommunicationError, DeviceError

pytestmark = pytest.mark.extension

WAYS = ("ipc", "shm_flat", "shm_pipelined")


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls that were prepared, by the names of their threads' collectives."""
    from mpicoll.engine import dispatch

    found: list[str] = []
    run = dispatch.run

    def recording(operation: Any) -> Any:
        found.append(operation.query.collective)
        return run(operation)

    monkeypatch.setattr(dispatch, "run", recording)
    return found


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    yield
    gc.collect()


def _values(rank: int, count: int, turn: int = 0) -> np.ndarray:
    return np.arange(count, dtype=np.float32) * (rank + 1) + turn


def _sum(size: int, count: int, turn: int = 0) -> np.ndarray:
    return np.sum([_values(rank, count, turn) for rank in range(size)], 0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", ["out", "in place", "new"])
def test_other_arrays_of_a_kind(cuda: ModuleType, prepared: list[str], way: str, form: str) -> None:
    def main() -> None:
        world = mpicoll.world()
        # At several distances from the begin of an allocation, and in several of them.
        whole, results = [cuda.zeros(1000, np.float32) for _ in range(2)], cuda.zeros(2000, np.float32)
        for turn in range(8):
            at = 7 * turn
            x = whole[turn % 2][at : at + 301]
            x[...] = cuda.asarray(_values(world.rank, 301, turn))
            out = {"out": results[3 * at : 3 * at + 301], "in place": x, "new": None}[form]
            value = mpicoll.allreduce(x, out=out, algorithm=way)
            assert out is None or value is out
            np.testing.assert_array_equal(cuda.asnumpy(value), _sum(world.size, 301, turn))
            if form != "in place":
                np.testing.assert_array_equal(cuda.asnumpy(x), _values(world.rank, 301, turn))

    mpicoll.run_local(main, 3, timeout=60)
    # The first call, and the one that is bound; before them, on some ranks, one that did not know the library.
    assert 2 * 3 <= len(prepared) <= 3 * 3


CALLS: dict[str, Callable[[ModuleType, Any, int, int], Any]] = {
    "bcast": lambda cuda, x, rank, size: mpicoll.bcast(x, 1),
    "reduce": lambda cuda, x, rank, size: mpicoll.reduce(x, root=1),
    "allgather": lambda cuda, x, rank, size: mpicoll.allgather(x),
    "gather": lambda cuda, x, rank, size: mpicoll.gather(x, 1),
    "scatter": lambda cuda, x, rank, size: mpicoll.scatter(x if rank == 1 else None, 1, out=cuda.empty(4, x.dtype)),
    "reduce_scatter": lambda cuda, x, rank, size: mpicoll.reduce_scatter(x),
    "alltoall": lambda cuda, x, rank, size: mpicoll.alltoall(x),
    "scan": lambda cuda, x, rank, size: mpicoll.scan(x),
    "exscan": lambda cuda, x, rank, size: mpicoll.exscan(x),
    "allreduce of halves": lambda cuda, x, rank, size: mpicoll.allreduce(x.astype(np.float16), "avg"),
    "premul_sum": lambda cuda, x, rank, size: mpicoll.allreduce(x, mpicoll.premul_sum(2)),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_collective_gives_what_it_gives_on_the_host(cuda: ModuleType, name: str) -> None:
    def main() -> None:
        world = mpicoll.world()
        for turn in range(4):
            values = np.arange(4 * world.size, dtype=np.float32) * (world.rank + 2) + turn
            wanted = CALLS[name](np, values, world.rank, world.size)  # type: ignore[arg-type]
            found = CALLS[name](cuda, cuda.asarray(values), world.rank, world.size)
            assert (found is None) == (wanted is None)
            if wanted is not None:
                assert found.dtype == wanted.dtype
                np.testing.assert_array_equal(cuda.asnumpy(found), wanted)

    mpicoll.run_local(main, 3, timeout=60)


@pytest.mark.parametrize("way", WAYS)
def test_ranks_whose_calls_are_bound_meet_others(cuda: ModuleType, way: str) -> None:
    """Each rank has arrays of other kinds in turn, so that only some of them prepare a call."""

    def main() -> None:
        world = mpicoll.world()
        results = [cuda.empty(50, np.float32), cuda.empty((5, 10), np.float32), cuda.empty((10, 5), np.float32)]
        for turn in range(12):
            like = results[turn * (world.rank + 1) % 3 if world.rank else 0]
            x = cuda.asarray(_values(world.rank, 50, turn)).reshape(like.shape)
            found = mpicoll.allreduce(x, out=like, algorithm=way)
            np.testing.assert_array_equal(cuda.asnumpy(found).ravel(), _sum(world.size, 50, turn))

    mpicoll.run_local(main, 2, timeout=60)


def test_arrays_that_overlap_or_have_gaps(cuda: ModuleType) -> None:
    def main() -> None:
        world = mpicoll.world()
        for turn in range(4):
            x = cuda.zeros(100, np.float32)
            x[:60] = cuda.asarray(_values(world.rank, 60, turn))
            out = x[60:] if turn < 2 else x[20:80]
            out = out[:60] if turn >= 2 else cuda.zeros(60, np.float32)
            found = mpicoll.allreduce(x[:60], out=out, algorithm="ipc")
            np.testing.assert_array_equal(cuda.asnumpy(found), _sum(world.size, 60, turn))
            strided = cuda.zeros((60, 2), np.float32)
            strided[:, 0] = cuda.asarray(_values(world.rank, 60, turn))
            found = mpicoll.allreduce(strided[:, 0], algorithm="ipc")
            np.testing.assert_array_equal(cuda.asnumpy(found), _sum(world.size, 60, turn))

    mpicoll.run_local(main, 2, timeout=60)


def test_the_callers_memory_is_not_kept(cuda: ModuleType) -> None:
    def main() -> None:
        x, out = cuda.ones(100), cuda.zeros(100)
        for _ in range(4):
            mpicoll.allreduce(x, out=out, algorithm="ipc")
        mpicoll.barrier()
        known = [weakref.ref(one.data.mem) for one in (x, out)]
        del x, out
        mpicoll.barrier()
        if mpicoll.world().rank == 0:
            gc.collect()
        mpicoll.barrier()
        assert all(one() is None for one in known)

    mpicoll.run_local(main, 2, timeout=60)


@pytest.mark.parametrize("way", WAYS)
def test_work_on_the_callers_stream_is_waited_for(cuda: ModuleType, way: str) -> None:
    if not fake_cuda.is_fake(cuda):
        pytest.skip("a real device may have done its work by chance")

    def main() -> None:
        world = mpicoll.world()
        x, out = cuda.zeros(50, np.float32), cuda.zeros(50, np.float32)
        cuda.cuda.get_current_stream().synchronize()
        for turn in range(5):
            with cuda.cuda.Stream(non_blocking=True):
                x[...] = cuda.asarray(_values(world.rank, 50, turn))
                mpicoll.allreduce(x, out=out, algorithm=way)
            np.testing.assert_array_equal(cuda.asnumpy(out), _sum(world.size, 50, turn))

    mpicoll.run_local(main, 2, timeout=60)


def test_a_capture_is_refused(cuda: ModuleType) -> None:
    def main() -> None:
        x, out = cuda.ones(10), cuda.zeros(10)
        for _ in range(3):
            mpicoll.allreduce(x, out=out, algorithm="ipc")
        stream = cuda.cuda.Stream(non_blocking=True)
        mpicoll.barrier()
        if mpicoll.world().rank == 0:
            with stream:
                stream.begin_capture()
                with pytest.raises(DeviceError, match=r"allreduce: x: .*captured"):
                    mpicoll.allreduce(x, out=out, algorithm="ipc")
                stream.end_capture()
        mpicoll.barrier()
        mpicoll.allreduce(x, out=out, algorithm="ipc")
        assert (cuda.asnumpy(out) == 2).all()

    mpicoll.run_local(main, 2, timeout=60)


def test_a_call_that_failed_is_prepared_again(cuda: ModuleType, prepared: list[str]) -> None:
    def fail(source: Any, target: Any) -> None:
        raise ValueError("on purpose")

    def main() -> None:
        world = mpicoll.world()
        x, out = cuda.ones(10), cuda.zeros(10)
        for _ in range(3):
            mpicoll.allreduce(x, out=out, algorithm="ipc")
        cache = world._core.call_cache
        (bound,) = [one for one in cache.values() if type(one) is device_call.DeviceCall]
        if world.rank == 0:
            bound._collective._program = fail, 2
        with pytest.raises(ValueError if world.rank == 0 else CommunicationError, match=r"on purpose|rank 0 failed"):
            mpicoll.allreduce(x, out=out, algorithm="ipc")
        assert bound not in cache.values()
        before = prepared.count("allreduce")
        for turn in range(3):
            x[...] = turn
            mpicoll.allreduce(x, out=out, algorithm="ipc")
            assert (cuda.asnumpy(out) == 2 * turn).all()
        assert prepared.count("allreduce") > before

    mpicoll.run_local(main, 2, timeout=60)


def test_many_addresses(cuda: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from mpicoll.engine.executors import peer_memory

    monkeypatch.setattr(device_call, "_MAX_VIEWS", 3)
    monkeypatch.setattr(peer_memory, "_MAX_BOUND", 5)

    def main() -> None:
        world = mpicoll.world()
        whole = cuda.zeros(2000, np.float32)
        for turn in range(40):
            x = whole[(turn * 31) % 11 * 100 :][:100]
            x[...] = cuda.asarray(_values(world.rank, 100, turn))
            found = mpicoll.allreduce(x, out=x, algorithm="ipc")
            np.testing.assert_array_equal(cuda.asnumpy(found), _sum(world.size, 100, turn))

    mpicoll.run_local(main, 2, timeout=60)
