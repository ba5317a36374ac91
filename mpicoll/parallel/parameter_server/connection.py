"""Connection of a worker to its servers: requests, waits, and the failures of servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpicoll.errors import CommunicatorError, MpicollError, RankFailed
from mpicoll.logs import get_logger
from mpicoll.parallel.parameter_server.agreement import Job, server_death
from mpicoll.parallel.parameter_server.links import Links
from mpicoll.parallel.parameter_server.messages import (
    NOTICE_BYTES,
    NOTICE_TAG,
    REQUEST_TAG,
    Kind,
    Request,
    decode_notice,
)


class Connection:
    """Links of a worker, the transfers on them, and the notices of the servers.

    Args:
        job: of the worker.
        timeout: seconds that each wait may take.
        sparse: the number of sparse buckets of each server.
        ended: called once when this worker ends, also by an error.

    Attributes:
        closed: True when the worker has ended.
        transfers: its sends and receives.
    """

    def __init__(self, job: Job, timeout: float, sparse: Sequence[int], ended: Callable[[], None]) -> None:
        self._job = job
        self._timeout = timeout
        self._sparse = sparse
        self._ended = ended
        self._links = Links(job)
        links = self._links.links
        self.transfers = self._links.transfers
        self._notices = [np.empty(NOTICE_BYTES, np.uint8) for _ in links]
        self._noticed = [self.transfers.recv(at, memory, NOTICE_TAG) for at, memory in enumerate(self._notices)]
        self.closed = False

    def send_request(self, server: int, request: Request) -> None:
        """Send a request to a server, which is an index."""
        self.guard(lambda: self.transfers.send(server, request.encode(), REQUEST_TAG))

    def wait(self, operation: str, ready: Callable[[], Any], servers: Callable[[], Sequence[int]]) -> None:
        """Wait until `ready` returns a true value; a message of all `servers`, which are indices, is needed.

        Raises RankFailed, CommunicationError or Timeout, after which this worker has ended.
        """

        def done() -> bool:
            self._check_notices()
            self.transfers.test()
            return bool(ready())

        def needed() -> list[int]:
            return [self._job.servers[index] for index in servers()]

        self.guard(lambda: self._links.wait(f"Worker.{operation}", done, needed, self._timeout, any_of=False))

    def guard(self, action: Callable[[], Any]) -> Any:
        """Return the result of `action`. If a server has died or failed, end this worker, and raise its error."""
        try:
            return action()
        except _ServerFailed as failed:
            self.leave(1)
            raise failed.error from None
        except RankFailed as error:
            # A server that has failed reports that before it exits.
            try:
                self._check_notices()
            except _ServerFailed as failed:
                self.leave(1)
                raise failed.error from None
            except RankFailed:
                get_logger().debug("no notice has arrived of the server that has died")
            dead = [rank for rank in self._job.servers if self._job.comm.members[rank] in error.ranks]
            self.leave(2 + dead[0] if dead else 1)
            raise server_death(self._job, dead or self._job.servers, error) from error

    def check_servers(self) -> None:
        """Raise RankFailed or CommunicationError if a server has reported its failure, after which this worker ends."""
        self.guard(self._check_notices)

    def _check_notices(self) -> None:
        for pending, memory in zip(self._noticed, self._notices, strict=True):
            if pending.test() is not None:
                error = decode_notice(memory, self._job.describe())
                if error is not None:
                    raise _ServerFailed(error)

    def leave(self, flag: int, clock: int = 0) -> None:
        """Inform the servers that this worker has ended, by an error if `flag` is not 0 (see :class:`Kind`)."""
        if self.closed:
            return
        self.closed = True
        self._ended()
        for at, (link, sparse) in enumerate(zip(self._links.links, self._sparse, strict=True)):
            request = Request(Kind.LEAVE, clock, flag, counts=(0,) * sparse)
            try:
                self.transfers.send(at, request.encode(), REQUEST_TAG)
            except MpicollError:
                get_logger().debug("server %d is not informed, since it has died", link.rank)

    def close(self, clock: int) -> None:
        """Leave, wait until the servers have taken note of that, and free the communicators."""
        self.leave(0, clock)
        self.wait(
            "close",
            lambda: all(one.test() is not None for one in self._noticed) and self.transfers.test(),
            lambda: [index for index, one in enumerate(self._noticed) if one.test() is None],
        )
        self._links.free()

    def check_open(self, operation: str) -> None:
        """Raise CommunicatorError if the worker has ended."""
        if self.closed:
            raise CommunicatorError(f"{operation}: {self._job.describe()} is closed")


class _ServerFailed(Exception):
    """Failure of a server, which it has reported."""

    def __init__(self, error: MpicollError) -> None:
        super().__init__(str(error))
        self.error = error
