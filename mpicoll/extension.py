"""The extension in C, mpicoll._shm: whether it is there."""

from __future__ import annotations

import functools

REMEDY = (
    "with a C compiler and Python's headers (apt-get install gcc python3-dev), install mpicoll again: with the options"
    " --force-reinstall --no-deps --no-cache-dir of pip"
)
"""What brings the extension. Without the last option pip would use the wheel that it built before."""


@functools.cache
def find_missing_reason() -> str | None:
    """Return why the extension can't be imported; None if it can."""
    try:
        import mpicoll._shm  # noqa: F401
    except ImportError as error:
        return str(error)
    return None
