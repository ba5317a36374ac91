"""Collectives and messages on a device that is only played: the bodies of device_bodies.py, on threads and processes.

Its work waits until somebody waits for it, so a wait that is missing gives old data, always: some tests take one away
and see that.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from support import device_bodies as bodies
from support import fake_cuda, tiers
from support.device_bodies import SOME_DTYPES, Cupy
from support.exercise import COLLECTIVES
from support.launch import mpirun
from support.ranks import Ranks

import mpicoll
from mpicoll.config import config


@pytest.fixture
def arrays(cuda: ModuleType) -> Iterator[Cupy]:
    made = Cupy(cuda, played=fake_cuda.is_fake(cuda))
    yield made
    made.forget()


@pytest.mark.slow
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.timeout(300)
def test_rows(ranks: Ranks, arrays: Cupy, collective: str) -> None:
    """A single rank carries out all rows, as the processes of mpirun do in the long tier; other worlds share them."""
    spread = ranks.size > 1 and (ranks.local > 0 or not tiers.takes_all())
    ranks(bodies.run_rows, arrays, collective, spread, timeout=280)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", SOME_DTYPES)
def test_each_op_in_each_way(ranks: Ranks, arrays: Cupy, dtype: str) -> None:
    ranks(bodies.each_op_in_each_way, arrays, dtype, timeout=100)


@pytest.mark.slow
@pytest.mark.parametrize("body", bodies.EVERYWHERE, ids=lambda body: body.__name__)
def test_body(ranks: Ranks, arrays: Cupy, body: Callable[[Cupy], Any]) -> None:
    ranks(body, arrays, timeout=100)


def test_half_precision_is_summed_in_single(ranks: Ranks, arrays: Cupy) -> None:
    ranks(bodies.half_precision_is_summed_in_single, arrays, "float16")


@pytest.mark.slow
def test_an_odd_large_number_of_elements(ranks: Ranks, arrays: Cupy) -> None:
    """Several pieces of page-locked memory for each message, the last one short."""
    ranks(bodies.large, arrays, 1_300_001, timeout=100)


@pytest.mark.long
def test_memory_does_not_grow(ranks: Ranks, arrays: Cupy) -> None:
    ranks(bodies.memory_does_not_grow, arrays, 100, timeout=100)


@pytest.mark.slow
def test_memory_that_cannot_be_shared(ranks: Ranks, arrays: Cupy) -> None:
    ranks(bodies.memory_that_cannot_be_shared, arrays)


# --- an MPI library that takes device memory: the host may touch it then, and messages go straight from it

STRAIGHT = """
from support import fake_cuda

cupy = fake_cuda.install()
from support import device_bodies as bodies
import mpicoll
from mpicoll.buffers.cuda.device import CudaDevice

arrays = bodies.Cupy(cupy, played=True)
bodies.WAYS = (None, "native", "ring", "recursive_doubling")
for body in (
    bodies.input_is_waited_for, bodies.output_is_waited_for, bodies.messages_are_in_order, bodies.requests_are_in_order,
    bodies.messages_of_every_size, bodies.messages_of_every_dtype_and_layout, bodies.messages_between_host_and_device,
    bodies.truncated_message, bodies.order_of_ranks_is_kept, bodies.capture_is_refused,
):
    body(arrays)
for collective in ("allreduce", "bcast", "gather", "scatter", "allgather", "reduce_scatter", "alltoall"):
    assert bodies.each_way(arrays, collective, "sum", "float32", (1200,), ("native",)), collective
CudaDevice.synchronize = lambda device: None
for way in ("native", "ring"):
    assert not bodies.late_sum(arrays, way), f"{way} is right without a wait"
print("right")
"""


@pytest.mark.slow
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.long), 3])
def test_straight_messages(size: int, tmp_path: Path) -> None:
    script = tmp_path / "straight.py"
    script.write_text(STRAIGHT)
    environment = fake_cuda.environment(FAKECUDA_AWARE="1", MPICOLL_CUDA_AWARE="on")
    environment["PYTHONPATH"] += f":{Path(__file__).parents[1]}"
    done = mpirun(size, script, seconds=100, **environment)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("right") == size


# --- a wait is missing


def _slow_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rank's work is done late, when it leaves a collective."""
    from mpicoll.buffers.cuda.device import CudaDevice

    working = CudaDevice.working

    @contextmanager
    def slow(self: CudaDevice, after: Sequence[Any] = ()) -> Iterator[None]:
        with working(self, after):
            yield
            if threading.current_thread().name.endswith(str(LAST)):
                time.sleep(0.2)

    monkeypatch.setattr(CudaDevice, "working", slow)


def _never_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    from mpicoll.buffers.cuda.recognise import CupyLibrary

    monkeypatch.setattr(CupyLibrary, "record_event", lambda self, buffer: None)


