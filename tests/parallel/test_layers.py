"""Parallel layers against the plain ones of torch.nn in one process."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.ranks import Comms, Ranks
from torch import Tensor, nn
from torch.nn import functional

import mpicoll
from mpicoll.errors import ArgumentError, ShapeError
from mpicoll.parallel.layers import (
    ColumnParallelLinear,
    LayerNorm,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    column_parallel_linear,
    shard_,
    whole_state_dict,
)
from mpicoll.parallel.layers import linear as layers
from mpicoll.parallel.mappings import (
    gather,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
    split,
)
from mpicoll.parallel.shards import shard_of

Parts = Callable[[Tensor, mpicoll.Communicator], Tensor]

S, B, H, F = 12, 2, 12, 24
"""Sequence, batch, hidden and inner features: what divides by 1, 2, 3 and 4."""


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def filled(module: nn.Module, seed: int = 0) -> Any:
    """`module` in float64 with values of its own, which do not depend on torch's generator: threads share that."""
    module.double()
    for number, param in enumerate(module.parameters()):
        param.data = normal(*param.shape, seed=100 * seed + number) / math.sqrt(param.shape[-1])
    return module


def whole(x: Tensor, comm: mpicoll.Communicator) -> Tensor:
    return x


def rows(x: Tensor, comm: mpicoll.Communicator) -> Tensor:
    """The rank's part of the sequence."""
    return x.chunk(comm.size, 0)[comm.rank]


def columns(x: Tensor, comm: mpicoll.Communicator) -> Tensor:
    """The rank's part of the features."""
    return x.chunk(comm.size, -1)[comm.rank]


def close(got: Tensor | None, wanted: Tensor | None, what: object = "") -> None:
    assert (got is None) == (wanted is None), what
    if got is not None and wanted is not None:
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12, msg=lambda text: f"{what}: {text}")


def check_parameters(parallel: nn.Module, plain: nn.Module) -> None:
    """Values and gradients are the parts of `plain`'s."""
    wanted = dict(plain.named_parameters())
    got = dict(parallel.named_parameters())
    assert list(got) == list(wanted)
    for name, param in got.items():
        shard = shard_of(param)

        def part(x: Tensor | None, shard: Any = shard) -> Tensor | None:
            return x if x is None or shard is None else x.chunk(shard.comm.size, shard.dim)[shard.comm.rank]

        assert torch.equal(param, part(wanted[name].detach())), name
        close(param.grad, part(wanted[name].grad), name)
        assert param.requires_grad == wanted[name].requires_grad, name


def check(
    plain: nn.Module,
    parallel: nn.Module,
    x: Tensor,
    comm: mpicoll.Communicator,
    inputs: Parts = whole,
    outputs: Parts = whole,
) -> None:
    """Output and all gradients of `parallel` are those of `plain`, or parts of them. Both modules are used up."""
    whole_x = x.detach().clone().requires_grad_(x.requires_grad)
    wanted = plain(whole_x)
    weight = normal(*wanted.shape, seed=77)
    (wanted * weight).sum().backward()

    own_x = inputs(x.detach(), comm).clone().requires_grad_(x.requires_grad)
    got = parallel(own_x)
    close(got, outputs(wanted, comm), "output")
    factor = outputs(weight, comm).clone()
    kept = factor.clone()
    (got * factor).sum().backward()
    assert torch.equal(factor, kept)
    check_parameters(parallel, plain)
    if x.requires_grad:
        close(own_x.grad, inputs(whole_x.grad, comm), "gradient of the input")


