"""Files that appear, or change, all at once."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.patches import patch_within

from mpicoll import atomic_files


def test_write_replaces_and_create_does_not(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert atomic_files.create(path, b"\xff")
    assert not atomic_files.create(path, "second")
    assert path.read_bytes() == b"\xff"
    atomic_files.write(path, iter(["ä", "\n"]))
    assert path.read_text(encoding="utf-8") == "ä\n"
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_the_umask_applies(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        atomic_files.write(tmp_path / "file", "")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_a_failed_write_leaves_the_old_contents(tmp_path: Path) -> None:
    def broken() -> Iterator[str]:
        yield "new"
        raise OSError(errno.ENOSPC, "no space")

    path = tmp_path / "file"
    path.write_text("old")
    for function in (atomic_files.write, atomic_files.create):
        with pytest.raises(OSError, match="no space"):
            function(path, broken())
    assert path.read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_create_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(source: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, "no hard links here")

    patch_within(monkeypatch, atomic_files, os, link=link)
    assert atomic_files.create(tmp_path / "file", "first")
    assert not atomic_files.create(tmp_path / "file", "second")
    assert (tmp_path / "file").read_text() == "first"
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
