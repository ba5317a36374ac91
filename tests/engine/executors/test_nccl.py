"""NCCL's collectives against numpy, and what happens where it can't serve, or fails. On the fake CUDA, in threads and
in processes."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest
from support import fake_cuda
from support.data import random
from support.launch import mpirun
from support.ranks import Ranks, some_more

import mpicoll
from mpicoll.buffers.device import DeviceArray
from mpicoll.engine.executors import nccl
from mpicoll.engine.executors.nccl import Nccl, unsupported_reason
from mpicoll.errors import AlgorithmError, CommunicationError, CommunicatorError, DeviceError, RankFailed, Timeout

__all__ = ["some_more"]

REDUCED = [
    *((op, dtype) for op in ("sum", "prod", "min", "max") for dtype in ("int8", "uint8", "int32", "uint32")),
    *((op, dtype) for op in ("sum", "prod", "min", "max") for dtype in ("int64", "uint64", "float32", "float64")),
    ("sum", "complex64"),
    ("sum", "complex128"),
    *((op, dtype) for op in ("land", "lor") for dtype in ("bool", "int32", "uint8")),
]

UFUNCS = {
    "sum": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "land": np.minimum,
    "lor": np.maximum,
}


@pytest.fixture
def devices(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device for each rank, if they are not real."""
    if not fake_cuda.is_fake(cuda):
        pytest.skip("needs as many devices as ranks")
    monkeypatch.setenv("FAKECUDA_DEVICES", "4")


def device_of(rank: int) -> Any:
    from mpicoll.buffers.cuda.device import cuda_device

    return cuda_device(rank)


class End:
    """This rank, and its end of NCCL."""

    def __init__(self) -> None:
        world = mpicoll.world()
        self.transport, self.rank, self.size = world._core.transport, world.rank, world.size
        self.device = device_of(world.rank)
        made = nccl.create(world._core.transport, self.device)
        assert isinstance(made, Nccl), made
        self.nccl = made

    def put(self, values: np.ndarray) -> DeviceArray:
        """Inside of ``working``: what will be there when NCCL gets to it, and not before."""
        array: DeviceArray = self.device.empty(values.size, values.dtype)
        np.copyto(array, values)
        return array

    def empty(self, count: int, dtype: Any) -> DeviceArray:
        return self.put(np.full(count, 1, dtype))

    def get(self, array: DeviceArray) -> np.ndarray:
        found = np.empty(array.size, array.dtype)
        np.copyto(found, array)
        self.device.synchronize()
        return found

    def free(self) -> None:
        self.nccl.free()


def on_each(body: Callable[..., None]) -> Callable[..., None]:
    """`body`, given this rank's end."""

    def call(*args: Any) -> None:
        end = End()
        with end.device.working():
            body(end, *args)
        end.free()

    return call


def values(dtype: str, count: int, *what: object) -> np.ndarray:
    """Numbers whose sums and products are exact."""
    made = random(dtype, count, *what).integers(0, 2 if dtype == "bool" else 4, count)
    return (made + 1j * made[::-1]).astype(dtype) if dtype.startswith("complex") else made.astype(dtype)


def same(got: np.ndarray, expected: np.ndarray) -> None:
    assert got.dtype == expected.dtype
    assert got.tobytes() == expected.tobytes()


def blocks_of(whole: np.ndarray, counts: Sequence[int]) -> list[np.ndarray]:
    return np.split(whole, list(accumulate(counts))[:-1])


def uneven(size: int, unit: int = 5) -> list[int]:
    """Blocks of different sizes, one of them of none."""
    return [unit * (rank + 1) if rank != 1 else 0 for rank in range(size)]


# --- collectives


