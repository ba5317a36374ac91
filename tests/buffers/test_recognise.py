"""What is an array, and where its memory lies."""

from __future__ import annotations

import array
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from support.data import (
    DTYPES,
    LAYOUTS,
    LIBRARIES,
    Api,
    DLPack,
    Interface,
    dtype_of,
    has,
    has_layout,
    laid,
    numbers,
    random,
    wrap,
)

import mpicoll
from mpicoll.buffers.recognise import is_tensor, recognise
from mpicoll.errors import DeviceError, DTypeError


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_memory_is_seen_in_place(library: str, layout: str) -> None:
    seen = 0
    for name in DTYPES:
        for shape in ((), (0,), (3, 0), (4, 3)):
            if not has(library, name) or not has_layout(library, layout, shape):
                continue
            if library in ("python", "scalar") and shape:
                continue
            view = laid(numbers(random(name), name, shape), layout)
            buffer = recognise("op", wrap(library, view))
            assert buffer.dtype.name == dtype_of(name).name
            assert buffer.array.shape == shape
            if library in ("python", "scalar"):
                assert buffer.array.tobytes() == view.tobytes()
            else:
                assert not view.size or buffer.array.ctypes.data == view.ctypes.data
                # where an axis has at most one element its stride says nothing, and libraries differ
                assert view.size < 2 or buffer.array.strides == view.strides
            seen += 1
    assert seen or (library, layout) in {
        (one, other) for one in ("python", "scalar") for other in LAYOUTS if other != "contiguous"
    } | {("torch", "negative"), ("torch", "readonly")}


@pytest.mark.parametrize("name", [name for name in DTYPES if has("torch", name)])
def test_load_and_store_go_through_any_layout(name: str) -> None:
    for library in ("numpy", "torch"):
        for layout in ("contiguous", "strided", "fortran"):
            values = numbers(random(name), name, (4, 3))
            view = laid(values, layout)
            buffer = recognise("op", wrap(library, view))
            flat = np.empty(12, buffer.dtype.storage)
            buffer.load(flat)
            assert flat.tobytes() == values.tobytes()
            work = np.empty(12, buffer.dtype.work)
            buffer.load(work)
            np.testing.assert_array_equal(work.reshape(4, 3), values.astype(buffer.dtype.work))
            view[...] = np.zeros_like(view)
            buffer.store(work)
            assert view.tobytes() == values.tobytes()
            view[...] = np.zeros_like(view)
            buffer.store(flat)
            assert view.tobytes() == values.tobytes()


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_half_precision_is_rounded_to_nearest_even(library: str, name: str) -> None:
    digits = 10 if name == "float16" else 7
    step = 2.0**-digits
    work = np.array([1 + step / 2, 1 + 3 * step / 2, 1 + step * 0.51, np.nan, np.inf, -0.0], np.float32)
    view = np.zeros(6, dtype_of(name))
    recognise("op", wrap(library, view)).store(work)
    np.testing.assert_array_equal(view[:3].astype(float), [1, 1 + 2 * step, 1 + step])
    assert np.isnan(view[3])
    assert view[4] == np.inf
    assert np.signbit(view[5].astype(float))


@pytest.mark.parametrize(
    ("x", "kind", "expected"),
    [
        (True, "bool", bool),
        (3, "integer", int),
        (-(2**63), "integer", int),
        (1.5, "float", float),
        (1 + 2j, "complex", complex),
        (np.bool_(True), "bool", np.bool_),
        (np.uint8(3), "integer", np.uint8),
        (np.float64(3), "float", np.float64),
        (np.complex128(3), "complex", np.complex128),
        (np.float32(3), "float", np.float32),
        (ml_dtypes.bfloat16(3), "half", ml_dtypes.bfloat16),
        (np.datetime64("2020-01-01"), "opaque", np.datetime64),
    ],
    ids=lambda x: getattr(x, "__name__", repr(x)),
)
def test_numbers_come_back_as_what_they_were(x: Any, kind: str, expected: type) -> None:
    buffer = recognise("op", x)
    assert buffer.dtype.kind == kind
    assert buffer.array.shape == ()
    made = buffer.library.empty(buffer, ())
    made.store(buffer.array.flatten())
    assert type(made.result()) is expected
    assert made.result() == x
    assert type(buffer.library.empty(buffer, (2,)).result()) is np.ndarray


@pytest.mark.parametrize("x", [2**63, -(2**63) - 1])
def test_integers_beyond_int64(x: int) -> None:
    with pytest.raises(DTypeError, match=f"op: x={x} does not fit int64"):
        recognise("op", x)


