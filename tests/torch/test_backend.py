"""The backend that c10d's own process group calls, in versions of torch that accept one in Python."""

from __future__ import annotations

import functools
import importlib
import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.launch import mpirun
from support.process_group import BACKEND, default_group, operations
from torch._C._distributed_c10d import ErrorType
from torch.distributed.fsdp import fully_shard

import mpicoll.torch as dropin
from mpicoll import autoload
from mpicoll.autoload import replace_once
from mpicoll.engine.diagnostics.process_exit import run_exit_hooks

__all__ = ["default_group"]

if BACKEND:
    from mpicoll.torch.backend import BackendMpicoll

pytestmark = pytest.mark.skipif(not BACKEND, reason="this torch replaces its process group by a backend in Python")


IMPORT = """
import json, os, sys, torch, torch.distributed.rendezvous

modules = [module for name, module in sys.modules.items() if name.split(".")[0] == "torch"]
values = [value for module in modules for value in list(vars(module).values())]
values += [one for value in values if isinstance(value, type) for one in list(vars(value).values())]
values += [one for value in values if type(value) is dict for one in value.values()]
functions = [value.__func__ if isinstance(value, (classmethod, staticmethod)) else value for value in values]
codes = {value.__code__ for value in functions if type(value) is type(lambda: 0)}
changed = sorted({code.co_name for code in codes if "mpicoll" in code.co_filename.split(os.sep)[-3:]})
assert len(codes) > 1000
environment = [name for name in os.environ if "MPICOLL" in name or name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")]
loaded = sorted(name for name in sys.modules if name.split(".")[0] == "mpicoll")
print(json.dumps([loaded, changed, torch.distributed.Backend.backend_list, environment]))
"""


def test_import_of_torch_replaces_the_handler_of_env_alone() -> None:
    """And loads two modules."""
    ours = ("PMIX_", "PMI_", "OMPI_", "SLURM_", "MPICOLL_", "RANK", "WORLD_SIZE", "MASTER_", "TORCH")
    environ = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    done = subprocess.run([sys.executable, "-c", IMPORT], env=environ, capture_output=True, timeout=60, check=True)
    backends = ["undefined", "gloo", "nccl", "xccl", "ucc", "mpi", "fake"]
    assert json.loads(done.stdout) == [["mpicoll", "mpicoll.autoload"], ["replacement"], backends, []]


