"""Pipelines: a model cut into stages that work on different micro-batches at the same time.

A schedule says what each stage does in which order. It is data: :func:`verify` proves that it works, :func:`timeline`
tells when what happens, :func:`draw` shows it, and :class:`PipelineEngine` carries it out. :func:`register` adds one.
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