@on_each
def _reduce(end: End, op: str, dtype: str, counts: list[int]) -> None:
    for count in (1, 7, 1000):
        operands = [values(dtype, count, op, rank) for rank in range(end.size)]
        if op in ("land", "lor"):
            operands = [(one != 0).astype(dtype) for one in operands]
        with np.errstate(all="ignore"):
            total = operands[0]
            for one in operands[1:]:
                total = UFUNCS[op](total, one)
        mine = end.put(operands[end.rank])
        target = end.empty(count, dtype)
        end.nccl.allreduce(mine, target, op)
        same(end.get(target), total)
        same(end.get(mine), operands[end.rank])
        end.nccl.allreduce(mine, mine, op)
        same(end.get(mine), total)
        for root in range(end.size):
            mine = end.put(operands[end.rank])
            target = end.empty(count, dtype)
            end.nccl.reduce(mine, target if end.rank == root else None, op, root)
            if end.rank == root:
                same(end.get(target), total)
            end.nccl.reduce(mine, mine if end.rank == root else None, op, root)
            same(end.get(mine), total if end.rank == root else operands[end.rank])
    for sizes in (None, counts):
        each = sizes or [3] * end.size
        operands = [values(dtype, sum(each), op, "scattered", rank) for rank in range(end.size)]
        with np.errstate(all="ignore"):
            total = operands[0]
            for one in operands[1:]:
                total = UFUNCS[op](total, one)
        mine, target = end.put(operands[end.rank]), end.empty(each[end.rank], dtype)
        end.nccl.reduce_scatter(mine, target, sizes, op)
        same(end.get(target), blocks_of(total, each)[end.rank])
        same(end.get(mine), operands[end.rank])


@pytest.mark.parametrize(("op", "dtype"), REDUCED)
@pytest.mark.usefixtures("devices")
def test_reductions(some_more: Ranks, op: str, dtype: str) -> None:
    assert unsupported_reason("allreduce", op, np.dtype(dtype)) is None
    some_more(_reduce, op, dtype, uneven(some_more.size))


@on_each
def _move(end: End, dtype: str) -> None:
    rank, size, counts = end.rank, end.size, uneven(end.size)
    for sizes in (None, counts):
        each = sizes or [4] * size
        whole = values(dtype, sum(each), sizes)
        blocks = blocks_of(whole, each)
        mine, target = end.put(blocks[rank]), end.empty(whole.size, dtype)
        end.nccl.allgather(mine, target, sizes)
        same(end.get(target), whole)
        # A block in its place.
        target = end.empty(whole.size, dtype)
        begin = sum(each[:rank])
        place = target[begin : begin + each[rank]]
        np.copyto(place, blocks[rank])
        end.nccl.allgather(place, target, sizes)
        same(end.get(target), whole)
        for root in range(size):
            target = end.empty(whole.size, dtype)
            end.nccl.gather(mine, target if rank == root else None, sizes, root)
            same(end.get(target), whole if rank == root else np.full(whole.size, 1, dtype))
            source, target = end.put(whole), end.empty(each[rank], dtype)
            end.nccl.scatter(source if rank == root else None, target, sizes, root)
            same(end.get(target), blocks[rank])
    for root in range(size):
        data = end.put(values(dtype, 100, "bcast", rank))
        end.nccl.bcast(data, root)
        same(end.get(data), values(dtype, 100, "bcast", root))
    leaving = [values(dtype, 3 * size, "all", one) for one in range(size)]
    arriving = np.concatenate([one[3 * rank : 3 * rank + 3] for one in leaving])
    source, target = end.put(leaving[rank]), end.empty(3 * size, dtype)
    end.nccl.alltoall(source, target)
    same(end.get(target), arriving)
    same(end.get(source), leaving[rank])
    end.nccl.alltoall(source, source)
    same(end.get(source), arriving)


@pytest.mark.parametrize("dtype", ["uint8", "complex128"])
@pytest.mark.usefixtures("devices")
def test_moves(several: Ranks, dtype: str) -> None:
    several(_move, dtype)


@on_each
def _nothing(end: End) -> None:
    none = end.device.empty(0, np.dtype("float32"))
    end.nccl.allreduce(none, none, "sum")
    end.nccl.reduce(none, none if end.rank == 0 else None, "sum", 0)
    end.nccl.bcast(none, 0)
    end.nccl.allgather(none, none, None)
    end.nccl.allgather(none, none, [0] * end.size)
    end.nccl.gather(none, none if end.rank == 0 else None, None, 0)
    end.nccl.scatter(none if end.rank == 0 else None, none, [0] * end.size, 0)
    end.nccl.reduce_scatter(none, none, None, "max")
    end.nccl.reduce_scatter(none, none, [0] * end.size, "max")
    end.nccl.alltoall(none, none)
    # And all ranks are still in step.
    one = end.put(np.ones(1, np.int32))
    end.nccl.allreduce(one, one, "sum")
    assert end.get(one)[0] == end.size


@pytest.mark.usefixtures("devices")
def test_no_elements(some_more: Ranks) -> None:
    some_more(_nothing)


class Recorder:
    """NCCL's communicator, whose calls are noted down."""

    def __init__(self, end: End) -> None:
        self._real = end.nccl._communicator
        end.nccl._communicator = self
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self.calls.append((name, *args))
            return getattr(self._real, name)(*args)

        return call


