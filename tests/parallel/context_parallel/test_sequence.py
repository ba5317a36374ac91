"""Splitting a sequence among ranks, and gathering it."""

from __future__ import annotations

import pytest
import torch
from support.attention import LAYOUTS, check
from support.ranks import Ranks

import mpicoll
from mpicoll.parallel import context_parallel as cp


class TestSequence:
    def test_positions_of_both_layouts(self) -> None:
        def body() -> list[list[int]]:
            return [cp.position_ids(4, layout=layout).tolist() for layout in LAYOUTS]

        assert mpicoll.run_local(body, 2) == [[[0, 1, 2, 3], [0, 1, 6, 7]], [[4, 5, 6, 7], [2, 3, 4, 5]]]

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_split_and_gathered_is_the_same(self, ranks: Ranks, layout: cp.Layout) -> None:
        def body() -> None:
            size = mpicoll.world().size
            for dim, tokens in ((1, 4), (-2, 2), (1, 0)):
                x = torch.arange(3 * tokens * size * 5).view(3, tokens * size, 5)
                part = cp.split_sequence(x, dim, layout=layout)
                assert torch.equal(part, x[:, cp.position_ids(tokens, layout=layout)])
                assert part.data_ptr() != x.data_ptr() or not tokens
                assert torch.equal(cp.gather_sequence(part, dim, layout=layout), x)

        ranks(body)

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_gradients_are_of_the_sum_of_the_losses(self, ranks: Ranks, layout: cp.Layout) -> None:
        def body() -> None:
            world = mpicoll.world()
            generator = torch.Generator().manual_seed(0)
            x = torch.randn(2, 4 * world.size, generator=generator, dtype=torch.float64)
            weights = torch.randn(world.size, *x.shape, generator=generator, dtype=torch.float64)
            own = cp.position_ids(4, layout=layout)

            one = x.clone().requires_grad_()
            (cp.split_sequence(one, 1, layout=layout) ** 3).sum().backward()
            wanted = torch.zeros_like(x)
            wanted[:, own] = 3 * x[:, own] ** 2
            assert one.grad is not None
            check([one.grad], [wanted], 1e-12)

            part = x[:, own].requires_grad_()
            (cp.gather_sequence(part, 1, layout=layout) ** 3 * weights[world.rank]).sum().backward()
            assert part.grad is not None
            check([part.grad], [(3 * x**2 * weights.sum(0))[:, own]], 1e-12)

        ranks(body)

    def test_wrong_arguments_are_refused(self, some: Ranks) -> None:
        def body() -> None:
            size = mpicoll.world().size
            x = torch.zeros(2, 4 * size + 1)
            refused = pytest.raises(
                mpicoll.errors.ShapeError, match=rf"{4 * size + 1} tokens along dim 1 .* {2 * size} e"
            )
            with refused:
                cp.split_sequence(x, -1, layout="zigzag")
            with pytest.raises(mpicoll.errors.ShapeError, match="x has 5 tokens"):
                cp.gather_sequence(torch.zeros(5, 2), 0, layout="zigzag")
            for function in (cp.split_sequence, cp.gather_sequence):
                with pytest.raises(mpicoll.errors.ShapeError, match="dim 2 is not an axis"):
                    function(x, 2)
                with pytest.raises(mpicoll.errors.ShapeError, match="dim None is not an axis"):
                    function(x, None)  # type: ignore[arg-type]
                with pytest.raises(mpicoll.errors.DTypeError, match="got list"):
                    function([1], 0)  # type: ignore[arg-type]
                with pytest.raises(mpicoll.errors.ArgumentError, match="got 'zag'"):
                    function(x, 1, layout="zag")  # type: ignore[arg-type]
            for length, layout in ((-1, "contiguous"), (3, "zigzag")):
                with pytest.raises(mpicoll.errors.ShapeError, match=f"got {length}"):
                    cp.position_ids(length, layout=layout)  # type: ignore[arg-type]
            with pytest.raises(mpicoll.errors.ArgumentError, match="got 'zag'"):
                cp.position_ids(4, layout="zag")  # type: ignore[arg-type]

        some(body)
