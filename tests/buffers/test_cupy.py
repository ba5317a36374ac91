"""CUDA devices and arrays: copies, reductions and conversions against numpy; streams, pools, IPC. On the fake CUDA, if
there is no device: there, work that nobody waits for is not done."""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support import fake_cuda

from mpicoll.buffers import dtypes, kernels
from mpicoll.buffers.buffer import Buffer
from mpicoll.buffers.device import DeviceArray, view
from mpicoll.buffers.recognise import output, recognise
from mpicoll.errors import DeviceError, DTypeError

Array = np.ndarray[Any, Any]

PAIR = np.dtype([("value", "f8"), ("index", "i4")])


@pytest.fixture
def module(cuda: ModuleType) -> Any:
    """mpicoll.buffers.cupy"""
    from mpicoll.buffers import cupy

    return cupy


@pytest.fixture
def on(module: Any) -> Any:
    return module.cuda_device(0)


@pytest.fixture
def lazy(cuda: ModuleType) -> Iterator[None]:
    """For tests of what only the fake lets us see."""
    if not fake_cuda.is_fake(cuda) or os.environ.get("FAKECUDA_EAGER_RANDOM"):
        pytest.skip("on a real device work is done at once, or not, as it happens")
    # To free memory is to wait for its device.
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def down(on: Any, array: DeviceArray) -> Array:
    """The elements, on the host."""
    got = np.empty(array.shape, array.dtype)
    with on.working():
        on.copy(got, array)
    return got


def up(on: Any, values: Any) -> DeviceArray:
    values = np.asarray(values)
    made = on.empty(values.size, values.dtype).reshape(values.shape)
    with on.working():
        on.copy(made, values)
    return made


def numbers(shape: tuple[int, ...], dtype: Any) -> Array:
    """Different bytes in each element."""
    dtype = np.dtype(dtype)
    count = int(np.prod(shape))
    if dtype == np.bool_:
        return (np.arange(count) % 3 == 0).reshape(shape)
    words = np.random.default_rng([count, dtype.itemsize]).integers(0, 100, count * dtype.itemsize, np.uint8)
    return words.view(dtype).reshape(shape)


# --- copies

LAYOUTS: dict[str, tuple[tuple[int, ...], Callable[[Array], Array]]] = {
    "whole": ((4, 6), lambda a: a),
    "transposed": ((6, 4), lambda a: a.T),
    "rows": ((8, 6), lambda a: a[2:6]),
    "every other row": ((8, 6), lambda a: a[::2]),
    "columns": ((4, 9), lambda a: a[:, 2:8]),
    "every other column": ((4, 12), lambda a: a[:, ::2]),
    "backwards": ((4, 6), lambda a: a[::-1, ::-1]),
    "rows backwards": ((4, 8), lambda a: a[::-1, 1:7]),
    "inner axis first": ((6, 3, 4), lambda a: a.transpose(2, 1, 0)[:, 1]),
    "of three axes": ((4, 2, 6), lambda a: a[:, 1, :]),
}
DTYPES = ["u1", "?", "i2", "f2", ml_dtypes.bfloat16, "f4", "f8", "c8", "c16", "V3", "V12", PAIR]


def whole_and_view(on: Any, layout: str, dtype: Any, device: bool) -> tuple[Array, Array]:
    shape, cut = LAYOUTS[layout]
    values = numbers(shape, dtype)
    array = up(on, values) if device else values.copy()
    return array, cut(array)


