"""Timelines of a pipeline: computed from a schedule and costs, or measured in a real run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

from mpicoll.errors import ArgumentError, RankError, ScheduleError, ShapeError
from mpicoll.parallel.pipeline import schedules
from mpicoll.parallel.pipeline.schedules import Action, ActionKind, PipelineSchedule, dest, find, source
from mpicoll.parallel.pipeline.verify import execute

Time: TypeAlias = float | Fraction
Cost: TypeAlias = Time | Sequence[Time]
"""A time for all stages, or one for each."""


@dataclass(frozen=True, slots=True)
class Span:
    """`action` from `begin` to `end`."""

    action: Action
    begin: Time
    end: Time


@dataclass(frozen=True, slots=True)
class Timeline:
    """The times of all actions: `spans` has a tuple for each stage, in the order of time.

    `measured` is True if the times are seconds of a real run, and False if they are computed.

    Example:
        >>> line = mpicoll.parallel.pipeline.timeline("1f1b", stages=2, microbatches=4)
        >>> len(line.spans)
        2
    """

    name: str
    spans: tuple[tuple[Span, ...], ...]
    measured: bool = False

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.spans)

    @property
    def microbatches(self) -> int:
        """The number of micro-batches."""
        return len({span.action.microbatch for spans in self.spans for span in spans})

    @property
    def chunks(self) -> int:
        """The number of chunks per stage."""
        return 1 + max(span.action.chunk for spans in self.spans for span in spans)

    @property
    def begin(self) -> Time:
        """The time of the first begin."""
        return min(spans[0].begin for spans in self.spans if spans)

    @property
    def makespan(self) -> Time:
        """The time from the first begin to the last end."""
        return max(spans[-1].end for spans in self.spans if spans) - self.begin

    @property
    def busy(self) -> tuple[Time, ...]:
        """The time that each stage works."""
        return tuple(sum((span.end - span.begin for span in spans), start=Fraction(0)) for spans in self.spans)

    @property
    def bubble(self) -> Time:
        """The part of the total time, ``makespan`` of all stages, in which they idle.

        Papers often divide by the time in which stages work instead; with this one as ``b`` that is ``b / (1 - b)``,
        such as ``(p - 1) / m`` for GPipe and 1F1B, whose ``b`` is ``(p - 1) / (m + p - 1)``. It is exact if all times
        are Fractions.
        """
        total = self.makespan * self.stages
        return 1 - sum(self.busy, start=Fraction(0)) / total if total else Fraction(0)


def timeline(
    schedule: PipelineSchedule | str,
    stages: int,
    microbatches: int,
    chunks: int = 1,
    *,
    forward: Cost = 1.0,
    backward: Cost = 2.0,
    backward_input: Cost | None = None,
    backward_weight: Cost | None = None,
    send: Time = 0.0,
) -> Timeline:
    """Compute when each stage runs its actions if it starts each as soon as possible.

    All results are exact if all times are Fractions.

    Args:
        schedule: a schedule, or its name such as ``"1f1b"``.
        stages: the number of stages of the pipeline.
        microbatches: the number of micro-batches of a batch.
        chunks: the number of parts of the model on each stage.
        forward: the time of a forward of one micro-batch through all chunks of a stage; one number, or one for each
            stage. An action on one chunk takes its share of it. The same holds for the other times.
        backward: the time of a whole backward.
        backward_input: the time of the input half; by default half of `backward`.
        backward_weight: the time of the weight half; by default the rest of `backward`.
        send: the time of a message from stage to stage; it keeps neither stage busy.

    Raises:
        ShapeError: there is not one time for each stage.
        ArgumentError: a time is negative.
        ScheduleError: the schedule has a deadlock.
        AlgorithmError: the name is unknown, a number is below 1, or the schedule does not support these numbers.

    Example:
        >>> line = mpicoll.parallel.pipeline.timeline("1f1b", stages=2, microbatches=4)
        >>> len(line.spans[0])
        8
    """
    found = find(schedule)
    script = schedules.schedule(found, stages, microbatches, chunks)
    whole = _expand_cost("backward", backward, stages)
    halves = (
        [time / 2 for time in whole]
        if backward_input is None
        else _expand_cost("backward_input", backward_input, stages)
    )
    rest = [time - half for time, half in zip(whole, halves, strict=True)]
    costs: dict[ActionKind, list[Time]] = {
        "F": _expand_cost("forward", forward, stages),
        "B": whole,
        "I": halves,
        "W": _expand_cost("backward_weight", rest if backward_weight is None else backward_weight, stages),
    }
    (send,) = _expand_cost("send", send, 1)
    order, position = execute(script, chunks)
    for stage, actions in enumerate(script):
        if position[stage] < len(actions):
            raise ScheduleError(
                f"pipeline schedule {found.name}, stages {stages}, microbatches {microbatches}: deadlock of stage"
                f" {stage} at position {position[stage]}, {actions[position[stage]]}; verify() reports the cause"
            )
    spans: list[list[Span]] = [[] for _ in range(stages)]
    arrival: dict[tuple[bool, int, int, int], Time] = {}
    for stage, at in order:
        action = script[stage][at]
        begin = spans[stage][-1].end if spans[stage] else Fraction(0)
        if source(action, stage, stages, chunks):
            begin = max(begin, arrival[action.kind == "F", action.microbatch, stage, action.chunk])
        end = begin + costs[action.kind][stage] / Fraction(chunks)
        spans[stage].append(Span(action, begin, end))
        if to := dest(action, stage, stages, chunks):
            arrival[(action.kind == "F", action.microbatch, *to)] = end if to[0] == stage else end + send
    return Timeline(found.name, tuple(map(tuple, spans)))


def timeline_from_events(events: Iterable[tuple[int, Action, float, float]], name: str = "pipeline") -> Timeline:
    """Return the timeline of a real run.

    Args:
        events: (stage, action, begin, end) of all stages in any order, in seconds of a clock that all stages share. The
            timeline starts at 0.
        name: the title of a picture.

    Raises:
        ArgumentError: there are no events, an event ends before it begins, or begins before the previous one of its
            stage ends.
        RankError: a stage is negative.
    """
    events = sorted(events, key=lambda event: (event[0], event[2], event[3]))
    if not events:
        raise ArgumentError("timeline_from_events: pass at least one event, got none")
    if events[0][0] < 0:
        raise RankError(f"timeline_from_events: a stage must be at least 0, got {events[0][0]} for {events[0][1]}")
    first = min(begin for _, _, begin, _ in events)
    spans: list[list[Span]] = [[] for _ in range(events[-1][0] + 1)]
    for stage, action, begin, end in events:
        if end < begin:
            raise ArgumentError(f"{action} on stage {stage} ends at {end}, before it begins at {begin}")
        if spans[stage] and begin - first < spans[stage][-1].end:
            raise ArgumentError(f"{action} on stage {stage} begins before {spans[stage][-1].action} ends there")
        spans[stage].append(Span(action, begin - first, end - first))
    return Timeline(name, tuple(map(tuple, spans)), measured=True)


def _expand_cost(what: str, cost: Cost, stages: int) -> list[Time]:
    times = list(cost) if isinstance(cost, Sequence) else [cost] * stages
    if len(times) != stages:
        raise ShapeError(f"{what} must be one time, or one for each of {stages} stages, got {len(times)}")
    for time in times:
        if time < 0:
            raise ArgumentError(f"{what} must not be negative, got {time}")
    return times
