"""Window: what is put and accumulated is what an oracle that knows all ranks' calls expects."""

from __future__ import annotations

import pickle
import sys
import threading
import time
from contextlib import nullcontext
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from support.ranks import Comms, Ranks

import mpicoll
from mpicoll.engine.diagnostics.flight_recorder import list_history

pytestmark = pytest.mark.extension


def list_drivers() -> tuple[Any, ...]:
    return ("auto", "mpi") if mpicoll.world().mpi is not None else ("auto",)


def is_shared(driver: str = "auto") -> bool:
    world = mpicoll.world()
    return driver == "auto" and (world.size == 1 or world._core.no_shm_reason is None)


def test_put_and_get(ranks: Ranks) -> None:
    """Each rank writes a part of each array, which are of different shapes."""

    def body() -> None:
        world = mpicoll.world()
        size = world.size
        shapes = [(rank + 1, 2 * size) for rank in range(size)]
        want = [np.arange(np.prod(shape)).reshape(shape) % 100 + 10 * rank for rank, shape in enumerate(shapes)]
        for driver in list_drivers():
            for dtype in ("f8", "i2", "c8", "bool", "S3", [("a", "i4"), ("b", "f4")]):
                with mpicoll.Window(shapes[world.rank], dtype, driver=driver) as window:
                    assert not any(window.local.tobytes())
                    window.fence()
                    whole = [one.astype(dtype) for one in want]
                    for target in range(size):
                        for row in range(target + 1):
                            x = whole[target][row, 2 * world.rank : 2 * world.rank + 2]
                            x = np.repeat(x, 2)[::2] if row % 2 else x
                            window.put(x, target, 2 * size * row + 2 * world.rank)
                    window.fence()
                    np.testing.assert_array_equal(window.local, whole[world.rank])
                    for target in range(size):
                        np.testing.assert_array_equal(window.get(target), whole[target])
                        part = window.get(target, 1, (size, 1))
                        np.testing.assert_array_equal(part, whole[target].reshape(-1)[1 : size + 1, None])
                        out = np.zeros((2, size), whole[target].dtype).T
                        assert window.get(target, out=out) is out
                        np.testing.assert_array_equal(out, whole[target][0].reshape(size, 2))
                        if is_shared(driver):
                            np.testing.assert_array_equal(window.shared(target), whole[target])
                        else:
                            with pytest.raises(mpicoll.CommunicatorError, match=r"use get\(\)"):
                                window.shared(target)
                    window.fence()
                    local = window.local
                np.testing.assert_array_equal(local, whole[world.rank])

    ranks(body)


