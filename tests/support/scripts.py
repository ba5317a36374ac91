"""Several scripts in one job: to start ranks and to import torch takes longer than what most scripts do.

This module is also the program of such a job. Each script runs as it would by itself, as ``__main__`` and with its own
arguments, folder and output, in the process where another one has ended before.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from support.launch import ROOT, mpirun
from support.warm import start_options


@dataclass
class Ended:
    """The end of a script: the statuses of all ranks, and the output to stdout or stderr, by rank."""

    statuses: list[int]
    printed: list[str]

    @property
    def output(self) -> str:
        """Output of the only rank that has printed, if all ranks have succeeded."""
        assert not any(self.statuses), self
        (text,) = filter(None, self.printed)
        return text


def run_scripts(
    size: int,
    folder: Path,
    *commands: Sequence[str | Path],
    seconds: float = 100,
    strict: bool = True,
    warm: bool = True,
    **variables: str,
) -> list[Ended]:
    """Run the `commands`, each a script and its arguments, one after another in the same `size` ranks; 0 stands for
    plain Python, without mpirun. `folder` is for files that nobody else looks at. `warm` is that of `mpirun`.

    Warnings are errors where it is `strict`. The job has to end as the last script does, and to print nothing beside
    what scripts print.
    """
    task = folder / "commands.json"
    task.write_text(json.dumps([list(map(str, command)) for command in commands]))
    program = (*(("-W", "error") if strict else ()), "-m", "support.scripts", task, str(size))
    search = [str(ROOT / "tests"), *filter(None, [variables.get("PYTHONPATH", os.environ.get("PYTHONPATH"))])]
    variables["PYTHONPATH"] = os.pathsep.join(search)
    if size:
        done = mpirun(size, *program, seconds=seconds, warm=warm, **variables)
    else:
        done = subprocess.run(
            [sys.executable, *(start_options() if warm else ()), *map(str, program)],
            cwd=ROOT,
            env=os.environ | variables,
            timeout=seconds,
            check=False,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    paths = sorted(folder.glob("rank-*.json"))
    assert len(paths) == max(size, 1), done.stdout
    ranks = [json.loads(path.read_text()) for path in paths]
    ends = [Ended([status for status, _ in every], [text for _, text in every]) for every in zip(*ranks, strict=True)]
    if any(ends[-1].statuses):
        assert done.returncode not in (0, 124), done.stdout
        assert "Traceback" not in done.stdout, done.stdout  # mpirun has something to say of a status
    else:
        assert (done.returncode, done.stdout) == (0, ""), done.stdout
    return ends


def _run(script: str, *arguments: str) -> tuple[int, str]:
    """Status and output of one script in this process."""
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    before, status = set(sys.modules), 0
    gc.freeze()  # the collection below is of what this script leaves, not of all modules
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.redirect_stderr(shown):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as leaving:
            status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
            if isinstance(leaving.code, str):
                print(leaving.code, file=sys.stderr)  # as Python does at its end
        except BaseException:
            sys.__stdout__.write(f"{sys.argv} broke off after {shown.getvalue()!r}\n")
            raise
        # The next script gets no module of this one's folder, as its own may have one of the same name.
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", None)).startswith(sys.path[0]):
                del sys.modules[name]
        gc.collect()
    return status, shown.getvalue()


def _main(task: Path, size: int) -> None:
    ends: list[tuple[int, str]] = []
    for command in json.loads(task.read_text()):
        distributed = sys.modules.get("torch.distributed")
        if ends and ends[-1][0] and distributed and distributed.is_initialized():
            distributed.destroy_process_group()  # which a script that gives up leaves to the end of its process
        ends.append(_run(*command))
    # By the process, as plain Python knows of no rank.
    draft = task.with_name(f"draft-{os.getpid()}")
    draft.write_text(json.dumps(ends))
    draft.rename(task.with_name(f"rank-{os.getpid()}.json"))
    deadline = time.monotonic() + 30
    while len(list(task.parent.glob("rank-*.json"))) < size and time.monotonic() < deadline:
        time.sleep(0.02)  # mpirun ends all ranks as soon as one gives up
    if ends[-1][0]:
        raise SystemExit(ends[-1][0])


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]))
