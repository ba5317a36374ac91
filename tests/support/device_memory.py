"""Arrays in the memory of a device: filled from the host, and read back."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpicoll.buffers.device import DeviceArray

Array = np.ndarray[Any, Any]


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
