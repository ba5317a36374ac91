"""However a job ends, it does so within seconds, and says so where something failed."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from launch import mpirun

BEGIN = """
import os, signal, sys, threading, time
import torch, torch.distributed as dist
dist.init_process_group("mpicoll")
rank, size = dist.get_rank(), dist.get_world_size()
t = torch.ones(1000)
dist.all_reduce(t)
begin = time.monotonic()
"""

GO_ON = """
for _ in range(100):
    dist.all_reduce(t)
print("reached the end")
"""

LIMIT = 20.0
"""Seconds from start to end: those 10 that an ending may take, and those that the start of a job takes here."""


def end(tmp_path: Path, program: str, size: int = 3) -> tuple[int, str]:
    """Exit status and output of a job that runs `program` behind BEGIN."""
    script = tmp_path / "program.py"
    script.write_text(BEGIN + program)
    begin = time.monotonic()
    done = mpirun(size, script, seconds=40)
    assert time.monotonic() - begin < LIMIT, done.stdout
    return done.returncode, done.stdout


def test_an_exception_on_one_rank(tmp_path: Path) -> None:
    status, output = end(tmp_path, "if rank == 1: raise ValueError('no such luck')\n" + GO_ON)
    assert status != 0
    assert "ValueError: no such luck" in output
    assert "reached the end" not in output


def test_sys_exit_on_one_rank(tmp_path: Path) -> None:
    status, output = end(tmp_path, "if rank == 2: sys.exit(5)\n" + GO_ON)
    assert status == 5
    assert "left by sys.exit with status 5" in output


def test_sys_exit_with_a_text(tmp_path: Path) -> None:
    status, output = end(tmp_path, "if rank == 2: sys.exit('bad luck')\n" + GO_ON)
    assert status == 1
    assert "bad luck" in output


def test_sys_exit_that_is_caught(tmp_path: Path) -> None:
    program = "try: sys.exit(5)\nexcept SystemExit as leaving: assert leaving.code == 5\ndel t; t = torch.ones(1)\n"
    status, output = end(tmp_path, program + GO_ON + "sys.exit(0)")
    assert status == 0, output
    assert output.count("reached the end") == 3


def test_sys_exit_of_a_thread(tmp_path: Path) -> None:
    status, output = end(
        tmp_path, "one = threading.Thread(target=sys.exit, args=(5,)); one.start(); one.join()\n" + GO_ON
    )
    assert status == 0, output


def test_an_interrupt_in_python(tmp_path: Path) -> None:
    status, output = end(tmp_path, "if rank == 1: os.kill(os.getpid(), signal.SIGINT); time.sleep(30)\n" + GO_ON)
    assert status != 0
    assert "KeyboardInterrupt" in output


def test_an_interrupt_while_blocked_in_mpi(tmp_path: Path) -> None:
    program = """
if rank == 0:
    time.sleep(60)
if rank == 1:
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
"""
    status, output = end(tmp_path, program + GO_ON)
    assert status != 0
    assert re.search(r"interrupted, but all_reduce\(float32\[1000\].* goes on waiting; the job is ended", output)


LOADER = """
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":
    dist.init_process_group("mpicoll")
    t = torch.ones(1000)
    dist.all_reduce(t)
    data = TensorDataset(torch.arange(8.0))
    loader = DataLoader(data, batch_size=2, num_workers=2, multiprocessing_context="KIND")
    for _ in range(2):
        assert sum(batch.sum().item() for (batch,) in loader) == 28
        dist.all_reduce(t)
    print("reached the end")
"""


@pytest.mark.parametrize("kind", ["fork", "spawn"])
def test_workers_of_a_loader_do_no_harm(tmp_path: Path, kind: str) -> None:
    script = tmp_path / "program.py"
    script.write_text(LOADER.replace("KIND", kind))
    done = mpirun(2, script, seconds=60)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("reached the end") == 2


def test_a_forked_child_is_refused(tmp_path: Path) -> None:
    program = """
