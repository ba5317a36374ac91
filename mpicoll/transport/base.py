"""What the engine needs of a transport."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np

from mpicoll.errors import Timeout, TruncationError

T = TypeVar("T")

Memory: TypeAlias = np.ndarray[Any, Any]
"""Contiguous flat memory. What travels between ranks is ``uint8``; native reductions get their real dtype."""

Message: TypeAlias = tuple[int, Memory]
"""A peer and the bytes that go to it or come from it."""

Read: TypeAlias = Callable[[int, int, int], object]
"""``read(source, target, nbytes)`` copies from an address of another rank to an address of this one."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """The outside of a received or probed message."""

    source: int
    tag: int
    nbytes: int


Tally: TypeAlias = "dict[tuple[int, int | None], int]"
"""Numbers of messages by peer and tag."""

_TALLIES = 64
"""For so many pairs of peer and tag messages are counted apart, then by peer alone."""


class Traffic:
    """How many point-to-point messages of each tag have left this rank for each other rank of a communicator, and how
    many from each have been received.

    A send is counted by ``next(traffic.sends[dest, tag])`` before its message leaves, a receive by
    ``next(traffic.receives[source, tag])`` after its message has come. So while `sent` by rank p to
    rank q equals what q has received from p, no message from p to q is under way or waits to be received.
    """

    __slots__ = ("answered", "receives", "sends", "uncounted")

    def __init__(self) -> None:
        self.sends = _Counters()
        self.receives = _Counters()
        self.uncounted = False
        """Whether messages may travel that are not counted: the program has the mpi4py communicator."""
        self.answered = False
        """Whether a thread in the background may take messages and answer them while the program waits elsewhere."""

    @property
    def sent(self) -> Tally:
        """Messages by destination and tag; under the tag None all those whose tags were too many."""
        return self.sends.values_now()

    @property
    def received(self) -> Tally:
        """The same by source and tag."""
        return self.receives.values_now()


class _Counters(dict["tuple[int, int | None]", "itertools.count[int]"]):
    """Several threads may count at once: next() of a counter is atomic, which += is not."""

    def __missing__(self, key: tuple[int, int | None]) -> itertools.count[int]:
        if len(self) >= _TALLIES and key[1] is not None:
            return self[key[0], None]
        return self.setdefault(key, itertools.count())

    def values_now(self) -> Tally:
        # Only its repr gives a counter's value without changing it.
        return {key: int(repr(counter)[len("count(") : -1]) for key, counter in self.copy().items()}


class Pending(Protocol):
    """A point-to-point transfer under way."""

    def test(self) -> Envelope | None:
        """The envelope if it has completed, else None. May be called again afterwards."""

    def wait(self, timeout: float | None) -> Envelope:
        """Block until it has completed. Raises Timeout after `timeout` seconds; None: the transport's own bound."""

    def cancel(self) -> Envelope | None:
        """Give up a receive, so that it swallows no later message; the envelope if one has come all the same."""


