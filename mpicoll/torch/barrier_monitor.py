"""Barrier that reports the missing ranks. It uses the store, so it works even if MPI is blocked."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from mpicoll.errors import Timeout

GRACE = timedelta(seconds=10)
"""Additional time for which the other ranks wait after rank 0's timeout, to receive its report of the missing ranks."""


def barrier(
    store: dist.Store,
    rank: int,
    size: int,
    timeout: timedelta,
    wait_all_ranks: bool,
    explain: Callable[[str], str] | None = None,
) -> None:
    """Wait until all ranks have called this function.

    If some ranks have not called it within `timeout`, rank 0 raises Timeout with the first missing rank or, with
    `wait_all_ranks`, all missing ranks, and with the result of `explain` about them. The other ranks raise the same
    error without the result of `explain`. `store` must be new for each barrier, and the same on all ranks.
    """
    if rank == 0:
        report = _wait_for_ranks(store, size, timeout, wait_all_ranks)
        store.set("report", report)
        if report:
            report = f"monitored_barrier: [Rank 0]: {report}"
            explanation = explain(report) if explain is not None else ""
            raise Timeout(f"{report}\n{explanation}" if explanation else report)
        return
    store.set(f"arrived/{rank}", "")
    try:
        store.wait(["report"], timeout + GRACE)
        report = store.get("report").decode()
    except RuntimeError:
        report = f"no report was received within {timeout.total_seconds():g} s"
    if report:
        raise Timeout(
            f"monitored_barrier: [Rank {rank}]: Rank {rank} successfully reached monitoredBarrier, but received errors"
            f" while waiting for send/recv from rank 0: {report}"
        )


def _wait_for_ranks(store: dist.Store, size: int, timeout: timedelta, wait_all_ranks: bool) -> str:
    """Wait for all ranks, and return the error text; empty if all have arrived.

    The text is that of torch, because programs may search for it.
    """
    milliseconds = int(timeout.total_seconds() * 1000)
    if milliseconds <= 0:
        return f"Rank 0 timed out in monitoredBarrier after {milliseconds} ms"
    deadline = time.monotonic() + timeout.total_seconds()
    missing: list[int] = []
    for other in range(1, size):
        left = max(deadline - time.monotonic(), 1e-3)
        try:
            store.wait([f"arrived/{other}"], timedelta(seconds=left))
        except RuntimeError:
            missing.append(other)
            if not wait_all_ranks:
                break
    if not missing:
        return ""
    names = ("Ranks " if wait_all_ranks else "Rank ") + ", ".join(map(str, missing))
    return f"{names} failed to pass monitoredBarrier in {milliseconds} ms"
