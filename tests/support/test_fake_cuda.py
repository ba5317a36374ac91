"""The fake CUDA has the hazards of the real one: each is met here, and so is what keeps clear of it."""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from support import fake_cuda
from support.fake_cuda import fakecuda

SET_ONES = 'extern "C" __global__ void set_ones(double* at) { at[blockIdx.x * blockDim.x + threadIdx.x] = 1; }'

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="kernels of the fake CUDA need g++")


@pytest.fixture(autouse=True)
def _only_fake(cuda: ModuleType) -> None:
    if not fake_cuda.is_fake(cuda):
        pytest.skip("a real CUDA device is there")


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """``devices(n)``: so many of them."""
    yield lambda count: monkeypatch.setenv("FAKECUDA_DEVICES", str(count))
    fakecuda.set_device(0)


def poisoned(values: Any) -> bool:
    return bool(np.isnan(values).all())


def pinned(cuda: ModuleType, values: Any) -> Any:
    """Page-locked host memory with these values."""
    values = np.asarray(values)
    memory = np.frombuffer(cuda.cuda.alloc_pinned_memory(values.nbytes), values.dtype, values.size)
    memory[...] = values
    return memory


def python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program that finds the fake."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | fake_cuda.environment(**variables),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


# Memory


def test_fresh_memory_is_not_written(cuda):
    for dtype in (np.float16, np.float32, np.float64, np.complex64):
        assert poisoned(cuda.empty(5, dtype).get())
    assert (cuda.empty(4, np.int16).get() == -11).all()


def test_freed_memory_is_handed_out_again_but_not_its_values(cuda):
    first = cuda.ones(1000, np.float32)
    cuda.cuda.Stream.null.synchronize()
    address = first.data.ptr
    del first
    second = cuda.empty(1000, np.float32)
    assert second.data.ptr == address
    assert poisoned(second.get())


_TOUCH = """
import cupy, ctypes
x = cupy.ones(4)
cupy.cuda.Stream.null.synchronize()
print("alive", ctypes.c_double.from_address(x.data.ptr).value)
"""


def test_the_host_crashes_where_it_touches_device_memory():
    done = python(_TOUCH)
    assert done.returncode == -signal.SIGSEGV
    assert "alive" not in done.stdout


def test_an_mpi_that_knows_cuda_may_touch_it():
    done = python(_TOUCH, FAKECUDA_AWARE="1")
    assert done.stdout == "alive 1.0\n", done.stderr


def test_a_kernel_on_freed_memory_is_an_error(cuda):
    runtime = cuda.cuda.runtime
    address = runtime.malloc(64)
    x = cuda.ndarray(8, np.float64, cuda.cuda.MemoryPointer(cuda.cuda.UnownedMemory(address, 64, None, 0), 0))
    runtime.free(address)
    x.fill(1)
    with pytest.raises(runtime.CUDARuntimeError, match="IllegalAddress"):
        cuda.cuda.Stream.null.synchronize()


def test_free_waits_for_the_device(cuda):
    runtime = cuda.cuda.runtime
    address = runtime.malloc(64)
    stream = cuda.cuda.Stream(non_blocking=True)
    waiting = fakecuda.delay(stream)
    runtime.free(address)
    assert waiting.ran
    with pytest.raises(runtime.CUDARuntimeError) as refused:
        runtime.free(address)
    assert refused.value.status == 1


def test_memory_without_a_pool_lives_until_its_device_is_idle(cuda):
    with cuda.cuda.Stream(non_blocking=True) as stream:
        memory = cuda.cuda.Memory(32)
        address = memory.ptr
        x = cuda.ndarray(4, float, cuda.cuda.MemoryPointer(cuda.cuda.UnownedMemory(address, 32, None, 0), 0))
        x.fill(1)
        del memory
        assert x.get().tolist() == [1.0] * 4
        stream.synchronize()
    del x
    cuda.cuda.Memory(32)
    assert fakecuda.find(address) is None


def test_addresses_of_freed_memory_are_given_out_again(cuda):
    runtime = cuda.cuda.runtime
    first = runtime.malloc(1 << 20)
    number = fakecuda.find(first).number
    runtime.free(first)
    second = runtime.malloc(1 << 20)
    assert second == first
    assert fakecuda.find(second).number != number
    runtime.free(second)


def test_the_pool_hands_memory_out_while_another_stream_still_writes_it(cuda):
    side = cuda.cuda.Stream(non_blocking=True)
    with cuda.cuda.Stream(non_blocking=True) as stream:
        old = cuda.empty(4)
        with side:
            old.fill(1)
        del old
        new = cuda.full(4, 2.0)
        stream.synchronize()
        side.synchronize()
        assert new.get().tolist() == [1.0] * 4


def test_in_one_stream_the_pool_is_right(cuda):
    old = cuda.full(4, 1.0)
    kept = old + 0
    del old
    new = cuda.full(4, 2.0)
    assert kept.get().tolist() == [1.0] * 4
    assert new.get().tolist() == [2.0] * 4


def test_each_stream_has_memory_of_its_own(cuda):
    with cuda.cuda.Stream(non_blocking=True):
        address = cuda.empty(1 << 12).data.ptr
        with cuda.cuda.Stream(non_blocking=True):
            assert cuda.empty(1 << 12).data.ptr != address


def test_pieces_of_an_allocation_lie_side_by_side(cuda):
    pool = cuda.cuda.MemoryPool()
    whole = pool.malloc(4096)
    base = whole.ptr
    del whole
    parts = [pool.malloc(1000), pool.malloc(1000)]
    assert [one.ptr - base for one in parts] == [0, 1024]
    assert (pool.used_bytes(), pool.free_bytes()) == (2048, 2048)
    del parts
    assert pool.malloc(4096).ptr == base
    pool.free_all_blocks()
    assert pool.total_bytes() == 0


def test_memory_of_a_cycle_of_garbage_goes_back_to_its_pool(cuda):
    pools = cuda.cuda.MemoryPool(), cuda.cuda.PinnedMemoryPool()
    addresses = []
    for pool in pools:
        cycle: list[Any] = [pool.malloc(1000)]
        addresses.append(cycle[0].ptr)
        cycle.append(cycle)
        del cycle
    gc.collect()
    assert fakecuda.find(addresses[0])
    assert fakecuda.memory.pinned(addresses[1])
    assert [pool.malloc(1000).ptr for pool in pools] == addresses
    for pool in pools:
        pool.free_all_blocks()
    assert not fakecuda.find(addresses[0])
    assert not fakecuda.memory.pinned(addresses[1])


