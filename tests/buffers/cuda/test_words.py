"""Words that streams write and wait for, and work that the host does not wait for."""

from __future__ import annotations

import threading
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from support.device_memory import up

from mpicoll.errors import DeviceError


@pytest.fixture
def words(on: Any) -> Any:
    memory = np.zeros(4096, np.uint8)
    made = on.make_words(memory)
    made.values = memory.view(np.uint32)
    return made


def test_work_waits_for_a_word(on: Any, lazy: None, words: Any) -> None:
    x, host = up(on, np.ones(8)), on.allocate_pinned(64).view("f8")
    host[:] = -1
    with on.submitting():
        words.wait(64, 3)
        np.copyto(host, x)
        words.write(128, 4)
        event, _ = on.record_submitted()
    for _ in range(5):
        assert not on.is_done(event)
    assert (host == -1).all()
    words.values[16] = 3
    event.synchronize()
    assert on.is_done(event)
    assert (host == 1).all()
    assert words.values[32] == 4
    with on.working():
        on.synchronize()


def test_submitted_work_is_not_waited_for(cuda: ModuleType, on: Any, lazy: None) -> None:
    host, given = on.allocate_pinned(64).view("f8"), np.arange(8.0)
    x = up(on, np.zeros(8))
    host[:] = -1
    with cuda.cuda.Stream(non_blocking=True) as stream:
        with on.submitting((on.record_caller(stream.ptr),)):
            on.copy(x, given)
            np.copyto(host, x)
            event, kept = on.record_submitted()
        assert any(one is given for one in kept)
        assert (host == -1).all()
        on.block_stream(stream.ptr, event)
        on.reuse_event(event)
        stream.synchronize()
    assert (host == given).all()


def test_submitted_work_that_fails_is_waited_for(on: Any, lazy: None) -> None:
    host, x = on.allocate_pinned(64).view("f8"), up(on, np.ones(8))
    host[:] = -1

    def submit() -> None:
        with on.submitting():
            np.copyto(host, x)
            raise MemoryError

    with pytest.raises(MemoryError):
        submit()
    assert (host == 1).all()


def test_a_threads_work_follows_that_of_another(on: Any, lazy: None) -> None:
    host, x = on.allocate_pinned(64).view("f8"), up(on, np.zeros(8))
    given = np.ones(8)
    with on.submitting():
        on.copy(x, given)
        event, _ = on.record_submitted()

    def read() -> None:
        with on.working():
            on.follow(event)
            np.copyto(host, x)

    thread = threading.Thread(target=read)
    thread.start()
    thread.join(30)
    assert (host == 1).all()
    with on.working():
        on.synchronize()


def test_why_there_are_no_words(on: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from mpicoll.buffers.cuda import driver, words

    memory = np.zeros(4096, np.uint8)
    with monkeypatch.context() as patch:
        patch.setattr(words, "register_host_memory", lambda index, memory: None)
        with pytest.raises(DeviceError, match="can't write words of host memory: CUDA's error 1 for the memory at"):
            on.make_words(memory)

    class Old:
        def __getattr__(self, name: str) -> Any:
            if "Value32" in name:
                raise AttributeError(name)
            return getattr(real, name)

    real = driver.libcuda()
    with monkeypatch.context() as patch:
        patch.setattr(driver, "libcuda", Old)
        with pytest.raises(DeviceError, match=r"older than CUDA 11\.7"):
            on.make_words(memory)
    made = on.make_words(memory)
    monkeypatch.setenv("FAKECUDA_MEMORY_OPERATIONS", "0")
    with (
        pytest.raises(DeviceError, match="CUDA's error 801 for a word in host memory, on a stream of cuda:0"),
        on.working(),
    ):
        made.write(0, 1)
