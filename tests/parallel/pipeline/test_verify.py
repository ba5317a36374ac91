"""The verifier passes what is right and finds what is wrong: in schedules broken by hand, and in ours broken anyhow."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError, replace
from graphlib import CycleError, TopologicalSorter

import pytest

from mpicoll.errors import AlgorithmError, ScheduleError
from mpicoll.parallel.pipeline.schedules import (
    Action,
    PipelineSchedule,
    dest,
    evaluate_closed_form,
    find,
    schedule,
    source,
)
from mpicoll.parallel.pipeline.verify import PipelineReport, execute, verify

BUILT_IN = ("gpipe", "1f1b", "interleaved", "zero_bubble", "looped_bfs", "forward_only")
Script = list[list[Action]]


def script_of(name: str, stages: int, microbatches: int, chunks: int = 1) -> Script:
    return [list(actions) for actions in schedule(name, stages, microbatches, chunks)]


def with_script(name: str, script: Script) -> PipelineSchedule:
    """A schedule that claims what `name` does, and does `script`."""

    def generate(stage: int, *_: int) -> Iterator[Action]:
        yield from script[stage]

    return replace(find(name), generate=generate)


def at(script: Script, stage: int, text: str) -> int:
    """The position of an action on a stage."""
    return [str(action) for action in script[stage]].index(text)


# --- what is right


def test_report() -> None:
    report = verify("1f1b", 4, 8)
    assert report == PipelineReport(
        name="1f1b", stages=4, microbatches=8, chunks=1, messages=48, peak=(4, 3, 2, 1), window=1
    )
    with pytest.raises(FrozenInstanceError):
        report.window = 0  # type: ignore[misc]


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in(name: str) -> None:
    ways = 2 if find(name).backward else 1
    for stages in range(1, 9):
        for microbatches in range(stages, 17, stages) if name == "interleaved" else range(1, 17):
            for chunks in range(1, 5 if find(name).chunked else 2):
                report = verify(name, stages, microbatches, chunks)
                assert report.messages == (ways * microbatches * (stages * chunks - 1) if stages > 1 else 0)
                assert report.peak == evaluate_closed_form(name, stages, microbatches, chunks)[1]
                if name == "gpipe":
                    assert report.window == 0
                elif name != "looped_bfs":
                    assert report.window <= 1


def test_window() -> None:
    # Two neighbours of 1F1B send to each other at one and the same time, so sends that block would never end.
    assert verify("1f1b", 2, 2).window == 1
    # The first stage sends 16 micro-batches before it gets to what comes back from them for the next chunk.
    assert verify("looped_bfs", 2, 16, 2).window == 8
    assert verify("interleaved", 2, 16, 2).window == 1
    assert verify("forward_only", 2, 16, 2).window == 1


def run_on_threads(name: str, stages: int, microbatches: int, chunks: int, window: int) -> None:
    """An engine as `verify` describes it, where a channel holds `window` messages and one more send blocks."""
    script = schedule(name, stages, microbatches, chunks)
    channels: dict[tuple[bool, int, int], queue.Queue[tuple[int, int]]] = {
        (forward, stage, chunk): queue.Queue(maxsize=window)
        for forward in (True, False)
        for stage in range(stages)
        for chunk in range(chunks)
    }
    done: list[int] = []

    def run(stage: int) -> None:
        for action in script[stage]:
            virtual = action.chunk * stages + stage
            if source(action, stage, stages, chunks):
                got = channels[action.kind == "F", stage, action.chunk].get(timeout=30)
                assert got == (action.microbatch, virtual - 1 if action.kind == "F" else virtual + 1)
            if to := dest(action, stage, stages, chunks):
                channels[(action.kind == "F", *to)].put((action.microbatch, virtual), timeout=30)
        done.append(stage)

    threads = [threading.Thread(target=run, args=(stage,)) for stage in range(stages)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(done) == list(range(stages))
    assert all(channel.empty() for channel in channels.values())


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize(("stages", "microbatches", "chunks"), [(2, 2, 2), (3, 6, 3), (4, 8, 1), (5, 15, 2)])
def test_what_passes_runs(name: str, stages: int, microbatches: int, chunks: int) -> None:
    chunks = chunks if find(name).chunked else 1
    window = max(1, verify(name, stages, microbatches, chunks).window)  # to a Queue, 0 is no bound
    run_on_threads(name, stages, microbatches, chunks, window)


def test_a_whole_backward_may_stand_in_a_schedule_that_splits() -> None:
    script = script_of("zero_bubble", 2, 4)
    script[0] = [replace(one, kind="B") if one.kind == "I" else one for one in script[0] if one.kind != "W"]
    script[1][at(script, 1, "I3")] = Action("B", 3)
    script[1].remove(Action("W", 3))
    assert verify(with_script("zero_bubble", script), 2, 4).messages == 8


def test_a_schedule_without_claims() -> None:
    modest = with_script("gpipe", script_of("1f1b", 2, 3))
    assert verify(replace(modest, peak=None), 2, 3).peak == (2, 1)
    with pytest.raises(ScheduleError, match="the schedule claims 3"):
        verify(modest, 2, 3)


def test_wrong_arguments() -> None:
    with pytest.raises(AlgorithmError, match="unknown pipeline schedule 'ring'"):
        verify("ring", 4, 8)
    with pytest.raises(AlgorithmError, match="stages must be at least 1, got 0"):
        verify("1f1b", 0, 8)
    with pytest.raises(AlgorithmError, match="must be a multiple"):
        verify("interleaved", 4, 6)


# --- what is wrong, by hand

Edit = Callable[[Script], None]


def swap(stage: int, one: str, other: str) -> Edit:
    def edit(script: Script) -> None:
        i, j = at(script, stage, one), at(script, stage, other)
        script[stage][i], script[stage][j] = script[stage][j], script[stage][i]

    return edit


def drop(stage: int, *texts: str) -> Edit:
    def edit(script: Script) -> None:
        for text in texts:
            script[stage].pop(at(script, stage, text))

    return edit


def put(stage: int, text: str, action: Action) -> Edit:
    """In place of what is there."""

    def edit(script: Script) -> None:
        script[stage][at(script, stage, text)] = action

    return edit


def insert(stage: int, position: int, action: Action) -> Edit:
    return lambda script: script[stage].insert(position, action)


def move(stage: int, text: str, position: int) -> Edit:
    return lambda script: script[stage].insert(position, script[stage].pop(at(script, stage, text)))


def all_of(*edits: Edit) -> Edit:
    def edit(script: Script) -> None:
        for one in edits:
            one(script)

    return edit


def reverse(stage: int, kind: str) -> Edit:
    """The actions of one kind in reverse, in the places that they have."""

    def edit(script: Script) -> None:
        places = [i for i, action in enumerate(script[stage]) if action.kind == kind]
        for i, action in zip(places, [script[stage][i] for i in reversed(places)], strict=True):
            script[stage][i] = action

    return edit


def nothing(stage: int) -> Edit:
    return lambda script: script[stage].clear()


ODD = Action("X", 0)  # type: ignore[arg-type]

# What is broken: the schedule with its stages, micro-batches and chunks, how, and what the verifier must say.
BROKEN: dict[str, tuple[str, Edit, str]] = {
    "a stage does nothing": ("1f1b 4 4", nothing(1), "stage 1, position 0, the end: F0 is missing"),
    "no forward": ("1f1b 4 4", drop(2, "F3", "B3"), "stage 2, position 6, the end: F3 is missing"),
    "no backward": ("1f1b 4 4", drop(2, "B3"), "stage 2, position 7, the end: B3 is missing"),
    "no backward of a chunk": (
        "interleaved 2 4 2",
        drop(1, "B2 of chunk 1"),
        "stage 1, position 15, the end: B2 of chunk 1 is missing",
    ),
    "backward without forward": ("1f1b 4 4", drop(2, "F3"), "stage 2, position 6, B3: is not preceded by F3"),
    "backward too early": ("1f1b 4 4", swap(3, "F2", "B2"), "stage 3, position 4, B2: is not preceded by F2"),
    "forward twice": (
        "1f1b 4 4",
        insert(1, 2, Action("F", 0)),
        "stage 1, position 2, F0: occurs twice, first at position 0",
    ),
    "backward twice": (
        "1f1b 4 4",
        insert(3, 8, Action("B", 1)),
        "stage 3, position 8, B1: occurs twice, first at position 3",
    ),
    "no such micro-batch": (
        "1f1b 4 4",
        put(0, "F3", Action("F", 4)),
        "stage 0, position 3, F4: there are 4 micro-batches",
    ),
    "negative micro-batch": (
        "1f1b 4 4",
        put(1, "B2", Action("B", -1)),
        "stage 1, position 6, B-1: there are 4 micro-batches",
    ),
    "no such chunk": (
        "1f1b 4 4",
        put(2, "F1", Action("F", 1, 1)),
        "stage 2, position 1, F1 of chunk 1: the number of chunks per stage is 1",
    ),
    "negative chunk": (
        "interleaved 2 4 2",
        put(0, "F0", Action("F", 0, -1)),
        "stage 0, position 0, F0 of chunk -1: the number of chunks per stage is 2",
    ),
    "half a backward where none is claimed": (
        "1f1b 4 4",
        put(2, "B1", Action("I", 1)),
        "stage 2, position 4, I1: the schedule claims only the kinds F, B",
    ),
    "a backward where none is claimed": (
        "forward_only 2 2",
        insert(0, 1, Action("B", 0)),
        "stage 0, position 1, B0: the schedule claims only the kinds F",
    ),
    "no such kind": (
        "zero_bubble 2 2",
        insert(0, 1, ODD),
        "stage 0, position 1, X0: the schedule claims only the kinds F, B, I, W",
    ),
    "no half for the weights": ("zero_bubble 4 4", drop(1, "W3"), "stage 1, position 11, the end: W3 is missing"),
    "no half for the input": ("zero_bubble 4 4", drop(1, "I2"), "stage 1, position 9, W2: is not preceded by I2"),
    "no half at all": ("zero_bubble 4 4", drop(1, "I3", "W3"), "stage 1, position 10, the end: B3 or I3 is missing"),
    "weights before input": ("zero_bubble 4 4", swap(0, "I2", "W2"), "stage 0, position 8, W2: is not preceded by I2"),
    "input before forward": ("zero_bubble 4 4", swap(3, "F1", "I1"), "stage 3, position 2, I1: is not preceded by F1"),
    "whole backward after a half": (
        "zero_bubble 4 4",
        insert(0, 5, Action("B", 0)),
        "stage 0, position 5, B0: is a second backward: I0 is at position 4",
    ),
    "input after whole backward": (
        "zero_bubble 4 4",
        insert(0, 4, Action("B", 0)),
        "stage 0, position 5, I0: is a second backward: B0 is at position 4",
    ),
    "weights after whole backward": (
        "zero_bubble 4 4",
        put(0, "I1", Action("B", 1)),
        "stage 0, position 7, W1: is a second backward: B1 is at position 6",
    ),
    "forwards in another order": (
        "gpipe 3 4",
        swap(1, "F0", "F1"),
        "stage 1, position 0, F1: the next message from stage 0 is that of F0, position 0 there",
    ),
    "backwards in another order": (
        "gpipe 3 4",
        reverse(2, "B"),
        "stage 1, position 4, B0: the next message from stage 2 is that of B3, position 4 there",
    ),
    "another order from the last stage to the first": (
        "interleaved 2 4 2",
        swap(0, "F0 of chunk 1", "F1 of chunk 1"),
        "stage 0, position 2, F1 of chunk 1: the next message from stage 1 is that of F0, position 0 there",
    ),
    "whole and half backwards in another order": (
        "zero_bubble 2 2",
        all_of(put(1, "I1", Action("B", 0)), put(1, "I0", Action("B", 1)), drop(1, "W0", "W1"), move(1, "F1", 1)),
        "stage 0, position 2, I0: the next message from stage 1 is that of B1, position 2 there",
    ),
    "two wait for each other": (
        "1f1b 2 2",
        all_of(move(0, "B0", 1), move(1, "F1", 1)),
        (
            "deadlock: stage 0, position 1, B0 waits for B0 of stage 1, position 2 there; "
            "stage 1, position 1, F1 waits for F1 of stage 0, position 2 there"
        ),
    ),
    "all wait for each other": (
        "1f1b 4 4",
        move(1, "B0", 1),
        (
            "deadlock: stage 0, position 4, B0 waits for B0 of stage 1, position 1 there; "
            "stage 1, position 1, B0 waits for B0 of stage 2, position 2 there; "
            "stage 2, position 1, F1 waits for F1 of stage 1, position 2 there; "
            "stage 3, position 2, F1 waits for F1 of stage 2, position 1 there"
        ),
    ),
    "chunks wait for each other": (
        "interleaved 2 2 2",
        move(0, "F0 of chunk 1", 0),
        (
            "deadlock: stage 0, position 0, F0 of chunk 1 waits for F0 of stage 1, position 0 there; "
            "stage 1, position 0, F0 waits for F0 of stage 0, position 1 there"
        ),
    ),
    "a stage waits for itself": (
        "looped_bfs 1 2 2",
        move(0, "F0 of chunk 1", 0),
        "deadlock: stage 0, position 0, F0 of chunk 1 waits for F0 of stage 0, position 1 there",
    ),
    "halves wait for each other": (
        "zero_bubble 2 2",
        all_of(move(0, "I0", 1), move(1, "F1", 1)),
        "deadlock: stage 0, position 1, I0 waits for I0 of stage 1, position 2 there; stage 1, position 1, F1 waits",
    ),
    "more activations than claimed": (
        "1f1b 4 4",
        swap(3, "B0", "F1"),
        "stage 3, position 1, F1: the most activations kept are 2, the schedule claims 1",
    ),
    "weights too late": (
        "zero_bubble 4 8",
        move(0, "W0", 23),
        "stage 0, position 5, F4: the most activations kept are 5, the schedule claims 4",
    ),
}


def numbers(text: str) -> tuple[str, int, int, int]:
    name, *rest = text.split()
    stages, microbatches, chunks = (*map(int, rest), 1)[:3]
    return name, stages, microbatches, chunks


@pytest.mark.parametrize("what", BROKEN)
def test_broken(what: str) -> None:
    text, edit, message = BROKEN[what]
    name, stages, microbatches, chunks = numbers(text)
    script = script_of(name, stages, microbatches, chunks)
    edit(script)
    with pytest.raises(ScheduleError) as caught:
        verify(with_script(name, script), stages, microbatches, chunks)
    head = f"pipeline schedule {name}, stages {stages}, microbatches {microbatches}"
    head += f", chunks {chunks}: " if find(name).chunked else ": "
    assert str(caught.value).startswith(head)
    assert str(caught.value).removeprefix(head).startswith(message)


def test_fewer_activations_than_claimed() -> None:
    with pytest.raises(ScheduleError, match=r"stage 1, position 2, F2: the most activations kept are 3, .* claims 4"):
        verify(replace(find("1f1b"), peak="4"), 4, 8)


def test_a_claim_without_a_backward() -> None:
    with pytest.raises(ScheduleError, match=r"stage 1, position 0, F0: the most activations kept are 0, .* claims 1"):
        verify(replace(find("forward_only"), peak="s"), 2, 3)


# --- what is wrong, anyhow

SMALL = [
    ("gpipe", 3, 3, 1),
    ("1f1b", 3, 4, 1),
    ("interleaved", 2, 4, 2),
    ("interleaved", 3, 3, 2),
    ("zero_bubble", 3, 4, 1),
    ("looped_bfs", 2, 3, 2),
    ("looped_bfs", 1, 2, 3),
    ("forward_only", 2, 5, 2),
]


def refused(script: Script, name: str, stages: int, microbatches: int, chunks: int) -> bool:
    try:
        verify(with_script(name, script), stages, microbatches, chunks)
    except ScheduleError:
        return True
    return False


@pytest.mark.parametrize(("name", "stages", "microbatches", "chunks"), SMALL)
def test_anything_left_out_doubled_or_replaced_is_found(name: str, stages: int, microbatches: int, chunks: int) -> None:
    for stage in range(stages):
        right = script_of(name, stages, microbatches, chunks)[stage]
        for position, action in enumerate(right):
            others = [
                [],
                [action, action],
                *([other] for other in right if other != action),
                *([replace(action, kind=kind)] for kind in "FBIW" if kind != action.kind),  # type: ignore[arg-type]
            ]
            for other in others:
                script = script_of(name, stages, microbatches, chunks)
                script[stage][position : position + 1] = other
                assert refused(script, name, stages, microbatches, chunks), (stage, position, other)


def fault(script: Script, name: str, microbatches: int, chunks: int) -> bool:
    """Whether something is wrong with actions that are all there, by other means than those of `verify`."""
    stages = len(script)
    last = stages * chunks - 1
    graph = TopologicalSorter[tuple[str, int, int]]()
    order: dict[tuple[str, int], list[int]] = {}
    for stage, actions in enumerate(script):
        before = None
        kept = [0]
        for action in actions:
            virtual = action.chunk * stages + stage
            kind = "B" if action.kind == "I" else action.kind
            node = (kind, action.microbatch, virtual)
            needs = {
                "F": [("F", virtual - 1)] * (virtual > 0),
                "B": [("F", virtual), ("B", virtual + 1)] if virtual < last else [("F", virtual)],
                "W": [("B", virtual)],
            }[kind]
            graph.add(node, *((what, action.microbatch, where) for what, where in needs))
            if before:
                graph.add(node, before)
            before = node
            order.setdefault((kind, virtual), []).append(action.microbatch)
            kept.append(kept[-1] + {"F": 1, "I": 0}.get(action.kind, -1))
        claim = evaluate_closed_form(name, stages, microbatches, chunks)[1]
        if claim is not None and find(name).backward and max(kept) != claim[stage]:
            return True
    try:
        graph.prepare()
    except CycleError:
        return True
    return stages > 1 and any(
        order[kind, virtual] != order[kind, virtual + 1] for kind, virtual in order if kind != "W" and virtual < last
    )


@pytest.mark.parametrize(("name", "stages", "microbatches", "chunks"), SMALL)
def test_anything_exchanged_is_found_where_it_matters(name: str, stages: int, microbatches: int, chunks: int) -> None:
    faults = 0
    for stage in range(stages):
        length = len(script_of(name, stages, microbatches, chunks)[stage])
        for i in range(length):
            for j in range(i):
                script = script_of(name, stages, microbatches, chunks)
                actions = script[stage]
                actions[i], actions[j] = actions[j], actions[i]
                verdict = fault(script, name, microbatches, chunks)
                assert refused(script, name, stages, microbatches, chunks) == verdict, (stage, i, j)
                faults += verdict
    assert faults
    assert not fault(script_of(name, stages, microbatches, chunks), name, microbatches, chunks)


# --- execute


def test_execute_tells_an_order_in_which_all_can_be_done() -> None:
    script = script_of("interleaved", 3, 6, 2)
    done, position = execute(script, 2)
    assert position == [24, 24, 24]
    assert sorted(done) == [(stage, at) for stage in range(3) for at in range(24)]
    place = {(stage, script[stage][position]): n for n, (stage, position) in enumerate(done)}
    for stage, actions in enumerate(script):
        assert [place[stage, action] for action in actions] == sorted(place[stage, action] for action in actions)
        for action in actions:
            if origin := source(action, stage, 3, 2):
                assert place[origin[0], Action(action.kind, action.microbatch, origin[1])] < place[stage, action]


def test_execute_stops_where_a_send_blocks() -> None:
    script = [[Action("F", 0), Action("F", 1), Action("F", 2)], [Action("B", 0), Action("F", 0)]]
    for window, stage_0 in ((0, 1), (1, 2), (2, 3), (None, 3)):
        assert execute([script[0], []], 1, window)[1] == [stage_0, 0]
    # The last stage needs no message for a backward, and then takes one.
    assert execute(script, 1, 0) == ([(0, 0), (1, 0)], [1, 1])
    assert execute(script, 1, 1)[1] == [3, 2]
