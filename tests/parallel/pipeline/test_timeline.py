"""When stages do what: by hand for small pipelines, by longest paths for any, and by the papers' formulas."""

from __future__ import annotations

import random
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from itertools import pairwise

import pytest

from mpicoll.errors import AlgorithmError, ArgumentError, RankError, ScheduleError, ShapeError
from mpicoll.parallel.pipeline.schedules import Action, PipelineSchedule, actions, evaluate_closed_form, find
from mpicoll.parallel.pipeline.timeline import Span, Time, Timeline, timeline, timeline_from_events

ONE, TWO, NONE = Fraction(1), Fraction(2), Fraction(0)
BUILT_IN = ("gpipe", "1f1b", "interleaved", "zero_bubble", "looped_bfs", "forward_only")


def sizes(name: str) -> Iterator[tuple[int, int, int]]:
    for stages in range(1, 9):
        for microbatches in range(stages, 17, stages) if name == "interleaved" else range(1, 17):
            for chunks in range(1, 5 if find(name).chunked else 2):
                yield stages, microbatches, chunks


def exact(name: str, stages: int, microbatches: int, chunks: int = 1) -> Timeline:
    return timeline(name, stages, microbatches, chunks, forward=ONE, backward=TWO, send=NONE)


def spelled(drawn: Timeline) -> list[list[tuple[str, Time, Time]]]:
    return [[(str(span.action), span.begin, span.end) for span in spans] for spans in drawn.spans]


# --- by hand


def test_gpipe() -> None:
    drawn = timeline("gpipe", 2, 2)
    assert spelled(drawn) == [
        [("F0", 0, 1), ("F1", 1, 2), ("B0", 5, 7), ("B1", 7, 9)],
        [("F0", 1, 2), ("F1", 2, 3), ("B0", 3, 5), ("B1", 5, 7)],
    ]
    assert (drawn.name, drawn.stages, drawn.microbatches, drawn.chunks, drawn.measured) == ("gpipe", 2, 2, 1, False)
    assert (drawn.begin, drawn.makespan, drawn.busy, drawn.bubble) == (0, 9, (6, 6), pytest.approx(1 / 3))


def test_messages_take_time() -> None:
    assert spelled(timeline("1f1b", 2, 2, send=0.5)) == [
        [("F0", 0, 1), ("F1", 1, 2), ("B0", 5, 7), ("B1", 8, 10)],
        [("F0", 1.5, 2.5), ("B0", 2.5, 4.5), ("F1", 4.5, 5.5), ("B1", 5.5, 7.5)],
    ]


def test_stages_may_differ() -> None:
    assert spelled(timeline("1f1b", 2, 2, forward=[1, 3], backward=(2, 4))) == [
        [("F0", 0, 1), ("F1", 1, 2), ("B0", 8, 10), ("B1", 15, 17)],
        [("F0", 1, 4), ("B0", 4, 8), ("F1", 8, 11), ("B1", 11, 15)],
    ]


def test_halves() -> None:
    by_default = timeline("zero_bubble", 2, 1, forward=3, backward=4)
    assert spelled(by_default) == [
        [("F0", 0, 3), ("I0", 8, 10), ("W0", 10, 12)],
        [("F0", 3, 6), ("I0", 6, 8), ("W0", 8, 10)],
    ]
    assert timeline("zero_bubble", 2, 1, forward=3, backward_input=2, backward_weight=2) == by_default
    assert spelled(timeline("zero_bubble", 1, 1, forward=3, backward=[4], backward_input=3)) == [
        [("F0", 0, 3), ("I0", 3, 6), ("W0", 6, 7)]
    ]
    assert spelled(timeline("zero_bubble", 1, 1, forward=3, backward=4, backward_weight=[5])) == [
        [("F0", 0, 3), ("I0", 3, 5), ("W0", 5, 10)]
    ]


def test_chunks_share_the_time_of_their_stage() -> None:
    assert spelled(timeline("looped_bfs", 2, 1, 2, forward=ONE, backward=TWO, send=Fraction(1, 4))) == [
        [
            ("F0", 0, Fraction(1, 2)),
            ("F0 of chunk 1", Fraction(3, 2), 2),
            ("B0 of chunk 1", 4, 5),
            ("B0", Fraction(13, 2), Fraction(15, 2)),
        ],
        [
            ("F0", Fraction(3, 4), Fraction(5, 4)),
            ("F0 of chunk 1", Fraction(9, 4), Fraction(11, 4)),
            ("B0 of chunk 1", Fraction(11, 4), Fraction(15, 4)),
            ("B0", Fraction(21, 4), Fraction(25, 4)),
        ],
    ]


def test_chunks_of_one_stage_send_no_messages() -> None:
    assert timeline("interleaved", 1, 3, 2, send=100).makespan == 9
    assert timeline("interleaved", 1, 3, 2, send=100).bubble == 0


# --- by longest paths


