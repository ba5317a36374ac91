"""The probes of MPI's reducing collectives notice wrong results."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpicoll.transport import reduction_probes, reductions


class _Whole:
    """MPI's collectives of two ranks that have what the probe gives them; the one called `spoiled` is wrong in its last
    element."""

    def __init__(self, rank: int, spoiled: str) -> None:
        self._rank = rank
        self._spoiled = spoiled

    def _parts(self, op: str, like: Any) -> tuple[Any, Any, Any]:
        left, right = reductions.make_operands(op, like.dtype, like.size)
        return left, right, reductions.combine(op, left, right)

    def _give(self, target: Any, value: Any, name: str) -> None:
        target[...] = value
        if name == self._spoiled:
            target[-1:] = target[-1:] == 0

    def allreduce(self, source: Any, target: Any, op: str) -> None:
        self._give(target, self._parts(op, source)[2], "Allreduce in place" if source is target else "Allreduce")

    def reduce(self, source: Any, target: Any, op: str, root: int) -> None:
        name = "Reduce in place" if source is target else f"Reduce to rank {root}"
        if self._rank == root:
            self._give(target, self._parts(op, source)[2], name)

    def scan(self, source: Any, target: Any, op: str) -> None:
        left, _, total = self._parts(op, source)
        self._give(target, (left, total)[self._rank], "Scan in place" if source is target else "Scan")

    def exscan(self, source: Any, target: Any, op: str) -> None:
        if self._rank == 1:
            self._give(target, self._parts(op, source)[0], "Exscan")

    def reduce_scatter(self, source: Any, target: Any, counts: Any, op: str) -> None:
        total = self._parts(op, source)[2]
        name = "Reduce_scatter" if counts else "Reduce_scatter_block"
        self._give(target, np.split(total, 2)[self._rank], name)


@pytest.mark.parametrize("rank", [0, 1])
def test_collectives_that_reduce_wrongly(rank: int) -> None:
    def why(spoiled: str) -> str | None:
        transport: Any = SimpleNamespace(native=_Whole(rank, spoiled), rank=rank)
        return reduction_probes._collective_defect(transport, "max", np.dtype(np.uint16), 33)

    assert why("none of them") is None
    both = ("Allreduce", "Allreduce in place", "Scan", "Scan in place", "Reduce_scatter", "Reduce_scatter_block")
    for name in (*both, *(("Exscan", "Reduce to rank 1") if rank else ("Reduce in place", "Reduce to rank 0"))):
        found = why(name)
        assert found is not None, name
        assert found.startswith("the MPI library computes max of uint16 wrongly: ")
        assert found.endswith(f"(by {name} of 66 elements on rank {rank} of 2)")
