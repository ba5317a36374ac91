"""Memory that other processes open."""

from __future__ import annotations

import os
import pickle
import secrets
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from support import fake_cuda
from support.device_memory import down, up
from support.patches import patch_within

from mpicoll.buffers.device import view
from mpicoll.buffers.recognise import recognise
from mpicoll.errors import DeviceError

Array = np.ndarray[Any, Any]

PAIR = np.dtype([("value", "f8"), ("index", "i4")])


@pytest.fixture
def ipc_handles(cuda: ModuleType) -> Any:
    from mpicoll.buffers.cuda import ipc_handles

    return ipc_handles


CHILD = """
import sys, pickle
import cupy
import numpy as np
from mpicoll.buffers.recognise import recognise
from mpicoll.buffers.cuda.device import cuda_device

on = cuda_device(0)
around = cupy.arange(1000, dtype="f8")
x = recognise("op", around[100:200])
told = sys.stdout.buffer
with on.working([x.library.record_event(x)]):
    pass
pickle.dump((on.export(x.array), on.identity), told)
told.flush()
sys.stdin.readline()
print(cupy.asnumpy(around[100:200]).sum())
"""


def test_memory_of_another_process(on: Any, lazy: None) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **fake_cuda.environment()},
        cwd=Path(__file__).parents[3],
    )
    assert child.stdin is not None
    assert child.stdout is not None
    with child:
        export, identity = pickle.load(child.stdout)
        assert identity == on.identity == export.device
        whole, again = on.reach(export), on.reach(export)
        assert whole.nbytes == export.nbytes >= 8000
        theirs = whole[export.offset : export.offset + 800].view("f8")
        np.testing.assert_array_equal(down(on, theirs), np.arange(100.0, 200))
        with on.working():
            on.fold("sum", [theirs, theirs], [theirs], "float64")
        del whole
        np.testing.assert_array_equal(down(on, theirs), 2 * np.arange(100.0, 200))
        address = theirs.ctypes.data
        del theirs
        assert fake_cuda.fakecuda.find(address)
        del again
        assert not fake_cuda.fakecuda.find(address)
        child.stdin.write(b"\n")
        child.stdin.flush()
        assert float(child.stdout.readline()) == 2 * np.arange(100.0, 200).sum()
    assert child.returncode == 0
    with pytest.raises(DeviceError, match=f"cuda:0 can't reach {export.nbytes} bytes of process {export.process} on"):
        on.reach(export)


def test_the_name_of_a_process(on: Any, ipc_handles: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = up(on, np.arange(100.0))
    name = on.export(x).process
    assert on.export(x[10:]).process == name
    assert str(os.getpid()) != name
    patch_within(monkeypatch, ipc_handles, os, getpid=lambda: -1)  # as after a fork
    assert ipc_handles.process_name() != name


def test_concurrent_threads_get_the_same_name(ipc_handles: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a rank that is a thread would take memory of its own process for another's."""
    together = threading.Barrier(3, timeout=20)

    def token_hex(size: int) -> str:
        together.wait()
        return secrets.token_hex(size)

    patch_within(monkeypatch, ipc_handles, secrets, token_hex=token_hex)
    patch_within(monkeypatch, ipc_handles, os, getpid=lambda: -2)
    with ThreadPoolExecutor(3) as pool:
        names = {one.result() for one in [pool.submit(ipc_handles.process_name) for _ in range(3)]}
    assert len(names) == 1


def test_memory_of_another_device_of_this_process(
    cuda: ModuleType, lazy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKECUDA_DEVICES", "2")
    from mpicoll.buffers.cuda.device import cuda_device

    first, second = cuda_device(0), cuda_device(1)
    export = second.export(up(second, np.arange(100.0)))
    monkeypatch.setenv("FAKECUDA_PEERS", "0")
    with pytest.raises(DeviceError, match="cuda:0 can't reach"):
        first.reach(export)
    monkeypatch.delenv("FAKECUDA_PEERS")
    for _ in range(2):
        theirs = first.reach(export)[export.offset : export.offset + 800].view("f8")
        total = first.empty(100, np.dtype("f8"))
        with first.working():
            first.fold("sum", [theirs, theirs], [total], "float64")
        np.testing.assert_array_equal(down(first, total), 2 * np.arange(100.0))


def test_memory_of_this_process(on: Any) -> None:
    x = up(on, np.arange(100.0))[40:]
    export = on.export(x)
    whole = on.reach(export)
    same = whole[export.offset : export.offset + x.nbytes].view("f8")
    assert same.ctypes.data == x.ctypes.data
    np.testing.assert_array_equal(down(on, same), np.arange(40.0, 100))


def test_memory_that_other_processes_cannot_reach(cuda: ModuleType, on: Any) -> None:
    stream = cuda.cuda.Stream(non_blocking=True)
    with stream:
        memory = cuda.cuda.malloc_async(1000)
    x = cuda.ndarray((100,), "f4", memory)
    assert on.export(recognise("op", x).array) is None
    assert on.export(on.empty(0, np.dtype("f4"))) is None


def test_memory_that_is_gone(cuda: ModuleType, on: Any) -> None:
    """It is not taken for what lies there now."""
    allocator = cuda.cuda.get_allocator()
    cuda.cuda.set_allocator(None)
    try:
        array = on.empty(1000, np.dtype("f8"))
        told = on.export(array)
        stale = view(on, array.ctypes.data, (1000,), np.dtype("f8"))
        cuda.cuda.Device(0).synchronize()
        del array
        gone = on.export(stale)
        assert gone is None or gone.number != told.number
        again = on.empty(1000, np.dtype("f8"))
        assert on.export(again).number != told.number
    finally:
        cuda.cuda.set_allocator(allocator)


def test_without_the_driver_nothing_is_exported(on: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from mpicoll.buffers.cuda import driver

    def missing() -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(driver, "libcuda", missing)
    assert on.export(up(on, np.zeros(4))) is None
