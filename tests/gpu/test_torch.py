"""torch's process groups, autograd functions, layers and pipelines on a real device.

By ``mpirun -np 2 python -m pytest --with-mpi -m "gpu and mpi" tests/gpu/test_torch.py``, on one GPU or several. What
needs no process group runs on threads, too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from support.device_bodies import in_stream_order
from support.launch import mpirun
from support.ranks import Ranks

import mpicoll

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402

in_a_group = [
    pytest.mark.mpi,
    pytest.mark.usefixtures("group"),
    # torch 2.13 has new names for some collectives
    pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning"),
]

CYCLES = 30_000_000
"""Of the GPU's clock: some hundredths of a second."""


class Late:
    """Tensors on this process's device that have their values only when a kernel has slept."""

    def late(self, values: Tensor) -> Any:
        made = (torch.ones_like(values) if values.dtype == torch.bool else torch.full_like(values, 99)).cuda()
        new = values.cuda()
        torch.cuda.current_stream().synchronize()
        torch.cuda._sleep(CYCLES)
        made.copy_(new)
        return made

    def now(self, tensor: Any) -> Tensor:
        if in_stream_order():
            torch.cuda.current_stream().synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            return tensor.cpu()


@pytest.fixture
def place(device: int) -> Any:
    """This rank's device, current in torch."""
    if not torch.cuda.is_available():
        pytest.skip("torch has no CUDA here")
    if torch.version.hip is not None:
        pytest.skip("this torch is for ROCm")
    torch.cuda.set_device(device)
    return torch.device("cuda", device)


@pytest.fixture
def group(place: Any) -> Iterator[Any]:
    dist.init_process_group("mpicoll")
    yield dist.group.WORLD
    dist.destroy_process_group()


