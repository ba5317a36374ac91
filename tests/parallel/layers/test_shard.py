"""Whole models of parallel layers against the plain ones in one process."""

from __future__ import annotations

import copy
from typing import Any

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
    close,
    filled,
    normal,
    rows,
    same_modules,
    whole,
)
from support.ranks import Ranks
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.prune import l1_unstructured

import mpicoll
from mpicoll.errors import ArgumentError
from mpicoll.parallel.layers import (
    LayerNorm,
    RMSNorm,
    shard_,
    whole_state_dict,
)


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
        same_modules(fresh, plain)

    ranks(body)


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
        pruned = nn.ModuleDict({"a": l1_unstructured(nn.Linear(4, 4), "weight", 2)})
        wrong: list[tuple[nn.Module, Any, str]] = [
            (Block(), {"fc9": "column"}, "no submodule matches 'fc9'; the submodules are .*'fc1'"),
            (Block(), {"fc1": "columns"}, "'fc1' must become one of .*'column'.*, got 'columns'"),
            (Block(), {"fc1": {"gather_output": True}}, "'fc1' must become one of"),
            (Block(), {"fc1": ["column"]}, r"'fc1' must become one of .*, got \['column'\]"),
            (Block(), {"ln1": "column"}, "'ln1', which 'ln1' matches, is a LayerNorm; 'column' needs a Linear"),
            (odd, {"odd": "row"}, "'odd', which 'odd' matches, is a Odd"),
            (odd, {"sparse": "vocab"}, "an Embedding with sparse can't"),
            (Block(), {"fc1": {"layer": "column", "gather": 1}}, "'fc1' can't become 'column' with .*'gather'"),
            (tied, {"embedding": "vocab"}, "'head' shares weight with 'embedding', but no pattern matches it"),
            (tied, {"embedding": "vocab", "head": "row"}, "embedding and head share weight, but it would be sharded"),
            (same, {"b": "row"}, "'b' is the same module as 'a'"),
            (pruned, {"a": "row"}, r"'a' has the parameters \['weight_orig'\], from which"),
        ]
        with pytest.raises(ArgumentError, match=r"plan must be a dict of names and kinds.*got a str"):
            shard_(Block(), "column")  # type: ignore[arg-type]
        for model, plan, message in wrong:
            before = [type(one) for one in model.modules()]
            if plan.get("head") == "row" and mpicoll.world().size == 1:
                continue
            with pytest.raises(ArgumentError, match=message):
                shard_(model, {**plan})
            assert [type(one) for one in model.modules()] == before

    some(body)
