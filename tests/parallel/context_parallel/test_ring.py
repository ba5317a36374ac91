"""Ring attention against attention over the whole sequence in one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.attention import LAYOUTS, TOLERANCE, actual, check, expected, mine, plain, whole
from support.ranks import Ranks
from torch import Tensor

import mpicoll
from mpicoll.parallel import context_parallel as cp
from mpicoll.parallel import groups
from mpicoll.parallel.context_parallel import attention_block, ring
from mpicoll.parallel.topology import PipelineParallelGrid, ProcessTopology

# batch, heads, kv_heads, tokens of a rank, head_dim
SHAPES = ((2, 4, 4, 6, 8), (1, 4, 2, 4, 5), (2, 3, 1, 2, 7), (1, 2, 2, 2, 1))


class TestRingAttention:
    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("causal", [False, True])
    def test_is_attention_over_the_whole_sequence(self, ranks: Ranks, causal: bool, layout: cp.Layout) -> None:
        def body() -> None:
            for number, shape in enumerate(SHAPES):
                tensors = whole(shape, mpicoll.world().size, number)
                found = actual(cp.ring_attention, mine(tensors, layout), causal=causal, layout=layout)
                check(found, mine(expected(tensors, causal), layout), 1e-12)

        ranks(body)

    @pytest.mark.parametrize("causal", [False, True])
    def test_of_one_token_on_each_rank(self, ranks: Ranks, causal: bool) -> None:
        def body() -> None:
            tensors = whole((1, 3, 3, 1, 4), mpicoll.world().size)
            found = actual(cp.ring_attention, mine(tensors), causal=causal)
            check(found, mine(expected(tensors, causal)), 1e-12)

        ranks(body)

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_in_other_dtypes(self, ranks: Ranks, dtype: torch.dtype, layout: cp.Layout) -> None:
        def body() -> None:
            tensors = whole((2, 4, 2, 32, 16), mpicoll.world().size, dtype=dtype)
            found = actual(cp.ring_attention, mine(tensors, layout), causal=True, layout=layout)
            assert {one.dtype for one in found} == {dtype}
            check(found, mine(expected(tensors, causal=True), layout), TOLERANCE[dtype])

        ranks(body)

    @pytest.mark.parametrize("scale", [0.01, 1.0, 2])
    def test_with_a_scale(self, several: Ranks, scale: float) -> None:
        def body() -> None:
            tensors = whole(SHAPES[1], mpicoll.world().size)
            found = actual(cp.ring_attention, mine(tensors), causal=True, scale=scale)
            check(found, mine(expected(tensors, causal=True, scale=scale)), 1e-12)

        several(body)

    def test_of_weights_of_any_magnitude(self, several: Ranks) -> None:
        # Neither the largest of the scores nor their exponentials may overflow, whichever rank has them.
        def body() -> None:
            world = mpicoll.world()
            for high in range(world.size):
                tensors = whole((1, 2, 2, 2, 3), world.size)
                tensors[1][:, :, 2 * high : 2 * high + 2] *= 1000
                check(actual(cp.ring_attention, mine(tensors)), mine(expected(tensors)), 1e-10)

        several(body)

    def test_to_other_numbers_of_keys_and_of_other_head_dim(self, ranks: Ranks) -> None:
        def body() -> None:
            size = mpicoll.world().size
            query, _, _, _ = whole((2, 4, 4, 3, 6), size, 1)
            _, key, _, _ = whole((2, 4, 2, 5, 6), size, 2)
            _, _, value, _ = whole((2, 4, 2, 5, 9), size, 3)
            grad = whole((2, 4, 4, 3, 9), size, 4)[3]
            tensors = [query, key, value, grad]
            check(actual(cp.ring_attention, mine(tensors)), mine(expected(tensors)), 1e-12)

        ranks(body)

    @pytest.mark.parametrize("shape", [(0, 2, 2, 4, 3), (2, 2, 2, 0, 3), (2, 0, 2, 4, 3)])
    def test_of_nothing(self, ranks: Ranks, shape: tuple[int, ...]) -> None:
        def body() -> None:
            for causal, layout in itertools.product((False, True), LAYOUTS):
                tensors = mine(whole(shape, mpicoll.world().size), layout)
                found = actual(cp.ring_attention, tensors, causal=causal, layout=layout)
                assert [one.shape for one in found] == [tensors[index].shape for index in (0, 0, 1, 2)]
                assert not any(one.any() for one in found)

        ranks(body)

    def test_of_no_queries(self, ranks: Ranks) -> None:
        def body() -> None:
            q, k, v, _ = mine(whole((2, 4, 2, 4, 3), mpicoll.world().size))
            result, *grads = actual(cp.ring_attention, [q[:, :, :0], k, v, q[:, :, :0]])
            assert result.shape == (2, 4, 0, 3)
            assert not any(one.any() for one in grads)

        ranks(body)

    def test_without_fused_kernels(self, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(attention_block, "_FUSED", None)

        def body() -> None:
            for dtype, layout in itertools.product((torch.float64, torch.bfloat16), LAYOUTS):
                tensors = whole(SHAPES[0], mpicoll.world().size, dtype=dtype)
                found = actual(cp.ring_attention, mine(tensors, layout), causal=True, layout=layout)
                check(found, mine(expected(tensors, causal=True), layout), TOLERANCE[dtype])

        ranks(body)

    def test_under_autocast(self, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(attention_block, "_FUSED", None)  # which autocast does not concern

        def body() -> None:
            for inside in (False, True):
                tensors = whole(SHAPES[0], mpicoll.world().size, dtype=torch.float32)
                *inputs, grad = mine(tensors)
                inputs = [one.requires_grad_() for one in inputs]
                with torch.autocast("cpu", torch.bfloat16):
                    result = cp.ring_attention(*inputs, causal=True)
                with torch.autocast("cpu", torch.bfloat16, enabled=inside):
                    grads = torch.autograd.grad(result, inputs, grad)
                assert {one.dtype for one in (result, *grads)} == {torch.float32}
                check([result.detach(), *grads], mine(expected(tensors, causal=True)), TOLERANCE[torch.float32])

        ranks(body)

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_computes_only_what_the_mask_leaves(
        self, ranks: Ranks, monkeypatch: pytest.MonkeyPatch, layout: cp.Layout
    ) -> None:
        real = ring.attend
        seen: dict[int, int] = {}

        def attend(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
            pairs = query.shape[2] * key.shape[2]
            # The triangle of a rank's own tokens counts for half of the square.
            rank = mpicoll.world().rank
            seen[rank] = seen.get(rank, 0) + (pairs // 2 if causal else pairs)
            return real(query, key, value, causal, scale)

        monkeypatch.setattr(ring, "attend", attend)

        def body() -> int:
            world = mpicoll.world()
            tensors = mine(whole(SHAPES[0], world.size), layout)
            cp.ring_attention(*tensors[:3], causal=True, layout=layout)
            square = tensors[0].shape[2] ** 2
            blocks = world.rank if layout == "contiguous" else (world.size - 1) / 2
            assert seen[world.rank] == square * (blocks + 0.5)
            return world.rank

        ranks(body)

    def test_strides_and_incoming_gradients_of_any_kind(self, several: Ranks) -> None:
        def body() -> None:
            tensors = whole(SHAPES[0], mpicoll.world().size)
            q, k, v, g = mine(tensors)
            inputs = [
                q.transpose(1, 2).contiguous().transpose(1, 2),
                k.mT.contiguous().mT,
                torch.stack([v, v], -1)[..., 0],
            ]
            assert not any(one.is_contiguous() for one in inputs)
            inputs = [one.requires_grad_() for one in inputs]
            result = cp.ring_attention(*inputs)
            grads = torch.autograd.grad(result, inputs, g.mT.contiguous().mT, retain_graph=True)
            check([result, *grads], mine(expected(tensors)), 1e-12)
            grads = torch.autograd.grad(result.sum(), inputs)  # which gives a gradient without strides
            tensors[3] = torch.ones_like(tensors[3])
            check([result, *grads], mine(expected(tensors)), 1e-12)

        several(body)

    def test_changes_nothing_that_it_is_given(self, several: Ranks) -> None:
        def body() -> None:
            parts = mine(whole(SHAPES[1], mpicoll.world().size), "zigzag")
            before = [one.clone() for one in parts]
            actual(cp.ring_attention, parts, causal=True, layout="zigzag")
            assert all(torch.equal(one, other) for one, other in zip(parts, before, strict=True))

        several(body)

    def test_one_key_in_two_calls(self, several: Ranks) -> None:
        def body() -> None:
            size = mpicoll.world().size
            q, k, v, g = whole((2, 2, 2, 4, 3), size)
            other_q, _, _, other_g = whole((2, 2, 2, 4, 3), size, 1)
            inputs = [one.clone().requires_grad_() for one in (q, other_q, k, v)]
            first, second = plain(inputs[0], *inputs[2:], True), plain(inputs[1], inputs[2], inputs[2])
            wanted = torch.autograd.grad((first * g).sum() + (second * other_g).sum() + (inputs[2] ** 2).sum(), inputs)

            parts = [one.detach().requires_grad_() for one in mine(inputs)]
            first = cp.ring_attention(parts[0], *parts[2:], causal=True)
            second = cp.ring_attention(parts[1], parts[2], parts[2])
            g, other_g = mine([g, other_g])
            loss = (first * g).sum() + (second * other_g).sum() + (parts[2] ** 2).sum()
            check(torch.autograd.grad(loss, parts), mine(wanted), 1e-12)

        several(body)

    def test_calls_upon_calls(self, several: Ranks) -> None:
        def body() -> None:
            tensors = whole((1, 2, 2, 4, 3), mpicoll.world().size)

            def chain(attention: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Tensor:
                q, k, v = inputs
                for _ in range(3):
                    q, k, v = attention(q, k, v), attention(k, q, v), attention(v, k, q)
                return q + k * v

            inputs = [one.clone().requires_grad_() for one in tensors[:3]]
            result = chain(plain, inputs)
            wanted = [result.detach(), *torch.autograd.grad(result, inputs, tensors[3])]
            parts = mine(tensors)
            check(actual(lambda *inputs: chain(cp.ring_attention, inputs), parts), mine(wanted), 1e-12)

        several(body)

    @pytest.mark.parametrize("wanted", list(itertools.product((False, True), repeat=3)))
    def test_gradients_of_some_inputs_only(self, several: Ranks, wanted: tuple[bool, ...]) -> None:
        def body() -> None:
            tensors = whole(SHAPES[1], mpicoll.world().size)
            *inputs, grad = mine(tensors)
            for one, needed in zip(inputs, wanted, strict=True):
                one.requires_grad_(needed)
            result = cp.ring_attention(*inputs, causal=True)
            assert result.requires_grad == any(wanted)
            if any(wanted):
                result.backward(grad)
            for one, needed, right in zip(inputs, wanted, mine(expected(tensors, causal=True)[1:]), strict=True):
                assert (one.grad is not None) == needed
                if one.grad is not None:
                    check([one.grad], [right], 1e-12)

        several(body)

    def test_without_gradients(self, several: Ranks) -> None:
        def body() -> None:
            tensors = whole(SHAPES[0], mpicoll.world().size)
            inputs = [one.requires_grad_() for one in mine(tensors)[:3]]
            with torch.no_grad():
                result = cp.ring_attention(*inputs)
            assert not result.requires_grad
            check([result], mine(expected(tensors)[:1]), 1e-12)

        several(body)

    @pytest.mark.parametrize("constant", [False, True])
    def test_its_gradient_has_none(self, some: Ranks, constant: bool) -> None:
        # Nor does it pass for a constant where what comes in is one.
        def body() -> None:
            inputs = [one.requires_grad_() for one in mine(whole(SHAPES[0], mpicoll.world().size))]
            *tensors, grad = inputs
            result = cp.ring_attention(*tensors)
            incoming = grad.detach() if constant else grad
            (grad_query,) = torch.autograd.grad(result, tensors[0], incoming, create_graph=True)
            with pytest.raises(mpicoll.errors.ArgumentError, match="can't be differentiated again"):
                torch.autograd.grad(grad_query.sum(), tensors[1] if constant else grad)

        some(body)

    def test_gradients_of_parameters_add_up(self, several: Ranks) -> None:
        # The convention: each rank's loss is that of its own tokens, and gradients are added over the ranks.
        def body() -> None:
            size = mpicoll.world().size
            tokens = whole((2, 1, 1, 4, 6), size)[0][:, 0]
            weight = torch.randn(6, 18, generator=torch.Generator().manual_seed(5), dtype=torch.float64)

            def loss(attention: Callable[..., Tensor], x: Tensor, weight: Tensor, **options: Any) -> Tensor:
                q, k, v = (x @ weight).unflatten(-1, (2, 9)).transpose(1, 2).chunk(3, -1)
                return (attention(q, k, v, causal=True, **options) ** 2).sum() / (4 * size)

            one, part = (weight.clone().requires_grad_() for _ in range(2))
            total = loss(plain, tokens, one)
            total.backward()
            x = cp.split_sequence(tokens, 1, layout="zigzag")
            own = loss(cp.ring_attention, x, part, layout="zigzag")
            own.backward()
            found = [mpicoll.allreduce(own.detach()), mpicoll.allreduce(part.grad)]
            assert one.grad is not None
            check(found, [total.detach(), one.grad], 1e-12)

        several(body)


class TestMessages:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_are_as_many_and_as_long_as_said(self, ranks: Ranks, dtype: torch.dtype) -> None:
        def body() -> None:
            world = mpicoll.world()
            # In the first call ranks make their private communicator.
            parts = mine(whole((2, 4, 2, 8, 5), world.size, dtype=dtype))
            actual(cp.ring_attention, parts)
            hops = world.size - 1
            one = parts[1].nbytes + parts[2].nbytes
            inputs = [part.requires_grad_() for part in parts[:3]]
            with _counted(world) as sent:
                result = cp.ring_attention(*inputs)
            assert (len(sent), sum(sent)) == (2 * hops, one * hops)
            with _counted(world) as sent:
                result.backward(parts[3])
            # Gradients travel in float32.
            assert (len(sent), sum(sent)) == (4 * hops, one * hops * (3 if dtype == torch.bfloat16 else 2))

        ranks(body)

    def test_of_gradients_only_where_they_are_wanted(self, several: Ranks) -> None:
        def body() -> None:
            world = mpicoll.world()
            q, k, v, g = mine(whole(SHAPES[0], world.size))
            result = cp.ring_attention(q.requires_grad_(), k, v)
            with _counted(world) as sent:
                result.backward(g)
            assert sent == [k.nbytes] * (2 * (world.size - 1))

        several(body)

    def test_meet_none_of_the_users(self, several: Ranks) -> None:
        def body() -> None:
            world = mpicoll.world()
            left, right = (world.rank - 1) % world.size, (world.rank + 1) % world.size
            # From any rank, with any tag, also on the communicator that carries the user's messages.
            on = [world] if world.mpi is None else [world, world.mpi]
            receiving = [mpicoll.irecv(torch.zeros(3, dtype=torch.float64), comm=comm) for comm in on]
            tensors = whole(SHAPES[0], world.size)
            background = mpicoll.iallreduce(torch.ones(1000))
            found = actual(cp.ring_attention, mine(tensors), causal=True)
            check(found, mine(expected(tensors, causal=True)), 1e-12)
            assert not any(request.test() for request in receiving)
            mpicoll.barrier()
            for comm, request in zip(on, receiving, strict=True):
                mpicoll.send(torch.full((3,), float(world.rank), dtype=torch.float64), right, comm=comm)
                assert request.wait().tolist() == [left] * 3
            assert background.wait()[0] == world.size

        several(body)

    def test_of_a_call_that_failed_are_not_met(self, several: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
        real = ring.attend
        calls: dict[int, int] = {}

        def attend(*args: Any) -> Any:
            rank = mpicoll.world().rank
            calls[rank] = calls.get(rank, 0) + 1
            # Rank 0 gets further than the others, and may have started an exchange that they do not join.
            if calls[rank] == (2 if rank == 0 else 1):
                raise MemoryError("as it were")
            return real(*args)

        monkeypatch.setattr(ring, "attend", attend)

        def body() -> None:
            parts = mine(whole(SHAPES[0], mpicoll.world().size, 9))
            with pytest.raises(MemoryError):
                cp.ring_attention(*parts[:3])
            tensors = whole(SHAPES[0], mpicoll.world().size)
            check(actual(cp.ring_attention, mine(tensors)), mine(expected(tensors)), 1e-12)

        several(body)

    @pytest.mark.mpi
    def test_travel_on_a_communicator_that_goes_with_the_users(self) -> None:
        parts = mine(whole(SHAPES[0], mpicoll.world().size))
        comm = mpicoll.world().split(0)
        assert comm is not None
        cp.ring_attention(*parts[:3], group=comm)
        private = ring._get_private_duplicate(comm)
        cp.ring_attention(*parts[:3], group=comm)
        assert ring._get_private_duplicate(comm) is private
        comm.free()
        assert private._core.freed

    def test_that_do_not_come_are_an_error(self) -> None:
        def body() -> None:
            world = mpicoll.world()
            parts = mine(whole(SHAPES[0], world.size))
            result = cp.ring_attention(*(one.requires_grad_() for one in parts[:3]))
            if world.rank == 1:
                return
            with pytest.raises(mpicoll.RankFailed, match=r"ring_attention \(backward\): .*rank 1 has exited"):
                result.backward(parts[3])

        mpicoll.run_local(body, 2, timeout=10.0)


@contextmanager
def _counted(world: mpicoll.Communicator) -> Iterator[list[int]]:
    """The sizes of the messages that ring attention on `world` sends."""
    sent: list[int] = []
    if world.size == 1:
        yield sent
        return
    core = ring._get_private_duplicate(world)._core
    transport, calls = core.transport, core.queue.calls
    real = transport.isend
    if calls is not None:
        calls.enabled = False  # no message is started by the extension

    def isend(data: Any, dest: int, tag: int) -> Any:
        assert dest == (world.rank + 1) % world.size
        sent.append(data.size)
        return real(data, dest, tag)

    transport.isend = isend  # type: ignore[method-assign]
    try:
        yield sent
    finally:
        del transport.isend  # type: ignore[misc]
        if calls is not None:
            calls.enabled = core.queue.observer is None


class TestGroups:
    def test_parts_of_the_world(self, several: Ranks) -> None:
        def body() -> None:
            world = mpicoll.world()
            comm = world.split(world.rank % 2, -world.rank)
            assert comm is not None
            tensors = whole(SHAPES[0], comm.size, world.rank % 2)
            split = [cp.split_sequence(one, 2, layout="zigzag", group=comm) for one in tensors]
            found = actual(cp.ring_attention, split, causal=True, layout="zigzag", group=comm)
            right = [cp.split_sequence(one, 2, layout="zigzag", group=comm) for one in expected(tensors, causal=True)]
            check(found, right, 1e-12)
            comm.free()

        several(body)

    @pytest.mark.mpi
    def test_the_context_axis_of_a_grid(self, default_group: None) -> None:
        world = mpicoll.world()
        context = 2 if world.size % 2 == 0 else world.size
        topology = ProcessTopology(["data", "context"], [world.size // context, context])
        with PipelineParallelGrid(topology) as grid, groups.use(grid):
            tensors = whole(SHAPES[0], context)
            assert cp.position_ids(3).tolist() == [3 * (world.rank % context) + token for token in range(3)]
            check(actual(cp.ring_attention, mine(tensors)), mine(expected(tensors)), 1e-12)

    @pytest.mark.mpi
    def test_torchs_default_group(self, default_group: None) -> None:
        tensors = whole(SHAPES[0], mpicoll.world().size)
        check(actual(cp.ring_attention, mine(tensors)), mine(expected(tensors)), 1e-12)