def test_tensors(ranks: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        right = (world.rank + 1) % world.size
        for driver in list_drivers():
            with mpicoll.Window(3, torch.float8_e5m2, like="torch", driver=driver) as window:
                window.put(torch.ones(3).to(torch.float8_e5m2), right)
                window.fence()
                whole = window.shared(right) if is_shared(driver) else window.get(right)
                assert whole.float().tolist() == [1.0] * 3
            for dtype in (torch.bfloat16, torch.float32, torch.float16):
                with mpicoll.Window((2, 3), dtype, like="torch", driver=driver) as window:
                    x = torch.arange(6).reshape(3, 2).T.to(dtype) + world.rank
                    window.put(x, right)
                    window.fence()
                    left = (world.rank - 1) % world.size
                    expected = (torch.arange(6).reshape(3, 2).T.to(dtype) + left).contiguous()
                    assert window.local.dtype == dtype
                    assert torch.equal(window.local, expected)
                    assert torch.equal(window.get(right), x)
                    window.fence()
                    window.accumulate(torch.ones(2, dtype=dtype), 0, offset=1)
                    window.fence()
                    if world.rank == 0:
                        expected.view(-1)[1:3] += world.size
                        assert torch.equal(window.local, expected)
                    if is_shared(driver):
                        assert torch.equal(window.shared(0), window.get(0))
                    window.fence()

    ranks(body)


def test_accumulate(ranks: Ranks) -> None:
    """All ranks combine all arrays at once. The values are such that the order has no influence."""
    functions: dict[str, Any] = {
        "sum": np.add,
        "prod": np.multiply,
        "min": np.minimum,
        "max": np.maximum,
        "band": np.bitwise_and,
        "bor": np.bitwise_or,
        "bxor": np.bitwise_xor,
    }

    def body() -> None:
        world = mpicoll.world()
        count = 30
        for driver in list_drivers():
            for op, dtype in [*((op, "i8") for op in functions), ("sum", "f2"), ("max", "f4"), ("sum", ">i4")]:
                rngs = [np.random.default_rng([rank, 3]) for rank in range(world.size)]
                values = [rng.integers(1, 3, (count, world.size, 2)).astype(dtype) for rng in rngs]
                with mpicoll.Window((3, world.size), dtype, driver=driver) as window:
                    window.local[...] = 1
                    window.fence()
                    for x in values[world.rank]:
                        for target in range(world.size):
                            window.accumulate(x[target], target, op, offset=target)
                    window.fence()
                    want = np.ones((3, world.size), dtype)
                    part = want.reshape(-1)[world.rank : world.rank + 2]
                    for one in values:
                        for x in one:
                            functions[op](part, x[world.rank], out=part)
                    np.testing.assert_array_equal(window.local, want, err_msg=op)
            with mpicoll.Window((), "i4", driver=driver) as window:
                window.accumulate(np.int32(2), 0, "lor")
                window.fence()
                assert window.get(0) == 1
                window.fence()
                window.accumulate(np.int32(7), world.rank, "replace")
                assert window.local == 7

    ranks(body)


def test_counter(ranks: Ranks) -> None:
    """Each number is drawn by one rank."""

    def body() -> None:
        world = mpicoll.world()
        for driver in list_drivers():
            with mpicoll.Window(1 if world.rank == 0 else 0, "int64", driver=driver) as window:
                mine = []
                while (number := int(window.get_accumulate(1, rank=0))) < 100:
                    mine.append(number)
                drawn = mpicoll.allgather_object(mine)
                assert sorted(number for numbers in drawn for number in numbers) == list(range(100))
                assert window.get(0)[0] == 100 + world.size

    ranks(body)


def test_lock(ranks: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        last = world.size - 1
        for driver in list_drivers():
            with mpicoll.Window(4, "int64", driver=driver) as window:
                for _ in range(20):
                    with window.lock(last) as same:
                        assert same is window
                        value = window.get(last, 1, 1)
                        window.accumulate(1, last)
                        window.put(value + 1, last, 1)
                window.fence()
                assert window.get(last).tolist() == [20 * world.size, 20 * world.size, 0, 0]
                # All ranks hold it at the same time.
                with window.lock(last, exclusive=False):
                    mpicoll.barrier()
                    window.accumulate(1, last, offset=2)
                    mpicoll.barrier()
                    assert window.get(last, 2, ()) == world.size
                with window.lock(last):
                    with pytest.raises(mpicoll.ArgumentError, match="this rank holds the lock"), window.lock(last):
                        pass
                    for call in (window.fence, window.free):
                        with pytest.raises(mpicoll.ArgumentError, match=f"this rank holds the lock of rank {last};"):
                            call()
                    window.put(np.int64(5), last, 3)
                window.fence()
                assert window.get(last, 3, 1)[0] == 5

    ranks(body)


def test_lock_of_a_freed_window(ranks: Ranks) -> None:
    """Also where the extension has taken the lock before."""

    def body() -> None:
        rank = mpicoll.world().rank
        window = mpicoll.Window(1)
        for _ in range(3):
            with window.lock(rank) as locked:
                assert locked is window
        lock = window.lock(rank)
        window.free()
        with pytest.raises(mpicoll.ArgumentError, match=r"Window\.lock: the window was freed"), lock:
            pass

    ranks(body)


def test_shared_lock_without_an_access(several: Ranks) -> None:
    """Another rank waits for it, though its holder has accessed nothing."""

    def body() -> None:
        world = mpicoll.world()
        for driver in list_drivers():
            with mpicoll.Window(1, "int64", driver=driver) as window:
                if world.rank == 0:
                    with window.lock(0, exclusive=False):
                        mpicoll.barrier()
                        assert window.get(0)[0] == 0
                        window.accumulate(5, 0)
                        assert window.get(0)[0] == 5
                else:
                    mpicoll.barrier()
                    with window.lock(0):
                        window.put(window.get(0) + 1, 0)
                window.fence()
                assert window.get(0)[0] == 5 + world.size - 1

    several(body)


def test_lock_that_is_not_released(several: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        if not is_shared():
            pytest.skip("MPI's locks have no bound: the watchdog ends the job")
        with world.duplicate() as comm, mpicoll.Window(4, "int64", comm=comm) as window:
            if world.rank == 0:
                with window.lock(1):
                    mpicoll.barrier()
                    mpicoll.barrier()
            else:
                mpicoll.barrier()
                before, comm.timeout = comm.timeout, 0.1
                for call in (
                    lambda: window.put(np.arange(4), 1),
                    lambda: window.get(1),
                    lambda: window.lock(1).__enter__(),
                ):
                    with pytest.raises(mpicoll.Timeout, match="the lock of rank 1's memory"):
                        call()
                comm.timeout = before
                mpicoll.barrier()
            window.fence()
            assert not window.get(1).any()
            with window.lock(1):
                pass

    several(body)


def test_threads_of_a_rank(several: Ranks) -> None:
    """Their accumulating calls are atomic, too."""

    def body() -> None:
        world = mpicoll.world()
        with mpicoll.Window(1, "int64") as window:

            def add() -> None:
                for _ in range(50):
                    window.accumulate(1, 0)

            threads = [threading.Thread(target=add) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            window.fence()
            assert window.get(0)[0] == 100 * world.size

    several(body)


def test_threads_of_a_rank_take_turns_with_tensors() -> None:
    """torch lets other threads run while the extension looks at a tensor."""

    def body() -> None:
        with mpicoll.Window(3, like="torch") as window:
            x, ended = torch.ones(3), threading.Event()

            def put() -> None:
                while not ended.is_set():
                    window.put(x, 0)

            thread = threading.Thread(target=put)
            thread.start()
            turns = []
            for _ in range(500):
                window._turn.acquire()
                time.sleep(0)
                turns.append(window._turn.locked())
                if turns[-1]:
                    window._turn.release()
                time.sleep(0)
            ended.set()
            thread.join()
            assert all(turns)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(100.0)  # no thread loses the interpreter lock, unless it releases that
    try:
        mpicoll.run_local(body, 1)
    finally:
        sys.setswitchinterval(interval)


def test_call_within_a_call(some: Ranks) -> None:
    """As by a signal handler: it is refused instead of waiting for itself, and the outer call is completed."""

    def body() -> None:
        world = mpicoll.world()
        with mpicoll.Window(2, "int64") as window:
            memory = window._memory
            put = memory.put

            def put_interrupted(*args: Any) -> None:
                with pytest.raises(mpicoll.CommunicatorError, match=r"Window\.get.*in the middle of Window\.put"):
                    window.get(0)
                put(*args)

            memory.put = put_interrupted  # type: ignore[method-assign]
            window.put(np.array([3, 4]), world.rank)
            memory.put = put  # type: ignore[method-assign]
            assert window.get(world.rank).tolist() == [3, 4]

    some(body)


def test_overlapping_arrays(ranks: Ranks) -> None:
    """The array that is passed is a part of what is written."""

    def body() -> None:
        world = mpicoll.world()
        for driver in list_drivers():
            for like, dtype in (("numpy", "int64"), ("torch", torch.bfloat16)):
                with mpicoll.Window(6, dtype, like=like, driver=driver) as window:
                    local = window.local
                    for begin in (0, 1):
                        for name, expected in (
                            ("put", [0, 0, 1, 2, 3, 4] if begin == 0 else [1, 2, 3, 4, 5, 5]),
                            ("accumulate", [0, 1, 3, 5, 7, 9] if begin == 0 else [1, 3, 5, 7, 9, 5]),
                        ):
                            for at in range(6):
                                local[at] = at
                            getattr(window, name)(local[begin : begin + 5], world.rank, offset=1 - begin)
                            assert local.tolist() == expected, (name, begin)
                    for at in range(6):
                        local[at] = at
                    window.get(world.rank, 0, out=local[1:])
                    assert local.tolist() == [0, 0, 1, 2, 3, 4]

    ranks(body)


def test_empty_arrays(ranks: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        for driver in list_drivers():
            with mpicoll.Window((0, 3) if world.rank else 2, driver=driver) as window:
                x = np.empty((3, 0), "f4")
                for target in range(world.size):
                    window.put(x, target, 0 if target else 2)
                    window.accumulate(x, target)
                    assert window.get_accumulate(x, target).shape == (3, 0)
                    assert window.get(target, 0, (0, 2)).shape == (0, 2)
                    assert window.get(target).shape == ((0, 3) if target else (2,))
                with pytest.raises(mpicoll.ShapeError, match=r"Window\.put: 1 elements from offset 2 on"):
                    window.put(np.ones(1, "f4"), 0, 2)

    ranks(body)


def test_memory_is_released(ranks: Ranks) -> None:
    """Without a search for cycles, and whether the window is freed or dropped."""

    def body() -> None:
        for frees in (True, False):
            window = mpicoll.Window(1 << 10, "int64")
            gone = [ref(window)]
            if is_shared():  # MPI writes to memory of a window that is not freed
                gone.append(ref(window._memory))
            mpicoll.barrier()
            if frees:
                window.free()
            mpicoll.barrier()
            del window
            assert [one() for one in gone] == [None] * len(gone)

    ranks(body)


def test_parts_of_the_world(several: Ranks) -> None:
    def body() -> None:
        comms = Comms()
        for name in ("split", "group"):
            comm = comms[name]
            if comm is not None:
                with mpicoll.Window(2, comm=comm) as window:
                    window.put(np.full(2, comm.rank, "f4"), (comm.rank + 1) % comm.size)
                    window.fence()
                    assert window.local.tolist() == 2 * [(comm.rank - 1) % comm.size]
        comms.free()

    several(body)


def test_wrong_arguments(some: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        place = rf"rank {world.rank} of {world.size}"
        for arguments, kwargs, kind in (
            ((-1,), {}, mpicoll.ShapeError),
            ((2, "object"), {}, mpicoll.DTypeError),
            ((2,), {"like": "jax"}, mpicoll.DTypeError),
            ((2,), {"driver": "posix"}, mpicoll.ArgumentError),
        ):
            with pytest.raises(kind, match=f"Window: .*{place}"):
                mpicoll.Window(*arguments, **kwargs)  # type: ignore[arg-type]
        with mpicoll.Window((2, 3), "f8") as window:
            x = np.ones(2)
            wrong: tuple[tuple[str, tuple[Any, ...], dict[str, Any], type[Exception]], ...] = (
                ("put", (x, world.size), {}, mpicoll.RankError),
                ("put", (x, 0, 5), {}, mpicoll.ShapeError),
                ("put", (x, 0, -1), {}, mpicoll.ShapeError),
                ("put", (x, 0, 0.5), {}, mpicoll.ShapeError),
                ("put", (np.ones(7), 0), {}, mpicoll.ShapeError),
                ("put", (x.astype("f4"), 0), {}, mpicoll.DTypeError),
                ("put", (x.astype(">f8"), 0), {}, mpicoll.DTypeError),
                ("put", ([1.0], 0), {}, mpicoll.DTypeError),
                ("accumulate", (x, 0, "avg"), {}, mpicoll.DTypeError),
                ("accumulate", (x, 0, "band"), {}, mpicoll.DTypeError),
                ("get_accumulate", (x, 0, np.add), {}, mpicoll.DTypeError),
                ("get", (-1,), {}, mpicoll.RankError),
                ("get", (0, 1), {}, mpicoll.ShapeError),
                ("get", (0, 0, (2, 4)), {}, mpicoll.ShapeError),
                ("get", (0, 0, (2,)), {"out": x}, mpicoll.ArgumentError),
                ("get", (0,), {"out": x.astype("f4")}, mpicoll.DTypeError),
                ("shared", (world.size,), {}, mpicoll.RankError),
            )
            for name, arguments, kwargs, kind in wrong:
                with pytest.raises(kind, match=f"Window.{name}: .*{place}"):
                    getattr(window, name)(*arguments, **kwargs)
            with pytest.raises(mpicoll.RankError, match=r"Window\.lock"), window.lock(9):
                pass
            with pytest.raises(TypeError, match="can't be pickled"):
                pickle.dumps(window)
            assert window.get(0).tolist() == [[0.0] * 3] * 2
        window.free()
        assert "freed" in repr(window)
        with pytest.raises(mpicoll.ArgumentError, match=f"the window was freed .*{place}"):
            window.put(x, 0)

    some(body)


def test_different_dtypes(several: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        for mine, theirs in (("f4", "f8"), (">f8", "<f8"), ("i4,f4", "f4,i4")):
            with pytest.raises(mpicoll.MismatchError, match="Window"):
                mpicoll.Window(2, mine if world.rank else theirs)

    several(body)


def test_calls_like_earlier_ones(ranks: Ranks) -> None:
    """Random calls on one window, which the extension repeats, and on another one, by Python alone; against a model.
    Each rank calls in its turn."""

    def call(window: mpicoll.Window, rng: np.random.Generator, dtype: str, shapes: list[tuple[int, ...]]) -> Any:
        target = int(rng.integers(len(shapes)))
        whole = int(np.prod(shapes[target]))
        offset = int(rng.integers(whole + 1))
        shape = (int(rng.integers(whole - offset + 1)),)
        values = np.arange(whole) if dtype == "bool" else rng.integers(1, 3, whole)
        x = np.ascontiguousarray(values.astype(dtype)[: shape[0]])
        name = rng.choice(["put", "get", "get into", "accumulate", "get_accumulate", "number"])
        op = str(rng.choice(["sum", "max", "replace"] if dtype != "bool" else ["lor", "lxor"]))
        with window.lock(target, exclusive=bool(rng.integers(2))) if rng.integers(3) == 0 else nullcontext():
            if name == "put":
                window.put(x, target, offset)
            elif name == "get":
                return window.get(target, offset, shape)
            elif name == "get into":
                return window.get(target, offset, out=np.zeros_like(x))
            elif name == "accumulate":
                window.accumulate(x, target, op, offset)
            elif name == "get_accumulate":
                return window.get_accumulate(x, target, op, offset)
            elif offset < whole and dtype in ("int64", "float64"):
                return window.get_accumulate(2 if dtype == "int64" else 0.5, target, op, offset)
        return window.get(target)

    def body() -> None:
        world = mpicoll.world()
        shapes: list[tuple[int, ...]] = [(rank + 2, 3) for rank in range(world.size)]
        for number, dtype in enumerate(("int64", "float64", "float32", "uint8", "float16", "bool")):
            with (
                mpicoll.Window(shapes[world.rank], dtype) as direct,
                mpicoll.Window(shapes[world.rank], dtype) as plain,
            ):
                plain._direct = None
                rng = np.random.default_rng(number)
                for turn in range(60):
                    direct.fence()
                    plain.fence()
                    state = rng.bit_generator.state
                    if turn % world.size == world.rank:
                        got = call(direct, rng, dtype, shapes)
                        rng.bit_generator.state = state
                        np.testing.assert_array_equal(got, call(plain, rng, dtype, shapes), strict=True)
                    else:
                        call(_Nothing(shapes, dtype), rng, dtype, shapes)  # type: ignore[arg-type]
                direct.fence()
                plain.fence()
                np.testing.assert_array_equal(direct.local, plain.local)
                direct.fence()

    ranks(body)


class _Nothing:
    """A window whose calls do nothing."""

    def __init__(self, shapes: list[tuple[int, ...]], dtype: str) -> None:
        self.shapes, self.dtype = shapes, dtype

    def lock(self, rank: int, *, exclusive: bool) -> Any:
        return nullcontext()

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def test_repeated_calls_are_recorded(several: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        right = (world.rank + 1) % world.size
        with mpicoll.Window(3, "int64") as window:
            x = np.arange(3)
            for _ in range(3):
                with window.lock(right, exclusive=False):
                    window.put(x, right)
                window.accumulate(x, right)
                window.get(right, out=x.copy())
                window.fence()
            assert window._direct is not None
            assert window._direct.put(x, right, 0)
            assert not window._direct.put(x, right, 1)
            found = [str(entry[2]) for entry, _, error in list_history() if not error]
            for name in (f"Window.put(peer={right}, tag=any)", f"Window.unlock({right})", "Window.fence()"):
                assert found.count(name) >= 3, name

    several(body)


def test_large_arrays(several: Ranks) -> None:
    """Other threads run while they are copied; a call of one of them waits for its turn."""

    def body() -> None:
        world = mpicoll.world()
        count = 1 << 17
        with mpicoll.Window(count, "int64") as window:
            x = np.ones(count, np.int64)

            def add() -> None:
                for _ in range(6):
                    window.accumulate(x, 0)
                    window.get(0, out=np.empty_like(x))

            threads = [threading.Thread(target=add) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            window.fence()
            np.testing.assert_array_equal(window.get(0), np.full(count, 12 * world.size))

    several(body)


def test_an_exclusive_lock_among_steady_calls(several: Ranks) -> None:
    """It is obtained while all other ranks hold shared ones nearly all of the time."""

    def body() -> None:
        world = mpicoll.world()
        with mpicoll.Window(1 << 14, "int64") as window:
            x = np.zeros((1 << 14) - 1, np.int64)
            window.put(x, 0, 1)
            window.fence()
            if world.rank == 0:
                for turn in range(20):
                    with window.lock(0):
                        window.local[0] = turn - 19 or 1
            while world.rank and window.get(0, 0, 1)[0] != 1:
                window.put(x, 0, 1)
            window.fence()

    several(body)


def test_fence_and_barrier(several: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        with world.duplicate() as comm, mpicoll.Window(1, comm=comm) as window:
            for _ in range(3):
                window.fence()
            if not is_shared():
                return
            with pytest.raises(mpicoll.MismatchError, match=r"Window\.fence"):
                mpicoll.barrier(comm=comm) if world.rank == 0 else window.fence()
            window.fence()

    several(body)


def test_rank_that_fails_with_a_lock() -> None:
    """Ranks that wait for the lock do not wait until their timeout."""
    errors: dict[int, BaseException] = {}

    def body() -> None:
        world = mpicoll.world()
        window = mpicoll.Window(1)
        if world.rank == 0:
            window.lock(1).__enter__()
            mpicoll.barrier()
            raise ValueError("lost")
        mpicoll.barrier()
        try:
            window.put(np.ones(1, "f4"), 1)
        except mpicoll.RankFailed as error:
            errors[world.rank] = error
            raise

    with pytest.raises(ValueError, match="lost"):
        mpicoll.run_local(body, 3)
    assert sorted(errors) == [1, 2]
