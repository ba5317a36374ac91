"""How a program gets at mpicoll: by the names of torch.distributed, and by every way to make the default group."""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as stock
from support.launch import ROOT, mpirun
from support.process_group import BACKEND, by_torch
from support.warm import start_options

import mpicoll
import mpicoll.torch as dropin
from mpicoll.backend_names import replace_mpi
from mpicoll.cli import listening

OWN = (
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "init_process_group",
    "recv",
    "reduce",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "send",
)
"""What is not torch's own function, but means the same."""

BESIDES = ("CompressionState", "compression_hook", "resilient", "share_buckets")
"""What torch doesn't have."""


# --- names


def test_every_name_of_torch_distributed_is_there() -> None:
    names = {name for name in dir(stock) if not name.startswith("__")}
    assert names <= set(dir(dropin))
    other = {name for name in names if getattr(dropin, name) is not getattr(stock, name)}
    assert other == {*OWN, "autograd"}


def test_autograd_is_our_own() -> None:
    assert dropin.autograd.__name__ == "mpicoll.torch.autograd"


@pytest.mark.parametrize("name", OWN)
def test_arguments_are_those_of_torch(name: str) -> None:
    """Names, order and defaults."""
    if name == "init_process_group":
        # handed on as they come
        assert next(iter(inspect.signature(stock.init_process_group).parameters)) == "backend"
        return
    theirs, ours = (dict(inspect.signature(getattr(module, name)).parameters) for module in (stock, dropin))
    if name == "barrier" and "timeout" not in theirs:
        del ours["timeout"]  # which came with torch 2.13
    assert list(ours) == list(theirs)
    for one in theirs:
        assert (ours[one].kind, repr(ours[one].default)) == (theirs[one].kind, repr(theirs[one].default))


def test_from_import() -> None:
    from mpicoll.torch import DeviceMesh, ReduceOp, all_reduce, distributed_c10d  # type: ignore[attr-defined]

    assert ReduceOp is stock.ReduceOp
    assert DeviceMesh is stock.DeviceMesh
    assert distributed_c10d is stock.distributed_c10d
    assert all_reduce is dropin.all_reduce


def test_a_name_that_torch_does_not_have() -> None:
    with pytest.raises(AttributeError, match="all_redcue"):
        dropin.all_redcue  # noqa: B018


def test_public_names_are_there() -> None:
    assert {*OWN, *BESIDES, "autograd", "communicator"} == set(dropin.__all__)
    assert all(hasattr(dropin, name) for name in dropin.__all__)


@pytest.mark.parametrize("name", [name for name in OWN if name != "init_process_group"])
def test_without_a_group_torch_raises_its_error(name: str) -> None:
    tensors = [torch.ones(1)] * (
        1 if name in ("all_reduce", "broadcast", "recv", "reduce", "send") else 0 if name == "barrier" else 2
    )
    root = {"broadcast": {"src": 0}, "recv": {"src": 0}, "reduce": {"dst": 0}, "send": {"dst": 0}}.get(name, {})
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        getattr(dropin, name)(*tensors, **root)


# --- the default group


@pytest.fixture
def place() -> Iterator[str]:
    """A path for a file that is not there yet, the same on all ranks."""
    world = mpicoll.world().mpi
    # Not pytest's tmp_path: the ranks would clean up each other's.
    folder = tempfile.mkdtemp() if world.rank == 0 else ""
    yield str(Path(world.bcast(folder)) / "meet")
    world.Barrier()
    if folder:
        shutil.rmtree(folder)


