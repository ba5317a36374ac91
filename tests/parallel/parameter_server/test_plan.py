"""Every element of a model is on one server, and all servers hold the same number of bytes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from mpicoll.parallel.parameter_server.plan import BUCKET_BYTES, Bucket, TensorSpec, make_plan

SPECS = (
    TensorSpec("large", (50, 7), "float64", 8),
    TensorSpec("half", (33,), "float16", 2),
    TensorSpec("empty", (0, 4), "float64", 8),
    TensorSpec("rows", (11, 3), "float32", 4, sparse=True),
    TensorSpec("scalar", (), "float64", 8),
    TensorSpec("last", (5,), "float64", 8),
)


def count(plan: list[list[Bucket]]) -> list[np.ndarray]:
    """How often each element of each tensor is in the plan."""
    counts = [np.zeros(spec.size, int) for spec in SPECS]
    for buckets in plan:
        for bucket in buckets:
            offset = 0
            for part in bucket.parts:
                assert part.offset == offset
                assert SPECS[part.tensor].dtype == bucket.dtype
                offset += part.stop - part.start
                counts[part.tensor][part.start : part.stop] += 1
            assert offset == bucket.size
    return counts


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("servers", [1, 2, 3, 7])
@pytest.mark.parametrize("nbytes", [16, 100, 1 << 20])
def test_every_element_is_on_one_server(servers: int, nbytes: int, whole: bool) -> None:
    plan = make_plan(SPECS, servers, nbytes, whole_tensors=whole)
    assert len(plan) == servers
    assert all((counts == 1).all() for counts in count(plan))
    dense = [bucket for buckets in plan for bucket in buckets if not bucket.sparse]
    if whole:
        assert all(part.stop - part.start == SPECS[part.tensor].size for one in dense for part in one.parts)
    else:
        assert max(one.nbytes for one in dense) <= nbytes
        per_server = [sum(one.nbytes for one in buckets if not one.sparse) for buckets in plan]
        chunks = sum(spec.size * spec.itemsize for spec in SPECS) // (servers * nbytes) + 2
        assert max(per_server) - min(per_server) <= 8 * chunks


def test_gradients_that_backward_computes_first_are_sent_first() -> None:
    first = make_plan(SPECS, 2, 1 << 20)[0][0]
    assert SPECS[first.parts[0].tensor].name == "last"


@pytest.mark.parametrize("servers", [1, 3])
def test_the_last_messages_of_a_large_model_are_short(servers: int) -> None:
    """The last gradient of backward still has to be sent, and its weights to come back."""
    for size in (4 << 17, (5 << 17) + 1, 1_300_000, 9_999_999):
        plan = make_plan([TensorSpec("w", (servers * size,), "float32", 4)], servers)
        for buckets in plan:
            sizes = [bucket.nbytes for bucket in buckets]
            assert sizes[:3] == [BUCKET_BYTES] * 3
            assert sizes == sorted(sizes, reverse=True)
            assert sizes[-1] <= 1 << 16
            assert all(2 * after >= before - 8 for before, after in pairwise(sizes[:-1]))
            assert abs(sum(sizes) - 4 * size) <= 4 * len(sizes)
    (small,) = make_plan([TensorSpec("w", (400_000,), "float32", 4)], 1)
    assert len(small) == 4


def test_rows_are_not_cut() -> None:
    parts = [bucket.parts[0] for buckets in make_plan(SPECS, 4, 64) for bucket in buckets if bucket.sparse]
    assert [(part.start % 3, part.stop % 3) for part in parts] == [(0, 0)] * 4
