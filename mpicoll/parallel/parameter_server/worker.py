"""Workers: the class Worker."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from mpicoll.engine.world import CommLike, as_communicator
from mpicoll.errors import ArgumentError, CommunicatorError, MpicollError, RankFailed
from mpicoll.logs import get_logger
from mpicoll.parallel.parameter_server.agreement import Role, agree, server_death
from mpicoll.parallel.parameter_server.arrays import ArrayModel, check_rows
from mpicoll.parallel.parameter_server.links import Links
from mpicoll.parallel.parameter_server.messages import (
    NOTICE_BYTES,
    NOTICE_TAG,
    REQUEST_TAG,
    WHOLE,
    Array,
    Kind,
    Payload,
    Request,
    decode_notice,
    tag_of,
)
from mpicoll.parallel.parameter_server.models import make_model
from mpicoll.parallel.parameter_server.plan import Bucket, make_plan
from mpicoll.parallel.parameter_server.pull import Pull
from mpicoll.parallel.parameter_server.transfers import QueuedSend, Transfers

if TYPE_CHECKING:
    from typing_extensions import Self

    from mpicoll.parallel.parameter_server.module import ModuleModel


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
            are sent. Each push is then followed by a pull, of all rows.
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
        ::

            with Worker(model) as worker:
                for x, y in loader:
                    worker.pull_weights()
                    loss(model(x), y).backward()
                    worker.push_gradients()
    """

    def __init__(
        self,
        model: Any,
        *,
        sparse: Collection[str] = (),
        backward_passes: int = 1,
        prefetch: bool = False,
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
        self._timeout = communicator.timeout if timeout is None else timeout
        self._links = Links(self._job)
        settings = self._job.settings
        self._plan = make_plan(
            self._model.specs, len(self._job.servers), settings.bucket_bytes, whole_tensors=settings.whole_tensors
        )
        # In the order in which their gradients are sent: the first of each server, then the second, and so on.
        self._keys = sorted(
            ((server, index) for server, buckets in enumerate(self._plan) for index in range(len(buckets))),
            key=lambda key: key[::-1],
        )
        self._transfers = Transfers(self._links.links)
        self._memory = {key: np.empty(self._bucket(key).nbytes, np.uint8) for key in self._keys}
        self._pulled = {key: np.empty(self._bucket(key).nbytes, np.uint8) for key in self._keys}
        self._notices = [np.empty(NOTICE_BYTES, np.uint8) for _ in self._links.links]
        self._noticed = [
            link.recv(memory, NOTICE_TAG) for link, memory in zip(self._links.links, self._notices, strict=True)
        ]
        self._pull: Pull | None = None
        self._prefetch = prefetch
        self._early: Pull | None = None
        self._sent: set[tuple[int, int]] = set()
        self._sends: dict[tuple[int, int], QueuedSend] = {}
        self._closed = False
        self.rank = communicator.rank
        self.clock = 0
        if communicator.rank == self._job.workers[0]:
            for key in self._keys:
                memory = self._pulled[key].copy()
                self._each_part(key, memory, self._model.read_weights)
                self._transfers.send(key[0], memory, tag_of(key[1], Payload.WEIGHTS))
        if not isinstance(self._model, ArrayModel):
            self._model.attach(self._keys, self._bucket, self._send_bucket, backward_passes)

    def __repr__(self) -> str:
        return f"<Worker: {self._job.describe()}, {self.clock} pushes{', closed' if self._closed else ''}>"

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
        self._check_open("push_gradients")
        found = self._model.make_gradients(gradients)
        norm = 0.0
        settings = self._job.settings
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
            self._send_request(server, Request(Kind.PUSH, self.clock, norm=norm, counts=tuple(rows)))
        self._sent.clear()
        self._model.clear_gradients()

    def _send_bucket(self, key: tuple[int, int], gradients: Sequence[Any]) -> None:
        """Send the gradient of a dense bucket."""
        if self._prefetch and not self._sent and self._pull is None:
            self._drop_early_pull()
            self._early = self._start_pull(self._model, None, self.clock + 1)
        memory, last = self._memory[key], self._sends.get(key)
        if last is not None:
            self._wait("push_gradients", lambda: last.test() is not None, [key[0]])

        def store(part: Any, data: Array) -> None:
            gradient = gradients[part.tensor]
            if gradient is None:
                data[:] = 0
            else:
                self._model.store_gradient(gradient, part, data)

        self._each_part(key, memory, store)
        self._sends[key] = self._guarded(
            lambda: self._transfers.send_in_turn(key[0], memory, tag_of(key[1], Payload.GRADIENT))
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
        self._guarded(lambda: self._transfers.send(key[0], rows.view(np.uint8), tag_of(key[1], Payload.PUSHED_ROWS)))
        self._guarded(lambda: self._transfers.send(key[0], values, tag_of(key[1], Payload.GRADIENT)))
        return len(rows)

    def _row_range(self, key: tuple[int, int]) -> tuple[int, int]:
        bucket = self._bucket(key)
        return bucket.parts[0].start // bucket.row, bucket.parts[0].stop // bucket.row

    def _send_request(self, server: int, request: Request) -> None:
        self._guarded(lambda: self._transfers.send(server, request.encode(), REQUEST_TAG))

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
            ArgumentError, ShapeError: `rows` are not rows of a sparse tensor; nothing was sent.
            RankFailed, CommunicationError, Timeout: as :meth:`push_gradients`.
        """
        self._check_open("pull_weights")
        if self._prefetch and (rows or self._sent):
            raise ArgumentError(
                "pull_weights: with prefetch=True, pull after push_gradients, and all rows; a worker without prefetch"
                " pulls at any time"
            )
        if self._pull is not None:
            self._pull.wait()
        early, self._early = self._early, None
        self._pull = self._start_pull(self._model, rows, self.clock) if early is None else early
        if wait:
            self._pull.wait()
        return self._pull

    def get_weights(self) -> dict[str, Any]:
        """Return the weights of the servers by name, as new arrays or tensors. The model stays as it is.

        Raises:
            ArgumentError: with ``prefetch=True``, backward has sent gradients that were not pushed.
            RankFailed, CommunicationError, Timeout: as :meth:`push_gradients`.
        """
        self._check_open("get_weights")
        if self._prefetch and self._sent:
            raise ArgumentError(
                f"get_weights: {self._job.describe()} has sent gradients during backward, and the weights that it asked"
                " for with them need its push; call push_gradients first"
            )
        if self._pull is not None:
            self._pull.wait()
        self._drop_early_pull()
        copy = self._model.copy()
        self._start_pull(copy, None, self.clock).wait()
        return copy.as_dict()

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
            tag = tag_of(key[1], Payload.WEIGHTS)
            pull.pending[key] = self._guarded(partial(self._transfers.recv, key[0], memory, tag))
        for server, numbers in enumerate(counts):
            self._send_request(server, Request(Kind.PULL, clock, counts=tuple(numbers)))
        for key, mine in pull.rows.items():
            data = (mine - self._row_range(key)[0]).view(np.uint8)
            self._guarded(partial(self._transfers.send, key[0], data, tag_of(key[1], Payload.PULLED_ROWS)))
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
        """Wait for `pull`, and write the weights into its model."""
        self._receive(pull)
        for key in self._keys:
            memory = pull.memory[key]
            if key in pull.rows:
                rows = pull.rows[key]
                pull.model.write_rows(self._bucket(key).parts[0].tensor, rows, memory)
            else:
                self._each_part(key, memory, pull.model.write_weights)
        self._pull = None

    def _receive(self, pull: Pull) -> None:
        left = dict(pull.pending)

        def ready() -> bool:
            for key in [*left][:8]:
                if left[key].test() is not None:
                    del left[key]
            return not left

        self._wait("pull_weights", ready, lambda: sorted({server for server, _ in left}))

    def _drop_early_pull(self) -> None:
        """Receive the weights that were asked for in advance, where the program has not pulled them."""
        early, self._early = self._early, None
        if early is not None:
            self._receive(early)

    # --- waits and failures

    def _wait(self, operation: str, ready: Any, servers: Any) -> None:
        """Wait until `ready` returns True; a message of all `servers`, which are indices, is needed."""

        def done() -> bool:
            self._check_notices()
            self._transfers.test()
            return bool(ready())

        def needed() -> list[int]:
            return [self._job.servers[index] for index in (servers() if callable(servers) else servers)]

        self._guarded(lambda: self._links.wait(f"Worker.{operation}", done, needed, self._timeout, any_of=False))

    def _guarded(self, action: Any) -> Any:
        """Return the result of `action`. If a server has died or failed, end this worker, and raise its error."""
        try:
            return action()
        except _ServerFailed as failed:
            self._leave(flag=1)
            raise failed.error from None
        except RankFailed as error:
            # A server that has failed reports that before it exits.
            try:
                self._check_notices()
            except _ServerFailed as failed:
                self._leave(flag=1)
                raise failed.error from None
            except RankFailed:
                get_logger().debug("no notice has arrived of the server that has died")
            dead = [rank for rank in self._job.servers if self._job.comm.members[rank] in error.ranks]
            self._leave(flag=2 + dead[0] if dead else 1)
            raise server_death(self._job, dead or self._job.servers, error) from error

    def _check_notices(self) -> None:
        for pending, memory in zip(self._noticed, self._notices, strict=True):
            if pending.test() is not None:
                error = decode_notice(memory, self._job.describe())
                if error is not None:
                    raise _ServerFailed(error)

    def _leave(self, flag: int) -> None:
        """Inform the servers that this worker has ended."""
        if self._closed:
            return
        self._closed = True
        self._model.detach()
        for server, link in enumerate(self._links.links):
            sparse = sum(bucket.sparse for bucket in self._plan[server])
            request = Request(Kind.LEAVE, self.clock, flag, counts=(0,) * sparse)
            try:
                link.send(request.encode(), REQUEST_TAG)
            except MpicollError:
                get_logger().debug("server %d is not informed, since it has died", link.rank)

    def close(self) -> None:
        """End this worker when the servers have received what it has sent. The servers end when all workers have.

        Raises:
            ArgumentError: backward has sent gradients that were not pushed. In mode "sync" the job ends.
            RankFailed, CommunicationError, Timeout: as :meth:`push_gradients`.
        """
        if self._closed:
            return
        if self._sent:
            # In mode "sync" servers may have applied some of them.
            self._leave(flag=1)
            raise ArgumentError(
                f"Worker.close: {self._job.describe()} has sent gradients during backward since its last push; call"
                " push_gradients after each backward"
            )
        if self._pull is not None:
            self._pull.wait()
        self._drop_early_pull()
        self._leave(flag=0)
        self._wait(
            "close",
            lambda: all(one.test() is not None for one in self._noticed) and self._transfers.test(),
            lambda: [index for index, one in enumerate(self._noticed) if one.test() is None],
        )

    def _check_open(self, operation: str) -> None:
        if self._closed:
            raise CommunicatorError(f"{operation}: {self._job.describe()} is closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._leave(flag=1)


class _ServerFailed(Exception):
    """Failure of a server, which it has reported."""

    def __init__(self, error: MpicollError) -> None:
        super().__init__(str(error))
        self.error = error
