"""How parameters are divided into buckets."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from mpicoll.parallel.data_parallel import buckets

F32, F64, CPU = torch.float32, torch.float64, torch.device("cpu")


def divide(kinds: list[tuple[int, torch.dtype]], capacity: int) -> list[list[int]]:
    parameters = [Parameter(torch.zeros(numel, dtype=dtype)) for numel, dtype in kinds]
    return [indices for indices, _ in buckets.divide(range(len(kinds)), parameters, capacity)]


def test_first_bucket_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "FIRST_BUCKET", 8)
    assert divide([(1, F32)] * 8, 16) == [[0, 1], [2, 3, 4, 5], [6, 7]]
    assert divide([(9, F32), (1, F32), (1, F32)], 16) == [[0], [1, 2]]


def test_one_dtype_in_each() -> None:
    assert divide([(1, F32), (1, F64), (1, F32), (2, F64)], 24) == [[1, 3], [0, 2]]
    assert divide([], 8) == []