@on_each
def _calls(end: End) -> None:
    # Addresses of arrays without elements are no memory of the device.
    recorder = Recorder(end)
    none = end.device.empty(0, np.dtype("float32"))
    end.nccl.allreduce(none, none, "sum")
    end.nccl.bcast(none, 0)
    end.nccl.gather(none, none if end.rank == 0 else None, None, 0)
    assert recorder.calls == []
    # What leaves in place must not lie where something arrives.
    data = end.put(np.arange(4 * end.size, dtype=np.int64))
    end.nccl.alltoall(data, data)
    begin, over = data.ctypes.data, data.ctypes.data + data.nbytes
    sent = [args[0] for name, *args in recorder.calls if name == "send"]
    received = [args[0] for name, *args in recorder.calls if name == "recv"]
    assert len(sent) == len(received) == end.size - 1
    assert not any(begin <= address < over for address in sent)
    assert all(begin <= address < over for address in received)


@pytest.mark.usefixtures("devices")
def test_what_nccl_is_given(some_more: Ranks) -> None:
    some_more(_calls)


@on_each
def _again(end: End) -> None:
    memory = end.put(np.full(10, end.rank + 1, np.int64))
    total = end.size * (end.size + 1) // 2
    end.nccl.bind_allreduce_in_place(np.dtype(np.int64), 4, "sum")(memory.ctypes.data)
    assert end.get(memory).tolist() == [total] * 4 + [end.rank + 1] * 6
    some = end.nccl.bind_dtype(np.dtype(np.int32))(memory.ctypes.data + 8, 2)
    assert (some.dtype, some.shape, some.on) == (np.int32, (2,), end.device)
    assert end.get(some).tolist() == [total, 0]
    again = end.nccl.bind(lambda native: native.bcast(memory, 0), persistent=False)
    for number in range(3):
        np.copyto(memory, np.full(10, 10 * number + end.rank))
        again()
        assert end.get(memory).tolist() == [10 * number] * 10
    assert end.nccl.max_count > 2**31
    for scan in (end.nccl.scan, end.nccl.exscan):
        with pytest.raises(AlgorithmError, match=r"scan: not supported by NCCL"):
            scan(memory, memory, "sum")


@pytest.mark.usefixtures("devices")
def test_repeated(some_more: Ranks) -> None:
    some_more(_again)


@pytest.mark.usefixtures("devices")
def test_a_barrier_waits_for_all() -> None:
    came = threading.Event()

    def body() -> None:
        end = End()
        with end.device.working():
            if end.rank == 1:
                time.sleep(0.2)
                came.set()
            end.nccl.barrier()
            assert came.is_set()
        end.free()

    mpicoll.run_local(body, 3)


@pytest.mark.usefixtures("devices")
def test_done_when_it_returns(some_more: Ranks) -> None:
    """The host may read the result, and others the memory, without another wait."""

    @on_each
    def body(end: End) -> None:
        data = end.put(np.full(4, end.rank, np.float32))
        end.nccl.bcast(data, end.size - 1)
        assert fake_cuda.fakecuda.pending(end.device.stream) == 0

    some_more(body)


# --- what NCCL can't do


@pytest.mark.parametrize("collective", nccl.COLLECTIVES)
def test_what_is_not_refused(collective: str) -> None:
    assert unsupported_reason(collective, None, None) is None


@pytest.mark.parametrize(
    ("collective", "op", "dtype", "why"),
    [
        ("scan", "sum", "int32", "NCCL has no scan"),
        ("exscan", "sum", "int32", "NCCL has no exscan"),
        ("barrier", None, None, "NCCL has no barrier"),
        ("allreduce", "band", "int32", "NCCL has no band of int32"),
        ("allreduce", "lxor", "bool", "NCCL has no lxor of bool"),
        ("allreduce", "sum", "bool", "NCCL has no sum of bool"),
        ("allreduce", "sum", "int16", "NCCL has no sum of int16"),
        ("allreduce", "prod", "complex64", "NCCL has no prod of complex64"),
        ("reduce", "max", ">f4", "NCCL has no max of float32"),
        ("reduce_scatter", "sum", "V16", "NCCL has no sum of void128"),
    ],
    ids=lambda one: str(one).replace(" ", "-"),
)
def test_what_is_refused(collective: str, op: str | None, dtype: str | None, why: str) -> None:
    assert unsupported_reason(collective, op, None if dtype is None else np.dtype(dtype)) == why


