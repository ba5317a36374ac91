"""The devices of this process, and facts of them."""

from __future__ import annotations

import os
import threading
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from support import fake_cuda
from support.device_memory import down, up

from mpicoll.buffers.recognise import output, recognise
from mpicoll.errors import DeviceError

Array = np.ndarray[Any, Any]

PAIR = np.dtype([("value", "f8"), ("index", "i4")])


@pytest.fixture
def device(cuda: ModuleType) -> Any:
    from mpicoll.buffers.cuda import device

    return device


def test_one_object_for_each_device(device: Any, on: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert device.cuda_device(0) is on
    assert (on.name, on.kind, on.index) == ("cuda:0", "cuda", 0)
    with pytest.raises(DeviceError, match=f"no device cuda:99: this process sees {device.count_devices()}, numbered"):
        device.cuda_device(99)
    monkeypatch.setattr(os, "getpid", lambda: -1)  # as after a fork
    assert device.cuda_device(0) is not on


def test_several_devices(cuda: ModuleType, device: Any, lazy: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKECUDA_DEVICES", "2")
    first, second = (device.cuda_device(index) for index in range(2))
    assert first.identity != second.identity
    assert all(len(one.identity.rpartition("/")[2]) <= 32 for one in (first, second))  # 16 bytes are a UUID
    with cuda.cuda.Device(1):
        x = cuda.arange(6.0)
        buffer = recognise("op", x)
        ready = buffer.library.record_event(buffer)
    assert buffer.array.on is second
    with second.working([ready]):
        total = second.empty(6, np.dtype("f8"))
        second.fold("sum", [buffer.array, buffer.array], [total], "float64")
        with first.working():
            other = up(first, np.ones(6))
    np.testing.assert_array_equal(down(second, total), 2 * np.arange(6.0))
    np.testing.assert_array_equal(down(first, other), np.ones(6))
    assert cuda.cuda.runtime.getDevice() == 0
    with pytest.raises(DeviceError, match="x lies on cuda:1, out on cuda:0"):
        output("op", cuda.empty(6), buffer, (6,))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert device.CudaDevice(0).identity == second.identity


def test_an_unused_device_is_not_touched(
    cuda: ModuleType, device: Any, lazy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread begins with the first one, and to go back there would take memory of it."""
    monkeypatch.setenv("FAKECUDA_DEVICES", "4")
    contexts = fake_cuda.fakecuda.streams.contexts
    used: list[set[int]] = []

    from mpicoll.buffers.cuda import events

    def work() -> None:
        third = device.cuda_device(3)
        before = set(contexts)
        contexts.clear()
        x = up(third, np.arange(4.0))
        x = third.reach(third.export(x))
        third.allocate_pinned(100)
        events.record_event(3, third.stream)
        down(third, x)
        used.append(set(contexts))
        contexts.update(before)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert used == [{3}]
    # What was in use before is current again.
    up(device.cuda_device(2), np.arange(4.0))
    assert cuda.cuda.runtime.getDevice() == 0


def test_facts(device: Any, lazy: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from mpicoll.buffers.cuda.facts import list_facts

    monkeypatch.setenv("FAKECUDA_DEVICES", "2")
    assert device.count_devices() == 2
    first, second = list_facts()
    assert first["name"] == "Fake CUDA device"
    assert (first["index"], second["index"]) == (0, 1)
    assert (first["peers"], second["peers"]) == ([1], [0])
    assert first["memory"] == 1 << 34
    assert (first["capability"], first["driver"], first["runtime"]) == ("9.0", "12.9", "12.8")
    assert first["identity"] == device.cuda_device(0).identity
    assert first["bus"] in first["identity"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(DeviceError, match=r"CUDA can't be used here: .*NoDevice"):
        device.count_devices()
    with pytest.raises(DeviceError, match=r"CUDA can't be used here: .*NoDevice"):
        list_facts()
    with pytest.raises(DeviceError, match="CUDA can't be used here"):
        device.cuda_device(99)