def free_port() -> int:
    """Where nobody listens. The system hands out higher ports to whoever connects, perhaps just before we listen."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("localhost", random.randrange(10_000, 32_000)))
            return int(probe.getsockname()[1])


def _address() -> str:
    """A free one, the same on all ranks."""
    return f"tcp://localhost:{mpicoll.world().mpi.bcast(free_port())}"


def check(ranks: list[int]) -> None:
    """The default group consists of MPI's `ranks`, in this order; it and a part of it work; end it."""
    me = mpicoll.world().rank
    mine, size = ranks.index(me), len(ranks)
    assert (stock.get_rank(), stock.get_world_size()) == (mine, size)
    total = torch.tensor([10.0**mine])
    stock.all_reduce(total)
    assert total.item() == sum(10.0**number for number in range(size))
    everyone = torch.zeros(size, dtype=torch.int64)
    stock.all_gather_single(everyone, torch.tensor([me]))
    assert everyone.tolist() == ranks
    tensor = torch.tensor([me])
    dropin.broadcast(tensor, size - 1)
    assert tensor.item() == ranks[-1]
    part = stock.new_group([size - 1])
    if mine == size - 1:
        assert stock.get_rank(part) == 0
        stock.all_reduce(tensor, group=part)
        assert tensor.item() == ranks[-1]
    found: list[Any] = [None] * size
    stock.all_gather_object(found, me)
    assert found == ranks
    end()


def end() -> None:
    stock.barrier()
    stock.destroy_process_group()
    assert not stock.is_initialized()


of_mpi = pytest.mark.skipif(BACKEND, reason="the name of MPI is torch's own there")


@pytest.mark.mpi
@pytest.mark.parametrize(
    "backend",
    [
        "mpicoll",
        "cpu:mpicoll",
        "cpu:mpicoll,cuda:mpicoll",
        *(pytest.param(name, marks=of_mpi) for name in ("mpi", "MPI", "cpu:mpi")),
    ],
)
def test_backend_by_name(backend: str) -> None:
    for _ in range(2):
        stock.init_process_group(backend)
        assert stock.is_initialized()
        assert stock.get_backend() == replace_mpi(backend)
        check(list(range(mpicoll.world().size)))


@pytest.mark.mpi
@pytest.mark.parametrize("args", [(), (None,), ("mpicoll",), ("mpi", "env://")], ids=str)
def test_drop_in_without_arguments_means_mpicoll(args: tuple[Any, ...]) -> None:
    dropin.init_process_group(*args)
    assert stock.get_backend() == "mpicoll"
    check(list(range(mpicoll.world().size)))


@pytest.mark.mpi
def test_drop_in_keeps_no_group() -> None:
    """Nor its store, which would go on listening."""
    world = mpicoll.world()
    before = listening.list_sockets()
    stock.init_process_group("mpicoll", init_method=_address(), rank=world.rank, world_size=world.size)
    group = stock.group.WORLD
    dropin.broadcast(torch.ones(1), 0)
    end()
    assert dropin.dropin._find_fast_path(group) is None
    del group
    gc.collect()
    assert listening.list_sockets() == before
    mpicoll.barrier()


@pytest.mark.mpi
def test_drop_in_of_another_backend() -> None:
    dropin.init_process_group("cpu:gloo,cuda:mpicoll")
    everyone = list(range(mpicoll.world().size))
    assert "gloo" in repr(stock.group.WORLD._get_backend(torch.device("cpu"))).lower()
    check(everyone)


@pytest.mark.mpi
@pytest.mark.parametrize("backend", ["cpu:mpicoll,cuda:gloo", "cuda:gloo,cpu:mpicoll"])
def test_mixed_with_gloo(backend: str) -> None:
    """There is no GPU here: what CPU tensors get is tested, and who would get the others."""
    everyone = list(range(mpicoll.world().size))
    stock.init_process_group(backend)
    group = stock.group.WORLD
    assert isinstance(group._get_backend(torch.device("cuda")), stock.ProcessGroupGloo)
    assert not isinstance(group._get_backend(torch.device("cpu")), stock.ProcessGroupGloo)
    assert {device.type for device in group._device_types} == {"cpu", "cuda"}
    part = stock.new_group(everyone)
    assert isinstance(part._get_backend(torch.device("cuda")), stock.ProcessGroupGloo)
    for one in (group, part):
        assert dropin.communicator(one).size == len(everyone)
        tensor = torch.tensor([1, 2])
        work = stock.all_reduce(tensor, group=one, async_op=True)
        assert BACKEND or type(work).__module__ == "mpicoll.torch.work"
        work.wait()
        assert tensor.tolist() == [len(everyone), 2 * len(everyone)]
        outputs = [torch.zeros(2) for _ in everyone]
        stock.all_gather(outputs, torch.full((2,), float(mpicoll.world().rank)), one)
        assert [output[0].item() for output in outputs] == everyone
        stock.barrier(one)
    check(everyone)


