"""One process's end of an MPI communicator."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from mpi4py import MPI

from mpicoll.config import config
from mpicoll.errors import CommunicationError, Timeout
from mpicoll.transport import cores, launch_env, shm
from mpicoll.transport.base import SHARED_MEMORY_GRACE, Memory, renumber
from mpicoll.transport.group_facts import GroupFacts
from mpicoll.transport.mpi.comm_facts import draw_key
from mpicoll.transport.mpi.fault_tolerance import allgather_objects, fault_tolerant
from mpicoll.transport.mpi.messages import MessagePassing
from mpicoll.transport.mpi.native import MpiNative, buffer_spec
from mpicoll.transport.mpi.translation import translates_errors
from mpicoll.transport.waiting import poll, wait_for, wait_on
from mpicoll.wording import rank_list

if TYPE_CHECKING:
    from mpicoll._shm import Connection
    from mpicoll.transport.base import ProgramPlan
    from mpicoll.transport.files import FileHandle
    from mpicoll.transport.mpi.connections import Connections
    from mpicoll.transport.mpi.program import MpiProgram
    from mpicoll.transport.windows import RemoteMemory

_GROUP_TAGS = 1 << 15
"""On the communicator of the collectives, tags from here on are those by which MPI creates groups, and lower ones those
of schedules. No rank receives from any source or with any tag there."""

_GATHER_TAGS = 1 << 15
"""Above the tags of collectives."""


class MpiTransport(MessagePassing):
    """One process's end of an MPI communicator, on two duplicates of it: `collective` for collectives and `p2p` for the
    caller's messages.

    `facts` are those of :func:`~mpicoll.transport.mpi.comm_facts.find_facts`.
    """

    def __init__(
        self,
        collective: MPI.Intracomm,
        p2p: MPI.Intracomm,
        facts: GroupFacts,
    ) -> None:
        self._facts = facts
        self.key = facts.key
        super().__init__(collective, p2p, world_ranks(collective))
        self.timeout = config().timeout
        self.nodes = facts.nodes
        self.native = MpiNative(collective)
        self.mpi = p2p
        # Only COMM_WORLD is guaranteed to have the attribute.
        self.max_tag = int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767)
        self.background = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self.no_shm_reason, self.no_cma_reason = facts.no_shm_reason, facts.no_cma_reason
        self._compare_buffers: list[Any] = []
        self._compare_comm: MPI.Intracomm | None = None
        if self.size > 1 and (len(set(self.nodes)) > 1 or self.no_shm_reason is not None):
            # Ranks that share no memory compare their calls by it. Not in the first comparison, which may be in a
            # background thread: MPI_Comm_dup waits there for one in the program's thread, as Open MPI creates one
            # communicator at a time, and that may wait for a rank that waits for the operation.
            self._create_compare_comm()
        self._connections: Connections | None = None

    @translates_errors
    def allgather_text(self, text: str) -> list[str]:
        return allgather_objects(self._collective, text)

    def find_native_defect(
        self, collective: str, op: str = "", dtype: np.dtype[Any] | None = None, *, uneven: bool = False
    ) -> str | None:
        if self._failure_defect is not None:
            return self._failure_defect
        if uneven and collective == "allgather" and fault_tolerant():
            return (
                "in a fault-tolerant job, MPI_Allgatherv of this MPI library can succeed with a wrong result if a rank"
                " dies"
            )
        if dtype is None:
            return self._gather_defect if collective in ("gather", "scatter") else None
        # Not at module level: a rank that calls no reduction of MPI, and does not look for defects, does not need it.
        from mpicoll.transport import reductions

        return reductions.find_defect(self._facts.defects, op, dtype)

    @cached_property
    def _failure_defect(self) -> str | None:
        if not fault_tolerant() or len(set(self.nodes)) == 1:
            return None
        from mpicoll.transport import coll_han  # few jobs need it

        if coll_han.is_disabled(os.environ):
            return None
        return (
            "in a fault-tolerant job, collectives of this MPI library between hosts can succeed with a wrong result if"
            f" a rank dies (coll/han); set {coll_han.PRIORITY}=-1 before MPI is initialised"
        )

    @cached_property
    def _gather_defect(self) -> str | None:
        # The numbers of nodes follow the order of their first ranks.
        if list(self.nodes) == sorted(self.nodes):
            return None
        from mpicoll.transport import quirks  # late: few communicators need it

        if not quirks.INTERLEAVED_NODES.applies_to(MPI.Get_library_version()):
            return None
        return (
            "this MPI library has wrong results of gather and scatter if the ranks of a node don't follow one another,"
            " as on this communicator"
        )

    def make_program(self, make_plan: Callable[[], ProgramPlan], memory: Sequence[Memory]) -> MpiProgram | None:
        from mpicoll.transport.mpi.program import MpiProgram, can_run_programs  # few jobs need it

        return MpiProgram(self, self._collective, make_plan(), memory) if can_run_programs() else None

    @property
    def connects(self) -> bool:
        if len(set(self.nodes)) == 1:
            return False
        from mpicoll.transport.mpi.connections import may_connect  # few jobs need it

        return may_connect(self.members)

    def get_connections(self, peers: Collection[int], tag: int) -> tuple[int | Connection, ...]:
        """As :meth:`mpicoll.transport.mpi.connections.Connections.get`."""
        if self._connections is None:
            from mpicoll.transport.mpi.connections import Connections  # few jobs need it

            self._connections = Connections(self)
        return self._connections.get(peers, tag)

    # --- memory of a node

    def _exchange_objects(self, value: object) -> list[object]:
        return allgather_objects(self._collective, value)

    def share(self, nbytes: int) -> list[Memory]:
        memories, failure = shm.share(nbytes, self._exchange_objects, self.rank, named=self._facts.named)
        if memories is None:
            raise CommunicationError(f"{failure}; set MPICOLL_SHARED_MEMORY=off to do without")
        return memories

    def adopt(self, memory: Memory, fd: int) -> list[Memory]:
        if self._facts.named:
            raise CommunicationError("memory without a name can't be passed on (MPICOLL_SHARED_MEMORY=named)")
        memories, failure = shm.adopt(memory, fd, self._exchange_objects, self.rank)
        if memories is None:
            raise CommunicationError(failure)
        return memories

    def open_file(self, path: str, fd: int, *, reads: bool, writes: bool, driver: str) -> FileHandle:
        # Not at module level: few programs open files.
        if driver == "posix" or (driver == "auto" and len(set(self.nodes)) == 1):
            from mpicoll.transport.files import PosixFile

            return PosixFile(fd, self.rank)
        from mpicoll.transport.mpi.files import MpiFile

        os.close(fd)
        return MpiFile(self._collective, path, reads=reads, writes=writes)

    @translates_errors
    def create_window(self, memory: Memory) -> RemoteMemory:
        from mpicoll.transport.mpi.windows import MpiWindow  # late: few programs use it

        return MpiWindow(self._collective, memory, self.translate_error)

    def list_processes(self) -> list[int]:
        return list(self._facts.processes)

    @property
    def has_own_cores(self) -> bool:
        # Not the cores to which this process is bound: a launcher gives each rank its own, if there are enough.
        return launch_env.local_ranks(os.environ, MPI.COMM_WORLD.size) <= (os.cpu_count() or 1)

    def count_cores(self) -> int:
        local_ranks = launch_env.local_ranks(os.environ, MPI.COMM_WORLD.size)
        return cores.count_cores(self._facts.processes, self.rank, local_ranks)

    @property
    def survives_deaths(self) -> bool:
        return fault_tolerant()

    @cached_property
    def _progress_comm(self) -> MPI.Intracomm:
        """The communicator on which MPI_Iprobe makes progress on all messages of this process."""
        from mpicoll.transport import quirks  # late: few ranks wait that long in their first call

        # Not MPI_COMM_WORLD everywhere: the program may revoke it where jobs are fault-tolerant.
        stalls = quirks.SELF_PROGRESS.applies_to(MPI.Get_library_version())
        return MPI.COMM_WORLD if stalls else MPI.COMM_SELF

    def check_peers(self, waited: float, peers: Sequence[int]) -> None:
        # A rank that waits here makes no other calls of MPI. It must keep its messages moving: its peers may wait for
        # those before they arrive. No library has to make progress where a message is found, hence the tag that no
        # message has.
        comm = self._progress_comm
        comm.Iprobe(comm.rank, self.max_tag)
        # The launcher ends a job in which a process has died, unless it is fault-tolerant. There the death of any
        # member counts, not only that of `peers`, which may have aborted because of it.
        if fault_tolerant() and self.failures.is_revoked():
            raise self.failures.rank_failed("the communicator was revoked")
        if waited > self.timeout + SHARED_MEMORY_GRACE:
            missing = rank_list(self.members[peer] for peer in peers)
            raise Timeout(f"in shared memory, {missing} did not arrive within {self.timeout:g} s")

    # --- failures of ranks

    def revoke(self) -> None:
        self.failures.revoke()

    def detect_failure(self) -> bool:
        return self.failures.has_failed()

    @translates_errors
    def agree(self, flag: bool) -> bool:
        return self.failures.agree(flag)

    @translates_errors
    def shrink(self) -> MpiTransport:
        self.revoke()
        # None of this may fail on some ranks only: MPI_Comm_shrink is the one call that creates a communicator of the
        # same ranks everywhere, even if more of them die meanwhile.
        collective = self._collective.Shrink()
        while (p2p := self._collective.Shrink()).size != collective.size:
            collective = p2p
        # Open MPI crashes where it is still creating a communicator that another rank, because of the next death,
        # revokes already. So no rank uses it before all have it; the first shrink was over everywhere when the second
        # began.
        with suppress(MPI.Exception):  # a rank has died meanwhile
            self._collective.Ack_failed()
            self._collective.Agree(1)
        # It is not added to the derived ones: a late failure on this communicator revokes those again, and the new one
        # must outlive it.
        return self._derive(cast(MPI.Intracomm, collective), cast(MPI.Intracomm, p2p), f"{self.key}/{collective.size}")

    # --- agreement of all ranks

    @translates_errors
    def compare(
        self, word: int, text: Callable[[], str], idle: Callable[[], None], interrupts: list[BaseException]
    ) -> list[str] | None:
        if self._is_common(word, idle, interrupts):
            return None
        assert self._compare_comm is not None
        return allgather_objects(self._compare_comm, text())

    def _is_common(self, word: int, idle: Callable[[], None], interrupts: list[BaseException]) -> bool:
        """Return True if all ranks have the same `word`. Collective.

        Collectives that differ from rank to rank may leave messages on the communicator of the collectives, so
        comparisons have a communicator of their own. Where ranks share memory, it is created when all ranks have
        arrived for the first time.
        """
        first = self._compare_comm is None
        comm = self._collective if self._compare_comm is None else self._compare_comm
        if not self._compare_buffers:
            if self.find_native_defect("allreduce", "min", np.dtype(np.int64)) is not None:
                return self._is_common_by_list(word)
            mine, least = np.empty(2, np.int64), np.empty(2, np.int64)
            self._compare_buffers = [mine, least, buffer_spec(mine), buffer_spec(least)]
        mine, least, source, target = self._compare_buffers
        mine[0], mine[1] = word, -word
        request = comm.Iallreduce(source, target, MPI.MIN)
        try:
            wait_on(
                lambda: poll(request.Test, None, "comparison", idle), interrupts, (CommunicationError, MPI.Exception)
            )
        except BaseException:
            self.failures.retain((request, self._compare_buffers))
            self._compare_buffers = []
            raise
        if first:
            self._create_compare_comm()
        # The minimum of the words, and the negative of their maximum.
        return bool(least[0] == -least[1])

    def _is_common_by_list(self, word: int) -> bool:
        """Do the same where the library computes the minimum of integers wrongly."""
        if self._compare_comm is None:
            self._create_compare_comm()
        assert self._compare_comm is not None
        return len(set(allgather_objects(self._compare_comm, word))) == 1

    def _create_compare_comm(self) -> None:
        self._compare_comm = self._collective.Dup()
        self.failures.add_handle(self._compare_comm)

    @translates_errors
    def wait_for_all_ranks(self, seconds: float) -> bool:
        if MPI.Is_finalized() or self.failures.revoked_here:
            return False
        request = self._collective.Ibarrier()
        wait_for(lambda: request.Test() or None, seconds)
        self.failures.retain(request)
        return True

    # --- groups

    @translates_errors
    def split(self, color: int | None, key: int) -> MpiTransport | None:
        child = cast(MPI.Intracomm, self._collective.Split(MPI.UNDEFINED if color is None else color, key))
        return None if child == MPI.COMM_NULL else self._child(child, child.Dup())

    @translates_errors
    def group(self, ranks: Sequence[int], independent: bool = False) -> MpiTransport:
        whole = self._collective.Get_group()
        part = whole.Incl(list(ranks))
        try:
            self._synchronize(ranks, 0)
            child = self._collective.Create_group(part, _GROUP_TAGS)
            # Open MPI takes far longer to create a group than to duplicate a communicator.
            make = self._derive if independent else self._child
            return make(child, child.Dup())
        finally:
            part.Free()
            whole.Free()

    @translates_errors
    def duplicate(self, tag: int) -> MpiTransport:
        all_ranks = self._p2p.Get_group()
        try:
            self._synchronize(range(self.size), 1 + tag)
            child = self._collective.Create_group(all_ranks, _GROUP_TAGS + 1 + tag)
            return self._child(child, child.Dup())
        finally:
            all_ranks.Free()

    def _synchronize(self, ranks: Sequence[int], number: int) -> None:
        """Wait until all of `ranks` have entered the call, between nodes and in a fault-tolerant job.

        Open MPI can't leave the creation of a group if one of them never does; a wait for a message can be left. And it
        creates one communicator at a time. Between nodes, background threads create some: for ``hierarchical``, and
        inside of MPI's own collectives (coll/han). These would wait for a creation in this thread that waits for a
        rank, which may wait for their operation.
        """
        if not fault_tolerant() and len(set(self.nodes)) == 1:
            return
        here, size, nothing = list(ranks).index(self.rank), len(ranks), np.empty(0, np.uint8)
        tag, step = _GATHER_TAGS + number, 1
        while step < size:
            self.exchange([(ranks[(here + step) % size], nothing)], [(ranks[here - step], nothing)], tag)
            step *= 2

    def _child(self, collective: MPI.Intracomm, p2p: MPI.Intracomm) -> MpiTransport:
        """Return a transport that is revoked with this one."""
        child = self._derive(collective, p2p)
        self.failures.add_derived(child.failures)
        return child

    def _derive(self, collective: MPI.Intracomm, p2p: MPI.Intracomm, key: str = "") -> MpiTransport:
        ranks = translate_ranks(collective, range(collective.size), self._collective)
        facts = self._facts._replace(
            key=key or collective.bcast(draw_key(collective)),
            nodes=renumber([self.nodes[rank] for rank in ranks]),
            processes=tuple(self._facts.processes[rank] for rank in ranks),
        )
        return MpiTransport(collective, p2p, facts)

    @translates_errors
    def free(self) -> None:
        if self.failures.mark_freed():
            if self._connections is not None:
                self._connections.close()
            for comm in self.failures.handles:
                comm.Free()


def world_ranks(comm: MPI.Intracomm) -> tuple[int, ...]:
    """Return the ranks of `comm` as ranks of COMM_WORLD."""
    return translate_ranks(comm, range(comm.size), MPI.COMM_WORLD)


def translate_ranks(comm: MPI.Comm, ranks: Sequence[int], other: MPI.Comm) -> tuple[int, ...]:
    """Return ranks of `comm` as ranks of `other`."""
    part, whole = comm.Get_group(), other.Get_group()
    try:
        return tuple(MPI.Group.Translate_ranks(part, ranks, whole))
    finally:
        part.Free()
        whole.Free()
