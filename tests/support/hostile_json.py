"""Changes of JSON values, for tests of what reads files that others may have written."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st

FUZZING = pytest.param(100_000, marks=[pytest.mark.long, pytest.mark.timeout(3600)])
"""Number of examples in the long tier: minutes for each test."""

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-1, 0, 1, 10**9, 2**63, 10**400, 0.5, 1e308, float("nan"), float("inf")]),
    st.sampled_from(["", "..", "../../up", "é", "\x00", "a" * 300, "\ud800"]),
    st.lists(st.integers(-1, 3), max_size=3),
    st.dictionaries(st.sampled_from(["name", "rank", "parts"]), st.integers(), max_size=2),
    st.recursive(st.integers(), st.lists, max_leaves=3),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values inside of `value`."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, one in items for place in places(one, (*path, key)))]


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """Return `value` with the value at `path` replaced, or removed if `new` is Ellipsis."""
    if not path:
        return None if new is ... else new
    copy = value.copy()
    if new is ... and len(path) == 1:
        del copy[path[0]]
    else:
        copy[path[0]] = replaced(copy[path[0]], path[1:], new)
    return copy
