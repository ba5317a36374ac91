"""Execution of a pipeline schedule: forwards and backwards of micro-batches on the stages of a model."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from mpicoll.collectives.allreduce import allreduce
from mpicoll.collectives.bcast import bcast
from mpicoll.engine.core.communicator import Communicator
from mpicoll.engine.core.request import Request
from mpicoll.errors import (
    AlgorithmError,
    ArgumentError,
    CommunicationError,
    CommunicatorError,
    DTypeError,
    ShapeError,
    Timeout,
)
from mpicoll.parallel import gradients, groups
from mpicoll.parallel.p2p import PipeP2P
from mpicoll.parallel.p2p.channels import wrap_error
from mpicoll.parallel.pipeline import schedules
from mpicoll.parallel.pipeline.schedules import Action
from mpicoll.parallel.pipeline.split_backward import backward, backward_input, own_memory
from mpicoll.parallel.pipeline.timeline import Timeline, timeline_from_events
from mpicoll.parallel.pipeline.verify import verify

Loss: TypeAlias = Callable[[Any, Any], Any]
"""A function of the last part's output and the targets of a micro-batch that returns the mean loss, a 0-d tensor."""


_PLAIN = (Tensor, type(None), bool, int, float, str)
"""Types of leaves in the tuples, lists and dicts that parts pass to each other."""

_RESULT = 0
"""The channel of results that the last stage sends to all others. Channels of chunks are above it."""


class _StageTerms(NamedTuple):
    """Data that stages exchange when the engine is made.

    The work on which all must agree, a checksum of the script, the error of this stage, and (shape, dtype) of its tied
    parameters.
    """

    work: str
    script: int
    failure: str
    tied: dict[str, tuple[tuple[int, ...], str]]


@dataclass(slots=True)
class _SavedTensors:
    """Tensors that require grad, which a forward keeps for its backward."""

    inputs: list[Tensor]
    outputs: list[Tensor]


@dataclass(slots=True)
class _Batch:
    """State of a batch in the pipeline on one stage; micro-batches by number.

    `mark` is part of every message, and detects stages that run different operations.
    """

    mark: str
    actions: Sequence[Action]
    inputs: Sequence[Any]
    targets: Sequence[Any]
    weights: Sequence[float]
    train: bool
    saved: dict[tuple[int, int], _SavedTensors] = field(default_factory=dict)
    later: dict[tuple[int, int], Callable[[], object]] = field(default_factory=dict)
    loss: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    outputs: dict[int, Any] = field(default_factory=dict)