def test_page_locked_memory_is_locked_once(cuda):
    runtime = cuda.cuda.runtime
    memory = np.zeros(3 * 4096, np.uint8)
    begin = -(-memory.ctypes.data // 4096) * 4096
    runtime.hostRegister(begin, 4096, 0)
    assert runtime.pointerGetAttributes(begin + 5).type == runtime.memoryTypeHost
    for address, nbytes in ((begin, 4096), (begin + 100, 8), (begin - 8, 16)):
        with pytest.raises(runtime.CUDARuntimeError) as refused:
            runtime.hostRegister(address, nbytes, 0)
        assert refused.value.status == runtime.cudaErrorHostMemoryAlreadyRegistered
    x = cuda.empty(4096, np.uint8)
    runtime.memcpyAsync(x.data.ptr, begin + 4096, 4096, runtime.memcpyHostToDevice, 0)
    with pytest.raises(runtime.CUDARuntimeError, match="partly registered"):
        runtime.memcpyAsync(x.data.ptr, begin + 4088, 16, runtime.memcpyHostToDevice, 0)
    runtime.hostUnregister(begin)
    assert runtime.pointerGetAttributes(begin).type == runtime.memoryTypeUnregistered
    with pytest.raises(runtime.CUDARuntimeError) as refused:
        runtime.hostUnregister(begin)
    assert refused.value.status == runtime.cudaErrorHostMemoryNotRegistered


# Streams


def test_nothing_runs_before_a_wait(cuda):
    target = pinned(cuda, np.full(3, 7.0))
    x = cuda.arange(3, dtype=np.float64) * 2
    x.get(out=target, blocking=False)
    assert target.tolist() == [7.0] * 3
    cuda.cuda.Stream.null.synchronize()
    assert target.tolist() == [0.0, 2.0, 4.0]


def test_work_of_a_stream_that_no_rank_waited_for_is_not_seen(cuda):
    producer, consumer = cuda.cuda.Stream(non_blocking=True), cuda.cuda.Stream(non_blocking=True)
    x = cuda.empty(3)
    cuda.cuda.Stream.null.synchronize()
    with producer:
        x.fill(5)
        written = producer.record()
    with consumer:
        assert poisoned(x.get())
        consumer.wait_event(written)
        assert x.get().tolist() == [5.0] * 3


def test_an_event_is_what_lies_before_its_record(cuda):
    stream = cuda.cuda.Stream(non_blocking=True)
    before = fakecuda.delay(stream)
    event = stream.record()
    behind = fakecuda.delay(stream)
    event.synchronize()
    assert (before.ran, behind.ran) == (True, False)
    event.record(stream)
    event.synchronize()
    assert behind.ran


def test_waiting_for_an_event_means_its_record_of_then(cuda):
    one, other = cuda.cuda.Stream(non_blocking=True), cuda.cuda.Stream(non_blocking=True)
    event = cuda.cuda.Event()
    other.wait_event(event)  # never recorded: waits for nothing
    early = fakecuda.delay(one)
    event.record(one)
    other.wait_event(event)
    late = fakecuda.delay(one)
    event.record(one)
    other.synchronize()
    assert (early.ran, late.ran) == (True, False)


def test_streams_wait_for_each_other_by_turns(cuda):
    streams = [cuda.cuda.Stream(non_blocking=True) for _ in range(3)]
    x = cuda.zeros(1, np.int64)
    cuda.cuda.Stream.null.synchronize()
    for step in range(300):
        stream = streams[step % 3]
        with stream:
            x += 1
            streams[(step + 1) % 3].wait_event(stream.record())
    with streams[0]:
        assert x.get().tolist() == [300]


def test_asking_lets_one_piece_of_work_run(cuda):
    stream = cuda.cuda.Stream(non_blocking=True)
    work = [fakecuda.delay(stream) for _ in range(3)]
    event = stream.record()
    assert not event.done
    assert [one.ran for one in work] == [True, False, False]
    assert not stream.done
    assert event.done
    assert stream.done


def test_asking_comes_to_an_end_across_streams(cuda):
    one, other = cuda.cuda.Stream(non_blocking=True), cuda.cuda.Stream(non_blocking=True)
    fakecuda.delay(one)
    other.wait_event(one.record())
    asked = 0
    while not other.done:
        asked += 1
        assert asked < 5
    assert one.done


def test_the_legacy_stream_waits_for_blocking_streams_only(cuda):
    blocking, other = cuda.cuda.Stream(), cuda.cuda.Stream(non_blocking=True)
    work = [fakecuda.delay(one) for one in (blocking, other)]
    fakecuda.delay(cuda.cuda.Stream.null)
    cuda.cuda.Stream.null.synchronize()
    assert [one.ran for one in work] == [True, False]


def test_blocking_streams_wait_for_the_legacy_stream(cuda):
    blocking, other = cuda.cuda.Stream(), cuda.cuda.Stream(non_blocking=True)
    first = fakecuda.delay(cuda.cuda.Stream.null)
    for one in (other, blocking):
        fakecuda.delay(one)
    other.synchronize()
    assert not first.ran
    blocking.synchronize()
    assert first.ran


def test_an_event_of_the_legacy_stream_is_behind_blocking_streams(cuda):
    work = fakecuda.delay(cuda.cuda.Stream())
    cuda.cuda.Stream.null.record().synchronize()
    assert work.ran


def test_each_thread_has_a_default_stream(cuda):
    mine = fakecuda.delay(cuda.cuda.Stream.ptds)

    def elsewhere() -> tuple[bool, bool]:
        theirs = fakecuda.delay(cuda.cuda.Stream.ptds)
        cuda.cuda.Stream.ptds.synchronize()
        return theirs.ran, mine.ran

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(elsewhere).result() == (True, False)
    cuda.cuda.Stream.ptds.synchronize()
    assert mine.ran


def test_the_current_stream_is_of_a_thread(cuda):
    stream = cuda.cuda.Stream(non_blocking=True)
    with stream, ThreadPoolExecutor(1) as pool:
        assert cuda.cuda.get_current_stream() == stream
        assert pool.submit(cuda.cuda.get_current_stream).result() == cuda.cuda.Stream.null
    assert cuda.cuda.get_current_stream() == cuda.cuda.Stream.null


def test_the_end_of_a_block_undoes_use(cuda):
    chosen, other = cuda.cuda.Stream(), cuda.cuda.Stream()
    chosen.use()
    with other:
        pass
    assert cuda.cuda.get_current_stream() == cuda.cuda.Stream.null
    with other:
        chosen.use()
        with other:
            pass
        assert cuda.cuda.get_current_stream() == other
    assert cuda.cuda.get_current_stream() == cuda.cuda.Stream.null


def test_a_query_does_not_raise_the_failure(cuda):
    runtime, stream = cuda.cuda.runtime, cuda.cuda.Stream(non_blocking=True)
    address = runtime.malloc(8)
    runtime.memsetAsync(address, 0, 9, stream.ptr)
    event = stream.record()
    assert not event.done
    assert not event.done
    assert runtime.eventQuery(event.ptr) == runtime.streamQuery(stream.ptr) == 700
    with pytest.raises(runtime.CUDARuntimeError, match="IllegalAddress"):
        event.synchronize()


def test_a_kernel_that_fails_costs_the_device(cuda, devices, opener):
    devices(2)
    runtime, x = cuda.cuda.runtime, cuda.ones(3)
    address, host = runtime.malloc(8), runtime.hostAlloc(8, 0)
    broken, other = (cuda.cuda.Stream(non_blocking=True) for _ in range(2))
    waiting, event = fakecuda.delay(other), cuda.cuda.Event()
    runtime.memsetAsync(address, 0, 9, broken.ptr)
    with pytest.raises(runtime.CUDARuntimeError, match="IllegalAddress"):
        broken.synchronize()
    for call in (
        other.synchronize,
        cuda.cuda.Device(0).synchronize,
        lambda: runtime.malloc(8),
        lambda: runtime.free(address),
        lambda: runtime.memcpyAsync(host, address, 8, runtime.memcpyDefault, other.ptr),
        lambda: event.record(other),
        lambda: runtime.eventSynchronize(event.ptr),
        lambda: runtime.streamIsCapturing(other.ptr),
        lambda: runtime.pointerGetAttributes(address),
        lambda: runtime.ipcGetMemHandle(address),
        x.get,
    ):
        for _ in range(2):
            with pytest.raises(runtime.CUDARuntimeError) as raised:
                call()
            assert raised.value.status == 700
    assert runtime.eventQuery(event.ptr) == runtime.streamQuery(other.ptr) == 700
    assert not waiting.ran
    with cuda.cuda.Device(1):
        assert cuda.ones(3).get().tolist() == [1.0] * 3
    assert opener("cupy.ones(3).get()") == "[1. 1. 1.]"


def test_work_runs_once_however_many_threads_wait(cuda):
    stream = cuda.cuda.Stream(non_blocking=True)
    for _ in range(20):
        ran: list[int] = []
        for number in range(50):
            fakecuda.streams.stream_at(stream.ptr).give(partial(ran.append, number))
        with ThreadPoolExecutor(4) as pool:
            for one in [pool.submit(stream.synchronize) for _ in range(4)]:
                one.result()
        assert ran == list(range(50))


def test_work_can_not_wait(cuda):
    stream = cuda.cuda.Stream(non_blocking=True)
    stream.launch_host_func(lambda _: cuda.cuda.Device().synchronize(), None)
    with pytest.raises(cuda.cuda.runtime.CUDARuntimeError, match="NotPermitted"):
        stream.synchronize()


def test_a_stream_that_is_gone_still_does_its_work(cuda):
    stream = cuda.cuda.Stream(non_blocking=True)
    work, event, pointer = fakecuda.delay(stream), stream.record(), stream.ptr
    del stream
    with pytest.raises(cuda.cuda.runtime.CUDARuntimeError, match="InvalidResourceHandle"):
        cuda.cuda.runtime.streamSynchronize(pointer)
    event.synchronize()
    assert work.ran


def test_a_forked_process_has_no_cuda(cuda):
    cuda.ones(3).get()
    child = os.fork()
    if child == 0:
        try:
            cuda.ones(3)
        except cuda.cuda.runtime.CUDARuntimeError as error:
            os._exit(error.status)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


# Copies


def test_page_locked_memory_is_read_when_the_copy_runs(cuda):
    source, x = pinned(cuda, np.ones(4)), cuda.empty(4)
    x.set(source)
    source[...] = 2
    assert x.get().tolist() == [2.0] * 4


def test_pageable_memory_is_read_at_once(cuda):
    source, x = np.ones(4), cuda.empty(4)
    x.set(source)
    source[...] = 2
    assert x.get().tolist() == [1.0] * 4


def test_where_devices_reach_all_memory_pageable_memory_is_read_late(cuda, monkeypatch):
    monkeypatch.setenv("FAKECUDA_ATS", "1")
    source, x = np.ones(4), cuda.empty(4)
    x.set(source)
    source[...] = 2
    assert x.get().tolist() == [2.0] * 4


def test_cupy_copies_before_it_returns(cuda):
    source = pinned(cuda, np.ones(4))
    x = cuda.asarray(source)
    source[...] = 2
    assert x.get().tolist() == [1.0] * 4


def test_a_copy_to_pageable_memory_is_done_at_once(cuda):
    x, target = cuda.full(4, 3.0), np.zeros(4)
    x.get(out=target, blocking=False)
    assert target.tolist() == [3.0] * 4


def test_a_copy_without_a_stream_waits_for_blocking_streams_only(cuda):
    runtime = cuda.cuda.runtime
    for non_blocking, seen in ((False, 3.0), (True, np.nan)):
        x, y, target = cuda.empty(4), cuda.empty(4), np.zeros(4)
        cuda.cuda.Stream.null.synchronize()
        with cuda.cuda.Stream(non_blocking=non_blocking):
            x.fill(3)
        runtime.memcpy(y.data.ptr, x.data.ptr, 32, runtime.memcpyDeviceToDevice)
        assert fakecuda.pending(0)  # the host does not wait for that
        runtime.memcpy(target.ctypes.data, y.data.ptr, 32, runtime.memcpyDeviceToHost)
        assert np.array_equal(target, [seen] * 4, equal_nan=True)


def test_rows_are_copied(cuda):
    runtime = cuda.cuda.runtime
    x = cuda.zeros((4, 6), np.uint8)
    rows = np.arange(8, dtype=np.uint8).reshape(4, 2)
    runtime.memcpy2DAsync(x.data.ptr + 1, 6, rows.ctypes.data, 2, 2, 4, runtime.memcpyHostToDevice, 0)
    assert (x.get()[:, 1:3] == rows).all()
    assert x.get().sum() == rows.sum()
    with pytest.raises(runtime.CUDARuntimeError, match="InvalidPitch"):
        runtime.memcpy2DAsync(x.data.ptr, 2**31, rows.ctypes.data, 2, 2, 1, runtime.memcpyHostToDevice, 0)
    with pytest.raises(runtime.CUDARuntimeError, match="InvalidMemcpyDirection"):
        runtime.memcpyAsync(x.data.ptr, rows.ctypes.data, 2, runtime.memcpyDeviceToHost, 0)


def test_copies_within_themselves_are_left_to_chance(cuda):
    runtime = cuda.cuda.runtime
    x = cuda.zeros(8)
    runtime.memcpyAsync(x.data.ptr, x.data.ptr + 32, 32, runtime.memcpyDeviceToDevice, 0)
    with pytest.raises(RuntimeError, match="chance"):
        runtime.memcpyAsync(x.data.ptr, x.data.ptr + 24, 32, runtime.memcpyDeviceToDevice, 0)


def test_a_copy_beyond_the_end_is_an_error(cuda):
    runtime = cuda.cuda.runtime
    address = runtime.malloc(16)
    runtime.memsetAsync(address, 0, 17, 0)
    with pytest.raises(runtime.CUDARuntimeError, match="IllegalAddress"):
        runtime.streamSynchronize(0)


def test_a_host_that_overwrites_too_early_is_met_by_chance(cuda, monkeypatch):
    """A target that is written before work that still reads it; lazily, that would never be seen."""
    found = set()
    for seed in range(20):
        monkeypatch.setenv("FAKECUDA_EAGER_RANDOM", str(seed))
        reader, writer = cuda.cuda.Stream(non_blocking=True), cuda.cuda.Stream(non_blocking=True)
        x = cuda.ones(1)
        cuda.cuda.Stream.null.synchronize()
        with writer:
            x.fill(2)
        with reader:
            found.add(x.item())
    assert found == {1.0, 2.0}


# Capture


def test_a_capturing_stream_keeps_its_work(cuda):
    stream = cuda.cuda.Stream(non_blocking=True)
    x = cuda.zeros(1)
    cuda.cuda.Stream.null.synchronize()
    with stream:
        stream.begin_capture()
        assert cuda.cuda.runtime.streamIsCapturing(stream.ptr)
        x += 1
        for forbidden in (stream.synchronize, cuda.cuda.Device().synchronize, lambda: stream.done):
            with pytest.raises(cuda.cuda.runtime.CUDARuntimeError, match="StreamCaptureUnsupported"):
                forbidden()
        with pytest.raises(RuntimeError, match="capturing"):
            x.get()
        graph = stream.end_capture()
    assert not cuda.cuda.runtime.streamIsCapturing(stream.ptr)
    assert x.item() == 0
    graph.launch(stream)
    graph.launch(stream)
    stream.synchronize()
    assert x.item() == 2


def test_what_waits_for_a_capturing_stream_captures(cuda):
    one, other = cuda.cuda.Stream(non_blocking=True), cuda.cuda.Stream(non_blocking=True)
    outside = other.record()
    one.begin_capture()
    with pytest.raises(cuda.cuda.runtime.CUDARuntimeError, match="StreamCaptureIsolation"):
        one.wait_event(outside)
    event = one.record()
    with pytest.raises(cuda.cuda.runtime.CUDARuntimeError, match="CapturedEvent"):
        event.synchronize()
    other.wait_event(event)
    work = fakecuda.delay(other)
    assert other.is_capturing()
    with pytest.raises(cuda.cuda.runtime.CUDARuntimeError, match="Unmatched"):
        other.end_capture()
    one.wait_event(other.record())
    graph = one.end_capture()
    assert not other.is_capturing()
    graph.launch(one)
    one.synchronize()
    assert work.ran


@needs_compiler
def test_a_global_capture_is_invalidated_by_any_thread(cuda):
    runtime, stream = cuda.cuda.runtime, cuda.cuda.Stream(non_blocking=True)
    event = cuda.cuda.Event()

    def refused(spared: bool) -> bool:
        mode = ctypes.c_int(runtime.streamCaptureModeRelaxed)
        if spared:
            assert ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)) == 0
            assert mode.value == runtime.streamCaptureModeGlobal
        try:
            event.synchronize()
        except runtime.CUDARuntimeError as error:
            return error.status == runtime.cudaErrorStreamCaptureUnsupported
        return False

    for mode, spared, spoilt in ((0, False, True), (0, True, False), (1, False, False), (2, False, False)):
        stream.begin_capture(mode)
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(refused, spared).result() == spoilt
        if spoilt:
            with pytest.raises(runtime.CUDARuntimeError, match="Invalidated"):
                stream.end_capture()
        else:
            stream.end_capture()


