"""Process groups, and mpicoll's own functions, of ranks that no MPI launcher has started."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from support.launch import ROOT
from support.processes import run_all, start_ranks, warm_command

import mpicoll
from mpicoll.engine import startup
from mpicoll.transport import launch_env

BEGIN = """\
import os, sys, time
import numpy as np
import torch
import torch.distributed as dist
rank, size, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
def begin(number=0, backend="mpicoll"):
    dist.init_process_group(backend, store=dist.FileStore(f"{path}{number}", size), rank=rank, world_size=size)
"""

USE = """
import mpicoll
total, ranks = sum(range(size)), range(size)
def values(one, count=12):
    return torch.arange(count, dtype=torch.float64) * (one + 1)
x = values(rank)
dist.all_reduce(x)
assert torch.equal(x, sum(values(one) for one in ranks))
x = values(rank)
dist.broadcast(x, size - 1)
assert torch.equal(x, values(size - 1))
parts = [torch.empty(12, dtype=torch.float64) for _ in ranks]
dist.all_gather(parts, values(rank))
assert all(torch.equal(part, values(one)) for one, part in enumerate(parts))
block = torch.empty(12, dtype=torch.float64)
dist.reduce_scatter_tensor(block, values(rank, 12 * size))
assert torch.equal(block, sum(values(one, 12 * size) for one in ranks)[12 * rank : 12 * rank + 12])
swapped = torch.empty(size)
dist.all_to_all_single(swapped, torch.full((size,), float(rank)))
assert swapped.tolist() == list(ranks)
objects = [None] * size
dist.all_gather_object(objects, {"rank": rank})
assert objects == [{"rank": one} for one in ranks]
if size > 1:
    right, left = (rank + 1) % size, (rank - 1) % size
    got = torch.empty(12, dtype=torch.float64)
    work = dist.irecv(got, left, tag=3)
    dist.send(values(rank), right, tag=3)
    work.wait()
    assert torch.equal(got, values(left))
    part = dist.new_group([0, 1])
    if rank < 2:
        one = torch.ones(1)
        dist.all_reduce(one, group=part)
        assert one.item() == 2
dist.barrier()
world = mpicoll.world()
assert (world.rank, world.size, world.mpi) == (rank, size, None)
assert np.array_equal(mpicoll.allreduce(np.arange(5) + rank), size * np.arange(5) + total)
assert np.array_equal(mpicoll.scan(np.array([rank])), [sum(range(rank + 1))])
assert mpicoll.allgather_object(rank) == list(ranks)
with world.split(rank % 2) as half:
    assert mpicoll.allreduce(rank, comm=half) == sum(one for one in ranks if one % 2 == rank % 2)
if size > 1:
    with_native = False
    try:
        mpicoll.allreduce(np.ones(3), algorithm="native")
    except mpicoll.AlgorithmError as error:
        assert "native" in str(error)
    else:
        raise AssertionError("there is no MPI library")
"""


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=pytest.mark.long), 4])
def test_groups_are_made_and_made_again(size: int, tmp_path: Path) -> None:
    body = "\n".join(f"    {line}" for line in USE.splitlines())
    done = start_ranks(
        size,
        tmp_path,
        f"{BEGIN}\nfor number in range(2):\n    begin(number)\n{body}\n    dist.destroy_process_group()\n",
    )
    assert [(one.returncode, one.stdout) for one in done] == [(0, "")] * size


@pytest.mark.slow
def test_ranks_that_share_no_memory(tmp_path: Path) -> None:
    reason = 'assert "off" in mpicoll.engine.world.resolve(None).no_shm_reason\n'
    large = """
for name in ("ring", "halving_doubling"):
    assert (mpicoll.allreduce(np.ones(500_001), algorithm=name) == 3).all()
"""
    done = start_ranks(3, tmp_path, f"{BEGIN}begin()\n{USE}{reason}{large}", MPICOLL_SHARED_MEMORY="off")
    assert [(one.returncode, one.stdout) for one in done] == [(0, "")] * 3


@pytest.mark.slow
def test_a_group_beside_gloo(tmp_path: Path) -> None:
    """Its members connect; the other rank takes no part."""
    done = start_ranks(
        3,
        tmp_path,
        BEGIN
        + """
begin(backend="gloo")
group = dist.new_group([0, 2], backend="mpicoll")
alone = dist.new_group([1], backend="mpicoll")
if rank != 1:
    x = torch.ones(2) * rank
    dist.all_reduce(x, group=group)
    assert x.tolist() == [2, 2]
else:
    x = torch.ones(2)
    dist.all_reduce(x, group=alone)
    assert x.tolist() == [1, 1]
dist.barrier()
dist.destroy_process_group()
""",
    )
    assert [(one.returncode, one.stdout) for one in done] == [(0, "")] * 3


@pytest.mark.slow
@pytest.mark.parametrize("shared", ["auto", "off"])
def test_a_death_is_an_error_of_the_others(shared: str, tmp_path: Path) -> None:
    done = start_ranks(
        3,
        tmp_path,
        BEGIN
        + """