@pytest.mark.parametrize("backend", [None, "gloo", "cpu:gloo,cuda:nccl"])
def test_handler_of_env_passes_other_backends_on(backend: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    handlers = {"env": lambda url, **options: (url, options)}
    monkeypatch.setattr(importlib.import_module("torch.distributed.rendezvous"), "_rendezvous_handlers", handlers)
    autoload.register()

    def init_process_group(backend: str | None) -> Any:  # whose frame names the backend
        return handlers["env"]("env://", rank=1, timeout=backend)

    assert hasattr(handlers["env"], autoload._MARK)
    assert init_process_group(backend) == ("env://", {"rank": 1, "timeout": backend})


def test_no_module_for_older_torch_is_loaded() -> None:
    program = """
import sys, torch, torch.distributed as dist
dist.init_process_group("mpicoll")
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
print(sorted(one for one in sys.modules if one.startswith("mpicoll.") and "legacy" in one))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_functions_of_torch_are_replaced_once() -> None:
    owner = {"add": lambda x, y: x + y}

    def double(original: Any, *args: Any) -> Any:
        return 2 * original(*args)

    replace_once(owner, "add", double)
    first = owner["add"]
    replace_once(owner, "add", double)
    assert owner["add"] is first
    owner["add"] = functools.wraps(first)(lambda x, y: first(x, y) + 1)  # by another package
    replace_once(owner, "add", double)
    assert owner["add"](1, 2) == 7


@pytest.mark.mpi
@pytest.mark.usefixtures("default_group")
class TestGroup:
    def test_group_is_of_torch(self) -> None:
        assert type(dist.group.WORLD) is dist.ProcessGroup
        assert type(operations()).__name__ == "BackendMpicoll"
        assert dist.get_backend() == "mpicoll"

    def test_short_forms(self) -> None:
        group: Any = dist.group.WORLD
        rank, size = dist.get_rank(), dist.get_world_size()
        x = torch.full((2,), float(rank))
        assert group.broadcast(x, root=size - 1).wait()
        assert x.tolist() == [size - 1.0] * 2
        group.allreduce(x, op=dist.ReduceOp.SUM).wait()
        assert x.tolist() == [size * (size - 1.0)] * 2
        group.barrier().wait()

    def test_status_of_works(self) -> None:
        """torch's holder of a Work forwards only its wait and its future."""
        x = torch.ones(2)
        work = dist.all_reduce(x, async_op=True)
        assert type(work) is dist.Work
        work.wait()
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
        assert work.result()[0] is x
        assert work.get_future().wait()[0] is x

    def test_status_of_works_of_gloo(self) -> None:
        group = dist.new_group(backend="gloo")
        work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
        work.wait()
        assert work.is_completed()
        with pytest.raises(RuntimeError):
            work.source_rank()
        dist.destroy_process_group(group)

    def test_drop_in_bypasses_groups_of_one_backend_only(self) -> None:
        mixed = dist.new_group(backend="cpu:mpicoll,cuda:gloo")
        assert dropin.dropin._find_fast_path(None) is operations().get_fast_path()
        assert dropin.dropin._find_fast_path(mixed) is None
        assert dropin.communicator(mixed).size == dist.get_world_size()
        x = torch.ones(1)
        dropin.all_reduce(x, group=mixed)
        assert x.item() == dist.get_world_size()
        dist.destroy_process_group(mixed)

    def test_a_group_that_is_made_by_hand(self) -> None:
        """The calls of test/distributed/test_c10d_pybackend.py of PyTorch, with what mpicoll returns for them."""
        rank, size = dist.get_rank(), dist.get_world_size()
        cpu, timeout = torch.device("cpu"), timedelta(seconds=20)
        backend = BackendMpicoll(operations().comm.duplicate(), "by hand", timeout)
        group: Any = dist.ProcessGroup(dist.HashStore(), rank, size)
        group._register_backend(cpu, dist.ProcessGroup.BackendType.CUSTOM, backend)
        group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        group._set_group_name("by hand")
        assert (group.rank(), group.size()) == (rank, size)
        assert group._get_backend(cpu) is backend
        assert backend.options.backend == backend.name() == "mpicoll"
        assert backend.supports_splitting
        assert backend.supports_shrinking
        assert backend.supports_abort_hooks

        own, ones = torch.full((2,), float(rank)), torch.ones(2)
        group.allreduce([own]).wait()
        assert own.tolist() == [size * (size - 1) / 2] * 2
        group.allreduce_coalesced([ones]).wait()
        group.broadcast([ones]).wait()
        group.reduce([ones]).wait()
        output, wide, number = torch.empty(size), torch.arange(float(size)), torch.tensor([1.0 * rank])
        first, total = output[:1], size * number
        for call, inputs, result, want in (
            (group.all_gather_single, (output, number), output, wide),
            (group.all_to_all_single, (output, wide, [], []), output, number.expand(size)),
            (group.all_gather_single_coalesced, ([output], [2 * number]), output, 2 * wide),
            (group.reduce_scatter_single, (first, wide), first, total),
            (group.reduce_scatter_single_coalesced, ([first], [wide]), first, total),
        ):
            result.fill_(-1)
            assert call(*inputs).wait()
            assert torch.equal(result, want)
        received = torch.empty(2)
        sent = group.send([torch.full((2,), 5.0)], (rank + 1) % size, 3)
        group.recv_anysource([received], 3).wait()
        sent.wait()
        assert received.tolist() == [5.0, 5.0]

        group.set_timeout(timedelta(seconds=15))
        assert backend.options._timeout == timedelta(seconds=15)
        group._start_coalescing(cpu)
        group.allreduce([own])
        group._end_coalescing(cpu).wait()
        group.monitored_barrier(timeout, True)
        part = group.split_group(list(range(size)), opts=backend.options)
        assert part._get_backend(cpu).name() == "mpicoll"
        assert backend.get_error() == ErrorType.SUCCESS
        part.shutdown()
        group.shutdown()
        assert backend.get_error() == ErrorType.REMOTE_ERROR

    def test_sequence_number_and_pending_works(self) -> None:
        group: Any = dist.group.WORLD
        before = group._get_sequence_number_for_group()
        dist.all_reduce(torch.ones(2), async_op=True)
        group._wait_for_pending_works()
        assert group._get_sequence_number_for_group() == before + 1

    def test_flight_recorder_of_torch(self) -> None:
        dist.all_reduce(torch.ones(3))
        dist.all_reduce(torch.ones(5), async_op=True).wait()
        dump = json.loads(torch._C._distributed_c10d._dump_fr_trace_json(backend="mpicoll"))
        last = dump["entries"][-2:]
        assert [one["profiling_name"] for one in last] == ["mpicoll:all_reduce"] * 2
        assert [one["input_sizes"] for one in last] == [[[3]], [[5]]]
        assert all(one["retired"] for one in last)

    def test_abort_hooks(self) -> None:
        group, calls = dist.new_group(), []
        for number in range(3):
            group.register_abort_hook(number, functools.partial(calls.append, number))
        group.register_abort_hook(3, lambda: 1 / 0)
        group.register_abort_hook(4, functools.partial(calls.append, 4))
        group.unregister_abort_hook(1)
        run_exit_hooks()
        assert calls == [0, 2, 4]  # before the job is ended
        group.abort()
        assert calls == [0, 2, 4] * 2
        run_exit_hooks()
        assert calls == [0, 2, 4] * 2

    def test_what_torch_can_not_call_in_python(self) -> None:
        group: Any = dist.group.WORLD
        assert not group.supports_reconfigure
        assert not group.supports_window
        with pytest.raises(NotImplementedError, match=r"call torch\.distributed\.shrink_group"):
            dist.distributed_c10d._reconfigure(1, [], group)
        with pytest.raises(RuntimeError, match="mpicoll does not support new_window"):
            group.new_window()
        with pytest.raises(NotImplementedError), dist.distributed_c10d._time_estimator(None, torch.device("cpu")):
            pass

    def test_shared_memory_for_tensors(self) -> None:
        backend, cpu = operations(), torch.device("cpu")
        arena = backend.comm._core.arena()
        if arena is None:
            pytest.skip("the ranks share no memory")
        assert backend.supports_tensor_alloc(cpu)
        assert not backend.supports_tensor_alloc(-1)  # as C++ code asks
        assert not backend.supports_tensor_alloc(torch.device("cuda"))

        def allocate(count: int) -> torch.Tensor:
            return backend.allocate_tensor(count, dtype=torch.float64, device=cpu)

        def find_segment(tensor: torch.Tensor) -> int:
            return arena.find_segment(tensor.data_ptr())[0]

        tensors = [allocate(count) for count in (1000, 900, 1000, 1000, 1000)]
        assert [one.numel() for one in tensors] == [1000, 900, 1000, 1000, 1000]
        numbers = [find_segment(one) for one in tensors]
        assert len(set(numbers[:-1])) == 4
        assert all(numbers[:-1])
        assert numbers[-1] == 0  # ordinary memory, once the blocks of a size are in use
        del tensors[1]
        view = allocate(1000)[10:20]
        assert find_segment(view) == numbers[1]
        view.fill_(1)
        dist.all_reduce(view)
        assert view.tolist() == [dist.get_world_size()] * 10
        assert allocate(0).numel() == 0

    def test_fsdp_in_shared_memory(self) -> None:
        size = dist.get_world_size()
        mesh = dist.device_mesh.init_device_mesh("cpu", (size,))
        trained = []
        for shared in (False, True):
            torch.manual_seed(3)
            model = torch.nn.Sequential(torch.nn.Linear(40, 64), torch.nn.Linear(64, 40))
            for layer in (*model, model):
                fully_shard(layer, mesh=mesh)
                layer.set_allocate_memory_from_process_group_for_comm(shared)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.full((4, 40), 1.0 + dist.get_rank())).square().mean().backward()
                optimizer.step()
            trained.append([one.full_tensor() for one in model.parameters()])
        backend = operations(mesh.get_group())
        assert bool(backend._tensor_pool._num_blocks) == (backend.comm._core.arena() is not None)
        for plain, in_shared in zip(*trained, strict=True):
            torch.testing.assert_close(in_shared, plain)

    def test_shrink_group_without_a_rank_that_leaves(self) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        group = dist.new_group()
        if size < 2:
            pytest.skip("needs two ranks")
        if rank == 0:
            operations(group).abort()
            return
        rest = dist.shrink_group([0], group)
        assert dist.get_process_group_ranks(rest) == list(range(1, size))
        x = torch.ones(1)
        dist.all_reduce(x, group=rest)
        assert x.item() == size - 1
        torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), process_group=rest)


