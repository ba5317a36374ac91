"""The schedules of the literature, action by action, and what the registry promises."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from fractions import Fraction

import pytest

from mpicoll.errors import AlgorithmError, RankError
from mpicoll.parallel.pipeline import schedules
from mpicoll.parallel.pipeline.schedules import (
    Action,
    actions,
    dest,
    evaluate_closed_form,
    find,
    peak_activations,
    register,
    schedule,
    source,
)

BUILT_IN = ("gpipe", "1f1b", "interleaved", "zero_bubble", "looped_bfs", "forward_only")


def written(script: tuple[Action, ...]) -> str:
    """``F3`` is of chunk 0, ``F3b`` of chunk 1."""
    return " ".join(f"{action.kind}{action.microbatch}{' bcd'[action.chunk].strip()}" for action in script)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a test registers is gone after it."""
    monkeypatch.setattr(schedules, "_REGISTRY", schedules.schedules())


def test_actions_are_values() -> None:
    assert Action("F", 3) == Action("F", 3, 0)
    assert len({Action("F", 3), Action("F", 3), Action("B", 3), Action("F", 3, 1)}) == 3
    assert str(Action("I", 12)) == "I12"
    assert str(Action("F", 0, 2)) == "F0 of chunk 2"
    with pytest.raises(FrozenInstanceError):
        Action("F", 3).microbatch = 4  # type: ignore[misc]


def test_gpipe() -> None:
    for stage in range(3):
        assert written(actions("gpipe", stage, 3, 4)) == "F0 F1 F2 F3 B0 B1 B2 B3"


def test_1f1b() -> None:
    assert [written(script) for script in schedule("1f1b", 4, 6)] == [
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5",
    ]


def test_1f1b_with_fewer_micro_batches_than_stages() -> None:
    assert [written(script) for script in schedule("1f1b", 4, 2)] == [
        "F0 F1 B0 B1",
        "F0 F1 B0 B1",
        "F0 F1 B0 B1",
        "F0 B0 F1 B1",
    ]


def test_interleaved() -> None:
    assert [written(script) for script in schedule("interleaved", 2, 4, 2)] == [
        "F0 F1 F0b F1b F2 B0b F3 B1b F2b B0 F3b B1 B2b B3b B2 B3",
        "F0 F1 F0b B0b F1b B1b F2 B0 F3 B1 F2b B2b F3b B3b B2 B3",
    ]


@pytest.mark.parametrize("stages", range(1, 9))
@pytest.mark.parametrize("chunks", range(1, 5))
def test_interleaved_is_megatrons(stages: int, chunks: int) -> None:
    """The k-th forward and backward, and how many forwards come first, as the paper's authors compute them."""
    for microbatches in range(stages, 17, stages):
        total = microbatches * chunks

        def virtual(k: int, chunks: int = chunks) -> tuple[int, int]:
            group, within = divmod(k, stages * chunks)
            return group * stages + within % stages, within // stages

        for stage in range(stages):
            warm = min((stages - stage - 1) * 2 + (chunks - 1) * stages, total)
            order = ["F"] * warm + ["F", "B"] * (total - warm) + ["B"] * warm
            script = actions("interleaved", stage, stages, microbatches, chunks)
            assert [action.kind for action in script] == order
            forwards = [(action.microbatch, action.chunk) for action in script if action.kind == "F"]
            backwards = [(action.microbatch, chunks - 1 - action.chunk) for action in script if action.kind == "B"]
            assert forwards == backwards == [virtual(k) for k in range(total)]


def test_zero_bubble() -> None:
    assert [written(script) for script in schedule("zero_bubble", 4, 8)] == [
        "F0 F1 F2 F3 I0 W0 F4 I1 W1 F5 I2 W2 F6 I3 W3 F7 I4 W4 I5 W5 I6 W6 I7 W7",
        "F0 F1 F2 I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 F6 I4 W3 F7 I5 W4 I6 W5 I7 W6 W7",
        "F0 F1 I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 F6 I5 W3 F7 I6 W4 I7 W5 W6 W7",
        "F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 F6 I6 W3 F7 I7 W4 W5 W6 W7",
    ]


def test_zero_bubble_is_1f1b_with_weights_put_off() -> None:
    for stages in range(1, 9):
        for microbatches in range(1, 17):
            for stage in range(stages):
                split = [action for action in actions("zero_bubble", stage, stages, microbatches) if action.kind != "W"]
                whole = actions("1f1b", stage, stages, microbatches)
                assert written(tuple(split)) == written(whole).replace("B", "I")