def test_the_legacy_stream_can_not_wait_for_a_capture(cuda):
    stream = cuda.cuda.Stream()
    stream.begin_capture()
    with pytest.raises(cuda.cuda.runtime.CUDARuntimeError, match="StreamCaptureImplicit"):
        cuda.ones(3)
    stream.end_capture()
    with pytest.raises(RuntimeError, match="legacy"):
        cuda.cuda.Stream.null.begin_capture()


# Devices


def test_a_stream_belongs_to_a_device(cuda, devices):
    devices(2)
    with cuda.cuda.Device(1):
        stream = cuda.cuda.Stream()
    with pytest.raises(RuntimeError, match="does not match"), stream:
        pass
    with pytest.raises(cuda.cuda.runtime.CUDARuntimeError, match="InvalidResourceHandle"):
        cuda.cuda.Event().record(stream)
    with pytest.raises(cuda.cuda.runtime.CUDARuntimeError, match="InvalidResourceHandle"):
        fakecuda.enqueue(stream.ptr, print)
    with pytest.raises(cuda.cuda.runtime.CUDARuntimeError, match="InvalidDevice"):
        cuda.cuda.Device(2).use()


def test_a_kernel_reaches_other_devices_only_if_they_are_peers(cuda, devices, monkeypatch):
    devices(2)
    with cuda.cuda.Device(1):
        x = cuda.ones(3)
        assert x.device.id == 1
        cuda.cuda.Stream.null.synchronize()
    with pytest.warns(RuntimeWarning, match="Peer access has been activated"):
        assert (x + 1).get().tolist() == [2.0] * 3
    monkeypatch.setenv("FAKECUDA_PEERS", "0")
    assert not cuda.cuda.runtime.deviceCanAccessPeer(0, 1)
    with pytest.raises(ValueError, match="unavailable"):
        x + 1
    assert x.get().tolist() == [1.0] * 3
    y = cuda.empty(3)
    cuda.copyto(y, x)
    assert y.get().tolist() == [1.0] * 3


