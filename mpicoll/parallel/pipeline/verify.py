"""Proof that a pipeline schedule is complete, in order and free of deadlock, by symbolic execution of all stages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import NoReturn, TypeAlias

from mpicoll.errors import ScheduleError
from mpicoll.parallel.pipeline.schedules import (
    Action,
    ActionKind,
    PipelineSchedule,
    count_activations,
    dest,
    evaluate_closed_form,
    find,
    peak_activations,
    schedule,
    source,
)

Script: TypeAlias = Sequence[Sequence[Action]]
"""The actions of each stage."""

_Channel: TypeAlias = tuple[bool, int, int]
"""(forward, stage, chunk): the direction, and the receiver. Only one other chunk sends there."""


_BACK: tuple[ActionKind, ...] = ("B", "I", "W")
# For each kind: the kinds that must precede it on the same stage, those that exclude it, and those that send its input.
_NEEDS: dict[ActionKind, tuple[ActionKind, ...]] = {"F": (), "B": ("F",), "I": ("F",), "W": ("F", "I")}
_EXCLUDES: dict[ActionKind, tuple[ActionKind, ...]] = {"F": (), "B": ("I", "W"), "I": ("B",), "W": ("B",)}
_SENDERS: dict[ActionKind, tuple[ActionKind, ...]] = {"F": ("F",), "B": ("B", "I"), "I": ("B", "I"), "W": ()}


@dataclass(frozen=True, slots=True)
class PipelineReport:
    """Facts about a correct schedule.

    `messages` is the number among all stages, and `peak` the most activations that each stage keeps, as in
    :func:`~mpicoll.parallel.pipeline.schedules.peak_activations`. `window` is the number of unreceived messages that a
    channel must hold before a send may block: with 0, synchronous blocking sends suffice; with 1, a stage may wait
    until the previous message on a channel is received before it sends the next one there.
    """

    name: str
    stages: int
    microbatches: int
    chunks: int
    messages: int
    peak: tuple[int, ...]
    window: int


def verify(schedule: PipelineSchedule | str, stages: int, microbatches: int, chunks: int = 1) -> PipelineReport:
    """Execute `schedule` symbolically and check each action.

    The proof holds for an engine that runs the actions of each stage in order; that waits before an action for the
    message from :func:`~mpicoll.parallel.pipeline.schedules.source`, and for nothing else; and that posts afterwards
    the send to :func:`~mpicoll.parallel.pipeline.schedules.dest`, for which it waits at the very end. With a verified
    schedule, the engine terminates. Messages from one chunk to the next, and those back, arrive in the order in which
    they are needed, so they need no number, and receives may be posted ahead. Every micro-batch passes each chunk once
    in each direction. At its peak each stage keeps as many activations as the schedule claims.

    Args:
        schedule: a schedule, or its name such as ``"1f1b"``.
        stages: the number of stages of the pipeline.
        microbatches: the number of micro-batches of a batch.
        chunks: the number of parts of the model on each stage.

    Raises:
        ScheduleError: an action is of a kind that the schedule does not claim, or of a micro-batch or chunk that
            does not exist, occurs twice, too early on its stage or never; two chunks disagree about the order of their
            messages; there is a deadlock; or the peak of activations is not the claimed one. The message names the
            stage, the position and the action.
        AlgorithmError: the name is unknown, a number is below 1, or the schedule does not support these numbers.

    Example:
        >>> report = mpicoll.parallel.pipeline.verify("1f1b", stages=2, microbatches=4)
        >>> report.stages
        2
    """
    return _Verifier(find(schedule), stages, microbatches, chunks).report()


def execute(script: Script, chunks: int, window: int | None = None) -> tuple[list[tuple[int, int]], list[int]]:
    """Execute the actions of each stage until no stage can continue.

    Args:
        script: the actions of each stage.
        chunks: the number of parts of the model on each stage.
        window: the number of unreceived messages that a channel holds before a send blocks; None: any number.

    Returns:
        (stage, position) of every executed action, each after all that it waits for; and the position that each stage
        has reached, which is the end of its script unless it is deadlocked.
    """
    stages = len(script)
    inbox: dict[_Channel, set[int]] = defaultdict(set)
    outgoing: list[_Channel | None] = [None] * stages
    position = [0] * stages
    done: list[tuple[int, int]] = []

    def step(stage: int) -> bool:
        channel = outgoing[stage]
        if channel is not None and window is not None and len(inbox[channel]) > window:
            return False
        if position[stage] == len(script[stage]):
            return False
        action = script[stage][position[stage]]
        forward = action.kind == "F"
        if source(action, stage, stages, chunks):
            messages = inbox[forward, stage, action.chunk]
            if action.microbatch not in messages:
                return False
            messages.remove(action.microbatch)
        done.append((stage, position[stage]))
        position[stage] += 1
        outgoing[stage] = None
        if to := dest(action, stage, stages, chunks):
            channel = (forward, *to)
            inbox[channel].add(action.microbatch)
            outgoing[stage] = channel if to[0] != stage else None
        return True

    moving = True
    while moving:
        moving = False
        for stage in range(stages):
            while step(stage):
                moving = True
    return done, position


class _Verifier:
    def __init__(self, found: PipelineSchedule, stages: int, microbatches: int, chunks: int) -> None:
        self.schedule, self.stages, self.microbatches, self.chunks = found, stages, microbatches, chunks
        self.script = schedule(found, stages, microbatches, chunks)
        self.kinds = ("F", *_BACK[: 3 if found.splits else 1]) if found.backward else ("F",)
        self.where: list[dict[Action, int]] = [{} for _ in range(stages)]

    def report(self) -> PipelineReport:
        for stage in range(self.stages):
            self.check_stage(stage)
        messages = self.check_order()
        self.check_all_done()
        peak = self.check_peak()
        return PipelineReport(
            name=self.schedule.name,
            stages=self.stages,
            microbatches=self.microbatches,
            chunks=self.chunks,
            messages=messages,
            peak=peak,
            window=next(window for window in count() if not self.find_deadlocked(window)),
        )

    def fail(self, what: str, stage: int, position: int) -> NoReturn:
        script = self.script[stage]
        text = str(script[position]) if position < len(script) else "the end"
        raise ScheduleError(f"{self}: stage {stage}, position {position}, {text}: {what}")

    def __str__(self) -> str:
        text = f"pipeline schedule {self.schedule.name}, stages {self.stages}, microbatches {self.microbatches}"
        return f"{text}, chunks {self.chunks}" if self.schedule.chunked else text

    def check_stage(self, stage: int) -> None:
        """Check one stage by itself: kinds and numbers, each action once, none too early."""
        seen = self.where[stage]
        for position, action in enumerate(self.script[stage]):
            if action.kind not in self.kinds:
                self.fail(f"the schedule claims only the kinds {', '.join(self.kinds)}", stage, position)
            if not 0 <= action.microbatch < self.microbatches:
                self.fail(f"there are {self.microbatches} micro-batches", stage, position)
            if not 0 <= action.chunk < self.chunks:
                self.fail(f"the number of chunks per stage is {self.chunks}", stage, position)
            if action in seen:
                self.fail(f"occurs twice, first at position {seen[action]}", stage, position)
            for kind in _EXCLUDES[action.kind]:
                if (other := replace(action, kind=kind)) in seen:
                    self.fail(f"is a second backward: {other} is at position {seen[other]}", stage, position)
            for kind in _NEEDS[action.kind]:
                if (other := replace(action, kind=kind)) not in seen:
                    self.fail(f"is not preceded by {other}", stage, position)
            seen[action] = position
        for chunk in range(self.chunks):
            for microbatch in range(self.microbatches):
                self.check_complete(stage, Action("F", microbatch, chunk))

    def check_complete(self, stage: int, forward: Action) -> None:
        seen = self.where[stage]
        back, split, weights = (replace(forward, kind=kind) for kind in _BACK)
        missing = None
        if forward not in seen:
            missing = str(forward)
        elif self.schedule.backward and back not in seen:
            if split not in seen:
                missing = f"{back} or {split}" if self.schedule.splits else str(back)
            elif weights not in seen:
                missing = str(weights)
        if missing is not None:
            self.fail(f"{missing} is missing", stage, len(self.script[stage]))

    def check_order(self) -> int:
        """Check that both ends of each channel have the same order of messages; return the number of all messages."""
        sent: dict[_Channel, list[tuple[int, int]]] = defaultdict(list)
        received: dict[_Channel, list[tuple[int, int]]] = defaultdict(list)
        for stage, script in enumerate(self.script):
            for position, action in enumerate(script):
                forward = action.kind == "F"
                to = dest(action, stage, self.stages, self.chunks)
                if to and to[0] != stage:
                    sent[(forward, *to)].append((stage, position))
                origin = source(action, stage, self.stages, self.chunks)
                if origin and origin[0] != stage:
                    received[forward, stage, action.chunk].append((stage, position))
        for channel, receivers in received.items():
            for (stage, position), (peer, at) in zip(receivers, sent[channel], strict=True):
                sender = self.script[peer][at]
                if sender.microbatch != self.script[stage][position].microbatch:
                    self.fail(
                        f"the next message from stage {peer} is that of {sender}, position {at} there", stage, position
                    )
        return sum(map(len, sent.values()))

    def find_deadlocked(self, window: int | None = None) -> list[tuple[int, int]]:
        """Return the deadlocked stages, each with its position."""
        _, position = execute(self.script, self.chunks, window)
        return [(stage, position[stage]) for stage in range(self.stages) if position[stage] < len(self.script[stage])]

    def check_all_done(self) -> None:
        waits = []
        for stage, position in self.find_deadlocked():
            action = self.script[stage][position]
            origin = source(action, stage, self.stages, self.chunks)
            assert origin is not None  # nothing else makes a stage wait
            peer, chunk = origin
            awaited = next(
                other
                for kind in _SENDERS[action.kind]
                if (other := Action(kind, action.microbatch, chunk)) in self.where[peer]
            )
            waits.append(
                f"stage {stage}, position {position}, {action} waits for {awaited} of stage {peer}, position "
                f"{self.where[peer][awaited]} there"
            )
        if waits:
            raise ScheduleError(f"{self}: deadlock: {'; '.join(waits)}")

    def check_peak(self) -> tuple[int, ...]:
        peak = peak_activations(self.schedule, self.stages, self.microbatches, self.chunks)
        claim = evaluate_closed_form(self.schedule, self.stages, self.microbatches, self.chunks)[1]
        for stage, most in enumerate(peak):
            if claim is not None and most != claim[stage]:
                position = count_activations(self.script[stage]).index(most) if self.schedule.backward else 0
                self.fail(f"the most activations kept are {most}, the schedule claims {claim[stage]}", stage, position)
        return peak
