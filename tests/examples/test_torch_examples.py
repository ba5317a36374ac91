"""The examples for torch run without a warning, on torch.distributed and on the drop-in, and print what they should.

What they should print is worked out here from the numbers that each rank passes.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from support.launch import ROOT, mpirun
from support.scripts import Ended, run_scripts
from support.warm import start_options

EXAMPLES = ROOT / "examples"
BASIC = EXAMPLES / "torch_collectives"
DIGITS = EXAMPLES / "ddp_digits.py"
GPT = EXAMPLES / "fsdp_gpt.py"

# The first test that wants something of a job waits for all of it.
pytestmark = pytest.mark.timeout(300)


def by_itself(size: int, script: Path, *arguments: str | Path, warm: bool = True) -> str:
    """What `script` prints on `size` ranks that run nothing else; 0 stands for plain Python, without mpirun."""
    strict = ("-W", "error", script, *arguments)
    if size:
        done = mpirun(size, *strict, warm=warm)
    else:
        done = subprocess.run(
            [sys.executable, *(start_options() if warm else ()), *strict],
            cwd=ROOT,
            timeout=60,
            check=False,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    assert done.returncode == 0, done.stdout
    return done.stdout


class Jobs:
    """What scripts print. Those that run on equally many ranks share a job, which the first question starts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoint = folder / "checkpoint" / "2.pt"
        self.picture = folder / "loss.png"
        self.temporary = folder / "temporary"
        self.run = cache(self._run)

    def output(self, size: int, *command: str | Path) -> str:
        end = self.run(size)[command]
        assert not isinstance(end, str), end
        return end.output

    def _run(self, size: int) -> dict[Sequence[str | Path], Ended | str]:
        """How each command ends, or why the job broke off."""
        commands: list[Sequence[str | Path]] = [
            (BASIC / f"{name}.py", *mode) for mode, name in product(MODES, [*LINES, "barrier"])
        ]
        if size == 0:
            commands += [(DIGITS, "--batch", "1348")]
        if size == 2:
            commands += [(DIGITS, "--checkpoint", self.checkpoint), (DIGITS, "--epochs", "2"), (GPT, *SHORT, "--bf16")]
        if size == 3:
            commands += [(GPT, *SHORT, "--plot", self.picture)]
        job = self.folder / f"job-{size}"
        for place in (self.checkpoint.parent, self.temporary, job):
            place.mkdir(exist_ok=True)
        try:
            # Plain Python is what programs start as.
            ends = run_scripts(size, job, *commands, warm=size > 0, TMPDIR=str(self.temporary))
        except AssertionError as error:  # raised by each test that asks, instead of one job for each
            return dict.fromkeys(commands, str(error))
        return dict(zip(commands, ends, strict=True))


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(tmp_path_factory.mktemp("jobs"))


# The scripts for the basic operations.


def process_group(rank: int, size: int) -> str:
    even = f"{rank // 2} of {(size + 1) // 2} among the even ones"
    return f"{rank} of {size} in the world, {'not among the even ones' if rank % 2 else even}"


def send_recv(rank: int, size: int) -> str:
    return str([10 + other if other <= rank else 0 for other in range(size)])


def isend_irecv(rank: int, size: int) -> str:
    sums = [other + other**2 for other in range(size)]
    return f"own sum {sums[rank]}, of the neighbours {sums[:rank][-1:] + sums[rank + 1 :][:1]}"


def broadcast(rank: int, size: int) -> str:
    return f"{[0, 0, 0] if rank else [5, 6, 7]} -> [5, 6, 7]"


def all_reduce(rank: int, size: int) -> str:
    first = float(sum(range(1, size + 1)))
    return f"{[rank + 1.0, 2 * rank + 2.0]} -> sum {[first, 2 * first]}, max {[float(size), 2.0 * size]}"


def reduce(rank: int, size: int) -> str:
    return all_reduce(rank, size) if rank == 0 else str([rank + 1.0, 2 * rank + 2.0])


def scatter(rank: int, size: int) -> str:
    return str([2 * rank, 2 * rank + 1])


def all_gather(rank: int, size: int) -> str:
    return f"{[rank, rank**2]} -> {[[other, other**2] for other in range(size)]}"


def gather(rank: int, size: int) -> str:
    return all_gather(rank, size) if rank == 0 else str([rank, rank**2])


def reduce_scatter(rank: int, size: int) -> str:
    rows = [[place + 100 * other for place in range(2 * size)] for other in range(size)]
    return f"{rows[rank]} -> {[sum(column) for column in zip(*rows, strict=True)][2 * rank : 2 * rank + 2]}"


LINES: dict[str, Callable[[int, int], str]] = {
    function.__name__: function
    for function in (
        process_group,
        send_recv,
        isend_irecv,
        broadcast,
        reduce,
        scatter,
        gather,
        all_reduce,
        all_gather,
        reduce_scatter,
    )
}


def expected(name: str, size: int) -> list[str]:
    if name == "barrier":
        return [f"the first of {size} left after the last had come: True"]
    return [f"rank {rank}: {LINES[name](rank, size)}" for rank in range(size)]


# torch.distributed, and then mpicoll.torch in its place
MODES: tuple[Sequence[str], ...] = ((), ("--drop-in",))


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 2, 3])
@pytest.mark.parametrize("name", [*LINES, "barrier"])
def test_basic(name: str, size: int, jobs: Jobs) -> None:
    for mode in MODES:
        assert jobs.output(size, BASIC / f"{name}.py", *mode).splitlines() == expected(name, size or 1)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size", "drop_in"), [("send_recv", 4, True), ("isend_irecv", 1, False)])