@needs_compiler
def test_addresses_are_no_use_without_access_to_the_device(cuda, devices, monkeypatch):
    devices(2)
    runtime = cuda.cuda.runtime
    monkeypatch.setattr(fakecuda.memory, "peers", set())
    with cuda.cuda.Device(1):
        x = cuda.zeros(4)
        cuda.cuda.Stream.null.synchronize()
    set_ones = cuda.RawKernel(SET_ONES, "set_ones")
    set_ones((2,), (2,), (x.data.ptr,))
    with pytest.raises(runtime.CUDARuntimeError, match="no access to device 1"):
        runtime.streamSynchronize(0)
    fakecuda.streams.recover()
    runtime.deviceEnablePeerAccess(1)
    with pytest.raises(runtime.CUDARuntimeError, match="AlreadyEnabled"):
        runtime.deviceEnablePeerAccess(1)
    set_ones((2,), (2,), (x.data.ptr,))
    assert cuda.asnumpy(x).tolist() == [0.0] * 4  # on the other device's stream: nobody has waited
    runtime.streamSynchronize(0)
    assert cuda.asnumpy(x).tolist() == [1.0] * 4


def test_who_leaves_a_device_makes_a_context_on_the_one_before(cuda, devices, monkeypatch):
    devices(3)
    monkeypatch.setattr(fakecuda.streams, "contexts", set())
    fakecuda.set_device(1)
    with cuda.cuda.Device(1):
        cuda.empty(3).fill(0)
    assert fakecuda.streams.contexts == {1}

    def elsewhere() -> None:
        cuda.cuda.runtime.getDeviceProperties(0)
        with cuda.cuda.Device(2):
            assert fakecuda.streams.contexts == {1, 2}

    with ThreadPoolExecutor(1) as pool:
        pool.submit(elsewhere).result()
    assert fakecuda.streams.contexts == {0, 1, 2}


def test_each_thread_begins_on_device_0(cuda, devices):
    devices(2)
    fakecuda.set_device(1)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(cuda.cuda.runtime.getDevice).result() == 0
    assert cuda.cuda.runtime.getDevice() == 1


def test_a_device_is_known_by_its_uuid(cuda, devices, monkeypatch):
    devices(3)
    runtime = cuda.cuda.runtime
    uuids = [runtime.getDeviceProperties(index)["uuid"] for index in range(3)]
    assert len(set(uuids)) == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    assert runtime.getDeviceCount() == 2
    assert [runtime.getDeviceProperties(index)["uuid"] for index in range(2)] == [uuids[2], uuids[0]]
    assert cuda.cuda.Device(0).pci_bus_id == "0000:03:00.0"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(runtime.CUDARuntimeError, match="NoDevice"):
        runtime.getDeviceCount()
    assert not cuda.cuda.is_available()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")


def test_pointers_are_distinguished(cuda):
    runtime = cuda.cuda.runtime
    x, host = cuda.empty(4), np.empty(4)
    assert runtime.pointerGetAttributes(x.data.ptr + 8).type == runtime.memoryTypeDevice
    assert runtime.pointerGetAttributes(pinned(cuda, host).ctypes.data).type == runtime.memoryTypeHost
    found = runtime.pointerGetAttributes(host.ctypes.data)
    assert (found.type, found.device) == (runtime.memoryTypeUnregistered, -2)


# Memory of other processes

_OPENER = """
import cupy, os, sys
runtime = cupy.cuda.runtime
def status(function, *arguments):
    try:
        return function(*arguments)
    except runtime.CUDARuntimeError as error:
        return -error.status
def array(address):
    return cupy.ndarray(4, float, cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(address, 32, None, 0), 0))
for line in sys.stdin:
    print(eval(line), flush=True)
"""


