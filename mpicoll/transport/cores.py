"""The cores that a rank may use."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import suppress

from mpicoll.proc_files import read_file


def count_cores(processes: Sequence[int], rank: int, local_ranks: int) -> int:
    """Return the cores that `rank` may use without taking them from other ranks of its node, at least 1.

    `processes` are those of some of the `local_ranks` ranks of the node, by rank; 0 is this one. A core to which
    several ranks are bound is divided among them. The other ranks count as bound like these, and processes of which
    nothing is known as this one.
    """
    if not hasattr(os, "sched_getaffinity"):
        return 1
    own = os.sched_getaffinity(0)
    if len(own) == 1:
        return 1  # most often, ranks are bound so: there is no need to look at the others
    masks = [own if index == rank else _get_mask(process, own) for index, process in enumerate(processes)]
    ratio = max(1.0, local_ranks / len(masks))
    shares = sum(1 / sum(core in mask for mask in masks) for core in own)
    least = min(shares / ratio, _read_quota() / local_ranks)
    return max(1, int(least + 1e-9))  # shares of a third add up to whole cores


def _read_quota() -> float:
    """Return the number of cores whose time the processes of a container may use."""
    with suppress(OSError, ValueError):
        quota, period = read_file("/sys/fs/cgroup/cpu.max").split()
        return int(quota) / int(period)
    return math.inf


def _get_mask(process: int, default: set[int]) -> set[int]:
    try:
        return os.sched_getaffinity(process)
    except OSError:  # in another container
        return default
