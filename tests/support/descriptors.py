"""Descriptors of this process, by what they refer to. Threads of earlier tests may close others at any time."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path


def count_descriptors(pattern: str) -> int:
    """Count descriptors of files whose names have a part that matches the regular expression `pattern`."""
    count = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # just closed, as that of the directory itself
            count += re.search(pattern, str(descriptor.readlink())) is not None
    return count


def count_process_descriptors() -> int:
    """Count descriptors of processes, and of /dev/null, which stands for one."""
    return count_descriptors(r"pidfd|/stat$|/dev/null$")