@pytest.fixture
def opener() -> Iterator[Callable[[str], str]]:
    """``opener(expression)``: what it is in another process."""
    process = subprocess.Popen(
        [sys.executable, "-c", _OPENER],
        env=os.environ | fake_cuda.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin
    assert process.stdout

    def ask(expression: str) -> str:
        process.stdin.write(f"{expression}\n")
        process.stdin.flush()
        return process.stdout.readline().strip()

    yield ask
    process.stdin.close()
    process.stdout.close()
    assert process.wait(30) == 0


def test_memory_of_another_process_is_the_same_memory(cuda, opener):
    runtime = cuda.cuda.runtime
    address = runtime.malloc(32)
    x = cuda.ndarray(4, float, cuda.cuda.MemoryPointer(cuda.cuda.UnownedMemory(address, 32, None, 0), 0))
    x.fill(3)
    handle = runtime.ipcGetMemHandle(address)
    assert len(handle) == 64
    there = int(opener(f"runtime.ipcOpenMemHandle({handle!r})"))
    assert opener(f"array({there}).get()") == "[nan nan nan nan]"  # nobody has waited
    runtime.streamSynchronize(0)
    assert opener(f"array({there}).get()") == "[3. 3. 3. 3.]"
    opener(f"array({there}).fill(4), runtime.streamSynchronize(0)")
    assert x.get().tolist() == [4.0] * 4
    assert int(opener(f"runtime.ipcOpenMemHandle({handle!r})")) == there
    runtime.free(address)
    assert opener(f"array({there}).get()") == "[nan nan nan nan]"
    for status in ("None", "None", "-1"):
        assert opener(f"status(runtime.ipcCloseMemHandle, {there})") == status


LARGE = 3 << 20
"""Bytes of an allocation that shares no block."""


def test_memory_that_is_opened_gives_way_to_what_comes_after_it(cuda, opener):
    """What lies at its address next can't be opened before it is closed, as often as it was opened."""
    runtime = cuda.cuda.runtime
    address = runtime.malloc(LARGE)
    handle = runtime.ipcGetMemHandle(address)
    there = int(opener(f"runtime.ipcOpenMemHandle({handle!r})"))
    assert int(opener(f"runtime.ipcOpenMemHandle({handle!r})")) == there
    runtime.free(address)
    assert runtime.malloc(LARGE) == address
    fresh = runtime.ipcGetMemHandle(address)
    assert fresh != handle
    for status in ("-208", "-208"):
        assert opener(f"status(runtime.ipcOpenMemHandle, {fresh!r})") == status
        assert opener(f"status(runtime.ipcCloseMemHandle, {there})") == "None"
    assert int(opener(f"status(runtime.ipcOpenMemHandle, {fresh!r})")) > 0
    assert opener(f"status(runtime.ipcOpenMemHandle, {handle!r})") == "-1"
    runtime.free(address)


def test_small_allocations_share_a_block(cuda, opener):
    """It is opened once for all of them, and stays while any of them is left."""
    runtime = cuda.cuda.runtime
    first, second = addresses = [runtime.malloc(32) for _ in range(2)]
    assert second - first < LARGE
    for address, value in zip(addresses, (3, 4), strict=True):
        runtime.memset(address, value, 32)
    runtime.streamSynchronize(0)
    handles = [runtime.ipcGetMemHandle(address) for address in addresses]
    there = [int(opener(f"runtime.ipcOpenMemHandle({handle!r})")) for handle in handles]
    assert there[1] - there[0] == second - first
    bits = "array({0}).get().view('u1')[0]"
    assert [opener(bits.format(one)) for one in there] == ["3", "4"]
    runtime.free(first)
    assert opener(bits.format(there[1])) == "4"
    # What comes next at an address in the block is what was opened.
    again = runtime.malloc(32)
    assert again == first
    runtime.memset(again, 5, 32)
    runtime.streamSynchronize(0)
    assert opener(bits.format(there[0])) == "5"
    assert opener(f"status(runtime.ipcCloseMemHandle, {there[0]})") == "None"
    assert opener(bits.format(there[1])) == "4"
    opener("os.environ.update(FAKECUDA_OPEN_ONCE='1')")
    assert opener(f"status(runtime.ipcOpenMemHandle, {handles[0]!r})") == "-208"
    assert opener(f"status(runtime.ipcCloseMemHandle, {there[1]})") == "None"
    assert int(opener(f"status(runtime.ipcOpenMemHandle, {handles[0]!r})")) > 0
    for address in (again, second):
        runtime.free(address)


def test_memory_is_closed_when_the_device_has_done_its_work(cuda, opener):
    runtime = cuda.cuda.runtime
    address = runtime.malloc(32)
    handle = runtime.ipcGetMemHandle(address)
    there = opener(f"runtime.ipcOpenMemHandle({handle!r})")
    opener(f"array({there}).fill(4)")
    assert opener(f"status(runtime.ipcCloseMemHandle, {there})") == "None"
    host = np.empty(4)
    runtime.memcpy(host.ctypes.data, address, 32, runtime.memcpyDeviceToHost)
    assert host.tolist() == [4.0] * 4
    runtime.free(address)


def test_what_can_not_be_shared(cuda, opener):
    runtime = cuda.cuda.runtime
    address = runtime.malloc(LARGE)
    ordered = runtime.mallocAsync(64, 0)
    for wrong in (ordered, address + 8, np.empty(3).ctypes.data):
        with pytest.raises(runtime.CUDARuntimeError) as refused:
            runtime.ipcGetMemHandle(wrong)
        assert refused.value.status == 1
    handle = runtime.ipcGetMemHandle(address)
    with pytest.raises(runtime.CUDARuntimeError) as refused:
        runtime.ipcOpenMemHandle(handle)
    assert refused.value.status == 201
    runtime.free(address)
    assert opener(f"status(runtime.ipcOpenMemHandle, {handle!r})") == "-1"
    runtime.freeAsync(ordered, 0)
    runtime.streamSynchronize(0)


_OPEN = """
import cupy
try:
    cupy.cuda.runtime.ipcOpenMemHandle({handle!r})
except cupy.cuda.runtime.CUDARuntimeError as error:
    print(error.status)
"""


def test_memory_of_a_device_that_can_not_be_reached(cuda, devices):
    devices(2)
    with cuda.cuda.Device(1):
        address = cuda.cuda.runtime.malloc(64)
    handle = cuda.cuda.runtime.ipcGetMemHandle(address)
    code = _OPEN.format(handle=handle)
    assert python(code, FAKECUDA_DEVICES="2", FAKECUDA_PEERS="0").stdout == "217\n"
    assert python(code, FAKECUDA_DEVICES="2").stdout == ""
    # Nor has the device to be visible.
    assert python(code, FAKECUDA_DEVICES="2", CUDA_VISIBLE_DEVICES="0").stdout == ""
    cuda.cuda.runtime.free(address)


@needs_compiler
def test_libcuda_knows_allocations(cuda):
    libcuda = ctypes.CDLL("libcuda.so.1")
    x = cuda.cuda.MemoryPool().malloc(1000) + 24
    base, size, number = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_uint64()
    address = ctypes.c_uint64(x.ptr)
    assert libcuda.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), address) == 0
    assert (base.value, size.value) == (x.ptr - 24, 1024)
    assert libcuda.cuPointerGetAttribute(ctypes.byref(number), 7, address) == 0
    assert number.value == fakecuda.find(x.ptr).number
    assert libcuda.cuMemGetAddressRange_v2(ctypes.byref(base), None, ctypes.c_uint64(4096)) == 1
    kinds, start = (ctypes.c_int * 3)(7, 11, 12), ctypes.c_uint64()
    places = (ctypes.c_void_p * 3)(*map(ctypes.addressof, (number, start, size)))
    assert libcuda.cuPointerGetAttributes(3, kinds, places, address) == 0
    assert (number.value, start.value, size.value) == (fakecuda.find(x.ptr).number, x.ptr - 24, 1024)
    with ThreadPoolExecutor(1) as pool:
        # A thread that has not used the runtime has no context.
        assert pool.submit(libcuda.cuMemGetAddressRange_v2, ctypes.byref(base), None, address).result() == 201
        assert pool.submit(libcuda.cuPointerGetAttribute, ctypes.byref(number), 7, address).result() == 0


