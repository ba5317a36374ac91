# Collectives of the ranks of one node, in C.

from collections.abc import Sequence

from mpicoll.buffers.dtypes import Array

def fold(op: str, dtype: str, parts: Sequence[Array], out: Array, instructions: str | None = None, /) -> None: ...
