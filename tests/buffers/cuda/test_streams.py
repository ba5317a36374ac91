"""The order of work, and streams of threads."""

from __future__ import annotations

import ctypes
import threading
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from support.device_memory import down, up

from mpicoll.buffers.recognise import recognise

Array = np.ndarray[Any, Any]

PAIR = np.dtype([("value", "f8"), ("index", "i4")])


@pytest.fixture
def events(cuda: ModuleType) -> Any:
    from mpicoll.buffers.cuda import events

    return events


def test_host_memory_is_right_after_synchronize_only(on: Any, lazy: None) -> None:
    x = up(on, np.arange(8.0))
    host = on.allocate_pinned(64).view("f8")
    host[:] = -1
    with on.working():
        np.add(x, x, out=x)
        np.copyto(host, x)
        assert (host == -1).all()
        on.synchronize()
        np.testing.assert_array_equal(host, 2 * np.arange(8.0))


def test_a_mark_is_a_moment(on: Any, lazy: None) -> None:
    x = up(on, np.arange(8.0))
    first, second = (on.allocate_pinned(64).view("f8") for _ in range(2))
    first[:] = second[:] = -1
    with on.working():
        np.copyto(first, x)
        mark = on.record_event()
        np.add(x, x, out=x)
        np.copyto(second, x)
        mark.wait()
        assert mark.done()
        np.testing.assert_array_equal(first, np.arange(8.0))
        assert (second == -1).all()
    np.testing.assert_array_equal(second, 2 * np.arange(8.0))


def test_work_waits_for_the_callers_stream(cuda: ModuleType, events: Any, on: Any, lazy: None) -> None:
    with cuda.cuda.Stream(non_blocking=True) as stream:
        x = cuda.zeros(8)
        stream.synchronize()
        x += 1
        ready = events.record_event(0, stream.ptr)
    early, late = np.empty(8), np.empty(8)
    array = recognise("op", x).array
    with on.working():
        on.copy(early, array)
    with on.working([ready]):
        on.copy(late, array)
    assert (early == 0).all()
    assert (late == 1).all()


@pytest.mark.parametrize("nested", [False, True])
def test_work_is_done_when_the_block_is_left(on: Any, nested: bool) -> None:
    host = on.allocate_pinned(64).view("f8")
    host[:] = -1
    x = up(on, np.arange(8.0))

    def work() -> None:
        with on.working():
            np.copyto(host, x)
            if not nested:
                raise KeyError("on the way")

    with on.working():
        if nested:
            work()
            np.testing.assert_array_equal(host, np.arange(8.0))
    if not nested:
        with pytest.raises(KeyError):
            work()
        np.testing.assert_array_equal(host, np.arange(8.0))


def test_strided_host_memory_is_filled_at_once(on: Any) -> None:
    x = up(on, np.arange(6.0))
    host = np.zeros(12)
    with on.working():
        np.copyto(host[::2], x)
        np.testing.assert_array_equal(host[::2], np.arange(6.0))


def test_what_is_copied_up_may_be_forgotten(on: Any) -> None:
    target = on.empty(1000, np.dtype("f4"))
    with on.working():
        np.copyto(target, np.arange(2000, dtype="f4")[::2])
        # It would be taken for these, if it were given back too early.
        others = [on.allocate_pinned(4000) for _ in range(3)]
        for one in others:
            one[:] = 255
    np.testing.assert_array_equal(down(on, target), np.arange(2000, dtype="f4")[::2])


def test_cupy_works_on_our_stream_meanwhile(cuda: ModuleType, on: Any) -> None:
    outside = cuda.cuda.get_current_stream().ptr
    with on.working():
        assert cuda.cuda.get_current_stream().ptr == on.stream != outside
        with on.working():
            assert cuda.cuda.get_current_stream().ptr == on.stream
        assert cuda.cuda.get_current_stream().ptr == on.stream
    assert cuda.cuda.get_current_stream().ptr == outside


def test_the_callers_stream_stays_current(cuda: ModuleType, on: Any) -> None:
    """Also one that was made so for good."""
    before = cuda.cuda.get_current_stream()
    mine = cuda.cuda.Stream(non_blocking=True)
    mine.use()
    try:
        on.empty(4, np.dtype("f4"))
        assert cuda.cuda.get_current_stream().ptr == mine.ptr
        with on.working(), on.working():
            pass
        assert cuda.cuda.get_current_stream().ptr == mine.ptr
    finally:
        before.use()


def test_an_error_of_the_device_is_reported(cuda: ModuleType, on: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = cuda.cuda.runtime

    def fail(event: int) -> None:
        raise runtime.CUDARuntimeError(700)

    with on.working():
        mark = on.record_event()
        with monkeypatch.context() as patch:
            patch.setattr(runtime, "eventQuery", lambda event: 600)
            assert not mark.done()
            patch.setattr(runtime, "eventQuery", lambda event: 700)
            patch.setattr(runtime, "eventSynchronize", fail)
            with pytest.raises(runtime.CUDARuntimeError):
                mark.done()


def test_captures_of_other_threads_are_left_alone(on: Any) -> None:
    from mpicoll.buffers.cuda import driver

    def mode() -> int:
        found = ctypes.c_int(0)
        driver.exchange_capture_mode(found)
        driver.exchange_capture_mode(ctypes.c_int(found.value))
        return found.value

    before = mode()
    with on.working():
        with on.working():
            assert mode() == 2
        assert mode() == 2
    assert mode() == before != 2


def test_threads(on: Any) -> None:
    results: dict[int, list[Array]] = {}
    streams: set[int] = set()
    together = threading.Barrier(4)

    def body(number: int) -> None:
        streams.add(on.stream)
        together.wait()
        for step in range(5):
            parts = [up(on, np.full(1000, number + step + i, "f4")) for i in range(3)]
            with on.working():
                on.fold("sum", parts, [parts[0]], "float32")
            results.setdefault(number, []).append(down(on, parts[0]))

    def run() -> None:
        threads = [threading.Thread(target=body, args=(number,)) for number in range(4)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()

    run()
    assert len(streams) == 4
    for number, got in results.items():
        for step, one in enumerate(got):
            assert (one == 3 * (number + step) + 3).all()
    # The next threads use the streams of those that have ended.
    run()
    assert len(streams) == 4


def test_without_work_the_host_waits_for_the_events_themselves(cuda: ModuleType, on: Any, lazy: None) -> None:
    stream = cuda.cuda.Stream(non_blocking=True)
    x = cuda.zeros(3)
    cuda.cuda.get_current_stream().synchronize()
    arrived = on.allocate_pinned(x.nbytes).view(x.dtype)
    arrived[:] = 0
    for turn, synchronizes in ((1, True), (2, False)):
        with stream:
            x += 1
            x.get(out=arrived, blocking=False)
            event = stream.record()
        with on.working([event]):
            assert (arrived == turn - 1).all()
            if synchronizes:
                on.synchronize()
                assert (arrived == turn).all()
        assert (arrived == turn).all()


def test_work_begins_after_the_events(cuda: ModuleType, on: Any, lazy: None) -> None:
    stream = cuda.cuda.Stream(non_blocking=True)
    x = cuda.zeros(3)
    cuda.cuda.get_current_stream().synchronize()
    with stream:
        x += 1
        event = stream.record()
    got = np.empty(3)
    with on.working([event]):
        on.copy(got, recognise("op", x).array)
    np.testing.assert_array_equal(got, np.ones(3))
