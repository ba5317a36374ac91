"""Execution of a pipeline schedule: forwards and backwards of micro-batches on the stages of a model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mpicoll.collectives.allreduce import allreduce
from mpicoll.engine.core.communicator import Communicator
from mpicoll.errors import (
    ArgumentError,
    CommunicationError,
    CommunicatorError,
    DTypeError,
    ShapeError,
    Timeout,
)
from mpicoll.parallel import gradients, groups
from mpicoll.parallel.p2p import PipeP2P
from mpicoll.parallel.p2p.operations import wrap_error
from mpicoll.parallel.pipeline import schedules
from mpicoll.parallel.pipeline.agreement import check_agreement, gather_objects, share_tied
from mpicoll.parallel.pipeline.batch import (
    LEAF_TYPES,
    Batch,
    SavedTensors,
    concatenate_outputs,
    detach,
    find_tensors,
    split_batch,
)
from mpicoll.parallel.pipeline.schedules import Action
from mpicoll.parallel.pipeline.split_backward import backward, backward_input, copy_views
from mpicoll.parallel.pipeline.timeline import Timeline, timeline_from_events

Loss: TypeAlias = Callable[[Any, Any], Any]
"""A function of the last part's output and the targets of a micro-batch that returns the mean loss, a 0-d tensor."""


_RESULT_CHANNEL = 0
"""The channel of results that the last stage sends to all others. Channels of chunks are above it."""


