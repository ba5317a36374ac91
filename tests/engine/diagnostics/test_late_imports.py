"""Imports by the watchdog."""

from __future__ import annotations

import threading

import pytest

from mpicoll.engine.diagnostics import late_imports


def test_a_fork_waits_for_imports() -> None:
    order: list[str] = []

    def fork() -> None:
        late_imports.prevent_imports()
        order.append("forked")
        late_imports.allow_imports()

    with late_imports._importing:
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join(0.05)
        order.append("imported")
    thread.join(30)
    assert order == ["imported", "forked"]
    assert not late_imports._importing.locked()


def test_a_fork_does_not_wait_for_an_import_that_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_imports, "_IMPORT_TIMEOUT", 0.01)
    with late_imports._importing:
        late_imports.prevent_imports()
        late_imports.allow_imports()
        assert late_imports._importing.locked()
