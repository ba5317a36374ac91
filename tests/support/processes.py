"""Start ranks as plain processes, as programs without MPI do."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

from support.launch import ROOT
from support.warm import start_options

_FOREIGN = ("PMIX_", "PMI_", "OMPI_COMM_", "MPICOLL_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCH", "SLURM_")


def start_ranks(
    size: int, folder: Path, code: str, seconds: float = 90, **variables: str
) -> list[subprocess.CompletedProcess[str]]:
    """Run `code` in `size` processes with the arguments rank, size and the path of a file for a store, and wait at most
    `seconds` for all. stdout and stderr are both in ``.stdout``; a process that has not ended has the status None. The
    processes are forked from one that has imported torch, if there is one: see `support.warm`."""
    program = folder / "program.py"
    program.write_text(textwrap.dedent(code))
    commands = [warm_command(program, rank, size, folder / "store") for rank in range(size)]
    return run_all(commands, seconds, **variables)


def warm_command(*arguments: str | int | Path) -> list[str]:
    """The command for a script or module (``-m``) and its arguments in a process that need not import torch."""
    # What is forked has its own filters of warnings, whatever the environment says.
    return [sys.executable, *start_options(), "-W", "ignore", *map(str, arguments)]


def run_all(
    commands: Sequence[Sequence[str]], seconds: float = 90, **variables: str
) -> list[subprocess.CompletedProcess[str]]:
    """Run the commands at the same time, without the variables of launchers."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith(_FOREIGN)}
    # torch renames functions from version to version, and warns of the old names.
    environ |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "MPICOLL_TUNED": "off", "MPICOLL_TIMEOUT": "30"}
    environ |= variables
    started = [
        subprocess.Popen(
            one,
            cwd=ROOT,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for one in commands
    ]
    deadline = time.monotonic() + seconds
    done = []
    try:
        for process in started:
            output, _ = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
            done.append(subprocess.CompletedProcess(process.args, process.returncode, output))
    finally:
        for process in started:
            process.kill()
            process.communicate()
    return done
