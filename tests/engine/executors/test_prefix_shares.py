"""Large prefixes, of which each rank combines a share for all others: with the bits of a scan that goes from rank to
rank."""

from __future__ import annotations

import numpy as np
import pytest
from support.ranks import Ranks

import mpicoll

pytestmark = pytest.mark.extension

RANKS = 5
NBYTES = 200_016  # more than what is combined by each rank for itself, and not a multiple of a piece or of a share


@pytest.mark.parametrize(
    ("dtype", "op"), [("float32", "sum"), ("float16", "sum"), ("bool", "lxor"), ("complex128", "prod"), ("int8", "max")]
)
def test_bits(dtype: str, op: str) -> None:
    def body() -> None:
        rank = mpicoll.world().rank
        x = np.random.default_rng(rank).integers(-3, 4, NBYTES // np.dtype(dtype).itemsize).astype(dtype)
        x += np.asarray(0.1).astype(dtype)
        given = x.copy()
        for call in (mpicoll.scan, mpicoll.exscan):
            want = call(x, op=op, algorithm="linear")
            for algorithm in ("shm_pipelined/64k", "cma"):
                assert call(x, op=op, algorithm=algorithm).tobytes() == want.tobytes()
                np.testing.assert_array_equal(x, given)
                in_place = x.copy()
                call(in_place, out=in_place, op=op, algorithm=algorithm)
                assert in_place.tobytes() == want.tobytes()

    mpicoll.run_local(body, RANKS)


@pytest.mark.every_size
def test_processes(several: Ranks) -> None:
    """Which write to each other's memory."""

    def body() -> None:
        rank = mpicoll.world().rank
        x = np.arange(100_001.0) + rank
        for algorithm in ("cma", None):
            out = mpicoll.scan(x, algorithm=algorithm)
            np.testing.assert_array_equal(out, (rank + 1) * np.arange(100_001.0) + rank * (rank + 1) / 2)
            out = mpicoll.exscan(x, algorithm=algorithm)
            np.testing.assert_array_equal(out, rank * np.arange(100_001.0) + rank * (rank - 1) / 2)

    several(body)
