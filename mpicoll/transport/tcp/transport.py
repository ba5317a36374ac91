"""One process's end of a group of ranks that are connected by TCP."""

from __future__ import annotations

import itertools
import os
import pickle
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from mpicoll.errors import CommunicationError, CommunicatorError, Timeout
from mpicoll.transport import cores, shm
from mpicoll.transport.base import SHARED_MEMORY_GRACE, Memory, renumber
from mpicoll.transport.group_facts import GroupFacts
from mpicoll.transport.hashes import blake2b
from mpicoll.transport.tcp.mesh import Mesh
from mpicoll.transport.tcp.messages import MessagePassing
from mpicoll.wording import rank_list

if TYPE_CHECKING:
    from mpicoll.transport.files import PosixFile
    from mpicoll.transport.windows import RemoteMemory


class TcpTransport(MessagePassing):
    """One process's end of a group of `ranks` of a mesh.

    `facts` are those of :func:`~mpicoll.transport.group_facts.find_facts`; None before they are known.
    """

    native = None
    mpi = None
    max_tag = 2**31 - 1
    background = True
    survives_deaths = False
    connects = False
    traffic = None

    def __init__(self, mesh: Mesh, ranks: Sequence[int], key: str, facts: GroupFacts | None, *, root: bool) -> None:
        super().__init__(mesh, ranks, key)
        self._is_root = root
        self._facts = facts
        self._services = itertools.count()
        self._splits = itertools.count()
        self._groups: dict[tuple[int, ...], int] = {}
        self._duplicates: dict[int, int] = {}

    @property
    def facts(self) -> GroupFacts:
        """The facts that the ranks have found out together."""
        assert self._facts is not None
        return self._facts

    def set_facts(self, facts: GroupFacts) -> None:
        """Set the facts, which the ranks have found out by this transport."""
        self._facts = facts

    @property
    def nodes(self) -> tuple[int, ...]:
        return self.facts.nodes

    @property
    def no_shm_reason(self) -> str | None:
        return self.facts.no_shm_reason

    @property
    def no_cma_reason(self) -> str | None:
        return self.facts.no_cma_reason

    def find_native_defect(
        self, collective: str, op: str = "", dtype: np.dtype[Any] | None = None, *, uneven: bool = False
    ) -> str | None:
        return None  # there is no library that could

    def check_peers(self, waited: float, peers: Sequence[int]) -> None:
        self.mesh.check_usable()
        if self.mesh.ends:
            with self.mesh.changed:
                self._check_members([self._peers[peer] for peer in peers], f"rank {self.rank}, in shared memory")
        if waited > self.timeout + SHARED_MEMORY_GRACE:
            missing = rank_list(self.members[peer] for peer in peers)
            raise Timeout(f"in shared memory, {missing} did not arrive within {self.timeout:g} s")

    def translate_error(self, error: Exception) -> Exception:
        # The error of a rank whose peer can't continue does not name the reason.
        if type(error) is CommunicationError:
            with self.mesh.changed:
                dead = [
                    peer for peer in self._peers if peer in self.mesh.ends and not self.mesh.ends[peer].is_announced
                ]
            if dead:
                return self.mesh.make_end_error(str(error), dead)
        return error

    # --- memory of a node

    def share(self, nbytes: int) -> list[Memory]:
        memories, failure = shm.share(nbytes, self.allgather, self.rank, named=self.facts.named)
        if memories is None:
            raise CommunicationError(f"{failure}; set MPICOLL_SHARED_MEMORY=off to do without")
        return memories

    def adopt(self, memory: Memory, fd: int) -> list[Memory]:
        if self.facts.named:
            raise CommunicationError("memory without a name can't be passed on (MPICOLL_SHARED_MEMORY=named)")
        memories, failure = shm.adopt(memory, fd, self.allgather, self.rank)
        if memories is None:
            raise CommunicationError(failure)
        return memories

    def open_file(self, path: str, fd: int, *, reads: bool, writes: bool, driver: str) -> PosixFile:
        from mpicoll.transport.files import PosixFile  # late: few programs open files

        return PosixFile(fd, self.rank)

    def create_window(self, memory: Memory) -> RemoteMemory:
        raise AssertionError("there is no MPI library")

    def list_processes(self) -> list[int]:
        return list(self.facts.processes)

    @property
    def has_own_cores(self) -> bool:
        return self.mesh.local_ranks <= (os.cpu_count() or 1)

    def count_cores(self) -> int:
        return cores.count_cores(self.facts.processes, self.rank, self.mesh.local_ranks)

    # --- agreement of all ranks

    def allgather(self, value: object) -> list[object]:
        """Return every rank's `value`, which can be pickled. Collective."""
        # What the ranks send can be trusted: they have proved their identity.
        data = self._combine(pickle.dumps(value), pickle.dumps, "an exchange of all ranks")
        return [pickle.loads(one) for one in pickle.loads(data)]

    def allgather_text(self, text: str) -> list[str]:
        return cast("list[str]", self.allgather(text))

    def compare(
        self, word: int, text: Callable[[], str], idle: Callable[[], None], interrupts: list[BaseException]
    ) -> list[str] | None:
        what = "the comparison of the calls of all ranks"
        same = self._combine(b"%d" % word, lambda words: b"%d" % (len(set(words)) == 1), what, idle)
        return None if same == b"1" else self.allgather_text(text())

    def agree(self, flag: bool) -> bool:
        return all(self.allgather(flag))

    def wait_for_all_ranks(self, seconds: float) -> bool:
        if self.mesh.is_closed:
            return False
        with suppress(CommunicationError):  # ranks have ended, or are late
            self._combine(b"", lambda _: b"", "the synchronisation at the end of the program", seconds=seconds)
        return not self.mesh.is_closed

    def _combine(
        self,
        value: bytes,
        combine: Callable[[list[bytes]], bytes],
        what: str,
        idle: Callable[[], None] | None = None,
        seconds: float | None = None,
    ) -> bytes:
        """Return ``combine(values)`` of every rank's `value`, which rank 0 computes. Collective."""
        number, what = next(self._services), f"rank {self.rank}, in {what}"
        if self.rank:
            (receive,) = self._post(self._service, [(None, 0)], number)
            self._send(self._service, np.frombuffer(value, np.uint8), 0, number)
            return self._await_all([receive], what, idle, seconds)[0]
        others = range(1, self.size)
        receives = self._post(self._service, [(None, other) for other in others], number)
        result = combine([value, *self._await_all(receives, what, idle, seconds)])
        for other in others:
            self._send(self._service, np.frombuffer(result, np.uint8), other, number)
        return result

    # --- groups

    def split(self, color: int | None, key: int) -> TcpTransport | None:
        number = next(self._splits)
        table = cast("list[tuple[int | None, int]]", self.allgather((color, key)))
        if color is None:
            return None
        mine = sorted((rank for rank in range(self.size) if table[rank][0] == color), key=lambda one: table[one][1])
        return self._derive(mine, ("split", number, color))

    def group(self, ranks: Sequence[int], independent: bool = False) -> TcpTransport:
        members = tuple(ranks)
        number = self._groups[members] = self._groups.get(members, -1) + 1
        return self._derive(members, ("group", members, number))

    def duplicate(self, tag: int) -> TcpTransport:
        number = self._duplicates[tag] = self._duplicates.get(tag, -1) + 1
        return self._derive(range(self.size), ("duplicate", tag, number))

    def _derive(self, ranks: Sequence[int], name: Hashable) -> TcpTransport:
        """Return the transport of `ranks`. All of them derive the same contexts from the `name`, without a message: the
        messages of a rank that is faster wait in their mailboxes."""
        self.mesh.check_usable()
        key = blake2b(repr((self.key, name)).encode(), digest_size=8).hexdigest()
        facts = self.facts._replace(
            key=key,
            nodes=renumber([self.nodes[rank] for rank in ranks]),
            processes=tuple(self.facts.processes[rank] for rank in ranks),
        )
        return TcpTransport(self.mesh, [self._peers[rank] for rank in ranks], key, facts, root=False)

    def revoke(self) -> None:
        raise CommunicatorError(
            f"shrink: rank {self.rank} of {self.size} is in a job without MPI, which does not go on after a death;"
            " start it with `mpirun --with-ft ulfm` (Open MPI 5) to let it continue"
        )

    def shrink(self) -> TcpTransport:
        self.revoke()
        raise AssertionError("revoke raises")

    def detect_failure(self) -> bool:
        return any(peer in self.mesh.ends and not self.mesh.ends[peer].is_announced for peer in self._peers)

    def free(self) -> None:
        """Discard the messages of the group; free the connections with the group that has made them."""
        if self._is_root:
            self.mesh.leave()
        else:
            for context in self._contexts:
                self.mesh.drop(context)