@pytest.mark.mpi
def test_store_given(place: str) -> None:
    world = mpicoll.world()
    store = stock.FileStore(place, world.size)
    stock.init_process_group("mpicoll", store=store, rank=world.rank, world_size=world.size)
    check(list(range(world.size)))


@pytest.mark.mpi
@pytest.mark.parametrize("method", ["file", "tcp", "env"])
def test_init_method(method: str, place: str) -> None:
    world = mpicoll.world()
    if method == "env":
        stock.init_process_group("mpicoll", init_method="env://")
    else:
        url = f"file://{place}" if method == "file" else _address()
        stock.init_process_group("mpicoll", init_method=url, rank=world.rank, world_size=world.size)
    check(list(range(world.size)))


@pytest.mark.mpi
@pytest.mark.parametrize("method", ["file", "tcp"])
def test_ranks_in_another_order(method: str, place: str) -> None:
    world = mpicoll.world()
    url = f"file://{place}" if method == "file" else _address()
    stock.init_process_group("mpicoll", init_method=url, rank=world.size - 1 - world.rank, world_size=world.size)
    check(list(range(world.size))[::-1])


@pytest.mark.mpi
def test_some_of_the_ranks(place: str) -> None:
    """All but rank 0, while that one does nothing; and then all."""
    world = mpicoll.world()
    if world.rank > 0:
        stock.init_process_group(
            "mpicoll", init_method=f"file://{place}", rank=world.rank - 1, world_size=world.size - 1
        )
        check(list(range(1, world.size)))
    stock.init_process_group("mpicoll")
    check(list(range(world.size)))


@pytest.mark.mpi
def test_rank_and_size_given() -> None:
    """Those of MPI may be given; others are refused before anybody waits."""
    world = mpicoll.world()
    everyone = list(range(world.size))
    stock.init_process_group("mpicoll", rank=world.rank, world_size=world.size)
    check(everyone)
    for wrong in ({"rank": world.rank + 1}, {"world_size": world.size + 1}):
        with pytest.raises(mpicoll.ArgumentError, match=rf"init_process_group: .*rank {world.rank} of {world.size}"):
            stock.init_process_group("mpicoll", **wrong)
        assert not stock.is_initialized()
    stock.init_process_group("mpicoll", timeout=timedelta(seconds=60))
    check(everyone)


@pytest.mark.mpi
def test_more_ranks_than_mpi_has(place: str) -> None:
    """Every process in a world of one is told how to start."""
    world = mpicoll.world()
    store = stock.FileStore(place, 1)
    with pytest.raises(mpicoll.SetupError, match=rf"mpirun -np {world.size + 1} "):
        stock.init_process_group("mpicoll", store=store, rank=world.rank, world_size=world.size + 1)
    assert not stock.is_initialized()
    stock.init_process_group("mpicoll")
    check(list(range(world.size)))


@pytest.mark.mpi
def test_environment_is_filled_in() -> None:
    world = mpicoll.world()
    stock.init_process_group("mpicoll")
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == (str(world.rank), str(world.size))
    assert (os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]) == (str(world.local_rank), str(world.local_size))
    assert stock.get_node_local_rank() == world.local_rank
    assert int(os.environ["MASTER_PORT"]) >= 0
    assert os.environ["MASTER_ADDR"]
    check(list(range(world.size)))