def _refused(make_device: Callable[[int], Any]) -> list[Any]:
    def body() -> Any:
        world = mpicoll.world()
        return nccl.create(world._core.transport, make_device(world.rank))

    return mpicoll.run_local(body, 3)


@pytest.mark.usefixtures("devices")
def test_a_single_rank() -> None:
    assert nccl.create(mpicoll.world()._core.transport, device_of(0)) == "there is a single rank"


@pytest.mark.usefixtures("devices")
def test_ranks_that_share_a_device() -> None:
    why = "ranks 0 and 2 share a device, which NCCL refuses"
    assert _refused(lambda rank: device_of(rank % 2)) == [why] * 3


class Odd:
    """NCCL as rank 1 has it."""

    def __init__(self, **odd: Callable[..., Any]) -> None:
        self._odd = odd

    def __getattr__(self, name: str) -> Any:
        from mpicoll.buffers.cuda import nccl as real

        return self._odd[name] if name in self._odd and mpicoll.world().rank == 1 else getattr(real, name)


def _raise(error: Exception) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        raise error

    return call


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        (Odd(version=_raise(DeviceError("cupy finds no NCCL"))), "rank 1: cupy finds no NCCL"),
        (Odd(version=lambda: "2.1.2"), "rank 0 has version 2.27.3 of NCCL, rank 1 has 2.1.2"),
        (
            Odd(create_communicator=_raise(RuntimeError("no memory"))),
            "NCCL can't start: rank 0: NCCL_ERROR_SYSTEM_ERROR",
        ),
    ],
    ids=["none", "versions", "start"],
)
@pytest.mark.usefixtures("devices")
def test_a_rank_that_can_not(odd: Odd, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKECUDA_NCCL_TIMEOUT", "0.5")
    monkeypatch.setattr(nccl, "_nccl", lambda: odd)
    first, *others = _refused(device_of)
    assert first.startswith(why)
    assert others == [first] * 2


@pytest.mark.usefixtures("devices")
def test_rank_0_can_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cupy.cuda.nccl.get_unique_id", _raise(RuntimeError("NCCL_ERROR_SYSTEM_ERROR: no network")))
    assert _refused(device_of) == ["rank 0: NCCL_ERROR_SYSTEM_ERROR: no network"] * 3


# --- failures


@pytest.mark.usefixtures("devices")
def test_a_rank_that_does_not_come() -> None:
    begin, over = time.monotonic(), threading.Barrier(3)

    def body() -> None:
        end = End()
        end.transport.timeout = 0.5
        data = end.device.empty(4, np.dtype("float32"))
        if end.rank != 1:
            why = rf"allreduce: rank {end.rank} of 3: NCCL is not done within the timeout of 0.5 s"
            with pytest.raises(Timeout, match=why), end.device.working():
                end.nccl.allreduce(data, data, "sum")
            with pytest.raises(CommunicatorError, match=r"bcast: NCCL can't be used any more .*allreduce failed"):
                end.nccl.bcast(data, 0)
        over.wait(20)
        end.free()

    mpicoll.run_local(body, 3)
    assert time.monotonic() - begin < 60


@pytest.mark.usefixtures("devices")
def test_a_rank_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "_EXIT_GRACE", 0.2)

    def body() -> Any:
        end = End()
        if end.rank == 1:
            return None
        data = end.device.empty(4, np.dtype("float32"))
        with pytest.raises(RankFailed) as caught, end.device.working():
            end.nccl.bcast(data, 1)
        return caught.value.ranks

    assert mpicoll.run_local(body, 2) == [(1,), None]


@pytest.mark.usefixtures("devices")
def test_a_rank_that_has_done_its_part_may_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "_CHECK_INTERVAL", 0.0)
    gone = threading.Event()

    def body() -> None:
        end = End()
        with end.device.working():
            data = end.put(np.full(4, end.rank))
            if end.rank == 0:
                end.nccl._device = Slow(end.device, gone)
            end.nccl.bcast(data, 1)
            assert end.get(data).tolist() == [1] * 4
        gone.set()

    mpicoll.run_local(body, 2)


class Slow:
    """A device whose work is seen to be done only some looks after the event `gone`."""

    def __init__(self, device: Any, gone: threading.Event) -> None:
        self._device = device
        self._gone = gone
        self._looks = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def record_event(self) -> Any:
        self._mark = self._device.record_event()
        return self

    def done(self) -> bool:
        self._mark.wait()
        assert self._gone.wait(10)
        time.sleep(0.05)
        self._looks += 1
        return self._looks > 3


