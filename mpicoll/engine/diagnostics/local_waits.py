"""The operations in which this rank waits, and its position on each communicator."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol, TypeAlias
from weakref import WeakSet

from mpicoll.engine.diagnostics.departures import list_counts, list_last_calls
from mpicoll.engine.diagnostics.flight_recorder import Call, Entry, EntryTuple, Group, Wait
from mpicoll.engine.diagnostics.position import Executing

_MAX_RETIRED = 1000
"""Number of freed or dropped communicators whose last collective number is kept."""

WaitKey: TypeAlias = tuple[str, int, float]
"""Identity of an operation: the key of its communicator, its number and its begin. One Call may serve many operations.
"""


class WatchedQueue(Protocol):
    """A queue of collectives, which waits for one thing at a time."""

    group: Group

    @property
    def number(self) -> int: ...

    @property
    def queued(self) -> int: ...

    current: EntryTuple | None
    executing: Executing
    thread: int
    background: bool

    def waiting_threads(self) -> set[int]:
        """Return the threads that wait for their turn, or for an operation in the queue."""

    def drain(self, timeout: float) -> bool:
        """Wait until the queue is empty, at most `timeout` seconds. Return True if it is empty."""

    def has_unseen_calls(self) -> bool:
        """Return True if this rank has ended calls that were not compared with those of all ranks."""

    def compare_unseen_calls(self) -> None:
        """Compare these calls, for which the queue waits. Raises MismatchError if they differ."""

    def refuse(self) -> None:
        """Raise CommunicatorError from now on."""

    def unreported_failures(self) -> Sequence[Any]:
        """Return the operations that failed in the background without a report to any caller, with their ``error``."""


class LocalWaits:
    """The waits of this rank: the ``current`` operation of each queue, and ``active``, the others by thread."""

    def __init__(self) -> None:
        self.active: dict[int, Wait] = {}
        # Operations for which a caller has got Timeout: the program decides how it continues.
        self.timed_out: deque[Call] = deque(maxlen=100)
        # Operations for which a thread waits with its own bound now, after which it gets Timeout.
        self.bounded: list[Call] = []
        # Operations that can never complete: each raises as soon as its thread finds out.
        self.failing: Collection[WaitKey] = ()
        # Returns the messages that this process has started and that may be in transit: "send" or "recv", and the tag.
        self.started: Callable[[], list[tuple[str, int | None]]] = list
        # Returns the operations that a device has not completed, from their submission on.
        self.submitted: Callable[[], list[Entry]] = list
        self._queues: WeakSet[WatchedQueue] = WeakSet()
        self._kept: list[WatchedQueue] = []
        self._lock = threading.Lock()
        self._retired: dict[str, tuple[Group, int]] = {}  # communicators that the program has freed or dropped
        self._meetings: dict[str, int] = {}  # number of meetings begun, by the key of their sequence

    def add(self, queue: WatchedQueue) -> None:
        """Watch `queue` for as long as it lives."""
        with self._lock:
            self._queues.add(queue)

    def queues(self) -> list[WatchedQueue]:
        """Return all queues that are watched."""
        with self._lock:
            return list(self._queues)

    def keep(self, queue: WatchedQueue) -> None:
        """Keep a queue whose communicator was dropped, until its calls have been compared."""
        self._kept = [one for one in self._kept if one.has_unseen_calls()]
        self._kept.append(queue)

    def refuse_all(self) -> None:
        """Make every queue refuse operations, in a forked child."""
        self._lock = threading.Lock()  # a thread of the parent may have held it
        for queue in self.queues():
            queue.refuse()

    def entries(self) -> list[Entry]:
        """Return the operations in which this rank waits."""
        found = [*(entry for entry, _, _ in list(self.active.values())), *(queue.current for queue in self.queues())]
        return [Entry._make(one) for one in found if one is not None]

    def retire(self, group: Group, number: int) -> None:
        """Record that the program made `number` collectives on `group` before it freed or dropped the communicator.

        The program makes no more calls on that communicator.
        """
        # Without a lock: the garbage collector may call it on a thread that holds one.
        self._retired[group.key] = group, number
        oldest = list(self._retired)[:-_MAX_RETIRED]
        for key in oldest:
            self._retired.pop(key, None)
        for key in list(self._meetings) if oldest else ():
            if key.partition(" ")[0] in oldest:
                self._meetings.pop(key, None)

    def begin_meeting(self, key: str) -> int:
        """Count a meeting of the sequence `key` that this rank begins, and return its number."""
        number = self._meetings[key] = self._meetings.get(key, 0) + 1
        return number

    def final_state(self, rank: int) -> dict[str, Any]:
        """Return the final state of this rank, from which other ranks derive which operations can never complete."""
        positions = dict(self._retired) | {queue.group.key: (queue.group, queue.number) for queue in self.queues()}
        return {
            "numbers": {key: number for key, (_, number) in positions.items()} | self._meetings,
            "sent": {
                key: list_counts(group, group.traffic.sent)
                for key, (group, _) in positions.items()
                if group.traffic is not None and not group.traffic.uncounted
            },
            "calls": list_last_calls(rank),
        }

    def state(self, rank: int, size: int, *, full: bool, calls: Sequence[Sequence[Any]] = ()) -> dict[str, Any]:
        """Return the present state of this rank (see :func:`~mpicoll.engine.diagnostics.rank_state.snapshot`)."""
        from mpicoll.engine.diagnostics.rank_state import snapshot  # late, see `late_imports`

        found = snapshot(
            rank,
            size,
            self.queues(),
            dict(self.active),
            full=full,
            started=self.started,
            calls=calls,
            met=dict(self._meetings),
            retired={key: number for key, (_, number) in dict(self._retired).items()},
        )
        for one in found.get("pending", []):
            one["failing"] = (one["key"], one["number"], one["begin"]) in self.failing
        return found


def wait_key(entry: Entry) -> WaitKey:
    """Return the identity of an operation."""
    return entry.group.key, entry.number, entry.begin


def describe_wait(entry: Entry, state: dict[str, Any]) -> str:
    """Return a description of a waiting operation and its call site. `state` is the state of this rank."""
    group, number = entry.group, f" number {entry.number}" if entry.call.collective else ""
    sites = [
        f"{one['site']['file']}:{one['site']['line']} in {one['site']['function']}"
        for one in state.get("pending", [])
        if (one["key"], one["number"]) == (group.key, entry.number) and one.get("site")
    ]
    at = f", called at {sites[0]}," if sites else ""
    return f"{entry.call}{number} on {group.name}, rank {group.rank} of {len(group.members)}{at}"
