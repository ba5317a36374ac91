"""Context parallelism: exact attention over a sequence that is cut among ranks."""

from mpicoll.parallel.context_parallel.ring import (
    Layout,
    gather_sequence,
    position_ids,
    ring_attention,
    split_sequence,
    ulysses_attention,
)

__all__ = ["Layout", "gather_sequence", "position_ids", "ring_attention", "split_sequence", "ulysses_attention"]
