"""torch tensors on the fake device of :mod:`fakecuda`, for a torch without CUDA.

A tensor here has the shape and dtype of one on ``cuda:0``, and its memory there. What torch would launch on the current
stream is queued on the fake's, and finds its memory only when it runs; memory that is freed serves the next tensor of
the same stream at once, as with torch's allocator. Where torch's C++ looks, the device is the CPU: it knows no other.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_map

import mpicoll
from support import fake_cuda
from support.device_bodies import DTYPES
from support.fake_cuda import fakecuda

streams = fakecuda.streams

PLACE = torch.device("cuda", 0)

_aten = torch.ops.aten

_WAITS = (_aten._local_scalar_dense.default, _aten.equal.default)
"""Operations that return values to the host."""


class Stream:
    """As ``torch.cuda.Stream``. `pointer`: one that there is already."""

    def __init__(self, device: Any = None, pointer: int | None = None) -> None:
        self._kept = streams.Stream(0, blocking=False) if pointer is None else streams.stream_at(pointer)
        self.cuda_stream = self._kept.ptr if pointer is None else pointer
        self.device = PLACE

    def record_event(self) -> Event:
        return Event(self)

    def wait_event(self, event: Event) -> None:
        event.fake.hold_back(self._kept)

    def synchronize(self) -> None:
        fakecuda.synchronize(self.cuda_stream)


class Event:
    """As ``torch.cuda.Event``, recorded."""

    def __init__(self, stream: Stream) -> None:
        self.fake = streams.Event(0)
        self.fake.record(stream._kept)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        self.fake.wait()


class _Here(threading.local):
    stream: Stream | None = None


_here = _Here()


def current_stream(device: Any = None) -> Stream:
    return Stream(pointer=0) if _here.stream is None else _here.stream


@contextmanager
def on(stream: Stream) -> Iterator[None]:
    """As ``torch.cuda.stream``."""
    before, _here.stream = _here.stream, stream
    try:
        yield
    finally:
        _here.stream = before


_freed: dict[tuple[int, int], list[int]] = {}
"""Addresses by the stream for which they were allocated, and size."""


class Memory:
    """An allocation; None for `nbytes` where it is somebody else's, who is its `owner`."""

    def __init__(self, nbytes: int | None, address: int = 0, owner: Any = None) -> None:
        self.address = address
        self._owner = owner
        self._key: tuple[int, int] | None = None
        if nbytes:
            self._key = current_stream().cuda_stream, nbytes
            idle = _freed.setdefault(self._key, [])
            self.address = idle.pop() if idle else fakecuda.allocate(nbytes, 0)

    def __del__(self) -> None:
        if self._key is not None:
            _freed[self._key].append(self.address)

    @property
    def stream(self) -> int | None:
        """For which it was allocated."""
        return None if self._key is None else self._key[0]

    def data_ptr(self) -> int:
        return self.address


class CudaTensor(torch.Tensor):
    """A tensor on ``cuda:0``."""

    memory: Memory

    __torch_function__ = torch._C._disabled_torch_function_impl

    is_cpu = property(lambda self: False)
    is_cuda = property(lambda self: True)
    device = property(lambda self: PLACE)

    @staticmethod
    def __new__(cls, like: torch.Tensor, memory: Memory, requires_grad: bool = False) -> Any:
        """Of the shape, strides and dtype of `like`."""
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            like.size(),
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=like.dtype,
            device="cpu",
            requires_grad=requires_grad,
        )
        made.memory = memory
        return _lazy(made, like.is_conj(), like.is_neg())

    def data_ptr(self) -> int:
        return self.memory.address + self.storage_offset() * self.element_size() if self.numel() else 0

    def untyped_storage(self) -> Any:
        return self.memory

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu()")

    def cpu(self) -> torch.Tensor:
        """The values, when all that the current stream was given is done."""
        current_stream().synchronize()
        return _found(_place(self)).clone()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def record_stream(self, stream: Stream) -> None:
        """Not faked: memory of another stream is not used again before the next tensor of its own."""

    def __repr__(self, **options: Any) -> str:
        return f"<{self.dtype} {list(self.shape)} on cuda:0 at {self.data_ptr():#x}>"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = "meta"
        if function in _WAITS:
            current_stream().synchronize()
            return function(*tree_map(lambda one: _found(_place(one)) if isinstance(one, cls) else one, args), **kwargs)
        shown = function(*tree_map(_shown, args), **tree_map(_shown, kwargs))
        returns = [one.alias_info for one in function._schema.returns]
        if all(one is not None and not one.is_write for one in returns):
            return tree_map(lambda one: CudaTensor(one, args[0].memory), shown)
        if any(one is not None for one in returns):
            result: Any = kwargs["out"] if "out" in kwargs else args[0]
        else:
            result = tree_map(_like, shown)
        if "empty" not in function.__name__:
            _launch(function, args, kwargs, result)
        return result


