"""When attempts to connect are due, and what their failures mean."""

from __future__ import annotations

import errno

import pytest

from mpicoll.transport.control.attempts import Attempts


def test_pauses_double_up_to_a_limit() -> None:
    attempts = Attempts(["a", "b"], due=0.0, pause=0.1, longest=0.3)
    assert attempts.take_due(0.0) == ["a", "b"]
    assert attempts.next_time == float("inf")  # both are under way
    now, pauses = 0.0, []
    for _ in range(4):
        attempts.postpone("a", now)
        pauses.append(attempts.next_time - now)
        now = attempts.next_time
        assert attempts.take_due(now - 0.01) == []
        assert attempts.take_due(now) == ["a"]
    assert pauses == pytest.approx([0.1, 0.2, 0.3, 0.3])


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ((errno.ECONNREFUSED, True), (errno.EPROTO, False), "closed"),
        ((errno.ECONNREFUSED, True), (errno.ETIMEDOUT, True), "unreachable"),
        ((errno.EHOSTUNREACH, True), (errno.ENETUNREACH, True), "unreachable"),
        ((errno.ECONNREFUSED, True), (errno.ECONNRESET, True), None),  # which may pass
        ((errno.ECONNREFUSED, True), (errno.ETIMEDOUT, False), None),  # of a connection
        ((errno.ECONNREFUSED, True), None, None),
    ],
)
def test_only_failures_at_all_addresses_count(
    first: tuple[int, bool], second: tuple[int, bool] | None, expected: str | None
) -> None:
    attempts = Attempts(["a", "b"], due=0.0, pause=0.1, longest=1.0)
    attempts.record_failure("a", first[0], connecting=first[1])
    assert attempts.outcome is None
    if second is not None:
        attempts.record_failure("b", second[0], connecting=second[1])
    assert attempts.outcome == expected
    attempts.record_success("a")
    assert attempts.outcome is None
    attempts.record_failure("a", first[0], connecting=first[1])
    assert attempts.outcome == expected
    attempts.discard_failures()
    assert attempts.outcome is None