@pytest.mark.parametrize(
    ("x", "dtype"),
    [
        (b"abc", "uint8"),
        (bytearray(b"abc"), "uint8"),
        (memoryview(np.arange(3, dtype="i2")), "int16"),
        (array.array("d", [1, 2, 3]), "float64"),
    ],
    ids=["bytes", "bytearray", "memoryview", "array"],
)
def test_buffer_protocol(x: Any, dtype: str) -> None:
    buffer = recognise("op", x)
    assert buffer.dtype.name == dtype
    assert buffer.array.shape == (3,)
    assert type(buffer.library.empty(buffer, (2,)).result()) is np.ndarray


def test_subclass_of_ndarray_gives_plain_arrays() -> None:
    class Mine(np.ndarray):
        pass

    x = np.zeros((2, 3)).view(Mine)
    buffer = recognise("op", x)
    assert type(buffer.array) is np.ndarray
    assert np.shares_memory(buffer.array, x)
    assert type(buffer.library.empty(buffer, (2,)).result()) is np.ndarray


@pytest.mark.parametrize("name", ["float32", "int8", "bool", "complex64", "bfloat16"])
def test_array_api_results_are_of_the_same_library(name: str) -> None:
    buffer = recognise("op", Api(np.zeros(3, dtype_of(name))))
    made = buffer.library.empty(buffer, (2,))
    made.store(np.ones(2, buffer.dtype.storage))
    result = made.result()
    assert type(result) is Api
    assert result.array.dtype == dtype_of(name)
    np.testing.assert_array_equal(result.array.astype(float) if name == "bfloat16" else result.array, np.ones(2))


def test_dlpack_of_a_dtype_that_numpy_lacks() -> None:
    with pytest.raises(DTypeError, match="op: x is a DLPack, which is not an array"):
        recognise("op", DLPack(np.zeros(3, ml_dtypes.bfloat16)))


def test_array_interface_wins_over_dlpack() -> None:
    class Both(Interface):
        def __dlpack__(self, **options: Any) -> Any:
            raise AssertionError

        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

    view = np.arange(3)
    assert recognise("op", Both(view)).array.ctypes.data == view.ctypes.data


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.complex32], ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_torch_dtypes_that_only_move(dtype: torch.dtype) -> None:
    words = {1: torch.uint8, 4: torch.int32}[dtype.itemsize]
    x = torch.arange(6).to(words).view(dtype).reshape(2, 3)
    buffer = recognise("op", x)
    assert buffer.dtype.kind == "opaque"
    assert buffer.dtype.storage.itemsize == dtype.itemsize
    assert buffer.array.tobytes() == x.view(words).numpy().tobytes()
    made = buffer.library.empty(buffer, (2, 3))
    made.store(buffer.array.flatten())
    assert made.result().dtype is dtype
    assert torch.equal(made.result().view(words), x.view(words))


def test_torch_tensor_that_requires_grad_is_detached() -> None:
    x = torch.ones(3, requires_grad=True)
    buffer = recognise("op", x)
    assert buffer.array.ctypes.data == x.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_torch_tensor_whose_storage_was_freed(dtype: torch.dtype) -> None:
    """numpy would allocate other memory for its elements."""

    def body() -> None:
        x = torch.ones(6, dtype=dtype)
        for _ in range(3):
            mpicoll.allreduce(x)
        tail = x[2:]
        x.untyped_storage().resize_(0)
        for one in (x, tail, torch.nn.Parameter(x)):
            with pytest.raises(DTypeError, match=r"allreduce: x has \d elements, but no memory"):
                mpicoll.allreduce(one)
        with pytest.raises(DTypeError, match="allreduce: out has 4 elements, but no memory"):
            mpicoll.allreduce(torch.ones(4, dtype=dtype), out=tail)
        assert mpicoll.allreduce(x[:0]).numel() == 0

    mpicoll.run_local(body, 1)


class Standing(torch.Tensor):
    """What stands for another tensor, as a DTensor does."""

    inner: torch.Tensor

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*[one.inner if isinstance(one, Standing) else one for one in args], **(kwargs or {}))
        return stand_for(result) if isinstance(result, torch.Tensor) else result


def stand_for(inner: torch.Tensor) -> Standing:
    made: Standing = torch.Tensor._make_wrapper_subclass(Standing, inner.shape, dtype=inner.dtype)
    made.inner = inner
    return made


def _within(transform: Callable[..., Any], x: torch.Tensor) -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        mpicoll.allreduce(x)
        return x.sum()

    transform(call)(x)