class PipelineEngine:
    """A model divided into pipeline stages, which are trained and evaluated batch by batch.

    Each rank of the pipeline passes its part of the model. Making an engine is collective over `group`. A stage that
    calls another method than the others, or `predict` with other `micro_batches`, gets CommunicationError. After an
    exception in the middle of a batch the stages are no longer synchronized: all later calls raise CommunicatorError,
    and other stages get Timeout.

    torch.distributed.pipelining runs on mpicoll, too. It is the better choice for dividing a model automatically, by
    tracing. Here shapes may change with each micro-batch, schedules are verified before they run, weights can be tied,
    gradients are averaged over data parallel ranks, every rank gets the loss, and a mismatch between stages raises an
    error.

    Args:
        modules: one module or, for schedules of several chunks, one for each: chunk c of stage s of p is the (c p +
            s)-th part of the model. A part takes the result of the previous part: a tensor, or a tuple, list or dict of
            tensors, numbers, strings and None, of any shape each time. The part must not change its result later.
        loss_fn: called on the last stage with the output of the last part and the targets of a micro-batch; returns its
            mean loss.
        micro_batches: the number of micro-batches of a batch.
        schedule: a name of :mod:`mpicoll.parallel.pipeline.schedules`, the same on all stages: ``gpipe``, ``1f1b``,
            ``interleaved``, ``zero_bubble``, ``looped_bfs`` or a registered one. It is verified here. The two halves of
            a backward in ``zero_bubble`` may call hooks of tensors twice. With it, parts that torch.compile has
            compiled need ``torch._functorch.config.donated_buffer = False``, and checkpoints ``use_reentrant=False``.
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
        ArgumentError: stages pass different `micro_batches`, `schedule` or numbers of chunks, or a stage fails, such as
            by `modules` that are none; on all stages.
        ScheduleError: the schedule is not correct.
        ShapeError: tied parameters differ in shape.
        DTypeError: tied parameters differ in dtype.

    Example:
        ::

            engine = PipelineEngine(nn.Linear(4, 4), functional.mse_loss, micro_batches=2)
            optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
            for inputs, targets in [(torch.ones(6, 4), torch.zeros(6, 4))]:
                optimizer.zero_grad()
                loss = engine.train_batch(inputs, targets)
                optimizer.step()
            engine.free()
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
        given: Any = modules
        several = isinstance(given, Iterable) and not isinstance(given, nn.Module)
        self.modules: list[nn.Module] = [*given] if several else [given]
        self.loss_fn = loss_fn
        self.micro_batches = micro_batches
        self.schedule = schedule
        self.comm = groups.communicator(group, "pipe")
        self.stage, self.stages = self.comm.rank, self.comm.size
        self._replicas = _find_replica_communicator(data_group)
        self._p2p = PipeP2P(self.comm, timeout=timeout)
        self._events: list[tuple[int, Action, float, float]] = []
        self._failed = ""
        try:
            holders = check_agreement(self._p2p, schedule, micro_batches, self.modules, tied or {})
            self._tied = share_tied(self.comm, tied or {}, holders)
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
                are divided into `micro_batches` parts, which differ by one sample at most. All else in them, such as
                numbers, strings, None and numpy arrays, goes to each part whole. Other stages' values are ignored.
            targets: the same, on the last stage. Their length is not compared with that of the inputs, since a loss may
                take, for example, a target for each token of a sample; `loss_fn` gets the parts of both.
            reduce: then sum the gradients of tied parameters and average all gradients over `data_group`; pass False
                for all but the last of several batches between two steps.

        Returns:
            The mean of `loss_fn` over all samples, and over `data_group`: a 0-d float64 tensor, the same on all ranks.

        Raises:
            ArgumentError: a stage lacks its inputs or targets; raised before any message leaves.
            ShapeError: they can't be divided; raised before any message leaves.
        """
        batch = self._make_batch("train_batch", inputs, targets, self.schedule, self.micro_batches)
        loss = self._run(batch)
        if reduce:
            self.reduce_gradients()
        return self._average_loss(loss)

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
        batch = self._make_batch("eval_batch", inputs, targets, "forward_only", self.micro_batches)
        return self._average_loss(self._run_forward_only(batch))

    def predict(self, inputs: Any = None, *, micro_batches: int = 1) -> Any:
        """Return the model's output on every stage, without gradients and with the modules in evaluation mode.

        The first stage passes `inputs`; outputs of several micro-batches are concatenated along axis 0.

        Raises:
            DTypeError: outputs of several micro-batches contain objects that are not tensors, numbers, strings or None.
            ArgumentError: they differ in structure, or in numbers, strings and None.
        """
        batch = self._make_batch("predict", inputs, None, "forward_only", micro_batches)
        return self._run_forward_only(batch)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients of the whole model to a norm of at most `max_norm`, and return the norm before.

        See :func:`mpicoll.parallel.gradients.clip_grad_norm_`. Tied parameters count once. The tensor parallel group is
        that of the grid in use; without a grid the model is divided into pipeline stages only.
        """
        grid = groups.get_current_grid()
        comm = self.comm if grid is None else grid.communicator("pipe", "model")
        first = grid is None or grid.communicator("model").rank == 0
        copies = [parameter for parameter, holders in self._tied if holders.rank > 0]
        return gradients.clip(list(self.parameters()), max_norm, norm_type, comm, first=first, copies=copies)

    def timeline(self) -> Timeline:
        """Return the times of all actions in the last batch. Collective over the pipeline.

        Times of stages on several hosts are those of the clock of each host.
        """
        return timeline_from_events(
            [event for events in gather_objects(self._p2p, self._events) for event in events], name=self.schedule
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

    def _make_batch(self, operation: str, inputs: Any, targets: Any, schedule: str, count: int) -> Batch:
        actions = schedules.actions(schedule, self.stage, self.stages, count, len(self.modules))
        has_targets = self.is_last_stage and operation != "predict"
        input_parts = self._split_argument(operation, "inputs", inputs, count) if self.is_first_stage else []
        target_parts = self._split_argument(operation, "targets", targets, count) if has_targets else []
        lengths = [len(find_tensors(part)[0]) for part in target_parts]
        weights = [length / sum(lengths) for length in lengths]
        return Batch(
            f"{operation} of {count} micro-batches",
            actions,
            input_parts,
            target_parts,
            weights,
            operation == "train_batch",
        )

    def _split_argument(self, operation: str, name: str, value: Any, count: int) -> list[Any]:
        """Divide `value`, the argument `name`, along axis 0 for `count` micro-batches."""
        where = f"(stage {self.stage} of {self.stages})"
        if value is None:
            raise ArgumentError(f"{operation}: this stage must pass {name}, got None {where}")
        lengths = {len(one) if one.dim() else 0 for one in find_tensors(value)}
        if len(lengths) != 1 or min(lengths) < count:
            raise ShapeError(
                f"{operation}: {name} must be tensors with one length along axis 0, at least the {count} micro-batches,"
                f" got shapes {[tuple(one.shape) for one in find_tensors(value)]} {where}"
            )
        return split_batch(value, count)

    def _run_forward_only(self, batch: Batch) -> Any:
        with torch.no_grad(), _use_evaluation_mode(self.modules):
            return self._run(batch)

    def _average_loss(self, loss: Tensor) -> Tensor:
        """Return `loss`, averaged over data parallel ranks."""
        return loss if self._replicas is None else allreduce(loss, "avg", comm=self._replicas)

    # --- actions

    def _run(self, batch: Batch) -> Any:
        """Run the batch, and return the last stage's result on all stages."""
        if self._failed and self.stages > 1:
            raise CommunicatorError(
                f"{batch.mark}: an engine can't be used after an exception in the middle of a batch, because its stages"
                f" are no longer synchronized; create a new one on all of them (stage {self.stage} of {self.stages}:"
                f" {self._failed})"
            )
        try:
            self._run_actions(batch)
            return self._share_result(batch)
        except BaseException as error:
            self._failed = f"{batch.mark} ended in {type(error).__name__}"
            raise

    def _run_actions(self, batch: Batch) -> None:
        actions = batch.actions
        self._events = []
        own: dict[tuple[bool, int, int], Any] = {}
        for action in actions:
            source = schedules.source(action, self.stage, self.stages, len(self.modules))
            if source is not None and source[0] != self.stage:
                received = self._receive(batch, action, *source)
            else:
                received = own.pop(_get_input_key(action), None)
            begin = time.perf_counter()
            result = self._execute(batch, action, received)
            self._events.append((self.stage, action, begin, time.perf_counter()))
            to = schedules.dest(action, self.stage, self.stages, len(self.modules))
            if to is not None and to[0] == self.stage:
                own[action.kind == "F", action.microbatch, to[1]] = detach(result)
            elif to is not None:
                self._p2p.isend((self.stage, batch.mark, result), to[0], channel=_get_channel(action, action.chunk))
            self._p2p.poll()
        self._p2p.wait()

    def _receive(self, batch: Batch, action: Action, stage: int, chunk: int) -> Any:
        """Receive the input of `action` from `chunk` of another stage."""
        try:
            return self._unwrap(batch, *self._p2p.recv(stage, channel=_get_channel(action, chunk)))
        except CommunicationError as error:
            what = "output of the previous part" if action.kind == "F" else "gradient of its output"
            raise wrap_error(f"{batch.mark}: {action} needs the {what}: {error}", error) from error

    def _unwrap(self, batch: Batch, sender: int, mark: str, value: Any) -> Any:
        """Return the `value` of a message from `sender`. Raise CommunicationError if it is of another operation."""
        if mark != batch.mark:
            raise CommunicationError(
                f"stage {self.stage} runs {batch.mark}, but stage {sender} sent it a value of {mark};"
                " all stages must call the same method with the same micro_batches"
            )
        return value

    def _share_result(self, batch: Batch) -> Any:
        """Return the loss, or without targets the outputs of all micro-batches."""
        if not self.is_last_stage:
            return self._unwrap(batch, *self._p2p.recv(self.stages - 1, channel=_RESULT_CHANNEL))
        if batch.targets:
            found = batch.loss
        else:
            outputs = [batch.outputs[number] for number in sorted(batch.outputs)]
            found = concatenate_outputs(outputs, f"(stage {self.stage} of {self.stages})")
        for stage in range(self.stages - 1):
            self._p2p.isend((self.stage, batch.mark, found), stage, channel=_RESULT_CHANNEL)
        self._p2p.wait()
        return found

    def _execute(self, batch: Batch, action: Action, received: Any) -> Any:
        key = action.microbatch, action.chunk
        if action.kind == "F":
            return self._forward(batch, action, received)
        if action.kind == "W":
            batch.weight_backwards.pop(key)()
            return None
        kept = batch.saved.pop(key)
        grads = [torch.ones_like(one) for one in kept.outputs] if received is None else received
        if action.kind == "B":
            return backward(kept.outputs, grads, kept.inputs)
        result, batch.weight_backwards[key] = backward_input(
            kept.outputs, grads, kept.inputs, list(self.modules[action.chunk].parameters())
        )
        return result

    def _forward(self, batch: Batch, action: Action, received: Any) -> Any:
        number = action.microbatch
        virtual = action.chunk * self.stages + self.stage
        value = batch.inputs[number] if virtual == 0 else received
        # Before the part runs, which may replace the tensors in a dict or list that it takes.
        inputs = [one for one in find_tensors(value) if virtual and one.requires_grad]
        output = self.modules[action.chunk](value)
        if virtual == self.stages * len(self.modules) - 1:
            if batch.targets:
                output = self._weighted_loss(batch, output, number)
            else:
                batch.outputs[number] = output
        else:
            self._check_output(output, virtual)
            if batch.train and self._splits:
                output = copy_views(output)
        if batch.train:
            batch.saved[number, action.chunk] = SavedTensors(
                inputs,
                [one for one in find_tensors(output) if one.requires_grad],
            )
        return output

    def _check_output(self, output: Any, virtual: int) -> None:
        for one in tree_leaves(output):
            if not isinstance(one, LEAF_TYPES):
                raise DTypeError(
                    f"PipelineEngine: part {virtual} of the model returned a {type(one).__name__}, through which"
                    " gradients can't be propagated; return tuples, lists and dicts of tensors, numbers, strings and"
                    f" None (stage {self.stage} of {self.stages})"
                )

    def _weighted_loss(self, batch: Batch, output: Any, number: int) -> Tensor:
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


def _find_replica_communicator(group: Any) -> Communicator | None:
    """Return the communicator of the ranks that hold the same part of the model; None if there is no other."""
    if group is None and groups.get_current_grid() is None:
        return None
    comm = gradients.get_replica_communicator(group)
    return comm if comm.size > 1 else None


def _get_input_key(action: Action) -> tuple[bool, int, int]:
    """Return the key of the input of `action`: (forward, micro-batch, chunk)."""
    return action.kind == "F", action.microbatch, action.chunk


def _get_channel(action: Action, chunk: int) -> int:
    """Return the channel of messages from `chunk` in the direction of `action`.

    With two stages the next one is also the previous one, so the directions need separate channels.
    """
    return 1 + 2 * chunk + (action.kind != "F")


@contextmanager
def _use_evaluation_mode(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Set the modules and all their submodules to evaluation mode inside the ``with`` block."""
    training = [one for module in modules for one in module.modules() if one.training]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for one in training:
            one.training = True
