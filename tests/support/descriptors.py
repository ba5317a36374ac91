"""Descriptors of this process, by what they refer to."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def count_process_descriptors() -> int:
    """Count descriptors of processes, and of /dev/null, which stands for one. Threads of earlier tests may close others
    at any time."""
    count = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # just closed, as that of the directory itself
            file = str(descriptor.readlink())
            count += "pidfd" in file or file.endswith(("/stat", "/dev/null"))
    return count