def test_looped_bfs() -> None:
    for stage in range(2):
        assert written(actions("looped_bfs", stage, 2, 3, 2)) == "F0 F1 F2 F0b F1b F2b B0b B1b B2b B0 B1 B2"


def test_looped_bfs_with_one_chunk_is_gpipe() -> None:
    assert schedule("looped_bfs", 3, 5) == schedule("gpipe", 3, 5)


def test_forward_only() -> None:
    for stage in range(2):
        assert written(actions("forward_only", stage, 2, 3)) == "F0 F1 F2"
        assert written(actions("forward_only", stage, 2, 5, 2)) == "F0 F1 F0b F1b F2 F3 F4 F2b F3b F4b"
        assert written(actions("forward_only", stage, 2, 1, 2)) == "F0 F0b"


@pytest.mark.parametrize("name", BUILT_IN)
def test_gradients_are_summed_in_the_order_of_micro_batches(name: str) -> None:
    """So schedules agree to the last bit: floating point sums depend on their order."""
    for chunks in (1, 3) if find(name).chunked else (1,):
        for stage, script in enumerate(schedule(name, 4, 8, chunks)):
            for chunk in range(chunks):
                summed = [one.microbatch for one in script if one.kind in "BW" and one.chunk == chunk]
                assert summed == (list(range(8)) if find(name).backward else []), stage


@pytest.mark.parametrize("name", BUILT_IN)
def test_one_stage_has_no_bubble_and_works_in_any_case(name: str) -> None:
    assert evaluate_closed_form(name, 1, 3)[0] == 0
    assert len(actions(name, 0, 1, 1)) == {"zero_bubble": 3, "forward_only": 1}.get(name, 2)


def test_source_and_dest() -> None:
    forward, backward, split, weights = (Action(kind, 5, 1) for kind in ("F", "B", "I", "W"))
    assert (source(forward, 1, 4, 3), dest(forward, 1, 4, 3)) == ((0, 1), (2, 1))
    assert (source(backward, 1, 4, 3), dest(backward, 1, 4, 3)) == ((2, 1), (0, 1))
    assert (source(split, 1, 4, 3), dest(split, 1, 4, 3)) == ((2, 1), (0, 1))
    assert (source(weights, 1, 4, 3), dest(weights, 1, 4, 3)) == (None, None)
    # From the last stage to the first, into the next chunk, and back.
    assert (source(forward, 0, 4, 3), dest(forward, 3, 4, 3)) == ((3, 0), (0, 2))
    assert (source(backward, 3, 4, 3), dest(backward, 0, 4, 3)) == ((0, 2), (3, 0))


def test_the_ends_of_the_pipeline_have_no_neighbour() -> None:
    assert source(Action("F", 0), 0, 4) is None
    assert dest(Action("F", 0), 3, 4) is None
    assert source(Action("B", 0), 3, 4) is None
    assert dest(Action("I", 0), 0, 4) is None
    assert dest(Action("F", 0, 2), 3, 4, 3) is None
    assert source(Action("I", 0, 2), 3, 4, 3) is None


def test_chunks_of_a_single_stage_are_neighbours() -> None:
    assert (source(Action("F", 0, 1), 0, 1, 3), dest(Action("F", 0, 1), 0, 1, 3)) == ((0, 0), (0, 2))
    assert (source(Action("B", 0, 1), 0, 1, 3), dest(Action("B", 0, 1), 0, 1, 3)) == ((0, 2), (0, 0))
    assert source(Action("F", 0), 0, 1) is None


@pytest.mark.parametrize("kind", ["F", "B", "I"])
@pytest.mark.parametrize("chunks", range(1, 5))
@pytest.mark.parametrize("stages", range(1, 9))
def test_dest_undoes_source(stages: int, chunks: int, kind: schedules.ActionKind) -> None:
    alone = []
    for stage in range(stages):
        for chunk in range(chunks):
            origin = source(Action(kind, 0, chunk), stage, stages, chunks)
            if origin is None:
                alone.append((stage, chunk))
            else:
                assert dest(Action(kind, 0, origin[1]), origin[0], stages, chunks) == (stage, chunk)
                assert origin[0] == (stage - 1 if kind == "F" else stage + 1) % stages
    assert alone == [(0, 0) if kind == "F" else (stages - 1, chunks - 1)]


PEAKS = {
    "gpipe": lambda s, p, m, v: m,
    "1f1b": lambda s, p, m, v: min(m, p - s),
    "interleaved": lambda s, p, m, v: min(m * v, 2 * (p - s - 1) + (v - 1) * p + 1),
    "zero_bubble": lambda s, p, m, v: min(m, p),
    "looped_bfs": lambda s, p, m, v: m * v,
    "forward_only": lambda s, p, m, v: 0,
}


