"""DistributedDataParallel: the parameters are those of one process that sees the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(30)]

ROWS = 24  # of a whole batch: whole numbers of rows for 1, 2, 3 and 4 ranks
MANY_BUCKETS = 1e-4  # MB, less than a layer


def _model(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)


def _batch(step: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    inputs = torch.randn(ROWS, 6, generator=generator, dtype=torch.float64)
    return inputs.to(dtype), torch.randn(ROWS, 3, generator=generator, dtype=torch.float64).to(dtype)


def _share(whole: Tensor) -> Tensor:
    """This rank's rows."""
    return whole.chunk(dist.get_world_size())[dist.get_rank()]


def _train(model: nn.Module, rows: Callable[[Tensor], Tensor], steps: int = 4) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        inputs, targets = map(rows, _batch(step))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()


def _grads(model: nn.Module) -> list[Tensor | None]:
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]


def _same(got: nn.Module, want: nn.Module) -> None:
    torch.testing.assert_close(list(got.parameters()), list(want.parameters()), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="one_bucket"),
        pytest.param({"bucket_cap_mb": MANY_BUCKETS}, id="many_buckets"),
        pytest.param({"bucket_cap_mb": MANY_BUCKETS, "gradient_as_bucket_view": True}, id="bucket_view"),
        pytest.param({"bucket_cap_mb": MANY_BUCKETS, "static_graph": True}, id="static_graph"),
        pytest.param({"init_sync": False}, id="no_init_sync"),
    ],
)
def test_training(options: dict[str, Any]) -> None:
    one, model = _model(), _model()
    if options.get("init_sync", True) and dist.get_rank() > 0:  # what rank 0 starts with counts
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    ddp = DistributedDataParallel(model, **options)
    _train(ddp, _share)
    _train(one, lambda whole: whole)
    _same(ddp, one)
    buckets = ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(",")
    assert (len(buckets) > 1) is ("bucket_cap_mb" in options)


def test_no_sync_accumulates_on_each_rank() -> None:
    one, model = _model(), _model()
    ddp = DistributedDataParallel(model, bucket_cap_mb=MANY_BUCKETS)
    alone = _model()
    for step in range(3):
        inputs, targets = _batch(step)
        nn.functional.mse_loss(one(inputs), targets).backward()
        inputs, targets = _share(inputs), _share(targets)
        if step == 2:
            nn.functional.mse_loss(ddp(inputs), targets).backward()
            break
        nn.functional.mse_loss(alone(inputs), targets).backward()
        with ddp.no_sync():
            nn.functional.mse_loss(ddp(inputs), targets).backward()
        torch.testing.assert_close(_grads(ddp), _grads(alone), rtol=0, atol=0)
    torch.testing.assert_close(_grads(ddp), _grads(one), rtol=1e-12, atol=1e-12)


