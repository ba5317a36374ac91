"""Kinds of collectives."""

from __future__ import annotations

BLOCKS = frozenset({"allgather", "gather", "scatter", "reduce_scatter", "alltoall"})
"""Collectives whose chunks are the blocks of the ranks; other algorithms choose how to cut their vector."""

ROOTED = frozenset({"bcast", "reduce", "gather", "scatter"})
"""Collectives with a root: their generators are called with ``(rank, size, root)``, others with ``(rank, size)``."""
