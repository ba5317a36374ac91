"""The parameters of a collective through shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias
from zlib import crc32

import numpy as np

from mpicoll.buffers.ops import Fold
from mpicoll.engine.selection.catalogue import SLOT_BYTES
from mpicoll.named_tuple import NamedTuple

if TYPE_CHECKING:
    from mpicoll.engine.core.arena import Body


class CollectiveSpec(NamedTuple):
    """Parameters of a collective. `counts` are the elements of each rank's block, or of the vector alone. Of alltoall
    with counts they are those of the blocks that this rank sends, `arrivals` those of the blocks that it receives, and
    `rows` is their :func:`~mpicoll.engine.diagnostics.flight_recorder.number_rows`."""

    collective: str
    method: str
    dtype: np.dtype[Any]
    counts: tuple[int, ...] = ()
    root: int = 0
    fold: Fold | None = None
    segment: int | None = None
    """Bytes of a piece."""
    identity: bytes = b""
    """The elements of the output of exscan on rank 0."""
    arrivals: tuple[int, ...] = ()
    rows: int = 0

    @property
    def signature(self) -> int:
        """Hash of the parameters: the same on all ranks, and with high probability different for other operations."""
        what = self.dtype.itemsize if self.fold is None else self.fold.what
        counts = "each rank's own" if self.arrivals else self.counts
        fields = (self.collective, self.method, what, counts, self.root, self.segment)
        return crc32(repr(fields).encode())


def get_piece_bytes(size: int, has_own_cores: bool = False) -> int:
    """Return the default size of a piece for `size` ranks, each of which works on its share of it: small enough for the
    shares of all concurrent steps to stay in a core's cache, and for the ranks that read a piece to do so while others
    write the next one; and large enough for the synchronisation to be cheap, which takes longer where ranks share
    cores."""
    return min(SLOT_BYTES, size * (64 if has_own_cores else 512) * 1024)


Program: TypeAlias = "tuple[Body, int]"
"""A function that carries out a collective by :meth:`Arena.run`, and the number of its steps."""
