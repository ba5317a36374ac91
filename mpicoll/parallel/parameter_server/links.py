"""Links between servers and workers, and the waits for their messages.

A link is a server and a worker. Where a job continues after the death of a rank, MPI revokes each communicator of which
that rank was a member, so each link has its own communicator there; otherwise all share one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from mpicoll.collectives.objects import allgather_object
from mpicoll.engine.core.communicator import Communicator, core_of
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.diagnostics.flight_recorder import Call
from mpicoll.errors import Timeout
from mpicoll.parallel.parameter_server.agreement import Job
from mpicoll.parallel.parameter_server.transfers import (
    BACKGROUND_BYTES,
    BackgroundTransfers,
    Link,
    PolledTransfers,
    Transfers,
)
from mpicoll.transport.base import BackgroundQueue, Transport
from mpicoll.transport.waiting import NAP, SPINS, Backoff
from mpicoll.wording import rank_list

_YIELD_SECONDS = 2e-4
"""Seconds after which a wait sleeps between its looks: a large message takes milliseconds, in which other ranks of the
host use the core."""

_SHORT_SECONDS = 2 * _YIELD_SECONDS
"""Seconds of a wait after which the next one sleeps from its second look on. With messages that take milliseconds, the
looks without a pause would take a large share of a core, and most of them to no effect."""

_LAST_NAP_SHARE = 1 / 16
"""Least seconds between two looks per second of the last wait: where the next one is as long, it ends little later."""

_LAST_NAP = 2e-4
"""Most of these seconds."""

_NAP_SHARE = 1e-3
"""Seconds between two looks per second of the wait so far."""

_LONGEST_NAP = 5e-3
"""Most seconds between two looks of a wait."""

_PAUSE = 5e-2
"""Most seconds of a pause that ends when a message has completed: then failures are looked for."""

_SLEEPS_PER_CHECK = 32
"""Sleeps of a wait between two looks for failures that no transfer reports."""


class Links:
    """The links of this rank, the transfers on them, and its waits. Collective over the ranks of `job`."""

    def __init__(self, job: Job) -> None:
        comm = job.comm
        core = core_of(comm)
        self._job = job
        self._timeout = comm.timeout
        # Seconds that the last wait has taken.
        self._last_wait = 0.0
        self.links: list[Link] = []
        # Only servers are members, and only of this one.
        self.servers: Communicator | None = None
        if job.survives_deaths:
            self._core = core
            self._shared: Communicator | None = None
            for server in job.servers:
                for worker in job.workers:
                    if comm.rank in (server, worker):
                        pair = _independent_group(core, (server, worker))
                        peer = int(comm.rank == server)
                        self.links.append(Link(pair, peer, (server, worker)[peer]))
            if comm.rank in job.servers:
                self.servers = Communicator(core.derive(_independent_group(core, job.servers), "servers"))
        else:
            self._shared = comm.duplicate()
            self._core = core_of(self._shared)
            others = job.workers if comm.rank in job.servers else job.servers
            self.links = [Link(self._core.transport, rank, rank) for rank in others]
            self.servers = comm.group(job.servers)
        queue = self._bind_queue()
        self.transfers: Transfers = (
            PolledTransfers(self.links, driven=comm.rank in job.servers)
            if queue is None
            else BackgroundTransfers(self.links, queue)
        )
        traffic = self._core.transport.traffic
        if traffic is not None:
            # Each side answers the other one while it waits.
            traffic.answered = True

    def _bind_queue(self) -> BackgroundQueue | None:
        """Return what moves messages in the background, if it can on all ranks, and the model is large enough."""
        dense = sum(spec.size * spec.itemsize for spec in self._job.specs if not spec.sparse)
        if self._shared is None or dense < BACKGROUND_BYTES * len(self._job.servers):
            return None
        queue = self._core.transport.bind_background_messages([link.peer for link in self.links])
        return queue if all(allgather_object(queue is not None, comm=self._shared)) else None

    def free(self) -> None:
        """Free the communicator of servers and workers, after the end of this rank without an error.

        That of the servers remains, for checkpoints. In a fault-tolerant job those of the links are freed when they are
        dropped: MPI may wait there for the other rank, which waits for others.
        """
        self.transfers.free()
        if self._shared is not None:
            self._shared.free()

    def wait(
        self,
        operation: str,
        ready: Callable[[], bool],
        needed: Callable[[], Sequence[int]],
        bound: float,
        *,
        any_of: bool,
    ) -> None:
        """Wait until `ready` returns True, for at most `bound` seconds.

        A message from all of the ranks `needed`, or from any of them, ends the wait. Raises Timeout, or
        CommunicationError if these ranks will never send one.
        """
        if ready():
            return
        begin = time.monotonic()
        try:
            if self.transfers.announces or self._last_wait >= _SHORT_SECONDS or not _spin(ready):
                self._sleep_until(operation, ready, needed, begin, bound, any_of=any_of)
        finally:
            self._last_wait = time.monotonic() - begin

    def _sleep_until(
        self,
        operation: str,
        ready: Callable[[], bool],
        needed: Callable[[], Sequence[int]],
        begin: float,
        bound: float,
        *,
        any_of: bool,
    ) -> None:
        """Sleep between the looks of a wait that has begun at `begin`."""
        transfers = self.transfers
        shortest = max(NAP, min(_LAST_NAP_SHARE * self._last_wait, _LAST_NAP))
        naps = 0
        while True:
            ranks = tuple(needed())
            parts = tuple(Call("recv", peer=rank, collective=False) for rank in ranks)
            known = () if self._job.survives_deaths else parts
            call = Call(operation, parts=known, takes=None if any_of or not known else (), collective=False)
            with self._core.queue.waiting(call, bound) as waiting:
                while ranks == tuple(needed()):
                    # Before the look: what completes during it ends the pause after it.
                    seen = transfers.completed
                    if ready():
                        return
                    naps += 1
                    if naps % _SLEEPS_PER_CHECK == 0:
                        self.check_servers()
                    waiting.check()
                    passed = time.monotonic() - begin
                    if passed > bound:
                        raise Timeout(
                            f"{operation}: {self._job.describe()} has received nothing from {rank_list(ranks)} for"
                            f" {bound:g} s; a longer time is set by timeout="
                        )
                    nap = min(max(shortest, _NAP_SHARE * passed), _LONGEST_NAP)
                    transfers.pause(seen, _PAUSE if transfers.announces else nap)

    def check_servers(self) -> None:
        """On a server: raise RankFailed if another server has died."""
        if self.servers is not None and self._job.survives_deaths:
            core_of(self.servers).transport.iprobe(None, None)


def _spin(ready: Callable[[], bool]) -> bool:
    """Call `ready` without a pause, then between yields of the core, for a short time. Return True once it has."""
    for _ in range(SPINS):
        if ready():
            return True
    backoff = Backoff(yield_seconds=_YIELD_SECONDS)
    while backoff.yield_core():
        if ready():
            return True
    return False


def _independent_group(core: CommunicatorCore, ranks: Sequence[int]) -> Transport:
    call = Call(f"group({','.join(map(str, ranks))})", collective=False)
    group: Transport = core.queue.run_after_pending(lambda: core.transport.group(ranks, True), call, list(ranks))
    return group