@pytest.mark.parametrize(("there", "here"), [(True, True), (True, False), (False, True)], ids=["across", "up", "down"])
@pytest.mark.parametrize("row", [1, 512])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies(
    on: Any, module: Any, layout: str, row: int, there: bool, here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ROW", row)
    for other, dtype in product(LAYOUTS, DTYPES):
        target, into = whole_and_view(on, layout, dtype, there)
        _, of = whole_and_view(on, other, dtype, here)
        wanted = numbers(LAYOUTS[layout][0], dtype)
        values = LAYOUTS[other][1](numbers(LAYOUTS[other][0], dtype))
        LAYOUTS[layout][1](wanted)[...] = values
        with on.working():
            on.copy(into, of)
        got = down(on, target) if isinstance(target, DeviceArray) else target
        assert got.tobytes() == wanted.tobytes(), (layout, other, dtype)


@pytest.mark.parametrize(("there", "here"), [(True, True), (True, False), (False, True)], ids=["across", "up", "down"])
@pytest.mark.parametrize("row", [1, 512])
def test_broadcast(on: Any, module: Any, row: int, there: bool, here: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ROW", row)
    for shape in [(), (1,), (6,), (1, 6), (4, 1), (1, 1, 4, 6)]:
        values = numbers(shape, "f4")
        target = up(on, np.zeros((4, 6), "f4")) if there else np.zeros((4, 6), "f4")
        with on.working():
            on.copy(target, up(on, values) if here else values)
        got = down(on, target) if isinstance(target, DeviceArray) else target
        np.testing.assert_array_equal(got, np.broadcast_to(values.reshape(values.shape[-2:]), (4, 6)))


def test_rows_that_are_too_far_apart_for_a_transfer(
    cuda: ModuleType, on: Any, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    whole = cuda.cuda.runtime.memcpy2DAsync

    def transfer(*args: int) -> None:
        asked.append(args[1])
        whole(*args)

    monkeypatch.setattr(cuda.cuda.runtime, "memcpy2DAsync", transfer)
    monkeypatch.setattr(module, "_ROW", 1)
    values = numbers((4, 100), "u1")
    x = up(on, values)
    for limit, times in ((100, 1), (99, 0)):
        monkeypatch.setattr(module, "_PITCH", limit)
        got = np.zeros((4, 50), "u1")
        with on.working():
            on.copy(got, x[:, :50])
        np.testing.assert_array_equal(got, values[:, :50])
        assert len(asked) == times
        asked.clear()


def test_memory_in_the_same_order_is_one_transfer(cuda: ModuleType, on: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("a kernel")

    values = numbers((2, 3, 4), "f4")
    target, source = up(on, np.zeros((2, 3, 4), "f4")), up(on, values)
    monkeypatch.setattr(cuda, "copyto", refuse)
    with on.working():
        on.copy(target.transpose(2, 0, 1), source.transpose(2, 0, 1))
    np.testing.assert_array_equal(down(on, target), values)


def test_wrong_shapes_and_dtypes(on: Any) -> None:
    target = up(on, np.zeros((4, 6), "f4"))
    with pytest.raises(ValueError, match=r"could not broadcast .*\(5,\) into shape \(4, 6\)"), on.working():
        on.copy(target, np.zeros(5, "f4"))
    with pytest.raises(ValueError, match="could not broadcast"), on.working():
        on.copy(target, np.zeros((2, 4, 6), "f4"))
    with pytest.raises(DTypeError, match="float64 to float32 on cuda:0"), on.working():
        on.copy(target, up(on, np.zeros((4, 6))))


def test_numbers(on: Any) -> None:
    for dtype, number in [("f4", 2.5), ("i2", -3), ("u1", np.uint8(9)), ("c16", 1 - 2j), ("?", True), ("f8", 1)]:
        target = up(on, np.zeros((3, 4), dtype))
        with on.working():
            target[:, ::2] = number
            target[1] = np.asarray(number, dtype)
        wanted = np.zeros((3, 4), dtype)
        wanted[:, ::2] = number
        wanted[1] = number
        np.testing.assert_array_equal(down(on, target), wanted)


def test_nothing_and_one_element(on: Any) -> None:
    empty = on.empty(0, np.dtype("f4"))
    with on.working():
        on.copy(empty, np.empty(0, "f4"))
        on.copy(np.empty((0, 3), "f4"), on.empty(0, np.dtype("f4")).reshape(0, 3))
        on.apply("add", [empty, empty], empty)
        on.fold("sum", [empty, empty], [empty], "float32")
        on.convert(empty, on.empty(0, np.dtype("u2")), "bfloat16")
    one = up(on, np.array(3.0))
    with on.working():
        one[...] = 5
        np.add(one, one, out=one)
    assert down(on, one) == 10


def test_copies_onto_itself(on: Any) -> None:
    for cut_to, cut_of in [
        (np.s_[1:], np.s_[:-1]),
        (np.s_[:-1], np.s_[1:]),
        (np.s_[:], np.s_[::-1]),
        (np.s_[:, 1:], np.s_[:, :-1]),
        (np.s_[3:], np.s_[0]),
        (np.s_[::2], np.s_[1::2]),
        (np.s_[:], np.s_[:]),
    ]:
        wanted = numbers((6, 8), "f4")
        array = up(on, wanted)
        with on.working():
            on.copy(array[cut_to], array[cut_of])
        wanted[cut_to] = wanted[cut_of].copy()
        np.testing.assert_array_equal(down(on, array), wanted)


def test_elements_where_none_may_begin(on: Any) -> None:
    """A kernel that reads a float64 there ends the use of the device."""
    room = up(on, np.zeros(8 * 8 + 3, "u1"))
    odd = room[3:].view("f8")
    with on.working():
        on.copy(odd, np.arange(8.0))
        on.copy(odd[::2], odd[::2][::-1])
        on.fold("sum", [odd, odd], [odd], "float64")
        np.multiply(odd, odd, out=odd)
    np.testing.assert_array_equal(down(on, odd), (2 * np.array([6.0, 1, 4, 3, 2, 5, 0, 7])) ** 2)


# --- order


def test_host_memory_is_right_after_settle_only(on: Any, lazy: None) -> None:
    x = up(on, np.arange(8.0))
    host = on.pinned(64).view("f8")
    host[:] = -1
    with on.working():
        np.add(x, x, out=x)
        np.copyto(host, x)
        assert (host == -1).all()
        on.settle()
        np.testing.assert_array_equal(host, 2 * np.arange(8.0))


def test_a_mark_is_a_moment(on: Any, lazy: None) -> None:
    x = up(on, np.arange(8.0))
    first, second = (on.pinned(64).view("f8") for _ in range(2))
    first[:] = second[:] = -1
    with on.working():
        np.copyto(first, x)
        mark = on.mark()
        np.add(x, x, out=x)
        np.copyto(second, x)
        mark.wait()
        assert mark.done()
        np.testing.assert_array_equal(first, np.arange(8.0))
        assert (second == -1).all()
    np.testing.assert_array_equal(second, 2 * np.arange(8.0))


def test_work_waits_for_the_callers_stream(cuda: ModuleType, module: Any, on: Any, lazy: None) -> None:
    with cuda.cuda.Stream(non_blocking=True) as stream:
        x = cuda.zeros(8)
        stream.synchronize()
        x += 1
        ready = module.event_on(0, stream.ptr)
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
    host = on.pinned(64).view("f8")
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
        others = [on.pinned(4000) for _ in range(3)]
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


def test_an_error_of_the_device_is_told(cuda: ModuleType, on: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = cuda.cuda.runtime

    def fail(event: int) -> None:
        raise runtime.CUDARuntimeError(700)

    with on.working():
        mark = on.mark()
        with monkeypatch.context() as patch:
            patch.setattr(runtime, "eventQuery", lambda event: 600)
            assert not mark.done()
            patch.setattr(runtime, "eventQuery", lambda event: 700)
            patch.setattr(runtime, "eventSynchronize", fail)
            with pytest.raises(runtime.CUDARuntimeError):
                mark.done()


def test_captures_of_other_threads_are_left_alone(module: Any, on: Any) -> None:
    def mode() -> int:
        found = ctypes.c_int(0)
        module._exchange_capture_mode(found)
        module._exchange_capture_mode(ctypes.c_int(found.value))
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


# --- reductions


def test_fold_of_each_op_and_dtype(on: Any) -> None:
    for dtype in kernels.ITEMSIZE:
        ops = [op for op in ("sum", "avg", "max", "lxor") if kernels.known(op, dtype)]
        for number, op in enumerate(ops):
            count = 2 + number
            kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
            values = [(np.arange(37) * (i + 1) % 5).astype(kind) for i in range(count)]
            parts = [up(on, one) for one in values]
            other = on.empty(37, kind)
            with on.working():
                on.fold(op, parts, [parts[-1], other], dtype)
            wide = np.stack([one.astype("c16" if kind.kind == "c" else "f8") for one in values])
            wanted = {
                "sum": lambda wide: wide.sum(0),
                "avg": lambda wide: wide.mean(0),
                "max": lambda wide: wide.max(0),
                "lxor": lambda wide: (wide != 0).sum(0) % 2,
            }[op](wide)
            for out in (parts[-1], other):
                got = down(on, out).astype(wide.dtype)
                tolerance = 0.0 if op != "avg" else 1e-2 if dtype in kernels.HALVES else 1e-6
                np.testing.assert_allclose(got, wanted, rtol=tolerance, err_msg=f"{op} {dtype}")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
def test_fold_of_more_parts_than_a_kernel_has(on: Any, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "MOST_PARTS", 4)
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    for count in (4, 5, 7, 8, 11):
        values = [np.linspace(-3, 9 + i, 5003).astype(kind) for i in range(count)]
        parts = [up(on, one) for one in values]
        outs = [parts[0], parts[-1]]
        op = "sum" if dtype == "int8" else "avg"
        with on.working():
            on.fold(op, parts, outs, dtype)
        wide = kind if dtype == "int8" else np.dtype("f4")
        total = values[0].astype(wide)
        for one in values[1:]:
            total = total + one.astype(wide)
        wanted = (total if op == "sum" else total / np.float32(count)).astype(kind)
        for out in outs:
            assert down(on, out).tobytes() == wanted.tobytes()


def test_fold_refuses_what_has_no_meaning(on: Any) -> None:
    part = on.empty(4, np.dtype("f4"))
    with pytest.raises(DTypeError, match="no kernel that combines arrays of float32 by 'band'"):
        on.fold("band", [part], [part], "float32")


UFUNCS = ["add", "multiply", "minimum", "maximum", "divide"]


@pytest.mark.parametrize("ufunc", UFUNCS)
def test_ufuncs(on: Any, ufunc: str) -> None:
    function = getattr(np, ufunc)
    for dtype in ("f4", "f8", "c16", "i4"):
        if (dtype, ufunc) in (("c16", "minimum"), ("c16", "maximum"), ("i4", "divide")):
            continue
        values, more = (np.arange(1, 25).reshape(4, 6) % k + 1 for k in (7, 5))
        values, more = values.astype(dtype), more.astype(dtype)
        for cut in (np.s_[:], np.s_[:, ::2], np.s_[::-1]):
            for second in (more[cut], 3, np.asarray(3, dtype)):
                x = up(on, values)
                y = up(on, more)[cut] if np.ndim(second) else second
                wanted = values.copy()
                function(wanted[cut], second, out=wanted[cut])
                with on.working():
                    assert function(x[cut], y, out=x[cut]) is not None
                np.testing.assert_allclose(down(on, x), wanted, rtol=1e-6)


def test_ufuncs_of_other_dtypes(on: Any) -> None:
    truth = np.array([True, False, True, False])
    x, y = up(on, truth), up(on, truth[::-1].copy())
    work = up(on, np.array([5, 0, -1, 0], "i2"))
    with on.working():
        np.logical_or(x, y, out=x)
        np.minimum(y, x, out=y)
        np.not_equal(work, 0, out=work, casting="unsafe")
    np.testing.assert_array_equal(down(on, x), [True] * 4)
    np.testing.assert_array_equal(down(on, y), truth[::-1])
    np.testing.assert_array_equal(down(on, work), [1, 0, 1, 0])


def test_ufuncs_on_memory_that_overlaps(on: Any) -> None:
    wanted = np.arange(16.0)
    x = up(on, wanted)
    with on.working():
        np.add(x[:-1], x[1:], out=x[1:])
        np.add(x[:4], x[8:12], out=x[2:9:2])
        square = x.reshape(4, 4)
        np.divide(square.T, 2, out=square)
    np.add(wanted[:-1].copy(), wanted[1:].copy(), out=wanted[1:])
    np.add(wanted[:4].copy(), wanted[8:12].copy(), out=wanted[2:9:2])
    np.testing.assert_array_equal(down(on, x).reshape(4, 4), wanted.reshape(4, 4).T / 2)


def test_an_operand_on_the_host(on: Any) -> None:
    x = up(on, np.arange(6.0).reshape(2, 3))
    with on.working():
        np.multiply(x, np.arange(3.0), out=x)
    np.testing.assert_array_equal(down(on, x), np.arange(6.0).reshape(2, 3) * np.arange(3.0))


def test_no_such_ufunc(on: Any) -> None:
    x = on.empty(3, np.dtype("f4"))
    with pytest.raises(DeviceError, match="spacing: there is no such function for memory of cuda:0"):
        np.spacing(x, out=x)


@pytest.mark.parametrize("dtype", kernels.HALVES)
def test_conversion(on: Any, dtype: str) -> None:
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    floats = np.linspace(-70, 70, 4 * 37).astype("f4").reshape(4, 37)
    floats[0, :3] = np.nan, np.inf, 1e-7
    halves = floats.astype(kind)
    for source, target, wanted in [(floats, kind, halves), (halves, np.dtype("f4"), halves.astype("f4"))]:
        places = [(False, False), (True, False), (False, True)]
        for cut, (from_host, to_host) in product((np.s_[:], np.s_[:, 1:], np.s_[::2, ::-1]), places):
            of = source if from_host else up(on, source)
            into = np.zeros(source.shape, target) if to_host else up(on, np.zeros(source.shape, target))
            with on.working():
                on.convert(of[cut], into[cut], dtype)
            got = into if to_host else down(on, into)
            np.testing.assert_array_equal(got[cut].astype("f8"), wanted[cut].astype("f8"))
            kept = np.ones(source.shape, bool)
            kept[cut] = False
            assert not got[kept].astype("f8").any()


def test_conversion_in_place(on: Any) -> None:
    values = np.arange(100).astype("f2")
    room = up(on, np.zeros(100, "f4"))
    halves = room.view("f2")[:100]
    with on.working():
        on.copy(halves, values)
        on.convert(halves, room, "float16")
    np.testing.assert_array_equal(down(on, room), np.arange(100, dtype="f4"))
    with on.working():
        on.convert(room, halves, "float16")
    np.testing.assert_array_equal(down(on, halves), values)


# --- memory


def test_scratch_goes_back_to_cupys_pool(cuda: ModuleType, on: Any) -> None:
    pool = cuda.get_default_memory_pool()
    gc.collect()
    before, all_before = pool.used_bytes(), pool.total_bytes()
    for _ in range(20):
        x = up(on, np.arange(1000.0).reshape(10, 100))
        with on.working():
            on.copy(x[:, 1:], x[:, :-1])
            on.copy(x, np.zeros((20, 100))[::2])
            on.fold("sum", [x.reshape(-1)] * 2, [x.reshape(-1)], "float64")
        down(on, x.T)
        assert pool.used_bytes() == before + x.nbytes + -x.nbytes % 512
        del x
    assert pool.used_bytes() == before
    assert pool.total_bytes() < all_before + 20 * 8000


def test_page_locked_memory_serves_again(on: Any) -> None:
    first = on.pinned(5000)
    assert first.shape == (5000,)
    assert first.dtype == np.uint8
    address = first.ctypes.data
    part = first[100:200].view("f4")
    del first
    other = on.pinned(5000)
    assert other.ctypes.data != address
    del part
    assert on.pinned(8192).ctypes.data == address
    assert on.pinned(0).size == 0


def test_page_locked_memory_is_not_hoarded(on: Any, module: Any, monkeypatch: pytest.MonkeyPatch, lazy: None) -> None:
    monkeypatch.setattr(module, "_IDLE", 3 * 8192)
    monkeypatch.setattr(on, "_pinned", module._PinnedPool())
    held = [on.pinned(8192) for _ in range(5)]
    addresses = [one.ctypes.data for one in held]
    del held
    assert on.pinned(8192).ctypes.data in addresses
    on.pinned(20000)  # for which CUDA is asked
    assert sum(fake_cuda.fakecuda.memory.pinned(one) for one in addresses) == 3


def test_page_locked_memory_of_threads(on: Any) -> None:
    wrong = []

    def body(number: int) -> None:
        for _ in range(200):
            mine = on.pinned(64)
            mine[:] = number
            if (mine != number).any():
                wrong.append(number)

    threads = [threading.Thread(target=body, args=(number,)) for number in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not wrong


class Mapping:
    """Memory that is no array's own, as shared memory is."""

    def __init__(self, nbytes: int) -> None:
        self._held = np.zeros(nbytes + 4096, np.uint8)
        address = self._held.ctypes.data + -self._held.ctypes.data % 4096
        self.__array_interface__ = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}


def test_shared_memory_is_page_locked_as_a_whole(on: Any, lazy: None) -> None:
    pinned = fake_cuda.fakecuda.memory.pinned
    whole = np.asarray(Mapping(5 * 4096))
    address = whole.ctypes.data
    slots = [whole[100:5000], whole[5000:10000].view("f4")]
    del whole
    for slot in (*slots, *slots):
        on.register(slot)
    assert pinned(address, 5 * 4096)
    del slot
    slots.pop()
    assert pinned(address)
    slots.clear()
    gc.collect()
    assert not pinned(address)


def test_memory_that_cannot_be_page_locked(on: Any, lazy: None) -> None:
    on.register(on.empty(100, np.dtype("u1")))
    on.register(np.empty(0))
    twice = np.asarray(Mapping(8192))
    on.register(twice[:100])
    overlapping = np.ndarray(4096, np.uint8, twice, 4000)
    on.register(overlapping)
    assert fake_cuda.fakecuda.memory.pinned(twice.ctypes.data, 8192)


# --- other processes

CHILD = """
import sys, pickle
import cupy
import numpy as np
from mpicoll.buffers.recognise import recognise
from mpicoll.buffers.cupy import cuda_device

on = cuda_device(0)
around = cupy.arange(1000, dtype="f8")
x = recognise("op", around[100:200])
told = sys.stdout.buffer
with on.working([x.library.ready(x)]):
    pass
pickle.dump((on.export(x.array), on.identity), told)
told.flush()
sys.stdin.readline()
print(cupy.asnumpy(around[100:200]).sum())
"""


def test_memory_of_another_process(on: Any, lazy: None) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **fake_cuda.environment()},
        cwd=Path(__file__).parents[2],
    )
    assert child.stdin is not None
    assert child.stdout is not None
    with child:
        export, identity = pickle.load(child.stdout)
        assert identity == on.identity == export.device
        whole, again = on.reach(export), on.reach(export)
        assert whole.nbytes == export.nbytes >= 8000
        theirs = whole[export.offset : export.offset + 800].view("f8")
        np.testing.assert_array_equal(down(on, theirs), np.arange(100.0, 200))
        with on.working():
            on.fold("sum", [theirs, theirs], [theirs], "float64")
        del whole
        np.testing.assert_array_equal(down(on, theirs), 2 * np.arange(100.0, 200))
        address = theirs.ctypes.data
        del theirs
        assert fake_cuda.fakecuda.find(address)
        del again
        assert not fake_cuda.fakecuda.find(address)
        child.stdin.write(b"\n")
        child.stdin.flush()
        assert float(child.stdout.readline()) == 2 * np.arange(100.0, 200).sum()
    assert child.returncode == 0
    with pytest.raises(DeviceError, match=f"cuda:0 can't reach {export.nbytes} bytes of process {export.process} on"):
        on.reach(export)


def test_the_name_of_a_process(on: Any, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = up(on, np.arange(100.0))
    name = on.export(x).process
    assert on.export(x[10:]).process == name
    assert str(os.getpid()) != name
    monkeypatch.setattr(os, "getpid", lambda: -1)  # as after a fork
    assert module._process() != name


def test_threads_that_ask_at_once_are_told_the_same_name(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a rank that is a thread would take memory of its own process for another's."""
    together = threading.Barrier(3, timeout=20)
    draw = module.secrets.token_hex

    def token_hex(size: int) -> str:
        together.wait()
        return str(draw(size))

    monkeypatch.setattr(module.secrets, "token_hex", token_hex)
    monkeypatch.setattr(os, "getpid", lambda: -2)
    with ThreadPoolExecutor(3) as pool:
        names = {one.result() for one in [pool.submit(module._process) for _ in range(3)]}
    assert len(names) == 1


def test_memory_of_another_device_of_this_process(
    cuda: ModuleType, module: Any, lazy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKECUDA_DEVICES", "2")
    first, second = module.cuda_device(0), module.cuda_device(1)
    export = second.export(up(second, np.arange(100.0)))
    monkeypatch.setenv("FAKECUDA_PEERS", "0")
    with pytest.raises(DeviceError, match="cuda:0 can't reach"):
        first.reach(export)
    monkeypatch.delenv("FAKECUDA_PEERS")
    for _ in range(2):
        theirs = first.reach(export)[export.offset : export.offset + 800].view("f8")
        total = first.empty(100, np.dtype("f8"))
        with first.working():
            first.fold("sum", [theirs, theirs], [total], "float64")
        np.testing.assert_array_equal(down(first, total), 2 * np.arange(100.0))


def test_memory_of_this_process(on: Any) -> None:
    x = up(on, np.arange(100.0))[40:]
    export = on.export(x)
    whole = on.reach(export)
    same = whole[export.offset : export.offset + x.nbytes].view("f8")
    assert same.ctypes.data == x.ctypes.data
    np.testing.assert_array_equal(down(on, same), np.arange(40.0, 100))


def test_memory_that_other_processes_cannot_reach(cuda: ModuleType, on: Any) -> None:
    stream = cuda.cuda.Stream(non_blocking=True)
    with stream:
        memory = cuda.cuda.malloc_async(1000)
    x = cuda.ndarray((100,), "f4", memory)
    assert on.export(recognise("op", x).array) is None
    assert on.export(on.empty(0, np.dtype("f4"))) is None


def test_memory_that_is_gone(cuda: ModuleType, on: Any) -> None:
    """It is not taken for what lies there now."""
    allocator = cuda.cuda.get_allocator()
    cuda.cuda.set_allocator(None)
    try:
        array = on.empty(1000, np.dtype("f8"))
        told = on.export(array)
        stale = view(on, array.ctypes.data, (1000,), np.dtype("f8"))
        cuda.cuda.Device(0).synchronize()
        del array
        gone = on.export(stale)
        assert gone is None or gone.number != told.number
        again = on.empty(1000, np.dtype("f8"))
        assert on.export(again).number != told.number
    finally:
        cuda.cuda.set_allocator(allocator)


def test_without_the_driver_nothing_is_exported(on: Any, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(module, "_libcuda", missing)
    assert on.export(up(on, np.zeros(4))) is None


# --- devices


def test_one_object_for_each_device(module: Any, on: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert module.cuda_device(0) is on
    assert (on.name, on.kind, on.index) == ("cuda:0", "cuda", 0)
    with pytest.raises(DeviceError, match=f"no device cuda:99: this process sees {module.device_count()}, numbered"):
        module.cuda_device(99)
    monkeypatch.setattr(os, "getpid", lambda: -1)  # as after a fork
    assert module.cuda_device(0) is not on


def test_several_devices(cuda: ModuleType, module: Any, lazy: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKECUDA_DEVICES", "2")
    first, second = (module.cuda_device(index) for index in range(2))
    assert first.identity != second.identity
    with cuda.cuda.Device(1):
        x = cuda.arange(6.0)
        buffer = recognise("op", x)
        ready = buffer.library.ready(buffer)
    assert buffer.array.on is second
    with second.working([ready]):
        total = second.empty(6, np.dtype("f8"))
        second.fold("sum", [buffer.array, buffer.array], [total], "float64")
        with first.working():
            other = up(first, np.ones(6))
    np.testing.assert_array_equal(down(second, total), 2 * np.arange(6.0))
    np.testing.assert_array_equal(down(first, other), np.ones(6))
    assert cuda.cuda.runtime.getDevice() == 0
    with pytest.raises(DeviceError, match="x lies on cuda:1, out on cuda:0"):
        output("op", cuda.empty(6), buffer, (6,))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert module.CudaDevice(0).identity == second.identity


def test_a_device_that_nobody_uses_is_left_alone(
    cuda: ModuleType, module: Any, lazy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread begins with the first one, and to go back there would take memory of it."""
    monkeypatch.setenv("FAKECUDA_DEVICES", "4")
    contexts = fake_cuda.fakecuda.streams.contexts
    used: list[set[int]] = []

    def work() -> None:
        device = module.cuda_device(3)
        before = set(contexts)
        contexts.clear()
        x = up(device, np.arange(4.0))
        x = device.reach(device.export(x))
        device.pinned(100)
        module.event_on(3, device.stream)
        down(device, x)
        used.append(set(contexts))
        contexts.update(before)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert used == [{3}]
    # What was in use before is current again.
    up(module.cuda_device(2), np.arange(4.0))
    assert cuda.cuda.runtime.getDevice() == 0


def test_facts(module: Any, lazy: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKECUDA_DEVICES", "2")
    assert module.device_count() == 2
    first, second = module.facts()
    assert first["name"] == "Fake CUDA device"
    assert (first["index"], second["index"]) == (0, 1)
    assert (first["peers"], second["peers"]) == ([1], [0])
    assert first["memory"] == 1 << 34
    assert (first["capability"], first["driver"], first["runtime"]) == ("9.0", "12.9", "12.8")
    assert first["identity"] == module.cuda_device(0).identity
    assert first["bus"] in first["identity"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert module.device_count() == 0
    with pytest.raises(DeviceError, match=r"CUDA can't be used here: .*NoDevice"):
        module.facts()
    with pytest.raises(DeviceError, match="CUDA can't be used here"):
        module.cuda_device(99)


# --- arrays of libraries


class Interface:
    """An array of another library."""

    def __init__(self, x: Any, **changes: Any) -> None:
        self.x = x
        self.changes = changes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        own = {**self.x.__cuda_array_interface__, "stream": None, **self.changes}
        return {key: value for key, value in own.items() if value != "absent"}


def test_cupys_arrays(cuda: ModuleType, on: Any) -> None:
    x = cuda.arange(24, dtype="i4").reshape(4, 6)
    for one in (x, x.T, x[::2, 1:], x[::-1], x[:0]):
        buffer = recognise("op", one)
        assert buffer.user is one
        assert buffer.dtype == dtypes.of_numpy(np.dtype("i4"))
        assert isinstance(buffer.array, DeviceArray)
        assert buffer.array.on is on
        assert (buffer.array.shape, buffer.array.dtype) == (one.shape, one.dtype)
        with on.working([buffer.library.ready(buffer)]):
            got = np.empty(one.shape, "i4")
            np.copyto(got, buffer.array)
        np.testing.assert_array_equal(got, cuda.asnumpy(one))


def test_results_are_cupys(cuda: ModuleType, on: Any) -> None:
    for like in (cuda.zeros(3, "f4"), Interface(cuda.zeros(3, "f4"))):
        buffer = recognise("op", like)
        made = buffer.library.empty(buffer, (2, 5))
        assert isinstance(made.user, cuda.ndarray)
        assert made.array.ctypes.data == made.user.data.ptr
        assert made.array.on is on
        with on.working([made.library.ready(made)]):
            made.array[...] = 7
        result = made.result()
        assert (result.shape, result.dtype) == ((2, 5), np.float32)
        assert (cuda.asnumpy(result) == 7).all()


def test_functions_get_cupys_arrays_on_the_memory(cuda: ModuleType, on: Any) -> None:
    buffer = recognise("op", cuda.arange(6, dtype="f8"))
    scratch = on.empty(6, np.dtype("f8"))
    with on.working([buffer.library.ready(buffer)]):
        np.copyto(scratch, buffer.array)
        seen = buffer.library.wrap(scratch[::2])
        value = seen * seen
        scratch[::2] = recognise("op", value).array
        del value
    np.testing.assert_array_equal(down(on, scratch), [0, 1, 4, 3, 16, 5])
    assert isinstance(seen, cuda.ndarray)
    assert recognise("op", buffer.library.wrap(scratch[:0])).array.shape == (0,)


def test_bfloat16(cuda: ModuleType, on: Any) -> None:
    words = np.arange(5.0).astype(ml_dtypes.bfloat16)
    x = cuda.empty(5, ml_dtypes.bfloat16)
    buffer = recognise("op", x)
    assert buffer.dtype.name == "bfloat16"
    work = on.empty(5, np.dtype("f4"))
    with on.working([buffer.library.ready(buffer)]):
        np.copyto(buffer.array, words)
        buffer.load(work)
        np.add(work, 0.25, out=work)
        buffer.store(work)
    np.testing.assert_array_equal(down(on, buffer.array), (np.arange(5.0) + 0.25).astype(ml_dtypes.bfloat16))
    assert not buffer.library.add(buffer.array, buffer.array, buffer.array, buffer.dtype)


def later(cuda: ModuleType, stream: Any) -> Any:
    """An array whose elements become 1 in `stream`, and are 0 before."""
    x = cuda.zeros(4)
    cuda.cuda.get_current_stream().synchronize()
    with stream:
        x += 1
    return x


def seen(on: Any, buffer: Buffer) -> float:
    ready = buffer.library.ready(buffer)
    got = np.empty(buffer.array.shape, buffer.array.dtype)
    with on.working([] if ready is None else [ready]):
        on.copy(got, buffer.array)
    return float(got[0])


def test_the_stream_of_an_interface(cuda: ModuleType, on: Any, lazy: None) -> None:
    stream = cuda.cuda.Stream(non_blocking=True)
    of = recognise("op", Interface(later(cuda, stream), stream=stream.ptr))
    assert seen(on, of) == 1
    assert seen(on, recognise("op", Interface(later(cuda, stream), stream=1))) == 0
    assert seen(on, recognise("op", Interface(later(cuda, cuda.cuda.Stream()), stream=1))) == 1
    ptds = cuda.cuda.Stream(ptds=True)
    assert seen(on, recognise("op", Interface(later(cuda, ptds), stream=2))) == 1
    none = recognise("op", Interface(later(cuda, cuda.cuda.Stream()), stream=None))
    assert none.library.ready(none) is None
    # Before version 3 the interface had no word for it.
    old = Interface(later(cuda, cuda.cuda.Stream()), stream="absent", version=2)
    assert seen(on, recognise("op", old)) == 1


def test_cupys_current_stream(cuda: ModuleType, on: Any, lazy: None) -> None:
    stream = cuda.cuda.Stream(non_blocking=True)
    x = later(cuda, stream)
    buffer = recognise("op", x)
    assert seen(on, buffer) == 0
    with stream:
        ready = buffer.library.ready(buffer)
    got = np.empty(4)
    with on.working([ready]):
        on.copy(got, buffer.array)
    assert (got == 1).all()


def test_a_result_is_cupys_whatever_the_interface_says(cuda: ModuleType, on: Any, lazy: None) -> None:
    buffer = recognise("op", Interface(cuda.zeros(4)))
    made = buffer.library.empty(buffer, (4,))
    assert buffer.library.ready(buffer) is None
    assert made.library.ready(made) is not None


def test_readonly(cuda: ModuleType) -> None:
    x = cuda.zeros(4)
    buffer = recognise("op", Interface(x, data=(x.data.ptr, True)))
    assert not buffer.array.flags.writeable
    assert recognise("op", Interface(x)).array.flags.writeable


class Dlpack:
    """An array of a library that has DLPack only."""

    def __init__(self, x: Any) -> None:
        self.x = x
        self.asked = 0

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.x.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        self.asked += 1
        return self.x.__dlpack__(**options)

    def __array_namespace__(self) -> type[Dlpack]:
        return Dlpack

    @staticmethod
    def from_dlpack(x: Any) -> Dlpack:
        return Dlpack(x)


def test_dlpack(cuda: ModuleType, on: Any) -> None:
    x = Dlpack(cuda.arange(6, dtype="f4"))
    buffer = recognise("op", x)
    assert buffer.array.ctypes.data == x.x.data.ptr
    asked = x.asked
    with on.working([buffer.library.ready(buffer)]):
        got = np.empty(6, "f4")
        np.copyto(got, buffer.array)
    assert x.asked == asked + 1
    np.testing.assert_array_equal(got, np.arange(6))
    made = buffer.library.empty(buffer, (3,))
    with on.working([made.library.ready(made)]):
        made.array[...] = 2
    result = made.result()
    assert isinstance(result, Dlpack)
    assert (cuda.asnumpy(result.x) == 2).all()
    assert isinstance(buffer.library.wrap(made.array), Dlpack)
    into = output("op", x, buffer, (6,))
    assert into.result() is x


def test_dlpack_without_a_way_back(cuda: ModuleType, on: Any) -> None:
    class Bare(Dlpack):
        __array_namespace__ = None

    buffer = recognise("op", Bare(cuda.zeros(3)))
    assert isinstance(buffer.library.empty(buffer, (2,)).result(), cuda.ndarray)
    assert isinstance(buffer.library.wrap(buffer.array), cuda.ndarray)
    assert seen(on, buffer) == 0


def test_what_cupy_cannot_take_by_dlpack(cuda: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(Dlpack):
        error: Exception = NotImplementedError("no such dtype")

        def __dlpack__(self, **options: Any) -> Any:
            raise self.error

    odd = Odd(cuda.zeros(3))
    with pytest.raises(DTypeError, match=r"op: x is a Odd that cupy can't take by DLPack: no such dtype"):
        recognise("op", odd)
    odd.error = cuda.cuda.runtime.CUDARuntimeError(700)
    with pytest.raises(cuda.cuda.runtime.CUDARuntimeError):
        recognise("op", odd)


def test_memory_of_the_host_that_the_device_reaches(cuda: ModuleType, on: Any) -> None:
    memory = on.pinned(32)
    memory.view("f8")[:] = range(4)
    x = Interface(cuda.zeros(4), data=(memory.ctypes.data, False))
    buffer = recognise("op", x)
    work = on.empty(4, np.dtype("f8"))
    with on.working():
        buffer.load(work)
        np.add(work, 1, out=work)
        buffer.store(work)
    np.testing.assert_array_equal(down(on, buffer.array), [1, 2, 3, 4])


def test_a_capture_is_refused(cuda: ModuleType, lazy: None) -> None:
    x = cuda.zeros(4)
    stream = cuda.cuda.Stream(non_blocking=True)
    blocking = cuda.cuda.Stream()
    held = recognise("op", x)
    message = r"op: x: work on cuda:0 is being captured into a CUDA graph.*before or after the capture"
    with stream:
        stream.begin_capture()
        with pytest.raises(DeviceError, match=message):
            recognise("op", x)
        with pytest.raises(DeviceError, match=message):
            recognise("op", Interface(x, stream=stream.ptr))
        with pytest.raises(DeviceError, match=message):
            recognise("op", Dlpack(x))
        with pytest.raises(DeviceError, match="work on cuda:0 is being captured"):
            held.library.ready(held)
        stream.end_capture()
        recognise("op", x)
    # The default stream can't be used while a stream is captured for which it would wait.
    with blocking:
        blocking.begin_capture()
    with pytest.raises(DeviceError, match=message):
        recognise("op", x)
    with blocking:
        blocking.end_capture()


def test_what_cuda_says_about_captures(
    cuda: ModuleType, module: Any, lazy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = cuda.cuda.runtime

    def raising(error: Exception) -> Callable[[int], bool]:
        def ask(stream: int) -> bool:
            raise error

        return ask

    assert not module.capturing(0, 0)
    monkeypatch.setattr(runtime, "streamIsCapturing", raising(RuntimeError("an error has invalidated the capture")))
    assert module.capturing(0, 0)
    monkeypatch.setattr(runtime, "streamIsCapturing", raising(runtime.CUDARuntimeError(700)))
    with pytest.raises(runtime.CUDARuntimeError):
        module.capturing(0, 0)


def test_refusals(cuda: ModuleType) -> None:
    x = cuda.zeros(4)
    with pytest.raises(DTypeError, match=r"op: out has dtype >f8, whose byte order is not this machine's; convert"):
        recognise("op", Interface(x, typestr=">f8"), "out")
    with pytest.raises(DTypeError, match=r"op: x: dtype object holds Python objects"):
        recognise("op", Interface(x, typestr="|O"))
    with pytest.raises(DeviceError, match=r"op: x is a Interface at 0x[0-9a-f]+, which is no memory of CUDA's"):
        recognise("op", Interface(x, data=(np.zeros(4).ctypes.data, False)))


def test_results_that_cupy_has_no_dtype_for(cuda: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        raise TypeError(f"{dtype} is not supported")

    odd = recognise("op", Interface(cuda.zeros(4), typestr="<f16", shape=(2,), strides=None))
    monkeypatch.setattr(cuda, "empty", refuse)
    with pytest.raises(DTypeError, match=r"cupy has no arrays of float128 \(.* is not supported\); pass out="):
        odd.library.empty(odd, (2,))


def test_an_empty_array_of_an_interface(cuda: ModuleType, on: Any) -> None:
    x = Interface(cuda.zeros((0, 3)), data=(0, False), shape=(0, 3))
    buffer = recognise("op", x)
    assert buffer.array.shape == (0, 3)
    assert buffer.array.on is on


@pytest.fixture(autouse=True)
def _no_stream_is_left_current(cuda: ModuleType) -> Iterator[None]:
    before = cuda.cuda.get_current_stream().ptr
    yield
    assert cuda.cuda.get_current_stream().ptr == before
