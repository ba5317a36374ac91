"""Memory that compressed all-reduces keep from one call to the next: messages, and what these have left out."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpicoll.buffers.dtypes import Array


class CompressionMemory:
    """Memory of the all-reduces with one compression, `name`, that follow each other: those of a plan, for example.

    With `feedback`, what the messages of a call leave out is added to those of the next one (Karimireddy et al. 2019,
    "Error feedback fixes SignSGD and other gradient compression schemes"); it is forgotten if that has another size.
    """

    __slots__ = ("_arrays", "feedback", "name")

    def __init__(self, name: str, *, feedback: bool) -> None:
        self.name = name
        self.feedback = feedback
        self._arrays: dict[str, Array] = {}

    def take(self, use: str, size: int, dtype: Any = np.uint8) -> Array:
        """Return the array for `use`, which is the same one, with its contents, as long as `size` is the same."""
        array = self._arrays.get(use)
        if array is None or array.size != size:
            array = self._arrays[use] = np.empty(size, dtype)
        return array

    def take_error(self, use: str, size: int) -> Array | None:
        """Return the float32 errors for `use`, which are 0 at first; None without feedback."""
        if not self.feedback:
            return None
        array = self._arrays.get(use)
        if array is None or array.size != size:
            array = self._arrays[use] = np.zeros(size, np.float32)
        return array

    def forget(self) -> None:
        """Forget everything: after a failure late messages may be written to the memory, and what was left out is not
        known."""
        self._arrays.clear()