import mpicoll
begin()
x = torch.ones(1000)
dist.all_reduce(x)
if rank == 1:
    os.kill(os.getpid(), 9)
begin = time.monotonic()
try:
    dist.all_reduce(x)
    raise AssertionError
except mpicoll.RankFailed as error:
    assert 1 in error.ranks and "rank 1 (process " in str(error) and "has died" in str(error), error
assert time.monotonic() - begin < 10
""",
        MPICOLL_SHARED_MEMORY=shared,
    )
    assert [(one.returncode, one.stdout) for one in done] == [(0, ""), (-signal.SIGKILL, ""), (0, "")]


@pytest.mark.slow
def test_torchrun(tmp_path: Path) -> None:
    """mpicoll's own functions first, then torch's, with all in the environment. Rank 0 starts without torch, as users'
    programs do; the launcher and rank 1 are forked with it, to save time."""
    program = tmp_path / "program.py"
    program.write_text(
        """\
import os, sys
import numpy as np
import mpicoll

if __name__ == "__main__":
    assert os.environ["RANK"] == "1" or "torch" not in sys.modules
    assert mpicoll.world().size == 2
    assert mpicoll.allreduce(np.ones(3)).tolist() == [2, 2, 2]
    import torch
    import torch.distributed as dist
    for _ in range(2):
        dist.init_process_group("mpicoll")
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
        model(torch.ones(2, 3) * dist.get_rank()).sum().backward()
        assert model.module.weight.grad.tolist() == [[1, 1, 1]]
        dist.destroy_process_group()
    assert mpicoll.world().size == 2
"""
    )
    choice = 'if [[ $RANK = 0 ]]; then exec "$0" "$1"; else shift; exec "$@"; fi'
    options = ("--nproc-per-node=2", "--standalone", "--no-python")
    command = warm_command(
        *("-m", "torch.distributed.run", *options),
        *("bash", "-c", choice, sys.executable, program, *warm_command(program)),
    )
    (done,) = run_all([command], 100, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stdout


def test_a_child_of_a_rank_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_env, "is_child", lambda: True)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(mpicoll.CommunicatorError, match="child of a rank that torchrun has started"):
        startup.reject_child_processes(without_mpi=True)


@pytest.mark.slow
def test_spawn_of_torch(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        """\
import os
import torch
import torch.distributed as dist
import torch.multiprocessing

def run_rank(rank, size):
    dist.init_process_group("mpicoll", rank=rank, world_size=size)
    x = torch.ones(1000)
    dist.all_reduce(x)
    assert x.sum() == 1000 * size  # and the group is not destroyed

if __name__ == "__main__":
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ["PORT"])
    for method in ("spawn", "fork"):
        torch.multiprocessing.start_processes(run_rank, (2,), nprocs=2, start_method=method)
"""
    )
    import socket

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (done,) = run_all([warm_command(program)], PORT=str(port), PYTHONPATH=str(ROOT))
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ("", None),
        ("RANK=0 WORLD_SIZE=2", None),
        ("MASTER_ADDR=a MASTER_PORT=1 WORLD_SIZE=2", None),
        ("MASTER_ADDR=a MASTER_PORT=1 RANK=0", None),
        ("MASTER_ADDR=a MASTER_PORT=1 RANK=0 WORLD_SIZE=1", None),
        ("MASTER_ADDR=a MASTER_PORT=x RANK=0 WORLD_SIZE=2", None),
        ("MASTER_ADDR=a MASTER_PORT=1 RANK=2 WORLD_SIZE=2", None),
        ("MASTER_ADDR=a MASTER_PORT=1 RANK=1 WORLD_SIZE=2", (1, 2)),
        ("SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=4", None),
        ("MASTER_ADDR=a MASTER_PORT=1 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=4", (1, 4)),
        ("MASTER_ADDR=a MASTER_PORT=1 RANK=1 WORLD_SIZE=2 OMPI_COMM_WORLD_SIZE=2 PMIX_RANK=1", None),
        ("MASTER_ADDR=a MASTER_PORT=1 RANK=1 WORLD_SIZE=2 PMIX_RANK=0 TORCHELASTIC_RUN_ID=none", (1, 2)),
        (f"MASTER_ADDR=a MASTER_PORT=1 RANK=1 WORLD_SIZE=2 {launch_env.MPI_STORE}=a:1", None),
        (f"MASTER_ADDR=a MASTER_PORT=2 RANK=1 WORLD_SIZE=2 {launch_env.MPI_STORE}=a:1", (1, 2)),
    ],
)
def test_which_environments_describe_a_job(variables: str, expected: tuple[int, int] | None) -> None:
    environ = dict(one.split("=") for one in variables.split())
    found = launch_env.find_address_rank(environ) if launch_env.is_job_without_mpi(environ) else None
    assert found == expected


@pytest.mark.slow
def test_a_plain_script_is_a_world_of_one(tmp_path: Path) -> None:
    code = "import mpicoll; assert mpicoll.world().size == 1 and mpicoll.allreduce(3) == 3"
    (done,) = run_all([[sys.executable, "-c", code]], RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    assert (done.returncode, done.stdout) == (0, "")
