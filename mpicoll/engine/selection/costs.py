"""Costs of messages, from which the time that a schedule takes is predicted."""

from __future__ import annotations

from mpicoll.named_tuple import NamedTuple


class Link(NamedTuple):
    """Seconds per message, and per byte."""

    alpha: float
    beta: float


class Costs(NamedTuple):
    """Costs of messages within a node (`node`) and between nodes (`network`); seconds per byte reduced (`gamma`)."""

    node: Link
    network: Link
    gamma: float
    measured: bool


TYPICAL = Costs(Link(5e-6, 0.15e-9), Link(20e-6, 0.8e-9), 0.1e-9, measured=False)
"""Costs assumed until `mpicoll tune` has measured: messages through Python and shared memory within a node, and through
10 Gbit/s Ethernet between nodes."""