def _lazy(tensor: Any, conjugated: bool, negated: bool) -> Any:
    """`tensor`, which is from now on what stands for the conjugate, or the negative, of what lies there."""
    if conjugated:
        torch._C._set_conj(tensor, True)
    if negated:
        torch._C._set_neg(tensor, True)
    return tensor


def _reach(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements from the first to the end of the last, including gaps."""
    return 1 + sum((extent - 1) * step for extent, step in zip(shape, strides, strict=True))


def _shown(one: Any) -> Any:
    """On the meta device, with the same place in memory of its own."""
    if not isinstance(one, torch.Tensor):
        return one
    if not isinstance(one, CudaTensor):
        return one if not one.dim() else one.to("meta")
    reach = one.storage_offset() + _reach(one.shape, one.stride())
    whole = torch.empty(max(0, reach), dtype=one.dtype, device="meta")
    return _lazy(whole.as_strided(one.shape, one.stride(), one.storage_offset()), one.is_conj(), one.is_neg())


def _like(shown: Any) -> Any:
    if not isinstance(shown, torch.Tensor):
        return shown
    reach = _reach(shown.shape, shown.stride())
    return CudaTensor(shown, Memory((reach if shown.numel() else 0) * shown.element_size()))


def _place(one: CudaTensor) -> tuple[Any, ...]:
    """All that work has to know; it doesn't keep memory from being freed."""
    return one.data_ptr(), tuple(one.shape), one.stride(), one.dtype, one.is_conj(), one.is_neg()


def _found(place: tuple[Any, ...]) -> torch.Tensor:
    """The memory as work finds it."""
    address, shape, strides, dtype, conjugated, negated = place
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    reach = _reach(shape, strides)
    data = fakecuda.working_view(address, (reach * dtype.itemsize,), np.uint8)
    return _lazy(torch.from_numpy(data).view(dtype).as_strided(shape, strides), conjugated, negated)


class _Argument:
    """A tensor on the device, for work."""

    def __init__(self, tensor: CudaTensor) -> None:
        self.place = _place(tensor)


def _kept(one: Any) -> Any:
    if isinstance(one, CudaTensor):
        return _Argument(one)
    return one.clone() if isinstance(one, torch.Tensor) else one


def _launch(function: Any, args: Any, kwargs: Any, result: Any) -> None:
    args, kwargs = tree_map(_kept, (args, {key: value for key, value in kwargs.items() if key != "device"}))
    targets = _kept(result) if isinstance(result, CudaTensor) else [_kept(one) for one in result]

    def kernel() -> None:
        there = lambda one: _found(one.place) if isinstance(one, _Argument) else one  # noqa: E731
        with torch.no_grad():
            made = function(*tree_map(there, args), **tree_map(there, kwargs))
            pairs = [(targets, made)] if isinstance(targets, _Argument) else list(zip(targets, made, strict=True))
            for target, one in pairs:
                goal = _found(target.place)
                if goal.data_ptr() != one.data_ptr():
                    goal.copy_(one)

    fakecuda.enqueue(current_stream().cuda_stream, kernel, 0)


def cuda(x: torch.Tensor, *, requires_grad: bool = False) -> Any:
    """`x` on the device, copied there by the current stream, strides and all."""
    made = _like(x.detach().to("meta"))
    if made.stride() != x.stride():
        made = CudaTensor(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"), made.memory)
    _launch(_aten.copy_.default, (made, x.detach()), {}, made)
    return made.requires_grad_(requires_grad)


def late(values: torch.Tensor, *, requires_grad: bool = False) -> Any:
    """A tensor on the device that has other values until what the current stream was given is done."""
    values = values.detach()
    made = cuda(torch.full_like(values, 1) if values.dtype == torch.bool else torch.full_like(values, 99))
    current_stream().synchronize()
    _launch(_aten.copy_.default, (made, values), {}, made)
    return made.requires_grad_(requires_grad)


def now(tensor: Any) -> torch.Tensor:
    """Return the current values, without waiting for pending work."""
    return _found(_place(tensor)).clone()


def _empty(*size: Any, device: Any = None, **options: Any) -> Any:
    if device is None or torch.device(device).type != "cuda":
        return _CREATE["empty"](*size, device=device, **options)
    return _like(_CREATE["empty"](*size, device="meta", **options))


def _as_tensor(data: Any, *args: Any, device: Any = None, **options: Any) -> Any:
    interface = getattr(data, "__cuda_array_interface__", None)
    if interface is None:
        return _CREATE["as_tensor"](data, *args, device=device, **options)
    shown = torch.from_numpy(np.empty(interface["shape"], interface["typestr"]))
    strides = [step // shown.element_size() for step in interface["strides"]]
    shown = torch.empty_strided(interface["shape"], strides, dtype=shown.dtype, device="meta")
    return CudaTensor(shown, Memory(None, interface["data"][0], owner=data))


def _filled(name: str) -> Callable[..., Any]:
    """Return a function that creates a tensor and fills it."""

    def create(*args: Any, device: Any = None, **options: Any) -> Any:
        if device is None or torch.device(device).type != "cuda":
            return _CREATE[name](*args, device=device, **options)
        return cuda(_CREATE[name](*args, **options))

    return create


_NAMES = ("empty", "as_tensor", "arange", "ones")
_CREATE: dict[str, Callable[..., Any]] = {name: getattr(torch, name) for name in _NAMES}


def _init_future(self: Any, *, devices: Any = None) -> None:
    """torch's C++ refuses futures of devices that it does not know."""
    self.of_devices = devices
    torch._C.Future.__init__(self, [])


@pytest.fixture
def cuda_torch(cuda: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch on the fake device, in all threads."""
    if not fake_cuda.is_fake(cuda):
        pytest.skip("there is a real device, on which nothing can be played")
    for name, value in {
        "Stream": Stream,
        "ExternalStream": lambda pointer, device: Stream(device, pointer),
        "current_stream": current_stream,
        "stream": on,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_device_capability": lambda device=None: (9, 0),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    # MPI's world outlives the fake device of the test before.
    mpicoll.world()._core.devices = None
    monkeypatch.setattr(torch, "empty", _empty)
    monkeypatch.setattr(torch, "as_tensor", _as_tensor)
    monkeypatch.setattr(torch, "arange", _filled("arange"))
    monkeypatch.setattr(torch, "ones", _filled("ones"))
    monkeypatch.setattr(torch.futures.Future, "__init__", _init_future)
    yield
    # Each piece keeps a file open, and there may be no more than a thousand of them.
    for idle in list(_freed.values()):
        while idle:
            fakecuda.free(idle.pop())


class Tensors:
    """For the bodies of device_bodies.py."""

    name = "torch"
    layouts = ("contiguous", "strided", "transposed")
    dtypes = DTYPES
    played = True
    devices = 1

    def put(self, values: np.ndarray) -> Any:
        values = np.array(values, order="C")
        if values.dtype == ml_dtypes.bfloat16:
            return cuda(torch.from_numpy(values.view(np.int16)).view(torch.bfloat16))
        return cuda(torch.from_numpy(values))

    def get(self, array: Any) -> np.ndarray:
        found = array.cpu()
        if found.dtype is torch.bfloat16:
            words: np.ndarray = found.view(torch.int16).numpy()
            return words.view(ml_dtypes.bfloat16)
        values: np.ndarray = found.numpy()
        return values

    def assign(self, target: Any, source: Any) -> None:
        target.copy_(source)

    def is_one(self, array: Any) -> bool:
        return type(array) is CudaTensor

    def dtype_name(self, array: Any) -> str:
        return str(array.dtype).removeprefix("torch.")

    def address(self, array: Any) -> int:
        return int(array.data_ptr())

    def stream(self) -> AbstractContextManager[Any]:
        return on(Stream())

    def wait(self) -> None:
        current_stream().synchronize()

    def delay(self) -> None:
        """Work is always late."""

    def used(self) -> int:
        return 0

    def forget(self) -> None:
        gc.collect()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        with on(Stream()):
            stream = current_stream()._kept
            streams.begin_capture(stream, streams.THREAD_LOCAL)
            try:
                yield
            finally:
                streams.end_capture(stream)

    def interface(self, array: Any) -> Any:
        return _Interface(array)


class _Interface:
    def __init__(self, array: CudaTensor) -> None:
        self._array = array
        self.__cuda_array_interface__ = {
            "version": 3,
            "data": (array.data_ptr(), False),
            "shape": tuple(array.shape),
            "typestr": torch.empty(0, dtype=array.dtype).numpy().dtype.str,
            "strides": tuple(step * array.element_size() for step in array.stride()),
            "stream": current_stream().cuda_stream or 1,
        }
