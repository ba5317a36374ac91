"""The tuples with named fields, compared with those of typing."""

from __future__ import annotations

import copy
import pickle
import typing
from typing import Any

import pytest

from mpicoll.named_tuple import NamedTuple


class Pair(NamedTuple):
    """Two fields, one with a default value."""

    first: int
    second: str = "b"

    @property
    def both(self) -> str:
        return f"{self.first}{self.second}"


class Model(typing.NamedTuple):
    """The same of typing."""

    first: int
    second: str = "b"

    @property
    def both(self) -> str:
        return f"{self.first}{self.second}"


@pytest.mark.parametrize("kind", [Pair, Model])
def test_fields_and_methods(kind: Any) -> None:
    one = kind(1)
    assert one == (1, "b") == kind(first=1) == kind(1, second="b") == kind._make([1, "b"])
    assert (one.first, one.second, one.both, hash(one)) == (1, "b", "1b", hash((1, "b")))
    assert repr(one) == f"{kind.__name__}(first=1, second='b')"
    assert (kind._fields, kind._field_defaults) == (("first", "second"), {"second": "b"})
    assert one._asdict() == {"first": 1, "second": "b"}
    assert one._replace(second="c") == (1, "c")
    match one:
        case kind(first, "b"):
            assert first == 1
    for copied in (pickle.loads(pickle.dumps(one)), copy.deepcopy(one)):
        assert (type(copied), copied) == (kind, one)
    with pytest.raises(AttributeError):
        one.first = 2
    with pytest.raises(AttributeError):
        one.third = 2


@pytest.mark.parametrize("kind", [Pair, Model])
@pytest.mark.parametrize(
    ("values", "named"), [((), {}), ((1, "b", 2), {}), ((1,), {"first": 2}), ((1,), {"third": 2}), ((), {"second": ""})]
)
def test_wrong_values(kind: Any, values: tuple[Any, ...], named: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"Pair|__new__"):
        kind(*values, **named)