@contextmanager
def own_stream() -> Iterator[None]:
    """A stream that the default one does not wait for, nor the other way round."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- process groups


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("async_op", [False, True])
class TestGroups:
    pytestmark = in_a_group

    def test_collectives_are_in_order(self, group: Any, async_op: bool, layout: str) -> None:
        """A kernel sleeps before the values are there; another stream reads the results at once."""
        from support.torch_cases import NAMES, Case

        for name in NAMES:
            with own_stream():
                case = Case(group, Late(), layout)
                work = case(name, async_op)
                if work is not None:
                    assert work.wait()
                try:
                    case.check()
                except AssertionError as error:
                    raise AssertionError(f"{name}: {error}") from error

    def test_messages_are_in_order(self, group: Any, async_op: bool, layout: str) -> None:
        from support.torch_cases import Case, room
        from support.torch_cases import numbers as counted

        rank, size = dist.get_rank(), dist.get_world_size()
        if size < 2:
            pytest.skip("needs two ranks")
        right, left = (rank + 1) % size, (rank - 1) % size
        with own_stream():
            target = room(Late(), (4, 6), layout)
            receiving = dist.irecv(target, left)
            sending = dist.isend(Case(group, Late(), layout).mine(4, 6), right)
            if async_op:
                assert receiving.get_future().wait()[0] is target
            else:
                receiving.wait()
            assert torch.equal(Late().now(target), counted(left, 4, 6))
            sending.wait()


class TestTraining:
    pytestmark = in_a_group

    @pytest.mark.parametrize("hook", ["none", "fp16_compress_hook", "bf16_compress_hook", "powerSGD_hook"])
    @pytest.mark.parametrize("stream", ["default", "own"])
    def test_ddp_equals_one_process(self, place: Any, hook: str, stream: str) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
        from torch.nn.parallel import DistributedDataParallel

        with own_stream() if stream == "own" else torch.cuda.stream(torch.cuda.default_stream()):
            alone = gpt(place)
            model = DistributedDataParallel(copy.deepcopy(alone), device_ids=[place.index])
            if hook == "powerSGD_hook":
                state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
                model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
            elif hook != "none":
                model.register_comm_hook(None, getattr(default_hooks, hook))
            losses = train(model, place), train(alone, place, whole=True)
            tolerance = {"none": 1e-4}.get(hook, 5e-2)
            torch.testing.assert_close(losses[0], losses[1], rtol=tolerance, atol=tolerance)
            if hook == "none":
                for one, other in zip(model.parameters(), alone.parameters(), strict=True):
                    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
            first = next(model.parameters()).detach()
            everyone = [torch.empty_like(first) for _ in range(dist.get_world_size())]
            dist.all_gather(everyone, first)
            assert all(torch.equal(one, first) for one in everyone)

    def test_fsdp_equals_one_process(self, place: Any) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        alone = gpt(place)
        model = copy.deepcopy(alone)
        mesh = init_device_mesh("cuda", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        losses = train(model, place), train(alone, place, whole=True)
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-4)
        for one, other in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(one.full_tensor(), other, rtol=1e-3, atol=1e-4)

    def test_sparse_gradients(self, place: Any) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        for async_op in (False, True):
            with own_stream():
                values = Late().late(torch.ones(2))
                tensor = torch.sparse_coo_tensor(torch.tensor([[0, rank + 1]], device=place), values, (size + 1,))
                work = dist.all_reduce(tensor, async_op=async_op)
                if work is not None:
                    work.wait()
                assert tensor.to_dense().tolist() == [float(size)] + [1.0] * size

    def test_objects_barriers_and_meshes(self, place: Any) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        rank, size = dist.get_rank(), dist.get_world_size()
        everyone: list[Any] = [None] * size
        dist.all_gather_object(everyone, {"rank": rank})
        assert everyone == [{"rank": other} for other in range(size)]
        dist.barrier(device_ids=[place.index])
        whole = torch.arange(4.0 * size, device=place)
        cut = distribute_tensor(whole, init_device_mesh("cuda", (size,)), [Shard(0)])
        assert torch.equal((cut * 2).full_tensor(), whole * 2)


def gpt(place: Any) -> nn.Module:
    """The model of an example."""
    import sys

    pytest.importorskip("rich", reason="the example whose model this is needs rich")
    examples = str(Path(__file__).resolve().parents[2] / "examples")
    sys.path.insert(0, examples)
    try:
        from fsdp_gpt import GPT
    finally:
        sys.path.remove(examples)
    torch.manual_seed(5)
    made: nn.Module = GPT()
    return made.to(place)


def train(model: nn.Module, place: Any, *, whole: bool = False) -> Tensor:
    """The losses of some steps: on this rank's share of the batches, or on all of each."""
    rank, size = dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(6):
        text = torch.randint(256, (4 * size, 33), generator=torch.Generator().manual_seed(step)).to(place)
        mine = text if whole else text[4 * rank : 4 * rank + 4]
        optimizer.zero_grad()
        with place:  # the model makes its positions where torch makes tensors
            loss = functional.cross_entropy(model(mine[:, :-1]), mine[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        if not whole:
            dist.all_reduce(mean, dist.ReduceOp.AVG)
        losses.append(mean)
    return torch.stack(losses)


CHOICE = """
import sys
import torch
import torch.distributed as dist

dist.init_process_group("mpicoll")
assert not torch.cuda.is_initialized(), "a context for nothing"
wanted = dist.get_node_local_rank(0) % torch.cuda.device_count()
x = torch.ones(3, device="cuda")
assert x.device.index == torch.cuda.current_device() == wanted, (x.device, wanted)
dist.all_reduce(x)
assert x.tolist() == [float(dist.get_world_size())] * 3
dist.destroy_process_group()
print("right")
"""


def test_each_rank_has_its_device(place: Any, tmp_path: Path) -> None:
    script = tmp_path / "choice.py"
    script.write_text(CHOICE)
    done = mpirun(2, script)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("right") == 2


# --- without process groups


def on_both(place: Any, compute: Callable[[Callable[..., Any]], tuple[Tensor, ...]]) -> None:
    """What is computed on the device, from late values, is what is computed on the CPU."""

    def late(values: Tensor, grad: bool = False) -> Tensor:
        made: Tensor = Late().late(values)
        return made.requires_grad_(grad)

    torch.cuda.set_device(place)  # of this thread
    with own_stream():
        device = compute(late)
        assert all(one.device == place for one in device)
        host = compute(lambda values, grad=False: values.clone().requires_grad_(grad))
        for one, other in zip(device, host, strict=True):
            torch.testing.assert_close(Late().now(one.detach()), other.detach(), rtol=1e-4, atol=1e-4)


def test_autograd_functions(several: Ranks, place: Any) -> None:
    autograd = import_module("mpicoll.torch.autograd")

    def body() -> None:
        comm = mpicoll.world()
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

        def compute(make: Callable[..., Any]) -> tuple[Tensor, ...]:
            x = make(numbers(comm.rank, 2 * comm.size, 3), True)
            y = autograd.all_reduce(x * x, group=comm)
            z = autograd.all_gather_single(y.t(), 1, group=comm)
            w = autograd.reduce_scatter_single(z.t().contiguous(), group=comm)
            v = autograd.all_to_all_single(x * 3, group=comm)
            u = autograd.sendrecv(x, right, left, group=comm)
            b = autograd.broadcast(x * 2, 0, group=comm)
            p = autograd.all_reduce(x, "prod", group=comm)
            ((w * w).sum() + (v * x).sum() + (u * u * u).sum() + (b * x).sum() + p.sum()).backward()
            return w, v, u, b, p, x.grad

        on_both(place, compute)

    several(body, timeout=100)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_layers(several: Ranks, place: Any, sequence_parallel: bool) -> None:
    layers = import_module("mpicoll.parallel.layers")
    loss = import_module("mpicoll.parallel.cross_entropy")

    def body() -> None:
        comm = mpicoll.world()

        def compute(make: Callable[..., Any]) -> tuple[Tensor, ...]:
            x = make(numbers(comm.rank if sequence_parallel else 9, 300, 64), True)
            first, bias = make(numbers(10 + comm.rank, 32, 64) / 8, True), make(numbers(20 + comm.rank, 32), True)
            y = layers.column_parallel_linear(x, first, bias, sequence_parallel=sequence_parallel, group=comm)
            logits = functional.gelu(y)
            target = make(torch.arange(logits.shape[0]) % (32 * comm.size))
            total = loss.vocab_parallel_cross_entropy(logits, target, reduction="mean", group=comm)
            total.backward()
            return total, y, x.grad, first.grad, bias.grad

        on_both(place, compute)

    several(body, timeout=100)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("name", ["ring_attention", "ulysses_attention"])
def test_attention(several: Ranks, place: Any, name: str, layout: str) -> None:
    attention = getattr(import_module("mpicoll.parallel.context_parallel"), name)

    def body() -> None:
        comm = mpicoll.world()

        def compute(make: Callable[..., Any]) -> tuple[Tensor, ...]:
            parts = [make(numbers(3 * comm.rank + i, 2, 2 * comm.size, 64, 16), True) for i in range(3)]
            out = attention(*parts, causal=True, layout=layout, group=comm)
            (out * out).sum().backward()
            return out, *(one.grad for one in parts)

        on_both(place, compute)

    several(body, timeout=100)


@pytest.mark.parametrize("background", [False, True])
def test_values_from_stage_to_stage(several: Ranks, place: Any, background: bool) -> None:
    pipes = import_module("mpicoll.parallel.p2p")

    def body() -> None:
        torch.cuda.set_device(place)
        with own_stream(), pipes.PipeP2P(mpicoll.world(), timeout=60, background=background) as p2p:
            after, before = (p2p.stage + 1) % p2p.stages, (p2p.stage - 1) % p2p.stages
            for turn in range(3):
                receiving = p2p.irecv(before)
                large, small = Late().late(numbers(p2p.stage, 1000, 90)), Late().late(numbers(turn, 3).bfloat16())
                sending = p2p.isend({"large": large, "small": [small.view(3, 1).t(), torch.ones(2)]}, after)
                got = receiving.wait()
                assert got["large"].device == place
                assert torch.equal(Late().now(got["large"]), numbers(before, 1000, 90))
                assert torch.equal(Late().now(got["small"][0]), numbers(turn, 3).bfloat16().view(1, 3))
                assert got["small"][1].device.type == "cpu"
                sending.wait()

    several(body, timeout=100)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
def test_pipelines(several: Ranks, place: Any, schedule: str) -> None:
    """Loss and gradients are those of the model on one process."""
    pipeline = import_module("mpicoll.parallel.pipeline.engine")

    def body() -> None:
        torch.cuda.set_device(place)
        comm = mpicoll.world()
        weights = [numbers(i, 8, 8) / 3 for i in range(comm.size)]
        part = nn.Linear(8, 8, bias=False)
        part.weight.data.copy_(weights[comm.rank])
        part.to(place)
        inputs, targets = numbers(50, 12, 8).to(place), numbers(51, 12, 8).to(place)
        with own_stream():
            engine = pipeline.PipelineEngine(
                nn.Sequential(part, nn.Tanh()), functional.mse_loss, micro_batches=4, schedule=schedule, group=comm
            )
            loss = engine.train_batch(inputs, targets)
            engine.free()
        alone = nn.Sequential()
        for one in weights:
            linear = nn.Linear(8, 8, bias=False)
            linear.weight.data.copy_(one)
            alone.append(linear).append(nn.Tanh())
        want = functional.mse_loss(alone(inputs.cpu()), targets.cpu())
        want.backward()
        torch.testing.assert_close(loss.cpu().float(), want.detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(part.weight.grad.cpu(), alone[2 * comm.rank].weight.grad, rtol=1e-3, atol=1e-5)

    several(body, timeout=100)


def test_gradients(several: Ranks, place: Any) -> None:
    gradients = import_module("mpicoll.parallel.gradients")

    def body() -> None:
        comm = mpicoll.world()

        def compute(make: Callable[..., Any]) -> tuple[Tensor, ...]:
            parameters = [nn.Parameter(make(numbers(i, 40, 5))) for i in range(3)]
            for i, one in enumerate(parameters):
                one.grad = make(numbers(10 * comm.rank + i, 40, 5))
            gradients.average_gradients(parameters, comm)
            norm = gradients.clip(parameters, 0.5, 2.0, comm, first=True, copies=())
            return *(one.grad for one in parameters), norm.to(parameters[0].device)

        on_both(place, compute)

    several(body, timeout=100)
