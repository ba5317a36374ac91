"""Parallel layers inside of torch's own wrappers, against the plain model in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from mpicoll.errors import ArgumentError, DTypeError
from mpicoll.parallel import checkpoint as saved
from mpicoll.parallel.gradients import average_gradients, clip_grad_norm_
from mpicoll.parallel.layers import shard_, whole_state_dict
from mpicoll.parallel.mappings import gather_from_sequence_parallel_region, scatter_to_sequence_parallel_region
from mpicoll.parallel.random import checkpoint
from mpicoll.parallel.shards import get_shard
from mpicoll.parallel.topology import PipelineParallelGrid, initialize_model_parallel

S, B, H, F = 12, 12, 12, 24

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("default_group")]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(H), nn.Linear(H, F), nn.Linear(F, H)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.call: Callable[..., Tensor] = lambda layer, x: layer(x)
        self.divided = False

    def forward(self, x: Tensor) -> Tensor:
        x = scatter_to_sequence_parallel_region(x) if self.divided else x
        for layer in self.layers:
            x = self.call(layer, x)
        return gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False) if self.divided else x


PLAN = {"*.up": "column", "*.down": "row", "*.norm": "norm"}


def plain() -> Model:
    torch.manual_seed(0)
    return Model().double()


def divided(sequence_parallel: bool = False) -> Model:
    model = plain()
    model.divided = sequence_parallel
    shard_(model, PLAN, sequence_parallel=sequence_parallel)
    return model


def samples() -> Tensor:
    return torch.randn(S, B, H, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def own(grid: PipelineParallelGrid) -> Tensor:
    return samples().chunk(grid.get_data_parallel_world_size(), 1)[grid.get_data_parallel_rank()]


def backward(model: nn.Module, x: Tensor) -> None:
    model(x).square().mean().backward()


def check(model: nn.Module, wanted: Model) -> None:
    reference = dict(wanted.named_parameters())
    for name, param in model.named_parameters():
        shard, grad = get_shard(param), reference[name].grad
        assert grad is not None
        assert param.grad is not None, name
        if shard is not None:
            grad = grad.chunk(shard.comm.size, shard.dim)[shard.comm.rank]
        torch.testing.assert_close(param.grad, grad, rtol=0, atol=1e-12)


def tensor_sizes() -> list[int]:
    return [size for size in (1, 2, 3, 4) if dist.get_world_size() % size == 0]


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
def test_distributed_data_parallel(sequence_parallel: bool) -> None:
    """Over the data axis, with gradients of two passes added up."""
    for tp in tensor_sizes():
        with initialize_model_parallel(tp) as grid:
            model = divided(sequence_parallel)
            wrapped = DistributedDataParallel(model, process_group=grid.get_data_parallel_group())
            x, wanted = own(grid), plain()
            with wrapped.no_sync():
                backward(wrapped, 2 * x)
            backward(wrapped, x)
            backward(wanted, 2 * samples())
            backward(wanted, samples())
            check(model, wanted)
            norm = clip_grad_norm_(model.parameters(), 1e-2)
            expected = nn.utils.clip_grad_norm_(wanted.parameters(), 1e-2)
            torch.testing.assert_close(norm, expected, rtol=1e-10, atol=0)
            check(model, wanted)


@pytest.mark.parametrize("tool", [checkpoint, "torch", "reentrant"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
def test_checkpointed_activations(tool: Any, sequence_parallel: bool) -> None:
    with initialize_model_parallel(dist.get_world_size()):
        model, wanted = divided(sequence_parallel), plain()
        if callable(tool):
            model.call = tool
        else:
            model.call = lambda layer, x: torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=tool == "reentrant")
        backward(model, samples().requires_grad_())
        backward(wanted, samples())
        check(model, wanted)


def test_losses_and_passes_of_any_number() -> None:
    """The sum of two losses, a graph that is used twice, and a layer that is."""

    def losses(model: nn.Module) -> None:
        x = samples()
        (model(x).square().mean() + model(2 * x).abs().mean()).backward()
        loss = model(model(x)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()

    with initialize_model_parallel(dist.get_world_size()):
        model, wanted = divided(), plain()
        losses(model)
        losses(wanted)
        check(model, wanted)
        check_average(model)


def check_average(model: Model) -> None:
    """A running mean of the parameters, on a deep copy, can be saved as the model can."""
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    for (name, value), (_, other) in zip(
        whole_state_dict(average.module).items(), whole_state_dict(copy.deepcopy(model)).items(), strict=True
    ):
        assert torch.equal(value, other), name


# torch's own, at any place where compiled code breaks off.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning")
def test_compiled() -> None:
    """Compiled code goes around what communicates, whose functions see real tensors."""
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    with initialize_model_parallel(dist.get_world_size()):
        model, wanted = divided(sequence_parallel=True), plain()
        compiled = torch.compile(model, backend=backend)
        for factor in (1, 2):
            backward(compiled, factor * samples())
            backward(wanted, factor * samples())
        check(model, wanted)
        assert any("gelu" in one for one in seen)
        if dist.get_world_size() > 1:
            torch.compiler.reset()
            with pytest.raises(RuntimeError, match="it communicates with other ranks"):
                torch.compile(copy.deepcopy(model), backend=backend, fullgraph=True)(samples())


def test_fully_shard() -> None:
    """Gradients are right and the whole can be had; what would take a part for a whole is refused."""
    for tp in tensor_sizes():
        with initialize_model_parallel(tp) as grid:
            mesh = grid.device_mesh("dp")
            model, wanted = divided(), plain()
            whole = wanted.state_dict()
            for layer in model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            for name, value in whole_state_dict(model).items():
                assert torch.equal(value, whole[name]), name
            backward(model, own(grid))
            backward(wanted, samples())
            reference = dict(wanted.named_parameters())
            for name, param in model.named_parameters():
                got, grad, shard = param.grad, reference[name].grad, get_shard(param)
                assert grad is not None
                if shard is not None:
                    grad = grad.chunk(tp, shard.dim)[shard.comm.rank]
                torch.testing.assert_close(got.full_tensor(), grad, rtol=0, atol=1e-12)  # type: ignore[union-attr]
            for refused in (average_gradients, lambda params: clip_grad_norm_(params, 1.0)):
                with pytest.raises(DTypeError, match=r"a parameter of shape \(12,\) is a DTensor; use Distributed"):
                    refused(model.parameters())
            if tp > 1:
                with pytest.raises(ArgumentError, match=r"'layers.0.up.weight' is sharded by .* and also a DTensor"):
                    saved.model_state(model)
