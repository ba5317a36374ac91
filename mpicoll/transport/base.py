"""The interface between the engine and a transport."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from mpicoll.errors import TruncationError
from mpicoll.named_tuple import NamedTuple

if TYPE_CHECKING:
    from array import array

    from mpicoll._shm import LineEnd, MessageCall, PendingMessage
    from mpicoll.transport.files import FileHandle
    from mpicoll.transport.windows import RemoteMemory

Memory: TypeAlias = np.ndarray[Any, Any]
"""Contiguous flat memory. Messages are ``uint8``; native reductions get arrays of the reduced dtype."""

Message: TypeAlias = tuple[int, Memory]
"""A peer and the bytes that are sent to it or received from it."""


class Envelope(NamedTuple):
    """The source, the tag and the size of a received or probed message."""

    source: int
    tag: int
    nbytes: int


class Route(NamedTuple):
    """The other rank and the tag of a message; None where a receive takes any."""

    peer: int | None
    tag: int | None


ConcludeFailure: TypeAlias = "Callable[[Any, Exception | None, Envelope], Exception]"
"""Function that records the end of a message that has failed, given its entry in the flight recorder and its error, and
returns the exception to raise. Without an error the message, of this envelope, has another size than the memory for it.
"""

Tally: TypeAlias = "dict[tuple[int, int | None], int]"
"""Numbers of messages by peer and tag."""

_TALLIES = 64
"""Number of pairs of peer and tag whose messages are counted apart; further messages are counted by peer alone."""


class Traffic:
    """Numbers of point-to-point messages of a communicator, by peer and tag.

    They count the messages that have left this rank for each other rank, and those received from each other rank. A
    send is counted by ``next(traffic.sends[dest, tag])`` before its message leaves, a receive by
    ``next(traffic.receives[source, tag])`` after its message has arrived. So while `sent` by rank p to rank q
    equals what q has received from p, no message from p to q is in transit or waits to be received.
    """

    __slots__ = ("answered", "receives", "sends", "uncounted")

    def __init__(self) -> None:
        self.sends = _Counters()
        self.receives = _Counters()
        self.uncounted = False
        """True if there may be uncounted messages: the program has access to the mpi4py communicator."""
        self.answered = False
        """True if a background thread may receive messages and answer them while the program waits elsewhere."""

    @property
    def sent(self) -> Tally:
        """Messages by destination and tag; those beyond the limit of tags are counted under the tag None."""
        return self.sends.snapshot()

    @property
    def received(self) -> Tally:
        """Messages by source and tag; those beyond the limit of tags are counted under the tag None."""
        return self.receives.snapshot()


class _Counters(dict["tuple[int, int | None]", "itertools.count[int]"]):
    """Counters that several threads may increment at once: next() of a counter is atomic, += is not."""

    def __missing__(self, key: tuple[int, int | None]) -> itertools.count[int]:
        if len(self) >= _TALLIES and key[1] is not None:
            return self[key[0], None]
        return self.setdefault(key, itertools.count())

    def snapshot(self) -> Tally:
        # Only repr() gives the value of an itertools.count without changing it.
        return {key: int(repr(counter)[len("count(") : -1]) for key, counter in dict(self).items()}


class Pending(Protocol):
    """A point-to-point transfer that has been started."""

    def test(self) -> Envelope | None:
        """Return the envelope if the transfer has completed, else None. May be called again afterwards."""

    def wait(self, timeout: float | None) -> Envelope:
        """Block until the transfer has completed.

        Raises Timeout after `timeout` seconds; None: the transport's own bound.
        """

    def cancel(self) -> Envelope | None:
        """Cancel a receive, so that it matches no later message.

        Returns the envelope if a message has arrived before.
        """


class BackgroundQueue(Protocol):
    """Messages to and from some ranks, which a thread moves that does not need the interpreter lock. A lane is the
    index of a rank."""

    @property
    def max_bytes(self) -> int:
        """Largest size of a message."""

    @property
    def completed(self) -> int:
        """The number of messages that have completed."""

    @property
    def left(self) -> int:
        """The number of messages that have not completed."""

    def send(self, lane: int, data: Memory, tag: int, *, in_turn: bool = False) -> Pending:
        """Start to send; with `in_turn` after earlier ones of these to the same rank, few at a time."""

    def recv(self, lane: int, data: Memory, tag: int) -> Pending: ...
    def pause(self, seen: int, seconds: float) -> None:
        """Wait until `completed` is not `seen`, for at most `seconds`."""

    def stop(self) -> None:
        """End the thread. Messages that have not completed do not complete any more."""


class ProgramPlan(NamedTuple):
    """A schedule for the extension: the ranks with which it may use connections, and the arguments of
    :class:`mpicoll._shm.StreamedProgram` that name no memory."""

    peers: tuple[int, ...]
    numbers: array[int]
    op: str
    dtype: str
    itemsize: int
    first_sends: int
    most_bytes: int
    nap_share: float


class Program(Protocol):
    """A schedule that the extension carries out, without the interpreter lock."""

    @property
    def at(self) -> int:
        """Number of the steps that have ended."""

    @property
    def usable(self) -> bool:
        """False after a failure: it can't be run again."""

    def start(self, tag: int) -> None:
        """Post the first messages."""

    def advance(self) -> bool:
        """Post and complete what can be without waiting. Return True if all steps have ended. Raises the error of a
        message; then all are abandoned."""

    def run(self, seconds: float, beside: Sequence[Any]) -> bool:
        """Carry out the rest, for `seconds` at most, while the programs `beside` advance. Return and raise as
        :meth:`advance`."""

    def discard(self) -> None:
        """Abandon the messages that have not completed: no receive matches a later one, and their memory is kept."""


