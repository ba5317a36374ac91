from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from mpicoll.errors import AlgorithmError, ArgumentError, ScheduleError, SetupError
from mpicoll.parallel.pipeline.draw import draw
from mpicoll.parallel.pipeline.schedules import Action, find
from mpicoll.parallel.pipeline.timeline import Timeline, timeline, timeline_from_events

ONE_F_ONE_B = """\
1f1b on 3 stages, 4 micro-batches, bubble 1/3 = 33.3 %

stage 0 │░0░1░2········▓▓▓0░3▓▓▓1··▓▓▓2··▓▓▓3
stage 1 │··░0░1····▓▓▓0░2▓▓▓1░3▓▓▓2··▓▓▓3····
stage 2 │····░0▓▓▓0░1▓▓▓1░2▓▓▓2░3▓▓▓3········

░ forward   ▓ backward   · idle"""

ZERO_BUBBLE = """\
zero_bubble on 3 stages, 4 micro-batches, bubble 1/7 = 14.3 %

stage 0 │░0░1░2····▒0█0░3▒1█1▒2█2▒3█3
stage 1 │··░0░1··▒0░2▒1█0░3▒2█1▒3█2█3
stage 2 │····░0▒0░1▒1░2▒2█0░3▒3█1█2█3

░ forward   ▒ backward for the input   █ backward for the weights   · idle"""

INTERLEAVED = """\
interleaved on 2 stages, 2 micro-batches, 2 chunks per stage, bubble 1/5 = 20.0 %

stage 0 │░0a░1a░0b░1b······▓▓▓▓0b···▓▓▓▓1b▓▓▓▓0a▓▓▓▓1a
stage 1 │···░0a░1a░0b▓▓▓▓0b░1b▓▓▓▓1b▓▓▓▓0a▓▓▓▓1a······

░ forward   ▓ backward   · idle   a-b chunks"""

SIZES = [
    ("gpipe", 4, 8, 1),
    ("1f1b", 4, 12, 1),
    ("interleaved", 4, 8, 2),
    ("zero_bubble", 8, 2, 1),
    ("looped_bfs", 3, 4, 3),
    ("forward_only", 2, 5, 2),
    ("1f1b", 1, 1, 1),
]


def rows(text: str) -> list[str]:
    return [line.partition("│")[2] for line in text.splitlines() if "│" in line]


def test_text() -> None:
    assert draw("1f1b", 3, 4) == ONE_F_ONE_B
    assert draw(find("zero_bubble"), 3, 4) == ZERO_BUBBLE


def test_chunks_are_letters() -> None:
    assert draw("interleaved", 2, 2, 2) == INTERLEAVED


@pytest.mark.parametrize(("name", "stages", "microbatches", "chunks"), SIZES)
def test_every_action_is_in_the_text(name: str, stages: int, microbatches: int, chunks: int) -> None:
    """Each number ends a block of its kind, and rows are the actions in their order."""
    one = Fraction(1)
    drawn = timeline(name, stages, microbatches, chunks, forward=one, backward=2 * one, send=0 * one)
    text = draw(name, stages, microbatches, chunks, width=1000)
    assert text == draw(drawn, width=1000)
    kinds = {"░": "F", "▓": "B", "▒": "I", "█": "W"}
    for row, spans in zip(rows(text), drawn.spans, strict=True):
        want = [f"{span.action.kind}{span.action.microbatch}{'abc'[span.action.chunk]}" for span in spans]
        got = []
        kind = ""
        for mark, following in zip(row, row[1:] + "·", strict=True):
            if mark in kinds:
                kind = kinds[mark]
            elif mark != "·":
                if kind:
                    got.append(kind)
                    kind = ""
                got[-1] += mark
                if chunks == 1 and not following.isdigit():
                    got[-1] += "a"
        assert got == want
    assert len({len(row) for row in rows(text)}) == 1


def test_idle_time_is_dots() -> None:
    for row in rows(draw("gpipe", 5, 7)):
        assert row.count("·") / len(row) == 4 / 11


def test_heads_are_as_wide_as_the_widest() -> None:
    lines = draw("forward_only", 11, 1).splitlines()
    assert lines[2].startswith("stage 0  │░0·")
    assert lines[12].endswith("·░0")
    assert lines[12].startswith("stage 10 │··")


def test_width_is_kept_and_numbers_left_out() -> None:
    text = draw("interleaved", 4, 32, 2, width=100)
    assert max(map(len, text.splitlines())) == 100
    assert not any(mark.isalnum() for row in rows(text) for mark in row)
    assert "chunks per stage" in text
    assert "a-b chunks" not in text
    assert max(len(line) for line in draw("gpipe", 4, 40).splitlines()) == 180
    # There is room for the numbers of longer actions only.
    assert set("".join(rows(draw("gpipe", 2, 8, width=40)))) == set("░▓·01234567")


def test_an_action_that_takes_no_time_is_not_seen() -> None:
    text = draw(timeline("zero_bubble", 1, 2, forward=2, backward_input=1, backward_weight=0))
    assert rows(text) == ["░░░0▒0░░░1▒1"]


def test_timelines_of_other_costs() -> None:
    text = draw(timeline("1f1b", 2, 2, forward=[1.0, 2.0], backward=1.0, send=0.5))
    assert text.startswith("1f1b on 2 stages, 2 micro-batches, bubble 44.4 %\n")
    assert rows(text) == ["░0░1······▓0····▓1", "···░░░0▓0░░░1▓1···"]