class _Heads(nn.Module):
    """Three layers on one body; a forward pass takes one of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Linear(6, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 3) for _ in range(3))
        self.double()

    def forward(self, inputs: Tensor, head: int) -> Tensor:
        return self.heads[head](self.body(inputs).tanh())


@pytest.mark.parametrize("view", [False, True], ids=["copied", "bucket_view"])
def test_parameters_that_only_some_ranks_use(rank: int, size: int, view: bool) -> None:
    one, model = _Heads(), _Heads()
    ddp = DistributedDataParallel(
        model, find_unused_parameters=True, bucket_cap_mb=MANY_BUCKETS, gradient_as_bucket_view=view
    )
    for step in range(3):
        for each in (one, ddp):
            each.zero_grad()
        inputs, targets = _batch(step)
        shares = zip(inputs.chunk(size), targets.chunk(size), strict=True)
        for other, (some_inputs, some_targets) in enumerate(shares):
            (nn.functional.mse_loss(one(some_inputs, (other + step) % 2), some_targets) / size).backward()
        nn.functional.mse_loss(ddp(_share(inputs), (rank + step) % 2), _share(targets)).backward()
        assert one.heads[2].weight.grad is None
        torch.testing.assert_close(_grads(ddp), _grads(one), rtol=1e-12, atol=1e-12)
    assert len(ddp._get_ddp_logging_data()["bucket_sizes"].split(",")) > 1


def _compress_to_bfloat16(state, bucket):  # without annotations, which torch would compare with its own
    # DistributedDataParallel looks for the hook's own name, to refuse it in a torch without CUDA.
    return default_hooks.bf16_compress_hook(state, bucket)


@pytest.mark.parametrize(
    ("hook", "half"),
    [
        pytest.param(default_hooks.fp16_compress_hook, torch.float16, id="fp16"),
        pytest.param(default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), torch.float16, id="wrapper"),
        pytest.param(dist.BuiltinCommHookType.FP16_COMPRESS, torch.float16, id="builtin"),
        pytest.param(_compress_to_bfloat16, torch.bfloat16, id="bf16"),
    ],
)
def test_half_precision_hooks(hook: Any, half: torch.dtype) -> None:
    one, ddp = _model(), DistributedDataParallel(_model(torch.float32), bucket_cap_mb=MANY_BUCKETS)
    _register(ddp, hook)
    for step in range(2):
        inputs, targets = _batch(step)
        for each in (one, ddp):
            each.zero_grad()
        nn.functional.mse_loss(one(inputs), targets).backward()
        nn.functional.mse_loss(ddp(_share(inputs).float()), _share(targets).float()).backward()
        for got, want in zip(_grads(ddp), _grads(one), strict=True):
            assert torch.equal(got, got.to(half).float())  # or it did not travel in half precision
            # Each rank's share is rounded, and so is each sum.
            bound = 2 * torch.finfo(half).eps * want.abs().max().item()
            torch.testing.assert_close(got.double(), want, rtol=0, atol=bound)


def _register(ddp: DistributedDataParallel, hook: Any) -> None:
    if isinstance(hook, dist.BuiltinCommHookType):
        ddp._register_builtin_comm_hook(hook)
    else:
        ddp.register_comm_hook(None, hook)


@pytest.mark.parametrize(
    "hook", [default_hooks.allreduce_hook, dist.BuiltinCommHookType.ALLREDUCE], ids=["python", "builtin"]
)
def test_allreduce_hooks(hook: Any) -> None:
    one, ddp = _model(), DistributedDataParallel(_model(), bucket_cap_mb=MANY_BUCKETS)
    _register(ddp, hook)
    _train(ddp, _share)
    _train(one, lambda whole: whole)
    _same(ddp, one)


@pytest.mark.parametrize("bucket_cap_mb", [None, 0.002], ids=["one_bucket", "many_buckets"])
def test_power_sgd_hook(backend: str, rank: int, bucket_cap_mb: float | None) -> None:
    """What it computes is linear in the gradients, so one process computes the same from the whole batch."""
    if backend == "gloo" and bucket_cap_mb:
        pytest.skip("the hooks of two buckets, which wait inside a callback, block both threads of gloo")
    alone = dist.new_subgroups(group_size=1)[0]
    trained = []
    for group, rows in ((alone, lambda whole: whole), (dist.group.WORLD, _share)):
        ddp = DistributedDataParallel(_model(), process_group=group, bucket_cap_mb=bucket_cap_mb)
        state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        _train(ddp, rows, steps=6)
        assert 0 < state.total_numel_after_compression < state.total_numel_before_compression
        trained.append(ddp)
    torch.testing.assert_close(*(list(ddp.parameters()) for ddp in trained), rtol=1e-9, atol=1e-9)
    dist.destroy_process_group(alone)


def test_join_with_uneven_inputs(rank: int, size: int) -> None:
    one, ddp = _model(), DistributedDataParallel(_model(), bucket_cap_mb=MANY_BUCKETS)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, ddp)]
    with Join([ddp]):
        for step in range(rank + 2):
            inputs, targets = map(_share, _batch(step))
            optimizers[1].zero_grad()
            nn.functional.mse_loss(ddp(inputs), targets).backward()
            optimizers[1].step()
    for step in range(size + 1):  # the last rank's number of steps
        inputs, targets = _batch(step)
        optimizers[0].zero_grad()
        for other in range(max(0, step - 1), size):  # the ranks that have not joined
            share = nn.functional.mse_loss(one(inputs.chunk(size)[other]), targets.chunk(size)[other])
            (share / size).backward()
        optimizers[0].step()
    _same(ddp, one)


class _Split(nn.Module):
    """A model whose parts sit on several devices, as in torch's model parallel tutorial."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self.first, self.second = first, second
        layers = list(_model())
        self.encoder = nn.Sequential(*layers[:2]).to(first)
        self.decoder = nn.Sequential(*layers[2:]).to(second)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.decoder(self.encoder(inputs.to(self.first)).to(self.second))


def test_model_split_over_devices() -> None:
    one, ddp = _model(), DistributedDataParallel(_Split("cpu:0", "cpu:1"), bucket_cap_mb=MANY_BUCKETS)
    assert ddp.device_ids is None
    _train(ddp, _share)
    _train(one, lambda whole: whole)
    _same(ddp, one)


def test_buffers_are_those_of_rank_0(rank: int) -> None:
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double())
    ddp.module[1].running_mean.fill_(rank)
    ddp.module[1].num_batches_tracked.fill_(rank)
    ddp.eval()
    ddp.train()
    ddp(_share(_batch(0)[0]))
    assert ddp.module[1].num_batches_tracked == 1  # rank 0's value, and this batch


def test_sync_batch_norm_is_refused_by_torch_itself() -> None:
    """Whatever the backend: torch has no kernels for it on CPU."""
    layer = nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(4))
    assert isinstance(layer, nn.SyncBatchNorm)
    with pytest.raises(ValueError, match="expected input tensor to be on GPU"):
        layer(torch.ones(2, 4))
    with pytest.raises(ValueError, match="only work with GPU modules"):
        DistributedDataParallel(layer)
