"""Arrays of cupy and of other libraries on CUDA devices."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.device_memory import down

from mpicoll.buffers import dtypes
from mpicoll.buffers.buffer import Buffer
from mpicoll.buffers.device import DeviceArray
from mpicoll.buffers.recognise import output, recognise
from mpicoll.errors import DeviceError, DTypeError

Array = np.ndarray[Any, Any]

PAIR = np.dtype([("value", "f8"), ("index", "i4")])


@pytest.fixture
def events(cuda: ModuleType) -> Any:
    from mpicoll.buffers.cuda import events

    return events


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
        with on.working([buffer.library.record_event(buffer)]):
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
        with on.working([made.library.record_event(made)]):
            made.array[...] = 7
        result = made.result()
        assert (result.shape, result.dtype) == ((2, 5), np.float32)
        assert (cuda.asnumpy(result) == 7).all()


def test_functions_get_cupys_arrays_on_the_memory(cuda: ModuleType, on: Any) -> None:
    buffer = recognise("op", cuda.arange(6, dtype="f8"))
    scratch = on.empty(6, np.dtype("f8"))
    with on.working([buffer.library.record_event(buffer)]):
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
    with on.working([buffer.library.record_event(buffer)]):
        np.copyto(buffer.array, words)
        buffer.load(work)
        np.add(work, 0.25, out=work)
        buffer.store(work)
    np.testing.assert_array_equal(down(on, buffer.array), (np.arange(5.0) + 0.25).astype(ml_dtypes.bfloat16))


def later(cuda: ModuleType, stream: Any) -> Any:
    """An array whose elements become 1 in `stream`, and are 0 before."""
    x = cuda.zeros(4)
    cuda.cuda.get_current_stream().synchronize()
    with stream:
        x += 1
    return x


def seen(on: Any, buffer: Buffer) -> float:
    ready = buffer.library.record_event(buffer)
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
    # numba's word for the default stream
    assert seen(on, recognise("op", Interface(later(cuda, cuda.cuda.Stream()), stream=None))) == 1
    # Before version 3 the interface had no word for it.
    old = Interface(later(cuda, cuda.cuda.Stream()), stream="absent", version=2)
    assert seen(on, recognise("op", old)) == 1


def test_cupys_current_stream(cuda: ModuleType, on: Any, lazy: None) -> None:
    stream = cuda.cuda.Stream(non_blocking=True)
    x = later(cuda, stream)
    buffer = recognise("op", x)
    assert seen(on, buffer) == 0
    with stream:
        ready = buffer.library.record_event(buffer)
    got = np.empty(4)
    with on.working([ready]):
        on.copy(got, buffer.array)
    assert (got == 1).all()


def test_a_result_is_cupys_whatever_the_interface_says(cuda: ModuleType, on: Any, lazy: None) -> None:
    stream = cuda.cuda.Stream(non_blocking=True)
    buffer = recognise("op", Interface(later(cuda, stream), stream=stream.ptr))
    made = buffer.library.empty(buffer, (4,))
    with on.working([made.library.record_event(made)]):
        made.array[...] = 3
    assert seen(on, buffer) == 1
    assert (cuda.asnumpy(made.result()) == 3).all()


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
    with on.working([buffer.library.record_event(buffer)]):
        got = np.empty(6, "f4")
        np.copyto(got, buffer.array)
    assert x.asked == asked + 1
    np.testing.assert_array_equal(got, np.arange(6))
    made = buffer.library.empty(buffer, (3,))
    with on.working([made.library.record_event(made)]):
        made.array[...] = 2
    result = made.result()
    assert isinstance(result, Dlpack)
    assert (cuda.asnumpy(result.x) == 2).all()
    assert isinstance(buffer.library.wrap(made.array), Dlpack)
    into = output("op", x, buffer, (6,))
    assert into.result() is x


class Both(Dlpack):
    """An array of a library whose work is on a stream for which no default stream waits. Its interface is of version 2
    and names none, as JAX's; DLPack makes the consumer's stream wait."""

    def __init__(self, x: Any, stream: Any = None, version: int = 2) -> None:
        super().__init__(x)
        self.stream = stream
        self.version = version

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        own = self.x.__cuda_array_interface__
        return {**own, "version": self.version, "stream": None, "data": (own["data"][0], True)}

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        with self.stream:
            return super().__dlpack__(stream=stream, **options)


@pytest.mark.parametrize("version", [2, 3])
def test_dlpack_orders_what_an_interface_leaves_open(cuda: ModuleType, on: Any, lazy: None, version: int) -> None:
    stream = cuda.cuda.Stream(non_blocking=True)
    buffer = recognise("op", Both(later(cuda, stream), stream, version))
    assert seen(on, buffer) == 1
    assert not buffer.array.flags.writeable
    with stream:
        buffer.user.x += 1
    assert seen(on, buffer) == 2
    assert isinstance(buffer.library.empty(buffer, (4,)).result(), Dlpack)


def test_an_interface_that_names_its_stream_is_taken(cuda: ModuleType, on: Any, lazy: None) -> None:
    class Named(Interface, Dlpack):
        def __dlpack__(self, **options: Any) -> Any:
            raise AssertionError

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.x.__dlpack_device__()

    stream = cuda.cuda.Stream(non_blocking=True)
    assert seen(on, recognise("op", Named(later(cuda, stream), stream=stream.ptr))) == 1


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
    memory = on.allocate_pinned(32)
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
            held.library.record_event(held)
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
    cuda: ModuleType, events: Any, lazy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = cuda.cuda.runtime

    def raising(error: Exception) -> Callable[[int], bool]:
        def ask(stream: int) -> bool:
            raise error

        return ask

    assert not events.is_capturing(0)
    monkeypatch.setattr(runtime, "streamIsCapturing", raising(RuntimeError("an error has invalidated the capture")))
    assert events.is_capturing(0)
    monkeypatch.setattr(runtime, "streamIsCapturing", raising(runtime.CUDARuntimeError(700)))
    with pytest.raises(runtime.CUDARuntimeError):
        events.is_capturing(0)


def test_refusals(cuda: ModuleType) -> None:
    x = cuda.zeros(4)
    with pytest.raises(DTypeError, match=r"op: out has dtype >f8, whose byte order is not this machine's; convert"):
        recognise("op", Interface(x, typestr=">f8"), "out")
    with pytest.raises(DTypeError, match=r"op: x: dtype object holds Python objects"):
        recognise("op", Interface(x, typestr="|O"))
    with pytest.raises(DeviceError, match=r"op: x is a Interface at 0x[0-9a-f]+, which is not CUDA memory"):
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