class PipelineEngine:
    """A model divided into pipeline stages, which are trained and evaluated batch by batch.

    Each rank of the pipeline passes its part of the model. Making an engine is collective over `group`. A stage that
    calls another method than the others, or `predict` with other `micro_batches`, gets CommunicationError. After an
    exception in the middle of a batch the stages are out of step: from then on methods raise CommunicatorError, and
    other stages get Timeout.

    torch.distributed.pipelining runs on mpicoll, too. It is the better choice for dividing a model automatically, by
    tracing. Here shapes may change with each micro-batch, schedules are verified before they run, weights can be tied,
    gradients are averaged over data parallel ranks, every rank gets the loss, and a mismatch between stages is an
    error.

    Args:
        modules: one module or, for schedules of several chunks, one for each: chunk c of stage s of p is the (c p +
            s)-th part of the model. A part takes the result of the previous part: a tensor, or a tuple, list or dict of
            tensors, numbers, strings and None, of any shape each time. The part must not change its result later.
        loss_fn: called on the last stage with the output of the last part and the targets of a micro-batch; returns its
            mean loss.
        micro_batches: the number of micro-batches of a batch.
        schedule: a name of :mod:`mpicoll.parallel.pipeline.schedules`, the same on all stages: ``gpipe``, ``1f1b``,
            ``interleaved``, ``zero_bubble`` or a registered one. It is verified here.
        tied: parameters that several stages hold, such as an embedding and the projection at the other end of the
            model: ``{"embedding": parameter}`` on each stage that has one. They start with the value of the first of
            these stages, and their gradients are summed.
        group: the ranks of the pipeline, stage by stage, by default the ``pipe`` axis of the grid in use.
        data_group: the ranks that hold the same part and see other data, by default the ``data`` and ``context`` axes
            of the grid in use; without a grid, this rank only.
        timeout: the bound in seconds of each wait for another stage (default: MPICOLL_TIMEOUT). A wait may last as long
            as a batch, because all stages wait for the loss. Collectives, for gradients of tied parameters and over
            `data_group`, are bounded by MPICOLL_TIMEOUT.

    Raises:
        ArgumentError: stages pass different `micro_batches`, `schedule` or numbers of chunks, or a stage fails; on all
            stages.
        ScheduleError: the schedule is not correct.
        ShapeError: tied parameters differ in shape.
        DTypeError: tied parameters differ in dtype.

    Example:
        ::

            engine = PipelineEngine(my_part, functional.cross_entropy, micro_batches=8)
            for inputs, targets in batches:
                optimizer.zero_grad()
                loss = engine.train_batch(inputs, targets)
                optimizer.step()
    """

    def __init__(
        self,
        modules: nn.Module | Sequence[nn.Module],
        loss_fn: Loss,
        *,
        micro_batches: int,
        schedule: str = "1f1b",
        tied: Mapping[str, nn.Parameter] | None = None,
        group: Any = None,
        data_group: Any = None,
        timeout: float | None = None,
    ) -> None:
        self.modules = [modules] if isinstance(modules, nn.Module) else list(modules)
        self.loss_fn = loss_fn
        self.micro_batches = micro_batches
        self.schedule = schedule
        self.comm = groups.communicator(group, "pipe")
        self.stage, self.stages = self.comm.rank, self.comm.size
        self._replicas = _replica_communicator(data_group)
        self._p2p = PipeP2P(self.comm, timeout=timeout)
        self._events: list[tuple[int, Action, float, float]] = []
        self._failed = ""
        try:
            self._tied = self._tie(tied or {}, self._agree(tied or {}))
        except Exception as error:
            if not isinstance(error, CommunicationError):
                self._p2p.close()  # collective, but then all stages raise
            raise
        self._splits = schedules.find(schedule).splits

    @property
    def is_first_stage(self) -> bool:
        """True if this rank holds the first part of the model, which takes the inputs."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """True if this rank holds the last part of the model, which computes the loss."""
        return self.stage == self.stages - 1

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return an iterator over the parameters of this rank's parts, each once."""
        return iter(dict.fromkeys(one for module in self.modules for one in module.parameters()))

    def train_batch(self, inputs: Any = None, targets: Any = None, *, reduce: bool = True) -> Tensor:
        """Run forward and backward of a batch, and return its mean loss. Collective over the pipeline and `data_group`.

        Gradients are added to ``.grad``.

        Args:
            inputs: on the first stage: a tensor, or a tuple, list or dict of tensors, whose axis 0 is the batch. They
                are divided into `micro_batches` parts, which differ by one sample at most. Other stages' values are
                ignored.
            targets: the same, on the last stage.
            reduce: then sum the gradients of tied parameters and average all gradients over `data_group`; pass False
                for all but the last of several batches between two steps.

        Returns:
            The mean of `loss_fn` over all samples, and over `data_group`: a 0-d float64 tensor, the same on all ranks.

        Raises:
            ArgumentError: a stage lacks its inputs or targets; raised before any message leaves.
            ShapeError: they can't be divided; raised before any message leaves.
        """
        batch = self._batch("train_batch", inputs, targets, self.schedule, self.micro_batches)
        loss = self._run(batch)
        if reduce:
            self.reduce_gradients()
        return self._mean(loss)

    def reduce_gradients(self) -> None:
        """Sum the gradients of tied parameters over their stages, and average all over `data_group`."""
        for parameter, comm in self._tied:
            gradients.sum_gradients([parameter], comm)
        if self._replicas is not None:
            gradients.average_gradients(self.parameters(), self._replicas)

    def eval_batch(self, inputs: Any = None, targets: Any = None) -> Tensor:
        """Return the loss of a batch, without gradients and with the modules in evaluation mode.

        Arguments and result are those of :meth:`train_batch`.
        """
        batch = self._batch("eval_batch", inputs, targets, "forward_only", self.micro_batches)
        return self._mean(self._forward_only(batch))

    def predict(self, inputs: Any = None, *, micro_batches: int = 1) -> Any:
        """Return the model's output on every stage, without gradients and with the modules in evaluation mode.

        The first stage passes `inputs`; outputs of several micro-batches are concatenated along axis 0.
        """
        batch = self._batch("predict", inputs, None, "forward_only", micro_batches)
        return self._forward_only(batch)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients of the whole model to a norm of at most `max_norm`, and return the norm before.

        See :func:`mpicoll.parallel.gradients.clip_grad_norm_`. Tied parameters count once. The tensor parallel group is
        that of the grid in use; without a grid the model is divided into pipeline stages only.
        """
        grid = groups.current_grid()
        comm = self.comm if grid is None else grid.communicator("pipe", "model")
        first = grid is None or grid.communicator("model").rank == 0
        copies = [parameter for parameter, holders in self._tied if holders.rank > 0]
        return gradients.clip(list(self.parameters()), max_norm, norm_type, comm, first=first, copies=copies)

    def timeline(self) -> Timeline:
        """Return the times of all actions in the last batch. Collective over the pipeline.

        Times of stages on several hosts are those of their own clocks.
        """
        return timeline_from_events(
            [event for events in self._gather_objects(self._events) for event in events], name=self.schedule
        )

    def free(self) -> None:
        """Free the engine's communicators. Collective over the pipeline.

        After an exception in the middle of a batch, the rest of the batch is discarded; raises Timeout if another stage
        does not call it.
        """
        try:
            self._p2p.close()
        except CommunicationError as error:
            if not self._failed or isinstance(error, Timeout):
                raise
        for _, comm in self._tied:
            comm.free()
        self._tied = []

    # --- a batch

    def _batch(self, operation: str, inputs: Any, targets: Any, schedule: str, count: int) -> _Batch:
        actions = schedules.actions(schedule, self.stage, self.stages, count, len(self.modules))
        scored = self.is_last_stage and operation != "predict"
        ins = self._parts(operation, "inputs", inputs, count) if self.is_first_stage else []
        outs = self._parts(operation, "targets", targets, count) if scored else []
        lengths = [len(_tensors(part)[0]) for part in outs]
        weights = [length / sum(lengths) for length in lengths]
        return _Batch(f"{operation} of {count} micro-batches", actions, ins, outs, weights, operation == "train_batch")

    def _parts(self, operation: str, name: str, value: Any, count: int) -> list[Any]:
        """Divide `value`, the argument `name`, along axis 0 for `count` micro-batches."""
        where = f"(stage {self.stage} of {self.stages})"
        if value is None:
            raise ArgumentError(f"{operation}: this stage needs {name}, got None {where}")
        lengths = {len(one) if one.dim() else 0 for one in _tensors(value)}
        if len(lengths) != 1 or min(lengths) < count:
            raise ShapeError(
                f"{operation}: {name} must be tensors with one length along axis 0, at least the {count} micro-batches,"
                f" got shapes {[tuple(one.shape) for one in _tensors(value)]} {where}"
            )
        return _cut(value, count)

    def _forward_only(self, batch: _Batch) -> Any:
        with torch.no_grad(), _evaluating(self.modules):
            return self._run(batch)

    def _mean(self, loss: Tensor) -> Tensor:
        """Return `loss`, averaged over data parallel ranks."""
        return loss if self._replicas is None else allreduce(loss, "avg", comm=self._replicas)

    # --- actions

    def _run(self, batch: _Batch) -> Any:
        """Run the batch, and return the last stage's result on all stages."""
        if self._failed and self.stages > 1:
            raise CommunicatorError(
                f"{batch.mark}: an engine can't be used after an exception in the middle of a batch, as its stages are"
                f" out of step; make a new one on all of them (stage {self.stage} of {self.stages}: {self._failed})"
            )
        try:
            self._run_actions(batch)
            return self._from_last_stage(batch)
        except BaseException as error:
            self._failed = f"{batch.mark} ended in {type(error).__name__}"
            raise

    def _run_actions(self, batch: _Batch) -> None:
        actions = batch.actions
        self._events = []
        arriving: dict[Action, Request] = {}
        own: dict[tuple[bool, int, int], Any] = {}
        self._post_recv(actions[0], arriving)
        for action, following in zip(actions, [*actions[1:], None], strict=True):
            if following is not None:
                # Posted before this action computes, so that what the next one needs can come meanwhile.
                self._post_recv(following, arriving)
            if action in arriving:
                came = self._receive(batch, action, arriving.pop(action))
            else:
                came = own.pop(_input_key(action), None)
            begin = time.perf_counter()
            result = self._execute(batch, action, came)
            self._events.append((self.stage, action, begin, time.perf_counter()))
            to = schedules.dest(action, self.stage, self.stages, len(self.modules))
            if to is not None and to[0] == self.stage:
                own[action.kind == "F", action.microbatch, to[1]] = _detach(result)
            elif to is not None:
                self._p2p.isend((self.stage, batch.mark, result), to[0], channel=_channel(action, action.chunk))
            self._p2p.poll()
        self._p2p.wait()

    def _receive(self, batch: _Batch, action: Action, request: Request) -> Any:
        """Wait for the input of `action` from another stage."""
        try:
            return self._unwrap(batch, *request.wait())
        except CommunicationError as error:
            what = "output of the part before" if action.kind == "F" else "gradient of its output"
            raise wrap_error(f"{batch.mark}: {action} waits for the {what}: {error}", error) from error

    def _unwrap(self, batch: _Batch, sender: int, mark: str, value: Any) -> Any:
        """Return the `value` of a message from `sender`. Raise CommunicationError if it is of another operation."""
        if mark != batch.mark:
            raise CommunicationError(
                f"stage {self.stage} runs {batch.mark}, but stage {sender} sent it a value of {mark};"
                " all stages must call the same method with the same micro_batches"
            )
        return value

    def _from_last_stage(self, batch: _Batch) -> Any:
        """Return the loss, or without targets the outputs of all micro-batches."""
        if not self.is_last_stage:
            return self._unwrap(batch, *self._p2p.recv(self.stages - 1, channel=_RESULT))
        found = batch.loss if batch.targets else _join([batch.outputs[number] for number in sorted(batch.outputs)])
        for stage in range(self.stages - 1):
            self._p2p.isend((self.stage, batch.mark, found), stage, channel=_RESULT)
        self._p2p.wait()
        return found

    def _post_recv(self, action: Action, arriving: dict[Action, Request]) -> None:
        """Start to receive the input of `action` from another stage."""
        origin = schedules.source(action, self.stage, self.stages, len(self.modules))
        if origin is not None and origin[0] != self.stage:
            arriving[action] = self._p2p.irecv(origin[0], channel=_channel(action, origin[1]))

    def _execute(self, batch: _Batch, action: Action, came: Any) -> Any:
        key = action.microbatch, action.chunk
        if action.kind == "F":
            return self._forward(batch, action, came)
        if action.kind == "W":
            batch.later.pop(key)()
            return None
        kept = batch.saved.pop(key)
        grads = [torch.ones_like(one) for one in kept.outputs] if came is None else came
        if action.kind == "B":
            return backward(kept.outputs, grads, kept.inputs)
        result, batch.later[key] = backward_input(
            kept.outputs, grads, kept.inputs, list(self.modules[action.chunk].parameters())
        )
        return result

    def _forward(self, batch: _Batch, action: Action, came: Any) -> Any:
        number = action.microbatch
        virtual = action.chunk * self.stages + self.stage
        value = batch.inputs[number] if virtual == 0 else came
        output = self.modules[action.chunk](value)
        if virtual == self.stages * len(self.modules) - 1:
            if batch.targets:
                output = self._weighted_loss(batch, output, number)
            else:
                batch.outputs[number] = output
        else:
            self._check_output(output, virtual)
            if batch.train and self._splits:
                output = own_memory(output)
        if batch.train:
            batch.saved[number, action.chunk] = _SavedTensors(
                [one for one in _tensors(value) if virtual and one.requires_grad],
                [one for one in _tensors(output) if one.requires_grad],
            )
        return output

    def _check_output(self, output: Any, virtual: int) -> None:
        for one in tree_leaves(output):
            if not isinstance(one, _PLAIN):
                raise DTypeError(
                    f"PipelineEngine: part {virtual} of the model returned a {type(one).__name__}, through which no"
                    " gradient finds its way; it must return tuples, lists and dicts of tensors, numbers, strings and"
                    f" None (stage {self.stage} of {self.stages})"
                )

    def _weighted_loss(self, batch: _Batch, output: Any, number: int) -> Tensor:
        loss = self.loss_fn(output, batch.targets[number])
        if not isinstance(loss, Tensor) or loss.dim():
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ShapeError(
                f"PipelineEngine: loss_fn must return the mean loss of a micro-batch, a 0-d tensor, got {got}"
                f" (stage {self.stage} of {self.stages})"
            )
        weighted = loss * batch.weights[number]
        batch.loss = batch.loss + weighted.detach().double()
        return weighted

    # --- all stages

    def _gather_objects(self, mine: Any) -> list[Any]:
        """Return the objects of all stages, on all stages."""
        if not self.is_first_stage:
            self._p2p.send_obj(mine, 0)
            everyones: list[Any] = self._p2p.recv_obj(0)
            return everyones
        everyones = [mine, *(self._p2p.recv_obj(stage) for stage in range(1, self.stages))]
        for stage in range(1, self.stages):
            self._p2p.send_obj(everyones, stage)
        return everyones

    def _agree(self, tied: Mapping[str, nn.Parameter]) -> dict[str, list[int]]:
        """Return the stages that hold each tied parameter.

        Raises on all stages if one of them fails, or would run another schedule.
        """
        chunks = len(self.modules)
        work = f"schedule {self.schedule!r}, {self.micro_batches} micro-batches, {chunks} chunks"
        mine, failure = _StageTerms(work, 0, "", {}), None
        try:
            if not schedules.find(self.schedule).backward:
                able = ", ".join(name for name, one in schedules.schedules().items() if one.backward)
                raise AlgorithmError(
                    f"PipelineEngine: schedule {self.schedule!r} has no backward, so it can't train; take one of {able}"
                    " (eval_batch and predict need none)"
                )
            verify(self.schedule, self.stages, self.micro_batches, chunks)
            script = schedules.schedule(self.schedule, self.stages, self.micro_batches, chunks)
            own = {name: (tuple(one.shape), str(one.dtype)) for name, one in tied.items()}
            mine = _StageTerms(work, zlib.crc32(repr(script).encode()), "", own)
        except Exception as error:  # noqa: BLE001  no stage must wait for this one
            mine, failure = _StageTerms(work, 0, f"{type(error).__name__}: {error}", {}), error
        everyones: list[_StageTerms] = self._gather_objects(mine)
        if failure is not None:
            raise failure
        for stage, other in enumerate(everyones):
            if other.failure:
                raise ArgumentError(f"PipelineEngine: stage {stage} can't be made: {other.failure}")
            if (other.work, other.script) != (mine.work, mine.script):
                same = ", but another schedule of that name" if other.work == mine.work else ""
                raise ArgumentError(
                    f"PipelineEngine: all stages must pass the same schedule, micro_batches and number of modules;"
                    f" stage {self.stage} has {mine.work}; stage {stage} has {other.work}{same}"
                )
        holders: dict[str, list[int]] = {}
        for stage, other in enumerate(everyones):
            for name in other.tied:
                holders.setdefault(name, []).append(stage)
        for name, stages in holders.items():
            kinds = {stage: everyones[stage].tied[name] for stage in stages}
            if len({shape for shape, _ in kinds.values()}) > 1:
                raise ShapeError(f"PipelineEngine: tied parameter {name!r} differs in shape among stages: {kinds}")
            if len(set(kinds.values())) > 1:
                raise DTypeError(f"PipelineEngine: tied parameter {name!r} differs in dtype among stages: {kinds}")
        return holders

    def _tie(
        self, tied: Mapping[str, nn.Parameter], holders: Mapping[str, list[int]]
    ) -> list[tuple[nn.Parameter, Communicator]]:
        """Return the parameters that other stages also hold, each with a communicator of those stages."""
        found = []
        for name, stages in holders.items():
            if self.stage in stages and len(stages) > 1:
                comm = self.comm.group(stages)
                assert comm is not None
                bcast(tied[name].detach(), 0, out=tied[name].detach(), comm=comm)
                found.append((tied[name], comm))
        return found


