"""What a transformer layer communicates, against the formulas of Megatron-LM's papers.

Counted are the collectives that the layers call, each with the bytes that a rank sends in a ring, for n bytes of the
whole tensor: 2n(P-1)/P in an all-reduce, n(P-1)/P in an all-gather or reduce-scatter. With one such layer's activations
of s·b·h elements, tensor parallelism costs two all-reduces in the forward and two in the backward (Shoeybi et al. 2019,
section 3); sequence parallelism replaces each by an all-gather and a reduce-scatter, and gathers the inputs of the two
column-parallel layers once more in the backward, as it does not keep them (Korthikanti et al. 2022, section 4.2.2).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.ranks import Ranks
from torch import Tensor, nn
from torch.nn import functional

import mpicoll
from mpicoll.parallel.layers import VocabParallelEmbedding, base, column_parallel_linear, shard_
from mpicoll.parallel.layers import functional as sharded
from mpicoll.parallel.mappings import linear_map
from mpicoll.parallel.random import checkpoint

S, B, H, F = 12, 2, 24, 96
ITEM = 4
ACTIVATIONS = S * B * H * ITEM
NAMES = {
    "allreduce": "all-reduce",
    "iallreduce": "all-reduce",
    "allgather": "all-gather",
    "iallgather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "ireduce_scatter": "reduce-scatter",
    "alltoall": "all-to-all",
}

Traffic = dict[str, list[int]]
"""The kinds of collectives, and for each call the bytes that this rank sends."""


class Ledger:
    """Who counts, as long as a block lasts. Ranks may be threads of one process."""

    def __init__(self) -> None:
        self._own = threading.local()

    def wrap(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        kind = NAMES[name]

        def counted(x: Tensor, *args: Any, comm: mpicoll.Communicator, **kwargs: Any) -> Any:
            n = x.nbytes * (comm.size if kind == "all-gather" else 1)
            ring = n * (comm.size - 1) // comm.size
            self._own.calls.append((kind, 2 * ring if kind == "all-reduce" else ring))
            return original(x, *args, comm=comm, **kwargs)

        return counted

    def during(self, call: Callable[[], Any]) -> tuple[Any, Traffic]:
        self._own.calls = []
        result = call()
        found: Traffic = {}
        for kind, sent in self._own.calls:
            found.setdefault(kind, []).append(sent)
        return result, found


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> Ledger:
    made = Ledger()
    for module in (sharded, base, linear_map):
        for name in NAMES:
            if hasattr(module, name):
                monkeypatch.setattr(module, name, made.wrap(name, getattr(module, name)))
    return made


class Layer(nn.Module):
    """A transformer layer: attention with one matrix for query, key and value, ordered by head, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(H), nn.LayerNorm(H)
        self.qkv, self.proj = nn.Linear(H, 3 * H), nn.Linear(H, H)
        self.fc1, self.fc2 = nn.Linear(H, F), nn.Linear(F, H)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.ln1(x))
        s, b, features = qkv.shape
        q, k, v = qkv.view(s, b, features // 6, 3, 2).permute(3, 1, 2, 0, 4)
        attended = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(attended.permute(2, 0, 1, 3).reshape(s, b, features // 3))
        return x + self.fc2(functional.gelu(self.fc1(self.ln2(x))))


def layer(sequence_parallel: bool) -> Any:
    plan = {"qkv": "column", "fc1": "column", "proj": "row", "fc2": "row", "ln*": "norm"}
    return shard_(Layer(), plan, sequence_parallel=sequence_parallel)


def test_tensor_parallelism(several: Ranks, ledger: Ledger) -> None:
    def body() -> None:
        size = mpicoll.world().size
        model = layer(False)
        x = torch.ones(S, B, H, requires_grad=True)
        each = 2 * ACTIVATIONS * (size - 1) // size
        out, forward = ledger.during(lambda: model(x))
        assert forward == {"all-reduce": [each] * 2}
        _, backward = ledger.during(out.sum().backward)
        assert backward == {"all-reduce": [each] * 2}

    several(body)


def test_sequence_parallelism(several: Ranks, ledger: Ledger) -> None:
    def body() -> None:
        size = mpicoll.world().size
        model = layer(True)
        x = torch.ones(S // size, B, H, requires_grad=True)
        each = ACTIVATIONS * (size - 1) // size
        out, forward = ledger.during(lambda: model(x))
        assert forward == {"all-gather": [each] * 2, "reduce-scatter": [each] * 2}
        _, backward = ledger.during(out.sum().backward)
        # What all ranks hold alike is summed by each layer that has it: two biases, and two norms' weight and bias.
        replicated = [2 * count * ITEM * (size - 1) // size for count in (H, H, 2 * H, 2 * H)]
        assert Counter(backward.pop("all-reduce")) == Counter(replicated)
        assert backward == {"all-gather": [each] * 4, "reduce-scatter": [each] * 2}

    several(body)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
def test_recomputation_repeats_the_forward(some_more: Ranks, ledger: Ledger, sequence_parallel: bool) -> None:
    """But for its last collective, whose result no gradient needs."""

    def body() -> None:
        size = mpicoll.world().size
        model = layer(sequence_parallel)
        x = torch.ones(S // size if sequence_parallel else S, B, H, requires_grad=True)
        each = ACTIVATIONS * (size - 1) // size
        out, forward = ledger.during(lambda: checkpoint(model, x))
        _, backward = ledger.during(out.sum().backward)
        if sequence_parallel:
            assert forward == {"all-gather": [each] * 2, "reduce-scatter": [each] * 2}
            assert len(backward.pop("all-reduce")) == 4
            assert backward == {"all-gather": [each] * 6, "reduce-scatter": [each] * 3}
        else:
            assert forward == {"all-reduce": [2 * each] * 2}
            assert backward == {"all-reduce": [2 * each] * 3}

    some_more(body)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
def test_embedding_and_output_layer(several: Ranks, ledger: Ledger, sequence_parallel: bool) -> None:
    """One all-reduce each: of the embedding in the forward, of the output layer's input in the backward."""

    def body() -> None:
        size = mpicoll.world().size
        embedding = VocabParallelEmbedding(48, H, sequence_parallel=sequence_parallel)
        ids = torch.arange(S * B).view(S, B)
        each = ACTIVATIONS * (size - 1) // size

        def forward() -> Tensor:
            return column_parallel_linear(embedding(ids), embedding.weight, sequence_parallel=sequence_parallel)

        out, there = ledger.during(forward)
        _, back = ledger.during(out.sum().backward)
        if sequence_parallel:
            assert there == {"reduce-scatter": [each], "all-gather": [each]}
            # The output layer's input once more, and the embedding's gradient.
            assert back == {"all-gather": [each] * 2, "reduce-scatter": [each]}
        else:
            assert there == {"all-reduce": [2 * each]}
            assert back == {"all-reduce": [2 * each]}

    several(body)


def test_one_rank_sends_nothing(ledger: Ledger) -> None:
    for sequence_parallel in (False, True):
        model = layer(sequence_parallel)
        x = torch.ones(S, B, H, requires_grad=True)
        assert ledger.during(lambda model=model, x=x: model(x).sum().backward())[1] == {}
