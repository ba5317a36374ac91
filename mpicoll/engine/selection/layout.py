"""Number of ranks and nodes of a communicator, as far as selection depends on it."""

from __future__ import annotations

from collections.abc import Sequence

from mpicoll.named_tuple import NamedTuple
from mpicoll.wording import count


class NodeLayout(NamedTuple):
    """Number of ranks, of nodes, and of ranks on the node that has most."""

    ranks: int
    nodes: int
    per_node: int

    def __str__(self) -> str:
        ranks = count(self.ranks, "rank")
        if self.nodes == 1:
            return f"{ranks} on 1 node"
        return f"{ranks} on {self.nodes} nodes, {self.per_node} on {'each' if self.even else 'the fullest'}"

    @property
    def even(self) -> bool:
        """True if all nodes have the same number of ranks."""
        return self.nodes * self.per_node == self.ranks


def make_layout(nodes: Sequence[int]) -> NodeLayout:
    """Return the layout of ranks where ``nodes[rank]`` is the number of the rank's node."""
    counts: dict[int, int] = {}
    for node in nodes:
        counts[node] = counts.get(node, 0) + 1
    return NodeLayout(len(nodes), len(counts), max(counts.values()))
