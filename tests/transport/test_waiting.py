"""Waiting by polling: bounds, and what happens between polls."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from mpicoll.errors import Timeout
from mpicoll.transport import waiting


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The pauses between polls, which take no time. Other threads of the process keep the real module `time`."""
    made: list[str] = []
    monkeypatch.setattr(waiting, "yield_core", lambda: made.append("yield"))
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: made.append(f"sleep {seconds}"))
    monkeypatch.setattr(waiting, "time", clock)
    return made


def test_a_wait_spins_then_yields_then_sleeps(pauses: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting.time, "monotonic", lambda: 0.0)
    polls = iter([0] * (waiting.SPINS + waiting.YIELDS + 2) + [7])
    assert waiting.poll(lambda: next(polls), None, "test", lambda: pauses.append("check")) == 7
    assert pauses == ["yield"] * waiting.YIELDS + ["check", f"sleep {waiting.NAP}"] * 2


def test_a_wait_yields_for_a_limited_time(pauses: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where other processes use the cores, a yield may take 20 ms, and 1,000 of them 20 s."""
    monkeypatch.setattr(waiting.time, "monotonic", lambda: 0.02 * pauses.count("yield"))
    polls = iter([0] * 100 + [7])
    assert waiting.poll(lambda: next(polls), None, "test") == 7
    assert pauses.count("yield") <= waiting.YIELDS_PER_LOOK
    assert pauses[-1].startswith("sleep")


def test_a_long_wait_sleeps_longer_up_to_a_limit(pauses: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 0.1, 0.5, 60.0])
    monkeypatch.setattr(waiting.time, "monotonic", lambda: next(times))
    backoff = waiting.Backoff(0)
    for _ in range(3):
        backoff.sleep()
    assert pauses == ["sleep 0.0001", "sleep 0.0005", "sleep 0.001"]


def test_a_wait_has_limits_of_its_own(pauses: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 0.0003, 1.0, 60.0])
    monkeypatch.setattr(waiting.time, "monotonic", lambda: next(times))
    backoff = waiting.Backoff(yield_seconds=2e-4, longest_nap=5e-3)
    while backoff.yield_core():
        pass
    for _ in range(2):
        backoff.sleep()
    assert pauses == ["yield"] * waiting.YIELDS_PER_LOOK + ["sleep 0.001", "sleep 0.005"]


def test_what_is_ready_is_not_waited_for(pauses: list[str]) -> None:
    assert waiting.poll(lambda: 3, 0.0, "test") == 3
    assert waiting.wait_for(lambda: 0, 0.0) == 0
    assert pauses == []


def test_a_poll_ends_by_its_timeout_or_by_its_check() -> None:
    with pytest.raises(Timeout, match=r"^test: not complete within the timeout of 0\.01 s$"):
        waiting.poll(lambda: 0, 0.01, "test")

    def fail() -> None:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        waiting.poll(lambda: 0, None, "test", fail)


def test_wait_for() -> None:
    values = iter([None, None, 0, 1])
    assert waiting.wait_for(lambda: next(values), 10.0) == 0
    begin = time.monotonic()
    assert waiting.wait_for(lambda: None, 0.01) is None
    assert time.monotonic() - begin >= 0.01


def test_yielding_lets_other_threads_run() -> None:
    seen: list[int] = []
    thread = threading.Thread(target=seen.append, args=(1,))
    begin = time.monotonic()
    thread.start()
    while not seen:
        waiting.yield_core()
        assert time.monotonic() - begin < 60
    thread.join()
