"""Files of the kernel, such as those below /proc, read without pathlib, which takes milliseconds to import."""

from __future__ import annotations

import os


def read_file(path: str, limit: int = -1) -> str:
    """Return the text of a file of the kernel, or its first `limit` characters. Raises OSError."""
    with open(path, errors="replace") as file:  # noqa: PTH123
        return file.read(limit)


def read_link(path: str) -> str:
    """Return what a symbolic link of the kernel refers to. Raises OSError."""
    return os.readlink(path)  # noqa: PTH115
