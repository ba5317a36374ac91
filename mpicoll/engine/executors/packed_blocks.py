"""Order of the blocks of collectives of several nodes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from mpicoll.buffers.dtypes import Array
from mpicoll.engine.core.arrays import displacements, even_displacements


def cut(extent: slice, pieces: int) -> list[slice]:
    """Return consecutive parts of `extent`."""
    ends = even_displacements(extent.stop - extent.start, pieces)
    return [slice(extent.start + start, extent.start + stop) for start, stop in pairwise(ends)]


class PackedBlocks:
    """The blocks of all ranks, or piece `piece` of `pieces` of each of them, grouped by lane, in the order of nodes.

    `ranks` are the ranks of each node, `rank` is this rank, and `counts` are the elements of the blocks.
    """

    def __init__(
        self, ranks: Sequence[Sequence[int]], rank: int, counts: Sequence[int], pieces: int, piece: int
    ) -> None:
        nodes = len(ranks)
        order = [node[local] for local in range(len(ranks[0])) for node in ranks]
        offsets = displacements(counts)
        places = [cut(slice(*extent), pieces)[piece] for extent in pairwise(offsets)]
        sizes = [place.stop - place.start for place in places]
        ends = displacements(sizes[one] for one in order)
        self._unpacked = [places[one] for one in order]
        self._packed = [slice(*extent) for extent in pairwise(ends)]
        # With ranks placed round-robin on the nodes, the blocks are in this order already.
        self.in_order = order == sorted(order) and pieces == 1
        """True if the order of ranks is the packed order."""
        own, start = places[rank], offsets[rank]
        self.block = slice(own.start - start, own.stop - start)
        """This rank's piece, in its block."""
        self.starts = ends[::nodes]
        self.lanes = [stop - start for start, stop in pairwise(self.starts)]
        local = next(node.index(rank) for node in ranks if rank in node)
        self.lane = [sizes[node[local]] for node in ranks]
        self._own = slice(*self.starts[local : local + 2])

    def own(self, packed: Array) -> Array:
        """Return the blocks of this rank's lane."""
        return packed[self._own]

    def pack(self, blocks: Array, packed: Array) -> None:
        if packed is not blocks:
            for place, at in zip(self._unpacked, self._packed, strict=True):
                packed[at] = blocks[place]

    def unpack(self, packed: Array, blocks: Array) -> None:
        if packed is not blocks:
            for place, at in zip(self._unpacked, self._packed, strict=True):
                blocks[place] = packed[at]