class PostedRound(Protocol):
    """The messages of a round that were posted. After an error all of them are abandoned."""

    def test(self) -> bool:
        """Return True if all have completed. It is not called again then."""

    def discard(self) -> None:
        """Abandon those that have not completed: no receive matches a later message."""


class Native(Protocol):
    """The MPI library's own collectives, on flat contiguous arrays of this rank's data.

    `source` and `target` may be the same array (in place). Blocks lie side by side; `counts` are their sizes in
    elements of the arrays, None if all are equal. `op` is one of sum, prod, min, max, band, bor, bxor,
    land, lor, lxor.
    """

    @property
    def max_count(self) -> int: ...
    @property
    def has_persistent(self) -> bool:
        """True if :meth:`bind` can make persistent collectives that work."""

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
    def bind_allreduce_in_place(self, dtype: np.dtype[Any], count: int, op: str) -> Callable[[int], None]:
        """Return a function that reduces `count` elements of `dtype` at an address in place.

        It is for calls in which each tenth of a microsecond counts.
        """

    def bind(self, call: Callable[[Native], None], *, persistent: bool) -> Callable[[], None]:
        """Return a function that repeats `call` on memory that stays valid.

        `call` calls one of these collectives once, and does nothing else. With `persistent`, it may become a
        persistent collective of MPI: all ranks create it together, and it matches only other persistent
        collectives.
        """

    def record(
        self, call: Callable[[Native], None], buffers: Sequence[tuple[Memory, Any]]
    ) -> tuple[Callable[..., object], tuple[Any, ...]] | None:
        """Return the function by which `call` calls the MPI library, and its arguments, without calling it.

        `call` calls one of these collectives once, on some of the arrays in `buffers`. The arguments contain the object
        beside an array instead of the array: a buffer of the same dtype, whose memory may differ at each call. None if
        the collective needs other memory too.
        """

    def bind_dtype(self, dtype: np.dtype[Any]) -> Callable[[int, int], Memory]:
        """Return a function that makes memory of an address and a number of elements of `dtype`.

        These methods take that memory. It is for calls in which each microsecond counts. The memory must
        outlive its use.
        """


