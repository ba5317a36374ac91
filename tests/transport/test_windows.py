"""The memory and the locks of a window on one node."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mpicoll.transport import windows
from mpicoll.transport.windows import LockFile, SharedWindow

pytestmark = pytest.mark.skipif(not hasattr(windows.fcntl, "F_OFD_SETLK"), reason="the system has no such locks")


class Refused(Exception):
    """A lock that would be waited for."""


def refuse(ready: Callable[[], bool], what: str) -> None:
    assert not ready()
    raise Refused(what)


@pytest.fixture
def pair() -> tuple[SharedWindow, SharedWindow]:
    """The windows of two ranks, as these see them."""
    memories = [np.zeros(8, np.uint8) for _ in range(2)]
    files = LockFile(), LockFile()
    name, problem = files[0].create()
    assert problem == ""
    assert files[1].open(name) == ""
    files[0].remove_name()
    assert not Path(name).exists()
    left, right = (SharedWindow(memories, file.fd, refuse) for file in files)
    return left, right


def test_memory(pair: tuple[SharedWindow, SharedWindow]) -> None:
    left, right = pair
    left.put(1, 2, np.arange(3, dtype=np.uint8) + 1)
    into = np.empty(4, np.uint8)
    right.get(1, 1, into)
    assert into.tolist() == [0, 1, 2, 3]
    memory = right.view(1)
    assert memory is not None
    assert memory.tolist() == [0, 0, 1, 2, 3, 0, 0, 0]


@pytest.mark.parametrize("number", [0, 1])
def test_locks(pair: tuple[SharedWindow, SharedWindow], number: int) -> None:
    left, right = pair
    left.lock(1, number, True)
    for exclusive in (True, False):
        with pytest.raises(Refused, match="the lock of rank 1's memory"):
            right.lock(1, number, exclusive)
    right.lock(0, number, True)  # other ranks' memory, and the other lock, are not concerned
    right.lock(1, 1 - number, True)
    right.unlock(1, 1 - number)
    left.unlock(1, number)
    left.lock(1, number, False)
    right.lock(1, number, False)
    left.unlock(1, number)
    with pytest.raises(Refused):
        left.lock(1, number, True)
    right.unlock(1, number)
    left.lock(1, number, True)


def test_free_releases_the_locks(pair: tuple[SharedWindow, SharedWindow]) -> None:
    left, right = pair
    left.lock(0, 0, True)
    left.free()
    right.lock(0, 0, True)
    with pytest.raises(ValueError, match="file descriptor"):
        left.unlock(0, 0)


def test_dropped_window_closes_its_file() -> None:
    file = LockFile()
    name, _ = file.create()
    window = SharedWindow([np.zeros(1, np.uint8)], file.fd, refuse)
    file.remove_name()
    link = Path(f"/proc/self/fd/{file.fd}")
    assert name in str(link.readlink())
    del window
    try:
        target = str(link.readlink())
    except FileNotFoundError:
        return
    assert name not in target  # another thread has taken the number


def test_file_that_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "No such file" in LockFile().open(str(tmp_path / "none"))
    monkeypatch.setattr(windows, "_DIRECTORY", str(tmp_path / "none"))
    monkeypatch.setattr(windows.tempfile, "tempdir", str(tmp_path / "none"))
    file = LockFile()
    name, problem = file.create()
    assert name == ""
    assert "No such file" in problem
    file.remove_name()
    file.close()