@needs_compiler
def test_libcuda_knows_contexts_and_events(cuda, devices, monkeypatch):
    devices(2)
    libcuda = ctypes.CDLL("libcuda.so.1")
    monkeypatch.setattr(fakecuda.streams, "contexts", {1})
    flags, active = ctypes.c_uint(), ctypes.c_int()
    states = []
    for device in range(2):
        assert libcuda.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)) == 0
        states.append(active.value)
    assert states == [0, 1]
    stream = cuda.cuda.Stream(non_blocking=True)
    fakecuda.delay(stream), fakecuda.delay(stream)
    event = stream.record()
    assert [libcuda.cuEventQuery(ctypes.c_void_p(event.ptr)) for _ in range(2)] == [600, 0]


# Words for which streams wait


class Words:
    """Words in page-locked memory of the host, and libcuda's functions on them."""

    def __init__(self, cuda: ModuleType, count: int = 2) -> None:
        self.values = pinned(cuda, np.zeros(count, np.uint32))
        self._libcuda = ctypes.CDLL("libcuda.so.1")

    def _call(self, name: str, stream: Any, place: int, value: int) -> int:
        address = self.values.ctypes.data + 4 * place
        arguments = ctypes.c_uint64(stream.ptr), ctypes.c_uint64(address), ctypes.c_uint(value), ctypes.c_uint(0)
        return int(getattr(self._libcuda, name)(*arguments))

    def write(self, stream: Any, place: int, value: int) -> int:
        return self._call("cuStreamWriteValue32_v2", stream, place, value)

    def wait(self, stream: Any, place: int, value: int) -> int:
        return self._call("cuStreamWaitValue32_v2", stream, place, value)


@pytest.fixture
def streams(cuda: ModuleType) -> list[Any]:
    return [cuda.cuda.Stream(non_blocking=True) for _ in range(2)]


@needs_compiler
def test_a_stream_that_waits_for_a_word_blocks_itself_alone(cuda, streams):
    words, (one, other) = Words(cuda), streams
    assert words.wait(one, 0, 5) == 0
    behind, beside = fakecuda.delay(one), fakecuda.delay(other)
    for _ in range(3):
        assert not one.done
    other.synchronize()
    assert beside.ran
    assert not behind.ran
    words.values[0] = 6
    one.synchronize()
    assert behind.ran


@needs_compiler
def test_words_are_compared_in_cyclic_order(cuda, streams):
    words, (one, _) = Words(cuda), streams
    for word, value, passes in ((4, 5, False), (5, 5, True), (2, 2**32 - 3, True), (2**32 - 3, 2, False)):
        words.values[0] = word
        assert words.wait(one, 0, value) == 0
        assert one.done == passes
        words.values[0] = value
        one.synchronize()


@needs_compiler
def test_a_word_that_no_stream_writes_is_waited_for_not_for_ever(cuda, streams, monkeypatch):
    monkeypatch.setenv("FAKECUDA_WAIT_TIMEOUT", "0.05")
    words, (one, _) = Words(cuda), streams
    words.wait(one, 0, 1)
    with pytest.raises(cuda.cuda.runtime.CUDARuntimeError, match="LaunchTimeout"):
        one.synchronize()
    words.values[0] = 1
    one.synchronize()


@needs_compiler
def test_the_device_writes_words_for_which_a_host_waits(cuda, streams):
    """Whatever the host does that has submitted them, and no later work."""
    words, (one, other) = Words(cuda), streams
    first, then = fakecuda.delay(other), words.write(other, 0, 7)
    behind = fakecuda.delay(other)
    assert then == words.wait(one, 0, 7) == 0
    one.synchronize()
    assert words.values[0] == 7
    assert first.ran
    assert not behind.ran


@needs_compiler
def test_words_that_are_refused(cuda, streams, monkeypatch):
    words, (one, _) = Words(cuda), streams
    libcuda, found = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64()
    address = ctypes.c_uint64(words.values.ctypes.data)
    assert libcuda.cuMemHostGetDevicePointer_v2(ctypes.byref(found), address, ctypes.c_uint(0)) == 0
    assert found.value == words.values.ctypes.data
    pageable = np.zeros(2, np.uint32)
    address = ctypes.c_uint64(pageable.ctypes.data)
    assert libcuda.cuMemHostGetDevicePointer_v2(ctypes.byref(found), address, ctypes.c_uint(0)) == 1
    words.values = pageable
    assert words.write(one, 0, 1) == words.wait(one, 0, 1) == 1
    words = Words(cuda)
    monkeypatch.setenv("FAKECUDA_MEMORY_OPERATIONS", "0")
    assert words.write(one, 0, 1) == words.wait(one, 0, 1) == 801


def test_threads_may_wait_for_streams_that_wait_for_each_other(cuda, streams):
    """By turns, as the streams of two ranks do: what a thread waits for does not hold up another thread."""
    events = []
    for turn in range(40):
        one, other = streams[turn % 2], streams[1 - turn % 2]
        for event in events[-2:]:
            other.wait_event(event)
        fakecuda.delay(one)
        events += [one.record(), other.record()]
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(one.synchronize) for one in streams]
        for one in waiting:
            one.result(timeout=30)


# Arrays


def test_arrays_are_as_numpys(cuda):
    host = np.arange(24, dtype=np.float32).reshape(4, 6)
    x = cuda.asarray(host)
    for take in (
        lambda a: a[1:3],
        lambda a: a[::-1, ::2],
        lambda a: a.T,
        lambda a: a[2],
        lambda a: a[1, 2],
        lambda a: a.T.reshape(-1),
        lambda a: a[:, None, 3:].reshape(4, -1),
        lambda a: a.view(np.int32),
        lambda a: a.astype(np.float16) * 2,
        lambda a: 1 - a / 3,
        lambda a: (a > 3) & (a < 9),
        lambda a: a.sum(axis=0),
    ):
        there, here = take(x), take(host)
        assert (there.shape, there.dtype) == (here.shape, here.dtype)
        assert np.array_equal(there.get(), here)
    x[1:3, ::2] = 5
    x[0] = x[3]
    host[1:3, ::2] = 5
    host[0] = host[3]
    assert np.array_equal(cuda.asnumpy(x), host)


def test_results_go_where_they_are_wanted(cuda):
    x = cuda.arange(4, dtype=np.float32)
    out = cuda.empty(4, np.float16)
    assert cuda.add(x, x, out=out, casting="unsafe") is out
    assert out.get().tolist() == [0, 2, 4, 6]
    with pytest.raises(TypeError):
        cuda.add(x, x, out=cuda.empty(4, np.int32))
    with pytest.raises(TypeError):
        cuda.copyto(cuda.empty(4, np.int32), x)
    with pytest.raises(TypeError, match="Implicit conversion"):
        np.asarray(x)
    with pytest.raises(TypeError):
        x + np.ones(4)