class Native(Protocol):
    """The MPI library's own collectives, on flat contiguous arrays of this rank's data.

    `source` and `target` may be the same array (in place). Blocks lie side by side; `counts` are their sizes in
    elements of the arrays, None if all are equal. `op` is one of sum, prod, min, max, band, bor, bxor,
    land, lor, lxor.
    """

    @property
    def max_count(self) -> int: ...
    def allreduce(self, source: Memory, target: Memory, op: str) -> None: ...
    def reduce(self, source: Memory, target: Memory | None, op: str, root: int) -> None: ...
    def scan(self, source: Memory, target: Memory, op: str) -> None: ...
    def exscan(self, source: Memory, target: Memory, op: str) -> None: ...
    def reduce_scatter(self, source: Memory, target: Memory, counts: Sequence[int] | None, op: str) -> None: ...
    def bcast(self, data: Memory, root: int) -> None: ...
    def gather(self, source: Memory, target: Memory | None, counts: Sequence[int] | None, root: int) -> None: ...
    def scatter(self, source: Memory | None, target: Memory, counts: Sequence[int] | None, root: int) -> None: ...
    def allgather(self, source: Memory, target: Memory, counts: Sequence[int] | None) -> None: ...
    def alltoall(self, source: Memory, target: Memory) -> None: ...
    def barrier(self) -> None: ...
    def allreduce_in_place(self, dtype: np.dtype[Any], count: int, op: str) -> Callable[[int], None]:
        """What reduces `count` elements of `dtype` at an address in place, for calls in which each tenth of a
        microsecond counts."""

    def bind(self, call: Callable[[Native], None], *, persistent: bool) -> Callable[[], None]:
        """What repeats `call`, which calls one of these collectives once, and does nothing else, on memory that stays.

        A `persistent` one may be a persistent collective of MPI: all ranks make it together, and it meets no others
        than its like."""

    def typed(self, dtype: np.dtype[Any]) -> Callable[[int, int], Memory]:
        """What makes of an address and a number of elements of `dtype` the memory that these methods take, for calls
        in which each microsecond counts. The memory must outlive its use."""


class Transport(Protocol):
    """One rank's end of a group of ranks. Collective traffic and the caller's point-to-point traffic never meet.

    `nodes` gives for each rank the number of its node, counted from 0 in the order of first appearance. `native` is
    None where there is no MPI library; `mpi` is the mpi4py communicator for the caller's own use, or None. Tags of
    messages lie in [0, max_tag]. `background` says whether another thread may communicate beside the caller's.
    `key` names the group, the same on all its ranks and that of no other; `members` are its ranks as ranks of the job.
    `traffic` counts the caller's point-to-point messages; None where nobody needs to know. `unshared` says why the
    ranks of a node can't share memory, and `unread` why they can't read each other's private memory; None if they can.
    Both are the same on all ranks. `timeout` is that of the communicator: seconds for which it waits where it can leave
    a wait.
    """

    timeout: float

    @property
    def traffic(self) -> Traffic | None: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def key(self) -> str: ...
    @property
    def members(self) -> tuple[int, ...]: ...
    @property
    def nodes(self) -> tuple[int, ...]: ...
    @property
    def native(self) -> Native | None: ...
    @property
    def mpi(self) -> Any: ...
    @property
    def max_tag(self) -> int: ...
    @property
    def background(self) -> bool: ...
    @property
    def unshared(self) -> str | None: ...
    @property
    def unread(self) -> str | None: ...

    def misreduces(self, op: str, dtype: np.dtype[Any]) -> str | None:
        """Why the reduction `op` of `dtype` must not be left to ``native``; None if it may be. The same on all
        ranks."""

    def share(self, nbytes: int) -> Sequence[Memory]:
        """Collective, on a group of one node: fresh memory of each rank as this one sees it, zeroed; of `nbytes`, which
        may differ. Raises CommunicationError on all ranks if it can't be had on one of them."""

    def adopt(self, memory: Memory, fd: int) -> Sequence[Memory]:
        """The same for memory of this process that there is already: the beginning of the file behind `fd`."""

    def readers(self) -> Sequence[Read]:
        """Collective, on a group of one node: what reads each rank's private memory."""

    @property
    def own_cores(self) -> bool:
        """On a group of one node: whether each rank has a core to itself, on which it may look for others without
        pause."""

    @property
    def fence(self) -> Callable[[], object] | None:
        """What keeps this rank's accesses to shared memory in their order; None where the hardware does."""

    def check_peers(self, waited: float, peers: Sequence[int]) -> None:
        """For who has been waiting in shared memory, for `peers`, for `waited` seconds: raise RankFailed if one of them
        is known to be gone, or Timeout."""

    def texts(self, text: str) -> list[str]:
        """Collective: every rank's `text`."""

    def explain(self, error: Exception) -> Exception:
        """The library's exception for what a native collective raised."""

    def compare(self, word: int, text: Callable[[], str], idle: Callable[[], None]) -> list[str] | None:
        """Collective: None if all ranks have the same `word` (of 62 bits), otherwise the `text` of each rank. While it
        waits for the others it calls `idle` now and then, which may raise."""

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message], tag: int) -> None:
        """Carry out one round: post everything, return when everything has completed."""

    def send(self, data: Memory, dest: int, tag: int) -> None: ...
    def recv(self, data: Memory, source: int | None, tag: int | None) -> Envelope: ...
    def sendrecv(
        self, data: Memory, dest: int, tag: int, into: Memory, source: int | None, recvtag: int | None
    ) -> Envelope: ...
    def isend(self, data: Memory, dest: int, tag: int) -> Pending: ...
    def irecv(self, data: Memory, source: int | None, tag: int | None) -> Pending: ...
    def takes_own(self, tag: int) -> bool:
        """Whether a receive is pending that takes a message of this rank to itself with `tag`."""

    def receiving(self) -> Sequence[tuple[int | None, int | None]]:
        """Source and tag (None: any) of the receives for which nothing has come yet."""

    def settle(self, seconds: float) -> bool:
        """Collective, at the end of a program: return when all ranks have come, so that the messages which they have
        sent are there, but after `seconds` in any case. Whether messages can still be looked at."""

    def iprobe(self, source: int | None, tag: int | None) -> Envelope | None: ...
    def probe(self, source: int | None, tag: int | None, timeout: float | None) -> Envelope: ...

    def split(self, color: int | None, key: int) -> Transport | None:
        """Collective: a group for each color, ordered by key, then by rank. None for those without a color."""

    def group(self, ranks: Sequence[int]) -> Transport | None:
        """A group of `ranks` in that order; to be called by those ranks only."""

    def duplicate(self, tag: int) -> Transport:
        """Collective, but apart from the other collectives, and from that of another tag: a group of the same ranks."""

    def revoke(self) -> None:
        """Raise RankFailed on whoever waits on the group, or on groups made of it, on all ranks, or calls anything but
        ``shrink`` and ``agree`` later. Waits for nothing."""

    def shrink(self) -> Transport:
        """Collective over the ranks that live, which no death makes fail: a group of them, in the same order. Revokes
        this one. Raises CommunicatorError where ranks can't survive a death."""

    def failed_already(self) -> bool:
        """Whether a rank is known to be dead, or the group was revoked; waits a moment for the news. Never so in a job
        that does not survive deaths."""

    def agree(self, flag: bool) -> bool:
        """Collective over the ranks that live, which no death makes fail: whether all of their flags are true, the
        same on all of them."""

    def free(self) -> None: ...


