"""Where files of the user's cache directory are."""

from __future__ import annotations

import pytest

from mpicoll import user_cache


@pytest.mark.parametrize(
    ("cache", "home", "path"),
    [
        ("/cache", "/home", "/cache/mpicoll/file"),
        ("", "/home", "/home/.cache/mpicoll/file"),
        ("cache", "/home", "/home/.cache/mpicoll/file"),
        ("./cache", "home", None),
        ("", "home", None),
    ],
)
def test_relative_paths_are_ignored(cache: str, home: str, path: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    monkeypatch.setenv("HOME", home)
    assert user_cache.locate_file("file") == path
