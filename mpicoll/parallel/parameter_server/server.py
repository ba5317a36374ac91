"""Servers: the class ParameterServer."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from mpicoll.engine.world import CommLike, as_communicator
from mpicoll.errors import ArgumentError, CommunicationError, MpicollError, RankFailed
from mpicoll.logs import get_logger
from mpicoll.parallel.parameter_server.aggregation import Aggregation
from mpicoll.parallel.parameter_server.agreement import Role, Settings, agree, check_settings, server_death
from mpicoll.parallel.parameter_server.links import Links
from mpicoll.parallel.parameter_server.messages import NOTICE_TAG, Array, Payload, encode_notice, tag_of
from mpicoll.parallel.parameter_server.plan import BUCKET_BYTES, make_plan
from mpicoll.parallel.parameter_server.rules import ArrayUpdater, Rule
from mpicoll.parallel.parameter_server.worker_state import WorkerState

if TYPE_CHECKING:
    from typing_extensions import Self


class ParameterServer:
    """Server rank, which holds a part of the model and updates it with the gradients of the workers.

    The ranks of `comm` that make a ParameterServer are the servers, those that make a
    :class:`~mpicoll.parallel.parameter_server.Worker` the workers; at least one of each. Making either is collective
    over `comm`. The model and its initial values are those of the first worker; its elements are divided evenly among
    the servers. All servers pass the same arguments.

    Args:
        rule: a function that updates numpy arrays, such as :class:`~mpicoll.parallel.parameter_server.SGD`. A model
            with bfloat16, which numpy does not have, needs an optimizer.
        optimizer: in place of a rule, a function that makes a torch optimizer of a list of names and parameters, such
            as ``functools.partial(torch.optim.Adam, lr=1e-3)``. The parameters are pieces of the model's tensors: flat,
            unless a piece is a whole tensor.
        scheduler: a function that makes a learning rate scheduler of the torch optimizer, which makes one step after
            each update.
        mode: "sync": each update uses the gradients of all workers, summed in the order of their ranks, and a pull
            returns the weights after it. "async": each push is applied at once, and a pull returns the current weights.
            "ssp" (stale synchronous parallel): as "async", but a worker whose pushes exceed those of the slowest one by
            more than `staleness` waits in its pull.
        staleness: the bound of "ssp".
        max_norm: the norm to which gradients are clipped, over all tensors and servers: of the gradient of an update in
            mode "sync", of the gradient of a push in the others.
        reduction: "mean" or "sum" of the workers' gradients in mode "sync".
        bucket_bytes: the largest size of a message, unless `whole_tensors`; the last ones of a step are shorter.
        whole_tensors: do not cut tensors, for optimizers whose state depends on their shapes.
        comm: the communicator; None is :func:`mpicoll.world`.
        timeout: seconds without a message from a worker, after which Timeout is raised; by default the communicator's.

    Attributes:
        updates: the number of updates since the start.
        loaded_updates: the number of updates before the checkpoint that was loaded.
        staleness_counts: in the modes "async" and "ssp", the number of pulls by how many pushes the worker was ahead of
            the slowest one; a Counter.

    Raises:
        ArgumentError: an argument is invalid, the arguments of the servers or the models of the workers differ, or no
            rank is a worker; on all ranks. Or the optimizer can't update the parts of this server: then only servers
            that find this raise it, or what the function has raised, and the others raise CommunicationError when they
            wait next.

    Example:
        >>> def program():
        ...     if mpicoll.world().rank == 0:
        ...         rule = mpicoll.parallel.parameter_server.SGD(lr=0.5)
        ...         return mpicoll.parallel.parameter_server.ParameterServer(rule).run()
        ...     weights = np.zeros(2)
        ...     with mpicoll.parallel.parameter_server.Worker({"w": weights}) as worker:
        ...         worker.push_gradients({"w": np.ones(2)})
        ...         worker.pull_weights()
        ...     return weights.tolist()
        >>> mpicoll.run_local(program, 2)
        [None, [-0.5, -0.5]]
    """

    def __init__(
        self,
        rule: Rule | None = None,
        *,
        optimizer: Callable[[Any], Any] | None = None,
        scheduler: Callable[[Any], Any] | None = None,
        mode: str = "sync",
        staleness: int = 0,
        max_norm: float | None = None,
        reduction: str = "mean",
        bucket_bytes: int = BUCKET_BYTES,
        whole_tensors: bool = False,
        comm: CommLike = None,
        timeout: float | None = None,
    ) -> None:
        communicator = as_communicator(comm)
        settings = Settings(mode, staleness, max_norm, reduction, bucket_bytes, whole_tensors, arrays=optimizer is None)

        def make_role() -> Role:
            check_settings(settings, rule, optimizer, scheduler, timeout)
            return Role(settings=settings)

        self._job = agree(communicator, "ParameterServer", make_role)
        self._settings = settings
        self._timeout = communicator.timeout if timeout is None else timeout
        self._links = Links(self._job)
        self._states: list[WorkerState] = []
        self._index = self._job.servers.index(communicator.rank)
        specs = self._job.specs
        self._buckets = make_plan(specs, len(self._job.servers), bucket_bytes, whole_tensors=whole_tensors)[self._index]
        self._weights = [np.empty(bucket.nbytes, np.uint8) for bucket in self._buckets]
        self._receive_initial_weights()
        transfers = self._links.transfers
        self._states = [
            WorkerState(transfers, at, link.rank, self._buckets) for at, link in enumerate(self._links.links)
        ]
        self._closed = False
        # Whether something has changed since the last look at what can be applied and answered.
        self._changed = True
        self.updates = self.loaded_updates = 0
        self._turn = 0
        self.staleness_counts: Counter[int] = Counter()
        self._updater: Any = self._make_updater(rule, optimizer, scheduler)
        self._aggregation = Aggregation(settings, self._buckets, self._updater, self._links.servers)

    def _make_updater(self, rule: Rule | None, optimizer: Any, scheduler: Any) -> Any:
        try:
            if rule is not None:
                weights = [
                    ArrayUpdater.view(memory, bucket.dtype)
                    for memory, bucket in zip(self._weights, self._buckets, strict=True)
                ]
                return ArrayUpdater(rule, weights, [bucket.row for bucket in self._buckets])
            from mpicoll.parallel.parameter_server.torch_updater import TorchUpdater

            return TorchUpdater(optimizer, scheduler, self._job.specs, self._buckets, self._weights)
        except BaseException as error:
            self._fail(error)
            raise

    def __repr__(self) -> str:
        return f"<ParameterServer: {self._job.describe()}, mode {self._settings.mode}, {self.updates} updates>"

    def _receive_initial_weights(self) -> None:
        pending = self._links.transfers.recv_all(
            (0, memory, tag_of(index, Payload.WEIGHTS)) for index, memory in enumerate(self._weights)
        )
        self._links.wait(
            "ParameterServer",
            lambda: all(one.test() is not None for one in pending),
            lambda: [self._links.links[0].rank],
            self._timeout,
            any_of=False,
        )

    # --- the loop

    def run(self) -> None:
        """Serve until all workers have left."""
        while self.update_model():
            pass

    def update_model(self) -> bool:
        """Serve until the model was updated once: in mode "sync" with the gradients of all workers, in the others with
        those of one push.

        Returns:
            True after an update; False if all workers have left.

        Raises:
            RankFailed: a server has died; or, in mode "sync", a worker. All ranks raise it.
            CommunicationError: in mode "sync", a worker has left because of an error. All ranks raise it.
            Timeout: no worker has sent anything for `timeout` seconds.
        """
        if self._closed:
            return False
        target = self.updates + 1
        try:
            while self.updates < target and any(state.alive for state in self._states):
                self._links.wait(
                    "ParameterServer.update_model",
                    self._advance,
                    lambda: [state.rank for state in self._states if state.alive],
                    self._timeout,
                    any_of=True,
                )
        except BaseException as error:
            self._fail(error)
            raise
        if self.updates < target:
            self._close()
            # Freeing is collective, and a worker with an error does not take part.
            if not any(state.flag for state in self._states):
                self._links.free()
        return self.updates >= target

    def _advance(self) -> bool:
        """Do what can be done without waiting. Return True if there was anything."""
        self._links.transfers.test()
        for state in self._states:
            if state.alive and self._guarded(state, state.poll):
                self._changed = True
                self._check_departure(state)
        if not self._changed:
            return False
        progressed = self._apply_synchronously() if self._settings.mode == "sync" else self._apply_pushes()
        for state in self._states:
            if state.alive:
                progressed |= bool(self._guarded(state, partial(self._answer, state)))
        # Not more than one push is applied at a time, so there may be more to do.
        self._changed = progressed
        return True

    def _guarded(self, state: WorkerState, action: Callable[[], bool]) -> bool:
        """Return the result of `action`, which exchanges messages with a worker; True if the worker has died."""
        try:
            return action()
        except RankFailed as error:
            if self._settings.mode == "sync":
                if state.find_departure():
                    # Its error is the reason.
                    self._check_departure(state)
                raise RankFailed(
                    f'{self._job.describe()}: worker rank {state.rank} has died ({error}); mode "sync" needs all'
                    ' workers: use "async" or "ssp", or restart from a checkpoint (ParameterServer.save)',
                    error.ranks or (self._job.comm.members[state.rank],),
                ) from error
            state.abandon()
            get_logger().warning("%s: worker rank %d has died; the others continue", self._job.describe(), state.rank)
            return True

    def _check_departure(self, state: WorkerState) -> None:
        if state.alive or not state.flag:
            return
        if state.flag > 1:
            raise server_death(self._job, [state.flag - 2], f"reported by worker rank {state.rank}")
        if self._settings.mode == "sync":
            raise CommunicationError(
                f'{self._job.describe()}: worker rank {state.rank} has left because of an error; mode "sync" needs all'
                " workers"
            )

    # --- updates

    def _apply_synchronously(self) -> bool:
        workers = [state for state in self._states if state.alive]
        if not workers:
            return False
        if self._settings.max_norm is not None:
            if not all(state.has_arrived() for state in workers) or self._is_sending():
                return False
            self._aggregation.apply(range(len(self._buckets)), workers)
            progressed = True
        else:
            ready = [
                index
                for index in sorted(set.intersection(*(state.arrived for state in workers)))
                if self._aggregation.versions[index] == self.updates
                and not any(state.is_sending(index) for state in workers)
            ]
            for index in ready:
                self._aggregation.apply([index], workers)
            progressed = bool(ready)
        if (
            all(state.push is not None for state in workers)
            and min(self._aggregation.versions, default=self.updates + 1) > self.updates
        ):
            for state in workers:
                state.finish_push()
            self._end_update()
        return progressed

    def _is_sending(self) -> bool:
        return any(state.is_sending(index) for state in self._states for index in range(len(self._buckets)))

    def _apply_pushes(self) -> bool:
        # The worker that was served last has the last turn, else one with fast pushes would keep others waiting.
        count = len(self._states)
        for index in [*range(self._turn, count), *range(self._turn)]:
            state = self._states[index]
            if state.alive and state.has_arrived():
                self._aggregation.apply(range(len(self._buckets)), [state])
                state.finish_push()
                self._end_update()
                self._turn = (index + 1) % count
                # Not more than one at a time: update_model returns after each.
                return True
        return False

    def _end_update(self) -> None:
        self._updater.end_step()
        self.updates += 1

    # --- pulls

    def _answer(self, state: WorkerState) -> bool:
        buckets = state.list_unanswered()
        if state.pull is None:
            return False
        sync, clock = self._settings.mode == "sync", state.pull.clock
        if sync:
            buckets = [index for index in buckets if self._aggregation.versions[index] >= clock]
        elif state.clock < clock or self._distance(clock) > self._bound():
            return False
        for index in buckets:
            state.answer(index, self._weights[index], copy=not sync)
        if not state.finish_pull():
            return bool(buckets)
        if not sync:
            self.staleness_counts[max(0, self._distance(clock))] += 1
        return True

    def _bound(self) -> float:
        return self._settings.staleness if self._settings.mode == "ssp" else float("inf")

    def _distance(self, clock: int) -> int:
        """Return by how many pushes a worker that has made `clock` pushes is ahead of the slowest one."""
        return clock - min(state.clock for state in self._states if state.alive)

    # --- state

    def get_weights(self) -> dict[str, Array]:
        """Return a copy of the elements that this server holds of each tensor: the tensor in its shape if it is whole,
        else its elements as a flat array, in the order in which they are in the tensor."""
        pieces: dict[int, list[tuple[int, Array]]] = {}
        for bucket, memory in zip(self._buckets, self._weights, strict=True):
            for part in bucket.parts:
                begin = part.offset * bucket.itemsize
                data = memory[begin : begin + (part.stop - part.start) * bucket.itemsize]
                pieces.setdefault(part.tensor, []).append((part.start, self._updater.view(data, bucket.dtype)))
        found = {}
        for tensor, parts in sorted(pieces.items()):
            spec = self._job.specs[tensor]
            flat = self._updater.join([values for _, values in sorted(parts, key=lambda part: part[0])])
            found[spec.name] = flat.reshape(spec.shape) if len(flat) == spec.size else flat
        return found

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the weights, the state of the torch optimizer and of the scheduler in a folder, between two updates.

        Collective over the servers, which pass the same path. The folder is a checkpoint of torch (DCP) with the shapes
        of the model, which any number of servers can load; its keys are those of :mod:`mpicoll.parallel.checkpoint`.

        Raises:
            ArgumentError: `path` contains a checkpoint, or the weights are updated by a rule for numpy arrays.
            OSError: a file can't be written. The other servers raise CommunicationError.

        After an error this server can go on. If it does not, leave its ``with`` block by the error, so that the workers
        raise it, too, and need not wait for their timeouts. The same holds for :meth:`load`.
        """
        from mpicoll.parallel.parameter_server import checkpoint

        assert self._links.servers is not None
        checkpoint.save(Path(path), self._torch_updater("save"), self.updates, self._links.servers)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Load a checkpoint of :meth:`save`, before the first update. Each server reads its parts.

        The workers get the weights by their first pull, so they have to begin with one.

        Raises:
            ArgumentError: there is no checkpoint, or it is of another model, optimizer or scheduler.
        """
        from mpicoll.parallel.parameter_server import checkpoint

        self.loaded_updates = checkpoint.load(path, self._torch_updater("load"))

    def _torch_updater(self, operation: str) -> Any:
        if isinstance(self._updater, ArrayUpdater):
            raise ArgumentError(
                f"ParameterServer.{operation}: checkpoints need optimizer=; save the arrays of get_weights() instead"
            )
        return self._updater

    # --- the end

    def _fail(self, error: BaseException) -> None:
        """Have all workers raise `error`."""
        self._close()
        notice = encode_notice(error)
        left = [state.link for state in self._states if not state.alive]
        for at, link in enumerate(self._links.links):
            if at in left:
                continue
            try:
                self._links.transfers.send(at, notice, NOTICE_TAG)
            except MpicollError:
                get_logger().debug("rank %d is not informed of an error, since it has died", link.rank)

    def _close(self) -> None:
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.run()
        elif not self._closed:
            self._fail(error)