class Transport(Protocol):
    """One rank's end of a group of ranks.

    Messages of collectives never match the caller's point-to-point messages.

    `nodes` gives for each rank the number of its node, counted from 0 in the order of first appearance. `native` is
    None where there is no MPI library; `mpi` is the mpi4py communicator for the caller's own use, or None. Tags of
    messages are in [0, max_tag]. `background` is True if another thread may communicate concurrently with the
    caller's. `key` names the group: it is the same on all its ranks, and unique among groups; `members` are its
    ranks as ranks of the job. `traffic` counts the caller's point-to-point messages; None where the counts are not
    needed. `no_shm_reason` is the reason why the ranks of a node can't share memory, and `no_cma_reason` the reason why
    they can't read each other's private memory; None if they can. Both are the same on all ranks. `connects` is True
    if large messages of schedules between nodes go over TCP connections beside MPI, also the same on all ranks.
    `timeout` is that of the communicator: the seconds after which a wait that can be left raises Timeout.
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
    def survives_deaths(self) -> bool:
        """True if the job continues after the death of a rank, which revokes the groups of which it was a member."""

    @property
    def no_shm_reason(self) -> str | None: ...
    @property
    def no_cma_reason(self) -> str | None: ...
    @property
    def connects(self) -> bool: ...

    def find_native_defect(
        self, collective: str, op: str = "", dtype: np.dtype[Any] | None = None, *, uneven: bool = False
    ) -> str | None:
        """Return the reason why `collective`, of the reduction `op` of `dtype` if it reduces, must not be done by
        ``native``, or None if it may be. `uneven` states whether its blocks differ in size.

        The result is the same on all ranks.
        """

    def share(self, nbytes: int) -> Sequence[Memory]:
        """Allocate zeroed shared memory, and return that of each rank as this rank sees it.

        Collective, on a group of one node. `nbytes` is the size of this rank's memory, which may differ between
        ranks. Raises CommunicationError on all ranks if the allocation fails on one of them.
        """

    def adopt(self, memory: Memory, fd: int) -> Sequence[Memory]:
        """Share existing memory of this process, the beginning of the file behind `fd`, as :meth:`share` does."""

    def open_file(self, path: str, fd: int, *, reads: bool, writes: bool, driver: str) -> FileHandle:
        """Open the file behind the descriptor `fd`, which is taken over, on all ranks. Collective.

        `driver` is "posix", "mpi", or "auto", which takes MPI-IO where the ranks are on several nodes and use MPI.
        Raises OSError on the ranks that fail.
        """

    def create_window(self, memory: Memory) -> RemoteMemory:
        """Give all ranks access to `memory` by the MPI library. Collective; called only where there is one."""

    def list_processes(self) -> Sequence[int]:
        """Return for each rank the number of its process, whose private memory can be read; 0 if it is a thread of this
        one. Collective, on a group of one node."""

    @property
    def has_own_cores(self) -> bool:
        """True if each rank of a group of one node has its own core, on which it may poll without pause."""

    def count_cores(self) -> int:
        """Return the cores that a rank of a group of one node may use without taking them from other ranks, at least
        1."""

    def check_peers(self, waited: float, peers: Sequence[int]) -> None:
        """Raise RankFailed if one of `peers` is known to have died, or Timeout if the wait has lasted too long.

        It is called by a rank that has been waiting in shared memory for `peers` for `waited` seconds.
        """

    def allgather_text(self, text: str) -> list[str]:
        """Return every rank's `text`. Collective."""

    def translate_error(self, error: Exception) -> Exception:
        """Return this library's exception for an exception that a native collective raised."""

    def compare(
        self, word: int, text: Callable[[], str], idle: Callable[[], None], interrupts: list[BaseException]
    ) -> list[str] | None:
        """Return None if all ranks pass the same `word` (of 62 bits), otherwise the `text` of each rank. Collective.

        While it waits for the other ranks, it calls `idle` from time to time, which may raise CommunicationError. With
        MPI, an exception of a signal handler is added to `interrupts`, and the wait goes on, since the other ranks need
        the word of this one; a second one ends the wait.
        """

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message], tag: int) -> None:
        """Execute one round: post all sends and receives, and return when all have completed."""

    def post(self, sends: Sequence[Message], recvs: Sequence[Message], tag: int) -> PostedRound:
        """Post all sends and receives of one round, which completes later."""

    def make_program(self, make_plan: Callable[[], ProgramPlan], memory: Sequence[Memory]) -> Program | None:
        """Return what carries out a schedule on `memory`, whose bytes its plan names, in the extension; None if only
        Python can, which takes no plan."""

    def send(self, data: Memory, dest: int, tag: int) -> None: ...
    def recv(self, data: Memory, source: int | None, tag: int | None) -> Envelope: ...
    def sendrecv(
        self, data: Memory, dest: int, tag: int, into: Memory, source: int | None, recvtag: int | None
    ) -> Envelope: ...
    def isend(self, data: Memory, dest: int, tag: int) -> Pending: ...
    def irecv(self, data: Memory, source: int | None, tag: int | None) -> Pending: ...
    def bind_messages(
        self,
        sent: Route | None,
        received: Route | None,
        active: dict[int, Any] | None,
        conclude: ConcludeFailure,
        accept: Callable[[Any, int], int] | None,
    ) -> MessageCall | None:
        """Return what carries out blocking messages in the extension: one that is sent, one that is received, or both.
        None if only Python can do that.

        Waits that last are shown in `active`, by thread; None: no watchdog looks at them. `accept` is that of
        :class:`mpicoll._shm.MessageCall`.
        """

    def bind_started_message(
        self,
        route: Route,
        active: dict[int, Any] | None,
        conclude: ConcludeFailure,
        wrap: Callable[[PendingMessage], Any],
        accept: Callable[[Any, int], int],
        *,
        size: int,
        sends: bool,
    ) -> MessageCall | None:
        """Return what starts messages of `size` bytes in the extension, which complete later: ones that are sent, or
        received. None if only Python can do that.

        A call returns ``wrap(message)``. The other arguments are those of :meth:`bind_messages`.
        """

    def bind_line_end(
        self,
        peer: int,
        like: Any,
        nbytes: int,
        sync_tags: tuple[int, ...],
        plain_tags: tuple[int, ...],
        acknowledgement_tag: int,
    ) -> LineEnd | None:
        """Return what passes values like `like`, of `nbytes`, to or from `peer` in the extension; None if only Python
        can do that. The tags are those of :class:`mpicoll._shm.LineEnd`."""

    def bind_background_messages(self, peers: Sequence[int]) -> BackgroundQueue | None:
        """Return what sends messages to `peers`, and receives messages from them, in a thread of the extension; None if
        only Python can do that."""

    def matches_own_message(self, tag: int) -> bool:
        """Return True if a posted receive matches a message of this rank to itself with `tag`."""

    def list_posted_receives(self) -> Sequence[tuple[int | None, int | None]]:
        """Return source and tag (None: any) of the receives for which no message has arrived."""

    def wait_for_all_ranks(self, seconds: float) -> bool:
        """Wait until all ranks have entered the call, so that the messages that they have sent have arrived.

        Collective, at the end of a program. It returns after `seconds` in any case. Returns True if messages
        can still be probed.
        """

    def iprobe(self, source: int | None, tag: int | None) -> Envelope | None: ...
    def probe(self, source: int | None, tag: int | None, timeout: float | None) -> Envelope: ...

    def split(self, color: int | None, key: int) -> Transport | None:
        """Return the group of this rank's color, ordered by key, then by rank; None without a color. Collective."""

    def group(self, ranks: Sequence[int], independent: bool = False) -> Transport:
        """Return a group of `ranks` in that order. Only these ranks must call it.

        An `independent` group is not revoked with this one, only when one of its own ranks has died.
        """

    def duplicate(self, tag: int) -> Transport:
        """Return a group of the same ranks.

        It is collective, but independent of other collectives and of duplications with another tag.
        """

    def revoke(self) -> None:
        """Revoke the group and the groups derived from it, on all ranks. It does not wait.

        Calls that wait on these groups, and all later ones except ``shrink`` and ``agree``, raise RankFailed.
        """

    def shrink(self) -> Transport:
        """Return a group of the living ranks, in the same order. Revokes this group.

        Collective over the living ranks; the death of a rank does not make it fail. Raises CommunicatorError
        where ranks can't survive a death.
        """

    def detect_failure(self) -> bool:
        """Return True if a rank is known to have died, or the group was revoked.

        It waits a moment for reports of failures. The result is always False in a job that does not survive
        deaths.
        """

    def agree(self, flag: bool) -> bool:
        """Return True if the flags of all living ranks are true; the result is the same on all of them.

        Collective over the living ranks; the death of a rank does not make it fail.
        """

    def free(self) -> None: ...


