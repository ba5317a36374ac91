"""Deadlines of many keys, compared with a dictionary."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mpicoll.transport.control.deadlines import Deadlines

NEVER = float("inf")


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("set"), st.integers(0, 5), st.sampled_from([0.0, 1.0, 2.0, 3.0, NEVER])),
            st.tuples(st.just("remove"), st.integers(0, 5), st.just(0.0)),
            st.tuples(st.sampled_from(["take_due", "take_first"]), st.just(0), st.sampled_from([0.0, 1.5, 3.0])),
        ),
        max_size=60,
    )
)
def test_deadlines_are_those_that_were_set_last(steps: list[tuple[str, int, float]]) -> None:
    deadlines: Deadlines[int] = Deadlines()
    expected: dict[int, float] = {}
    for what, key, time in steps:
        if what == "set":
            deadlines.set(key, time)
            expected.pop(key, None)
            expected |= {key: time} if time < NEVER else {}
        elif what == "remove":
            deadlines.remove(key)
            expected.pop(key, None)
        elif what == "take_due":
            taken = deadlines.take_due(time)
            assert sorted(taken) == sorted(one for one, due in expected.items() if due <= time)
            times = [expected.pop(one) for one in taken]
            assert times == sorted(times)
        else:
            first = deadlines.take_first(time)
            due = min(expected.values(), default=NEVER)
            assert (first is not None) == (due <= time)
            assert first is None or expected.pop(first) == due
        assert len(deadlines) == len(expected)
        assert deadlines.next_time == min(expected.values(), default=NEVER)
        assert all(deadlines.get(one) == expected.get(one, NEVER) for one in range(6))


def test_outdated_entries_take_a_limited_amount_of_memory() -> None:
    deadlines: Deadlines[int] = Deadlines()
    for number in range(10_000):
        deadlines.set(number % 10, float(number))
    assert len(deadlines) == 10
    assert len(deadlines._heap) < 200
    assert deadlines.take_due(1e9) == list(range(10))
