"""Sends of workers and servers, which take turns on a link."""

from __future__ import annotations

import pytest

from mpicoll.parallel.parameter_server import transfers
from mpicoll.parallel.parameter_server.transfers import IN_FLIGHT, Pace


def test_messages_do_not_start_together(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(transfers.time, "monotonic", lambda: now[0])
    pace = Pace()
    assert [pace.may_start() for _ in range(IN_FLIGHT)] == [True] * IN_FLIGHT, "how long they take is not known"
    now[0] += 0.008
    for _ in range(IN_FLIGHT):
        pace.end(100.0)
    assert pace.may_start()
    assert not pace.may_start(), "it would arrive together with the other one"
    now[0] += 0.75 * 0.008 / IN_FLIGHT + 1e-6
    assert pace.may_start()


def test_a_message_that_was_received_late_does_not_hold_up_others(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(transfers.time, "monotonic", lambda: now[0])
    pace = Pace()
    now[0] += 60.0
    pace.end(100.0)
    assert pace.may_start()
    now[0] += 0.011
    assert pace.may_start()
