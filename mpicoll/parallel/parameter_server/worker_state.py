"""The state of one worker at a server: the gradients that have arrived, its requests, and the replies."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

import numpy as np

from mpicoll.errors import RankFailed
from mpicoll.parallel.parameter_server.messages import (
    NOTICE_TAG,
    REQUEST_TAG,
    WHOLE,
    Array,
    Kind,
    Payload,
    Request,
    decode_request,
    encode_notice,
    request_memory,
    tag_of,
)
from mpicoll.parallel.parameter_server.plan import Bucket
from mpicoll.parallel.parameter_server.transfers import Transfer, Transfers
from mpicoll.transport.base import Pending

_WINDOW = 4
"""Pending transfers that are tested at a time: messages arrive in about the order in which they are sent, and a test of
any makes MPI move all."""


class WorkerState:
    """Worker `rank`, as a server sees it. `link` is its index in `transfers`."""

    def __init__(self, transfers: Transfers, link: int, rank: int, buckets: Sequence[Bucket]) -> None:
        self._transfers = transfers
        self.link = link
        self.rank = rank
        self.alive = True
        """False when it has left or died."""
        self.flag = 0
        """The reason why it has left (see :class:`Kind`)."""
        self.clock = 0
        """Number of its pushes that were applied."""
        self.push: Request | None = None
        """The push that is being received or applied, once it was announced."""
        self.pull: Request | None = None
        """The pull that is being answered."""
        self.arrived: set[int] = set()
        """The buckets of which a gradient has arrived that was not applied."""
        self.gradients: dict[int, Array] = {}
        """Bytes of the gradient of each bucket; of a sparse one, those of some rows."""
        self.rows: dict[int, Array] = {}
        """These rows, counted from the first one of the server."""
        self._buckets = buckets
        self._sparse = [index for index, bucket in enumerate(buckets) if bucket.sparse]
        self._dense = [index for index, bucket in enumerate(buckets) if not bucket.sparse]
        self._arriving: OrderedDict[int, list[Pending]] = OrderedDict()
        self._sends: dict[int, Transfer] = {}
        self._unanswered: list[int] = []
        self._wanted_rows: dict[int, Array] = {}
        self._row_requests: list[Pending] = []
        self._request = request_memory(len(self._sparse))
        self._held: Request | None = None
        self._next: Pending | None = self._recv(self._request, REQUEST_TAG)
        for index in self._dense:
            self.gradients[index] = np.empty(buckets[index].nbytes, np.uint8)
            self._receive_gradient(index)

    def _receive_gradient(self, index: int) -> None:
        self._arriving[index] = [self._recv(self.gradients[index], tag_of(index, Payload.GRADIENT))]

    def _recv(self, memory: Array, tag: int) -> Pending:
        return self._transfers.recv(self.link, memory, tag)

    def poll(self) -> bool:
        """Take note of what has arrived. Return True if there was anything. Raises RankFailed if the worker died."""
        progressed = False
        if self._next is not None and self._next.test() is not None:
            self._next = None
            self._held = decode_request(self._request)
        if self._held is not None and self._may_take(self._held):
            request, self._held = self._held, None
            self._take(request)
            if self.alive:
                self._next = self._recv(self._request, REQUEST_TAG)
            progressed = True
        for index in list(islice(self._arriving, _WINDOW)):
            if all(one.test() is not None for one in self._arriving[index]):
                del self._arriving[index]
                self.arrived.add(index)
                progressed = True
        if self._row_requests and all(one.test() is not None for one in self._row_requests):
            self._row_requests = []
            progressed = True
        for index in list(islice(self._sends, _WINDOW)):
            if self._sends[index].test() is not None:
                del self._sends[index]
                progressed = True
        return progressed

    def _may_take(self, request: Request) -> bool:
        """Return True unless `request` has to wait until the last push has been applied, or the last pull answered."""
        if request.kind is Kind.PULL:
            return self.pull is None
        return self.push is None and (request.kind is Kind.PUSH or not self._sends)

    def _take(self, request: Request) -> None:
        if request.kind is Kind.PUSH:
            self.push = request
            for index, count in zip(self._sparse, request.counts, strict=True):
                self._receive_rows(index, count)
        elif request.kind is Kind.PULL:
            self.pull = request
            self._unanswered = [*self._dense, *self._sparse]
            self._row_requests = []
            self._wanted_rows = {}
            for index, count in zip(self._sparse, request.counts, strict=True):
                if count != WHOLE:
                    rows = self._wanted_rows[index] = np.empty(count, np.int64)
                    self._row_requests.append(self._recv(rows.view(np.uint8), tag_of(index, Payload.PULLED_ROWS)))
        else:
            self.flag = request.flag
            self.leave()
            self._transfers.send(self.link, encode_notice(None), NOTICE_TAG)

    def _receive_rows(self, index: int, count: int) -> None:
        bucket = self._buckets[index]
        self.rows[index] = np.empty(count, np.int64)
        self.gradients[index] = np.empty(count * bucket.row * bucket.itemsize, np.uint8)
        self._arriving[index] = [
            self._recv(self.rows[index].view(np.uint8), tag_of(index, Payload.PUSHED_ROWS)),
            self._recv(self.gradients[index], tag_of(index, Payload.GRADIENT)),
        ]
        # Before the next gradients of dense buckets, which the worker may send only after it has these weights.
        self._arriving.move_to_end(index, last=False)

    def has_arrived(self) -> bool:
        """Return True if the push was announced and all of it has arrived."""
        return self.push is not None and not self._arriving

    def take_gradient(self, index: int) -> None:
        """Receive the next gradient of a bucket in the place of the one that has arrived, which was applied."""
        self.arrived.discard(index)
        if not self._buckets[index].sparse:
            self._receive_gradient(index)

    def finish_push(self) -> None:
        """Take note that all buckets of the push were applied."""
        self.clock += 1
        self.push = None

    def is_sending(self, index: int) -> bool:
        """Return True if the weights of a bucket are being sent."""
        return index in self._sends

    def list_unanswered(self) -> list[int]:
        """Return the buckets that the current pull still has to be sent."""
        if self.pull is None or self._row_requests:
            return []
        return self._unanswered.copy()

    def answer(self, index: int, weights: Array, *, copy: bool) -> None:
        """Send the weights of a bucket. With `copy` they may be changed at once."""
        bucket = self._buckets[index]
        rows = self._wanted_rows.get(index)
        if rows is not None:
            weights = weights.reshape(-1, bucket.row * bucket.itemsize)[rows].reshape(-1)
        elif copy:
            weights = weights.copy()
        self._sends[index] = self._transfers.send_in_turn(self.link, weights, tag_of(index, Payload.WEIGHTS))
        self._unanswered.remove(index)

    def finish_pull(self) -> bool:
        """Take note that the pull was answered, if it was; return True then."""
        if self.pull is None or self._unanswered:
            return False
        self.pull = None
        return True

    def leave(self) -> None:
        """Receive nothing more from a worker that has left."""
        self.alive = False
        for pending in self._arriving.values():
            for one in pending:
                one.cancel()
        self._arriving.clear()

    def find_departure(self) -> bool:
        """Return True if the worker, which no transfer reaches any more, has reported that it leaves."""
        request = self._held
        try:
            while request is None or request.kind is not Kind.LEAVE:
                if self._next is None or self._next.test() is None:
                    return False
                request = decode_request(self._request)
                if request.kind is not Kind.LEAVE:
                    self._next = self._recv(self._request, REQUEST_TAG)
        except RankFailed:
            return False
        self.flag = request.flag
        self.abandon()
        return True

    def abandon(self) -> None:
        """Take note of the death of the worker."""
        self.alive = False
        self.push = self.pull = self._held = None
        self.arrived.clear()
        self._arriving.clear()
        self._sends.clear()
