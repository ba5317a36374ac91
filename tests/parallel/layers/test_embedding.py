"""The embedding against the plain one of torch.nn in one process."""

from __future__ import annotations

import math

import pytest
import torch
from support.parallel_layers import F, H, S, check, close, filled, rows, whole
from support.ranks import Ranks
from torch import nn

import mpicoll
from mpicoll.parallel.layers import (
    VocabParallelEmbedding,
)


@pytest.mark.parametrize("padding_idx", [None, 0, 5, -1])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
def test_embedding(ranks: Ranks, sequence_parallel: bool, padding_idx: int | None) -> None:
    def body() -> None:
        comm = mpicoll.world()
        plain = filled(nn.Embedding(F, H, padding_idx))
        layer = VocabParallelEmbedding.from_embedding(plain, sequence_parallel=sequence_parallel)
        ids = torch.arange(S * 3).remainder(F).view(S, 3).flip(0)
        check(plain, layer, ids, comm, outputs=rows if sequence_parallel else whole)

    ranks(body)


def test_embedding_of_other_ids(ranks: Ranks) -> None:
    """Of no axis, of none, of 32 bits; not contiguous; and rows that nobody asks for are not looked at."""

    def body() -> None:
        plain = filled(nn.Embedding(F, H))
        plain.weight.data[0] = math.nan
        layer = VocabParallelEmbedding.from_embedding(plain)
        for ids in [
            torch.tensor(7),
            torch.zeros(0, 2, dtype=torch.int64),
            torch.arange(1, F, dtype=torch.int32),
            torch.arange(1, F - 1).view(2, -1).t(),
        ]:
            close(layer(ids), plain(ids), ids)

    ranks(body)


def test_ids_out_of_range(ranks: Ranks) -> None:
    def body() -> None:
        layer = VocabParallelEmbedding.from_embedding(filled(nn.Embedding(F, H)))
        for wrong in (-1, F, F + 1000, -F):
            with pytest.raises(IndexError, match=rf"ids must be in \[0, {F}\), got some in \[{min(3, wrong)}, "):
                layer(torch.tensor([3, wrong]))
        assert layer(torch.tensor([0, F - 1])).shape == (2, H)

    ranks(body)
