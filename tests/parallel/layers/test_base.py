"""What all parallel layers have in common: initial values, copies, marks, groups, dtypes, errors."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.parallel_layers import (
    MODEL_PLAN,
    PLAN,
    B,
    Block,
    F,
    H,
    Model,
    S,
    check,
    check_parameters,
    close,
    columns,
    filled,
    normal,
    rows,
    same_modules,
    whole,
)
from support.ranks import Comms, Ranks
from torch import Tensor, nn

import mpicoll
from mpicoll.errors import ArgumentError, DTypeError, ShapeError
from mpicoll.parallel.layers import (
    ColumnParallelLinear,
    LayerNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    shard_,
)
from mpicoll.parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
    split,
)
from mpicoll.parallel.shards import get_shard


def test_one_rank_is_the_plain_layer() -> None:
    x = normal(S, H).requires_grad_()
    assert ColumnParallelLinear.from_linear(filled(nn.Linear(H, F)))(x).grad_fn.name() == "AddmmBackward0"
    assert RowParallelLinear.from_linear(filled(nn.Linear(H, F)))(x).grad_fn.name() == "AddmmBackward0"
    embedding = VocabParallelEmbedding.from_embedding(filled(nn.Embedding(F, H)))
    assert embedding(torch.arange(3)).grad_fn.name() == "EmbeddingBackward0"


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


@pytest.mark.slow
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
            shard, grad = get_shard(param), exact.get_parameter(name).grad
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
            shard, grad = get_shard(param), plain.get_parameter(name).grad
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


def test_from_and_to_plain_layers(ranks: Ranks) -> None:
    def body() -> None:
        for bias in (True, False):
            linear = filled(nn.Linear(H, F, bias)).eval()
            linear.weight.requires_grad_(False)
            for cls in (ColumnParallelLinear, RowParallelLinear):
                layer = cls.from_linear(linear)
                assert not layer.training
                back = layer.to_linear()
                same_modules(back, linear)
                back.weight.data.zero_()  # memory of its own
                same_modules(layer.to_linear(), linear)
        embedding = filled(nn.Embedding(F, H, padding_idx=3)).eval()
        back = VocabParallelEmbedding.from_embedding(embedding).to_embedding()
        assert back.padding_idx == 3
        same_modules(back, embedding)

    ranks(body)


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
            assert get_shard(twin.get_parameter(name)) == get_shard(param)
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
        assert get_shard(loaded) is None
        assert get_shard(pickle.loads(pickle.dumps(weight))) is None
        assert get_shard(weight) is copy.deepcopy(get_shard(weight))
        assert get_shard(copy.copy(weight)) is get_shard(weight)

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
                shard = get_shard(param)
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


def test_what_does_not_divide(some_more: Ranks) -> None:
    size = some_more.size

    def body() -> None:
        rank = mpicoll.world().rank
        where = rf"\(rank {rank} of {size}\)"
        uneven = 5 * size + 1
        for message, make in {
            f"ColumnParallelLinear: out_features {uneven} can't be divided equally among {size} ranks": (
                lambda: ColumnParallelLinear(8, uneven)
            ),
            f"RowParallelLinear: in_features {uneven} can't be divided": lambda: RowParallelLinear(uneven, 8),
            f"VocabParallelEmbedding: num_embeddings {uneven} can't be divided": (
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
            rf"axis 0 of an input of shape \({uneven}, 2\), can't be divided equally among {size} ranks {where}": (
                lambda: row(torch.zeros(uneven, 2, device="meta"))
            ),
            rf"axis 0 of ids of shape \({uneven},\), can't be divided equally among {size} ranks {where}": (
                lambda: vocab(torch.zeros(uneven, dtype=torch.int64))
            ),
        }.items():
            with pytest.raises(ShapeError, match=message):
                call()
        for layer, name in (
            (column, "column_parallel_linear"),
            (row, "RowParallelLinear"),
            (vocab, "VocabParallelEmb"),
        ):
            for wrong in (np.ones((2, 8)), [1.0], None):
                with pytest.raises(
                    DTypeError, match=f"{name}.*: pass a torch tensor, got {type(wrong).__name__} {where}"
                ):
                    layer(wrong)
        with pytest.raises(ArgumentError, match=rf"padding_idx {2 * size} is not in \[-{2 * size}, {2 * size}\)"):
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
