"""The caller's out=."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from support.data import LIBRARIES, Interface, dtype_of, has, wrap

from mpicoll.buffers.recognise import output, recognise
from mpicoll.errors import DTypeError, ShapeError


def _like(name: str = "float32", shape: tuple[int, ...] = (2, 3)) -> Any:
    return recognise("op", np.zeros(shape, dtype_of(name)))


ARRAYS = [one for one in LIBRARIES if one not in ("python", "scalar")]


@pytest.mark.parametrize(
    ("in_library", "out_library", "name"),
    [
        (one, other, name)
        for one, other, name in product(ARRAYS, ARRAYS, ("float32", "bfloat16", "bool"))
        if has(one, name) and has(other, name)
    ],
)
def test_any_library_may_receive(in_library: str, out_library: str, name: str) -> None:
    like = recognise("op", wrap(in_library, np.zeros(3, dtype_of(name))))
    memory = np.zeros((3, 2), dtype_of(name))[:, 0]
    out = wrap(out_library, memory)
    buffer = output("op", out, like, (3,))
    buffer.store(np.ones(3, like.dtype.work))
    assert memory.astype(float).tolist() == [1, 1, 1]
    assert buffer.result() is out


@pytest.mark.parametrize("shape", [(3, 2), (6,), (2, 3, 1), ()])
def test_wrong_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError) as caught:
        output("op", np.zeros(shape, "f4"), _like(), (2, 3))
    assert str(shape) in str(caught.value)
    assert "(2, 3)" in str(caught.value)


@pytest.mark.parametrize("dtype", ["f8", "i4", ">f4", "M8[s]"])
def test_wrong_dtype(dtype: str) -> None:
    with pytest.raises(DTypeError, match=r"op: out has dtype .*, the result has dtype float32"):
        output("op", np.zeros((2, 3), dtype), _like(), (2, 3))


def test_units_of_dates_are_part_of_the_dtype() -> None:
    like = recognise("op", np.zeros(2, "M8[s]"))
    with pytest.raises(DTypeError, match="out has dtype"):
        output("op", np.zeros(2, "M8[ms]"), like, (2,))


def test_fields_are_part_of_the_dtype() -> None:
    like = recognise("op", np.zeros(2, [("a", "i4"), ("b", "i4")]))
    with pytest.raises(DTypeError, match="out has dtype"):
        output("op", np.zeros(2, [("a", "i4"), ("b", "f4")]), like, (2,))


def test_read_only() -> None:
    out = np.zeros((2, 3), "f4")
    out.flags.writeable = False
    for one in (out, Interface(out), memoryview(out)):
        with pytest.raises(ShapeError, match="op: out is read-only"):
            output("op", one, _like(), (2, 3))


def test_bytes_are_read_only() -> None:
    with pytest.raises(ShapeError, match="read-only"):
        output("op", b"abc", recognise("op", np.zeros(3, np.uint8)), (3,))


def test_elements_that_share_memory() -> None:
    shared = np.lib.stride_tricks.as_strided(np.zeros(3, "f4"), (2, 3), (0, 4))
    with pytest.raises(ShapeError, match="op: elements of out share memory"):
        output("op", shared, _like(), (2, 3))
    with pytest.raises(ShapeError, match="op: elements of out share memory"):
        output("op", torch.zeros(3).expand(2, 3), _like(), (2, 3))


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (1,), (1, 1), ()])
def test_empty_and_single_elements_share_nothing(shape: tuple[int, ...]) -> None:
    out = np.empty(shape, "f4")
    assert output("op", out, _like(), shape).result() is out


@pytest.mark.parametrize("out", [1.0, np.float64(1), np.float32(1)], ids=["float", "float64", "float32"])
def test_numbers_can_not_be_written_to(out: Any) -> None:
    like = recognise("op", np.zeros((), np.asarray(out).dtype))
    with pytest.raises(DTypeError, match=r"op: out is the number .*1\.0.*pass an array"):
        output("op", out, like, ())


def test_lazily_conjugated_tensor_can_not_be_written_to() -> None:
    like = recognise("op", torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ShapeError, match="read-only"):
        output("op", torch.zeros(2, dtype=torch.complex64).conj(), like, (2,))
