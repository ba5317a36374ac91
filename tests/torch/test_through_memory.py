"""Blocking calls, which take the quick way, meet asynchronous ones in shared memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.launch import mpirun

_PROGRAM = """
import torch
import torch.distributed as dist

dist.init_process_group("mpicoll")
size = dist.get_world_size()
for turn in range(4):
    later = bool((dist.get_rank() + turn) % 2)

    def finish(work):
        assert (work is not None) is later
        if later:
            work.wait()

    finish(dist.barrier(async_op=later))
    for dtype in (torch.float32, torch.bfloat16, torch.int16):
        x = torch.ones(3000, dtype=dtype)
        finish(dist.all_reduce(x, async_op=later))
        assert (x == size).all()
        finish(dist.broadcast(x, 0, async_op=later))
        whole = torch.empty(3000 * size, dtype=dtype)
        finish(dist.all_gather_into_tensor(whole, x, async_op=later))
        assert (whole == size).all()
        finish(dist.reduce_scatter_tensor(x, whole, async_op=later))
        assert (x == size * size).all()
dist.destroy_process_group()
print("all here")
"""


@pytest.mark.slow
def test_blocking_and_asynchronous_calls_meet(tmp_path: Path) -> None:
    script = tmp_path / "meet.py"
    script.write_text(_PROGRAM)
    rules = (
        "barrier:shm_flat;allreduce:shm_flat;bcast:shm_pipelined;allgather:shm_pipelined;reduce_scatter:shm_pipelined"
    )
    done = mpirun(2, script, seconds=40, warm=True, MPICOLL_ALGORITHMS=rules)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("all here") == 2
