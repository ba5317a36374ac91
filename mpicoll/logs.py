"""The logger of the package."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import logging


def get_logger() -> logging.Logger:
    """Return the logger of the package."""
    # Not at module level: most programs log nothing, and start faster without it.
    import logging

    return logging.getLogger("mpicoll")
