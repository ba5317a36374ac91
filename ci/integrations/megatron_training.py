"""Train with the tensor parallel layers of Megatron-core: python megatron_training.py TENSOR_PARALLEL_SIZE [--mappings]

With --mappings the layers use mpicoll's autograd functions in place of Megatron's own, which also gather on the CPU."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core import ModelParallelConfig, parallel_state, tensor_parallel
from megatron.core.tensor_parallel import layers
from torch import nn
from torch.nn.functional import cross_entropy

import mpicoll.parallel

VOCABULARY, HIDDEN, SEQUENCE, BATCH, STEPS, LR = 24, 12, 6, 4, 5, 0.5

warnings.filterwarnings("ignore", message="When using async grad allreduce it is recommended")


class Alone(nn.Module):
    """The model in one process of plain torch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.first = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.second = nn.Linear(4 * HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY)
        torch.manual_seed(0)
        for module in (self.embedding, self.first, self.second, self.head):
            nn.init.normal_(module.weight, std=0.3)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        return self.head(hidden + self.second(self.first(hidden).tanh()))

    def compute_loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self(tokens).flatten(0, 1), targets.flatten())


class Divided(nn.Module):
    """The same model of Megatron's layers, whose initial weights are drawn in the same order."""

    def __init__(self, gathers: bool) -> None:
        super().__init__()
        config = ModelParallelConfig(tensor_model_parallel_size=width, use_cpu_initialization=True)
        options = {"config": config, "init_method": lambda weight: nn.init.normal_(weight, std=0.3), "tp_group": group}
        linear = options | {"bias": True, "skip_bias_add": False}
        torch.manual_seed(0)
        self.embedding = tensor_parallel.VocabParallelEmbedding(VOCABULARY, HIDDEN, **options)
        self.first = tensor_parallel.ColumnParallelLinear(HIDDEN, 4 * HIDDEN, gather_output=gathers, **linear)
        self.second = tensor_parallel.RowParallelLinear(4 * HIDDEN, HIDDEN, input_is_parallel=not gathers, **linear)
        self.head = tensor_parallel.ColumnParallelLinear(HIDDEN, VOCABULARY, gather_output=False, **linear)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        return self.head(hidden + self.second(self.first(hidden)[0].tanh())[0])[0]

    def compute_loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return tensor_parallel.vocab_parallel_cross_entropy(self(tokens), targets).mean()


def make_samples(step: int) -> torch.Tensor:
    """Return the tokens of a step, of shape (SEQUENCE, BATCH)."""
    return torch.randint(0, VOCABULARY, (SEQUENCE, BATCH), generator=torch.Generator().manual_seed(step))


def take_part(whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return what this rank should have of a parameter, or of its gradient."""
    for dim in range(whole.dim()):
        if whole.shape[dim] != part.shape[dim]:
            return whole.chunk(width, dim)[dist.get_rank(group)]
    return whole


def train(gathers: bool) -> None:
    alone, divided = Alone(), Divided(gathers)
    replicas, replica = parallel_state.get_data_parallel_group(), parallel_state.get_data_parallel_rank()
    losses = []
    for step in range(STEPS):
        tokens = make_samples(step)
        targets = (tokens * 5 + 1) % VOCABULARY
        for model in (alone, divided):
            model.zero_grad()
        expected = alone.compute_loss(tokens, targets)
        expected.backward()
        loss = divided.compute_loss(*(whole.chunk(replicas.size(), 1)[replica] for whole in (tokens, targets)))
        loss.backward()
        mean = loss.detach().clone()
        for tensor in [mean, *(parameter.grad for parameter in divided.parameters())]:
            dist.all_reduce(tensor, dist.ReduceOp.AVG, group=replicas)
        torch.testing.assert_close(mean, expected.detach(), rtol=1e-5, atol=1e-6)
        losses.append(mean.item())
        for (name, ours), theirs in zip(divided.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, take_part(theirs.grad, ours), rtol=1e-4, atol=1e-6, msg=name)
        for model in (alone, divided):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= LR * parameter.grad
    for (name, ours), theirs in zip(divided.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.detach(), take_part(theirs.detach(), ours), rtol=1e-4, atol=1e-6, msg=name)
    assert losses[-1] < 0.8 * losses[0]


def run_sequence_parallel() -> None:
    config = ModelParallelConfig(tensor_model_parallel_size=width, use_cpu_initialization=True, sequence_parallel=True)
    layer = tensor_parallel.ColumnParallelLinear(
        HIDDEN, HIDDEN * width, config=config, init_method=nn.init.ones_, bias=False, tp_group=group
    )
    layer(torch.ones(SEQUENCE, BATCH, HIDDEN))


def needs_gpu(function: Callable[[], None]) -> bool:
    """Return True if a function asks a torch without CUDA for a GPU."""
    try:
        function()
    except AssertionError as error:
        return "not compiled with CUDA" in str(error)
    return False


width = int(sys.argv[1])
dist.init_process_group("mpicoll")
parallel_state.initialize_model_parallel(tensor_model_parallel_size=width)
group = parallel_state.get_tensor_model_parallel_group()
assert dist.get_backend(group) == "mpicoll"
train(gathers=False)
if "--mappings" in sys.argv:
    for name in ("copy_to", "gather_from", "reduce_from", "scatter_to"):
        mapping = f"{name}_tensor_model_parallel_region"
        setattr(layers, mapping, getattr(mpicoll.parallel, mapping))
    train(gathers=False)
    train(gathers=True)
else:
    assert needs_gpu(lambda: train(gathers=True))
    assert needs_gpu(run_sequence_parallel)
if dist.get_rank() == 0:
    print(f"{dist.get_world_size()} ranks")
dist.destroy_process_group()
