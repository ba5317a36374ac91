"""Output of several ranks, in order."""

import torch.distributed as dist


def say(line):
    """Print a line for each rank, in the order of ranks. What ranks print themselves comes in any order."""
    lines = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(str(line), lines, dst=0)
    for number, text in enumerate(lines or []):
        print(f"rank {number}: {text}")
