"""However a job ends, it does so within seconds, and says so where something failed."""

from __future__ import annotations

import re
import textwrap
import time
from pathlib import Path

import pytest
from support.launch import mpirun

BEGIN = """
import os, signal, sys, threading, time
import torch, torch.distributed as dist
dist.init_process_group("mpicoll")
rank, size = dist.get_rank(), dist.get_world_size()
t = torch.ones(1000)
dist.all_reduce(t)
print("all are there at", time.time(), flush=True)
"""

GO_ON = """
for _ in range(100):
    dist.all_reduce(t)
print("reached the end")
"""

LIMIT = 45.0
"""Seconds to the end of a job: an ending may take 10, and a loaded machine several times that; the jobs could wait for
longer."""


def stamps(text: str, output: str) -> list[float]:
    """The times that ranks have printed behind `text`."""
    return [float(time) for time in re.findall(rf"{text} (\d+\.\d+)", output)]


def end(tmp_path: Path, program: str, size: int = 3, *, warm: bool = False, **variables: str) -> tuple[int, str]:
    """Exit status and output of a job that runs `program` behind BEGIN, with `variables` in its environment."""
    script = tmp_path / "program.py"
    script.write_text(BEGIN + program)
    done = mpirun(size, script, seconds=90, warm=warm, **variables)
    begins = stamps("all are there at", done.stdout)
    assert len(begins) == size, done.stdout
    assert time.time() - max(begins) < LIMIT, done.stdout
    return done.returncode, done.stdout


# --- what ends a job, or leaves something open at its end


@pytest.mark.slow
def test_an_exception_on_one_rank(tmp_path: Path) -> None:
    status, output = end(tmp_path, "if rank == 1: raise ValueError('no such luck')\n" + GO_ON, warm=True)
    assert status != 0
    assert "ValueError: no such luck" in output
    assert "reached the end" not in output


@pytest.mark.slow
def test_sys_exit_on_one_rank(tmp_path: Path) -> None:
    status, output = end(tmp_path, "if rank == 1: sys.exit(5)\n" + GO_ON, size=2, warm=True)
    assert status == 5
    assert "left by sys.exit with status 5" in output


@pytest.mark.slow
def test_sys_exit_with_a_text(tmp_path: Path) -> None:
    status, output = end(tmp_path, "if rank == 1: sys.exit('bad luck')\n" + GO_ON, size=2, warm=True)
    assert status == 1
    assert "bad luck" in output


@pytest.mark.slow
def test_an_interrupt_in_python(tmp_path: Path) -> None:
    program = "if rank == 1: os.kill(os.getpid(), signal.SIGINT); time.sleep(30)\n"
    status, output = end(tmp_path, program + GO_ON, size=2, warm=True)
    assert status != 0
    assert "KeyboardInterrupt" in output


@pytest.mark.slow
def test_an_interrupt_while_blocked_in_mpi(tmp_path: Path) -> None:
    program = """
if rank == 0:
    time.sleep(60)
if rank == 1:
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
"""
    # Without shared memory they would wait in Python, for the comparison of their calls.
    status, output = end(tmp_path, program + GO_ON, warm=True, MPICOLL_CHECK="off")
    assert status != 0
    assert re.search(r"interrupted, but all_reduce\(float32\[1000\].* still waits; the job is ended", output)


@pytest.mark.slow
def test_the_end_with_an_operation_that_others_did_not_join(tmp_path: Path) -> None:
    status, output = end(tmp_path, "if rank == 0: dist.all_reduce(t, async_op=True)\n", size=2, warm=True)
    assert status != 0
    # Whoever is first: this rank's end, or the news that the others have come to theirs.
    assert re.search("holds operations that the other ranks did not join|which has exited", output)


@pytest.mark.slow
def test_the_end_of_a_single_rank_with_a_receive_pending(tmp_path: Path) -> None:
    status, output = end(tmp_path, "dist.irecv(torch.zeros(3), 0)\nprint('reached the end')\n", size=1, warm=True)
    assert status == 0, output
    assert "reached the end" in output