@pytest.fixture(params=[0, layers.BACKGROUND], ids=["background", "blocking"])
def background(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Collectives of the tests' small tensors run in the background, or as they do by default."""
    monkeypatch.setattr(layers, "BACKGROUND", request.param)


# --- one layer


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


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LayerNorm(H),
        lambda: nn.LayerNorm((B, H), eps=0.1),
        lambda: nn.LayerNorm(H, bias=False),
        lambda: nn.LayerNorm(H, elementwise_affine=False),
        lambda: nn.RMSNorm(H),
        lambda: nn.RMSNorm((B, H), eps=0.1),
        lambda: nn.RMSNorm(H, elementwise_affine=False),
    ],
    ids=["layer", "layer-2d", "layer-no-bias", "layer-not-affine", "rms", "rms-2d", "rms-not-affine"],
)
def test_norms(ranks: Ranks, make: Callable[[], Any], sequence_parallel: bool) -> None:
    def body() -> None:
        plain = filled(make())
        ours = LayerNorm if isinstance(plain, nn.LayerNorm) else RMSNorm
        layer = ours.from_norm(plain, sequence_parallel=sequence_parallel)
        part = rows if sequence_parallel else whole
        check(plain, layer, normal(S, B, H).requires_grad_(), mpicoll.world(), part, part)

    ranks(body)


def test_frozen_weight_of_a_norm(several: Ranks) -> None:
    def body() -> None:
        plain = filled(nn.LayerNorm(H))
        plain.weight.requires_grad_(False)
        layer = LayerNorm.from_norm(plain, sequence_parallel=True)
        check(plain, layer, normal(S, B, H).requires_grad_(), mpicoll.world(), rows, rows)

    several(body)


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


# --- what trains and what does not


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
    monkeypatch.setattr(layers, "BACKGROUND", 0)

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


def test_one_rank_is_the_plain_layer() -> None:
    x = normal(S, H).requires_grad_()
    assert ColumnParallelLinear.from_linear(filled(nn.Linear(H, F)))(x).grad_fn.name() == "AddmmBackward0"
    assert RowParallelLinear.from_linear(filled(nn.Linear(H, F)))(x).grad_fn.name() == "AddmmBackward0"
    embedding = VocabParallelEmbedding.from_embedding(filled(nn.Embedding(F, H)))
    assert embedding(torch.arange(3)).grad_fn.name() == "EmbeddingBackward0"


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


# --- models