def alias(cuda: ModuleType, x: Any, offset: int, shape: tuple[int, ...]) -> Any:
    """An array over the memory of `x`, which cupy does not know to be the same."""
    memory = cuda.cuda.UnownedMemory(x.data.ptr + offset, x.nbytes - offset, x, 0)
    return cuda.ndarray(shape, x.dtype, cuda.cuda.MemoryPointer(memory, 0))


def test_cupy_sees_overlaps_within_a_memory_object_only(cuda):
    x = cuda.arange(6)
    cuda.add(x[:-1], x[1:], out=x[1:])
    assert x.get().tolist() == [0, 1, 3, 5, 7, 9]
    cuda.add(x, alias(cuda, x, 0, (6,)), out=x)
    assert x.get().tolist() == [0, 2, 6, 10, 14, 18]
    with pytest.raises(RuntimeError, match="left to chance"):
        cuda.add(x[:-1], 1, out=alias(cuda, x, 8, (5,)))
    with pytest.raises(RuntimeError, match="left to chance"):
        cuda.copyto(x[:5], alias(cuda, x, 8, (5,)))


_MISALIGNED = f"""
import cupy
cupy.RawKernel({SET_ONES!r}, "set_ones")((1,), (3,), (cupy.empty(4).data.ptr + 4,))
cupy.cuda.Stream.null.synchronize()
"""


@needs_compiler
def test_elements_lie_at_multiples_of_their_size(cuda):
    x = cuda.zeros(4)
    y = alias(cuda, x, 4, (3,))
    y.fill(1)
    with pytest.raises(cuda.cuda.runtime.CUDARuntimeError, match="Misaligned"):
        cuda.cuda.Stream.null.synchronize()
    done = python(_MISALIGNED)
    assert done.returncode == -signal.SIGILL, done.stderr


def test_interfaces_name_the_current_stream(cuda):
    x = cuda.empty((2, 3), np.int16)
    assert x.__cuda_array_interface__["stream"] == 1
    stream = cuda.cuda.Stream(non_blocking=True)
    with stream:
        interface = x.T.__cuda_array_interface__
    assert (interface["stream"], interface["version"]) == (stream.ptr, 3)
    assert (interface["shape"], interface["strides"], interface["typestr"]) == ((3, 2), (2, 6), "<i2")
    assert cuda.empty(0).__cuda_array_interface__["data"] == (0, False)


def test_dlpack_orders_streams(cuda):
    producer, consumer = cuda.cuda.Stream(non_blocking=True), cuda.cuda.Stream(non_blocking=True)

    class Wrapped:
        def __init__(self, array: Any) -> None:
            self.array = array

        def __dlpack_device__(self) -> Any:
            return self.array.__dlpack_device__()

        def __dlpack__(self, **options: Any) -> Any:
            with producer:
                return self.array.__dlpack__(**options)

    with producer:
        x = cuda.full(3, 2.0)
    with consumer:
        y = cuda.from_dlpack(Wrapped(x))
        assert y.data.ptr == x.data.ptr
        assert y.get().tolist() == [2.0] * 3
    with pytest.raises(ValueError, match="valid stream"):
        x.__dlpack__(stream=-2)


# Kernels


_ADD = """
template <typename T> __device__ __forceinline__ T plus(T x, T y) { return x + y; }
extern "C" __global__ void add(unsigned long long from, unsigned long long to, unsigned long long count) {
    const unsigned long long i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < 4 && gridDim.x == 2) ((double*)to)[i] = plus(((const double*)from)[i], (double)count);
}
"""


@needs_compiler
def test_kernels_take_addresses(cuda):
    add = cuda.RawKernel(_ADD, "add")
    x, y = cuda.arange(5.0), cuda.empty(5)
    add((2,), (3,), (x.data.ptr + 8, y.data.ptr, 3))
    assert y.get()[:4].tolist() == [4, 5, 6, 7]
    source = pinned(cuda, np.arange(4.0))
    add((2,), (3,), (source.ctypes.data, y.data.ptr, 1))
    source[...] = 5
    assert y.get()[:4].tolist() == [6, 6, 6, 6]


@needs_compiler
def test_kernels_have_blocks_that_cuda_allows(cuda):
    add = cuda.RawKernel(_ADD, "add")
    for grid, block in (((0,), (1,)), ((1 << 31,), (1,)), ((1,), (1025,))):
        with pytest.raises(cuda.cuda.runtime.CUDARuntimeError, match="InvalidConfiguration"):
            add(grid, block, (0, 0, 0))


@needs_compiler
def test_a_kernel_that_does_not_compile(cuda):
    with pytest.raises(RuntimeError, match="nonsense"):
        cuda.RawKernel('extern "C" __global__ void broken() { nonsense; }', "broken")((1,), (1,), ())


# NCCL


