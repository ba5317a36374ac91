"""Workers: the class Worker."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from mpicoll.engine.world import CommLike, as_communicator
from mpicoll.errors import ArgumentError
from mpicoll.parallel.parameter_server.agreement import Role, agree
from mpicoll.parallel.parameter_server.arrays import ArrayModel, check_rows
from mpicoll.parallel.parameter_server.connection import Connection
from mpicoll.parallel.parameter_server.messages import WHOLE, Array, Kind, Payload, Request, tag_of
from mpicoll.parallel.parameter_server.models import make_model
from mpicoll.parallel.parameter_server.plan import Bucket, make_plan
from mpicoll.parallel.parameter_server.pull import Pull
from mpicoll.parallel.parameter_server.transfers import Transfer

if TYPE_CHECKING:
    from typing_extensions import Self

    from mpicoll.parallel.parameter_server.module import ModuleModel

_WINDOW = 8
"""Receives of a pull that are tested at a time: they complete in about the order in which they have started."""


class Worker:
    """Worker rank, which computes gradients of a model that the servers hold.

    Making one is collective over `comm` (see :class:`~mpicoll.parallel.parameter_server.ParameterServer`). The initial
    weights are those of the worker of the lowest rank: the others get them by their first pull. A worker ends by
    :meth:`close`, or at the end of its ``with`` block.

    Args:
        model: numpy arrays by their names, or a torch module. Pulls write to them. The gradients of a module are sent
            while its backward computes them; buffers, such as running statistics, and parameters that need no gradient
            are neither sent nor pulled. Arrays are real, and of a dtype that the rule or optimizer computes with.
        sparse: names of tensors whose gradients are rows. Of a module, those of embeddings with ``sparse=True`` are
            added.
        backward_passes: the number of backward passes whose gradients a push adds up; only for a module.
        prefetch: ask for the next weights with the first gradient of a step, so that they arrive while other gradients
            are sent. By default in mode "sync", for a step after one whose push was followed by a pull of all rows; a
            pull returns the same weights with it and without. With True in each step and mode; each push is then
            followed by a pull of all rows. In the modes "async" and "ssp" such a pull has the weights right after this
            worker's push, not those of the moment of the pull.
        comm: the communicator; None is :func:`mpicoll.world`.
        timeout: seconds that each wait for a server may take; by default the communicator's. In mode "sync" and "ssp"
            a pull waits for other workers, too.

    Attributes:
        rank: the rank in `comm`.
        clock: the number of pushes.

    Raises:
        ArgumentError: an argument is invalid, the models of the workers differ, or no rank is a server; on all ranks.
        DTypeError: the model is no dict of arrays of floating-point numbers and no torch module; the others raise
            ArgumentError.

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
        model: Any,
        *,
        sparse: Collection[str] = (),
        backward_passes: int = 1,
        prefetch: bool | None = None,
        comm: CommLike = None,
        timeout: float | None = None,
    ) -> None:
        communicator = as_communicator(comm)

        def make_role() -> Role:
            if backward_passes < 1 or not (timeout is None or timeout > 0):
                raise ArgumentError(
                    "Worker: backward_passes must be at least 1, and timeout a positive number of seconds, got"
                    f" {backward_passes} and {timeout}"
                )
            self._model = make_model(model, sparse)
            return Role(specs=self._model.specs)

        self._job = agree(communicator, "Worker", make_role)
        settings = self._job.settings
        self._plan = make_plan(
            self._model.specs, len(self._job.servers), settings.bucket_bytes, whole_tensors=settings.whole_tensors
        )
        # In the order in which their gradients are sent: the first of each server, then the second, and so on.
        self._keys = sorted(
            ((server, index) for server, buckets in enumerate(self._plan) for index in range(len(buckets))),
            key=lambda key: key[::-1],
        )
        sparse_buckets = [sum(bucket.sparse for bucket in buckets) for buckets in self._plan]
        bound = communicator.timeout if timeout is None else timeout
        self._connection = Connection(self._job, bound, sparse_buckets, self._model.detach)
        self._memory = {key: np.empty(self._bucket(key).nbytes, np.uint8) for key in self._keys}
        self._pulled = {key: np.empty(self._bucket(key).nbytes, np.uint8) for key in self._keys}
        self._pull: Pull | None = None
        self._prefetch = prefetch
        self._early: Pull | None = None
        self._synchronous = settings.mode == "sync"
        # Whether the last push was followed by a pull that a prefetch serves.
        self._has_pulled = False
        self._in_step = False
        self._sent: set[tuple[int, int]] = set()
        self._sends: dict[tuple[int, int], Transfer] = {}
        self.rank = communicator.rank
        self.clock = 0
        if communicator.rank == self._job.workers[0]:
            for key in self._keys:
                memory = self._pulled[key].copy()
                self._each_part(key, memory, self._model.read_weights)
                self._connection.transfers.send(key[0], memory, tag_of(key[1], Payload.WEIGHTS))
        if not isinstance(self._model, ArrayModel):
            self._model.attach(self._keys, self._bucket, self._send_bucket, backward_passes)

    def __repr__(self) -> str:
        return f"<Worker: {self._job.describe()}, {self.clock} pushes{', closed' if self._connection.closed else ''}>"

    def _bucket(self, key: tuple[int, int]) -> Bucket:
        return self._plan[key[0]][key[1]]

    def _each_part(self, key: tuple[int, int], memory: Array, act: Any) -> None:
        bucket = self._bucket(key)
        for part in bucket.parts:
            begin = part.offset * bucket.itemsize
            act(part, memory[begin : begin + (part.stop - part.start) * bucket.itemsize])

    # --- push

    def push_gradients(self, gradients: Mapping[str, Any] | None = None) -> None:
        """Send the gradients of one step to the servers. Returns when they may be changed.

        Of a torch module, what backward has not sent yet is sent, and the gradients are set to None.

        Args:
            gradients: of a model of numpy arrays, the gradients by name; of a sparse one ``(rows, values)``. A missing
                gradient is zero, as is that of a module's parameter that backward has not reached.

        Raises:
            ArgumentError, ShapeError: a gradient does not fit; nothing was sent.
            RankFailed: a server has died.
            CommunicationError: a server has failed.
            Timeout: a server has not received the last gradients in time.
        """
        self._connection.check_open("push_gradients")
        found = self._model.make_gradients(gradients)
        norm = 0.0
        settings = self._job.settings
        self._begin_step()
        if settings.max_norm is not None and settings.mode != "sync":
            norm = math.sqrt(sum(self._model.sum_of_squares(one) for one in found if one is not None))
        counts: list[list[int]] = [[] for _ in self._plan]
        for key in self._keys:
            if self._bucket(key).sparse:
                counts[key[0]].append(self._send_rows(key, found[self._bucket(key).parts[0].tensor]))
            elif key not in self._sent:
                self._send_bucket(key, found)
        self.clock += 1
        for server, rows in enumerate(counts):
            self._connection.send_request(server, Request(Kind.PUSH, self.clock, norm=norm, counts=tuple(rows)))
        self._sent.clear()
        self._in_step = False
        self._model.clear_gradients()

    def _begin_step(self) -> None:
        """Prepare to send the first gradient of a step."""
        if self._in_step:
            return
        self._in_step = True
        self._connection.check_servers()
        # Weights that the program has not pulled are those before this step.
        self._drop_early_pull()
        if self._pull is not None:
            if self._synchronous:
                # A server updates a bucket once it has this gradient: it must have sent the weights before.
                self._receive(self._pull)
        elif self._has_pulled and self._synchronous if self._prefetch is None else self._prefetch:
            self._early = self._start_pull(self._model, None, self.clock + 1)
        self._has_pulled = False

    def _send_bucket(self, key: tuple[int, int], gradients: Sequence[Any]) -> None:
        """Send the gradient of a dense bucket."""
        self._begin_step()
        memory, last = self._memory[key], self._sends.get(key)
        if last is not None and self._connection.guard(last.test) is None:
            self._connection.wait("push_gradients", lambda: last.test() is not None, lambda: [key[0]])

        def store(part: Any, data: Array) -> None:
            gradient = gradients[part.tensor]
            if gradient is None:
                data[:] = 0
            else:
                self._model.store_gradient(gradient, part, data)

        self._each_part(key, memory, store)
        self._sends[key] = self._connection.guard(
            lambda: self._connection.transfers.send_in_turn(key[0], memory, tag_of(key[1], Payload.GRADIENT))
        )
        self._sent.add(key)

    def _send_rows(self, key: tuple[int, int], gradient: Any) -> int:
        """Send the rows of a sparse gradient that are on one server. Return their number."""
        if gradient is None:
            rows, values = np.empty(0, np.int64), np.empty(0, np.uint8)
        else:
            rows, values = self._model.split_rows(gradient)
            first, last = self._row_range(key)
            mine = (first <= rows) & (rows < last)
            rows, values = rows[mine] - first, values[mine].reshape(-1)
        self._connection.guard(
            lambda: self._connection.transfers.send(key[0], rows.view(np.uint8), tag_of(key[1], Payload.PUSHED_ROWS))
        )
        self._connection.guard(
            lambda: self._connection.transfers.send(key[0], values, tag_of(key[1], Payload.GRADIENT))
        )
        return len(rows)

    def _row_range(self, key: tuple[int, int]) -> tuple[int, int]:
        bucket = self._bucket(key)
        return bucket.parts[0].start // bucket.row, bucket.parts[0].stop // bucket.row

    # --- pull

    def pull_weights(self, rows: Mapping[str, Any] | None = None, *, wait: bool = True) -> Pull:
        """Fetch the weights from the servers into the model.

        Args:
            rows: for sparse tensors, the rows to fetch, by name; of those that it does not name all are fetched.
            wait: return when the model has the weights. If False, they arrive in the background, and ``wait`` of the
                result writes them into the model, which must not be used in between.

        Returns:
            The pull, which is complete if `wait`.

        Raises:
            ArgumentError, ShapeError: `rows` are not rows of a sparse tensor; or, in mode "sync" and with
                ``prefetch=True``, backward has sent gradients that were not pushed. Nothing was sent.
            RankFailed, CommunicationError, Timeout: as :meth:`push_gradients`.
        """
        self._connection.check_open("pull_weights")
        self._check_no_gradients("pull_weights")
        if self._prefetch and rows:
            raise ArgumentError(
                "pull_weights: with prefetch=True all rows are pulled; pass prefetch=False for some rows"
            )
        if self._pull is not None:
            self._pull.wait()
        if rows:
            self._check_rows(rows)
            self._drop_early_pull()
        early, self._early = self._early, None
        self._pull = self._start_pull(self._model, rows, self.clock) if early is None else early
        self._has_pulled = not rows
        if wait:
            self._pull.wait()
        return self._pull

    def get_weights(self) -> dict[str, Any]:
        """Return the weights of the servers by name, as new arrays or tensors. The model stays as it is.

        Raises:
            ArgumentError: in mode "sync" and with ``prefetch=True``, backward has sent gradients that were not pushed.
            RankFailed, CommunicationError, Timeout: as :meth:`push_gradients`.
        """
        self._connection.check_open("get_weights")
        self._check_no_gradients("get_weights")
        if self._pull is not None:
            self._pull.wait()
        self._drop_early_pull()
        copy = self._model.copy()
        self._start_pull(copy, None, self.clock).wait()
        return copy.as_dict()

    def _check_no_gradients(self, operation: str) -> None:
        """Raise ArgumentError between backward and push, where servers may have updated some buckets and not others."""
        if self._in_step and (self._synchronous or self._prefetch):
            raise ArgumentError(
                f"{operation}: {self._job.describe()} has sent gradients during backward, and servers may have updated"
                " some of the weights with them; call push_gradients first"
            )

    def _start_pull(self, model: ArrayModel | ModuleModel, rows: Mapping[str, Any] | None, clock: int) -> Pull:
        wanted = self._check_rows(rows or {})
        pull = Pull(self._finish_pull, model)
        counts: list[list[int]] = [[] for _ in self._plan]
        for key in self._keys:
            bucket, memory = self._bucket(key), self._pulled[key]
            if bucket.sparse:
                chosen = wanted.get(bucket.parts[0].tensor)
                if chosen is None:
                    counts[key[0]].append(WHOLE)
                else:
                    first, last = self._row_range(key)
                    mine = chosen[(first <= chosen) & (chosen < last)]
                    counts[key[0]].append(len(mine))
                    pull.rows[key] = mine
                    memory = np.empty(len(mine) * bucket.row * bucket.itemsize, np.uint8)
            pull.memory[key] = memory
        messages = [(key[0], memory, tag_of(key[1], Payload.WEIGHTS)) for key, memory in pull.memory.items()]
        started = self._connection.guard(partial(self._connection.transfers.recv_all, messages))
        pull.pending.update(zip(pull.memory, started, strict=True))
        for server, numbers in enumerate(counts):
            self._connection.send_request(server, Request(Kind.PULL, clock, counts=tuple(numbers)))
        for key, mine in pull.rows.items():
            data = (mine - self._row_range(key)[0]).view(np.uint8)
            self._connection.guard(
                partial(self._connection.transfers.send, key[0], data, tag_of(key[1], Payload.PULLED_ROWS))
            )
        return pull

    def _check_rows(self, rows: Mapping[str, Any]) -> dict[int, Array]:
        specs = {spec.name: (index, spec) for index, spec in enumerate(self._model.specs) if spec.sparse}
        found = {}
        for name, chosen in rows.items():
            if name not in specs:
                raise ArgumentError(f"pull_weights: {name!r} is no sparse tensor of the model; these are {list(specs)}")
            index, spec = specs[name]
            found[index] = np.unique(np.asarray(chosen, np.int64))
            check_rows("pull_weights", spec, found[index])
        return found

    def _finish_pull(self, pull: Pull) -> None:
        """Write the weights of `pull` into its model, each bucket while the next ones arrive."""
        for key in pull.memory.keys() - pull.pending.keys():
            self._write_bucket(pull, key)
        self._receive(pull, partial(self._write_bucket, pull))
        self._pull = None

    def _write_bucket(self, pull: Pull, key: tuple[int, int]) -> None:
        memory = pull.memory[key]
        if key in pull.rows:
            pull.model.write_rows(self._bucket(key).parts[0].tensor, pull.rows[key], memory)
        else:
            self._each_part(key, memory, pull.model.write_weights)

    def _receive(self, pull: Pull, take: Callable[[tuple[int, int]], None] | None = None) -> None:
        """Wait until all weights of `pull` have arrived, and call `take` with each bucket that has."""
        left = pull.pending

        def ready() -> bool:
            # As long as there is something: nothing announces again what has completed before.
            while done := [key for key in islice(left, _WINDOW) if left[key].test() is not None]:
                for key in done:
                    del left[key]
                    if take is not None:
                        take(key)
            return not left

        self._connection.wait("pull_weights", ready, lambda: sorted({server for server, _ in left}))

    def _drop_early_pull(self) -> None:
        """Receive the weights that were asked for in advance, where the program has not pulled them."""
        early, self._early = self._early, None
        if early is not None:
            self._receive(early)

    # --- the end

    def close(self) -> None:
        """End this worker when the servers have received what it has sent. The servers end when all workers have.

        Raises:
            ArgumentError: backward has sent gradients that were not pushed. In mode "sync" the job ends.
            RankFailed, CommunicationError, Timeout: as :meth:`push_gradients`.
        """
        if self._connection.closed:
            return
        if self._sent:
            # In mode "sync" servers may have applied some of them.
            self._connection.leave(1)
            raise ArgumentError(
                f"Worker.close: {self._job.describe()} has sent gradients during backward since its last push; call"
                " push_gradients after each backward"
            )
        if self._pull is not None:
            self._pull.wait()
        self._drop_early_pull()
        self._connection.close(self.clock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._connection.leave(1)