SHARED_MEMORY_GRACE = 0.5
"""Seconds for which who waits in shared memory is more patient than who waits for a message: whom it waits for may be
about to give up itself, and lets it through then."""


def poll(ready: Callable[[], T], timeout: float | None, what: str) -> T:
    """Ask `ready` until it gives something true, and return that: eagerly first, then leaving the core to others.

    Raises Timeout, saying `what` it was, after `timeout` seconds.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    turns = 0
    while not (value := ready()):
        if deadline is not None and time.monotonic() > deadline:
            raise Timeout(f"{what}: not complete within the timeout of {timeout:g} s")
        turns += 1
        if turns > 1000:
            time.sleep(50e-6)
        elif turns > 20:
            os.sched_yield()
    return value


def truncation_error(rank: int, message: Envelope, size: int) -> TruncationError:
    """The error of `rank` for a message that is larger than the `size` bytes of memory for it."""
    return TruncationError(
        f"rank {rank}: a message of {message.nbytes} bytes from rank {message.source} (tag {message.tag}) does not fit"
        f" the {size} bytes that receive it"
    )


def renumber(nodes: Sequence[int]) -> tuple[int, ...]:
    """Number nodes from 0 in the order of first appearance."""
    seen: dict[int, int] = {}
    return tuple(seen.setdefault(node, len(seen)) for node in nodes)