def nccl_ranks(cuda: ModuleType, size: int, body: Callable[..., Any]) -> list[Any]:
    """``body(comm, rank)`` on threads, each on its own device and stream."""
    key = cuda.cuda.nccl.get_unique_id()

    def rank_body(rank: int) -> Any:
        with cuda.cuda.Device(rank), cuda.cuda.Stream(non_blocking=True):
            comm = cuda.cuda.nccl.NcclCommunicator(size, key, rank)
            try:
                return body(comm, rank)
            finally:
                comm.destroy()

    with ThreadPoolExecutor(size) as pool:
        return [one.result() for one in [pool.submit(rank_body, rank) for rank in range(size)]]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_nccl_collectives(cuda, devices, size):
    devices(size)
    nccl = cuda.cuda.nccl
    host = [np.arange(6, dtype=np.float32) * (rank + 1) for rank in range(size)]

    def body(comm: Any, rank: int) -> list[Any]:
        stream = cuda.cuda.get_current_stream().ptr
        x = cuda.asarray(host[rank])
        total, largest, every = cuda.empty_like(x), cuda.empty_like(x), cuda.empty((size, 6), np.float32)
        part, mean, told = cuda.empty(6 // size, np.float32), cuda.empty_like(x), cuda.empty_like(x)
        root = size - 1
        comm.allReduce(x.data.ptr, total.data.ptr, 6, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream)
        comm.reduce(x.data.ptr, largest.data.ptr, 6, nccl.NCCL_FLOAT32, nccl.NCCL_MAX, root, stream)
        comm.allGather(x.data.ptr, every.data.ptr, 6, nccl.NCCL_FLOAT32, stream)
        comm.reduceScatter(x.data.ptr, part.data.ptr, 6 // size, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream)
        comm.allReduce(x.data.ptr, mean.data.ptr, 6, nccl.NCCL_FLOAT32, nccl.NCCL_AVG, stream)
        comm.broadcast(x.data.ptr, told.data.ptr, 6, nccl.NCCL_FLOAT32, root, stream)
        comm.bcast(x.data.ptr, 6, nccl.NCCL_FLOAT32, root, stream)
        return [one.get() for one in (total, largest, every, part, mean, told, x)]

    results = nccl_ranks(cuda, size, body)
    whole = np.sum(host, axis=0)
    for rank, (total, largest, every, part, mean, told, x) in enumerate(results):
        assert np.array_equal(total, whole)
        assert np.array_equal(largest, host[-1]) if rank == size - 1 else poisoned(largest)
        assert np.array_equal(every, host)
        assert np.array_equal(part, whole.reshape(size, -1)[rank])
        assert np.allclose(mean, whole / size)
        assert np.array_equal(told, host[-1])
        assert np.array_equal(x, host[-1])


def test_nccl_reads_when_the_stream_comes_to_it(cuda, devices):
    devices(2)

    def body(comm: Any, rank: int) -> Any:
        stream = cuda.cuda.get_current_stream()
        producer = cuda.cuda.Stream(non_blocking=True)
        x = cuda.zeros(1)
        stream.synchronize()
        with producer:
            x.fill(rank + 1)
        if rank == 0:
            stream.wait_event(producer.record())
        comm.allReduce(x.data.ptr, x.data.ptr, 1, cuda.cuda.nccl.NCCL_FLOAT64, cuda.cuda.nccl.NCCL_SUM, stream.ptr)
        return x.item()

    assert nccl_ranks(cuda, 2, body) == [1.0, 1.0]  # without the 2 of rank 1, which did not wait


def test_nccl_messages_move_together_in_a_group(cuda, devices):
    devices(2)
    nccl = cuda.cuda.nccl

    def body(comm: Any, rank: int) -> Any:
        x, y = cuda.full(3, rank + 1), cuda.empty(3, np.int64)
        stream = cuda.cuda.get_current_stream().ptr
        nccl.groupStart()
        comm.send(x.data.ptr, 3, nccl.NCCL_INT64, 1 - rank, stream)
        comm.recv(y.data.ptr, 3, nccl.NCCL_INT64, 1 - rank, stream)
        nccl.groupEnd()
        return y.get().tolist()

    assert nccl_ranks(cuda, 2, body) == [[2] * 3, [1] * 3]


def test_nccl_collectives_may_be_grouped(cuda, devices):
    devices(3)
    nccl = cuda.cuda.nccl

    def body(comm: Any, rank: int) -> Any:
        stream, x = cuda.cuda.get_current_stream().ptr, cuda.full((20, 3), rank + 1.0)
        for _ in range(3):
            nccl.groupStart()
            for row in x:
                comm.allReduce(row.data.ptr, row.data.ptr, 3, nccl.NCCL_FLOAT64, nccl.NCCL_MAX, stream)
            nccl.groupEnd()
        return x.get()

    assert all((one == 3).all() for one in nccl_ranks(cuda, 3, body))


def test_nccl_messages_outside_of_a_group_wait_for_each_other(cuda, devices, monkeypatch):
    devices(2)
    monkeypatch.setenv("FAKECUDA_NCCL_TIMEOUT", "0.5")
    nccl = cuda.cuda.nccl

    def body(comm: Any, rank: int) -> str:
        x, stream = cuda.full(3, rank), cuda.cuda.get_current_stream()
        comm.send(x.data.ptr, 3, nccl.NCCL_INT64, 1 - rank, stream.ptr)
        comm.recv(x.data.ptr, 3, nccl.NCCL_INT64, 1 - rank, stream.ptr)
        with pytest.raises(nccl.NcclError) as late:
            stream.synchronize()
        with pytest.raises(nccl.NcclError):
            comm.check_async_error()
        comm.abort()
        stream.synchronize()
        return str(late.value)

    assert all("did not come" in one for one in nccl_ranks(cuda, 2, body))


def test_nccl_finds_different_calls(cuda, devices, monkeypatch):
    devices(2)
    monkeypatch.setenv("FAKECUDA_NCCL_TIMEOUT", "2")
    nccl = cuda.cuda.nccl

    def body(comm: Any, rank: int) -> None:
        x, stream = cuda.ones(4), cuda.cuda.get_current_stream()
        comm.allReduce(x.data.ptr, x.data.ptr, 4 - rank, nccl.NCCL_FLOAT64, nccl.NCCL_SUM, stream.ptr)
        with pytest.raises(nccl.NcclError, match=r"allReduce.*calls"):
            stream.synchronize()

    nccl_ranks(cuda, 2, body)


def test_nccl_wants_a_device_for_each_rank(cuda):
    nccl = cuda.cuda.nccl
    key = nccl.get_unique_id()

    def body(rank: int) -> None:
        with pytest.raises(nccl.NcclError, match="Duplicate GPU"):
            nccl.NcclCommunicator(2, key, rank)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(body, range(2)))


def test_nccl_polls_without_waiting(cuda, devices):
    devices(2)
    polled, nccl = threading.Event(), cuda.cuda.nccl

    def body(comm: Any, rank: int) -> float:
        x, stream = cuda.full(1, rank + 1.0), cuda.cuda.get_current_stream()
        stream.synchronize()
        if rank == 1:
            assert polled.wait(30)
        comm.allReduce(x.data.ptr, x.data.ptr, 1, nccl.NCCL_FLOAT64, nccl.NCCL_SUM, stream.ptr)
        if rank == 0:
            assert not any(stream.done for _ in range(5))
            polled.set()
        while not stream.done:
            pass
        return x.item()

    assert nccl_ranks(cuda, 2, body) == [3.0, 3.0]


_NCCL_RANK = """
import cupy, sys
nccl = cupy.cuda.nccl
comm = nccl.NcclCommunicator(2, bytes.fromhex(sys.stdin.readline()), {rank})
x = cupy.full(3, {rank} + 1.0)
comm.allReduce(x.data.ptr, x.data.ptr, 3, nccl.NCCL_FLOAT64, nccl.NCCL_PROD, 0)
print(x.get(), flush=True)
comm.destroy()
"""


def test_nccl_ranks_may_be_processes(cuda):
    variables = [fake_cuda.environment(FAKECUDA_DEVICES="2", CUDA_VISIBLE_DEVICES=str(rank)) for rank in range(2)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _NCCL_RANK.format(rank=rank)],
            env=os.environ | variables[rank],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    key = cuda.cuda.nccl.get_unique_id()
    for one in processes:
        one.stdin.write(f"{key.hex()}\n")
        one.stdin.flush()
    assert [one.communicate(timeout=60)[0] for one in processes] == ["[2. 2. 2.]\n"] * 2
    assert not Path("/dev/shm", key.rstrip(bytes(1)).decode()).exists()


# The fixture


def test_it_is_gone_afterwards(cuda):
    fake_cuda.remove()
    assert "cupy" not in sys.modules
    assert not any("fakecuda" in path for path in sys.path)
    with pytest.raises(ImportError):
        import cupy  # noqa: F401
    assert fake_cuda.install() is cuda


def test_no_thread_keeps_a_device_that_the_next_test_may_lack(cuda, monkeypatch):
    if not fake_cuda.is_fake(cuda):
        pytest.skip("of the fake device")
    monkeypatch.setenv("FAKECUDA_DEVICES", "2")

    def select_last() -> int:
        cuda.cuda.runtime.setDevice(1)
        return int(cuda.cuda.runtime.getDevice())

    with ThreadPoolExecutor(1) as other:
        assert select_last() == other.submit(select_last).result() == 1
        fake_cuda.remove()
        assert fake_cuda.install() is cuda
        assert cuda.cuda.runtime.getDevice() == other.submit(cuda.cuda.runtime.getDevice).result() == 0


@pytest.mark.mpi
def test_each_rank_has_it(cuda):
    import mpicoll

    world = mpicoll.world()
    x = cuda.full(3, world.rank)
    assert (mpicoll.allgather(cuda.asnumpy(x)).reshape(world.size, 3)[:, 0] == np.arange(world.size)).all()
