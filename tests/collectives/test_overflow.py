"""Reductions that overflow, and others that make NaN: these are values like others, and nobody says a word of them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from support.ranks import Ranks

import mpicoll
from mpicoll.engine.selection.catalogue import algorithms_of

COLLECTIVES = ("allreduce", "reduce", "reduce_scatter", "scan", "exscan")
OPS: dict[str, Any] = {"sum": "sum", "prod": "prod", "avg": "avg", "premul": None}
FACTORS = (3.0, 1e300, 1e-300)
"""Of premul_sum, in the order of ranks; some dtypes don't hold all of them."""


def values(name: str, rank: int, size: int) -> np.ndarray[Any, Any]:
    """The largest number, infinities of both signs, NaN."""
    dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    largest = float(ml_dtypes.finfo(np.dtype("float32") if name == "complex64" else dtype).max)
    with np.errstate(all="ignore"):
        return np.tile([largest, -np.inf if rank else np.inf, np.nan, -largest], size).astype(dtype)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64", "complex64"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_nothing_is_said(several: Ranks, library: str, name: str, op: str) -> None:
    """Even where the caller has numpy raise: on a rank that raised in the middle the others would wait."""

    def body() -> None:
        world = mpicoll.world()
        every = [values(name, rank, world.size) for rank in range(world.size)]
        x: Any = every[world.rank]
        if library == "torch":
            x = torch.from_numpy(x.astype("c8" if name == "complex64" else "f8")).to(getattr(torch, name))
        chosen = OPS[op] or mpicoll.premul_sum(FACTORS[world.rank % 3])
        with np.errstate(all="raise"):
            for collective in COLLECTIVES:
                if op == "avg" and collective in ("scan", "exscan"):
                    continue
                for algorithm in (None, *algorithms_of(collective)):
                    try:
                        result = getattr(mpicoll, collective)(x, chosen, algorithm=algorithm)
                    except mpicoll.AlgorithmError:
                        continue
                    if (collective, op) == ("allreduce", "sum"):
                        got = result.to(torch.complex128).numpy() if library == "torch" else result
                        np.testing.assert_array_equal(got.astype("c16"), _sum(every), str(algorithm))

    several(body, timeout=100)


def _sum(every: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    work = np.float32 if every[0].dtype.itemsize == 2 else every[0].dtype
    with np.errstate(all="ignore"):
        return np.add.reduce([one.astype(work) for one in every]).astype(every[0].dtype).astype("c16")