DETAIL = """
import torch, torch.distributed as dist
import mpicoll.torch as dropin
dist.init_process_group("mpicoll")
x = torch.ones(2)
dropin.all_reduce(x)
assert x.tolist() == [2, 2]
try:
    dropin.all_reduce(torch.ones(2 + dist.get_rank()))
except RuntimeError as error:
    print(str(error).splitlines()[0])
"""


@pytest.mark.slow
def test_detail_of_torch_catches_a_mismatch(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(DETAIL)
    done = mpirun(2, script, seconds=60, TORCH_DISTRIBUTED_DEBUG="DETAIL")
    assert done.stdout.count("Detected mismatch between collectives on ranks") == 2, done.stdout


SHRINK = """
import os, signal
import torch, torch.distributed as dist
import mpicoll
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("mpicoll")
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)

def train(steps):
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        parallel(torch.ones(3, 4)).sum().backward()
        optimizer.step()

train(2)
if dist.get_rank() == 2:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    train(1000)
except (mpicoll.RankFailed, RuntimeError):
    pass
backend = dist.group.WORLD._get_backend(torch.device("cpu"))
assert backend.get_error().name == "REMOTE_ERROR", backend.get_error()
dist.shrink_group([2])
train(3)
whole = [torch.empty_like(model.weight) for _ in range(dist.get_world_size())]
dist.all_gather(whole, model.weight.data)
assert all(torch.equal(one, model.weight) for one in whole)
print("rank", dist.get_rank(), "of", dist.get_world_size())
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_training_goes_on_in_a_shrunk_group(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(SHRINK)
    done = mpirun(4, script, seconds=90, options=("--with-ft", "ulfm"))
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("rank")) == [
        f"rank {rank} of 3" for rank in range(3)
    ], done.stdout


@pytest.mark.parametrize("starts", [False, True])
def test_a_small_group_beside_a_default_group_of_gloo(tmp_path: Path, starts: bool) -> None:
    """c10d calls the backend on the members only, and MPI would wait for the others."""
    script = tmp_path / "script.py"
    script.write_text(f"""
import os, torch, mpicoll
import torch.distributed as dist
rank, size = (int(os.environ["OMPI_COMM_WORLD_" + name]) for name in ("RANK", "SIZE"))
dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=rank, world_size=size)
if {starts}:
    mpicoll.world()
found = ""
try:
    group, x = dist.new_group([0, 1], backend="mpicoll"), torch.ones(1)
    if rank < 2:
        dist.all_reduce(x, group=group)
    found = str(x.item())
except mpicoll.SetupError as error:
    found = str(error)
dist.barrier()
print(rank, found)
""")
    done = mpirun(3, script, seconds=60)
    assert done.returncode == 0, done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line[:1].isdigit())
    refusal = "a process group of mpicoll of ranks 0 and 1 can't start MPI, which waits for all 3 ranks: "
    for line, value in zip(lines, ["2.0", "2.0", "1.0"], strict=True):
        assert (line[2:] == value) if starts or line[0] == "2" else line[2:].startswith(refusal), line
