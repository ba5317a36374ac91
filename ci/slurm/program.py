"""A program for ci/slurm/checks.sh: `places` compares ranks and nodes with Slurm's, `work` runs until it is ended.

`work FOLDER [RANK]` writes the file FOLDER/started when all ranks work; RANK kills itself after a second.
"""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

import mpicoll


def check_places() -> None:
    """Exit with an error if a rank is not where Slurm has started it, or if torch's variables say otherwise."""
    import torch.distributed as dist

    world = mpicoll.world()
    found = (world.rank, world.size, world.local_rank, world.local_size, world.node)
    names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE", "SLURM_NODEID")
    told = tuple(int(os.environ[name]) for name in names)
    if found != told:
        raise SystemExit(f"rank, size, local rank, local size, node: {found}, but by Slurm {told}")
    dist.init_process_group("mpicoll")
    variables = tuple(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    if variables != told[:4] or (dist.get_rank(), dist.get_world_size()) != told[:2]:
        raise SystemExit(f"torch's variables: {variables}, but by Slurm {told}")
    address = os.environ["MASTER_ADDR"]
    addresses = mpicoll.allgather(np.array([address], dtype="U64"))
    if set(addresses.tolist()) != {address} or address.startswith("127."):
        raise SystemExit(f"MASTER_ADDR: {addresses.tolist()}")
    dist.destroy_process_group()
    if world.rank == 0:
        print(f"places: {world.size} ranks, address {address}")


def work(folder: Path, victim: int) -> None:
    """All-reduce until a signal, a time limit or a death ends the job; at most two minutes."""
    world = mpicoll.world()
    x = np.ones(4)
    end = time.monotonic() + 120
    step = 0
    while time.monotonic() < end:
        mpicoll.allreduce(x)
        time.sleep(0.05)
        step += 1
        if step == 2 and world.rank == 0:
            (folder / "started").touch()
        if step == 20 and world.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    if sys.argv[1] == "places":
        check_places()
    else:
        work(Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else -1)
