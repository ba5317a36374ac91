"""Pipelines: a model divided into stages that work on different micro-batches at the same time.

A schedule is data: the order of actions of each stage. :func:`verify` proves that it is correct, :func:`timeline`
computes when each action runs, :func:`draw` draws it, and :class:`PipelineEngine` runs it. :func:`register` adds one.
"""

from mpicoll.parallel.pipeline.draw import draw
from mpicoll.parallel.pipeline.engine import PipelineEngine
from mpicoll.parallel.pipeline.schedules import Action, actions, peak_activations, register
from mpicoll.parallel.pipeline.timeline import Timeline, timeline
from mpicoll.parallel.pipeline.verify import verify

__all__ = [
    "Action",
    "PipelineEngine",
    "Timeline",
    "actions",
    "draw",
    "peak_activations",
    "register",
    "timeline",
    "verify",
]
