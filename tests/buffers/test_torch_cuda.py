"""torch's CUDA tensors as buffers, on the fake device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support import fake_cuda
from support.cuda_tensors import PLACE, CudaTensor, Stream, Tensors, cuda, cuda_torch, current_stream, late, now, on
from support.fake_cuda import fakecuda

from mpicoll.buffers.buffer import VIEWS, Buffer
from mpicoll.buffers.device import DeviceArray
from mpicoll.buffers.recognise import numpy_views, output, recognise
from mpicoll.errors import DeviceError, DTypeError, ShapeError

__all__ = ["cuda_torch"]

pytestmark = pytest.mark.usefixtures("cuda_torch")

STORAGE = {
    torch.bool: "bool",
    torch.uint8: "uint8",
    torch.int16: "int16",
    torch.uint32: "uint32",
    torch.int64: "int64",
    torch.float16: "float16",
    torch.bfloat16: "uint16",
    torch.float32: "float32",
    torch.float64: "float64",
    torch.complex64: "complex64",
    torch.float8_e5m2: "void8",
}
"""How numpy sees the memory of each dtype."""


def buffer_of(x: Any) -> Buffer:
    return recognise("op", x)


@pytest.mark.parametrize("dtype", STORAGE)
def test_dtypes(dtype: torch.dtype) -> None:
    x = cuda(torch.zeros(2, 3, dtype=dtype))
    buffer = buffer_of(x)
    array = buffer.array
    assert isinstance(array, DeviceArray)
    assert array.dtype.name == STORAGE[dtype]
    assert buffer.dtype.name == str(dtype).removeprefix("torch.")
    assert array.shape == (2, 3)
    assert array.ctypes.data == x.data_ptr()
    assert array.on.name == "cuda:0"
    assert array.flags.writeable
    # The same as on the CPU, so that it is reduced alike.
    assert buffer.dtype == buffer_of(torch.zeros(2, 3, dtype=dtype)).dtype


LAYOUTS = {
    "whole": lambda x: x,
    "transposed": lambda x: x.t(),
    "strided": lambda x: x[1:, ::2],
    "row": lambda x: x[2],
    "element": lambda x: x[1, 1],
    "empty": lambda x: x[:, :0],
    "expanded": lambda x: x[:, :1].expand(4, 3),
    "unsqueezed": lambda x: x.unsqueeze(1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    """Strides in bytes, and where the first element is."""
    x = LAYOUTS[layout](cuda(torch.arange(24, dtype=torch.int32).view(4, 6)))
    array = buffer_of(x).array
    assert array.shape == tuple(x.shape)
    assert array.size == 0 or array.strides == tuple(4 * step for step in x.stride())
    assert array.size == 0 or array.ctypes.data == x.data_ptr()


def test_memory_lives_as_long_as_a_view_of_it() -> None:
    with on(Stream()):
        view = buffer_of(cuda(torch.full((1000,), 3.0))).array[10:20]
        current_stream().synchronize()
        cuda(torch.full((1000,), 4.0))  # would get the memory, if that were free
        current_stream().synchronize()
        found = fakecuda.working_view(view.ctypes.data, view.shape, view.dtype)
        np.testing.assert_array_equal(found, np.full(10, 3.0))


def test_what_is_conjugated_lazily_is_resolved_and_read_only() -> None:
    x = cuda(torch.tensor([1 + 2j, 3j]))
    for lazy, want in ((x.conj(), [1 - 2j, -3j]), (x.conj().imag, [-2.0, -3.0])):
        buffer = buffer_of(lazy)
        assert not buffer.array.flags.writeable
        assert buffer.user.tolist() == want
        with pytest.raises(ShapeError, match="read-only"):
            output("op", lazy, buffer_of(lazy), tuple(lazy.shape))


def test_a_tensor_that_requires_grad() -> None:
    x = cuda(torch.ones(3), requires_grad=True)
    buffer = buffer_of(x)
    assert buffer.array.ctypes.data == x.data_ptr()
    assert not buffer.user.requires_grad
    assert buffer_of(torch.nn.Parameter(x)).array.ctypes.data == x.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_results(dtype: torch.dtype) -> None:
    like = buffer_of(cuda(torch.zeros(3, dtype=dtype)))
    made = like.library.empty(like, (2, 4))
    result = made.result()
    assert type(result) is CudaTensor
    assert result.dtype is dtype
    assert tuple(result.shape) == (2, 4)
    assert made.array.ctypes.data == result.data_ptr()
    assert made.array.flags.c_contiguous
    assert made.dtype == like.dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_what_a_function_of_the_users_sees(dtype: torch.dtype) -> None:
    with on(Stream()):
        x = cuda(torch.tensor([[1, 0, 1], [0, 0, 1]]).to(dtype))
        buffer = buffer_of(x)
        seen = buffer.library.wrap(buffer.array[:, ::2])
        assert seen.data_ptr() == x.data_ptr()
        assert seen.dtype is dtype
        assert torch.equal(seen.cpu(), torch.tensor([[1, 1], [0, 1]]).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_converted_on_the_device(dtype: torch.dtype) -> None:
    values = torch.tensor([1.0, 2.5, -3.0, float("inf")])
    with on(Stream()):
        half, wide = buffer_of(late(values.to(dtype))), buffer_of(cuda(torch.zeros(4)))
        device = half.array.on  # type: ignore[attr-defined]
        with device.working([half.library.record_event(half)]):
            half.library.convert(half.array, wide.array, half.dtype)
        assert torch.equal(now(wide.user), values)
        back = half.library.empty(half, (4,))
        with device.working():
            half.library.convert(wide.array, back.array, half.dtype)
        assert torch.equal(now(back.result()), values.to(dtype))


def test_ready_is_what_torchs_current_stream_has_been_given() -> None:
    """The stream of the thread that asks, up to then and no more."""
    with on(Stream()):
        x = late(torch.ones(3))
        buffer = buffer_of(x)
        device = buffer.array.on  # type: ignore[attr-defined]
        assert not torch.equal(now(x), torch.ones(3))
        ready = buffer.library.record_event(buffer)
        later = fakecuda.delay(current_stream().cuda_stream)
        with on(Stream()), device.working([ready]):
            pass
        assert torch.equal(now(x), torch.ones(3))
        assert not later.ran


def test_numpy_is_not_asked_for_a_view() -> None:
    x = cuda(torch.ones(3))
    assert VIEWS[torch.Tensor](x) is None
    assert numpy_views(torch.ones(3), x) is None


def test_a_capture_is_refused() -> None:
    x = cuda(torch.ones(3))
    with Tensors().capturing(), pytest.raises(DeviceError, match=r"op: x.* cuda:0 .*graph"):
        buffer_of(x)
    buffer_of(x)


def test_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    x = cuda(torch.ones(3))
    fake_cuda.hide_cupy(monkeypatch)
    with pytest.raises(DeviceError, match=r'op: x is on cuda:0, for which mpicoll needs cupy.*pip install "mpicoll\['):
        buffer_of(x)


def test_other_devices_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceError, match=r"op: x is on meta.*x\.cpu\(\)"):
        buffer_of(torch.ones(3, device="meta"))
    x = cuda(torch.ones(3))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(DeviceError, match=r"op: x is on cuda:0 of ROCm 6\.4.*x\.cpu\(\)"):
        buffer_of(x)


def test_a_tensor_without_memory_is_refused() -> None:
    """Such as a DTensor, whose address is 0."""
    x = cuda(torch.ones(3))
    nothing = {"address": 0, "data_ptr": lambda _: 0, "nbytes": lambda _: x.nbytes}
    x.memory = type("Nothing", (), nothing)()
    with pytest.raises(DTypeError, match=r"op: x is a CudaTensor that has no memory itself.*to_local"):
        buffer_of(x)
    assert buffer_of(cuda(torch.ones(0))).array.size == 0


def test_outputs_must_be_on_the_same_device() -> None:
    x = cuda(torch.ones(3))
    with pytest.raises(DeviceError, match=r"op: x lies on cuda:0, out on the host"):
        output("op", torch.ones(3), buffer_of(x), (3,))
    with pytest.raises(DeviceError, match=r"op: x lies on the host, out on cuda:0"):
        output("op", x, buffer_of(torch.ones(3)), (3,))
    assert output("op", x, buffer_of(x), (3,)).array.ctypes.data == x.data_ptr()
    assert x.device == PLACE
