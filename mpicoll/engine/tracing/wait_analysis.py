"""The rank that the others waited for in each collective of a trace, and how long."""

from __future__ import annotations

import numpy as np

from mpicoll.engine.tracing.table import Ints, TraceTable


def add_wait_times(table: TraceTable) -> None:
    """Compute the columns `wait` and `last`: the n-th collective of a communicator is the same one on all its ranks.

    A rank waits until the last rank has entered, but no longer than its own part of the collective takes: its exchanges
    with other ranks may complete before the last rank enters.
    """
    table.wait = np.full(len(table), np.nan)
    table.last = np.full(len(table), -1)
    rows = np.flatnonzero(table.number > 0)
    if not len(rows):
        return
    begin, end = table.begin[rows], table.end[rows]
    instance, count = number_collectives(table, rows)
    latest = np.full(count, -np.inf)
    np.maximum.at(latest, instance, begin)
    last = np.empty(count, np.int64)
    order = np.argsort(begin, kind="stable")
    last[instance[order]] = table.rank[rows][order]  # of the assignments to one instance the last one counts
    table.wait[rows] = np.fmin(latest[instance] - begin, end - begin)
    table.last[rows] = last[instance]


def number_collectives(table: TraceTable, rows: Ints) -> tuple[Ints, int]:
    """Return for each of the `rows`, which are collectives, the number of its collective, the same one on all ranks;
    and the number of collectives."""
    most = int(table.number[rows].max()) + 1 if len(rows) else 1
    _, instance = np.unique(table.comm[rows] * most + table.number[rows], return_inverse=True)
    return instance, int(instance.max()) + 1 if len(rows) else 0
