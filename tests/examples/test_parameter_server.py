"""The example of the parameter server trains, also with a slow worker, and with one that is killed."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from support.launch import ROOT, mpirun

SCRIPT = ROOT / "examples" / "parameter_server.py"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def run(*arguments: str | Path, ulfm: bool = False) -> str:
    options = ("--with-ft", "ulfm") if ulfm else ()
    done = mpirun(4, SCRIPT, *arguments, seconds=120, options=options, warm=True, MPICOLL_REPORT="off")
    assert done.returncode == 0, done.stdout
    return done.stdout


def accuracy(output: str) -> float:
    match = re.search(r"test accuracy ([\d.]+)%", output)
    assert match is not None, output
    return float(match[1])


@pytest.mark.parametrize("servers", [pytest.param("1", marks=pytest.mark.long), "2"])
def test_synchronous_weights_are_those_of_digits(servers: str, tmp_path: Path) -> None:
    output = run("--servers", servers, "--epochs", "1", "--save", tmp_path / "server.npz")
    assert output.count("has made 22 updates") == int(servers)
    alone = mpirun(1, ROOT / "examples" / "digits.py", "--epochs", "1", "--save", tmp_path / "alone.npz", warm=True)
    assert alone.returncode == 0, alone.stdout
    with np.load(tmp_path / "server.npz") as found, np.load(tmp_path / "alone.npz") as expected:
        for name in expected:
            np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=1e-12)


@pytest.mark.long
def test_asynchronous_training_with_a_slow_worker() -> None:
    output = run("--mode", "async", "--slow", "3", "--lr", "0.02")
    assert accuracy(output) > 95
    assert "server 0 has made 660 updates" in output


@pytest.mark.long
@pytest.mark.parametrize("servers", ["1", "2"])
def test_asynchronous_training_goes_on_when_a_slow_worker_is_killed(servers: str) -> None:
    arguments = ("--mode", "async", "--lr", "0.02", "--servers", servers, "--slow", "3", "--kill", "3", "--at", "5")
    output = run(*arguments, ulfm=True)
    assert accuracy(output) > 95
    assert "worker rank 3 has died; the others continue" in output


@pytest.mark.long
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_death_of_a_server_is_an_error_on_all(mode: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal, sys, time, numpy as np, mpicoll\n"
        "from mpicoll.parallel.parameter_server import SGD, ParameterServer, Worker\n"
        "rank = mpicoll.world().rank\n"
        "try:\n"
        "    if rank < 2:\n"
        "        server = ParameterServer(SGD(0.1), mode=sys.argv[1])\n"
        "        while server.update_model():\n"
        "            if rank == 1 and server.updates == 5: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    else:\n"
        "        model = {'w': np.zeros(1000)}\n"
        "        with Worker(model) as worker:\n"
        "            for _ in range(10**6):\n"
        "                worker.push_gradients({'w': np.ones(1000)})\n"
        "                worker.pull_weights()\n"
        "except mpicoll.RankFailed as error:\n"
        "    print(f'rank {rank} has RankFailed {error.ranks}: {error}', flush=True)\n"
    )
    done = mpirun(4, program, mode, seconds=60, options=("--with-ft", "ulfm"), MPICOLL_REPORT="off")
    assert done.returncode == 0, done.stdout
    assert sorted(re.findall(r"rank (\d) has RankFailed \(1,\)", done.stdout)) == ["0", "2", "3"], done.stdout
