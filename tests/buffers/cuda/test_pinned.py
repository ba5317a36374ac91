"""Scratch and page-locked memory."""

from __future__ import annotations

import gc
import threading
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from support import fake_cuda
from support.device_memory import down, up
from support.garbage import collect_during, make_garbage

Array = np.ndarray[Any, Any]

PAIR = np.dtype([("value", "f8"), ("index", "i4")])


@pytest.fixture
def pinned(cuda: ModuleType) -> Any:
    from mpicoll.buffers.cuda import pinned

    return pinned


def test_scratch_goes_back_to_cupys_pool(cuda: ModuleType, on: Any) -> None:
    pool = cuda.get_default_memory_pool()
    gc.collect()
    before, all_before = pool.used_bytes(), pool.total_bytes()
    for _ in range(20):
        x = up(on, np.arange(1000.0).reshape(10, 100))
        with on.working():
            on.copy(x[:, 1:], x[:, :-1])
            on.copy(x, np.zeros((20, 100))[::2])
            on.fold("sum", [x.reshape(-1)] * 2, [x.reshape(-1)], "float64")
        down(on, x.T)
        assert pool.used_bytes() == before + x.nbytes + -x.nbytes % 512
        del x
    assert pool.used_bytes() == before
    assert pool.total_bytes() < all_before + 20 * 8000


def test_page_locked_memory_serves_again(on: Any) -> None:
    first = on.allocate_pinned(5000)
    assert first.shape == (5000,)
    assert first.dtype == np.uint8
    address = first.ctypes.data
    part = first[100:200].view("f4")
    del first
    other = on.allocate_pinned(5000)
    assert other.ctypes.data != address
    del part
    assert on.allocate_pinned(8192).ctypes.data == address
    assert on.allocate_pinned(0).size == 0


def test_page_locked_memory_is_not_hoarded(on: Any, pinned: Any, monkeypatch: pytest.MonkeyPatch, lazy: None) -> None:
    monkeypatch.setattr(pinned, "_IDLE", 3 * 8192)
    monkeypatch.setattr(on, "_pinned", pinned.PinnedPool())
    held = [on.allocate_pinned(8192) for _ in range(5)]
    addresses = [one.ctypes.data for one in held]
    del held
    assert on.allocate_pinned(8192).ctypes.data in addresses
    on.allocate_pinned(20000)  # for which CUDA is asked
    assert sum(fake_cuda.fakecuda.memory.pinned(one) for one in addresses) == 3


def test_page_locked_memory_of_threads(on: Any) -> None:
    wrong = []

    def body(number: int) -> None:
        for _ in range(200):
            mine = on.allocate_pinned(64)
            mine[:] = number
            if (mine != number).any():
                wrong.append(number)

    threads = [threading.Thread(target=body, args=(number,)) for number in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not wrong


class Mapping:
    """Memory that is no array's own, as shared memory is."""

    def __init__(self, nbytes: int) -> None:
        self._held = np.zeros(nbytes + 4096, np.uint8)
        address = self._held.ctypes.data + -self._held.ctypes.data % 4096
        self.__array_interface__ = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}


def test_shared_memory_is_page_locked_as_a_whole(on: Any, lazy: None) -> None:
    pinned = fake_cuda.fakecuda.memory.pinned
    whole = np.asarray(Mapping(5 * 4096))
    address = whole.ctypes.data
    slots = [whole[100:5000], whole[5000:10000].view("f4")]
    del whole
    for slot in (*slots, *slots):
        on.register_host_memory(slot)
    assert pinned(address, 5 * 4096)
    del slot
    slots.pop()
    assert pinned(address)
    slots.clear()
    gc.collect()
    assert not pinned(address)


def test_a_collection_may_unregister_memory_while_other_memory_is_registered(
    pinned: Any, on: Any, lazy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: dict[int, int] = {}
    monkeypatch.setattr(pinned, "_registered", registered)

    def prepare() -> None:
        registered.update({1 << 60 | number: 0 for number in range(20)})
        make_garbage(lambda: [registered.pop(1 << 60 | number, None) for number in range(5)])

    collect_during(lambda: on.register_host_memory(np.asarray(Mapping(4096))), prepare)


def test_memory_with_several_owners_is_page_locked_until_the_last_is_gone(on: Any, lazy: None) -> None:
    """Ranks that are threads have an object each for the memory that they share."""

    class Reference:
        def __init__(self, memory: Any) -> None:
            self._kept = memory
            self.__array_interface__ = memory.__array_interface__

    pinned = fake_cuda.fakecuda.memory.pinned
    whole = np.asarray(Mapping(4096))
    address = whole.ctypes.data
    ranks = [np.asarray(Reference(whole)) for _ in range(2)]
    for one in (*ranks, *ranks):
        on.register_host_memory(one)
    del one
    ranks.pop(0)
    gc.collect()
    assert pinned(address)
    ranks.clear()
    gc.collect()
    assert not pinned(address)


def test_memory_that_cannot_be_page_locked(on: Any, lazy: None) -> None:
    on.register_host_memory(on.empty(100, np.dtype("u1")))
    on.register_host_memory(np.empty(0))
    twice = np.asarray(Mapping(8192))
    on.register_host_memory(twice[:100])
    overlapping = np.ndarray(4096, np.uint8, twice, 4000)
    on.register_host_memory(overlapping)
    assert fake_cuda.fakecuda.memory.pinned(twice.ctypes.data, 8192)
