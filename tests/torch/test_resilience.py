"""Process groups go on when ranks are killed."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.launch import mpirun

ULFM = ("--with-ft", "ulfm")

PROGRAM = """
import os, signal, sys
import torch
from torch.nn.parallel import DistributedDataParallel
import mpicoll
import mpicoll.torch as dist

where, victim, at = sys.argv[1], int(sys.argv[2]), 7
torch.manual_seed(0)
torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

def batch(number, rank, size):
    random = torch.Generator().manual_seed(number)
    x, y = torch.randn(12, 8, generator=random), torch.randn(12, 3, generator=random)
    return x[rank::size], y[rank::size]

def alone(steps):
    for number in range(steps):
        x, y = batch(number, 0, 1)
        optimizer.zero_grad()
        (((model(x) - y) ** 2).sum() / 12).backward()
        optimizer.step()

start = {name: value.clone() for name, value in model.state_dict().items()}
alone(15)
expected = [one.detach().clone() for one in model.parameters()]
model.load_state_dict(start)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

dist.init_process_group()
me = dist.get_rank()

def step(state, number, made):
    parallel, pair = made
    def die(here):
        if (me, number, where) == (victim, at, here):
            os.kill(os.getpid(), signal.SIGKILL)
    rank, size = dist.get_rank(), dist.get_world_size()
    x, y = batch(number, rank, size)
    optimizer.zero_grad()
    loss = ((parallel(x) - y) ** 2).sum() * size / 12
    die("backward")
    loss.backward()
    die("step")
    optimizer.step()
    state["steps"] += 1
    total = torch.ones(3)
    dist.all_reduce(total)
    assert total.tolist() == [size] * 3
    work = dist.all_reduce(total, async_op=True)
    die("async")
    work.wait()
    if rank < 2:
        dist.all_reduce(total, group=pair)
    die("barrier")
    dist.barrier()

state = {"model": model, "optimizer": optimizer, "steps": 0}
dist.resilient(step, state, 15, setup=lambda comm: (DistributedDataParallel(model), dist.new_group([0, 1])))
assert state["steps"] == 15
assert dist.get_world_size() == mpicoll.world().size == 2
assert int(os.environ["WORLD_SIZE"]) == 2 and int(os.environ["RANK"]) == dist.get_rank()
for one, other in zip(model.parameters(), expected):
    torch.testing.assert_close(one.detach(), other, rtol=0, atol=1e-10)
dist.destroy_process_group()
print("fine\\n", end="", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "victim"),
    [
        ("backward", 0),
        pytest.param("step", 2, marks=pytest.mark.long),
        ("async", 1),
        pytest.param("barrier", 0, marks=pytest.mark.long),
    ],
)
def test_the_process_group_is_made_anew(where: str, victim: int, tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(PROGRAM)
    done = mpirun(3, script, where, str(victim), options=ULFM, seconds=90, warm=True)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("fine\n") == 2, done.stdout


@pytest.mark.slow
def test_a_process_group_has_to_be_there(tmp_path: Path) -> None:
    script = tmp_path / "none.py"
    script.write_text(
        "import mpicoll.torch as dist\n"
        "try:\n"
        "    dist.resilient(print, 0, 1)\n"
        "except dist_error() as error:\n"
        "    print(error)\n".replace("dist_error()", "__import__('mpicoll').ArgumentError")
    )
    done = mpirun(1, script, warm=True)
    assert "call init_process_group()" in done.stdout
