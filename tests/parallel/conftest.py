"""The ranks that a test body runs on, and torch's default process group."""

from __future__ import annotations

from support.process_group import default_group
from support.ranks import ranks, several, some, some_more

__all__ = ["default_group", "ranks", "several", "some", "some_more"]