child = os.fork()
if child == 0:
    for call in (lambda: dist.all_reduce(t), lambda: dist.isend(t, 0), lambda: dist.all_reduce(t, async_op=True)):
        try:
            call()
        except RuntimeError as error:
            assert "forked from an MPI rank" in str(error), error
        else:
            os._exit(7)
    sys.exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
"""
    status, output = end(tmp_path, program + GO_ON)
    assert status == 0, output
    assert output.count("reached the end") == 3


def test_ten_thousand_dropped_works(tmp_path: Path) -> None:
    program = """
for _ in range(10000):
    dist.all_reduce(torch.ones(16), async_op=True)
last = torch.ones(1)
dist.all_reduce(last)
assert last.item() == size
assert time.monotonic() - begin < 10
"""
    status, output = end(tmp_path, program + GO_ON)
    assert status == 0, output
    assert output.count("reached the end") == 3


def test_two_thousand_groups(tmp_path: Path) -> None:
    program = """
groups = [dist.new_group([0, 1] if i % 2 else list(range(size))) for i in range(2000)]
for group in groups[::100] + groups[1::100]:
    if rank in dist.get_process_group_ranks(group) if group is not dist.GroupMember.NON_GROUP_MEMBER else False:
        one = torch.ones(1)
        dist.all_reduce(one, group=group)
        assert one.item() == dist.get_world_size(group)
dist.destroy_process_group()
print("reached the end", time.monotonic() - begin)
"""
    status, output = end(tmp_path, program)
    assert status == 0, output
    assert output.count("reached the end") == 3


def test_the_end_with_operations_that_complete(tmp_path: Path) -> None:
    """Nobody waits for them, but all ranks have started them."""
    program = """
for _ in range(50):
    dist.all_reduce(torch.ones(100000), async_op=True)
dist.irecv(torch.zeros(3), (rank + 1) % size, tag=77)
print("reached the end")
"""
    status, output = end(tmp_path, program)
    assert status == 0, output
    assert output.count("reached the end") == 3


def test_the_end_with_an_operation_that_others_did_not_join(tmp_path: Path) -> None:
    status, output = end(tmp_path, "if rank == 0: dist.all_reduce(t, async_op=True)\n")
    assert status != 0
    # Whoever is first: this rank's end, or the news that the others have come to theirs.
    assert re.search("holds operations that the other ranks did not join|which has left the program", output)


def test_a_signal_to_a_child_is_the_childs_affair(tmp_path: Path) -> None:
    program = """
if rank == 0:
    child = os.fork()
    if child == 0:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        except KeyboardInterrupt:
            pass
        os._exit(0)
else:
    time.sleep(4)  # rank 0 waits for longer than an interrupt would let it
dist.barrier()
"""
    status, output = end(tmp_path, program + GO_ON, size=2)
    assert status == 0, output
    assert output.count("reached the end") == 2


def test_the_end_of_a_single_rank_with_a_receive_pending(tmp_path: Path) -> None:
    status, output = end(tmp_path, "dist.irecv(torch.zeros(3), 0)\nprint('reached the end')\n", size=1)
    assert status == 0, output
    assert "reached the end" in output


def test_without_threads_in_mpi(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("import mpi4py; mpi4py.rc.thread_level = 'serialized'\n" + BEGIN)
    done = mpirun(2, script, seconds=40)
    assert done.returncode != 0
    assert "SetupError: a process group of mpicoll needs MPI_THREAD_MULTIPLE" in done.stdout


def test_gloo_and_mpicoll_one_after_the_other_and_side_by_side(tmp_path: Path) -> None:
    """gloo finds its way by what mpicoll has put into the environment; and members alone may ask for a group of
    mpicoll."""
    program = """
dist.destroy_process_group()
dist.init_process_group("gloo")
t = torch.ones(1)
dist.all_reduce(t)
assert t.item() == size
dist.new_group([0], backend="mpicoll")
both = dist.new_group(backend="mpicoll")
dist.all_reduce(t, group=both)
assert t.item() == size * size
print("reached the end")
"""
    status, output = end(tmp_path, program)
    assert status == 0, output
    assert output.count("reached the end") == 3