@pytest.mark.slow
def test_without_threads_in_mpi(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("import mpi4py; mpi4py.rc.thread_level = 'serialized'\n" + BEGIN)
    done = mpirun(2, script, seconds=40, warm=True)
    assert done.returncode != 0
    assert "SetupError: a process group of mpicoll needs MPI_THREAD_MULTIPLE" in done.stdout


# --- what does no harm, one after the other in the same job

HARMLESS = {
    "sys.exit that is caught": """
try: sys.exit(5)
except SystemExit as leaving: assert leaving.code == 5
del t; t = torch.ones(1000)
""",
    "sys.exit of a thread": """
one = threading.Thread(target=sys.exit, args=(5,)); one.start(); one.join()
""",
    "a forked child is refused": """
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
""",
    # Rank 0 waits for longer than an interrupt would let it.
    "a signal to a child is the child's affair": """
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
    time.sleep(4)
dist.barrier()
""",
    "ten thousand works are dropped": """
begin = time.monotonic()
for _ in range(10000):
    dist.all_reduce(torch.ones(16), async_op=True)
last = torch.ones(1)
dist.all_reduce(last)
assert last.item() == size
assert time.monotonic() - begin < 40
""",
    # Each spawned worker imports torch, so there is one, of one rank.
    "workers of a loader": """
data = TensorDataset(torch.arange(8.0))
for kind, workers, rounds in (("fork", 2, 2), ("spawn", 1, rank == 1)):
    loader = DataLoader(data, batch_size=2, num_workers=workers, multiprocessing_context=kind)
    for _ in range(rounds):
        assert sum(batch.sum().item() for (batch,) in loader) == 28
    dist.all_reduce(t)
""",
    "two thousand groups": """
groups = [dist.new_group([0, 1] if i % 2 else list(range(size))) for i in range(2000)]
for group in groups[::100] + groups[1::100]:
    if rank in dist.get_process_group_ranks(group) if group is not dist.GroupMember.NON_GROUP_MEMBER else False:
        one = torch.ones(1)
        dist.all_reduce(one, group=group)
        assert one.item() == dist.get_world_size(group)
""",
    # gloo finds its way by what mpicoll has put into the environment; members alone may ask for a group of mpicoll.
    "gloo after mpicoll, and beside it": """
dist.destroy_process_group()
dist.init_process_group("gloo")
t = torch.ones(1)
dist.all_reduce(t)
assert t.item() == size
dist.new_group([0], backend="mpicoll")
both = dist.new_group(backend="mpicoll")
dist.all_reduce(t, group=both)
assert t.item() == size * size
dist.destroy_process_group()
dist.init_process_group("mpicoll")
""",
}

# Nobody waits for these operations, but all ranks have started them.
PENDING = """
for _ in range(50):
    dist.all_reduce(torch.ones(100000), async_op=True)
dist.irecv(torch.zeros(3), (rank + 1) % size, tag=77)
print("the end begins at", time.time(), flush=True)
sys.exit(0)
"""


@pytest.fixture(scope="module")
def harmless(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, float]:
    """Status and output of a job that says, on each rank, which parts of HARMLESS it has left behind, and then
    ends as PENDING; and when it was over."""
    script = tmp_path_factory.mktemp("harmless") / "program.py"
    go_on = "for _ in range(20): dist.all_reduce(t)\n"
    parts = [f'{part}{go_on}print("past {name}", flush=True)\n' for name, part in HARMLESS.items()]
    program = "".join([BEGIN, *parts, PENDING])
    # A worker that is spawned imports the program.
    imports = "import torch\nfrom torch.utils.data import DataLoader, TensorDataset\n"
    script.write_text(f"{imports}if __name__ == '__main__':\n{textwrap.indent(program, '    ')}")
    done = mpirun(3, script, seconds=100, warm=True)
    return done.returncode, done.stdout, time.time()


@pytest.mark.slow
@pytest.mark.parametrize("name", HARMLESS)
def test_it_does_no_harm(name: str, harmless: tuple[int, str, float]) -> None:
    _, output, _ = harmless
    assert output.count(f"past {name}\n") == 3, output


@pytest.mark.slow
def test_the_end_with_operations_that_complete(harmless: tuple[int, str, float]) -> None:
    status, output, over = harmless
    assert status == 0, output
    begins = stamps("the end begins at", output)
    assert len(begins) == 3, output
    assert over - max(begins) < LIMIT, output