def longest(
    name: str, stages: int, microbatches: int, chunks: int, costs: dict[str, list[Fraction]], send: Fraction
) -> dict[tuple[int, Action], Fraction]:
    """The end of each action: the longest path to it through all that must come before."""
    script = [actions(name, stage, stages, microbatches, chunks) for stage in range(stages)]
    previous = {(s, b): a for s, order in enumerate(script) for a, b in pairwise(order)}

    @cache
    def end(stage: int, action: Action) -> Fraction:
        ready = [end(stage, previous[stage, action])] if (stage, action) in previous else [NONE]
        virtual = action.chunk * stages + stage + {"F": -1, "W": stages * chunks}.get(action.kind, 1)
        if 0 <= virtual < stages * chunks:
            late = send if stages > 1 else NONE
            ready.append(end(virtual % stages, Action(action.kind, action.microbatch, virtual // stages)) + late)
        return max(ready) + costs[action.kind][stage] / chunks

    return {(stage, action): end(stage, action) for stage in range(stages) for action in script[stage]}


@pytest.mark.parametrize("name", BUILT_IN)
def test_any_costs(name: str) -> None:
    some = random.Random(5)
    for stages, microbatches, chunks in [(1, 3, 2), (2, 2, 2), (3, 6, 3), (4, 8, 1), (5, 5, 2)]:
        chunks = chunks if find(name).chunked else 1
        costs = {kind: [Fraction(some.randrange(12), 4) for _ in range(stages)] for kind in "FBIW"}
        send = Fraction(some.randrange(8), 5)
        drawn = timeline(
            name,
            stages,
            microbatches,
            chunks,
            forward=costs["F"],
            backward=costs["B"],
            backward_input=costs["I"],
            backward_weight=costs["W"],
            send=send,
        )
        want = longest(name, stages, microbatches, chunks, costs, send)
        assert {(s, span.action): span.end for s, spans in enumerate(drawn.spans) for span in spans} == want
        assert all(
            span.end - span.begin == costs[span.action.kind][stage] / chunks
            for stage, spans in enumerate(drawn.spans)
            for span in spans
        )
        assert drawn.makespan == max(want.values()) - drawn.begin
        idle = sum(drawn.makespan - busy for busy in drawn.busy)
        assert drawn.bubble * drawn.makespan * stages == idle


# --- by formulas

BUBBLES = {
    "gpipe": lambda p, m, v: Fraction(p - 1, m + p - 1),
    "1f1b": lambda p, m, v: Fraction(p - 1, m + p - 1),
    "interleaved": lambda p, m, v: Fraction(p - 1, v * m + p - 1),
    # Enough micro-batches to fill the pipeline, or else each W of the first stage comes behind all else.
    "zero_bubble": lambda p, m, v: Fraction(p - 1, 3 * m + p - 1) if m >= p else 1 - Fraction(3 * m, 2 * m + 2 * p - 1),
    # With fewer micro-batches than stages, a chunk's first output comes back later than its last input leaves.
    "looped_bfs": lambda p, m, v: 1 - Fraction(v * m, v * m + p - 1 if m >= p else v * p + m - 1),
    "forward_only": lambda p, m, v: 1 - Fraction(v * m, v * m + p - 1 if m >= p else v * p + m - 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILT_IN)
def test_bubble_is_that_of_the_closed_form(name: str) -> None:
    for p, m, v in sizes(name):
        assert exact(name, p, m, v).bubble == evaluate_closed_form(name, p, m, v)[0] == BUBBLES[name](p, m, v), (
            p,
            m,
            v,
        )


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name != "zero_bubble"])
@pytest.mark.parametrize(("forward", "backward"), [(Fraction(5), Fraction(3)), (Fraction(1, 7), Fraction(2, 5))])
def test_bubble_does_not_depend_on_costs(name: str, forward: Fraction, backward: Fraction) -> None:
    for p, m, v in [(1, 2, 2), (2, 2, 3), (4, 8, 4), (5, 15, 2), (3, 3, 1), (8, 16, 2)]:
        v = v if find(name).chunked else 1
        assert timeline(name, p, m, v, forward=forward, backward=backward, send=NONE).bubble == BUBBLES[name](p, m, v)


def test_zero_bubble_for_other_costs() -> None:
    """Table 2 of the paper: each stage idles for (p - 1)(F + I - W), while W is neither longer than F nor than I."""
    for p, m in [(2, 4), (4, 8), (4, 12), (6, 12), (8, 16)]:
        for f in range(1, 5):
            for i in range(1, 5):
                for w in range(1, min(f, i) + 1):
                    costs = {"forward": Fraction(f), "backward_input": Fraction(i), "backward_weight": Fraction(w)}
                    drawn = timeline("zero_bubble", p, m, send=NONE, **costs)
                    assert drawn.makespan - m * (f + i + w) == (p - 1) * (f + i - w)


def test_overhead_of_the_papers() -> None:
    for p, m in [(4, 8), (8, 3)]:
        bubble = exact("gpipe", p, m).bubble
        assert bubble / (1 - bubble) == Fraction(p - 1, m)


def test_better_schedules_are_faster() -> None:
    spans = [
        exact("1f1b", 4, 8).makespan,
        exact("interleaved", 4, 8, 2).makespan,
        exact("interleaved", 4, 8, 4).makespan,
    ]
    assert spans == [33, Fraction(57, 2), Fraction(105, 4)]
    assert exact("zero_bubble", 4, 8).makespan == 27
    assert exact("gpipe", 4, 8).makespan == 33


@pytest.mark.parametrize(
    "costs", [{"forward": 1, "backward": 2, "send": 0}, {"forward": ONE, "backward": [2] * 4, "send": 0}]
)
def test_whole_numbers_are_exact_too(costs: dict[str, Time]) -> None:
    drawn = timeline("interleaved", 4, 8, 3, **costs)
    assert drawn.bubble == Fraction(3, 27)
    assert isinstance(drawn.bubble, Fraction)


# --- arguments


def test_wrong_arguments() -> None:
    with pytest.raises(AlgorithmError, match="unknown pipeline schedule 'ring'"):
        timeline("ring", 4, 8)
    with pytest.raises(AlgorithmError, match="stages must be at least 1, got 0"):
        timeline("1f1b", 0, 8)
    with pytest.raises(ShapeError, match="forward must be one time, or one for each of 4 stages, got 3"):
        timeline("1f1b", 4, 8, forward=[1, 2, 3])
    with pytest.raises(ShapeError, match="backward_weight must be one time, or one for each of 4 stages, got 5"):
        timeline("1f1b", 4, 8, backward_weight=[1] * 5)
    with pytest.raises(ArgumentError, match=r"backward must not be negative, got -0\.5"):
        timeline("1f1b", 4, 8, backward=[1, 1, -0.5, 1])
    with pytest.raises(ArgumentError, match="backward_weight must not be negative, got -1"):
        timeline("zero_bubble", 4, 8, backward=2, backward_input=3)
    with pytest.raises(ArgumentError, match="send must not be negative, got -1"):
        timeline("1f1b", 4, 8, send=-1)


def test_a_deadlock_has_no_times() -> None:
    def generate(stage: int, stages: int, microbatches: int) -> Iterator[Action]:
        order = (Action("F", 0), Action("F", 1), Action("B", 0), Action("B", 1))
        yield from order if stage else (order[0], order[2], order[1], order[3])

    broken = PipelineSchedule("broken", generate, False, True, False, None, None, "", "")
    with pytest.raises(ScheduleError, match="broken, stages 2, microbatches 2: deadlock of stage 0 at position 1, B0"):
        timeline(broken, 2, 2)


# --- measured


def events_of(drawn: Timeline, late: float = 0.0) -> list[tuple[int, Action, float, float]]:
    events = [
        (stage, span.action, span.begin + late, span.end + late)
        for stage, spans in enumerate(drawn.spans)
        for span in spans
    ]
    random.Random(3).shuffle(events)
    return events


@pytest.mark.parametrize("name", BUILT_IN)
def test_measured_gives_what_happened(name: str) -> None:
    want = timeline(name, 3, 6, 2 if find(name).chunked else 1, forward=[1, 2, 3], backward=[4, 2, 4], send=0.5)
    got = timeline_from_events(events_of(want, late=1024.0), name)
    assert got == Timeline(name, want.spans, measured=True)
    assert (got.makespan, got.bubble) == (want.makespan, want.bubble)


def test_measured_by_hand() -> None:
    a, b = Action("F", 0), Action("B", 0)
    got = timeline_from_events([(1, a, 12.0, 13.0), (0, a, 10.0, 11.5), (1, b, 13.0, 15.0), (0, b, 15.5, 18.0)])
    assert got.spans == (
        (Span(a, 0.0, 1.5), Span(b, 5.5, 8.0)),
        (Span(a, 2.0, 3.0), Span(b, 3.0, 5.0)),
    )
    assert (got.name, got.measured, got.makespan, got.busy) == ("pipeline", True, 8.0, (4.0, 3.0))
    assert got.bubble == 1 - 7 / 16


def test_a_stage_without_events_idles() -> None:
    got = timeline_from_events([(2, Action("F", 0), 3.0, 4.0)])
    assert got.spans == ((), (), (Span(Action("F", 0), 0.0, 1.0),))
    assert (got.stages, got.makespan, got.busy) == (3, 1.0, (0, 0, 1.0))
    assert got.bubble == pytest.approx(2 / 3)


def test_a_clock_that_stands_still() -> None:
    got = timeline_from_events([(0, Action("F", 0), 3.0, 3.0), (1, Action("F", 0), 3.0, 3.0)])
    assert (got.makespan, got.bubble) == (0.0, 0)


def test_wrong_events() -> None:
    with pytest.raises(ArgumentError, match="pass at least one event, got none"):
        timeline_from_events([])
    with pytest.raises(RankError, match="a stage must be at least 0, got -1 for F3"):
        timeline_from_events([(-1, Action("F", 3), 0.0, 1.0)])
    with pytest.raises(ArgumentError, match=r"F3 on stage 1 ends at 1\.0, before it begins at 2\.0"):
        timeline_from_events([(1, Action("F", 3), 2.0, 1.0)])
    with pytest.raises(ArgumentError, match="B3 on stage 0 begins before F3 ends there"):
        timeline_from_events([(0, Action("B", 3), 1.5, 3.0), (0, Action("F", 3), 0.0, 2.0)])
