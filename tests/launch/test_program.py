"""A Python program as a rank of ``mpicoll run``: it runs as by itself, and its failure ends the job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.launch import ROOT

RUNNER = ROOT / "mpicoll" / "launch" / "program.py"

PROGRAM = """\
import os, sys
print([__name__, os.path.basename(__file__), sys.argv[1:], os.path.basename(sys.path[0])], flush=True)
def fail(end):
    {"text": lambda: sys.exit("broken"), "3": lambda: sys.exit(3), "0": lambda: sys.exit(0), "none": sys.exit,
     "raise": lambda: 1 / 0, "": int}[end]()
fail(sys.argv[1])
"""


@pytest.mark.parametrize("module", [False, True], ids=["script", "module"])
def test_a_program_runs_as_by_itself(module: bool, tmp_path: Path) -> None:
    """Name, arguments, search path, status, output and the message that the launcher of MPICH's family gets."""
    (tmp_path / "program.py").write_text(PROGRAM)
    words = ["-m", "program"] if module else [str(tmp_path / "program.py")]
    for end, status in (("", 0), ("0", 0), ("none", 0), ("3", 3), ("text", 1), ("raise", 1)):
        receive, send = os.pipe()
        plain, ours = (
            subprocess.run(
                [sys.executable, *program, *words, end],
                cwd=tmp_path,
                env=os.environ | {"PMI_FD": str(send)},
                pass_fds=[send],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            for program in ([], [str(RUNNER)])
        )
        os.close(send)
        with os.fdopen(receive, "rb") as pipe:
            assert pipe.read() == (b"cmd=abort exitcode=%d\n" % status if status else b"")
        assert ours.returncode == plain.returncode == status
        assert ours.stdout == plain.stdout
        if end == "raise" and module:
            assert "program.py" in ours.stderr
            assert "launch" not in ours.stderr
        else:
            assert ours.stderr == plain.stderr
