"""A process that is forked by the server is like one that was started; and it ends with the one that stands for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.warm import SOCKET, prepare, start_options

PROGRAM = """
import json, os, sys, warnings
found = {"argv": sys.argv, "variable": os.environ.get("WARM_TEST"), "folder": os.getcwd(), "name": __name__}
found |= {"torch": "torch" in sys.modules, "first": sys.path[:2], "rest": __file__}
print(json.dumps(found), flush=True)
exec(sys.argv[1])
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    options = start_options()
    if not options:
        pytest.skip("no server here")
    (tmp_path / "program.py").write_text(PROGRAM)
    return [sys.executable, *options, str(tmp_path / "program.py")]


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"WARM_TEST": "yes", "PYTHONPATH": str(folder)}
    return subprocess.run(command, cwd=folder, env=environ, check=False, text=True, capture_output=True, timeout=100)


@pytest.mark.slow
def test_it_is_the_same_as_without_a_server(command: list[str], tmp_path: Path) -> None:
    forked = run([*command, "sys.exit('why')"], tmp_path)
    cold = run([*command[:-2], "/nowhere", command[-1], "sys.exit('why')"], tmp_path)
    assert forked.stdout.replace('"torch": true', '"torch": false') == cold.stdout
    assert (forked.returncode, forked.stderr) == (cold.returncode, cold.stderr) == (1, "why\n")
    assert '"torch": true' in forked.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("", 0),
        ("os._exit(7)", 7),
        ("os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("os.kill(os.getppid(), 0); os.kill(os.getpid(), 15)", -signal.SIGTERM),
        ("warnings.warn('none')", 1),
    ],
)
def test_its_end_is_that_of_its_stand_in(command: list[str], tmp_path: Path, end: str, status: int) -> None:
    done = run([*command[:-1], "-W", "error", command[-1], end], tmp_path)
    assert done.returncode == status, done


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_it_ends_with_its_stand_in(command: list[str], tmp_path: Path, number: signal.Signals) -> None:
    with subprocess.Popen(
        [*command, "print(os.getpid(), flush=True); import time; time.sleep(100)"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        pid = int(process.stdout.readline())
        process.send_signal(number)
        assert process.wait(60) == -number
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_it_can_be_prepared_ahead(command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an answer to anybody, and without a server there."""
    prepare()
    assert '"torch": true' in run([*command, ""], tmp_path).stdout
    monkeypatch.setenv(SOCKET, "/nowhere")
    prepare()
