"""Comparison of parallel layers with the plain ones of torch.nn in one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import mpicoll
from mpicoll.parallel.layers import functional as layers
from mpicoll.parallel.shards import get_shard

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
        shard = get_shard(param)

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


@pytest.fixture(params=[0, layers.MIN_BACKGROUND_BYTES], ids=["background", "blocking"])
def background(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Collectives of the tests' small tensors run in the background, or as they do by default."""
    monkeypatch.setattr(layers, "MIN_BACKGROUND_BYTES", request.param)


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


def same_modules(got: nn.Module, wanted: nn.Module) -> None:
    assert type(got) is type(wanted)
    assert got.training == wanted.training
    assert repr(got) == repr(wanted)
    assert got.state_dict().keys() == wanted.state_dict().keys()
    for name, param in wanted.named_parameters():
        assert torch.equal(got.get_parameter(name), param)
        assert got.get_parameter(name).dtype == param.dtype
        assert got.get_parameter(name).requires_grad == param.requires_grad
