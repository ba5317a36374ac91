"""Linear layers against the plain ones of torch.nn in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.parallel_layers import B, F, H, Parts, S, check, close, columns, filled, normal, rows, whole
from support.ranks import Ranks
from torch import Tensor, nn
from torch.nn import functional

import mpicoll
from mpicoll.parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    column_parallel_linear,
    shard_,
)
from mpicoll.parallel.layers import functional as layers
from mpicoll.parallel.mappings import (
    gather,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
    split,
)


@pytest.mark.usefixtures("background")
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("gather_output", [False, True], ids=["parts", "gathered"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
def test_column(ranks: Ranks, sequence_parallel: bool, gather_output: bool, bias: bool) -> None:
    def body() -> None:
        comm = mpicoll.world()
        for shape in [(S, B, H), (S, H)]:
            plain = filled(nn.Linear(H, F, bias))
            layer = ColumnParallelLinear.from_linear(
                plain, sequence_parallel=sequence_parallel, gather_output=gather_output
            )
            assert layer.weight.shape == (F // comm.size, H)
            inputs, outputs = rows if sequence_parallel else whole, whole if gather_output else columns
            check(plain, layer, normal(*shape).requires_grad_(), comm, inputs, outputs)

    ranks(body)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("layout", ["whole", "parallel", "sp"])
def test_row(ranks: Ranks, layout: str, bias: bool) -> None:
    def body() -> None:
        comm = mpicoll.world()
        for shape in [(S, B, F), (S, F)]:
            plain = filled(nn.Linear(F, H, bias))
            layer = RowParallelLinear.from_linear(
                plain, input_is_parallel=layout != "whole", sequence_parallel=layout == "sp"
            )
            assert layer.weight.shape == (H, F // comm.size)
            inputs, outputs = whole if layout == "whole" else columns, rows if layout == "sp" else whole
            check(plain, layer, normal(*shape).requires_grad_(), comm, inputs, outputs)

    ranks(body)


class _Scaled(nn.Module):
    """A layer with skip_bias_add, whose bias goes where a fused kernel would add it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        product, bias = out if isinstance(out, tuple) else (functional.linear(x, self.layer.weight), self.layer.bias)
        return product * 2 if bias is None else product * 2 + bias * 3


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("layer", ["column", "column-gathered", "row", "row-sp"])
def test_skip_bias_add(ranks: Ranks, layer: str, bias: bool) -> None:
    def body() -> None:
        comm = mpicoll.world()
        plain = _Scaled(filled(nn.Linear(F, H, bias)))
        if layer.startswith("column"):
            gathered = layer == "column-gathered"
            made: nn.Module = ColumnParallelLinear.from_linear(plain.layer, gather_output=gathered, skip_bias_add=True)
            inputs, outputs = whole, whole if gathered else columns
        else:
            made = RowParallelLinear.from_linear(
                plain.layer, input_is_parallel=True, sequence_parallel=layer == "row-sp", skip_bias_add=True
            )
            inputs, outputs = columns, rows if layer == "row-sp" else whole
        x = normal(S, B, F).requires_grad_()
        product, passed = made(inputs(x, comm))
        assert (passed is not None) == bias
        close(product, outputs(functional.linear(x, plain.layer.weight), comm))
        check(plain, _Scaled(made), x, comm, inputs, outputs)

    ranks(body)


def test_functional_on_a_tied_weight(ranks: Ranks) -> None:
    """An embedding's weight as that of the output layer."""

    class Plain(nn.Module):
        def __init__(self, embedding: nn.Embedding) -> None:
            super().__init__()
            self.embedding = embedding

        def forward(self, ids: Tensor) -> Tensor:
            return functional.linear(torch.tanh(self.embedding(ids)), self.embedding.weight)

    class Parallel(nn.Module):
        def __init__(self, embedding: VocabParallelEmbedding) -> None:
            super().__init__()
            self.embedding = embedding

        def forward(self, ids: Tensor) -> Tensor:
            sp = self.embedding.sequence_parallel
            return column_parallel_linear(torch.tanh(self.embedding(ids)), self.embedding.weight, sequence_parallel=sp)

    def body() -> None:
        for sequence_parallel in (False, True):
            plain = Plain(filled(nn.Embedding(F, H)))
            embedding = VocabParallelEmbedding.from_embedding(plain.embedding, sequence_parallel=sequence_parallel)
            check(plain, Parallel(embedding), torch.arange(S).view(S, 1) * 2, mpicoll.world(), outputs=columns)

    ranks(body)


def test_other_layouts_of_memory(several: Ranks) -> None:
    """Inputs and gradients that are not contiguous, expanded, of one axis, or empty."""

    def body() -> None:
        comm = mpicoll.world()
        plain = filled(nn.Linear(H, F))
        for x in (normal(H, S).t(), normal(1, 1, H).expand(S, B, H), normal(2 * S, H)[::2], normal(0, H)):
            for sequence_parallel in (False, True):
                model = copy.deepcopy(plain)
                layer = ColumnParallelLinear.from_linear(model, sequence_parallel=sequence_parallel)
                check(model, layer, x.requires_grad_(), comm, rows if sequence_parallel else whole, columns)
        model = copy.deepcopy(plain)
        layer = ColumnParallelLinear.from_linear(model)
        check(model, layer, normal(H).requires_grad_(), comm, whole, columns)
        own = normal(S, H).requires_grad_()
        out = layer(own)
        out.sum().backward()  # an expanded gradient
        close(own.grad, plain.weight.sum(0).expand(S, H))

    several(body)


