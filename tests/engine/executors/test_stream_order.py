"""Collectives on device memory that streams order: the host does not wait, results are right on the caller's stream
alone, and what a failure has left is never taken for a result."""

from __future__ import annotations

import gc
import re
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partialmethod
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from support import fake_cuda
from support.launch import mpirun
from support.ranks import Ranks

import mpicoll
from mpicoll.config import config
from mpicoll.engine.executors import stream_order
from mpicoll.errors import CommunicationError, MismatchError, RankFailed
from mpicoll.transport.base import Transport

pytestmark = [pytest.mark.usefixtures("ordered"), pytest.mark.extension]


@pytest.fixture
def ordered(cuda: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if not fake_cuda.is_fake(cuda):
        pytest.skip("of the fake CUDA")
    monkeypatch.setenv("MPICOLL_CUDA_ORDER", "stream")
    config.cache_clear()
    # MPI's world outlives the fake device, and the setting, of the test before.
    mpicoll.world()._core.devices = None
    mpicoll.world()._core.discard_calls()
    yield
    monkeypatch.undo()
    config.cache_clear()
    mpicoll.world()._core.devices = None
    mpicoll.world()._core.discard_calls()


def order_of(comm: Any = None) -> stream_order.StreamOrder:
    """The order of a communicator that has used the device."""
    devices = (comm or mpicoll.world())._core.devices
    assert devices._no_order is None
    order: stream_order.StreamOrder = devices._order
    return order


class Hold:
    """Work that holds up the current stream until it is let go."""

    def __init__(self, cuda: ModuleType) -> None:
        memory = cuda.cuda.alloc_pinned_memory(64)
        self.word = np.frombuffer(memory, np.uint32, 1)
        self.word[0] = 0
        words, streams = fake_cuda.fakecuda.words, fake_cuda.fakecuda.streams
        stream = streams.stream_at(cuda.cuda.get_current_stream().ptr)
        words.wait(stream, self.word.ctypes.data, 1, 0)

    def let_go(self) -> None:
        self.word[0] = 1


@contextmanager
def own_stream(cuda: ModuleType) -> Iterator[Any]:
    """A stream of this rank, which ranks that are threads do not share."""
    stream = cuda.cuda.Stream(non_blocking=True)
    with stream:
        yield stream


def submitted(function: Callable[[], Any]) -> Any:
    """What `function` returns, without a wait of this thread for the device."""
    streams, here = fake_cuda.fakecuda.streams, threading.get_ident()
    may_wait = streams._host_may_wait

    def refuse() -> None:
        assert threading.get_ident() != here, "the host waits"
        may_wait()

    streams._host_may_wait = refuse
    try:
        return function()
    finally:
        streams._host_may_wait = may_wait


def test_collectives_follow_each_other(several: Ranks, cuda: ModuleType) -> None:
    """Each takes the result of the one before, of inputs that are late on one rank, with no wait of the host."""

    def body() -> None:
        world = mpicoll.world()
        rank, size = world.rank, world.size
        with own_stream(cuda) as stream:
            # The first call opens memory of other processes and closes it, which waits for all work of the device.
            mpicoll.allreduce(cuda.zeros(300, np.float64), algorithm="ipc")
            for turn in range(4):
                x, new = cuda.zeros(300, np.float64), cuda.asarray(np.arange(300.0) + rank)
                stream.synchronize()
                hold = Hold(cuda) if rank == turn % size else None
                x[...] = new
                for _ in range(5):
                    mpicoll.allreduce(x, "avg", out=x, algorithm="ipc")
                    x += rank
                blocks = mpicoll.allgather(x[:10], algorithm="ipc")
                parts = mpicoll.reduce_scatter(blocks, algorithm="ipc")
                swapped = mpicoll.alltoall(blocks, algorithm="ipc")
                parts = mpicoll.bcast(parts, root=size - 1, algorithm="ipc")
                mpicoll.barrier()
                if hold is not None:
                    assert not stream.done
                    hold.let_go()
                middle = (size - 1) / 2
                # What each rank has after the last step: the mean, and its own number.
                base = np.arange(300.0) + middle + 4 * middle
                np.testing.assert_array_equal(cuda.asnumpy(x), base + rank)
                want = np.stack([base[:10] + one for one in range(size)])
                np.testing.assert_array_equal(cuda.asnumpy(blocks).reshape(size, 10), want)
                np.testing.assert_array_equal(cuda.asnumpy(parts).ravel(), size * want[size - 1])
                np.testing.assert_array_equal(
                    cuda.asnumpy(swapped).reshape(size, 10), np.repeat(want[rank][None], size, 0)
                )
        assert order_of() is not None

    several(body)


def test_the_host_does_not_wait(cuda: ModuleType) -> None:
    def body() -> None:
        world = mpicoll.world()
        with own_stream(cuda) as stream:
            x, out = cuda.asarray(np.arange(50.0) + world.rank), cuda.zeros(50)
            for _ in range(3):
                mpicoll.allreduce(x, out=out, algorithm="ipc")
            stream.synchronize()
            mpicoll.barrier()
            hold = Hold(cuda) if world.rank == 1 else None
            x += 1

            def calls() -> Any:
                for _ in range(20):
                    mpicoll.allreduce(x, out=out, algorithm="ipc")
                return mpicoll.allreduce(out, algorithm="ipc")

            twice = submitted(calls) if world.rank == 0 else calls()
            mpicoll.barrier()
            assert (fake_cuda.fakecuda.working_view(out.data.ptr, (50,), np.float64) != 2 * np.arange(50.0) + 3).any()
            mpicoll.barrier()
            if hold is not None:
                hold.let_go()
            np.testing.assert_array_equal(cuda.asnumpy(twice), 2 * (2 * np.arange(50.0) + 3))

    mpicoll.run_local(body, 2, timeout=60)


def test_each_kind_of_array_and_place(several: Ranks, cuda: ModuleType) -> None:
    """Substitutes for memory that can't be opened, in place and not; gaps; conversions; empty arrays; a scalar."""

    def lend(values: np.ndarray) -> Any:
        made = cuda.ndarray(values.shape, values.dtype, memptr=cuda.cuda.malloc_async(max(values.nbytes, 1)))
        made[...] = cuda.asarray(values)
        return made

    def body() -> None:
        world = mpicoll.world()
        rank, size = world.rank, world.size
        total = size * (size - 1) // 2
        with own_stream(cuda):
            for turn in range(3):
                values = np.arange(100, dtype=np.float32) * turn + rank
                want = size * np.arange(100, dtype=np.float32) * turn + total
                make = lend if (rank + turn) % 2 else cuda.asarray
                x, out = make(values), make(np.zeros(100, np.float32))
                found = [mpicoll.allreduce(x, out=out, algorithm="ipc")]
                # The substitutes are used again before the host has waited for the first call.
                found.append(mpicoll.allreduce(make(values), out=make(np.zeros(100, np.float32)), algorithm="ipc"))
                place = make(values)
                found.append(mpicoll.allreduce(place, out=place, algorithm="ipc"))
                gaps = cuda.zeros((100, 2), np.float32)
                gaps[:, 1] = cuda.asarray(values)
                found.append(mpicoll.allreduce(gaps[:, 1], algorithm="ipc"))
                half = mpicoll.allreduce(cuda.asarray(np.full(9, rank, np.float16)), algorithm="ipc")
                none = mpicoll.allreduce(cuda.zeros(0, np.float32), algorithm="ipc")
                one = mpicoll.allreduce(cuda.asarray(np.float32(rank)), algorithm="ipc")
                for got in found:
                    np.testing.assert_array_equal(cuda.asnumpy(got), want)
                assert (cuda.asnumpy(half) == total).all()
                assert none.shape == (0,)
                assert float(cuda.asnumpy(one)) == total

    several(body)


def test_each_stream_gets_its_result(several: Ranks, cuda: ModuleType) -> None:
    """Calls from several streams and threads of a rank, in one order: the second one is not held up by what comes
    after the first on its stream."""

    def body() -> None:
        world = mpicoll.world()
        with own_stream(cuda) as first:
            x = cuda.asarray(np.full(20, world.rank, np.int64))
            one = mpicoll.allreduce(x, algorithm="ipc")
            hold = Hold(cuda)
        with own_stream(cuda) as second:
            y = cuda.asarray(np.full(20, 10 * world.rank, np.int64))
            other = mpicoll.allreduce(y, algorithm="ipc")
            request = mpicoll.iallreduce(other, algorithm="ipc")
            third = request.wait()
            total = world.size * (world.size - 1) // 2
            assert (cuda.asnumpy(other) == 10 * total).all()
            assert (cuda.asnumpy(third) == 10 * total * world.size).all()
        assert not first.done
        hold.let_go()
        with first:
            assert (cuda.asnumpy(one) == total).all()
        assert second.done

    several(body)


def test_substitutes_are_used_in_order(several: Ranks, cuda: ModuleType) -> None:
    """A call for which the host waits, on another stream and thread, does not overwrite the substitute that an earlier
    call has not read yet."""

    def lend(values: np.ndarray) -> Any:
        made = cuda.ndarray(values.shape, values.dtype, memptr=cuda.cuda.malloc_async(values.nbytes))
        made[...] = cuda.asarray(values)
        return made

    def body() -> None:
        world = mpicoll.world()
        total = mpicoll.Op(lambda a, b: a + b, commutative=True, elementwise=True)
        ranks = sum(range(world.size))
        with own_stream(cuda) as first:
            mpicoll.allreduce(lend(np.zeros(64)), algorithm="ipc")
            for turn in range(3):
                x, y = lend(np.full(64, world.rank + turn, np.float64)), lend(np.full(64, 1000.0))
                first.synchronize()
                hold = Hold(cuda) if world.rank == world.size - 1 else None
                one = mpicoll.allreduce(x, algorithm="ipc")
                for _ in range(20):  # what does not have to wait has been done then
                    assert not order_of()._pending[-1].done() or world.size == 1
                with own_stream(cuda):
                    request = mpicoll.iallreduce(y, total, algorithm="ipc")
                    time.sleep(0.1)
                    if hold is not None:
                        hold.let_go()
                    assert (cuda.asnumpy(request.wait()) == 1000 * world.size).all()
                assert (cuda.asnumpy(one) == ranks + turn * world.size).all()

    several(body)


def test_functions_of_the_caller_and_other_algorithms(several: Ranks, cuda: ModuleType) -> None:
    """The host waits for these, and for what was submitted before."""

    def body() -> None:
        world = mpicoll.world()
        total = mpicoll.Op(lambda a, b: a + b, commutative=True, elementwise=True)
        with own_stream(cuda):
            x = cuda.asarray(np.full(64, world.rank + 1, np.float64))
            for algorithm in ("ipc", "shm_pipelined", "ring"):
                y = mpicoll.allreduce(x, algorithm="ipc")
                y = mpicoll.allreduce(y, algorithm=algorithm)
                y = mpicoll.allreduce(y, "max", algorithm="ipc")
                y = mpicoll.allreduce(y, total, algorithm="ipc")
                y = mpicoll.allreduce(y, "max", algorithm="ipc")
                assert (cuda.asnumpy(y) == world.size**3 * (world.size + 1) // 2).all()

    several(body)


def test_arrays_of_other_libraries_are_complete(cuda: ModuleType) -> None:
    """Their streams can't be made to wait, so the host waits."""

    class Other:
        def __init__(self, array: Any) -> None:
            self._array = array
            self.__cuda_array_interface__ = array.__cuda_array_interface__ | {
                "stream": cuda.cuda.get_current_stream().ptr,
                "version": 3,
            }

    def body() -> None:
        world = mpicoll.world()
        with own_stream(cuda):
            x, out = cuda.asarray(np.full(8, world.rank + 1.0)), cuda.zeros(8)
            mpicoll.allreduce(Other(x), out=Other(out), algorithm="ipc")
            assert (fake_cuda.fakecuda.working_view(out.data.ptr, (8,), np.float64) == 3).all()

    mpicoll.run_local(body, 2, timeout=60)


def test_numbers_come_round(several: Ranks, cuda: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words are compared in cyclic order, and set again when many collectives of the host lie between two."""
    monkeypatch.setattr(stream_order, "_FAR", 6)

    def body() -> None:
        world = mpicoll.world()
        with own_stream(cuda):
            x = cuda.asarray(np.ones(10))
            mpicoll.allreduce(x, algorithm="ipc")
            order = order_of()
            sets: list[int] = []
            original = order.set_first_number

            def set_first(number: int) -> None:
                sets.append(number)
                original(number)

            order.set_first_number = set_first  # type: ignore[method-assign]
            for turn in range(4):
                for _ in range(5 * (turn % 2)):
                    mpicoll.allreduce(np.ones(5))
                got = mpicoll.allreduce(x, algorithm="ipc")
                assert (cuda.asnumpy(got) == world.size).all()
            assert len(sets) == 2

    several(body)


def test_memory_is_kept_until_the_device_has_completed(cuda: ModuleType) -> None:
    def body() -> None:
        with own_stream(cuda) as stream:
            x = cuda.asarray(np.ones(10))
            mpicoll.allreduce(x, algorithm="ipc")
            stream.synchronize()
            order = order_of()
            hold = Hold(cuda)
            x += 1
            for _ in range(5):
                mpicoll.allreduce(x, algorithm="ipc")
            time.sleep(3 * stream_order._PERIOD)
            assert len(order._pending) == 5
            assert all(one.kept for one in order._pending)
            mpicoll.barrier()
            hold.let_go()
            stream.synchronize()
        deadline = time.monotonic() + 20
        while order.has_pending and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not order.has_pending

    mpicoll.run_local(body, 2, timeout=60)


def test_memory_that_was_freed_gives_way_to_what_comes_after_it(
    several: Ranks, cuda: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA opens no memory at an address where other ranks still have open what lay there before, and collectives that
    have completed keep that open for a time."""

    def body() -> None:
        rank, size = mpicoll.world().rank, mpicoll.world().size
        runtime, addresses = cuda.cuda.runtime, []
        with own_stream(cuda) as stream:
            for turn in range(9):
                addresses.append(runtime.malloc(4096))
                memory = cuda.cuda.UnownedMemory(addresses[-1], 4096, None)
                x = cuda.ndarray(512, np.float64, cuda.cuda.MemoryPointer(memory, 0))
                x[...] = rank + turn
                mpicoll.allreduce(x, out=x, algorithm="ipc")
                np.testing.assert_array_equal(cuda.asnumpy(x), np.full(512, sum(range(size)) + size * turn))
                stream.synchronize()
                mpicoll.barrier()
                runtime.free(addresses[-1])
        assert any(mpicoll.allgather_object(len(set(addresses)) < len(addresses)))

    release = stream_order.Completion.release

    def release_late(self: stream_order.Completion) -> None:
        time.sleep(0.01)
        release(self)

    monkeypatch.setattr(stream_order.Completion, "release", release_late)
    monkeypatch.setattr(stream_order, "_PERIOD", 0.001)
    several(body)


def _record_other(device: Any, record: Callable[..., Any], other: int, stream: int) -> Any:
    """Record an event on another stream than the caller's."""
    return record(device, other)


@pytest.mark.parametrize("missing", ["ready", "done", "event", "caller"])
def test_a_wait_that_is_missing_is_seen(cuda: ModuleType, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """The tests would notice if one were forgotten."""
    from mpicoll.buffers.cuda.device import CudaDevice
    from mpicoll.buffers.cuda.words import StreamWords

    wait = StreamWords.wait

    def leave_out(which: int) -> Callable[[Any, int, int], None]:
        def wait_for_others(self: Any, offset: int, value: int) -> None:
            if offset // stream_order._LINE % 2 != which:
                wait(self, offset, value)

        return wait_for_others

    def main() -> bool:
        world = mpicoll.world()
        unused = cuda.cuda.Stream(non_blocking=True)
        with own_stream(cuda) as stream:
            right = True
            for turn in range(8):
                x, new = cuda.zeros(50), cuda.asarray(np.full(50, turn + world.rank + 1.0))
                out = cuda.asarray(np.full(50, -1.0))
                stream.synchronize()
                mpicoll.barrier()
                if turn == 3 and world.rank == 0:
                    if missing in ("ready", "done"):
                        which = stream_order._READY if missing == "ready" else stream_order._DONE
                        monkeypatch.setattr(StreamWords, "wait", leave_out(which))
                    elif missing == "event":
                        monkeypatch.setattr(CudaDevice, "block_stream", lambda self, stream, event: None)
                    else:
                        patch = partialmethod(_record_other, CudaDevice.record_caller, unused.ptr)
                        monkeypatch.setattr(CudaDevice, "record_caller", patch)
                mpicoll.barrier()
                hold = Hold(cuda) if world.rank == 1 else None
                x[...] = new
                mpicoll.allreduce(x, out=out, algorithm="ipc")
                mpicoll.barrier()
                if hold is None:
                    time.sleep(0.01)
                else:
                    threading.Timer(0.05, hold.let_go).start()
                found = cuda.asnumpy(out)
                if turn < 3:
                    np.testing.assert_array_equal(found, 2 * turn + 3)
                right = right and bool((found == 2 * turn + 3).all())
                stream.synchronize()
                order = order_of()
                order.drain(20)
        return right

    assert not all(mpicoll.run_local(main, 2, timeout=60))


def test_a_capture_goes_on_while_collectives_are_pending(cuda: ModuleType) -> None:
    """What looks at them from another thread does not spoil it."""

    def body() -> None:
        with own_stream(cuda) as stream:
            x = cuda.asarray(np.ones(10))
            mpicoll.allreduce(x, algorithm="ipc")
            stream.synchronize()
            mpicoll.barrier()
            hold = Hold(cuda)
            got = mpicoll.allreduce(x, algorithm="ipc")
            if mpicoll.world().rank == 0:
                other = cuda.cuda.Stream(non_blocking=True)
                other.begin_capture(cuda.cuda.runtime.streamCaptureModeGlobal)
                time.sleep(4 * stream_order._PERIOD)
                other.end_capture()
            mpicoll.barrier()
            hold.let_go()
            assert (cuda.asnumpy(got) == 2).all()

    mpicoll.run_local(body, 2, timeout=60)


# --- which order


def test_all_ranks_have_to_set_it(cuda: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from mpicoll.engine.executors import device

    setting = config()
    monkeypatch.setattr(
        device, "config", lambda: setting._replace(cuda_order="host" if mpicoll.world().rank == 1 else "stream")
    )

    def body() -> None:
        x = cuda.asarray(np.ones(10))
        assert (cuda.asnumpy(mpicoll.allreduce(x, algorithm="ipc")) == 3).all()
        devices = mpicoll.world()._core.devices
        assert devices._order is None
        assert devices._no_order == "MPICOLL_CUDA_ORDER is host on rank 1 of 3"
        shown = str(mpicoll.explain("allreduce", 80, like=x))
        assert "the host waits: MPICOLL_CUDA_ORDER is host on rank 1 of 3" in shown, shown

    mpicoll.run_local(body, 3, timeout=60)


def test_drivers_that_refuse(several: Ranks, cuda: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKECUDA_MEMORY_OPERATIONS", "0")

    def body() -> None:
        world = mpicoll.world()
        x = cuda.asarray(np.full(10, world.rank))
        for _ in range(3):
            got = mpicoll.allreduce(x, algorithm="ipc")
        assert (cuda.asnumpy(got) == world.size * (world.size - 1) // 2).all()
        devices = world._core.devices
        assert devices._order is None
        assert devices._no_order.startswith("rank 0 (of this node, cuda:0): CUDA's error 801 for a word"), devices
        assert "the host waits: rank 0 (of" in str(mpicoll.explain("allreduce", 80, like=x))

    several(body)


def test_streams_that_do_not_see_each_others_words(cuda: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from mpicoll.buffers.cuda.words import StreamWords

    monkeypatch.setattr(stream_order, "_TRIAL", 0.2)
    write = StreamWords.write
    monkeypatch.setattr(StreamWords, "write", lambda self, *word: None if word[0] else write(self, *word))

    def body() -> None:
        x = cuda.asarray(np.ones(10))
        assert (cuda.asnumpy(mpicoll.allreduce(x, algorithm="ipc")) == 2).all()
        reason = mpicoll.world()._core.devices._no_order
        assert reason == "rank 0 (of this node, cuda:0): its stream does not see the words that other streams write"

    mpicoll.run_local(body, 2, timeout=60)


def test_what_is_selected_says_so(cuda: ModuleType) -> None:
    def body() -> None:
        x = cuda.asarray(np.ones(10))
        mpicoll.allreduce(x)
        assert str(mpicoll.explain("allreduce", 80, like=x)).startswith("ipc: ")
        assert "; ordered by streams, the host does not wait" in str(mpicoll.explain("allreduce", 80, like=x))

    mpicoll.run_local(body, 2, timeout=60)


# --- failures


def test_different_calls_are_found_before_anything_is_submitted(several: Ranks, cuda: ModuleType) -> None:
    def body() -> None:
        world = mpicoll.world()
        with own_stream(cuda):
            x = cuda.asarray(np.ones(10))
            mpicoll.allreduce(x, algorithm="ipc")
            order = order_of()
            for _ in range(3):
                before = order._number
                with pytest.raises(MismatchError, match="allreduce"):
                    mpicoll.allreduce(x[: 9 + (world.rank > 0)], algorithm="ipc")
                assert order._number == before
                assert (cuda.asnumpy(mpicoll.allreduce(x, algorithm="ipc")) == world.size).all()

    several(body)


def test_a_rank_that_can_not_do_its_work(several: Ranks, cuda: ModuleType) -> None:
    """It is known before any rank submits its part, and they go on."""

    def body() -> None:
        world = mpicoll.world()
        with own_stream(cuda):
            x = cuda.asarray(np.ones(10))
            mpicoll.allreduce(x, algorithm="ipc")
            peers = world._core.devices._peers
            export = peers.export_buffer
            for turn in range(3):
                if world.rank == turn % world.size:
                    peers.export_buffer = lambda which, array: (_ for _ in ()).throw(MemoryError("on purpose"))
                with pytest.raises((MemoryError, CommunicationError), match=r"on purpose|failed in this operation"):
                    mpicoll.allreduce(x, algorithm="ipc")
                peers.export_buffer = export
                assert (cuda.asnumpy(mpicoll.allreduce(x, algorithm="ipc")) == world.size).all()

    several(body)


class Local:
    """What a failure must not keep."""


def _try_with_a_local(call: Callable[[], Any]) -> weakref.ref[Local]:
    """Return a reference to an object of a frame of `call`, which fails."""

    def attempt() -> None:
        local = Local()
        references.append(weakref.ref(local))
        call()

    references: list[weakref.ref[Local]] = []
    with pytest.raises(RuntimeError, match="is lost"):
        attempt()
    return references[0]


def test_a_rank_whose_work_fails_after_the_begin(several: Ranks, cuda: ModuleType) -> None:
    """The others may have returned: their next calls fail, and their streams are let go only after that is certain."""
    explained = "rank 0 failed in a collective after its begin|rank 0 has abandoned|an operation was abandoned"

    def body() -> None:
        comm = mpicoll.world().duplicate()
        with own_stream(cuda) as stream:
            x, out = cuda.asarray(np.ones(10)), cuda.zeros(10)
            mpicoll.allreduce(x, out=out, algorithm="ipc", comm=comm)
            order = order_of(comm)
            if comm.rank == 0:
                words = order._words

                class Broken:
                    def wait(self, offset: int, value: int) -> None:
                        raise RuntimeError("the device is lost")

                order._words = Broken()  # type: ignore[assignment]
                local = _try_with_a_local(lambda: mpicoll.allreduce(x, out=out, algorithm="ipc", comm=comm))
                order._words = words
                gc.collect()
                assert local() is None  # as what the library's own frames hold
            else:
                try:
                    mpicoll.allreduce(x, out=out, algorithm="ipc", comm=comm)
                except CommunicationError as error:
                    assert re.search(explained, str(error))  # noqa: PT017  it may have returned before
            stream.synchronize()
            for _ in range(2):
                with pytest.raises(CommunicationError, match=f"{explained}|device is lost"):
                    mpicoll.allreduce(x, out=out, algorithm="ipc", comm=comm)
            # Nobody else is concerned.
            assert (cuda.asnumpy(mpicoll.allreduce(x, algorithm="ipc")) == comm.size).all()

    several(body)


def test_a_rank_that_is_late_on_its_device(cuda: ModuleType) -> None:
    """Past the timeout the communicator has failed, and its streams are let go."""

    def body() -> None:
        comm = mpicoll.world().duplicate()
        with own_stream(cuda) as stream:
            x, out = cuda.asarray(np.ones(10)), cuda.zeros(10)
            mpicoll.allreduce(x, out=out, algorithm="ipc", comm=comm)
            stream.synchronize()
            mpicoll.barrier()
            comm.timeout = 0.3
            hold = Hold(cuda) if comm.rank == 1 else None
            x += 1
            mpicoll.allreduce(x, out=out, algorithm="ipc", comm=comm)
            if hold is None:
                begin = time.monotonic()
                stream.synchronize()
                assert time.monotonic() - begin < 10
                late = r"the streams of rank 1 did not come to it within 0\.3 s|rank 1 failed in a|was abandoned"
                late += "|rank 1 has abandoned"
                with pytest.raises(CommunicationError, match=late):
                    mpicoll.barrier(comm=comm)
                with pytest.raises(CommunicationError, match=late):
                    mpicoll.allreduce(x, out=out, algorithm="ipc", comm=comm)
            mpicoll.barrier()
            if hold is not None:
                hold.let_go()
                with pytest.raises(CommunicationError, match=r"rank 0 failed in a|abandoned|streams of"):
                    mpicoll.allreduce(x, out=out, algorithm="ipc", comm=comm)

    mpicoll.run_local(body, 2, timeout=60)


def test_a_rank_that_ends_while_the_streams_of_others_wait(cuda: ModuleType) -> None:
    found: list[BaseException] = []
    holds: list[Hold] = []

    def body() -> None:
        world = mpicoll.world()
        with own_stream(cuda) as stream:
            x = cuda.asarray(np.ones(10))
            mpicoll.allreduce(x, algorithm="ipc")
            stream.synchronize()
            mpicoll.barrier()
            if world.rank == 1:
                holds.append(Hold(cuda))
                x += 1
            out = mpicoll.allreduce(x, algorithm="ipc")
            if world.rank == 1:
                raise KeyError("on purpose")
            stream.synchronize()
            try:
                mpicoll.allreduce(out, algorithm="ipc")
            except CommunicationError as error:
                found.append(error)

    with pytest.raises(KeyError, match="on purpose"):
        mpicoll.run_local(body, 2, timeout=60)
    holds[0].let_go()
    assert [type(one) for one in found] == [RankFailed]
    assert "rank 1" in str(found[0])


@pytest.mark.parametrize("comes", [False, True])
def test_a_rank_may_end_once_its_stream_has_come_to_a_collective(comes: bool) -> None:
    """Even between a look at its words and the question whether it has ended."""

    def check_peers(waited: float, peers: list[int]) -> None:
        if peers:
            order._values[2:] = 5 if comes else 4
            raise RankFailed("rank 1 has exited", (1,))

    order = object.__new__(stream_order.StreamOrder)
    order._values = np.array([5, 5, 4, 4], np.uint32)
    order._others, order._working = [1], [0, 1]
    order._transport = cast("Transport", SimpleNamespace(check_peers=check_peers, timeout=30.0, members=[0, 1]))
    first = cast("stream_order.Completion", SimpleNamespace(number=5, begin=time.monotonic()))
    with nullcontext() if comes else pytest.raises(RankFailed):
        order._check_late_ranks(first)


def test_a_rank_that_ends_well_completes_its_part(cuda: ModuleType) -> None:
    def body() -> Any:
        world = mpicoll.world()
        with own_stream(cuda):
            x = cuda.asarray(np.ones(10))
            for _ in range(4):
                x = mpicoll.allreduce(x, algorithm="ipc")
            if world.rank == 0:
                return None
            time.sleep(0.2)
            return float(cuda.asnumpy(x)[0])

    assert mpicoll.run_local(body, 2, timeout=60) == [None, 16.0]


DYING = """
import os, signal, sys, time
import numpy as np
import cupy
import mpicoll
world = mpicoll.world()
x = cupy.asarray(np.ones(10))
stream = cupy.cuda.Stream(non_blocking=True)
with stream:
    x = mpicoll.allreduce(x, algorithm="ipc")
    stream.synchronize()
    assert world._core.devices._order is not None
    mpicoll.barrier()
    if world.rank == 1:
        from fakecuda import streams, words
        word = np.frombuffer(cupy.cuda.alloc_pinned_memory(64), np.uint32, 1)
        word[0] = 0
        words.wait(streams.stream_at(stream.ptr), word.ctypes.data, 1, 0)
    x = mpicoll.allreduce(x, algorithm="ipc")
    if world.rank == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    print("returned", flush=True)
    stream.synchronize()
    print("result", cupy.asnumpy(x)[0], flush=True)
"""


@pytest.mark.slow
def test_a_process_that_dies_ends_the_job(tmp_path: Path) -> None:
    """No stream goes on before the processes have ended."""
    script = tmp_path / "dying.py"
    script.write_text(DYING)
    done = mpirun(2, script, **fake_cuda.environment(MPICOLL_CUDA_ORDER="stream", MPICOLL_REPORT="off"))
    assert done.returncode not in (0, 124), done.stdout
    assert "returned" in done.stdout, done.stdout
    assert "result" not in done.stdout, done.stdout
    assert signal.Signals.SIGKILL.name in done.stdout or "died" in done.stdout, done.stdout


LATE = DYING.replace("time.sleep(0.5)", "time.sleep(60)").replace("world = ", "mpicoll.world().timeout = 2\nworld = ")


@pytest.mark.slow
def test_a_process_whose_stream_is_late_ends_the_job(tmp_path: Path) -> None:
    script = tmp_path / "late.py"
    script.write_text(LATE)
    begin = time.monotonic()
    done = mpirun(2, script, **fake_cuda.environment(MPICOLL_CUDA_ORDER="stream", MPICOLL_REPORT="off"))
    assert done.returncode not in (0, 124), done.stdout
    assert "result" not in done.stdout, done.stdout
    assert "allreduce" in done.stdout
    assert "has been waiting for more than 2 s" in done.stdout, done.stdout
    assert time.monotonic() - begin < 50


# --- NCCL


@pytest.fixture
def devices(cuda: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device for each rank."""
    monkeypatch.setenv("FAKECUDA_DEVICES", "4")


@contextmanager
def own_device(cuda: ModuleType) -> Iterator[Any]:
    """A device and a stream of this rank."""
    with cuda.cuda.Device(mpicoll.world().rank), own_stream(cuda) as stream:
        yield stream


@pytest.fixture
def refuse_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Any]]:
    """A block in which this thread does not wait for a device; several threads may be in one."""
    streams, refusing = fake_cuda.fakecuda.streams, set[int]()
    may_wait = streams._host_may_wait

    def check() -> None:
        assert threading.get_ident() not in refusing, "the host waits"
        may_wait()

    @contextmanager
    def refuse() -> Iterator[None]:
        refusing.add(threading.get_ident())
        try:
            yield
        finally:
            refusing.discard(threading.get_ident())

    monkeypatch.setattr(streams, "_host_may_wait", check)
    # What earlier tests have left waits for the device when it is collected, on whatever thread that happens.
    gc.collect()
    gc.disable()
    yield refuse
    gc.enable()


@pytest.mark.usefixtures("devices")
def test_nccl_does_not_keep_the_host_waiting(cuda: ModuleType, several: Ranks, refuse_waits: Callable[[], Any]) -> None:
    """All-reduces by NCCL and by ipc in turns, each of the result of the one before, of an input that is late."""

    def body() -> None:
        # Not that of all tests, which goes on where there is one device.
        with mpicoll.world().duplicate() as comm, own_device(cuda) as stream:
            x, new = (cuda.asarray(np.full(300, value)) for value in (0.0, comm.rank + 1.0))
            for algorithm in ("nccl", "ipc"):  # which they begin by meeting
                mpicoll.allreduce(x, algorithm=algorithm, comm=comm)
            stream.synchronize()
            assert "ordered by streams" in str(mpicoll.explain("allreduce", 2400, algorithm="nccl", like=x, comm=comm))
            for turn in range(4):
                hold = Hold(cuda) if comm.rank == turn % comm.size else None
                x[...] = new
                blocks = cuda.arange(4.0 * comm.size)
                with refuse_waits():
                    for algorithm in ("nccl", "ipc", "nccl"):
                        mpicoll.allreduce(x, out=x, algorithm=algorithm, comm=comm)
                    total = mpicoll.allreduce(x, algorithm="nccl", comm=comm)
                    parts = mpicoll.alltoall(blocks, algorithm="nccl", comm=comm)
                if hold is not None:
                    hold.let_go()
                assert (total.get() == sum(range(comm.size + 1)) * comm.size**3).all()
                assert parts.get().tolist() == [*range(4 * comm.rank, 4 * comm.rank + 4)] * comm.size
                mpicoll.barrier(comm=comm)

    several(body)


@pytest.mark.usefixtures("devices")
def test_nccl_is_aborted_when_a_stream_is_late(cuda: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its work on the device ends, and later calls raise the error."""
    monkeypatch.setenv("FAKECUDA_NCCL_TIMEOUT", "15")

    def body() -> None:
        world = mpicoll.world()
        comm = world.duplicate()
        with own_device(cuda) as stream:
            x = cuda.ones(10)
            mpicoll.allreduce(x, algorithm="nccl", comm=comm)
            stream.synchronize()
            comm.timeout = 0.5
            hold = Hold(cuda) if world.rank == 1 else None
            begin = time.monotonic()
            mpicoll.allreduce(x, algorithm="nccl", comm=comm)
            deadline = begin + 20
            while comm._core.devices.native_order._failure is None and time.monotonic() < deadline:
                time.sleep(0.01)
            with pytest.raises(mpicoll.Timeout, match=r"NCCL is not done within the timeout of 0.5 s"):
                mpicoll.allreduce(x, algorithm="nccl", comm=comm)
            with pytest.raises(mpicoll.Timeout):
                mpicoll.bcast(x, comm=comm)
            if hold is not None:
                hold.let_go()
            assert time.monotonic() - begin < 15
            mpicoll.barrier()

    mpicoll.run_local(body, 2, timeout=60)


@pytest.mark.usefixtures("devices")
def test_an_error_that_nccl_has_found(cuda: ModuleType) -> None:
    """Also where the watchdog looks for ranks that are late."""

    def body() -> None:
        world = mpicoll.world()
        comm = world.duplicate()
        with own_device(cuda) as stream:
            x = cuda.ones(10)
            mpicoll.allreduce(x, algorithm="nccl", comm=comm)
            stream.synchronize()
            order = comm._core.devices.native_order
            hold = Hold(cuda) if world.rank == 1 else None
            mpicoll.allreduce(x, algorithm="nccl", comm=comm)
            order._watched = True
            order._nccl.check_errors = fail
            deadline = time.monotonic() + 20
            while order._failure is None and time.monotonic() < deadline:
                time.sleep(0.01)
            with pytest.raises(mpicoll.CommunicationError, match=r"an earlier collective .* failed: a link is down"):
                mpicoll.allreduce(x, algorithm="nccl", comm=comm)
            if hold is not None:
                hold.let_go()
            mpicoll.barrier()

    def fail() -> None:
        raise RuntimeError("a link is down")

    mpicoll.run_local(body, 2, timeout=60)