def events(scale: float) -> list[tuple[int, Action, float, float]]:
    return [
        (0, Action("F", 0), 100 + 0.0, 100 + 1.0 * scale),
        (1, Action("F", 0), 100 + 1.5 * scale, 100 + 2.5 * scale),
        (1, Action("B", 0), 100 + 2.5 * scale, 100 + 4.5 * scale),
        (0, Action("B", 0), 100 + 5.0 * scale, 100 + 8.0 * scale),
    ]


@pytest.mark.parametrize(("scale", "time"), [(1.0, "8 s"), (0.015625, "125 ms"), (2**-20, "7.63 µs")])
def test_measured(scale: float, time: str) -> None:
    assert draw(timeline_from_events(events(scale), "mine")) == (
        f"mine on 2 stages, 1 micro-batch, measured {time}, bubble 56.2 %\n\n"
        "stage 0 │░0········▓▓▓▓▓0\n"
        "stage 1 │···░0▓▓▓0·······\n\n"
        "░ forward   ▓ backward   · idle"
    )


def test_a_clock_that_stands_still() -> None:
    text = draw(timeline_from_events([(1, Action("F", 0), 1.0, 1.0)]))
    assert text.startswith("pipeline on 2 stages, 1 micro-batch, measured 0 µs, bubble 0.0 %")
    assert rows(text) == ["", ""]


def test_wrong_arguments() -> None:
    with pytest.raises(ArgumentError, match="a schedule is drawn for given stages and microbatches"):
        draw("1f1b", 4)
    with pytest.raises(ArgumentError, match="a schedule is drawn for given stages and microbatches"):
        draw("1f1b", microbatches=8)
    for numbers in ({"stages": 4}, {"microbatches": 4}, {"chunks": 2}):
        with pytest.raises(ArgumentError, match="a timeline has its own stages"):
            draw(timeline("1f1b", 2, 2), **numbers)
    with pytest.raises(ArgumentError, match="width must be at least 40 columns, got 39"):
        draw("1f1b", 4, 8, width=39)
    with pytest.raises(AlgorithmError, match="unknown pipeline schedule 'ring'"):
        draw("ring", 4, 8)
    with pytest.raises(AlgorithmError, match="must be a multiple"):
        draw("interleaved", 4, 6)


def test_deadlock_can_not_be_drawn() -> None:
    def generate(stage: int, stages: int, microbatches: int) -> Iterator[Action]:
        yield Action("B" if stage == 0 else "F", 0)

    with pytest.raises(ScheduleError, match="deadlock"):
        draw(replace(find("gpipe"), generate=generate), 2, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stages", "microbatches", "chunks"),
    [
        pytest.param(*row, marks=[] if row[0] in ("interleaved", "zero_bubble", "forward_only") else pytest.mark.long)
        for row in SIZES
    ],
)
def test_pictures(tmp_path: Path, name: str, stages: int, microbatches: int, chunks: int) -> None:
    pytest.importorskip("matplotlib")
    texts = {
        draw(name, stages, microbatches, chunks, tmp_path / "a.png"),
        draw(name, stages, microbatches, chunks, str(tmp_path / "a.svg")),
        draw(name, stages, microbatches, chunks),
    }
    assert len(texts) == 1
    png, svg = (tmp_path / "a.png").read_bytes(), (tmp_path / "a.svg").read_text()
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(png) > 5000
    assert "<svg" in svg


def written_in(drawn: Timeline, file: Path) -> list[str]:
    """All texts in a picture, in the order in which they are drawn."""
    matplotlib = pytest.importorskip("matplotlib")
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw(drawn, file=file)
    return [part.partition(">")[2].partition("<")[0] for part in file.read_text().split("<text ")[1:]]


def test_what_a_picture_says(tmp_path: Path) -> None:
    texts = written_in(timeline("interleaved", 2, 4, 2), tmp_path / "a.svg")
    for microbatch in "0123":
        assert texts.count(microbatch) >= 2 * 2 * 2  # forward and backward, of two chunks, on two stages
    for text in ("stage 0", "stage 1", "time", "forward", "backward", "idle", "chunk 0", "chunk 1"):
        assert texts.count(text) == 1
    assert "interleaved on 2 stages" in texts
    assert "4 micro-batches, 2 chunks per stage, bubble 11.1 %" in texts


def test_what_a_picture_of_a_real_run_says(tmp_path: Path) -> None:
    texts = written_in(timeline_from_events(events(0.015625)), tmp_path / "a.svg")
    assert "pipeline on 2 stages" in texts
    assert "1 micro-batch, measured 125 ms, bubble 56.2 %" in texts
    assert "milliseconds" in texts
    assert "100" in texts  # of the axis, which begins at 0 whatever the clock says
    assert "100000" not in texts


def test_a_picture_leaves_out_numbers_that_do_not_fit(tmp_path: Path) -> None:
    texts = written_in(timeline("gpipe", 1, 200), tmp_path / "a.svg")
    assert "150" not in texts
    assert "7" not in texts


def test_a_picture_of_nothing(tmp_path: Path) -> None:
    assert "stage 1" in written_in(timeline_from_events([(1, Action("F", 0), 1.0, 1.0)]), tmp_path / "a.svg")


@pytest.mark.slow
def test_the_same_timeline_gives_the_same_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for suffix in ("svg", "png"):
        for name in "ab":
            draw("zero_bubble", 3, 4, file=tmp_path / f"{name}.{suffix}")
        assert (tmp_path / f"a.{suffix}").read_bytes() == (tmp_path / f"b.{suffix}").read_bytes()


def test_picture_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert draw("1f1b", 3, 4) == ONE_F_ONE_B
    with pytest.raises(SetupError, match=r"pip install 'mpicoll\[plot\]'"):
        draw("1f1b", 3, 4, file=tmp_path / "a.png")
    assert not list(tmp_path.iterdir())
