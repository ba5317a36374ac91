"""Files that appear, or change, all at once: another process sees the old or the new contents, never a part."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def write(path: Path, content: str | bytes | Iterable[str] | Iterable[bytes]) -> None:
    """Write a file, replacing one of that name. Texts are written in UTF-8, an iterable piece by piece.

    Raises OSError, and leaves no temporary file behind, if it can't be written.
    """
    with _draft(path, content) as draft:
        draft.replace(path)


def create(path: Path, content: str | bytes | Iterable[str] | Iterable[bytes]) -> bool:
    """Write a new file and return True, or return False if there is a file of that name. Raises OSError."""
    with _draft(path, content) as draft:
        try:
            os.link(draft, path)
        except FileExistsError:
            return False
        except OSError:  # a file system without hard links; then the name is reserved first
            try:
                path.touch(exist_ok=False)
            except FileExistsError:
                return False
            draft.replace(path)
    return True


@contextmanager
def _draft(path: Path, content: str | bytes | Iterable[str] | Iterable[bytes]) -> Iterator[Path]:
    """Write a temporary file in the folder of `path`, and remove it in the end if it still exists."""
    draft = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    try:
        # Unlike tempfile, open applies the user's umask.
        with draft.open("xb") as file:
            pieces = [content] if isinstance(content, (str, bytes)) else content
            file.writelines(one.encode() if isinstance(one, str) else one for one in pieces)
        yield draft
    finally:
        draft.unlink(missing_ok=True)