class Block(nn.Module):
    """A transformer block. Query, key and value are one matrix, its rows ordered by head."""

    def __init__(self, head: int = 1) -> None:
        super().__init__()
        self.head = head
        self.ln1, self.ln2 = nn.LayerNorm(H), nn.RMSNorm(H)
        self.qkv, self.proj = nn.Linear(H, 3 * H), nn.Linear(H, H)
        self.fc1, self.fc2 = nn.Linear(H, F), nn.Linear(F, H)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.ln1(x))
        s, b, features = qkv.shape
        q, k, v = qkv.view(s, b, features // (3 * self.head), 3, self.head).permute(3, 1, 2, 0, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.permute(2, 0, 1, 3).reshape(s, b, features // 3))
        return x + self.fc2(functional.gelu(self.fc1(self.ln2(x))))


PLAN = {"*qkv": "column", "*fc1": "column", "*proj": "row", "*fc2": "row", "*ln*": "norm"}


class Model(nn.Module):
    """Two blocks between an embedding and an output layer with the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(F, H)
        self.blocks = nn.Sequential(Block(), Block())
        self.ln = nn.LayerNorm(H)
        self.head = nn.Linear(H, F, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.ln(self.blocks(self.embedding(ids))))
        return logits


MODEL_PLAN = {**PLAN, "embedding": "vocab", "head": {"layer": "column", "gather_output": True}}


@pytest.mark.usefixtures("background")
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
def test_transformer_block(ranks: Ranks, sequence_parallel: bool) -> None:
    def body() -> None:
        plain = filled(Block())
        parallel = shard_(copy.deepcopy(plain), PLAN, sequence_parallel=sequence_parallel)
        part = rows if sequence_parallel else whole
        check(plain, parallel, normal(S, B, H).requires_grad_(), mpicoll.world(), part, part)

    ranks(body)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
def test_model_with_tied_weights_learns_alike(ranks: Ranks, sequence_parallel: bool) -> None:
    def body() -> None:
        plain = filled(Model())
        parallel = shard_(copy.deepcopy(plain), MODEL_PLAN, sequence_parallel=sequence_parallel)
        assert parallel.head.weight is parallel.embedding.weight
        ids = torch.arange(S * B).mul(7).remainder(F).view(S, B)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (plain, parallel)]
        for _ in range(3):
            losses = []
            for model, optimizer in zip((plain, parallel), optimizers, strict=True):
                optimizer.zero_grad()
                loss = functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 0).flatten())
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            close(losses[1], losses[0])
        state = whole_state_dict(parallel)
        wanted = plain.state_dict()
        assert list(state) == list(wanted)
        for name, value in wanted.items():
            close(state[name], value, name)
        assert state["head.weight"] is state["embedding.weight"]

    ranks(body)


@pytest.fixture
def comms() -> Iterator[Comms]:
    made = Comms()
    yield made
    made.free()


def _on_parts_of_the_world(comms: Comms) -> None:
    for name in ("split", "group"):
        comm = comms[name]
        if comm is None:
            continue
        plain = filled(Block())
        parallel = shard_(copy.deepcopy(plain), PLAN, comm, sequence_parallel=True)
        check(plain, parallel, normal(S, B, H).requires_grad_(), comm, rows, rows)


def test_groups_of_threads() -> None:
    def body() -> None:
        comms = Comms()
        _on_parts_of_the_world(comms)
        comms.free()

    mpicoll.run_local(body, 4, timeout=30)


@pytest.mark.mpi
def test_groups_of_processes(comms: Comms) -> None:
    _on_parts_of_the_world(comms)


@pytest.mark.mpi
@pytest.mark.usefixtures("default_group")
def test_process_group_of_torch() -> None:
    plain = filled(Block())
    mesh = torch.distributed.init_device_mesh("cpu", (mpicoll.world().size,), mesh_dim_names=("tp",))
    for group in (None, torch.distributed.group.WORLD, mesh["tp"]):
        model = copy.deepcopy(plain)
        parallel = shard_(copy.deepcopy(plain), PLAN, group)
        assert copy.deepcopy(parallel).qkv.group is group
        check(model, parallel, normal(S, B, H).requires_grad_(), mpicoll.world())


# --- derivatives


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


@pytest.mark.parametrize("layout", ["row", "row-sp", "embedding", "norm"])
def test_gradcheck_of_the_others(some_more: Ranks, layout: str) -> None:
    def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        size = mpicoll.world().size
        row = RowParallelLinear(size, 2, input_is_parallel=True, sequence_parallel=layout == "row-sp", device="meta")
        params = {"weight": split(weight, 1), "bias": bias}
        out = torch.func.functional_call(row, params, (scatter_to_tensor_model_parallel_region(x),))
        return gather_from_tensor_model_parallel_region(torch.sin(out).movedim(0, -1)) if layout == "row-sp" else out

    def embedding(weight: Tensor) -> Tensor:
        layer = VocabParallelEmbedding(weight.shape[0], 2, device="meta")
        return torch.sin(torch.func.functional_call(layer, {"weight": split(weight, 0)}, (torch.arange(len(weight)),)))

    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        layer = LayerNorm(2, sequence_parallel=True, device="meta")
        params = {"weight": weight, "bias": bias}
        out = torch.func.functional_call(layer, params, (scatter_to_sequence_parallel_region(x),))
        return gather_from_tensor_model_parallel_region(out.movedim(0, -1))

    def body() -> None:
        size = mpicoll.world().size
        function, shapes, result = {
            "row": (linear, [(size, size), (2, size), (2,)], (size, 2)),
            "row-sp": (linear, [(size, size), (2, size), (2,)], (2, size)),
            "embedding": (embedding, [(2 * size, 2)], (2 * size, 2)),
            "norm": (norm, [(size, 2), (2,), (2,)], (2, size)),
        }[layout]
        inputs = [normal(*shape, seed=n).requires_grad_() for n, shape in enumerate(shapes)]
        assert torch.autograd.gradcheck(function, inputs)
        assert torch.autograd.gradgradcheck(function, inputs, normal(*result, seed=9).requires_grad_())

    some_more(body)


# --- dtypes


def _within(got: Tensor, wanted: Tensor, relative: float, what: object) -> None:
    error = (got.double() - wanted.double()).norm() / wanted.double().norm()
    assert error < relative, (what, error)


@pytest.mark.parametrize(("dtype", "relative"), [(torch.float32, 1e-6), (torch.bfloat16, 0.02), (torch.float16, 3e-3)])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
def test_other_dtypes(several: Ranks, dtype: torch.dtype, relative: float, sequence_parallel: bool) -> None:
    """Against float64: relative to the norm of each tensor."""

    def body() -> None:
        comm = mpicoll.world()
        part = rows if sequence_parallel else whole
        exact = filled(Block()).to(dtype).double()
        parallel = shard_(copy.deepcopy(exact).to(dtype), PLAN, sequence_parallel=sequence_parallel)
        x = normal(S, B, H).to(dtype)
        out = parallel(part(x, comm))
        out.sum().backward()
        wanted = exact(x.double())
        wanted.sum().backward()
        assert out.dtype == dtype
        _within(out, part(wanted, comm), relative, "output")
        for name, param in parallel.named_parameters():
            assert param.grad is not None
            assert param.grad.dtype == dtype
            shard, grad = shard_of(param), exact.get_parameter(name).grad
            assert grad is not None
            grad = grad if shard is None else grad.chunk(comm.size, shard.dim)[comm.rank]
            _within(param.grad, grad, relative, name)

    several(body)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
def test_autocast(ranks: Ranks, sequence_parallel: bool) -> None:
    """What is computed in bfloat16 is that of the plain model, and parameters keep their dtype and gradients."""

    def body() -> None:
        comm = mpicoll.world()
        part = rows if sequence_parallel else whole
        plain = filled(Block()).float()
        parallel = shard_(copy.deepcopy(plain), PLAN, sequence_parallel=sequence_parallel)
        dtypes = []
        for model in (plain, parallel):
            for name in ("qkv", "proj", "fc1", "fc2"):
                model.get_submodule(name).register_forward_hook(lambda *_: dtypes.append(_[-1].dtype))
        x = normal(S, B, H).float()
        with torch.autocast("cpu", torch.bfloat16):
            wanted, out = plain(x), parallel(part(x, comm))
        assert dtypes == [torch.bfloat16] * 8
        assert out.dtype == wanted.dtype
        wanted.square().sum().backward()
        out.square().sum().backward()
        _within(out.detach(), part(wanted.detach(), comm), 0.02, "output")
        for name, param in parallel.named_parameters():
            assert param.grad is not None
            assert param.grad.dtype == torch.float32
            shard, grad = shard_of(param), plain.get_parameter(name).grad
            assert grad is not None
            _within(param.grad, grad if shard is None else grad.chunk(comm.size, shard.dim)[comm.rank], 0.05, name)

    ranks(body)


def test_autocast_leaves_float64_alone(some_more: Ranks) -> None:
    def body() -> None:
        plain = filled(nn.Linear(H, F))
        layer = ColumnParallelLinear.from_linear(plain)
        with torch.autocast("cpu", torch.bfloat16):
            check(plain, layer, normal(S, H).requires_grad_(), mpicoll.world(), whole, columns)

    some_more(body)


# --- values


def test_from_and_to_plain_layers(ranks: Ranks) -> None:
    def body() -> None:
        for bias in (True, False):
            linear = filled(nn.Linear(H, F, bias)).eval()
            linear.weight.requires_grad_(False)
            for cls in (ColumnParallelLinear, RowParallelLinear):
                layer = cls.from_linear(linear)
                assert not layer.training
                back = layer.to_linear()
                _same(back, linear)
                back.weight.data.zero_()  # memory of its own
                _same(layer.to_linear(), linear)
        embedding = filled(nn.Embedding(F, H, padding_idx=3)).eval()
        back = VocabParallelEmbedding.from_embedding(embedding).to_embedding()
        assert back.padding_idx == 3
        _same(back, embedding)

    ranks(body)


def _same(got: nn.Module, wanted: nn.Module) -> None:
    assert type(got) is type(wanted)
    assert got.training == wanted.training
    assert repr(got) == repr(wanted)
    assert got.state_dict().keys() == wanted.state_dict().keys()
    for name, param in wanted.named_parameters():
        assert torch.equal(got.get_parameter(name), param)
        assert got.get_parameter(name).dtype == param.dtype
        assert got.get_parameter(name).requires_grad == param.requires_grad


def test_init_method_sees_the_whole_weight(ranks: Ranks) -> None:
    def body() -> None:
        comm = mpicoll.world()
        seen = []

        def init(weight: Tensor) -> None:
            seen.append(tuple(weight.shape))
            weight.copy_(normal(*weight.shape))

        column = ColumnParallelLinear(H, F, init_method=init, dtype=torch.float64)
        row = RowParallelLinear(H, F, init_method=init, dtype=torch.float64)
        embedding = VocabParallelEmbedding(F, H, init_method=init, dtype=torch.float64)
        assert seen == [(F, H)] * 3
        assert torch.equal(column.weight, normal(F, H).chunk(comm.size, 0)[comm.rank])
        assert torch.equal(row.weight, normal(F, H).chunk(comm.size, 1)[comm.rank])
        assert torch.equal(embedding.weight, normal(F, H).chunk(comm.size, 0)[comm.rank])

    ranks(body)


def _starts_as_the_plain_layer() -> None:
    comm = mpicoll.world()
    for bias in (True, False):
        torch.manual_seed(5)
        plain = nn.ModuleList([nn.Linear(H, F, bias), nn.Linear(H, F, bias), nn.Embedding(F, H, padding_idx=1)])
        state = torch.get_rng_state()
        torch.manual_seed(5)
        parallel = nn.ModuleList(
            [
                ColumnParallelLinear(H, F, bias),
                RowParallelLinear(H, F, bias),
                VocabParallelEmbedding(F, H, padding_idx=1),
            ]
        )
        assert torch.equal(torch.get_rng_state(), state)
        check_parameters(parallel, plain)
        # No rank has kept the whole.
        for param in parallel.parameters():
            assert param.untyped_storage().nbytes() == param.nbytes
            assert comm.size == 1 or param.numel() < F * H


def test_start_of_one_rank() -> None:
    _starts_as_the_plain_layer()


@pytest.mark.mpi
def test_start_is_that_of_the_plain_layers() -> None:
    _starts_as_the_plain_layer()


def test_nothing_is_drawn_on_meta() -> None:
    state = torch.get_rng_state()
    layer = ColumnParallelLinear(H, F, device="meta", dtype=torch.bfloat16)
    assert layer.weight.is_meta
    assert layer.weight.dtype == torch.bfloat16
    ColumnParallelLinear.from_linear(filled(nn.Linear(H, F, device="meta").to_empty(device="cpu")))
    assert torch.equal(torch.get_rng_state(), state)


def test_state_dict_goes_there_and_back(ranks: Ranks) -> None:
    def body() -> None:
        first, second = (shard_(filled(Model(), seed), MODEL_PLAN) for seed in (1, 2))
        file = io.BytesIO()
        torch.save(first.state_dict(), file)
        file.seek(0)
        second.load_state_dict(torch.load(file, weights_only=True))
        ids = torch.arange(S).view(S, 1)
        assert torch.equal(first(ids), second(ids))

    ranks(body)


def test_whole_state_dict(ranks: Ranks) -> None:
    """It fits the plain model, extra state and buffers included."""

    class Extra(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(H, F)
            self.register_buffer("steps", torch.tensor(3))

        def get_extra_state(self) -> Any:
            return {"text": "hello"}

        def set_extra_state(self, state: Any) -> None:
            assert state == {"text": "hello"}

    def body() -> None:
        plain = filled(Extra())
        parallel = shard_(copy.deepcopy(plain), {"linear": "row"})
        state = whole_state_dict(parallel)
        assert not any(value.requires_grad for value in state.values() if isinstance(value, Tensor))
        assert state["linear.bias"].data_ptr() == parallel.linear.bias.data_ptr()
        fresh = filled(Extra(), 3)
        fresh.load_state_dict(state)
        _same(fresh, plain)

    ranks(body)


def test_deepcopy(ranks: Ranks) -> None:
    """Copies share the ranks, know what is cut, keep ties, and have values of their own."""

    def body() -> None:
        plain = filled(Model())
        parallel = shard_(copy.deepcopy(plain), MODEL_PLAN)
        twin = copy.deepcopy(parallel)
        assert twin.head.weight is twin.embedding.weight
        assert twin.head.weight is not parallel.head.weight
        assert twin.head.comm is parallel.head.comm
        for name, param in parallel.named_parameters():
            assert shard_of(twin.get_parameter(name)) == shard_of(param)
            param.data.zero_()
        ids = torch.arange(S).view(S, 1)
        close(twin(ids), plain(ids))

    ranks(body)


def test_a_layer_can_not_be_pickled() -> None:
    for layer in (ColumnParallelLinear(4, 4), VocabParallelEmbedding(4, 4), LayerNorm(4)):
        with pytest.raises(TypeError, match=rf"a {type(layer).__name__} can't be pickled.* whole_state_dict\(module\)"):
            pickle.dumps(layer)


def test_a_parameter_may_be_pickled(some_more: Ranks) -> None:
    """It comes back without a mark, as it has left its ranks; copies of other kinds keep it."""

    def body() -> None:
        weight = ColumnParallelLinear(H, F, bias=False).weight
        file = io.BytesIO()
        torch.save([weight], file)
        file.seek(0)
        (loaded,) = torch.load(file, weights_only=True)
        assert torch.equal(loaded, weight)
        assert shard_of(loaded) is None
        assert shard_of(pickle.loads(pickle.dumps(weight))) is None
        assert shard_of(weight) is copy.deepcopy(shard_of(weight))
        assert shard_of(copy.copy(weight)) is shard_of(weight)

    some_more(body)


@pytest.mark.parametrize("make", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm])
def test_a_part_can_not_be_parametrized(some_more: Ranks, make: Callable[..., Any]) -> None:
    def body() -> None:
        size = mpicoll.world().size
        with pytest.raises(ArgumentError, match=rf"RowParallelLinear: weight can't be .*\(rank \d of {size}\)"):
            make(RowParallelLinear(F, H))
        alone = mpicoll.world().split(mpicoll.world().rank)
        layer = RowParallelLinear(F, H, group=alone)
        assert make(layer)(torch.ones(2, F)).shape == (2, H)
        assert alone is not None
        alone.free()

    some_more(body)


def test_new_parameters_are_marked(some_more: Ranks) -> None:
    """Those that Module.to and its kin make, and load_state_dict, and who ties weights."""

    def body() -> None:
        linear = RowParallelLinear.from_linear(filled(nn.Linear(H, F))).float().to("cpu", torch.bfloat16)
        empty = ColumnParallelLinear(H, F, device="meta").to_empty(device="cpu")
        vocab = VocabParallelEmbedding(F, H, device="meta", dtype=torch.float64)
        state = VocabParallelEmbedding.from_embedding(filled(nn.Embedding(F, H))).state_dict()
        vocab.load_state_dict(state, assign=True)
        assert torch.equal(vocab.weight, state["weight"])
        tied = ColumnParallelLinear(H, F, bias=False, device="meta")
        tied.weight = vocab.weight
        dims = {"weight": 1, "bias": None}, {"weight": 0, "bias": 0}, {"weight": 0}, {"weight": 0}
        for layer, expected in zip((linear, empty, vocab, tied), dims, strict=True):
            for name, param in layer.named_parameters():
                shard = shard_of(param)
                assert (None if shard is None else shard.dim) == expected[name]
                assert shard is None or shard.comm is layer.comm

    some_more(body)


def _drawn_again() -> None:
    """After to_empty, from the generator or by init_method."""
    torch.manual_seed(3)
    made = [ColumnParallelLinear(H, F), RowParallelLinear(H, F, False), VocabParallelEmbedding(F, H, padding_idx=1)]
    made += [RowParallelLinear(H, F, init_method=lambda weight: nn.init.normal_(weight, 0.0, 0.1))]
    wanted = [copy.deepcopy(one.state_dict()) for one in made]
    torch.manual_seed(3)
    for layer, values in zip(made, wanted, strict=True):
        params = dict(layer.named_parameters())
        for param in params.values():
            param.data.fill_(math.nan)
        layer.reset_parameters()
        for name, value in values.items():
            assert torch.equal(params[name], value)
            assert layer.get_parameter(name) is params[name]


def test_drawn_again_on_one_rank() -> None:
    _drawn_again()


@pytest.mark.mpi
def test_drawn_again() -> None:
    _drawn_again()


# --- conversion of models


def test_patterns() -> None:
    model = shard_(Model(), {"blocks.0.fc1": {"layer": "column", "skip_bias_add": True}, "*.fc1": "column"})
    assert model.blocks[0].fc1.skip_bias_add
    assert not model.blocks[1].fc1.skip_bias_add
    assert type(model.blocks[0].fc2) is nn.Linear
    model = shard_(Block(), {"fc2": "row", "proj": {"layer": "row", "input_is_parallel": False}, "ln*": "norm"})
    assert model.fc2.input_is_parallel
    assert not model.proj.input_is_parallel
    assert type(model.ln1) is LayerNorm
    assert type(model.ln2) is RMSNorm
    # What is shared stays shared.
    both = nn.ModuleDict({"a": nn.Linear(4, 4)})
    both["b"] = both["a"]
    shard_(both, {"*": "column"})
    assert both["a"] is both["b"]


def test_what_can_not_be_converted(some: Ranks) -> None:
    class Odd(nn.Linear):
        pass

    def body() -> None:
        odd = nn.ModuleDict({"odd": Odd(H, H), "sparse": nn.Embedding(F, H, sparse=True), "seven": nn.Linear(7, 7)})
        tied = Model()
        same = nn.ModuleDict({"a": nn.Linear(4, 4)})
        same["b"] = same["a"]
        wrong: list[tuple[nn.Module, Any, str]] = [
            (Block(), {"fc9": "column"}, "no submodule fits 'fc9'; there are .*'fc1'"),
            (Block(), {"fc1": "columns"}, "'fc1' must become one of .*'column'.*, got 'columns'"),
            (Block(), {"fc1": {"gather_output": True}}, "'fc1' must become one of"),
            (Block(), {"ln1": "column"}, "'ln1', which 'ln1' fits, is a LayerNorm; 'column' needs a Linear"),
            (odd, {"odd": "row"}, "'odd', which 'odd' fits, is a Odd"),
            (odd, {"sparse": "vocab"}, "an Embedding with sparse can't"),
            (Block(), {"fc1": {"layer": "column", "gather": 1}}, "'fc1' can't become 'column' with .*'gather'"),
            (tied, {"embedding": "vocab"}, "'head' shares its weight with 'embedding', but no pattern fits it"),
            (tied, {"embedding": "vocab", "head": "row"}, "embedding and head share their weight, but it would be cut"),
            (same, {"b": "row"}, "'b' is the same module as 'a'"),
        ]
        for model, plan, message in wrong:
            before = [type(one) for one in model.modules()]
            if plan.get("head") == "row" and mpicoll.world().size == 1:
                continue
            with pytest.raises(ArgumentError, match=message):
                shard_(model, {**plan})
            assert [type(one) for one in model.modules()] == before

    some(body)


def test_what_does_not_divide(some_more: Ranks) -> None:
    size = some_more.size

    def body() -> None:
        rank = mpicoll.world().rank
        where = rf"\(rank {rank} of {size}\)"
        uneven = 5 * size + 1
        for message, make in {
            f"ColumnParallelLinear: out_features {uneven} does not divide among {size} ranks; {6 * size} would": (
                lambda: ColumnParallelLinear(8, uneven)
            ),
            f"RowParallelLinear: in_features {uneven} does not divide": lambda: RowParallelLinear(uneven, 8),
            f"VocabParallelEmbedding: num_embeddings {uneven} does not divide": (
                lambda: VocabParallelEmbedding(uneven, 8)
            ),
        }.items():
            with pytest.raises(ShapeError, match=message):
                make()
        column = ColumnParallelLinear(8, 2 * size, sequence_parallel=True, device="meta")
        row = RowParallelLinear(2 * size, 8, input_is_parallel=True, sequence_parallel=True, device="meta")
        vocab = VocabParallelEmbedding(2 * size, 8, sequence_parallel=True)
        for message, call in {
            rf"column_parallel_linear: the input must be of shape \(sequence, ..., 8\), got \(3, 7\) {where}": (
                lambda: column(torch.zeros(3, 7))
            ),
            r"the input must be of shape \(sequence, ..., 8\), got \(8,\)": lambda: column(torch.zeros(8)),
            rf"RowParallelLinear: the input must be of shape \(sequence, ..., 2\), got \(3, {2 * size}\)": (
                lambda: row(torch.zeros(3, 2 * size))
            ),
            rf"axis 0 of an input of shape \({uneven}, 2\), does not divide among {size} ranks {where}": (
                lambda: row(torch.zeros(uneven, 2, device="meta"))
            ),
            rf"axis 0 of ids of shape \({uneven},\), does not divide among {size} ranks {where}": (
                lambda: vocab(torch.zeros(uneven, dtype=torch.int64))
            ),
        }.items():
            with pytest.raises(ShapeError, match=message):
                call()
        with pytest.raises(ArgumentError, match=rf"padding_idx {2 * size} is no row of {2 * size}"):
            VocabParallelEmbedding(2 * size, 8, padding_idx=2 * size)
        with pytest.raises(ArgumentError, match="sequence_parallel=True needs input_is_parallel=True"):
            RowParallelLinear(2 * size, 8, sequence_parallel=True)

    some_more(body)


def test_repr(some_more: Ranks) -> None:
    def body() -> None:
        size, rank = mpicoll.world().size, mpicoll.world().rank
        column = ColumnParallelLinear(4, 2 * size, sequence_parallel=True, gather_output=True, device="meta")
        assert repr(column) == (
            f"ColumnParallelLinear(in_features=4, out_features={2 * size}, bias=True, sequence_parallel=True,"
            f" gather_output=True, rank {rank} of {size})"
        )
        row = RowParallelLinear(2 * size, 4, False, skip_bias_add=True, device="meta")
        assert repr(row) == (
            f"RowParallelLinear(in_features={2 * size}, out_features=4, bias=False, skip_bias_add=True,"
            f" rank {rank} of {size})"
        )
        vocab = VocabParallelEmbedding(2 * size, 4, padding_idx=-1, device="meta")
        assert (
            repr(vocab) == f"VocabParallelEmbedding({2 * size}, 4, padding_idx={2 * size - 1}, rank {rank} of {size})"
        )
        assert repr(LayerNorm(3, sequence_parallel=True)).endswith("sequence_parallel=True)")

    some_more(body)