SHARED_MEMORY_GRACE = 0.5
"""Seconds by which a wait in shared memory exceeds the timeout of a message.

The awaited rank may be about to time out itself, and then releases the waiting rank.
"""


class EmptyMessage(TruncationError):
    """Message of a round without any bytes, from the rank `source`, where data was expected. Of a schedule, it shows
    that this rank has failed: such a rank sends no data in the rounds that are left."""

    def __init__(self, text: str, source: int) -> None:
        super().__init__(text)
        self.source = source


def round_size_error(rank: int, source: int, expected: int, received: int) -> TruncationError:
    """Return the error of `rank` for a message of a round that differs in size from the memory for it."""
    text = (
        f"rank {rank} expected {expected} bytes from rank {source}, got {received}:"
        " the ranks disagree about the size of the operation"
    )
    return TruncationError(text) if received else EmptyMessage(text, source)


def truncation_error(rank: int, message: Envelope, size: int) -> TruncationError:
    """Return the error of `rank` for a message that is larger than the `size` bytes of memory for it."""
    return TruncationError(
        f"rank {rank}: a message of {message.nbytes} bytes from rank {message.source} (tag {message.tag}) does not fit"
        f" the {size} bytes that receive it"
    )


def renumber(nodes: Sequence[int]) -> tuple[int, ...]:
    """Assign numbers from 0 to nodes in the order of first appearance."""
    seen: dict[int, int] = {}
    return tuple(seen.setdefault(node, len(seen)) for node in nodes)
