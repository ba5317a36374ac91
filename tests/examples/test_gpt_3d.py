"""The divided GPT runs in its layouts, and goes on in another one from where it stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.launch import ROOT
from support.scripts import Ended, run_scripts

GPT = ROOT / "examples" / "gpt_3d.py"
SMALL = ["--layers", "2", "--width", "16", "--context", "16", "--batch", "8", "--micro-batches", "2", "--length", "3"]
SMALL += ["--dtype", "float64"]
NONSENSE = {
    "heads": (("--heads", "0"), "argument --heads: invalid positive value: '0'"),
    "tp": (("--tp", "3"), "their product must divide the 2 ranks, got tensor_model_parallel_size=3"),
    "batch": (("--batch", "3"), "--batch must be 2 equal shares of at least --micro-batches sequences"),
    "resume": (("--resume", "/nowhere"), "load: /nowhere does not contain a checkpoint"),
    "micro-batches": (
        ("--pp", "2", "--schedule", "interleaved", "--micro-batches", "3"),
        "must be a multiple of the number of stages",
    ),
}

# The first test waits for the jobs of all of them.
pytestmark = pytest.mark.timeout(400)


class Runs:
    """Several layouts in each of three jobs, of 4 ranks, 1 rank and 2; one has to leave a checkpoint to the others."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.picture, self.timeline = folder / "loss.png", folder / "pipe.svg"
        kept = folder / "kept"
        first = "--steps", "3", "--tp", "2", "--pp", "2", "--sp", "--checkpoint", kept
        rest = "--steps", "3", "--resume", kept
        self._run(4, {"first": first, "rest on tp": (*rest, "--tp", "4")})
        self._run(1, {"whole": ("--steps", "6"), "rest on one": rest})
        # The last one is refused when there are groups already; nothing of them may keep a rank from its end.
        drawn = "--steps", "3", "--pp", "2", "--plot", self.picture, "--timeline", self.timeline
        refused = {name: arguments for name, (arguments, _) in NONSENSE.items()}
        self.ends = self._run(2, {"rest on pp": (*rest, "--pp", "2"), "drawn": drawn, **refused})

    def _run(self, size: int, runs: dict[str, tuple[str | Path, ...]]) -> dict[str, Ended]:
        commands = [
            (GPT, *SMALL, "--losses", self.folder / f"{name}.json", *arguments) for name, arguments in runs.items()
        ]
        job = self.folder / f"job-{size}"
        job.mkdir()
        return dict(zip(runs, run_scripts(size, job, *commands), strict=True))

    def losses(self, name: str) -> list[float]:
        found: list[float] = json.loads((self.folder / f"{name}.json").read_text())
        return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.mark.slow
def test_goes_on_in_another_layout(runs: Runs) -> None:
    """Saved by one layout after half of the steps, resumed by another: the same losses as without a stop."""
    whole = runs.losses("whole")
    assert len(whole) == 6
    assert runs.losses("first") == pytest.approx(whole[:3], rel=0, abs=1e-10)
    for layout in ("rest on one", "rest on pp", "rest on tp"):
        assert runs.losses(layout) == pytest.approx(whole[3:], rel=0, abs=1e-10), layout


@pytest.mark.slow
def test_output(runs: Runs) -> None:
    """A layout, a speed, a text, and two pictures."""
    output = runs.ends["drawn"].output
    first, second, empty, text, *drawn = output.splitlines()
    assert first.startswith("2 ranks: pp=2 dp=1 cp=1 tp=1, 1f1b, a rank holds ")
    assert second.startswith("3 steps, ")
    assert " tokens/s, loss " in second
    assert not empty
    assert text.startswith("The ")
    assert any("bubble" in line for line in drawn)
    assert runs.picture.read_bytes().startswith(b"\x89PNG")
    assert "<svg" in runs.timeline.read_text()
    assert "\x1b" not in output, "no progress bar where nobody watches"


@pytest.mark.slow
@pytest.mark.parametrize("name", NONSENSE)
def test_refuses_nonsense(name: str, runs: Runs) -> None:
    """One rank says what is wrong, once; all of them leave."""
    end = runs.ends[name]
    assert end.statuses == [2, 2]
    assert sum(map(bool, end.printed)) == 1
    text = "".join(end.printed)
    assert text.count("gpt_3d.py: error: ") == text.count(NONSENSE[name][1]) == 1
