"""The ranks that a test body runs on."""

from support.ranks import ranks, several, some, some_more

__all__ = ["ranks", "several", "some", "some_more"]
