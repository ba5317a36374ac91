"""The hosts that a batch system has allocated, from the environment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path


def find_hosts(environ: Mapping[str, str]) -> dict[str, int]:
    """Return the number of ranks for each host that PBS or LSF has allocated to this job, or an empty dict.

    Open MPI finds these hosts by itself only if it was compiled for the batch system, unlike those of Slurm. MPICH and
    Intel MPI always do.
    """
    if "PBS_JOBID" in environ:
        try:
            return dict(Counter(Path(environ.get("PBS_NODEFILE", "")).read_text().split()))
        except OSError:  # not on this host
            return {}
    if "LSB_JOBID" in environ:
        words = environ.get("LSB_MCPU_HOSTS", "").split()
        if words and len(words) % 2 == 0 and all(word.isdecimal() for word in words[1::2]):
            return dict(zip(words[::2], map(int, words[1::2]), strict=True))
        return dict(Counter(environ.get("LSB_HOSTS", "").split()))
    return {}
