"""Memory that is free for this process: that of the machine, within the limits of its control groups. Linux."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from mpicoll.proc_files import read_file

_PROC = "/proc"

_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file")
_V2 = ("memory.max", "memory.current", "inactive_file", "active_file")
"""Files with the limit and the usage of a control group, and the fields of memory.stat with the parts of the usage that
the kernel can reclaim: the cache of files."""


def query_free_memory() -> int | None:
    """Return the free bytes of the machine, or of the control group (cgroup v1 or v2) that has the least; None if that
    can't be found out."""
    free = []
    with suppress(OSError, ValueError, IndexError):
        text = read_file(f"{_PROC}/meminfo")
        free.append(1024 * int(text.partition("MemAvailable:")[2].split()[0]))
    with suppress(OSError, ValueError, IndexError):
        free += [left for group, names in _find_groups() if (left := _free_in_group(group, *names)) is not None]
    return min(free, default=None)


def _find_groups() -> Iterator[tuple[str, tuple[str, str, str, str]]]:
    """Yield the directories of the control groups of this process that may limit its memory, up to the root of their
    hierarchy, each with the names of its files."""
    paths = {}
    for line in read_file(f"{_PROC}/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" or "memory" in controllers.split(","):
            paths["cgroup2" if number == "0" else "cgroup"] = path
    for line in read_file(f"{_PROC}/self/mountinfo").splitlines():
        mount, _, filesystem = line.partition(" - ")
        kind, _, options = filesystem.split(" ", 2)
        if kind in paths and (kind == "cgroup2" or "memory" in options.split(",")):
            root, directory = mount.split(" ")[3:5]
            # In a container, the path may be that of the host, which is not in the mounted part of the hierarchy.
            inner, top = f"{paths[kind].rstrip('/')}/", f"{root.rstrip('/')}/"
            parts = inner.removeprefix(top).split("/")[:-1] if inner.startswith(top) else []
            for depth in range(len(parts), -1, -1):
                yield "/".join([directory, *parts[:depth]]), _V2 if kind == "cgroup2" else _V1


def _free_in_group(group: str, limit: str, usage: str, *reclaimable: str) -> int | None:
    """Return the free bytes of a control group; None if it has no limit, as the root of a hierarchy."""
    with suppress(OSError, ValueError):
        most = int(read_file(f"{group}/{limit}"))  # "max": no limit
        used = int(read_file(f"{group}/{usage}"))
        statistics = dict(line.split(" ", 1) for line in read_file(f"{group}/memory.stat").splitlines())
        return max(0, most - used + sum(int(statistics.get(field, 0)) for field in reclaimable))
    return None
