"""Start a program on several ranks from within a test."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from support.warm import start_options

ROOT = Path(__file__).resolve().parents[2]


def mpirun(
    size: int,
    *arguments: str | Path,
    seconds: float = 60,
    cwd: Path | None = None,
    options: Sequence[str] = (),
    warm: bool = False,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run ``mpirun OPTIONS... -np SIZE python ARGUMENTS...`` and wait at most `seconds`; then its exit status is 124.

    `variables` are added to the environment. stdout and stderr are both in ``.stdout``. `warm` ranks are forked from a
    process that has imported torch, if there is one: see `support.warm`.
    """
    # A test that initialised MPI has made this process a rank; what it starts must not take itself for the same one.
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("PMIX_", "PMI_", "OMPI_COMM_"))}
    environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"
    # timeout(1) ends the whole process group, where subprocess's own timeout would leave the ranks behind.
    command = ["timeout", "--kill-after=5", str(seconds)]
    command += ["bash", "-c", 'source "$0" && exec mpirun "$@"', str(ROOT / "ci" / "env.sh")]
    command += [*options, "-np", str(size), sys.executable]
    command += [*(start_options() if warm else ()), *map(str, arguments)]
    return subprocess.run(
        command,
        cwd=cwd or ROOT,
        env=environ | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