@pytest.mark.usefixtures("background")
def test_frozen_parameters_and_inputs(several: Ranks) -> None:
    """Gradients of what trains are right, whatever does not, and nothing waits."""

    def body() -> None:
        comm = mpicoll.world()
        for trained in range(1, 8):
            need_x, need_weight, need_bias = bool(trained & 4), bool(trained & 2), bool(trained & 1)
            for sequence_parallel in (False, True):
                plain = filled(nn.Linear(H, F))
                plain.weight.requires_grad_(need_weight)
                plain.bias.requires_grad_(need_bias)
                layer = ColumnParallelLinear.from_linear(plain, sequence_parallel=sequence_parallel)
                x = normal(S, B, H).requires_grad_(need_x)
                check(plain, layer, x, comm, rows if sequence_parallel else whole, columns)
                row = RowParallelLinear.from_linear(
                    copy.deepcopy(plain), input_is_parallel=True, sequence_parallel=sequence_parallel
                )
                plain.zero_grad()
                check(plain, row, x, comm, columns, rows if sequence_parallel else whole)

    several(body)


def test_what_is_frozen_costs_nothing(some_more: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """No message for what nobody asked for, and no memory for what is not needed."""
    called: dict[int, list[str]] = {rank: [] for rank in range(some_more.size)}
    for name in ("allgather", "iallgather", "iallreduce", "ireduce_scatter"):
        original = getattr(layers, name)

        def counted(*args: Any, name: str = name, original: Any = original, **kwargs: Any) -> Any:
            called[mpicoll.world().rank].append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(layers, name, counted)
    monkeypatch.setattr(layers, "MIN_BACKGROUND_BYTES", 0)

    def body() -> None:
        found = []
        for need_x, need_weight in ((True, True), (True, False), (False, True)):
            for sequence_parallel in (False, True):
                layer = ColumnParallelLinear.from_linear(filled(nn.Linear(H, F)), sequence_parallel=sequence_parallel)
                layer.weight.requires_grad_(need_weight)
                out = layer(normal(4, H).requires_grad_(need_x))
                assert len([one for one in out.grad_fn.saved_tensors if one is not None]) == need_x + need_weight
                out.sum().backward()
                found.append(called[mpicoll.world().rank].copy())
                called[mpicoll.world().rank].clear()
        assert found == [
            ["iallreduce"],
            ["allgather", "iallgather", "ireduce_scatter"],
            ["iallreduce"],
            ["allgather", "ireduce_scatter"],
            [],
            ["allgather", "iallgather"],
        ]

    some_more(body)


@pytest.mark.usefixtures("background")
def test_sibling_branches(several: Ranks) -> None:
    """One input feeds two layers and goes past them; none may change the gradient of another."""

    class Siblings(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(H, F), nn.Linear(H, F)
            self.c = nn.Linear(F, H)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.a(x) * torch.sigmoid(self.b(x)) + self.b(x)) + x

    def body() -> None:
        for sequence_parallel in (False, True):
            plain = filled(Siblings())
            plan = {"[ab]": "column", "c": "row"}
            parallel = shard_(copy.deepcopy(plain), plan, sequence_parallel=sequence_parallel)
            part = rows if sequence_parallel else whole
            check(plain, parallel, normal(S, B, H).requires_grad_(), mpicoll.world(), part, part)

    several(body)


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
def test_gradcheck_of_column(several: Ranks, sequence_parallel: bool) -> None:
    """Of the function of whole tensors that all ranks hold alike, once and twice."""

    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        x = scatter_to_sequence_parallel_region(x) if sequence_parallel else x
        part = column_parallel_linear(x, split(weight, 0), split(bias, 0), sequence_parallel=sequence_parallel)
        return gather_from_tensor_model_parallel_region(torch.sin(part))

    def body() -> None:
        size = mpicoll.world().size
        inputs = [normal(*shape, seed=n).requires_grad_() for n, shape in enumerate([(size, 2), (size, 2), (size,)])]
        assert torch.autograd.gradcheck(function, inputs)
        grad = normal(size, size, seed=9).requires_grad_()
        assert torch.autograd.gradgradcheck(function, inputs, grad)

    several(body)


def test_second_derivatives_with_frozen_parts(several: Ranks) -> None:
    def body() -> None:
        comm = mpicoll.world()
        for need_x, need_weight in ((True, False), (False, True)):
            for sequence_parallel in (False, True):
                plain = filled(nn.Linear(H, F))
                plain.weight.requires_grad_(need_weight)
                layer = ColumnParallelLinear.from_linear(plain, sequence_parallel=sequence_parallel, gather_output=True)
                part: Parts = rows if sequence_parallel or need_weight else whole
                x = normal(S, H)
                own_x = (rows if sequence_parallel else whole)(x, comm).clone()
                found = []
                for model, of in ((plain, x), (layer, own_x)):
                    of = of.requires_grad_() if need_x else model.weight
                    value = torch.sin(model(own_x if model is layer else x)).square().sum()
                    (first,) = torch.autograd.grad(value, of, create_graph=True)
                    # A loss that all ranks compute alike needs the whole of it.
                    joined = gather(first, 0) if model is layer and part is rows else first
                    found.append(torch.autograd.grad(joined.square().sum(), of)[0])
                close(found[1], part(found[0], comm))

    several(body)
