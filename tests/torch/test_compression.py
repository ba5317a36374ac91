"""DDP's hook that compresses gradients between nodes."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mpicoll
from mpicoll.torch import CompressionState, compression_hook
from mpicoll.torch.group_operations import GroupOperations


class _Bucket:
    """A bucket of gradients, as DDP passes it."""

    def __init__(self, gradients: torch.Tensor) -> None:
        self._gradients = gradients

    def buffer(self) -> torch.Tensor:
        return self._gradients

    def index(self) -> int:
        return 0


def _make_state(**options: Any) -> CompressionState:
    """Return the state of a group of the ranks that are threads, for which c10d makes none."""
    operations = GroupOperations()
    operations.set_communicator(mpicoll.world(), "threads", timedelta(seconds=60))
    return CompressionState(operations, **options)  # type: ignore[arg-type]


def _make_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def _train(network: nn.Module, ways: tuple[str, ...]) -> dict[str, float]:
    """Return the accuracy of a network for digits, trained with each of the compressions."""
    datasets = pytest.importorskip("sklearn.datasets")
    images, digits = (torch.from_numpy(one) for one in datasets.load_digits(return_X_y=True))
    images = images.float() / 16
    world, accuracies = mpicoll.world(), {}
    for way in ways:
        model = copy.deepcopy(network)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
        state = None if way == "none" else _make_state(compression=way)
        shares = torch.randperm(1300, generator=torch.Generator().manual_seed(1)).split(64)[:-1] * 6
        for share in shares:
            optimizer.zero_grad()
            mine = share[world.rank :: world.size]
            nn.functional.cross_entropy(model(images[mine]), digits[mine]).backward()
            flat = nn.utils.parameters_to_vector(one.grad for one in model.parameters())  # type: ignore[misc]
            bucket: Any = _Bucket(flat)
            flat = mpicoll.allreduce(flat, "avg") if state is None else compression_hook(state, bucket).wait()
            at = 0
            for one in model.parameters():
                one.grad = flat[at : at + one.numel()].view_as(one)
                at += one.numel()
            optimizer.step()
        accuracies[way] = (model(images[1300:]).argmax(1) == digits[1300:]).float().mean().item()
    return accuracies


@pytest.mark.slow
def test_digits_between_nodes_are_learned_as_without_compression() -> None:
    network = _make_network()  # seeds are those of the process, and ranks are threads
    everywhere = mpicoll.run_local(lambda: _train(network, ("none", "bf16", "int8")), 2, ranks_per_node=1)
    assert everywhere[0] == everywhere[1]  # all ranks have the same parameters
    assert everywhere[0]["none"] > 0.85
    for way in ("bf16", "int8"):
        assert abs(everywhere[0][way] - everywhere[0]["none"]) <= 0.01


@pytest.mark.parametrize("feedback", [True, False])
def test_mean_of_steps_converges_only_with_feedback(feedback: bool) -> None:
    def body() -> float:
        world = mpicoll.world()
        state = _make_state(compression="int8", feedback=feedback)
        gradients = [torch.randn(2000, generator=torch.Generator().manual_seed(rank)) for rank in range(world.size)]
        exact, total = sum(one.double() for one in gradients) / world.size, torch.zeros(2000, dtype=torch.float64)
        for _ in range(100):
            total += compression_hook(state, _Bucket(gradients[world.rank].clone())).wait()  # type: ignore[arg-type]
        return (total / 100 - exact).abs().mean().item()

    off = mpicoll.run_local(body, 3, ranks_per_node=1)[0]
    assert (off < 3e-4) == feedback


def test_gradients_that_are_not_served() -> None:
    def body() -> None:
        with pytest.raises(mpicoll.DTypeError, match="serves float32 arrays, got bfloat16"):
            compression_hook(_make_state(), _Bucket(torch.ones(3, dtype=torch.bfloat16)))  # type: ignore[arg-type]
        with pytest.raises(mpicoll.ArgumentError, match="compression must be 'bf16' or 'int8'"):
            _make_state(compression="fp4")

    mpicoll.run_local(body, 2, ranks_per_node=1)


@pytest.mark.mpi
@pytest.mark.usefixtures("default_group")
def test_ddp_on_one_node_has_the_gradients_of_ddp() -> None:
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(40, 300), nn.Tanh(), nn.Linear(300, 5))
    hooked = DistributedDataParallel(copy.deepcopy(plain), bucket_cap_mb=0.02)
    hooked.register_comm_hook(CompressionState(compression="int8"), compression_hook)
    generator = torch.Generator().manual_seed(dist.get_rank())
    models = hooked, DistributedDataParallel(plain, bucket_cap_mb=0.02)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in models]
    for _ in range(4):
        batch = torch.randn(8, 40, generator=generator)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    for got, wanted in zip(*(one.parameters() for one in models), strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.mpi
@pytest.mark.usefixtures("default_group")
def test_a_group_of_another_backend() -> None:
    gloo = dist.new_group(backend="gloo")
    with pytest.raises(mpicoll.CommunicatorError, match="gloo"):
        CompressionState(gloo)
    dist.destroy_process_group(gloo)
