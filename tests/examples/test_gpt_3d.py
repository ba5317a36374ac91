"""The divided GPT runs in its layouts, and goes on in another one from where it stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launch import ROOT, mpirun

SMALL = ["--layers", "2", "--width", "16", "--context", "16", "--batch", "8", "--micro-batches", "2", "--length", "3"]
SMALL += ["--dtype", "float64"]


def run(size: int, *arguments: str | Path, seconds: float = 100) -> str:
    done = mpirun(size, "-W", "error", ROOT / "examples" / "gpt_3d.py", *SMALL, *arguments, seconds=seconds)
    assert done.returncode == 0, done.stdout
    return done.stdout


def losses(size: int, path: Path, *arguments: str | Path) -> list[float]:
    run(size, "--losses", path, *arguments)
    found: list[float] = json.loads(path.read_text())
    return found


@pytest.mark.timeout(400)
def test_goes_on_in_another_layout(tmp_path: Path) -> None:
    """Saved by one layout after half of the steps, resumed by another: the same losses as without a stop."""
    whole = losses(1, tmp_path / "whole", "--steps", "6")
    kept = tmp_path / "kept"
    first = losses(4, tmp_path / "first", "--steps", "3", "--tp", "2", "--pp", "2", "--sp", "--checkpoint", kept)
    assert first == pytest.approx(whole[:3], rel=0, abs=1e-10)
    for number, (size, layout) in enumerate([(1, ()), (2, ("--pp", "2")), (4, ("--tp", "4"))]):
        rest = losses(size, tmp_path / f"rest{number}", "--steps", "3", "--resume", kept, *layout)
        assert rest == pytest.approx(whole[3:], rel=0, abs=1e-10), layout


def test_output(tmp_path: Path) -> None:
    """A layout, a speed, a text, and two pictures."""
    picture, timeline = tmp_path / "loss.png", tmp_path / "pipe.svg"
    output = run(2, "--steps", "3", "--pp", "2", "--plot", picture, "--timeline", timeline)
    first, second, empty, text, *drawn = output.splitlines()
    assert first.startswith("2 ranks: pp=2 dp=1 cp=1 tp=1, 1f1b, a rank holds ")
    assert second.startswith("3 steps, ")
    assert " tokens/s, loss " in second
    assert not empty
    assert text.startswith("The ")
    assert any("bubble" in line for line in drawn)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "<svg" in timeline.read_text()
    assert "\x1b" not in output, "no progress bar where nobody watches"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--heads", "0"], "argument --heads: invalid positive value: '0'"),
        (["--tp", "3"], "their product divide the 2 ranks, got tensor_model_parallel_size=3"),
        (["--batch", "3"], "--batch must be 2 equal shares of at least --micro-batches sequences"),
        (
            ["--pp", "2", "--schedule", "interleaved", "--micro-batches", "3"],
            "must be a multiple of the number of stages",
        ),
        (["--resume", "/nowhere"], "load: /nowhere holds no checkpoint"),
    ],
)
def test_refuses_nonsense(arguments: list[str], message: str) -> None:
    """One rank says what is wrong, once; all of them leave."""
    done = mpirun(2, ROOT / "examples" / "gpt_3d.py", *SMALL, *arguments)
    assert done.returncode != 0
    assert done.stdout.count("gpt_3d.py: error: ") == done.stdout.count(message) == 1
    assert "Traceback" not in done.stdout