@pytest.mark.mpi
def test_gloo_as_the_default_group_with_mpicoll_beside() -> None:
    """The store that gloo meets at knows nothing of MPI."""
    world = mpicoll.world()
    stock.init_process_group("gloo", init_method=_address(), rank=world.size - 1 - world.rank, world_size=world.size)
    group = stock.new_group(backend="mpicoll")
    total = torch.tensor([world.rank + 1])
    stock.all_reduce(total, group=group)
    assert total.item() == world.size * (world.size + 1) // 2
    assert stock.get_rank(group) == stock.get_rank() == world.size - 1 - world.rank
    tensor = torch.tensor([world.rank])
    dropin.broadcast(tensor, 0, group)
    assert tensor.item() == world.size - 1
    end()


# --- programs


def python(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program as a user would, without MPI."""
    return _finished(_start(*arguments, **variables))


def forked(folder: Path, code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The same in a process that has torch, but not mpicoll, for what is not about the import of torch."""
    script = folder / "program.py"
    script.write_text(code)
    return python(*start_options(), "-W", "error", script, *arguments, **variables)


def _start(*arguments: str | Path, **variables: str) -> subprocess.Popen[str]:
    launchers = ("PMIX_", "PMI_", "OMPI_", "MPICOLL_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCH")
    environ = {key: value for key, value in os.environ.items() if not key.startswith(launchers)}
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environ | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _finished(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    try:
        output, _ = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        raise AssertionError(f"the program did not end:\n{output}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, output)


SMALL = """
import torch
import torch.distributed as dist

for turn in range(3):
    dist.init_process_group("mpicoll")
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.tensor([rank + 1.0])
    dist.all_reduce(tensor)
    assert tensor.item() == size * (size + 1) / 2
    dist.all_reduce(tensor, group=dist.new_group([rank for rank in range(size)]))
    assert tensor.item() == size * size * (size + 1) / 2
    found = [None] * size
    dist.all_gather_object(found, rank)
    assert found == list(range(size))
    dist.destroy_process_group()
print(f"rank {rank} of {size} is done")
"""
"""torch and nothing else: mpicoll is not even imported by name."""


@pytest.mark.slow
def test_torch_alone_under_mpirun(tmp_path: Path) -> None:
    """Made, destroyed and made again, three times."""
    script = tmp_path / "program.py"
    script.write_text(SMALL)
    done = mpirun(3, "-W", "error", script, warm=True)
    assert done.returncode == 0, done.stdout
    assert sorted(line for line in done.stdout.splitlines() if line) == [
        f"rank {rank} of 3 is done" for rank in range(3)
    ]


@pytest.mark.slow
def test_without_mpirun_it_is_a_world_of_one(tmp_path: Path) -> None:
    done = forked(tmp_path, SMALL)
    assert (done.returncode, done.stdout) == (0, "rank 0 of 1 is done\n"), done.stdout


IMPORT = """
import sys
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
assert dist.is_backend_available("mpicoll") and not dist.is_mpi_available()
assert dist.Backend("mpi") == dist.Backend.MPI and not dist.is_backend_available("cpu:mpi,cuda:nccl")
assert "mpicoll" not in dist.Backend.backend_list
assert not {"mpi4py", "mpicoll.torch", "mpicoll.engine"} & set(sys.modules)
listener, rendezvous = dist.Backend.__new__, c10d.rendezvous
assert dist.Backend("CPU:mpicoll") == "cpu:mpicoll"
assert "mpicoll" in dist.Backend.backend_list
assert dist.Backend.__new__ is listener.__wrapped__ and c10d.rendezvous is not rendezvous
assert dist.is_backend_available("cpu:mpicoll,cuda:gloo") and not dist.is_mpi_available()
assert not {"mpi4py", "mpicoll.torch", "mpicoll.engine"} & set(sys.modules)
"""


@pytest.mark.slow
@by_torch
def test_import_of_torch_stays_what_it_was() -> None:
    """The backend is registered when it is named, and loaded when it is used."""
    done = python("-W", "error", "-c", IMPORT)
    assert done.returncode == 0, done.stdout


TIME = """
import sys
import time
import torch
assert "mpicoll" not in sys.modules
begin = time.process_time()
from mpicoll.autoload import {function}
{function}()
print(time.process_time() - begin)
"""


@pytest.mark.slow
@pytest.mark.parametrize("function", ["register", "register_backend"])
def test_registration_takes_no_time(function: str, tmp_path: Path) -> None:
    # Time of the processor, which a machine that is busy with something else may still stretch.
    program = TIME.format(function=function)
    assert any(float(forked(tmp_path, program, TORCH_DEVICE_BACKEND_AUTOLOAD="0").stdout) < 0.1 for _ in range(3))


SWITCHED_OFF = """
import torch
import torch.distributed as dist
assert not hasattr(dist.Backend, "MPICOLL")
assert torch.ones(3).sum() == 3
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.destroy_process_group()
import mpicoll.torch
dist.init_process_group("mpicoll")
dist.all_reduce(torch.ones(3))
dist.destroy_process_group()
mpicoll.torch.init_process_group()
print(dist.get_backend())
mpicoll.torch.destroy_process_group()
"""


@pytest.mark.slow
def test_without_the_entry_point(tmp_path: Path) -> None:
    """As torch's own variable has it; an import of mpicoll.torch does instead."""
    done = forked(tmp_path, SWITCHED_OFF, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert (done.returncode, done.stdout) == (0, "mpicoll\n"), done.stdout


PLACEHOLDERS = """
import os
import warnings
import torch
import torch.distributed as dist

assert dist.is_mpi_available()
assert dist.Backend("mpi") == dist.Backend.MPI
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": PORT}
warnings.simplefilter("error")
tcp = {"init_method": "tcp://127.0.0.1:" + PORT, "rank": 0, "world_size": 1}
for arguments in ({}, {"init_method": "env://"}, tcp):
    if "rank" in arguments:
        warnings.filterwarnings("ignore", "For MPI backend, world_size .* and rank .* are ignored")
    dist.init_process_group("mpi", **arguments)
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    assert (dist.get_world_size(), total.item()) == (2, 3)
    dist.barrier(dist.new_group(backend="gloo"))
    dist.destroy_process_group()
print("done")
"""
"""What ignite puts into the environment, and what older programs pass on to every backend."""


@pytest.mark.slow
@of_mpi
def test_placeholders_do_not_count_for_mpi(tmp_path: Path) -> None:
    """Under the name of MPI, rank and size are MPI's whatever the program says, as torch has it."""
    script = tmp_path / "program.py"
    script.write_text(PLACEHOLDERS.replace("PORT", repr(str(free_port()))))
    done = mpirun(2, script, warm=True)
    assert (done.returncode, done.stdout.split()) == (0, ["done"] * 2), done.stdout


REFUSED = """
import sys
import mpicoll
import torch.distributed as dist
try:
    dist.init_process_group(sys.argv[1])
except mpicoll.SetupError as error:
    print(error)
"""


# an id that is just "mpi" would be taken for the marker
@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", ["mpicoll", pytest.param("mpi", marks=of_mpi), "cpu:mpicoll,cuda:gloo"], ids="backend {}".format
)
def test_started_by_torchrun_without_an_address(backend: str, tmp_path: Path) -> None:
    done = forked(tmp_path, REFUSED, backend, RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", TORCHELASTIC_RUN_ID="none")
    assert done.returncode == 0, done.stdout
    assert "torchrun started 2 processes" in done.stdout
    assert "mpirun -np N python script.py" in done.stdout


@pytest.mark.slow
def test_started_by_srun(tmp_path: Path) -> None:
    done = forked(tmp_path, REFUSED, "mpicoll", SLURM_STEP_NUM_TASKS="4", SLURM_PROCID="1")
    assert done.returncode == 0, done.stdout
    assert "srun --mpi=pmix" in done.stdout