def test_basic_by_itself(name: str, size: int, drop_in: bool) -> None:
    assert by_itself(size, BASIC / f"{name}.py", *MODES[drop_in]).splitlines() == expected(name, size)


@pytest.mark.parametrize("name", [*LINES, "barrier"])
def test_docstring_shows_commands_and_output(name: str) -> None:
    text = ast.get_docstring(ast.parse((BASIC / f"{name}.py").read_text()))
    assert text is not None
    shown = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    commands = [line.partition("#")[0].split() for line in shown if line.startswith("mpirun")]
    command = ["mpirun", "-np", "3", "python", f"examples/torch_collectives/{name}.py"]
    assert commands == [command, [*command, "--drop-in"]]
    assert [line for line in shown if not line.startswith("mpirun")] == expected(name, 3)


def test_every_script_is_run() -> None:
    assert {path.stem for path in BASIC.glob("*.py")} == {*LINES, "barrier", "say"}


# DistributedDataParallel


def accuracy(output: str) -> float:
    match = re.search(r"test accuracy ([\d.]+)% of 450 samples, from the checkpoint", output)
    assert match is not None, output
    return float(match[1]) / 100


@pytest.mark.slow
def test_ddp_digits(jobs: Jobs, tmp_path: Path) -> None:
    """Two ranks reach the accuracy, and the parameters, of one rank that sees whole batches."""
    alone = tmp_path / "0.pt"
    by_itself(0, DIGITS, "--checkpoint", alone)
    output = jobs.output(2, DIGITS, "--checkpoint", jobs.checkpoint)
    for path in (alone, jobs.checkpoint):
        assert list(path.parent.iterdir()) == [path], "nothing half-written is left"
    assert output.startswith("2 ranks, mpicoll on cpu, 20 epochs of 1347 samples")
    assert "\x1b" not in output, "no progress bar where nobody watches"
    assert accuracy(output) > 0.95
    two, one = (torch.load(path, weights_only=True) for path in (jobs.checkpoint, alone))
    # Weights are of the order of 0.1, in float32; gradients are added up in another order, 420 times.
    torch.testing.assert_close(two, one, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_ddp_digits_leaves_no_checkpoint_behind(jobs: Jobs) -> None:
    output = jobs.output(2, DIGITS, "--epochs", "2")
    assert accuracy(output) > 0.5, "parameters that nobody trained recognise every tenth sample"
    assert not list(jobs.temporary.rglob("*.pt*"))


@pytest.mark.slow
def test_ddp_digits_refuses_a_batch_that_would_train_nothing(jobs: Jobs) -> None:
    end = jobs.run(0)[DIGITS, "--batch", "1348"]
    assert isinstance(end, Ended), end
    assert end.statuses == [2]
    assert "--epochs must be at least 1, --batch between 1 and 1347" in end.printed[0]


@pytest.mark.long
@pytest.mark.parametrize("size", [0, 1])
def test_they_import_what_they_need(size: int) -> None:
    assert "test accuracy" in by_itself(size, DIGITS, "--epochs", "2", warm=False)
    assert "loss " in by_itself(size, GPT, *SHORT, warm=False)
    assert by_itself(size, BASIC / "isend_irecv.py", warm=False).splitlines() == expected("isend_irecv", 1)


# FSDP2


# With 4 sequences rank 0 of 3 has twice as much to do as the others: means that count ranks alike would be far off.
SHORT = ("--steps", "20", "--batch", "4", "--length", "30")


def losses(output: str) -> tuple[float, float]:
    match = re.search(r"loss ([\d.]+) -> ([\d.]+)\n", output)
    assert match is not None, output
    return float(match[1]), float(match[2])


def held(output: str) -> tuple[int, list[int]]:
    """All parameters, and how many of them each rank holds."""
    match = re.match(r"(\d+) parameters, of which the ranks hold ([\d, ]+)\n", output)
    assert match is not None, output
    return int(match[1]), [int(part) for part in match[2].split(",")]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> str:
    return by_itself(0, GPT, *SHORT)


@pytest.mark.slow
def test_fsdp_gpt_does_the_same_on_three_ranks(one_rank: str, jobs: Jobs) -> None:
    three = jobs.output(3, GPT, *SHORT, "--plot", jobs.picture)
    # Five decimals are printed; ranks add up gradients in another order, in float32.
    assert losses(three) == pytest.approx(losses(one_rank), rel=0, abs=1e-4)
    assert "\n\nThe " in three
    assert three.partition("\n\n")[2] == one_rank.partition("\n\n")[2], "both write the same text"
    assert "\x1b" not in three, "no progress bar where nobody watches"
    assert jobs.picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.slow
def test_fsdp_gpt_learns(one_rank: str) -> None:
    """From a guess among 256 bytes, of which the logarithm is 5.55, to the frequencies of letters and a bit more."""
    first, last = losses(one_rank)
    assert first == pytest.approx(5.55, abs=0.2)
    assert last < 3.8


@pytest.mark.slow
def test_fsdp_gpt_in_bfloat16_shares_out_the_parameters(one_rank: str, jobs: Jobs) -> None:
    output = jobs.output(2, GPT, *SHORT, "--bf16")
    assert losses(output) != losses(one_rank)
    # bfloat16 has three digits.
    assert losses(output) == pytest.approx(losses(one_rank), rel=0.01)
    total, parts = held(output)
    assert held(one_rank) == (total, [total])
    assert len(parts) == 2
    assert sum(parts) == total
    assert max(parts) < 0.51 * total
