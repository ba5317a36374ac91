"""The timeline of an algorithm, and the picture that is made of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest

from mpicoll.errors import ArgumentError, RankError, ScheduleError
from mpicoll.schedules import Algorithm, Recv, Round, algorithms_of, animate, collectives, cost, get
from mpicoll.schedules.specs import SPECS, Seat
from mpicoll.schedules.timeline import make_timeline

EVERY = [algorithm for collective in collectives() for algorithm in algorithms_of(collective).values()]
SVG = "{http://www.w3.org/2000/svg}"


def name_of(algorithm: Algorithm) -> str:
    return f"{algorithm.collective}-{algorithm.name}"


@pytest.mark.parametrize("algorithm", EVERY, ids=name_of)
def test_the_last_contents_are_those_promised(algorithm: Algorithm) -> None:
    """By the specification of the collective, which verify uses too."""
    segments = 3 if algorithm.segmented else 1
    for size in (1, 2, 3, 4, 7):
        timeline = make_timeline(algorithm, size, 0, segments)
        contents = [dict(one) for one in timeline.before]
        times = [change.time for change in timeline.changes]
        assert times == sorted(times)
        for change in timeline.changes:
            assert contents[change.rank].get(change.chunk, 0) != change.content
            contents[change.rank][change.chunk] = change.content
        pieces = timeline.chunks // 2 if algorithm.collective == "alltoall" else timeline.chunks
        for rank in range(size):
            promised = SPECS[algorithm.collective].after(Seat(rank, size, 0, pieces))
            assert {chunk: contents[rank].get(chunk) for chunk in promised} == {
                chunk: value.ranks for chunk, value in promised.items()
            }
        assert len(timeline.messages) == cost(algorithm, size, 0, segments).messages


@pytest.mark.parametrize("algorithm", EVERY, ids=name_of)
def test_picture(algorithm: Algorithm) -> None:
    """It is XML with a box for each chunk that is sent, without scripts or files from elsewhere."""
    text = animate(algorithm, 4, segments=3 if algorithm.segmented else 1)
    root = ET.fromstring(text)
    timeline = make_timeline(algorithm, 4, 0, 3 if algorithm.segmented else 1)
    boxes = sum(len(message.sent) or 1 for message in timeline.messages)
    assert len(root.findall(f"{SVG}g[@class='message']")) == boxes
    assert len(root.findall(f"{SVG}rect[@class='cell']")) == 4 * (timeline.chunks + timeline.scratch)
    assert not {one.tag for one in root.iter()} & {f"{SVG}script", f"{SVG}image", f"{SVG}animate"}
    assert "prefers-reduced-motion: reduce" in text
    assert "prefers-color-scheme: dark" in text
    frames = dict(re.findall(r"^@keyframes (\w+) \{ (.*) \}$", text, re.MULTILINE))
    assert set(re.findall(r"animation: (\w+) [\d.]+s linear infinite", text)) == set(frames)
    for frame in frames.values():
        parts = [float(part) for part in re.findall(r"([\d.]+)% \{", frame)]
        assert parts == sorted(parts)
        assert (parts[0], parts[-1]) == (0, 100)


def test_without_animation_the_result_is_seen() -> None:
    """Of all stripes, those are visible that are there at the end."""
    root = ET.fromstring(animate("bcast/binomial", 3))
    shown = [one for one in root.findall(f"{SVG}rect[@fill='#e69f00']") if one.get("opacity") != "0"]
    assert len(shown) == 1 + 3  # the head of rank 0, and its array on each rank
    root = ET.fromstring(animate("gather/linear", 3))
    assert [text.text for text in root.findall(f"{SVG}text") if text.get("class") is None] == ["after 1 round"]


def test_the_same_algorithm_gives_the_same_picture() -> None:
    assert animate("allreduce/ring", 4) == animate(get("allreduce", "ring"), 4)


def test_errors() -> None:
    with pytest.raises(ArgumentError, match="shows up to 16 ranks"):
        animate("allreduce/ring", 17)
    with pytest.raises(ArgumentError, match="moves 3840 chunks"):
        animate("bcast/chain", 16, segments=256)
    with pytest.raises(RankError):
        animate("bcast/chain", 4, root=4)

    def generate(rank: int, size: int) -> Iterator[Round]:
        yield Round(recvs=(Recv((rank + 1) % size, range(1)),))

    with pytest.raises(ScheduleError, match="wait for ever"):
        animate(replace(get("allreduce", "ring"), generate=generate), 2)
