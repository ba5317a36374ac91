"""Copies of each layout, against numpy's."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.device_memory import down, numbers, up

from mpicoll.buffers.device import DeviceArray
from mpicoll.errors import DTypeError

Array = np.ndarray[Any, Any]

PAIR = np.dtype([("value", "f8"), ("index", "i4")])


@pytest.fixture
def copies(cuda: ModuleType) -> Any:
    from mpicoll.buffers.cuda import copies

    return copies


LAYOUTS: dict[str, tuple[tuple[int, ...], Callable[[Array], Array]]] = {
    "whole": ((4, 6), lambda a: a),
    "transposed": ((6, 4), lambda a: a.T),
    "rows": ((8, 6), lambda a: a[2:6]),
    "every other row": ((8, 6), lambda a: a[::2]),
    "columns": ((4, 9), lambda a: a[:, 2:8]),
    "every other column": ((4, 12), lambda a: a[:, ::2]),
    "backwards": ((4, 6), lambda a: a[::-1, ::-1]),
    "rows backwards": ((4, 8), lambda a: a[::-1, 1:7]),
    "inner axis first": ((6, 3, 4), lambda a: a.transpose(2, 1, 0)[:, 1]),
    "of three axes": ((4, 2, 6), lambda a: a[:, 1, :]),
}
DTYPES = ["u1", "?", "i2", "f2", ml_dtypes.bfloat16, "f4", "f8", "c8", "c16", "V3", "V12", PAIR]


def whole_and_view(on: Any, layout: str, dtype: Any, device: bool) -> tuple[Array, Array]:
    shape, cut = LAYOUTS[layout]
    values = numbers(shape, dtype)
    array = up(on, values) if device else values.copy()
    return array, cut(array)


@pytest.mark.parametrize(("there", "here"), [(True, True), (True, False), (False, True)], ids=["across", "up", "down"])
@pytest.mark.parametrize("row", [1, 512])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies(
    on: Any, copies: Any, layout: str, row: int, there: bool, here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "_ROW", row)
    for other, dtype in product(LAYOUTS, DTYPES):
        target, into = whole_and_view(on, layout, dtype, there)
        _, of = whole_and_view(on, other, dtype, here)
        wanted = numbers(LAYOUTS[layout][0], dtype)
        values = LAYOUTS[other][1](numbers(LAYOUTS[other][0], dtype))
        LAYOUTS[layout][1](wanted)[...] = values
        with on.working():
            on.copy(into, of)
        got = down(on, target) if isinstance(target, DeviceArray) else target
        assert got.tobytes() == wanted.tobytes(), (layout, other, dtype)


@pytest.mark.parametrize(("there", "here"), [(True, True), (True, False), (False, True)], ids=["across", "up", "down"])
@pytest.mark.parametrize("row", [1, 512])
def test_broadcast(on: Any, copies: Any, row: int, there: bool, here: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "_ROW", row)
    for shape in [(), (1,), (6,), (1, 6), (4, 1), (1, 1, 4, 6)]:
        values = numbers(shape, "f4")
        target = up(on, np.zeros((4, 6), "f4")) if there else np.zeros((4, 6), "f4")
        with on.working():
            on.copy(target, up(on, values) if here else values)
        got = down(on, target) if isinstance(target, DeviceArray) else target
        np.testing.assert_array_equal(got, np.broadcast_to(values.reshape(values.shape[-2:]), (4, 6)))


def test_rows_that_are_too_far_apart_for_a_transfer(
    cuda: ModuleType, on: Any, copies: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    whole = cuda.cuda.runtime.memcpy2DAsync

    def transfer(*args: int) -> None:
        asked.append(args[1])
        whole(*args)

    monkeypatch.setattr(cuda.cuda.runtime, "memcpy2DAsync", transfer)
    monkeypatch.setattr(copies, "_ROW", 1)
    values = numbers((4, 100), "u1")
    x = up(on, values)
    for limit, times in ((100, 1), (99, 0)):
        monkeypatch.setattr(copies, "_PITCH", limit)
        got = np.zeros((4, 50), "u1")
        with on.working():
            on.copy(got, x[:, :50])
        np.testing.assert_array_equal(got, values[:, :50])
        assert len(asked) == times
        asked.clear()


def test_memory_in_the_same_order_is_one_transfer(cuda: ModuleType, on: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("a kernel")

    values = numbers((2, 3, 4), "f4")
    target, source = up(on, np.zeros((2, 3, 4), "f4")), up(on, values)
    monkeypatch.setattr(cuda, "copyto", refuse)
    with on.working():
        on.copy(target.transpose(2, 0, 1), source.transpose(2, 0, 1))
    np.testing.assert_array_equal(down(on, target), values)


def test_wrong_shapes_and_dtypes(on: Any) -> None:
    target = up(on, np.zeros((4, 6), "f4"))
    with pytest.raises(ValueError, match=r"could not broadcast .*\(5,\) into shape \(4, 6\)"), on.working():
        on.copy(target, np.zeros(5, "f4"))
    with pytest.raises(ValueError, match="could not broadcast"), on.working():
        on.copy(target, np.zeros((2, 4, 6), "f4"))
    with pytest.raises(DTypeError, match="float64 to float32 on cuda:0"), on.working():
        on.copy(target, up(on, np.zeros((4, 6))))


def test_numbers(on: Any) -> None:
    for dtype, number in [("f4", 2.5), ("i2", -3), ("u1", np.uint8(9)), ("c16", 1 - 2j), ("?", True), ("f8", 1)]:
        target = up(on, np.zeros((3, 4), dtype))
        with on.working():
            target[:, ::2] = number
            target[1] = np.asarray(number, dtype)
        wanted = np.zeros((3, 4), dtype)
        wanted[:, ::2] = number
        wanted[1] = number
        np.testing.assert_array_equal(down(on, target), wanted)


def test_nothing_and_one_element(on: Any) -> None:
    empty = on.empty(0, np.dtype("f4"))
    with on.working():
        on.copy(empty, np.empty(0, "f4"))
        on.copy(np.empty((0, 3), "f4"), on.empty(0, np.dtype("f4")).reshape(0, 3))
        on.apply("add", [empty, empty], empty)
        on.fold("sum", [empty, empty], [empty], "float32")
        on.convert(empty, on.empty(0, np.dtype("u2")), "bfloat16")
    one = up(on, np.array(3.0))
    with on.working():
        one[...] = 5
        np.add(one, one, out=one)
    assert down(on, one) == 10


def test_copies_onto_itself(on: Any) -> None:
    for cut_to, cut_of in [
        (np.s_[1:], np.s_[:-1]),
        (np.s_[:-1], np.s_[1:]),
        (np.s_[:], np.s_[::-1]),
        (np.s_[:, 1:], np.s_[:, :-1]),
        (np.s_[3:], np.s_[0]),
        (np.s_[::2], np.s_[1::2]),
        (np.s_[:], np.s_[:]),
    ]:
        wanted = numbers((6, 8), "f4")
        array = up(on, wanted)
        with on.working():
            on.copy(array[cut_to], array[cut_of])
        wanted[cut_to] = wanted[cut_of].copy()
        np.testing.assert_array_equal(down(on, array), wanted)


def test_elements_where_none_may_begin(on: Any) -> None:
    """A kernel that reads a float64 there ends the use of the device."""
    room = up(on, np.zeros(8 * 8 + 3, "u1"))
    odd = room[3:].view("f8")
    with on.working():
        on.copy(odd, np.arange(8.0))
        on.copy(odd[::2], odd[::2][::-1])
        on.fold("sum", [odd, odd], [odd], "float64")
        np.multiply(odd, odd, out=odd)
    np.testing.assert_array_equal(down(on, odd), (2 * np.array([6.0, 1, 4, 3, 2, 5, 0, 7])) ** 2)
