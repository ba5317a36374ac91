"""Pipeline schedules as data: the order of forwards and backwards of micro-batches on each stage.

A schedule is a generator that yields the actions of ONE stage, in order. It names micro-batches and *chunks*, never
tensors. A model on ``stages`` stages is divided into ``stages * chunks`` consecutive parts, the *virtual stages*; chunk
``c`` of stage ``s`` is virtual stage ``c * stages + s``. Most schedules have one chunk per stage.

Messages are implied. F of a micro-batch on virtual stage ``v`` needs the output of its F on ``v - 1``, and B or I on
``v`` needs the gradient from its B or I on ``v + 1`` and its own F on ``v``; on the last virtual stage it starts
from the loss. :func:`source` and :func:`dest` return the other stage. A stage runs one action at a time, waits before
it for its input, and sends its output without waiting for the receiver. Messages from one virtual stage to the next,
and those back, are matched in the order in which they are sent. :mod:`mpicoll.parallel.pipeline.verify` proves that a
schedule is correct under these rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import Literal, SupportsIndex, TypeAlias

from mpicoll.errors import AlgorithmError, RankError
from mpicoll.schedules.formula import check_formula, evaluate

ActionKind: TypeAlias = Literal["F", "B", "I", "W"]
"""Forward; backward; and the two halves of a backward, for the input and for the weights."""

# By how much each kind changes the number of activations that a stage keeps.
_ACTIVATION_CHANGE: dict[ActionKind, int] = {"F": 1, "B": -1, "I": 0, "W": -1}


@dataclass(frozen=True, slots=True)
class Action:
    """One action of a stage: `kind` of `microbatch` through its chunk `chunk`.

    Example:
        >>> mpicoll.parallel.pipeline.actions("1f1b", stage=0, stages=2, microbatches=2)[0]
        Action(kind='F', microbatch=0, chunk=0)
    """

    kind: ActionKind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f" of chunk {self.chunk}" if self.chunk else "")


Generator: TypeAlias = Callable[..., Iterator[Action]]


@dataclass(frozen=True, slots=True, eq=False)
class PipelineSchedule:
    """A named schedule.

    `chunked` schedules allow several chunks per stage, and their generators are called with ``(stage, stages,
    microbatches, chunks)``, others with ``(stage, stages, microbatches)``. `backward` is False for schedules without a
    backward; `splits` is True if a backward may be split into I and W. `bubble` and `peak` are closed forms (see
    :mod:`mpicoll.schedules.formula`) in ``p`` (stages), ``m`` (micro-batches), ``v`` (chunks) and, for `peak`, ``s``
    (the stage). `bubble` is the part of the total time in which a stage is idle, if F, I and W take equally long, B
    twice as long, and messages take no time; `peak` is that of :func:`peak_activations`.
    :func:`evaluate_closed_form` evaluates them exactly; they are None where no closed form is known. `source` is the
    paper.
    """

    name: str
    generate: Generator
    chunked: bool
    backward: bool
    splits: bool
    bubble: str | None
    peak: str | None
    source: str
    doc: str = field(repr=False)

    def actions(self, stage: int, stages: int, microbatches: int, chunks: int = 1) -> tuple[Action, ...]:
        """Return the actions of `stage` of `stages`; generated once for each set of arguments."""
        for what, number in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
            if not isinstance(number, SupportsIndex):
                raise AlgorithmError(f"pipeline schedule {self.name}: {what} must be an integer, got {number!r}")
            if number < 1:
                raise AlgorithmError(f"pipeline schedule {self.name}: {what} must be at least 1, got {number}")
        if not 0 <= stage < stages:
            raise RankError(f"pipeline schedule {self.name}: stage {stage} must be in [0, {stages})")
        if chunks > 1 and not self.chunked:
            able = ", ".join(name for name, schedule in _REGISTRY.items() if schedule.chunked)
            raise AlgorithmError(
                f"pipeline schedule {self.name} has one chunk per stage, got chunks={chunks}; use one of {able} for"
                " several chunks"
            )
        return _generate(self, stage, stages, microbatches, chunks)


@lru_cache(maxsize=4096)
def _generate(
    schedule: PipelineSchedule, stage: int, stages: int, microbatches: int, chunks: int
) -> tuple[Action, ...]:
    arguments = (stage, stages, microbatches, chunks) if schedule.chunked else (stage, stages, microbatches)
    return tuple(schedule.generate(*arguments))


_REGISTRY: dict[str, PipelineSchedule] = {}


def register(
    *,
    name: str | None = None,
    chunked: bool = False,
    backward: bool = True,
    splits: bool = False,
    bubble: str | None = None,
    peak: str | None = None,
    source: str = "",
) -> Callable[[Generator], Generator]:
    """Register the decorated generator as a pipeline schedule; see :class:`PipelineSchedule` for the fields.

    Raises AlgorithmError if `bubble` or `peak` is not a valid closed form.

    Example:
        >>> @mpicoll.parallel.pipeline.register()
        ... def forward_then_backward(stage, stages, microbatches):
        ...     yield from (mpicoll.parallel.pipeline.Action("F", m) for m in range(microbatches))
        ...     yield from (mpicoll.parallel.pipeline.Action("B", m) for m in range(microbatches))
        >>> mpicoll.parallel.pipeline.verify("forward_then_backward", stages=3, microbatches=4).stages
        3
    """
    for text, names in ((bubble, "pmv"), (peak, "pmvs")):
        if text is not None:
            check_formula(text, names)

    def decorate(generate: Generator) -> Generator:
        own = name or generate.__name__
        _REGISTRY[own] = PipelineSchedule(
            name=own,
            generate=generate,
            chunked=chunked,
            backward=backward,
            splits=splits,
            bubble=bubble,
            peak=peak,
            source=source,
            doc=generate.__doc__ or "",
        )
        return generate

    return decorate


def find(schedule: PipelineSchedule | str) -> PipelineSchedule:
    """Return `schedule` itself, or the one of that name. Raise AlgorithmError with the existing names."""
    if isinstance(schedule, PipelineSchedule):
        return schedule
    try:
        return _REGISTRY[schedule]
    except KeyError:
        raise AlgorithmError(
            f"unknown pipeline schedule {schedule!r}; the registered schedules are {', '.join(_REGISTRY)}"
        ) from None


def schedules() -> dict[str, PipelineSchedule]:
    """Return all registered schedules by name."""
    return dict(_REGISTRY)


def actions(
    schedule: PipelineSchedule | str, stage: int, stages: int, microbatches: int, chunks: int = 1
) -> tuple[Action, ...]:
    """Return the actions of one stage, in order.

    Args:
        schedule: a schedule, or its name such as ``"1f1b"``.
        stage: the stage.
        stages: the number of stages of the pipeline.
        microbatches: the number of micro-batches of a batch.
        chunks: the number of parts of the model on each stage.

    Raises:
        RankError: `stage` is out of range.
        AlgorithmError: the name is unknown, a number is below 1, or the schedule does not support these numbers.

    Example:
        >>> [str(one) for one in mpicoll.parallel.pipeline.actions("1f1b", stage=0, stages=2, microbatches=2)]
        ['F0', 'F1', 'B0', 'B1']
    """
    return find(schedule).actions(stage, stages, microbatches, chunks)


def schedule(
    schedule: PipelineSchedule | str, stages: int, microbatches: int, chunks: int = 1
) -> tuple[tuple[Action, ...], ...]:
    """Return the actions of each stage: :func:`actions` of all stages."""
    found = find(schedule)
    return tuple(found.actions(stage, stages, microbatches, chunks) for stage in range(max(stages, 1)))


def source(action: Action, stage: int, stages: int, chunks: int = 1) -> tuple[int, int] | None:
    """Return the (stage, chunk) whose output is the input of `action` on `stage`, or None for no other chunk.

    With one stage and several chunks that is the stage itself, and no message is needed.
    """
    return _find_neighbour(action, stage, stages, chunks, -1)


def dest(action: Action, stage: int, stages: int, chunks: int = 1) -> tuple[int, int] | None:
    """Return the (stage, chunk) whose input is the output of `action` on `stage`, or None for no other chunk.

    With one stage and several chunks that is the stage itself, and no message is needed.
    """
    return _find_neighbour(action, stage, stages, chunks, +1)


def _find_neighbour(action: Action, stage: int, stages: int, chunks: int, step: int) -> tuple[int, int] | None:
    if action.kind == "W":
        return None
    virtual = action.chunk * stages + stage + (step if action.kind == "F" else -step)
    if not 0 <= virtual < stages * chunks:
        return None
    chunk, stage = divmod(virtual, stages)
    return stage, chunk


def peak_activations(
    schedule: PipelineSchedule | str, stages: int, microbatches: int, chunks: int = 1
) -> tuple[int, ...]:
    """Return for each stage the most micro-batches that have passed forward through a chunk, but not yet back.

    Each is an activation of one chunk, which is ``1 / chunks`` of the stage. It counts until its B or W is over. A
    schedule without a backward keeps none. Arguments and errors are those of :func:`schedule`.

    Example:
        >>> mpicoll.parallel.pipeline.peak_activations("1f1b", stages=4, microbatches=8)
        (4, 3, 2, 1)
    """
    found = find(schedule)
    script = [found.actions(stage, stages, microbatches, chunks) for stage in range(max(stages, 1))]
    return tuple(max(count_activations(actions)) if found.backward else 0 for actions in script)


def count_activations(actions: Iterable[Action]) -> list[int]:
    """Return the number of activations that a stage keeps during each of its actions."""
    return list(accumulate(_ACTIVATION_CHANGE[action.kind] for action in actions))


def evaluate_closed_form(
    schedule: PipelineSchedule | str, stages: int, microbatches: int, chunks: int = 1
) -> tuple[Fraction | None, tuple[int, ...] | None]:
    """Evaluate the closed forms: the bubble, and the peak of activations of each stage; see :class:`PipelineSchedule`.

    Arguments and errors are those of :func:`schedule`.
    """
    found = find(schedule)
    found.actions(0, stages, microbatches, chunks)  # validates the arguments
    quantities = {"p": Fraction(stages), "m": Fraction(microbatches), "v": Fraction(chunks)}
    bubble = None if found.bubble is None else evaluate(found.bubble, quantities)
    if found.peak is None:
        return bubble, None
    return bubble, tuple(int(evaluate(found.peak, {**quantities, "s": Fraction(stage)})) for stage in range(stages))


@register(
    bubble="(p-1) / (m+p-1)",
    peak="m",
    source="Huang et al. 2019, GPipe: efficient training of giant neural networks using pipeline parallelism",
)
def gpipe(stage: int, stages: int, microbatches: int) -> Iterator[Action]:
    """All forwards, then all backwards."""
    for microbatch in range(microbatches):
        yield Action("F", microbatch)
    for microbatch in range(microbatches):
        yield Action("B", microbatch)


@register(
    name="1f1b",
    bubble="(p-1) / (m+p-1)",
    peak="min(m, p-s)",
    source="Narayanan et al. 2021, Memory-efficient pipeline-parallel DNN training (PipeDream-Flush)",
)
def one_f_one_b(stage: int, stages: int, microbatches: int) -> Iterator[Action]:
    """Run a forward for each later stage, then forwards and backwards alternately, then the remaining backwards."""
    yield from _alternate(
        [Action("F", microbatch) for microbatch in range(microbatches)],
        [Action("B", microbatch) for microbatch in range(microbatches)],
        ahead=stages - stage - 1,
    )


@register(
    chunked=True,
    bubble="(p-1) / (v*m+p-1)",
    peak="min(v*m, 2*(p-s-1) + (v-1)*p + 1)",
    source="Narayanan et al. 2021, Efficient large-scale language model training on GPU clusters using Megatron-LM",
)
def interleaved(stage: int, stages: int, microbatches: int, chunks: int) -> Iterator[Action]:
    """1F1B with several chunks per stage: the bubble shrinks by their number, and messages grow in number by it.

    Micro-batches go through in groups of as many as there are stages, through one chunk after the other.
    """
    if microbatches % stages:
        raise AlgorithmError(
            f"pipeline schedule interleaved: the number of micro-batches, {microbatches}, must be a multiple of the"
            f" number of stages, {stages}; looped_bfs accepts any number"
        )
    groups = [range(first, first + stages) for first in range(0, microbatches, stages)]
    yield from _alternate(
        [Action("F", microbatch, chunk) for group in groups for chunk in range(chunks) for microbatch in group],
        [
            Action("B", microbatch, chunk)
            for group in groups
            for chunk in reversed(range(chunks))
            for microbatch in group
        ],
        ahead=2 * (stages - stage - 1) + (chunks - 1) * stages,
    )


@register(
    splits=True,
    bubble="1 - 3*m / (2*m+p-1+max(p,m))",
    peak="min(m, p)",
    source="Qi et al. 2023, Zero bubble pipeline parallelism (ZB-H1)",
)
def zero_bubble(stage: int, stages: int, microbatches: int) -> Iterator[Action]:
    """1F1B with a split backward: I is sent to the previous stage at once, W fills the gaps.

    Stage ``s`` delays its W by ``s`` micro-batches, so that every stage keeps as many activations as the first one,
    which keeps as many as in 1F1B.
    """
    for action in _alternate(
        [Action("F", microbatch) for microbatch in range(microbatches)],
        [Action("I", microbatch) for microbatch in range(microbatches)],
        ahead=stages - stage - 1,
    ):
        yield action
        if action.kind == "I" and action.microbatch >= stage:
            yield Action("W", action.microbatch - stage)
    for microbatch in range(max(0, microbatches - stage), microbatches):
        yield Action("W", microbatch)


@register(
    chunked=True,
    bubble="1 - v*m / ((v-1)*max(p,m)+m+p-1)",
    peak="v*m",
    source="Lamy-Poirier 2022, Breadth-first pipeline parallelism",
)
def looped_bfs(stage: int, stages: int, microbatches: int, chunks: int) -> Iterator[Action]:
    """GPipe with several chunks per stage: all micro-batches through one chunk, then all through the next."""
    for chunk in range(chunks):
        for microbatch in range(microbatches):
            yield Action("F", microbatch, chunk)
    for chunk in reversed(range(chunks)):
        for microbatch in range(microbatches):
            yield Action("B", microbatch, chunk)


@register(chunked=True, backward=False, bubble="1 - v*m / ((v-1)*max(p,m)+m+p-1)", peak="0")
def forward_only(stage: int, stages: int, microbatches: int, chunks: int) -> Iterator[Action]:
    """Run forwards only, for evaluation.

    Micro-batches go through all chunks in groups of as many as there are stages, the last group of up to twice as many,
    so that outputs which wait for their next chunk do not accumulate.
    """
    groups = max(1, microbatches // stages)
    for group in range(groups):
        end = (group + 1) * stages if group < groups - 1 else microbatches
        for chunk in range(chunks):
            for microbatch in range(group * stages, end):
                yield Action("F", microbatch, chunk)


def _alternate(forwards: list[Action], backwards: list[Action], ahead: int) -> Iterator[Action]:
    """Yield `ahead` forwards, then forwards and backwards alternately, then the remaining backwards."""
    ahead = min(ahead, len(forwards))
    yield from forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(forwards) - ahead :]
