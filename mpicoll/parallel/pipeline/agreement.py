"""Agreement of the stages of an engine on the schedule, and on the tied parameters."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from mpicoll.collectives.bcast import bcast
from mpicoll.engine.core.communicator import Communicator
from mpicoll.errors import (
    AlgorithmError,
    ArgumentError,
    DTypeError,
    ShapeError,
)
from mpicoll.parallel.p2p import PipeP2P
from mpicoll.parallel.pipeline import schedules
from mpicoll.parallel.pipeline.verify import verify


class _StageTerms(NamedTuple):
    """Data that stages exchange when the engine is made.

    The work on which all must agree, a checksum of the script, the error of this stage, and (shape, dtype) of its tied
    parameters.
    """

    work: str
    script: int
    failure: str
    tied: dict[str, tuple[tuple[int, ...], str]]


def gather_objects(p2p: PipeP2P, own: Any) -> list[Any]:
    """Return the objects of all stages, on all stages."""
    if p2p.stage > 0:
        p2p.send_obj(own, 0)
        gathered: list[Any] = p2p.recv_obj(0)
        return gathered
    gathered = [own, *(p2p.recv_obj(stage) for stage in range(1, p2p.stages))]
    for stage in range(1, p2p.stages):
        p2p.send_obj(gathered, stage)
    return gathered


def _check_modules(p2p: PipeP2P, modules: Sequence[Any]) -> None:
    for one in modules:
        if not isinstance(one, nn.Module):
            raise ArgumentError(
                "PipelineEngine: modules must be a module of torch.nn, or a sequence of them, got a"
                f" {type(one).__name__} (stage {p2p.stage} of {p2p.stages})"
            )


def check_agreement(
    p2p: PipeP2P, schedule: str, micro_batches: int, modules: Sequence[nn.Module], tied: Mapping[str, nn.Parameter]
) -> dict[str, list[int]]:
    """Return the stages that hold each tied parameter.

    Raises on all stages if one of them fails, or would run another schedule.
    """
    chunks = len(modules)
    work = f"schedule {schedule!r}, {micro_batches} micro-batches, {chunks} chunks"
    own_terms, failure = _StageTerms(work, 0, "", {}), None
    try:
        _check_modules(p2p, modules)
        if not schedules.find(schedule).backward:
            able = ", ".join(name for name, one in schedules.schedules().items() if one.backward)
            raise AlgorithmError(
                f"PipelineEngine: schedule {schedule!r} has no backward, so it can't train; use one of {able}"
                " (eval_batch and predict need no backward)"
            )
        verify(schedule, p2p.stages, micro_batches, chunks)
        script = schedules.schedule(schedule, p2p.stages, micro_batches, chunks)
        own = {name: (tuple(one.shape), str(one.dtype)) for name, one in tied.items()}
        own_terms = _StageTerms(work, zlib.crc32(repr(script).encode()), "", own)
    except Exception as error:  # noqa: BLE001  no stage must wait for this one
        own_terms, failure = _StageTerms(work, 0, f"{type(error).__name__}: {error}", {}), error
    all_terms: list[_StageTerms] = gather_objects(p2p, own_terms)
    if failure is not None:
        raise failure
    for stage, other in enumerate(all_terms):
        if other.failure:
            raise ArgumentError(f"PipelineEngine: creating the engine failed on stage {stage}: {other.failure}")
        if (other.work, other.script) != (own_terms.work, own_terms.script):
            same = ", but another schedule with the same name" if other.work == own_terms.work else ""
            raise ArgumentError(
                f"PipelineEngine: all stages must pass the same schedule, micro_batches and number of modules;"
                f" stage {p2p.stage} has {own_terms.work}; stage {stage} has {other.work}{same}"
            )
    holders: dict[str, list[int]] = {}
    for stage, other in enumerate(all_terms):
        for name in other.tied:
            holders.setdefault(name, []).append(stage)
    for name, stages in holders.items():
        kinds = {stage: all_terms[stage].tied[name] for stage in stages}
        if len({shape for shape, _ in kinds.values()}) > 1:
            raise ShapeError(f"PipelineEngine: tied parameter {name!r} differs in shape among stages: {kinds}")
        if len(set(kinds.values())) > 1:
            raise DTypeError(f"PipelineEngine: tied parameter {name!r} differs in dtype among stages: {kinds}")
    return holders


def share_tied(
    comm: Communicator, tied: Mapping[str, nn.Parameter], holders: Mapping[str, list[int]]
) -> list[tuple[nn.Parameter, Communicator]]:
    """Return the parameters that other stages also hold, each with a communicator of those stages."""
    found = []
    for name, stages in holders.items():
        if comm.rank in stages and len(stages) > 1:
            holding = comm.group(stages)
            assert holding is not None
            bcast(tied[name].detach(), 0, out=tied[name].detach(), comm=holding)
            found.append((tied[name], holding))
    return found
