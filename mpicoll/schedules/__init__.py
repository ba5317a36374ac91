"""Collective algorithms as data: write, find, verify, price and draw them. Needs the standard library only."""

from __future__ import annotations

# Each of these modules registers its algorithms when it is imported.
from mpicoll.schedules import (  # noqa: F401
    allgather,
    allreduce,
    alltoall,
    barrier,
    bcast,
    exscan,
    gather,
    reduce,
    reduce_scatter,
    scan,
    scatter,
)
from mpicoll.schedules.animation import animate
from mpicoll.schedules.cost import Cost, closed_form, cost, price, traffic
from mpicoll.schedules.draw import draw
from mpicoll.schedules.load_profile import Cluster, Profile
from mpicoll.schedules.model import (
    Algorithm,
    Chunks,
    Copy,
    Local,
    Recv,
    Reduce,
    Round,
    Schedule,
    Send,
    algorithm,
    algorithms_of,
    collectives,
    find,
    get,
)
from mpicoll.schedules.parameter_server import PARAMETER_SERVER
from mpicoll.schedules.simulate import Forecast, profile, simulate
from mpicoll.schedules.verify import Report, verify

__all__ = [
    "PARAMETER_SERVER",
    "Algorithm",
    "Chunks",
    "Cluster",
    "Copy",
    "Cost",
    "Forecast",
    "Local",
    "Profile",
    "Recv",
    "Reduce",
    "Report",
    "Round",
    "Schedule",
    "Send",
    "algorithm",
    "algorithms_of",
    "animate",
    "closed_form",
    "collectives",
    "cost",
    "draw",
    "find",
    "get",
    "price",
    "profile",
    "simulate",
    "traffic",
    "verify",
]