@pytest.mark.parametrize("name", BUILT_IN)
def test_peak_of_activations(name: str) -> None:
    for p in range(1, 9):
        for m in range(p, 17, p) if name == "interleaved" else range(1, 17):
            for v in range(1, 5 if find(name).chunked else 2):
                want = tuple(PEAKS[name](s, p, m, v) for s in range(p))
                assert peak_activations(name, p, m, v) == evaluate_closed_form(name, p, m, v)[1] == want


def test_zero_bubble_needs_no_more_memory_than_1f1b() -> None:
    assert max(peak_activations("zero_bubble", 4, 8)) == max(peak_activations("1f1b", 4, 8)) == 4


def test_schedules_are_built_once() -> None:
    assert actions("1f1b", 1, 4, 8) is actions(find("1f1b"), 1, 4, 8, 1)
    assert schedule("1f1b", 4, 8)[1] is actions("1f1b", 1, 4, 8)


def test_all_are_there() -> None:
    assert tuple(schedules.schedules()) == BUILT_IN
    for name, one in schedules.schedules().items():
        assert one.name == name
        assert one.doc
        assert one.bubble
        assert one.peak
        assert bool(one.source) == one.backward
    assert {name for name in BUILT_IN if find(name).splits} == {"zero_bubble"}
    schedules.schedules().clear()
    assert tuple(schedules.schedules()) == BUILT_IN


@pytest.mark.parametrize(
    "call", [lambda *a: actions(a[0], 0, *a[1:]), schedule, peak_activations, evaluate_closed_form]
)
def test_wrong_arguments(call) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(
        AlgorithmError,
        match=r"unknown pipeline schedule '2f2b'; the registered schedules are gpipe, 1f1b",
    ):
        call("2f2b", 4, 8)
    with pytest.raises(AlgorithmError, match="pipeline schedule 1f1b: stages must be at least 1, got 0"):
        call("1f1b", 0, 8)
    with pytest.raises(AlgorithmError, match="pipeline schedule gpipe: microbatches must be at least 1, got 0"):
        call("gpipe", 4, 0)
    with pytest.raises(AlgorithmError, match="pipeline schedule looped_bfs: chunks must be at least 1, got -1"):
        call("looped_bfs", 4, 8, -1)
    with pytest.raises(
        AlgorithmError,
        match="1f1b has one chunk per stage, got chunks=2; use one of interleaved, looped_bfs, forward_only",
    ):
        call("1f1b", 4, 8, 2)
    with pytest.raises(
        AlgorithmError,
        match=r"interleaved: the number of micro-batches, 6, must be a multiple of the number of stages, 4; looped_bfs",
    ):
        call("interleaved", 4, 6, 2)


@pytest.mark.parametrize("stage", [-1, 4])
def test_no_such_stage(stage: int) -> None:
    with pytest.raises(RankError, match=rf"pipeline schedule 1f1b: stage {stage} must be in \[0, 4\)"):
        actions("1f1b", stage, 4, 8)


def eager(stage: int, stages: int, microbatches: int) -> Iterator[Action]:
    """GPipe under another name."""
    for microbatch in range(microbatches):
        yield Action("F", microbatch)
    for microbatch in range(microbatches):
        yield Action("B", microbatch)


@pytest.mark.usefixtures("registry")
def test_registering() -> None:
    assert register(bubble="(p-1) / m", source="this test")(eager) is eager
    one = find("eager")
    assert (one.name, one.generate, one.chunked, one.backward, one.splits) == ("eager", eager, False, True, False)
    assert (one.bubble, one.peak, one.source, one.doc) == ("(p-1) / m", None, "this test", eager.__doc__)
    assert actions("eager", 1, 2, 2) == actions("gpipe", 1, 2, 2)
    assert evaluate_closed_form("eager", 3, 4) == (Fraction(1, 2), None)
    register(name="eager2", peak="s + p")(eager)
    assert evaluate_closed_form("eager2", 2, 4) == (None, (2, 3))


@pytest.mark.usefixtures("registry")
def test_registering_again_replaces() -> None:
    before = actions("1f1b", 1, 2, 2)
    register(name="1f1b")(eager)
    assert actions("1f1b", 1, 2, 2) == actions("gpipe", 1, 2, 2) != before


def test_what_a_test_registers_is_gone() -> None:
    assert "eager" not in schedules.schedules()
    assert written(actions("1f1b", 1, 2, 2)) == "F0 B0 F1 B1"
