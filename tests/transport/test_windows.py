"""The memory and the locks of a window on one node."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import mpicoll
from mpicoll.extension import find_window_memory
from mpicoll.transport.windows import SharedWindow

pytestmark = pytest.mark.extension

PROGRAM, COMBINE = 0, 1


class Refused(Exception):
    """A lock that would be waited for."""


def refuse(ready: Callable[[], bool], holders: Callable[[], list[int]], what: str) -> None:
    assert not ready()
    raise Refused(f"{what}: {holders()}")


def make_windows(size: int) -> list[SharedWindow]:
    """Return the windows of `size` ranks, as these see them."""
    kind = find_window_memory()
    assert kind is not None
    head = kind.count_lock_bytes(size)
    wholes = [np.zeros(head + 72, np.uint8) for _ in range(size)]
    parts = [whole[-whole.ctypes.data % 64 :][: head + 8] for whole in wholes]
    memories = [part[head:] for part in parts]
    return [SharedWindow(memories, kind(parts, rank, set()), refuse) for rank in range(size)]


def test_memory() -> None:
    left, right = make_windows(2)
    left.put(1, 2, np.arange(3, dtype=np.uint8) + 1)
    into = np.empty(4, np.uint8)
    right.get(1, 1, into)
    assert into.tolist() == [0, 1, 2, 3]
    memory = right.view(1)
    assert memory is not None
    assert memory.tolist() == [0, 0, 1, 2, 3, 0, 0, 0]


def test_locks() -> None:
    left, right = make_windows(2)
    left.lock(1, PROGRAM, True)
    for exclusive in (True, False):
        with pytest.raises(Refused, match=r"the lock of rank 1's memory: \[0\]"):
            right.lock(1, PROGRAM, exclusive)
    right.lock(0, PROGRAM, True)  # other ranks' memory is not concerned
    left.unlock(1, PROGRAM)
    left.lock(1, PROGRAM, False)
    right.lock(1, PROGRAM, False)
    left.unlock(1, PROGRAM)
    with pytest.raises(Refused):
        left.lock(1, PROGRAM, True)
    right.unlock(1, PROGRAM)
    left.lock(1, PROGRAM, True)


def test_combining() -> None:
    left, right = make_windows(2)
    left.lock(1, PROGRAM, False)
    right.lock(1, PROGRAM, False)
    left.lock(1, COMBINE, True)
    with pytest.raises(Refused):
        right.lock(1, COMBINE, True)
    right.unlock(1, PROGRAM)
    right.lock(1, PROGRAM, False)  # which does not wait for it
    left.unlock(1, COMBINE)
    right.lock(1, COMBINE, True)


def test_order_of_waiting_ranks() -> None:
    """A rank is overtaken by none that excludes it, but those that may share the lock enter together."""
    windows = [one.direct for one in make_windows(5)]
    reader, writer, second_reader, second_writer, third_reader = windows

    def take(rank: int, *, exclusive: bool) -> bool:
        direct = windows[rank]
        assert direct is not None
        return direct.take(0, False, exclusive)

    assert reader is not None
    assert writer is not None
    assert second_writer is not None
    assert second_reader is not None
    assert third_reader is not None
    assert take(0, exclusive=False)
    assert not take(1, exclusive=True)
    assert not take(2, exclusive=False)  # behind the writer, though a reader has the lock
    assert not take(3, exclusive=True)
    assert not take(4, exclusive=False)
    assert reader.list_holders(0) == [1, 2, 3, 4]
    reader.release(0, False)
    for rank, exclusive in ((0, False), (2, False), (3, True), (4, False)):
        assert not take(rank, exclusive=exclusive)
    reader.give_up(0)
    assert take(1, exclusive=True)
    writer.release(0, False)
    assert not take(3, exclusive=True)
    assert not take(4, exclusive=False)
    assert take(2, exclusive=False)
    second_writer.give_up(0)
    assert take(4, exclusive=False)
    assert not take(3, exclusive=True)
    second_reader.release(0, False)
    third_reader.release(0, False)
    assert take(3, exclusive=True)
    second_writer.release(0, False)
    for rank in range(5):
        assert take(rank, exclusive=True)
        direct = windows[rank]
        assert direct is not None
        assert direct.list_holders(0) == []
        direct.release(0, False)


def test_invalid_arguments() -> None:
    kind = find_window_memory()
    assert kind is not None
    with pytest.raises(ValueError, match="1 to 32767 ranks"):
        kind.count_lock_bytes(0)
    with pytest.raises(ValueError, match="missing, or not aligned"):
        kind([np.zeros(8, np.uint8)], 0, set())
    with pytest.raises(ValueError, match="invalid arguments"):
        kind([], 0, set())
    (one,) = make_windows(1)
    direct = one.direct
    assert direct is not None
    for call in (lambda: direct.take(1, False, False), lambda: direct.release(-1, False), lambda: direct.give_up(9)):
        with pytest.raises(ValueError, match="no such rank"):
            call()
    with pytest.raises(TypeError, match="3 arguments"):
        direct.put(1, 2)  # type: ignore[call-arg]
    assert not direct.put(np.zeros(1), 0, 0)  # it was not bound
    core = mpicoll.world()._core
    with pytest.raises(ValueError, match="smaller than the array"):
        core.queue.bind_window(direct, core.queue.lock, np.zeros(2), [(2,)])
