"""Attention to one block of keys, by the fused kernels and by matrix products."""

from __future__ import annotations

import pytest
import torch
from support.attention import TOLERANCE, check, whole

from mpicoll.parallel.context_parallel import attention_block
from mpicoll.parallel.context_parallel.attention_block import (
    attend,
    attend_backward,
    attend_backward_by_matmul,
    attend_by_matmul,
)


class TestKernels:
    """torch's fused kernels against matrix products, as the ring uses them."""

    @pytest.mark.parametrize("dtype", TOLERANCE)
    @pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
    @pytest.mark.parametrize("dim", [1, 7, 16])
    def test_agree(self, dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> None:
        q, k, v, g = whole((2, heads, kv_heads, 40, dim), 1, dtype=dtype)
        out, lse = attend_by_matmul(q, k, v, False, 0.3)
        assert attention_block._can_use_fused(q, k, v)
        assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        # The backward gets what came of more keys than it is given, and parts of everything.
        out = out.to(dtype)
        for rows, columns, causal in (
            (slice(None), slice(None), True),
            (slice(None), slice(None), False),
            (slice(20, None), slice(None), False),
            (slice(None), slice(13), False),
        ):
            parts = q[:, :, rows], k[:, :, columns], v[:, :, columns]
            for one, other in zip(
                attend(*parts, causal, 0.3),
                attend_by_matmul(*parts, causal, 0.3),
                strict=True,
            ):
                check([one], [other.double()], TOLERANCE[dtype])
            given = (g[:, :, rows], *parts, out[:, :, rows], lse[:, :, rows], causal, 0.3)
            for one, other in zip(attend_backward(*given), attend_backward_by_matmul(*given), strict=True):
                check([one], [other.double()], TOLERANCE[dtype])

    def test_fused_ones_are_there(self) -> None:
        # If torch has taken them away, everything still works, but slower.
        assert attention_block._FUSED is not None
        assert attention_block._FUSED_BACKWARD is not None