@pytest.mark.usefixtures("devices")
def test_an_error_of_nccl() -> None:
    def body() -> None:
        end = End()
        data = end.device.empty(4, np.dtype("float32"))
        with (
            pytest.raises(CommunicationError, match=rf"bcast: rank {end.rank} of 2: NCCL_ERROR_INVALID_ARGUMENT"),
            end.device.working(),
        ):
            end.nccl.bcast(data, 7)
        with pytest.raises(CommunicatorError, match="NCCL_ERROR_INVALID_ARGUMENT"):
            end.nccl.allreduce(data, data, "sum")

    mpicoll.run_local(body, 2)


@pytest.mark.usefixtures("devices")
def test_an_error_that_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def body() -> None:
        end = End()
        data = end.device.empty(4, np.dtype("float32"))
        if end.rank == 0:
            end.nccl._communicator._failed = True
            with pytest.raises(CommunicationError, match="NCCL_ERROR_SYSTEM_ERROR"), end.device.working():
                end.nccl.allreduce(data, data, "sum")
        end.free()

    mpicoll.run_local(body, 2)


class Lost:
    """A device on which something fails while NCCL is waited for."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def record_event(self) -> Any:
        return self

    def done(self) -> bool:
        raise fake_cuda.fakecuda.CUDARuntimeError(700)


@pytest.mark.usefixtures("devices")
def test_an_error_of_the_device() -> None:
    over = threading.Barrier(2)

    def body() -> None:
        end = End()
        data = end.device.empty(4, np.dtype("float32"))
        if end.rank == 0:
            end.nccl._device = Lost(end.device)
            begin = time.monotonic()
            with pytest.raises(fake_cuda.fakecuda.CUDARuntimeError, match="IllegalAddress"), end.device.working():
                end.nccl.allreduce(data, data, "sum")
            assert time.monotonic() - begin < 40
            with pytest.raises(CommunicatorError, match=r"allreduce failed \(cudaErrorIllegalAddress"):
                end.nccl.bcast(data, 0)
        over.wait(20)
        end.free()

    mpicoll.run_local(body, 2)


class Interrupted:
    """NCCL's communicator, of which the third call of a kind is interrupted."""

    def __init__(self, real: Any, kind: str) -> None:
        self._real = real
        self._kind = kind
        self.left = 2

    def __getattr__(self, name: str) -> Any:
        if name == self._kind:
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
        return getattr(self._real, name)


@pytest.mark.usefixtures("devices")
def test_half_a_group_is_not_launched() -> None:
    launched = []

    def body() -> None:
        end, other = End(), End()
        with end.device.working():
            mine, target = end.put(np.ones(2)), end.empty(6, "float64")
            end.device.synchronize()
            end.nccl._communicator = Interrupted(end.nccl._communicator, "broadcast")
            end.nccl.abort = lambda why: launched.append(fake_cuda.fakecuda.pending(end.device.stream))
            with pytest.raises(KeyboardInterrupt):
                end.nccl.allgather(mine, target, [2, 2, 2])
        assert end.nccl._communicator.left < 0
        # The next group of this thread is another.
        with other.device.working():
            other.nccl.allgather(mine, target, [2, 2, 2])
            assert other.get(target).tolist() == [1.0] * 6

    mpicoll.run_local(body, 3)
    assert launched == [0] * 3


class Counted:
    """A communicator of NCCL's that counts its ends."""

    def __init__(self) -> None:
        self.ends: list[str] = []

    def destroy(self) -> None:
        self.ends.append("destroy")

    def abort(self) -> None:
        self.ends.append("abort")


def _counted() -> tuple[Counted, Nccl]:
    from mpicoll.buffers.cuda import nccl as real

    counted = Counted()
    return counted, Nccl(mpicoll.world()._core.transport, device_of(0), real.library(), counted)


@pytest.mark.usefixtures("devices")
def test_freed_once() -> None:
    counted, made = _counted()
    made.free()
    made.free()
    with pytest.raises(CommunicatorError, match="it was freed"):
        made.barrier()
    del made
    gc.collect()
    assert counted.ends == ["destroy"]


@pytest.mark.usefixtures("devices")
def test_aborted_after_a_failure_and_not_destroyed() -> None:
    counted, made = _counted()
    made.abort("a test")
    made.free()
    assert counted.ends == ["abort"]


