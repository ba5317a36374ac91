"""Pairs (values, indices)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mpicoll.buffers.pair import output_pair, recognise_pair
from mpicoll.errors import DTypeError, ShapeError


def test_both_parts_are_joined_in_their_work_dtypes() -> None:
    values = np.array([[1, 2], [3, 4]], "f2").T
    indices = torch.tensor([[5, 6], [7, 8]], dtype=torch.int16)
    buffer = recognise_pair("op", (values, indices))
    target = np.empty(4, buffer.dtype.storage)
    buffer.load(target)
    assert target["value"].dtype == np.float32
    assert target["value"].tolist() == [1, 3, 2, 4]
    assert target["index"].tolist() == [5, 6, 7, 8]
    values[0, 0] = 9
    buffer.load(target)
    assert target["value"][0] == 9


def test_results_are_of_their_own_libraries() -> None:
    buffer = recognise_pair("op", (np.zeros(3, "f2"), torch.zeros(3, dtype=torch.int16)))
    made = buffer.library.empty(buffer, (2,))
    made.array["value"] = [1.5, 2.5]
    made.array["index"] = [3, 4]
    values, indices = made.result()
    assert (type(values), values.dtype, values.tolist()) == (np.ndarray, np.float16, [1.5, 2.5])
    assert (type(indices), indices.dtype, indices.tolist()) == (torch.Tensor, torch.int16, [3, 4])


def test_numbers() -> None:
    buffer = recognise_pair("op", (1.5, np.int8(3)))
    made = buffer.library.empty(buffer, ())
    buffer.load(made.array.reshape(-1))
    assert made.result() == (1.5, 3)
    assert [type(one) for one in made.result()] == [float, np.int8]


@pytest.mark.parametrize("x", [np.zeros(2), [np.zeros(2)] * 2, (np.zeros(2),), (np.zeros(2),) * 3, None])
def test_what_is_no_pair(x: Any) -> None:
    with pytest.raises(DTypeError, match=r"op: minloc and maxloc need a pair"):
        recognise_pair("op", x)


def test_parts_that_are_no_arrays() -> None:
    with pytest.raises(DTypeError, match=r"op: x\[0\] \(values\) is a list"):
        recognise_pair("op", ([1.0], np.zeros(1, int)))
    with pytest.raises(DTypeError, match=r"op: x\[1\] \(indices\) is a list"):
        recognise_pair("op", (np.zeros(1), [1]))


def test_shapes_must_agree() -> None:
    with pytest.raises(ShapeError, match=r"\(2,\).*\(3,\)"):
        recognise_pair("op", (np.zeros(2), np.zeros(3, int)))


def test_out() -> None:
    like = recognise_pair("op", (np.zeros(2), np.zeros(2, int)))
    out = (np.zeros(4)[::2], torch.zeros(2, dtype=torch.int64))
    buffer = output_pair("op", out, like, (2,))
    buffer.array["value"], buffer.array["index"] = [1, 2], [3, 4]
    result = buffer.result()
    assert result[0] is out[0]
    assert result[1] is out[1]
    assert (out[0].tolist(), out[1].tolist()) == ([1, 2], [3, 4])


@pytest.mark.parametrize(
    ("out", "kind"),
    [
        (np.zeros(2), DTypeError),
        ((np.zeros(2),), DTypeError),
        ((np.zeros(3), np.zeros(2, int)), ShapeError),
        ((np.zeros(2), np.zeros(2)), DTypeError),
        ((np.zeros(2, "f4"), np.zeros(2, int)), DTypeError),
    ],
    ids=["array", "one", "shape", "index dtype", "value dtype"],
)
def test_wrong_out(out: Any, kind: type[Exception]) -> None:
    like = recognise_pair("op", (np.zeros(2), np.zeros(2, int)))
    with pytest.raises(kind, match="op: out"):
        output_pair("op", out, like, (2,))
