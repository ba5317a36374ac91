"""Location of mpicoll's files in the user's cache directory, and files of measured results."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from mpicoll import atomic_files
from mpicoll.named_tuple import NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

_LARGEST = 4 << 20
"""Largest size in bytes of a file of entries; larger files are ignored."""

_ENTRIES = 100
"""Largest number of entries in a file; the newest are kept."""


def locate_file(name: str) -> str | None:
    """Return the path of the file `name` in mpicoll's cache directory; None if there is no home directory."""
    # A relative path would be another directory for each current one; XDG's specification says to ignore it.
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not cache.startswith("/"):
        home = os.path.expanduser("~")  # noqa: PTH111  pathlib takes milliseconds to import
        if not home.startswith("/"):
            return None
        cache = f"{home}/.cache"
    return f"{cache}/mpicoll/{name}"


def cache_file(name: str) -> Path | None:
    """Return :func:`locate_file` as a Path."""
    from pathlib import Path  # late: the ranks of a job need none

    path = locate_file(name)
    return None if path is None else Path(path)


class Entries(NamedTuple):
    """JSON file `name` with results that were measured under various conditions.

    The fields of an entry that `results` names are its results; all other fields are its conditions. Entries for which
    `valid` returns False are ignored.
    """

    name: str
    format: str
    version: int
    results: tuple[str, ...]
    valid: Callable[[Mapping[str, Any]], bool]

    @property
    def path(self) -> Path | None:
        """Path of the file; None if there is no home directory."""
        return cache_file(self.name)

    def read(self, conditions: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the entry with exactly these conditions, or None."""
        return next((one for one in self._all() if self._conditions(one) == conditions), None)

    def write(self, entry: dict[str, Any]) -> str:
        """Write `entry` to the file, replacing an entry with the same conditions, and return a text about its location.

        If the file can't be written, the text contains the reason and nothing is raised.
        """
        path = self.path
        if path is None:
            return "not stored, because there is no home directory"
        others = [one for one in self._all() if self._conditions(one) != self._conditions(entry)]
        entries = [*others[1 - _ENTRIES :], entry]
        content = {"format": self.format, "version": self.version, "entries": entries}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_files.write(path, json.dumps(content, indent=1) + "\n")
        except OSError as error:
            return f"but {path} can't be written: {error.strerror}"
        return f"stored in {path}"

    def _conditions(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in entry.items() if name not in self.results}

    def _all(self) -> list[dict[str, Any]]:
        """Return the valid entries of the file; an empty list if the file can't be read."""
        path = locate_file(self.name)
        with suppress(OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
            if path is not None and os.stat(path).st_size <= _LARGEST:  # noqa: PTH116
                with open(path, encoding="utf-8") as file:  # noqa: PTH123
                    content = json.loads(file.read())
                if (content["format"], content["version"]) == (self.format, self.version):
                    return [one for one in content["entries"] if isinstance(one, dict) and self.valid(one)]
        return []