@pytest.mark.usefixtures("devices")
def test_freed_with_the_last_reference() -> None:
    counted, made = _counted()
    del made
    gc.collect()
    deadline = time.monotonic() + 60
    while not counted.ends and time.monotonic() < deadline:
        time.sleep(0.01)
    assert counted.ends == ["destroy"]


@pytest.mark.usefixtures("devices")
def test_who_frees_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "_FREE_TIMEOUT", 0.1)
    counted, made = _counted()
    stuck = threading.Event()
    monkeypatch.setattr(counted, "destroy", lambda: stuck.wait(60))
    made = Nccl(mpicoll.world()._core.transport, made._device, made._module, counted)
    begin = time.monotonic()
    made.free()
    stuck.set()
    assert time.monotonic() - begin < 40


@pytest.mark.usefixtures("devices")
def test_all_that_is_left_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "_instances", WeakSet())
    (first, one), (second, freed) = _counted(), _counted()
    freed.free()
    nccl.free_all({1})
    assert (first.ends, second.ends) == (["destroy"], ["destroy"])
    with pytest.raises(CommunicatorError, match="it was freed"):
        one.barrier()
    third, lost = _counted()
    nccl.free_all({0})
    assert third.ends == ["abort"]
    with pytest.raises(CommunicatorError, match="ranks have died"):
        lost.barrier()


# --- the end of the program

PROGRAM = """
import os, sys, time
import cupy, mpicoll
from cupy.cuda.nccl import NcclCommunicator

rank = mpicoll.world().rank
destroy = NcclCommunicator.destroy

def freed(self):
    if self.comm:
        os.write(1, f"rank {rank} frees{' too late' if sys.is_finalizing() else ''}\\n".encode())
        DESTROYING
    destroy(self)

NcclCommunicator.destroy = freed
other = mpicoll.world().duplicate()
with cupy.cuda.Device(rank):
    for comm in mpicoll.world(), other:
        total = mpicoll.allreduce(cupy.ones(5), algorithm="nccl", comm=comm)
        assert cupy.asnumpy(total).tolist() == [2.0] * 5
ENDING
"""


def _program(*, destroying: str = "pass", ending: str = "") -> tuple[int, str]:
    """Exit status and output of two ranks that use NCCL on two communicators."""
    program = PROGRAM.replace("DESTROYING", destroying).replace("ENDING", ending)
    begin = time.monotonic()
    done = mpirun(2, "-c", program, **fake_cuda.environment(FAKECUDA_DEVICES="2"))
    assert time.monotonic() - begin < 40, done.stdout
    return done.returncode, done.stdout


@pytest.mark.slow
def test_nccl_is_freed_before_the_interpreter_goes() -> None:
    status, output = _program()
    assert status == 0, output
    assert sorted(output.splitlines()) == ["rank 0 frees"] * 2 + ["rank 1 frees"] * 2


@pytest.mark.slow
def test_nccl_that_can_not_be_freed() -> None:
    patience = "from mpicoll.engine.executors import nccl; nccl._FREE_TIMEOUT = 0.5"
    status, output = _program(destroying="rank or time.sleep(1000)", ending=patience)
    assert status == 0, output
    assert sorted(output.splitlines()) == ["rank 0 frees"] * 2 + ["rank 1 frees"] * 2


@pytest.mark.slow
def test_a_rank_that_fails_with_nccl() -> None:
    status, output = _program(
        destroying="time.sleep(1000)", ending="if rank: raise ValueError('on purpose')\nmpicoll.barrier()"
    )
    assert status == 1, output
    assert "rank 1 of 2 died of ValueError: on purpose" in output
    assert "frees" not in output


# --- cupy's versions


@pytest.mark.usefixtures("devices")
def test_keys_of_cupy_13(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are tuples of signed chars."""
    from mpicoll.buffers.cuda import nccl as real

    key = tuple(range(-128, 128, 2))

    class Library:
        available = True

        @staticmethod
        def get_unique_id() -> tuple[int, ...]:
            return key

        @staticmethod
        def NcclCommunicator(size: int, key: Any, rank: int) -> Any:  # noqa: N802
            if type(key) is not tuple:
                raise TypeError("Argument 'commId' has incorrect type")
            return size, key, rank

        @staticmethod
        def get_version() -> int:
            return 21903

    monkeypatch.setattr(real, "nccl", Library)
    assert real.create_communicator(2, real.new_key(), 1) == (2, key, 1)
    assert real.version() == "2.19.3"
    monkeypatch.setattr(Library, "available", False)
    with pytest.raises(DeviceError, match="cupy finds no NCCL"):
        real.version()
