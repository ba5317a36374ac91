"""Device memory in numpy's terms, and what the engine needs of a device.

A :class:`DeviceArray` has the shape, strides, dtype and address of device memory, and all of numpy that only looks at
these. Operations on the memory become work of its device: copies and ufuncs reach it through numpy's own protocols,
from any caller, and all others raise instead of reading memory that the host may not read.

Work of a device runs in the order in which a thread submits it, and separately from the caller's streams: it is
submitted inside of ``with device.working(after)``, begins when all of `after` is done, and is done when the block is
left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias, cast

import numpy as np

from mpicoll.buffers.dtypes import Array
from mpicoll.errors import DeviceError, DTypeError
from mpicoll.named_tuple import NamedTuple

StreamEvent: TypeAlias = Any
"""An event that was recorded on a caller's stream; it must be done before the memory may be touched."""


class Event(Protocol):
    """A point in the work of a device."""

    def wait(self) -> None:
        """Return when all work submitted before is done."""

    def done(self) -> bool:
        """Return True if all work submitted before is done."""


class Words(Protocol):
    """Words of 32 bits in memory of the host that a device can access. The host may read and write them too."""

    def write(self, offset: int, value: int) -> None:
        """Write the word at `offset` (in bytes), given as work: what all earlier work has written is visible then to
        the host and to all devices."""

    def wait(self, offset: int, value: int) -> None:
        """Begin all later work when the word at `offset` is at least `value`, in cyclic order: a word that is ahead of
        `value` by less than 2**31. It occupies no processor of the device meanwhile."""


class Export(NamedTuple):
    """Device memory that other processes of the node can reach: the allocation in which it lies, identified by
    `number` within the process, and its position there. `handle` opens the allocation in other processes, `process`
    uniquely identifies the process that made it, `address` is the begin of the allocation in that process."""

    process: str
    device: str
    number: int
    handle: bytes
    address: int
    nbytes: int
    offset: int