def _replica_communicator(group: Any) -> Communicator | None:
    """Return the communicator of the ranks that hold the same part of the model; None if there is no other."""
    if group is None and groups.current_grid() is None:
        return None
    comm = gradients.replica_communicator(group)
    return comm if comm.size > 1 else None


def _input_key(action: Action) -> tuple[bool, int, int]:
    """Return the key of the input of `action`: (forward, micro-batch, chunk)."""
    return action.kind == "F", action.microbatch, action.chunk


def _channel(action: Action, chunk: int) -> int:
    """Return the channel of messages from `chunk` in the direction of `action`.

    With two stages the next one is also the previous one, so the directions need separate channels.
    """
    return 1 + 2 * chunk + (action.kind != "F")


def _tensors(value: Any) -> list[Tensor]:
    return [one for one in tree_leaves(value) if isinstance(one, Tensor)]


def _detach(value: Any) -> Any:
    """Return `value` for another part of the model on this stage, detached as if received from another stage."""
    return tree_map_only(Tensor, lambda one: one.detach().requires_grad_(one.requires_grad), value)


def _cut(value: Any, count: int) -> list[Any]:
    """Divide `value` into parts for `count` micro-batches."""
    leaves, structure = tree_flatten(value)
    columns = [one.tensor_split(count) if isinstance(one, Tensor) else [one] * count for one in leaves]
    return [tree_unflatten(row, structure) for row in zip(*columns, strict=True)]


def _join(values: Sequence[Any]) -> Any:
    """Concatenate the tensors of `values`, which have one structure, along axis 0."""
    flat = [tree_flatten(value) for value in values]
    rows = zip(*(leaves for leaves, _ in flat), strict=True)
    leaves = [torch.cat(list(parts)) if isinstance(parts[0], Tensor) else parts[0] for parts in rows]
    return tree_unflatten(leaves, flat[0][1])


@contextmanager
def _evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Set the modules and all their submodules to evaluation mode inside the ``with`` block."""
    training = [one for module in modules for one in module.modules() if one.training]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for one in training:
            one.training = True
