"""Reports, and folders for them that do not respond."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.watchdogs import WatchedRank

from mpicoll.engine.diagnostics import report_file, reporter


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A file system that does not respond until the end of the test."""
    release = threading.Event()
    monkeypatch.setattr(report_file, "write", lambda *arguments: release.wait(60))
    monkeypatch.setattr(reporter, "_WRITE_TIMEOUT", 0.1)
    yield
    release.set()


@pytest.mark.usefixtures("blocked")
def test_a_folder_that_does_not_respond_does_not_prevent_the_end_of_the_job(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    watched = WatchedRank()
    watched.watchdog.reporter.folder = tmp_path
    threading.Thread(target=watched.watchdog.abort.request, args=("it can never complete",), daemon=True).start()
    assert watched.ended.wait(30)
    text = capfd.readouterr().err
    assert "mpicoll: it can never complete; the job is ended." in text
    assert f"The report could not be written to {tmp_path} within 0.1 s; set MPICOLL_REPORT" in text


def test_a_folder_that_is_not_writable_is_named(tmp_path: Path) -> None:
    watched = WatchedRank()
    watched.watchdog.reporter.folder = tmp_path / "file"
    (tmp_path / "file").touch()
    _, write = watched.watchdog.reporter.examine("late")
    assert f"The report can't be written to {tmp_path / 'file'} (" in write()