class Device(Protocol):
    """A device whose memory the host can't reach, as this process sees it. Safe for several threads.

    `name` is what a caller calls it (``cuda:0``), `kind` its first part (``cuda``), `identity` names it among all
    devices of all nodes, `model` is what its maker calls all that are alike.
    """

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def identity(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def stream(self) -> int:
        """The stream of this thread's work, as libraries of its kind take it."""

    def empty(self, count: int, dtype: np.dtype[Any]) -> DeviceArray:
        """Allocate scratch memory: flat, contiguous, not filled."""

    def allocate_pinned(self, nbytes: int) -> Array:
        """Allocate page-locked host memory (flat ``uint8``). It returns to a pool when it is unreferenced."""

    def register_host_memory(self, memory: Array) -> None:
        """Page-lock contiguous host memory until it is freed. Does nothing a second time, nor where the system
        refuses."""

    def record_caller(self, stream: int) -> StreamEvent | None:
        """Record an event on a caller's `stream`, to be done before memory may be touched; None if the stream is being
        captured into a graph."""

    def reuse_event(self, event: StreamEvent) -> None:
        """Let :meth:`record_caller` record `event` again, for which no wait is left."""

    def working(self, after: Sequence[StreamEvent] = ()) -> AbstractContextManager[None]:
        """Submit work from this thread in the block. It begins when `after` is done. The block ends when all submitted
        work is done, also if it raises. May be nested: the inner block waits likewise."""

    def submitting(self, after: Sequence[StreamEvent] = ()) -> AbstractContextManager[None]:
        """As :meth:`working`, but the block ends when all work is submitted, unless it raises. The arrays must live
        until the work is done."""

    def record_submitted(self) -> tuple[StreamEvent, list[Any]]:
        """Record an event, inside of ``submitting``, after all work that this thread has submitted, and return it with
        the host memory that this work uses. :meth:`reuse_event` takes it."""

    def follow(self, event: StreamEvent) -> None:
        """Have the work that this thread submits next begin when `event` is done."""

    def block_stream(self, stream: int, event: StreamEvent) -> None:
        """Have the later work of a caller's `stream` begin when `event` is done. The host does not wait."""

    def is_done(self, event: StreamEvent) -> bool:
        """Return True if `event` is done. Raises the error of work before it."""

    def wait_for(self, event: StreamEvent) -> None:
        """Wait on the host until `event` is done."""

    def make_words(self, memory: Array) -> Words:
        """Return words in contiguous `memory` of the host, for the streams of this device. Raises DeviceError if it
        can't access them."""

    def synchronize(self) -> None:
        """Wait, inside of ``working``, for all work that this thread has submitted. Then the host, MPI and other ranks
        may touch the memory."""

    def record_event(self) -> Event:
        """Record an event, inside of ``working``, after all work that this thread has submitted."""

    def copy(self, target: Array, source: Any) -> None:
        """``target[...] = source``, given as work: of one dtype, of any strides, broadcast as numpy does. Either may
        be host memory, which must stay as it is until the work is done; `source` may be a number."""

    def apply(self, ufunc: str, inputs: Sequence[Any], out: DeviceArray) -> None:
        """Numpy's ufunc of that name on arrays of the device and numbers, given as work, with ``casting="unsafe"``."""

    def convert(self, source: Array, target: Array, dtype: str) -> None:
        """``target[...] = source``, given as work, between float32 and the half precision `dtype` (``float16``, or
        ``bfloat16`` as words of 16 bits), either way, rounding to nearest. Either may be host memory, as in copy."""

    def fold(self, op: str, parts: Sequence[DeviceArray], outs: Sequence[DeviceArray], dtype: str) -> None:
        """Write the combination of `parts`, in their order, to each of `outs`, given as one piece of work.

        `op` is one of sum, avg, premul_sum (which sums), prod, min, max (NaN wins), band, bor, bxor, land, lor, lxor.
        All are flat, contiguous, of equal size and of the dtype named `dtype`; float16 and bfloat16 (as words of 16
        bits) are combined in float32 and rounded once. An out may be the memory of a part, and overlaps no other.
        """

    def bind_fold(
        self, op: str, parts: Sequence[DeviceArray], outs: Sequence[DeviceArray], dtype: str
    ) -> Callable[[], None]:
        """Return a function that calls :meth:`fold` with these arguments, which it keeps alive, each time in less
        time."""

    def bind_copy(self, target: DeviceArray, source: DeviceArray) -> Callable[[], None]:
        """Return a function that calls :meth:`copy` with these arguments, likewise. Both are contiguous, of one size
        and dtype, and share no memory."""

    def export(self, memory: DeviceArray) -> Export | None:
        """Return how other processes reach `memory`; None if they can't."""

    def is_exported(self, address: int, number: int) -> bool:
        """Return True if the memory at `address` lies in the allocation of that number, an :class:`Export`'s."""

    def reach(self, export: Export) -> DeviceArray:
        """Return the whole allocation of another process (or of this one) as bytes; it stays open while that lives.

        Raises DeviceError if it can't be opened.
        """


class DeviceArray(np.ndarray[Any, Any]):
    """Memory of the device ``on``; see the module. Made by :func:`view`."""

    on: Device

    @property
    def address(self) -> int:
        """The address of the first element."""
        found: int | None = self.__dict__.get("_address")
        if found is None:
            found = self._address = int(self.__array_interface__["data"][0])
        return found

    def __array_finalize__(self, origin: Any) -> None:
        if origin is not None:
            self.on = getattr(origin, "on", None)  # type: ignore[assignment]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.on.copy(self[key], value)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, (str, slice)):
            return super().__getitem__(key)
        # With an ellipsis numpy gives an array where it would read an element.
        places = key if isinstance(key, tuple) else (key,)
        return super().__getitem__(places if any(one is ... for one in places) else (*places, ...))

    def reshape(self, *shape: Any, **options: Any) -> Any:
        if not self.flags.c_contiguous:
            raise self._untouchable("reshape")  # numpy would copy
        return super().reshape(*shape, **options)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if function is np.copyto and kwargs.get("where", True) is True:
            target, source = args
            self.on.copy(target, source)
            return None
        if function in (np.may_share_memory, np.shape, np.ndim, np.size):
            return super().__array_function__(function, types, args, kwargs)
        raise self._untouchable(function.__name__)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        (out,) = options.get("out") or (None,)
        if method != "__call__" or not isinstance(out, DeviceArray):
            raise self._untouchable(f"{ufunc.__name__}.{method}")
        self.on.apply(ufunc.__name__, inputs, out)
        return out

    def _untouchable(self, what: str) -> DeviceError:
        return DeviceError(
            f"{what}: the host can't read memory of {self.on.name}; copy it to the host first (cupy.asnumpy, .cpu())"
        )

    def __repr__(self) -> str:
        return f"<{self.dtype}{list(self.shape)} on {self.on.name} at {self.ctypes.data:#x}>"

    __str__ = __repr__

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise self._untouchable("numpy")

    __array__ = tolist = item = tobytes = copy = astype = __bool__ = __float__ = __int__ = __reduce__ = _refuse
    __iter__ = __contains__ = fill = sum = any = all = min = max = flatten = ravel = _refuse


class _Place:
    """The array interface of device memory, with the owner that an array keeps alive."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, interface: dict[str, Any], owner: Any) -> None:
        self.__array_interface__ = interface
        self.owner = owner


def view(
    on: Device,
    address: int,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    strides: tuple[int, ...] | None = None,
    owner: Any = None,
    *,
    writable: bool = True,
) -> DeviceArray:
    """Return the memory of `on` at `address`, with `strides` in bytes (None: C order). `owner` lives as long as the
    returned array, or any view of it."""
    interface = {
        "version": 3,
        "data": (address, not writable),
        "shape": shape,
        # Names of dtypes that the interface has no word for (ml_dtypes) are lost in it.
        "typestr": f"|V{dtype.itemsize}",
        "strides": strides,
    }
    memory: DeviceArray = np.asarray(_Place(interface, owner)).view(DeviceArray)
    memory.on = on
    return cast(DeviceArray, memory.view(dtype))


def device_of(*arrays: Array | None) -> Device | None:
    """Return the device on which `arrays` lie; None if they lie on the host."""
    for array in arrays:
        if isinstance(array, DeviceArray):
            return array.on
    return None


def empty_beside(array: Array, count: int, dtype: np.dtype[Any] | None = None) -> Array:
    """Allocate flat scratch memory, not filled, where `array` lies; of its dtype, if none is given."""
    wanted = array.dtype if dtype is None else dtype
    return array.on.empty(count, wanted) if isinstance(array, DeviceArray) else np.empty(count, wanted)


def on_host(array: Array) -> Array:
    """Return the elements of `array` in memory that the host can read."""
    if not isinstance(array, DeviceArray):
        return array
    found = np.empty(array.shape, array.dtype)
    with array.on.working():
        np.copyto(found, array)
    return found


def find_kernel_failure(device: Device) -> str | None:
    """Return the reason why kernels can't be compiled for `device`, or don't work there; None if they do. Compiles and
    runs one."""
    given = np.arange(256, dtype=np.uint8)
    try:
        with device.working():
            host = device.allocate_pinned(2 * given.nbytes).reshape(2, -1)
            host[0] = given
            source, target = (device.empty(given.size, given.dtype) for _ in range(2))
            device.copy(source, host[0])
            device.fold("max", [source], [target], "uint8")
            device.copy(host[1], target)
    except Exception as error:  # noqa: BLE001  each way to find and call a compiler has exceptions of its own
        first = next(iter(str(error).strip().splitlines()), "")
        return f"no kernel can be compiled for {device.name}, or none runs there: {type(error).__name__}: {first}"
    return None if np.array_equal(host[1], given) else f"a kernel on {device.name} computes wrong results"


def check_same_place(operation: str, one: Array, other: Array, names: tuple[str, str] = ("x lies", "out")) -> None:
    """Raise DeviceError, naming both places, unless both arrays lie on the same device, or both on the host."""
    here, there = device_of(one), device_of(other)
    if here is not there:
        places = ["the host" if device is None else device.name for device in (here, there)]
        raise DeviceError(
            f"{operation}: {names[0]} on {places[0]}, {names[1]} on {places[1]}; both must be on the same device"
        )


class DeviceMemory(NamedTuple):
    """A CUDA array as its ``__cuda_array_interface__`` (version 2 or 3) describes it.

    `strides` are in bytes, or None for C order; `stream` is the interface's: None if nothing needs to be waited for.
    """

    pointer: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    strides: tuple[int, ...] | None
    readonly: bool
    stream: int | None


def describe(x: Any) -> DeviceMemory:
    """Read the CUDA array interface of `x`. Raises DTypeError if it is malformed or has a mask."""
    interface = x.__cuda_array_interface__
    try:
        pointer, readonly = interface["data"]
        strides = interface.get("strides")
        memory = DeviceMemory(
            pointer=int(pointer),
            shape=tuple(int(extent) for extent in interface["shape"]),
            dtype=np.dtype(interface["typestr"]),
            strides=None if strides is None else tuple(int(stride) for stride in strides),
            readonly=bool(readonly),
            stream=interface.get("stream"),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DTypeError(f"{type(x).__name__}: malformed __cuda_array_interface__ {interface!r}: {error}") from error
    if interface.get("mask") is not None:
        raise DTypeError(f"{type(x).__name__}: a CUDA array with a mask can't be sent; fill it first")
    return memory
