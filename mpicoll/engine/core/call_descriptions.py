"""Descriptions of the calls of the ranks of a node, for the error when they call different operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from mpicoll.transport.base import Memory

_TEXT = 1024
"""Bytes, per rank and for even and odd operations each, for the text that describes a rank's call: the number of the
operation, the length of the text, and the text."""

DescribeCall: TypeAlias = "Callable[[], str]"
"""Function that returns a description of this rank's current call in less than 1000 bytes."""

MismatchErrorOf: TypeAlias = "Callable[[list[str]], Exception | None]"
"""Function that returns the error for the descriptions of all ranks' calls (empty where unknown), the same on all
ranks."""


def description_bytes(size: int) -> int:
    """Return the bytes of the memory for the descriptions of `size` ranks."""
    return 2 * size * _TEXT


class CallDescriptions:
    """Descriptions of the current calls of the ranks, in `memory` that all ranks share. `describe_call` returns this
    rank's description, `mismatch_error_of` the error for those of all ranks."""

    def __init__(
        self,
        memory: Memory,
        rank: int,
        size: int,
        describe_call: DescribeCall | None,
        mismatch_error_of: MismatchErrorOf | None,
    ) -> None:
        self._texts = memory[: description_bytes(size)].reshape(2, size, _TEXT)
        self._rank = rank
        self._describe_call = describe_call
        self._mismatch_error_of = mismatch_error_of

    def publish(self, operation: int) -> None:
        """Publish the description of this rank's current call, in step `operation`."""
        if self._describe_call is None:
            return
        try:
            text = self._describe_call().encode()
        except Exception:  # noqa: BLE001  the other ranks wait for this one, and can do without the description
            text = b""
        place = self._texts[operation & 1, self._rank]
        place[16 : 16 + len(text)] = np.frombuffer(text, np.uint8)
        place[:16].view(np.int64)[:] = operation, len(text)

    def mismatch_error(self, operation: int, repeated: Sequence[tuple[int, bytes] | None]) -> Exception | None:
        """Return the error for ranks that have begun different operations. `repeated` has the number and description of
        each rank's call, from :func:`~mpicoll.engine.core.call_mismatch.encode_repeated_call`; or None, if the rank has
        published one."""
        if self._mismatch_error_of is None:
            return None
        # Not at module level: the start of a job does not need it.
        from mpicoll.engine.core.call_mismatch import number_description

        texts = []
        for place, call in zip(self._texts[operation & 1], repeated, strict=True):
            if call is not None:
                texts.append(number_description(call[1].decode(), call[0]))
                continue
            number, length = map(int, place[:16].view(np.int64))
            texts.append(place[16 : 16 + length].tobytes().decode() if number == operation else "")
        return self._mismatch_error_of(texts)