def _first_is_left_out(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    """Each thread's first call of that method does nothing."""
    real, calls = getattr(owner, name), Counter[int]()

    def call(self: Any) -> None:
        calls[threading.get_ident()] += 1
        if calls[threading.get_ident()] > 1:
            real(self)

    monkeypatch.setattr(owner, name, call)


def _leave_out_first_synchronization(monkeypatch: pytest.MonkeyPatch) -> None:
    from mpicoll.buffers.cuda.device import CudaDevice

    _slow_end(monkeypatch)
    _first_is_left_out(monkeypatch, CudaDevice, "synchronize")


def _last_rank_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    from mpicoll.buffers.cuda.device import CudaDevice

    _slow_end(monkeypatch)
    synchronize = CudaDevice.synchronize

    def wait(self: CudaDevice) -> None:
        if not threading.current_thread().name.endswith(str(LAST)):
            synchronize(self)

    monkeypatch.setattr(CudaDevice, "synchronize", wait)


def _first_mark_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from mpicoll.buffers.cuda.events import RecordedEvent

    _first_is_left_out(monkeypatch, RecordedEvent, "wait")


def _nobody_waits_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    from mpicoll.buffers.cuda.device import CudaDevice
    from mpicoll.buffers.cuda.streams import ThreadStream

    synchronize = ThreadStream.synchronize
    monkeypatch.setattr(CudaDevice, "synchronize", lambda self: synchronize(self.thread_stream()))
    monkeypatch.setattr(ThreadStream, "synchronize", lambda self: None)


LAST = 1
"""The last of the two ranks."""

SHARED = ("ipc", "shm_flat", "shm_pipelined")
"""The algorithms that need memory which the ranks share."""


def _rows() -> Iterator[Any]:
    """Each algorithm, without a wait that it needs."""
    for way in (*SHARED, "ring", "recursive_doubling", "master_worker"):
        yield way, _never_ready
    yield "ipc", _last_rank_does_not_wait  # the first one on the device works for it
    for way in ("shm_flat", "shm_pipelined"):
        yield way, _leave_out_first_synchronization
    for way in ("ring", "master_worker"):
        yield way, _first_mark_is_not_waited_for
    yield "shm_pipelined", _nobody_waits_at_the_end  # the others wait at their own ends already


@pytest.mark.parametrize(
    ("way", "without"),
    [pytest.param(*row, marks=[pytest.mark.extension] if row[0] in SHARED else []) for row in _rows()],
    ids=lambda one: one if isinstance(one, str) else one.__name__.strip("_"),
)
def test_a_wait_that_is_missing_is_seen(
    arrays: Cupy, monkeypatch: pytest.MonkeyPatch, way: str, without: Callable[[pytest.MonkeyPatch], None]
) -> None:
    def right() -> tuple[bool, bool]:
        world = mpicoll.world()
        before = bodies.late_sum(arrays, way)
        # The other rank waits in these two for rank 0.
        mpicoll.barrier()
        if world.rank == 0:
            without(monkeypatch)
        mpicoll.barrier()
        return before, bodies.late_sum(arrays, way, 3)

    assert _then_at_rest(right) == [(True, False)] * 2


def test_a_message_that_no_rank_waits_for_is_seen(arrays: Cupy, monkeypatch: pytest.MonkeyPatch) -> None:
    def right() -> bool:
        world = mpicoll.world()
        new, old = arrays.put(np.ones(1000)), arrays.put(np.zeros(1000))
        arrays.wait()
        with arrays.stream():
            x = old * 1
            arrays.wait()
            arrays.assign(x, new)
            got = mpicoll.sendrecv(x, (world.rank + 1) % world.size, (world.rank - 1) % world.size)
        with arrays.stream():
            return bool((arrays.get(got * 1) == 1).all())

    assert all(_then_at_rest(right))
    for without in (_never_ready, _nobody_waits_at_the_end):
        with monkeypatch.context() as patch:
            without(patch)
            assert not any(_then_at_rest(right)), without


def _then_at_rest(body: Callable[[], Any]) -> list[Any]:
    """What `body` gives on two ranks. What it has left to be done, where waits are missing, is done then."""
    from mpicoll.buffers.cuda.device import cuda_device
    from mpicoll.buffers.cuda.streams import ThreadStream

    synchronize = ThreadStream.synchronize

    def run() -> Any:
        try:
            return body()
        finally:
            synchronize(cuda_device(0).thread_stream())

    return mpicoll.run_local(run, 2)


# --- arrays of other libraries


class Foreign:
    """An array that another library computes on a `stream`: ones, later. `names` is what its CUDA array interface says
    of the stream; "dlpack": it has only DLPack, which makes the consumer's stream wait; "both": also an interface of
    version 2, which names none, as JAX's."""

    def __init__(self, cuda: ModuleType, names: Any, stream: Any, count: int) -> None:
        self._array = cuda.zeros(count, np.float32)
        cuda.cuda.get_current_stream().synchronize()
        self._stream = stream
        with stream:
            self._array += 1
        interface = self._array.__cuda_array_interface__
        if names not in ("dlpack", "both"):
            self.__cuda_array_interface__ = {**interface, "version": 3, "stream": names}
        elif names == "both":
            self.__cuda_array_interface__ = {**interface, "version": 2}
            self.__cuda_array_interface__.pop("stream", None)
        if names in ("dlpack", "both"):
            self.__dlpack__, self.__dlpack_device__ = self._export, self._array.__dlpack_device__

    def _export(self, **options: Any) -> Any:
        with self._stream:
            return self._array.__dlpack__(**options)

    def later(self, value: float) -> None:
        """Compute again."""
        with self._stream:
            self._array.fill(value)

    def get(self) -> np.ndarray:
        """Read it as its library does, which waits for its stream alone."""
        with self._stream:
            return self._array.get()


def _streams(cuda: ModuleType) -> dict[str, tuple[Any, Any]]:
    """By producer: what it names, and the stream of its work."""
    own = cuda.cuda.Stream(non_blocking=True)
    return {
        "a stream": (own.ptr, own),
        "none": (None, cuda.cuda.Stream()),
        "legacy": (1, cuda.cuda.Stream()),
        "per thread": (2, cuda.cuda.Stream(ptds=True)),
        "dlpack": ("dlpack", cuda.cuda.Stream(non_blocking=True)),
        "both": ("both", cuda.cuda.Stream(non_blocking=True)),
    }


PRODUCERS = ("a stream", "none", "legacy", "per thread", "dlpack", "both")


@pytest.mark.extension
@pytest.mark.parametrize("order", ["host", "stream"])
@pytest.mark.parametrize("producer", PRODUCERS)
def test_arrays_that_another_library_still_computes(
    cuda: ModuleType, monkeypatch: pytest.MonkeyPatch, producer: str, order: str
) -> None:
    """What is read is what their stream writes, and what their stream reads next is the result."""
    if not fake_cuda.is_fake(cuda):
        pytest.skip("on a real device work is done at once, or not, as it happens")
    setting = config()._replace(cuda_order=order)
    monkeypatch.setattr("mpicoll.engine.executors.device.config", lambda: setting)

    def body() -> None:
        world = mpicoll.world()
        names, stream = _streams(cuda)[producer]

        def make() -> Foreign:
            return Foreign(cuda, names, stream, 300)

        for algorithm in ("ipc", "shm_flat", "ring"):
            for turn in range(3):
                x, out = make(), make()
                x.later(turn + 2)
                mpicoll.allreduce(x, out=out, algorithm=algorithm)
                np.testing.assert_array_equal(out.get(), np.full(300, 2 * (turn + 2)), algorithm)
                x.later(turn + 3)
                got = mpicoll.allreduce(x, algorithm=algorithm)
                values = got.get() if isinstance(got, cuda.ndarray) else np.asarray(got)
                np.testing.assert_array_equal(values, np.full(300, 2 * (turn + 3)), algorithm)
        x, out = make(), make()
        for turn in range(2):
            x.later(world.rank + turn)
            out.later(-1)
            receiving = mpicoll.irecv(source=1 - world.rank, tag=4, out=out)
            mpicoll.send(x, 1 - world.rank, 4)
            receiving.wait()
            np.testing.assert_array_equal(out.get(), np.full(300, 1 - world.rank + turn))

    mpicoll.run_local(body, 2, timeout=60)


# --- a device that is lost

LOST = """
import sys
import time
import cupy
import numpy as np
import mpicoll
world = mpicoll.world()
x = cupy.asarray(np.ones(1000))
for algorithm in ("ipc", "shm_flat") * 2:
    mpicoll.allreduce(x, algorithm=algorithm)
cupy.cuda.get_current_stream().synchronize()
mpicoll.barrier()
if world.rank == 1:
    cupy.cuda.runtime.memsetAsync(x.data.ptr, 0, 1 << 24, 0)  # beyond its end
for name in sys.argv[1:]:
    begin = time.monotonic()
    try:
        mpicoll.allreduce(x, algorithm=name)
        if world.rank == 1:
            x.get()
        print("returned", flush=True)
    except (mpicoll.MpicollError, cupy.cuda.runtime.CUDARuntimeError) as error:
        assert (world.rank == 1) == isinstance(error, cupy.cuda.runtime.CUDARuntimeError), error
        print(f"rank {world.rank}, {name}: {error}", flush=True)
    assert time.monotonic() - begin < 5
print(f"rank {world.rank} ends", flush=True)
"""


@pytest.mark.slow
@pytest.mark.extension
@pytest.mark.parametrize("order", ["host", "stream"])
def test_a_kernel_that_fails_before_a_collective(tmp_path: Path, order: str) -> None:
    """Its error is raised by each later call of that rank; the others get an error soon, and all end by themselves."""
    script = tmp_path / "lost.py"
    script.write_text(LOST)
    settings = fake_cuda.environment(MPICOLL_CUDA_ORDER=order, MPICOLL_REPORT="off")
    done = mpirun(2, script, "ipc", "shm_flat", "ipc", **settings)
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    assert sum("rank 1, " in line and "IllegalAddress" in line for line in lines) == 3, done.stdout
    assert sum("rank 0, " in line for line in lines) >= 2, done.stdout
    # In the order of streams, the first call has been submitted by then.
    assert done.stdout.count("returned") <= (order == "stream"), done.stdout
    assert {"rank 0 ends", "rank 1 ends"} <= set(lines), done.stdout
    assert "ignored" not in done.stdout, done.stdout
