"""Values as messages."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.stage_values import DTYPES, Pair, same, value
from torch.distributed.tensor import DTensor

from mpicoll.errors import DeviceError, DTypeError
from mpicoll.parallel.p2p.message_format import (
    MessageLayout,
    TensorSpec,
    ValuePattern,
    as_bytes,
    describe_spec,
    flatten,
    unflatten,
)

shapes = st.lists(st.integers(0, 3), max_size=3)
tensors = st.builds(lambda dtype, shape: torch.ones(shape, dtype=dtype), st.sampled_from(DTYPES), shapes)
plain = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.floats(allow_nan=False)
values = st.recursive(
    tensors | plain,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2) | st.integers(), inner, max_size=3)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=8,
)


def structure(what: Any) -> Any:
    return flatten("send", what, [])


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(values)
def test_a_value_is_its_structure_and_its_tensors(what: Any) -> None:
    found: list[torch.Tensor] = []
    spec = flatten("send", what, found)
    assert same(unflatten(pickle.loads(pickle.dumps(spec)), iter(found)), what)
    assert describe_spec(spec)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(values, values)
def test_equal_structures_mean_that_only_elements_differ(one: Any, other: Any) -> None:
    ones: list[torch.Tensor] = []
    others: list[torch.Tensor] = []
    if flatten("send", one, ones) == flatten("send", other, others):
        assert same(unflatten(structure(one), iter(others)), other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (0.0, -0.0),
        ((torch.ones(2),), [torch.ones(2)]),
        ({"a": torch.ones(2), "b": None}, {"b": None, "a": torch.ones(2)}),
        ({1: None}, {True: None}),
        (torch.ones(2), torch.ones(2, requires_grad=True)),
        (torch.ones(2, 3), torch.ones(3, 2)),
        (torch.ones(2, dtype=torch.int32), torch.ones(2)),
        (Pair(None, None), (None, None)),
        (None, ()),
        (b"", None),
    ],
)
def test_structures_differ_where_the_receiver_would_make_something_else(one: Any, other: Any) -> None:
    assert structure(one) != structure(other)
    assert structure(one) == structure(one)


@pytest.mark.parametrize("seed", range(40))
def test_messages_carry_the_bytes(seed: int) -> None:
    found: list[torch.Tensor] = []
    flatten("send", value(random.Random(seed), 3), found)
    found += [torch.arange(n, dtype=torch.int16) for n in (3, 40_000, 1)]
    layout = MessageLayout(structure(found))
    messages = [bytes(one) for one in layout.pack(found, lambda tensor: None)]
    assert [len(one) for one in messages] == [nbytes for nbytes, _ in layout.messages]
    seen = {
        index: messages[number][start:stop]
        for number, (_, parts) in enumerate(layout.messages)
        for index, start, stop in parts
    }
    assert seen == {index: as_bytes(one).tobytes() for index, one in enumerate(found)}


def test_many_small_tensors_share_a_message_and_large_ones_go_alone() -> None:
    small, large = torch.ones(3), torch.ones(10_000)
    assert len(MessageLayout(structure(small)).messages) == 1
    assert len(MessageLayout(structure(large)).messages) == 1
    assert len(MessageLayout(structure([small] * 9)).messages) == 1
    assert len(MessageLayout(structure([large, *[small] * 9, large])).messages) == 3
    few = MessageLayout(structure([small, large, small])).messages
    assert [(nbytes, parts[0].index) for nbytes, parts in few] == [(12, 0), (40_000, 1), (12, 2)]
    assert MessageLayout(structure(None)).messages == [(0, ())]
    assert MessageLayout(structure([torch.ones(0), 3])).messages[0][0] == 0


def test_a_contiguous_tensor_is_not_copied() -> None:
    x = torch.zeros(4, 5)
    as_bytes(x)[:] = np.frombuffer(np.arange(20, dtype=np.float32).tobytes(), np.uint8)
    assert torch.equal(x, torch.arange(20.0).view(4, 5))


def test_lazy_views_are_resolved() -> None:
    x = torch.tensor([1 + 2j, 3 - 1j])
    assert as_bytes(x.conj()).tobytes() == x.numpy().conj().tobytes()
    assert as_bytes(x.conj().imag).tobytes() == x.numpy().conj().imag.tobytes()


def test_descriptions() -> None:
    what = {"x": [torch.ones(2, 3, requires_grad=True), None], "y": (1, Pair(torch.ones(()).bool(), "a" * 90))}
    assert describe_spec(structure(what)) == (
        "{'x': [float32 (2, 3) that requires grad, None], 'y': (1, Pair(bool (), '" + "a" * 36 + "...))}"
    )
    assert str(TensorSpec(torch.bfloat16, (4,), False)) == "bfloat16 (4,)"


def test_what_can_t_be_sent() -> None:
    with pytest.raises(DTypeError, match=r"isend: pass dense tensors.*to_dense"):
        flatten("isend", [torch.ones(2).to_sparse()], [])
    with pytest.raises(DeviceError, match="meta"):
        flatten("send", torch.ones(2, device="meta"), [])
    with pytest.raises(DTypeError, match=r"send: a function can't be pickled"):
        flatten("send", (torch.ones(2), lambda: None), [])
    wrapper = torch.Tensor._make_wrapper_subclass(DTensor, (2,))  # a DTensor needs no mesh to be recognised
    with pytest.raises(DTypeError, match="to_local"):
        flatten("send", wrapper, [])


class Unreadable:
    """Unpickling it fails."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("not a number",)


def test_what_can_t_be_unpickled_can_be_described() -> None:
    text = "a value that can't be unpickled or shown"
    assert describe_spec(structure(Unreadable())) == text
    assert describe_spec(structure((torch.ones(2), Unreadable()))) == f"(float32 (2,), {text})"
    assert describe_spec(structure({Unreadable(): torch.ones(2)})) == text


@settings(max_examples=100, deadline=None)
@given(values, values)
def test_pattern_is_that_of_one_structure(one: Any, other: Any) -> None:
    try:
        pattern = ValuePattern(structure(one))
    except ValueError:
        return
    inside: list[torch.Tensor] = []
    flatten("send", one, inside)
    found = pattern.find_tensors(one)
    assert found is not None
    assert all(left is right for left, right in zip(found, inside, strict=True))
    assert same(pattern.make_value(found), one)
    more: list[torch.Tensor] = []
    kinds = [None if spec is None else str(spec) for spec in (structure(one), flatten("send", other, more))]
    found = pattern.find_tensors(other)
    if kinds[0] == kinds[1]:
        assert found is not None
    if found is not None:
        assert same(pattern.make_value(more), other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((1, torch.ones(2)), (True, torch.ones(2))),
        ((1, torch.ones(2)), (1.0, torch.ones(2))),
        ((1, torch.ones(2)), [1, torch.ones(2)]),
        ((1, torch.ones(2)), (1, torch.ones(2), None)),
        ((1, torch.ones(2)), (1, torch.nn.Parameter(torch.ones(2)))),
        (("one", [torch.ones(2)]), ("two", [torch.ones(2)])),
        ((None, torch.ones(2)), (0, torch.ones(2))),
        ((Pair, torch.ones(2)), None),
        ({"a": torch.ones(2)}, None),
        ((0.0, torch.ones(2)), None),
    ],
)
def test_values_of_another_pattern(one: Any, other: Any) -> None:
    """None as the other one: there is no pattern."""
    if other is None:
        with pytest.raises(ValueError, match=r" has more | may be changed"):
            ValuePattern(structure(one))
    else:
        assert ValuePattern(structure(one)).find_tensors(other) is None
