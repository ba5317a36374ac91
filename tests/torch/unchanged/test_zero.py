"""ZeroRedundancyOptimizer: each rank keeps the state of its parameters, and all end with those of one process."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

with warnings.catch_warnings():
    # Importing torch.distributed.optim compiles its functional optimizers.
    warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
    from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook
    from torch.distributed.optim import ZeroRedundancyOptimizer

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(30)]

ROWS = 24  # of a whole batch: whole numbers of rows for 1, 2, 3 and 4 ranks


def _model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def _batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(300 + step)
    inputs = torch.randn(ROWS, 6, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(ROWS, 3, generator=generator, dtype=torch.float64)


def _share(whole: Tensor) -> Tensor:
    """This rank's rows."""
    return whole.chunk(dist.get_world_size())[dist.get_rank()]


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor) -> None:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()


def _same(got: nn.Module, want: nn.Module) -> None:
    torch.testing.assert_close(list(got.parameters()), list(want.parameters()), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("as_bucket_view", [False, True], ids=["tensors", "bucket_view"])
def test_training(rank: int, as_bucket_view: bool) -> None:
    one, ddp = _model(), DistributedDataParallel(_model())
    reference = torch.optim.Adam(one.parameters(), lr=0.05)
    zero = ZeroRedundancyOptimizer(
        ddp.parameters(), optimizer_class=torch.optim.Adam, lr=0.05, parameters_as_bucket_view=as_bucket_view
    )
    for step in range(4):
        inputs, targets = _batch(step)
        _step(one, reference, inputs, targets)
        _step(ddp, zero, _share(inputs), _share(targets))
    _same(ddp, one)
    kept = torch.tensor(len(zero.optim.state))
    dist.all_reduce(kept)
    assert kept.item() == len(list(one.parameters()))  # each parameter's state is kept once in all
    zero.consolidate_state_dict(to=0)
    if rank == 0:
        torch.testing.assert_close(zero.state_dict()["state"], reference.state_dict()["state"], rtol=1e-11, atol=1e-11)


def test_groups_of_parameters_and_a_loaded_state(rank: int) -> None:
    """Two learning rates, one of which changes; half way all goes on in a new optimizer."""
    one, ddp = _model(), DistributedDataParallel(_model())

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        parameters = list(model.parameters())
        return [{"params": parameters[:2], "lr": 0.01}, {"params": parameters[2:], "lr": 0.05}]

    def make() -> ZeroRedundancyOptimizer:
        return ZeroRedundancyOptimizer(groups(ddp), optimizer_class=torch.optim.Adam)

    reference, zero = torch.optim.Adam(groups(one)), make()
    for step in range(4):
        inputs, targets = _batch(step)
        _step(one, reference, inputs, targets)
        _step(ddp, zero, _share(inputs), _share(targets))
        for optimizer in (reference, zero):
            optimizer.param_groups[1]["lr"] *= 0.5
        if step == 1:
            zero.consolidate_state_dict(to=0)
            state = [zero.state_dict() if rank == 0 else None]
            dist.broadcast_object_list(state, src=0)
            zero = make()
            zero.load_state_dict(state[0])
    _same(ddp, one)


@pytest.mark.parametrize("wrap", [ddp_zero_hook.hook_with_zero_step, ddp_zero_hook.hook_with_zero_step_interleaved])
def test_steps_that_overlap_with_backward(backend: str, wrap: Any) -> None:
    if backend == "gloo":
        pytest.skip("torch refuses this on gloo, where it may hang")
    one, ddp = _model(), DistributedDataParallel(_model(), bucket_cap_mb=1e-4)
    reference = torch.optim.SGD(one.parameters(), lr=0.05)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), optimizer_class=torch.optim.SGD, overlap_with_ddp=True, lr=0.05)
    ddp.register_comm_hook(None, wrap(default_hooks.allreduce_hook, ddp, zero))
    for step in range(2 + 4):
        inputs, targets = _batch(step)
        if step >= 2:  # the first two steps only find the buckets out
            _step(one, reference, inputs, targets)
        with warnings.catch_warnings(record=True):  # of TorchScript, which torch says whatever the filters are
            _step(ddp, zero, _share(inputs), _share(targets))
    _same(ddp, one)


def test_join_as_on_gloo(rank: int) -> None:
    """One process is no measure here: the state of a rank that has joined goes on with its last gradients."""
    trained = []
    for group in (dist.group.WORLD, dist.new_group(backend="gloo")):
        ddp = DistributedDataParallel(_model(), process_group=group)
        zero = ZeroRedundancyOptimizer(ddp.parameters(), optimizer_class=torch.optim.Adam, lr=0.05, process_group=group)
        with Join([ddp, zero]):
            for step in range(rank + 2):
                _step(ddp, zero, *map(_share, _batch(step)))
        trained.append(ddp)
    _same(*trained)
