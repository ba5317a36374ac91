"""Communicators, as users see them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any
from weakref import finalize

from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.core.process_local import refuse_pickling
from mpicoll.engine.diagnostics.flight_recorder import Call
from mpicoll.errors import CommunicatorError, RankError
from mpicoll.extension import set_communicator_type
from mpicoll.transport.base import Transport

if TYPE_CHECKING:
    from typing_extensions import Self


class Communicator:
    """Group of ranks with a private communication context.

    Created by :func:`mpicoll.world`, :meth:`split`, :meth:`group`, :meth:`node_comm`, or from an mpi4py communicator;
    it is always a private duplicate, so collectives never match the caller's own messages. Usable as a context manager
    that frees it.

    Attributes:
        rank, size: This rank, and the number of ranks.
        nodes: For each rank the number of its node.
        node, num_nodes: The number of this rank's node, and the number of nodes.
        local_rank, local_size: Rank and size among the ranks of this node.
        mpi: The mpi4py communicator on which the point-to-point messages travel; None without MPI.

    Example:
        >>> def sum_of_half():
        ...     world = mpicoll.world()
        ...     with world.split(world.rank % 2) as half:
        ...         return mpicoll.allreduce(world.rank, comm=half)
        >>> mpicoll.run_local(sum_of_half, 4)
        [2, 4, 2, 4]
    """

    def __init__(self, core: CommunicatorCore, on_shrink: Callable[[Communicator], None] | None = None) -> None:
        self._core = core
        self._on_shrink = on_shrink
        # Read by the extension.
        self._calls = core.queue.calls
        self.rank = core.rank
        self.size = core.size
        self.nodes = core.nodes
        # Prepared operations refer to the communicator, which therefore would live until the next garbage collection.
        finalize(self, core.call_cache.clear).atexit = False

    __reduce_ex__ = refuse_pickling(
        "Communicator",
        "every process of the job makes its own: by mpicoll.world() and its split() or group(ranks), and by duplicate()"
        " for another one of the same ranks",
    )

    def __repr__(self) -> str:
        return repr(self._core)

    @property
    def name(self) -> str:
        """Name of the communicator in messages."""
        return self._core.name

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of this communicator, as ranks of the MPI job."""
        return self._core.members

    @property
    def timeout(self) -> float:
        """Seconds that an operation may take, past which the job is ended with a report of each rank's position.
        Defaults to ``MPICOLL_TIMEOUT``; communicators derived from this one inherit the value."""
        return self._core.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._core.timeout = seconds

    @property
    def node(self) -> int:
        """The number of this rank's node."""
        return self._core.node

    @property
    def num_nodes(self) -> int:
        """Number of nodes of the ranks."""
        return self._core.num_nodes

    @property
    def local_rank(self) -> int:
        """This rank's number among those of its node."""
        return self._core.local_rank

    @property
    def local_size(self) -> int:
        """Number of ranks on this node."""
        return self._core.local_size

    @property
    def mpi(self) -> Any:
        """The mpi4py communicator of the same ranks; None without MPI.

        The messages of :func:`mpicoll.send` and related functions travel on it, so the caller's own receives from any
        source may match them; collectives are separate from it.
        """
        self._core.check()
        transport = self._core.transport
        if transport.traffic is not None:
            transport.traffic.uncounted = True
        return transport.mpi

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Create one communicator for each `color` (an integer >= 0), its ranks ordered by `key`, then by rank.
        Collective over all ranks. Return None on a rank that passes None as `color`. Raises RankError for a negative
        color."""
        core = self._core
        core.check()
        if color is not None and color < 0:
            raise RankError(f"split: color must be None or >= 0, got {color} on rank {self.rank}")
        # Creating a communicator communicates, so it is ordered with the collectives.
        part: Transport | None = core.queue.run(core.transport.split, Call("split"), color, key)
        return None if part is None else Communicator(core.derive(part, f"split({color})"))

    def node_comm(self) -> Communicator:
        """Create the communicator of the ranks on this rank's node, in the order of rank. Collective over all ranks."""
        comm = self.split(self.node)
        assert comm is not None
        return comm

    def group(self, ranks: Sequence[int]) -> Communicator | None:
        """Create a communicator of `ranks`, in that order. Collective over `ranks` only, all of which pass the same
        `ranks`; return None immediately on any other rank. Raises RankError for ranks out of range or named twice."""
        core = self._core
        core.check()
        ranks = [int(rank) for rank in ranks]
        if not ranks or len(set(ranks)) != len(ranks) or not all(0 <= rank < self.size for rank in ranks):
            raise RankError(
                f"group: ranks must be distinct, at least one, and in [0, {self.size}), got {ranks} on rank {self.rank}"
            )
        if self.rank not in ranks:
            return None
        name = f"group({','.join(map(str, ranks))})"
        call = Call(name, collective=False)
        part: Transport = core.queue.run_after_pending(lambda: core.transport.group(ranks), call, ranks)
        return Communicator(core.derive(part, name))

    def duplicate(self, tag: int = 0) -> Communicator:
        """Create another communicator of the same ranks. Collective over all ranks.

        The call is not ordered with the collectives of this communicator. All ranks must create their duplicates of one
        `tag` (in [0, 32767]) in the same order; duplicates of different tags may be in progress concurrently.
        """
        core = self._core
        core.check()
        call = Call(f"duplicate(tag={tag})", collective=False)
        transport: Transport = core.queue.run_unqueued(lambda: core.transport.duplicate(tag), call)
        return Communicator(core.derive(transport, "duplicate"))

    def shrink(self) -> Communicator:
        """Create a communicator of the surviving ranks, in the same order, after other ranks have died. Collective over
        the surviving ranks.

        All surviving ranks must call it, after RankFailed or without one: a rank that still waits on this communicator,
        or on one derived from it (by ``split``, ``group``, ``node_comm``), gets RankFailed there. None of these
        communicators can be used afterwards; they are freed, without a message. If this communicator is the one that
        :func:`mpicoll.world` returns, ``world`` returns the new one from now on; in :func:`mpicoll.run_local` call
        ``shrink`` on the rank's own thread.

        Further ranks may die meanwhile: they belong to the new communicator or not, alike on all ranks; if they do, its
        operations raise RankFailed. The call takes some milliseconds once all ranks have entered it; until then it
        waits, for at most ``timeout``. Raises CommunicatorError in a job that ends with its first failed rank: ``mpirun
        --with-ft ulfm`` starts a job that does not.
        """
        core = self._core
        core.check()

        def shrink() -> Transport:
            core.transport.revoke()
            # Pending operations fail because of the revocation.
            core.queue.close()
            return core.transport.shrink()

        transport: Transport = core.queue.run_unqueued(shrink, Call("shrink", collective=False))
        survivors = Communicator(core.derive(transport, "shrunk", world=core.is_world), self._on_shrink)
        core.free_locally()
        if self._on_shrink is not None:
            self._on_shrink(survivors)
        return survivors

    def failed(self) -> bool:
        """Return True if a rank is known to have died, or the communicator was revoked because of a death. Where ranks
        can survive a death, it takes a second to return False. Sends no message."""
        self._core.check()
        return self._core.transport.detect_failure()

    def agree(self, flag: bool) -> bool:
        """Return True if all surviving ranks pass True. Collective over the surviving ranks. The result is the same on
        all of them, regardless of which ranks have died, also after RankFailed; so it can decide whether to
        :meth:`shrink`."""
        core = self._core
        core.check()
        call = Call("agree", collective=False)
        return bool(core.queue.run_after_pending(lambda: core.transport.agree(bool(flag)), call))

    def free(self) -> None:
        """Free the communicator after its pending operations have completed. Collective. Freeing it twice has no
        effect.

        Raises CommunicatorError for the world, which lives as long as the process; MismatchError if the ranks have
        called different collectives, and this was not found before.
        """
        if self._core.is_world:
            raise CommunicatorError(f"{self!r} belongs to the library and can't be freed")
        self._core.free()

    def __enter__(self) -> Self:
        self._core.check()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Freeing is collective: after an error on this rank alone it would wait for ranks that never enter it.
        if kind is None:
            self.free()


set_communicator_type(Communicator)


def core_of(comm: Communicator) -> CommunicatorCore:
    """Return the resources of `comm`, for code of this package."""
    return comm._core  # noqa: SLF001  hidden from users only