@pytest.mark.parametrize(
    "call",
    [
        lambda: mpicoll.allreduce(stand_for(torch.ones(3))),
        lambda: mpicoll.allreduce(torch.ones(3), out=stand_for(torch.ones(3))),
        lambda: mpicoll.allreduce(torch._efficientzerotensor((3,))),
        lambda: _within(torch.func.vmap, torch.ones(2, 3)),
        lambda: _within(torch.func.grad, torch.ones(3)),
        lambda: _within(torch.func.functionalize, torch.ones(3)),
    ],
    ids=["subclass", "out", "zeros", "vmap", "grad", "functionalize"],
)
def test_torch_tensor_that_stands_for_another(call: Callable[[], Any]) -> None:
    """numpy would allocate memory for it, although its type may be torch.Tensor."""

    def body() -> None:
        for _ in range(3):
            mpicoll.allreduce(torch.ones(3))
        with pytest.raises(DTypeError, match=r"allreduce: (x|out) is a \w+ that has no memory itself.*to_local"):
            call()

    mpicoll.run_local(body, 1)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_torch_tensor(layout: torch.layout) -> None:
    x = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    with pytest.raises(DTypeError, match=r"op: x is a nested tensor.*to_padded_tensor"):
        recognise("op", x)


@pytest.mark.parametrize("make", [torch.Tensor.conj, lambda x: x.conj().imag], ids=["conjugate", "negative"])
def test_lazy_torch_views_are_resolved_and_not_written(make: Any) -> None:
    x = make(torch.tensor([1 + 2j, 3 - 4j]))
    buffer = recognise("op", x)
    np.testing.assert_array_equal(buffer.array, x.resolve_conj().resolve_neg().numpy())
    assert not buffer.array.flags.writeable


@pytest.mark.parametrize(
    ("x", "words"),
    [
        ([1, 2], "op: argument is a list, which is not an array.*numpy.asarray"),
        (None, "NoneType"),
        ("text", "str"),
        (object(), "object"),
        ({1}, "set"),
        (np.ma.masked_array([1, 2], [0, 1]), "op: argument is a masked array.*fill"),
        (torch.eye(2).to_sparse(), "sparse_coo tensor.*to_dense"),
    ],
    ids=["list", "None", "str", "object", "set", "masked", "sparse"],
)
def test_what_is_no_array(x: Any, words: str) -> None:
    with pytest.raises(DTypeError, match=words):
        recognise("op", x, "argument")


@pytest.mark.parametrize("x", [np.array([None]), np.zeros(2, [("a", "O")])], ids=["object", "structured"])
def test_python_objects_have_no_bytes(x: Any) -> None:
    with pytest.raises(DTypeError, match=r"^op: argument.*objects.*"):
        recognise("op", x, "argument")


def test_torch_meta_tensor_has_no_memory() -> None:
    with pytest.raises(DeviceError, match=r"op: x is on meta.*x\.cpu\(\)"):
        recognise("op", torch.zeros(2, device="meta"))


@pytest.mark.parametrize(("device", "known"), [(1, True), (3, True), (11, True), (2, False), (8, False), (13, False)])
def test_dlpack_device_types(device: int, known: bool) -> None:
    class Exporter(DLPack):
        def __dlpack_device__(self) -> tuple[int, int]:
            return device, 5

        def __dlpack__(self, **options: Any) -> Any:
            assert known
            return self.array.__dlpack__()

    x = Exporter(np.arange(3))
    if known:
        assert recognise("op", x).array.tolist() == [0, 1, 2]
    else:
        with pytest.raises(DeviceError, match=f"op: x is a Exporter on DLPack device type {device}, index 5"):
            recognise("op", x)


def test_recognising_numpy_loads_no_other_library() -> None:
    program = (
        "import sys, numpy, mpicoll; mpicoll.allreduce(numpy.ones(2)); mpicoll.allreduce(1.0);"
        "print(sorted({'mpi4py', 'torch', 'cupy'} & set(sys.modules)))"
    )
    environ = {"PATH": "", "MPICOLL_TRANSPORT": "local"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environ, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_same_memory() -> None:
    x = np.zeros((4, 4))

    def buffer(view: np.ndarray) -> Any:
        return recognise("op", view)

    assert buffer(x).same_memory(buffer(x[:]))
    assert not buffer(x).same_memory(buffer(x.T))
    assert not buffer(x).same_memory(buffer(x[:2]))
    assert not buffer(x).same_memory(buffer(x.copy()))
    assert buffer(x).same_memory(recognise("op", torch.from_numpy(x)))


def test_overlap() -> None:
    x = np.zeros(10)
    assert recognise("op", x[:6]).overlaps(recognise("op", x[5:]))
    assert not recognise("op", x[:5]).overlaps(recognise("op", x[5:]))


@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_a_library_that_another_thread_is_importing(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, ModuleType(library))
    assert recognise("op", 1.5).array == 1.5
    assert not is_tensor(1.5)
