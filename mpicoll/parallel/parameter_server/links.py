"""Links between servers and workers, and the agreement of all ranks from which they are made.

A link is a server and a worker. Where a job continues after the death of a rank, MPI revokes each communicator of which
that rank was a member, so each link has its own communicator there; otherwise all share one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mpicoll.collectives.objects import allgather_object
from mpicoll.engine.core.communicator import Communicator, core_of
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.diagnostics.flight_recorder import Call
from mpicoll.errors import ArgumentError, MpicollError, RankFailed, Timeout
from mpicoll.parallel.parameter_server.plan import TensorSpec
from mpicoll.transport.base import Pending, Transport
from mpicoll.transport.waiting import SPINS, Backoff
from mpicoll.wording import rank_list

Array: TypeAlias = np.ndarray[Any, Any]

_SLEEPS_PER_CHECK = 32
"""Sleeps of a wait between two looks for failures that no transfer reports."""


class Settings(NamedTuple):
    """Arguments of the servers, which must be the same on all of them."""

    mode: str
    staleness: int
    max_norm: float | None
    reduction: str
    bucket_bytes: int
    whole_tensors: bool


class Role(NamedTuple):
    """What a rank states about itself: a server its settings, a worker its model."""

    settings: Settings | None = None
    specs: tuple[TensorSpec, ...] | None = None
    error: str | None = None


class Job(NamedTuple):
    """The ranks that take part, and what they have agreed on."""

    comm: Communicator
    servers: tuple[int, ...]
    workers: tuple[int, ...]
    settings: Settings
    specs: tuple[TensorSpec, ...]

    @property
    def survives_deaths(self) -> bool:
        """True if the job continues after the death of a rank."""
        return core_of(self.comm).transport.survives_deaths

    def describe(self) -> str:
        """Describe this rank in a message."""
        rank = self.comm.rank
        return f"{'server' if rank in self.servers else 'worker'} rank {rank} of {self.comm.size}"


def agree(comm: Communicator, operation: str, make_role: Callable[[], Role]) -> Job:
    """Exchange the roles of all ranks of `comm`. Collective. Raises the same kind of error on all ranks if one has an
    invalid argument or they disagree."""
    failure: Exception | None = None
    try:
        role = make_role()
    except MpicollError as error:
        failure, role = error, Role(error=str(error))
    roles: list[Role] = allgather_object(role, comm=comm)
    if failure is not None:
        raise failure
    where = f"{operation}: rank {comm.rank} of {comm.size}"
    for rank, other in enumerate(roles):
        if other.error is not None:
            raise ArgumentError(f"{where}: rank {rank} has failed: {other.error}")
    servers = tuple(rank for rank, other in enumerate(roles) if other.settings is not None)
    workers = tuple(rank for rank, other in enumerate(roles) if other.specs is not None)
    if not servers or not workers:
        missing, name = ("server", "ParameterServer") if not servers else ("worker", "Worker")
        raise ArgumentError(f"{where}: no rank is a {missing}; at least one rank must make a {name}")
    settings, specs = roles[servers[0]].settings, roles[workers[0]].specs
    assert settings is not None
    assert specs is not None
    for rank, other in enumerate(roles):
        if other.settings is not None and other.settings != settings:
            pairs = zip(Settings._fields, settings, other.settings, strict=True)
            differ = ", ".join(f"{name} {mine!r} and {theirs!r}" for name, mine, theirs in pairs if mine != theirs)
            raise ArgumentError(f"{where}: servers {servers[0]} and {rank} differ in {differ}; pass the same arguments")
        if other.specs is not None and other.specs != specs:
            raise ArgumentError(
                f"{where}: workers {workers[0]} and {rank} have different models: {_compare(specs, other.specs)};"
                " all workers must make the same model, with the same tensors in the same order"
            )
    return Job(comm, servers, workers, settings, specs)


def _compare(one: Sequence[TensorSpec], other: Sequence[TensorSpec]) -> str:
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            return f"{_describe(mine)} and {_describe(theirs)}"
    return f"{len(one)} and {len(other)} tensors"


def _describe(spec: TensorSpec) -> str:
    return f"{spec.name!r} {spec.dtype}{list(spec.shape)}{' with sparse gradients' if spec.sparse else ''}"


class Link(NamedTuple):
    """Connection to another rank: `rank` in the job's communicator, `peer` in that of the link."""

    transport: Transport
    peer: int
    rank: int

    def send(self, data: Array, tag: int) -> Pending:
        """Start to send bytes."""
        return self.transport.isend(data, self.peer, tag)

    def recv(self, data: Array, tag: int) -> Pending:
        """Start to receive bytes."""
        return self.transport.irecv(data, self.peer, tag)


class Links:
    """The links of this rank, and its waits. Collective over the ranks of `job`."""

    def __init__(self, job: Job) -> None:
        comm = job.comm
        core = core_of(comm)
        self._job = job
        self._timeout = comm.timeout
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
        traffic = self._core.transport.traffic
        if traffic is not None:
            # Each side answers the other one while it waits.
            traffic.answered = True

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
        deadline = time.monotonic() + bound
        for _ in range(SPINS):
            if ready():
                return
        backoff = Backoff()
        while backoff.yield_core():
            if ready():
                return
        naps = 0
        while True:
            ranks = tuple(needed())
            parts = tuple(Call("recv", peer=rank, collective=False) for rank in ranks)
            known = () if self._job.survives_deaths else parts
            call = Call(operation, parts=known, takes=None if any_of or not known else (), collective=False)
            with self._core.queue.waiting(call, bound) as waiting:
                while ranks == tuple(needed()):
                    if ready():
                        return
                    naps += 1
                    if naps % _SLEEPS_PER_CHECK == 0:
                        self.check_servers()
                    waiting.check()
                    if time.monotonic() > deadline:
                        raise Timeout(
                            f"{operation}: {self._job.describe()} has received nothing from {rank_list(ranks)} for"
                            f" {bound:g} s; a longer time is set by timeout="
                        )
                    backoff.sleep()

    def check_servers(self) -> None:
        """On a server: raise RankFailed if another server has died."""
        if self.servers is not None and self._job.survives_deaths:
            core_of(self.servers).transport.iprobe(None, None)


def _independent_group(core: CommunicatorCore, ranks: Sequence[int]) -> Transport:
    call = Call(f"group({','.join(map(str, ranks))})", collective=False)
    group: Transport = core.queue.run_after_pending(
        lambda: core.transport.group(ranks, independent=True), call, list(ranks)
    )
    return group


def server_death(job: Job, ranks: Sequence[int], reason: object) -> RankFailed:
    """Return the error of this rank for the death of servers."""
    return RankFailed(
        f"{job.describe()}: server {rank_list(ranks)} has died, and with it its part of the model ({reason}); restart"
        " the job from a checkpoint (ParameterServer.save)",
        tuple(job.comm.members[rank] for rank in ranks),
    )
