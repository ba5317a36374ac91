"""Algorithms that are tried for a repeated call, and whether they give equal results."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpicoll.engine.selection.catalogue import HIERARCHICAL, NATIVE, schedules_of
from mpicoll.engine.selection.costs import TYPICAL, Costs, Link
from mpicoll.engine.selection.query import SelectionQuery
from mpicoll.engine.selection.selector import choose, get_default_segments, unsupported_reasons

if TYPE_CHECKING:
    from mpicoll.buffers.ops import Reduction

_SLOW_NETWORK = Costs(TYPICAL.node, Link(50e-6, 8e-9), TYPICAL.gamma, measured=False)
"""Costs of messages through 1 Gbit/s Ethernet."""

_MAX_SCHEDULES = 4
"""Largest number of schedules that are tried."""

_MAX_RATIO = 2.0
"""Ratio of a schedule's predicted time to the least one from which it is not tried."""


def list_candidates(query: SelectionQuery) -> tuple[str, ...]:
    """Return the algorithms to try for `query`, the one that is taken untried first: the MPI library's own, the
    hierarchical one, and the schedules that could be the fastest by the predicted times for either of two networks, or
    by measured costs."""
    # Not at module level, as it loads the schedules.
    from mpicoll.engine.selection.cost_model import predict

    supported = [name for name, refusal in unsupported_reasons(query).items() if refusal is None]
    schedules = schedules_of(query.collective)
    shape, costs = query.context.layout, query.context.table.costs
    segments = get_default_segments(query)
    ratios: dict[str, float] = {}
    for one in (costs,) if costs.measured else (TYPICAL, _SLOW_NETWORK):
        times = {
            name: predict(schedules[name], shape, query.nbytes or 0, segments, one)
            for name in supported
            if name in schedules
        }
        least = min(times.values(), default=0.0)
        for name, seconds in times.items():
            ratio = seconds / least if least else 1.0
            ratios[name] = min(ratio, ratios.get(name, ratio))
    fast = [name for name in sorted(ratios, key=lambda name: (ratios[name], name)) if ratios[name] <= _MAX_RATIO]
    others = [name for name in (NATIVE, HIERARCHICAL) if name in supported]
    return tuple(dict.fromkeys([choose(query, None).name, *others, *fast[:_MAX_SCHEDULES]]))


def keeps_results(query: SelectionQuery, reduction: Reduction | None) -> bool:
    """Return True if all algorithms give the same bits: they only move data, or they reduce integers, select the
    smallest or largest element, or add the numbers of two ranks."""
    if reduction is None:
        return True
    if not reduction.has_kernel:
        return False
    if reduction.name in ("min", "max"):
        return True
    if query.kind == "integer" and reduction.finish is None:
        return True
    return reduction.name == "sum" and query.context.layout.ranks == 2
