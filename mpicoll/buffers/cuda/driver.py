"""The current device and the capture mode of a thread, and functions of the CUDA driver that cupy lacks."""

from __future__ import annotations

import ctypes
import threading
from contextlib import suppress
from functools import lru_cache
from typing import Any

from cupy.cuda import runtime

_RELAXED = 2
_BUFFER_ID = 7
_WORD_OPERATIONS = "cuStreamWriteValue32_v2", "cuStreamWaitValue32_v2"


_thread = threading.local()


class CurrentDevice:
    """A block in which the device of that number is current.

    The device that was current before is restored, unless this process does not use it: a thread begins with device 0,
    and to select it would create a context of hundreds of megabytes there.
    """

    __slots__ = ("_before", "_index")

    def __init__(self, index: int) -> None:
        self._index = index

    def __enter__(self) -> None:
        self._before = runtime.getDevice()
        # Once even if it is current: then the driver, too, knows it in this thread.
        if self._before != self._index or not hasattr(_thread, "knows_device"):
            runtime.setDevice(self._index)
            _thread.knows_device = True

    def __exit__(self, *error: object) -> None:
        if self._before != self._index and is_in_use(self._before):
            runtime.setDevice(self._before)


class RelaxedCapture:
    """A block that may call functions which otherwise invalidate a graph capture of another thread: the work here is
    not part of that capture."""

    __slots__ = ("_mode",)

    def __enter__(self) -> None:
        self._mode = ctypes.c_int(_RELAXED)
        exchange_capture_mode(self._mode)

    def __exit__(self, *error: object) -> None:
        exchange_capture_mode(self._mode)


@lru_cache(maxsize=1)
def libcuda() -> Any:
    """Load the CUDA driver. Raises OSError where there is none."""
    driver = ctypes.CDLL("libcuda.so.1")
    number, place = ctypes.c_int, ctypes.c_uint64
    driver.cuMemGetAddressRange_v2.argtypes = [ctypes.POINTER(place), ctypes.POINTER(ctypes.c_size_t), place]
    driver.cuPointerGetAttribute.argtypes = [ctypes.POINTER(place), number, place]
    driver.cuDevicePrimaryCtxGetState.argtypes = [number, ctypes.POINTER(ctypes.c_uint), ctypes.POINTER(number)]
    driver.cuThreadExchangeStreamCaptureMode.argtypes = [ctypes.POINTER(number)]
    driver.cuMemHostGetDevicePointer_v2.argtypes = [ctypes.POINTER(place), place, ctypes.c_uint]
    for name in _WORD_OPERATIONS:
        if hasattr(driver, name):
            getattr(driver, name).argtypes = [place, place, ctypes.c_uint32, ctypes.c_uint]
    return driver


def find_word_operations() -> tuple[Any, Any]:
    """Return the functions by which streams write words of 32 bits, and wait for them: each takes the stream, the
    address for the device, the value and flags, and returns CUDA's error. Raises OSError where the driver lacks
    them."""
    driver = libcuda()
    try:
        return driver.cuStreamWriteValue32_v2, driver.cuStreamWaitValue32_v2
    except AttributeError:
        raise OSError("the driver is older than CUDA 11.7, and lacks cuStreamWaitValue32_v2") from None


def find_device_address(address: int) -> int:
    """Return the address for a device, which is current, of registered host memory. Raises OSError if the memory is not
    registered."""
    found = ctypes.c_uint64()
    _check(libcuda().cuMemHostGetDevicePointer_v2(ctypes.byref(found), address, 0), address)
    return found.value


def exchange_capture_mode(mode: Any) -> None:
    """Set this thread's capture mode to `mode`, which then holds the mode before."""
    try:
        driver = libcuda()
    except OSError:
        return
    driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def is_in_use(index: int) -> bool:
    """Return True if this process has a context on a device."""
    flags, active = ctypes.c_uint(), ctypes.c_int(1)
    with suppress(OSError):
        libcuda().cuDevicePrimaryCtxGetState(index, ctypes.byref(flags), ctypes.byref(active))
    return bool(active.value)


def find_number(address: int) -> int:
    """Return the number of the allocation at `address`, which no other one of this process has, had or gets. Raises
    OSError if there is no such allocation. This thread has to have used a device."""
    number = ctypes.c_uint64()
    failed = libcuda().cuPointerGetAttribute(ctypes.byref(number), _BUFFER_ID, address)
    if failed:
        _check(failed, address)
    return number.value


def find_bounds(address: int) -> tuple[int, int]:
    """Return where the allocation at `address` begins, and its bytes. Raises OSError if there is no such allocation.
    Its device has to be current."""
    base, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
    _check(libcuda().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(nbytes), address), address)
    return base.value, nbytes.value


def _check(failed: int, address: int) -> None:
    if failed:
        raise OSError(f"CUDA's error {failed} for the memory at {address:#x}")
