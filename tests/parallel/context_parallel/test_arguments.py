"""Errors of wrong arguments of attention, and of arguments that differ among ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.attention import actual, check, expected, mine, whole
from support.ranks import Ranks

import mpicoll
from mpicoll.parallel import context_parallel as cp

ATTENTIONS = (cp.ring_attention, cp.ulysses_attention)


class TestArguments:
    @pytest.mark.parametrize("attention", ATTENTIONS)
    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            ({"query": torch.ones(3, 4)}, mpicoll.errors.ShapeError, r"query must be of 4 dimensions, .*\(3, 4\)"),
            ({"key": [1.0]}, mpicoll.errors.DTypeError, "key must be a tensor, got list"),
            ({"value": torch.ones(2, 12, 4, 8)}, mpicoll.errors.DTypeError, "value is torch.float32, query is"),
            ({"query": torch.ones(2, 12, 4, 8).long()}, mpicoll.errors.DTypeError, "query is torch.int64"),
            ({"query": torch.ones(2, 12, 4, 8, device="meta")}, mpicoll.errors.DeviceError, "query is on meta"),
            ({"query": (3, 12, 4, 8)}, mpicoll.errors.ShapeError, r"batches \(dim 0\) differ: query \(3, "),
            ({"query": (2, 13, 4, 8)}, mpicoll.errors.ShapeError, r"heads \(dim 1\), which divide those of query"),
            ({"value": (2, 24, 4, 8)}, mpicoll.errors.ShapeError, r"heads \(dim 1\)"),
            ({"key": (2, 0, 4, 8), "value": (2, 0, 4, 8)}, mpicoll.errors.ShapeError, r"heads \(dim 1\)"),
            ({"value": (2, 12, 6, 8)}, mpicoll.errors.ShapeError, r"tokens \(dim 2\)"),
            (
                {"query": (2, 12, 6, 8), "causal": True},
                mpicoll.errors.ShapeError,
                r"tokens \(dim 2\).*query \(2, 12, 6",
            ),
            ({"key": (2, 12, 4, 7)}, mpicoll.errors.ShapeError, r"head_dim \(dim 3\)"),
            ({"query": (2, 12, 4, 0), "key": (2, 12, 4, 0)}, mpicoll.errors.ShapeError, r"head_dim \(dim 3\)"),
            ({"query": (2, 12, 3, 8), "layout": "zigzag"}, mpicoll.errors.ShapeError, r"query has 3 tokens \(dim 2"),
            (
                {"key": (2, 12, 3, 8), "value": (2, 12, 3, 8), "layout": "zigzag"},
                mpicoll.errors.ShapeError,
                r"key has 3 tokens \(dim 2",
            ),
            ({"layout": "striped"}, mpicoll.errors.ArgumentError, r"layout must be one of .*, got 'striped'"),
            ({"causal": 1}, mpicoll.errors.ArgumentError, "causal must be True or False, got 1"),
            ({"scale": math.inf}, mpicoll.errors.ArgumentError, "scale must be a positive number or None, got inf"),
            ({"scale": "big"}, mpicoll.errors.ArgumentError, "scale must be a positive number or None, got 'big'"),
            ({"scale": 0}, mpicoll.errors.ArgumentError, "scale must be a positive number or None, got 0"),
            ({"scale": math.nan}, mpicoll.errors.ArgumentError, "scale must be a positive number or None, got nan"),
            ({"scale": True}, mpicoll.errors.ArgumentError, "scale must be a positive number or None, got True"),
        ],
    )
    def test_that_mean_nothing_are_refused(
        self, some: Ranks, attention: Any, change: dict[str, Any], error: type[Exception], message: str
    ) -> None:
        def body() -> None:
            world = mpicoll.world()
            given = {"query": (2, 12, 4, 8), "key": (2, 12, 4, 8), "value": (2, 12, 4, 8)} | change
            made = {
                name: torch.ones(value, dtype=torch.float64) if isinstance(value, tuple) else value
                for name, value in given.items()
            }
            where = rf"\(rank {world.rank} of {world.size}\)"
            with pytest.raises(error, match=rf"^{attention.__name__}: .*{message}.*{where}$"):
                attention(made.pop("query"), made.pop("key"), made.pop("value"), **made)

        some(body)

    @pytest.mark.parametrize("attention", ATTENTIONS)
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"tokens": 6}, r"query \(2, 12, 4, 3\), .*query \(2, 12, 6, 3\)"),
            ({"batch": 3}, r"query \(3, 12"),
            ({"kv_heads": 24, "heads": 24}, r"key \(2, 24"),
            ({"dtype": torch.float32}, "torch.float64, .* torch.float32, "),
            ({"grad": True}, r"rank 0 passed .*key \(2, 12, 4, 3\), .*key \(2, 12, 4, 3\) that requires grad, value"),
            ({"causal": True}, "causal=False, .*causal=True"),
            ({"layout": "zigzag"}, "layout='contiguous', .*layout='zigzag'"),
            ({"scale": 0.25}, "scale=0.25"),
        ],
    )
    def test_that_differ_among_ranks_are_an_error_on_all(
        self, some_more: Ranks, attention: Any, change: dict[str, Any], message: str
    ) -> None:
        def body() -> None:
            world = mpicoll.world()
            odd = world.size - 1
            options: dict[str, Any] = {"batch": 2, "heads": 12, "kv_heads": 12, "tokens": 4}
            options |= change if world.rank == odd else {}
            shape = [options.pop(name) for name in ("batch", "heads", "kv_heads", "tokens")]
            q, k, v, _ = whole((*shape, 3), 1, dtype=options.pop("dtype", torch.float64))
            k.requires_grad_(options.pop("grad", False))
            with pytest.raises(
                mpicoll.errors.ArgumentError, match=rf"arguments differ: rank 0 .*rank {odd} .*"
            ) as caught:
                attention(q, k, v, **options)
            assert caught.match(message)
            # Nothing is left behind.
            tensors = whole((1, 12, 12, 4, 3), world.size)
            check(actual(attention, mine(tensors)), mine(expected(tensors)), 1e-12)

        some_more(body)

    def test_another_operation_on_another_rank_is_an_error(self, some_more: Ranks) -> None:
        def body() -> None:
            attention = ATTENTIONS[mpicoll.world().rank == 1]
            tensors = whole((2, 12, 12, 4, 3), 1)
            with pytest.raises(mpicoll.errors.ArgumentError, match="rank 1 to ulysses_attention"):
                attention(*tensors[:3])

        some_more(body)
