from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mpicoll.errors import ScheduleError, SetupError
from mpicoll.schedules import Recv, Round, algorithms_of, collectives, draw, get

RING = """\
allreduce/ring on 3 ranks, 4 rounds, 12 messages, at most 4/3 n sent per rank

round │ rank 0  │ rank 1  │ rank 2
──────┼─────────┼─────────┼────────
    1 │ →1 [0]  │ →2 [1]  │ →0 [2]
      │ ←2 +[2] │ ←0 +[0] │ ←1 +[1]
╌╌╌╌╌╌┼╌╌╌╌╌╌╌╌╌┼╌╌╌╌╌╌╌╌╌┼╌╌╌╌╌╌╌╌
    2 │ →1 [2]  │ →2 [0]  │ →0 [1]
      │ ←2 +[1] │ ←0 +[2] │ ←1 +[0]
╌╌╌╌╌╌┼╌╌╌╌╌╌╌╌╌┼╌╌╌╌╌╌╌╌╌┼╌╌╌╌╌╌╌╌
    3 │ →1 [1]  │ →2 [2]  │ →0 [0]
      │ ←2 [0]  │ ←0 [1]  │ ←1 [2]
╌╌╌╌╌╌┼╌╌╌╌╌╌╌╌╌┼╌╌╌╌╌╌╌╌╌┼╌╌╌╌╌╌╌╌
    4 │ →1 [0]  │ →2 [1]  │ →0 [2]
      │ ←2 [2]  │ ←0 [0]  │ ←1 [1]"""

EXSCAN = """\
exscan/recursive_doubling on 3 ranks, 2 rounds, 3 messages, at most 2 n sent per rank

round │ rank 0 │ rank 1 │ rank 2
──────┼────────┼────────┼──────────────
    1 │ →1 [0] │ →2 [0] │ ←1 [1]
      │        │ ←0 [1] │
╌╌╌╌╌╌┼╌╌╌╌╌╌╌╌┼╌╌╌╌╌╌╌╌┼╌╌╌╌╌╌╌╌╌╌╌╌╌╌
    2 │ →2 [0] │        │ ←0 [2]
      │        │        │ [1] = [2]+[1]"""

BARRIER = """\
barrier/dissemination on 2 ranks, 1 round, 2 messages

round │ rank 0 │ rank 1
──────┼────────┼───────
    1 │ →1     │ →0
      │ ←1     │ ←0"""


def test_text() -> None:
    assert draw("allreduce/ring", 3) == RING
    assert draw(get("exscan", "recursive_doubling"), 3) == EXSCAN
    assert draw("barrier/dissemination", 2) == BARRIER


def test_ranks_that_find_no_room_follow_below() -> None:
    whole = draw("allreduce/ring", 8)
    folded = draw("allreduce/ring", 8, width=40)
    assert max(map(len, whole.splitlines()[1:])) > 40
    assert max(map(len, folded.splitlines()[1:])) <= 40
    title, *parts = folded.split("\n\n")
    assert title == whole.splitlines()[0]
    rows = [[line.split("│")[1:] for line in part.splitlines() if "│" in line] for part in parts]
    beside = ["│".join(cell.rstrip() for part in row for cell in part) for row in zip(*rows, strict=True)]
    expected = ["│".join(cell.rstrip() for cell in line.split("│")[1:]) for line in whole.splitlines() if "│" in line]
    assert [line.rstrip("│") for line in beside] == [line.rstrip("│") for line in expected]
    assert draw("allreduce/ring", 3, width=1).count("round │") == 3  # one rank at least stands in each part


def test_runs_of_chunks_are_drawn_together() -> None:
    assert "→3 [7,0-2]" in draw("gather/binomial", 8, root=3)
    assert "→1 [1,3]" in draw("alltoall/bruck", 4)
    assert "[4] = [0]" in draw("alltoall/bruck", 4)


def test_segments_are_in_the_title() -> None:
    assert draw("bcast/chain", 2, segments=3).startswith("bcast/chain on 2 ranks, 3 segments, 3 rounds, 3 messages,")


@pytest.mark.parametrize("collective", collectives())
@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_message_is_in_the_text(collective: str, size: int) -> None:
    for algorithm in algorithms_of(collective).values():
        text = draw(algorithm, size)
        steps = [step for rank in range(size) for step in algorithm.steps(rank, size)]
        assert text.count("→") == sum(len(step.sends) for step in steps)
        assert text.count("←") == sum(len(step.recvs) for step in steps)
        assert text.count("=") == sum(len(step.then) for step in steps)


def test_deadlock_can_not_be_drawn() -> None:
    def generate(rank: int, size: int) -> Iterator[Round]:
        yield Round(recvs=(Recv(1 - rank),))

    with pytest.raises(ScheduleError, match="wait for ever"):
        draw(replace(get("barrier", "dissemination"), generate=generate), 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("allreduce/ring", 4),
        pytest.param("allreduce/halving_doubling", 8, marks=pytest.mark.long),
        pytest.param("bcast/binomial", 8, marks=pytest.mark.long),
        pytest.param("allgather/ring", 12, marks=pytest.mark.long),
        ("alltoall/bruck", 5),
        ("barrier/dissemination", 4),
        ("reduce/linear", 1),
    ],
)
def test_pictures(tmp_path: Path, name: str, size: int) -> None:
    pytest.importorskip("matplotlib")
    assert draw(name, size, file=tmp_path / "a.png") == draw(name, size, file=str(tmp_path / "a.svg"))
    png, svg = (tmp_path / "a.png").read_bytes(), (tmp_path / "a.svg").read_text()
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(png) > 5000
    assert "<svg" in svg


def test_the_same_schedule_gives_the_same_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for file in ("a.svg", "b.svg"):
        draw("allreduce/ring", 3, file=tmp_path / file)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_picture_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert draw("allreduce/ring", 3) == RING
    with pytest.raises(SetupError, match=r"pip install 'mpicoll\[plot\]'"):
        draw("allreduce/ring", 3, file=tmp_path / "a.png")
    assert not list(tmp_path.iterdir())
