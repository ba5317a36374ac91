"""Run a function on every rank of a world, and programs in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from support.launch import ROOT, mpirun
from support.ranks import ranks, several

__all__ = ["job", "python", "ranks", "several"]


@pytest.fixture
def python() -> Callable[..., CompletedProcess[str]]:
    """Run a program text outside of any MPI job; stdout and stderr are both in ``.stdout``."""

    def run(program: str, seconds: float = 60, **variables: str) -> CompletedProcess[str]:
        prefixes = ("PMIX_", "PMI_", "OMPI_COMM_", "MPICOLL_", "MV2_")
        environ = {key: value for key, value in os.environ.items() if not key.startswith(prefixes)}
        return subprocess.run(
            [sys.executable, "-W", "error", "-c", program],
            cwd=ROOT,
            env=environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
            check=False,
        )

    return run


@pytest.fixture(scope="session")
def job_in() -> Callable[..., CompletedProcess[str]]:
    """Run a program text, kept in a folder, under mpirun; after `seconds` its exit status is 124."""

    def run(folder: Path, size: int, program: str, seconds: float = 60, **variables: str) -> CompletedProcess[str]:
        path = folder / "program.py"
        path.write_text(f"import numpy as np\nimport mpicoll\n{program}")
        search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        return mpirun(size, "-W", "error", path, seconds=seconds, PYTHONPATH=search, **variables)

    return run


@pytest.fixture
def job(job_in: Callable[..., CompletedProcess[str]], tmp_path: Path) -> Callable[..., CompletedProcess[str]]:
    """The same in a folder of its own."""
    return partial(job_in, tmp_path)
