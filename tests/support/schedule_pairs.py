"""The schedules that are built in."""

from __future__ import annotations

from mpicoll import schedules

PAIRS = [
    (collective, name)
    for collective in schedules.collectives()
    if collective != "barrier"
    for name in schedules.algorithms_of(collective)
]
"""The collective and the algorithm of each, but barriers, which move no data."""
