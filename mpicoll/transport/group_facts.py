"""Facts that the ranks of a group exchange when it is made: nodes, processes, and what memory they can share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from mpicoll.config import config
from mpicoll.extension import find_missing_reason
from mpicoll.named_tuple import NamedTuple
from mpicoll.transport import record_file, shm
from mpicoll.transport.base import renumber


class GroupFacts(NamedTuple):
    """Facts about a group, the same on all its ranks."""

    key: str
    """A name that no other group has."""
    nodes: tuple[int, ...]
    """The number of each rank's node."""
    processes: tuple[int, ...]
    """The number of each rank's process."""
    defects: dict[str, str]
    """The reductions that the MPI library computes wrongly on any node."""
    no_shm_reason: str | None
    """The reason why the ranks of a node can't share memory; None if they can."""
    no_cma_reason: str | None
    """The reason why the ranks of a node can't read each other's private memory; None if they can."""
    named: bool
    """True if shared memory must have a name in the file system (MPICOLL_SHARED_MEMORY=named)."""


class _Offer(NamedTuple):
    """Contribution of a rank. `block` is the handle of the memory that it shares, or the reason why there is none."""

    leader: int
    key: str
    shared_memory: str
    missing_extension: str | None
    memory: shm.ProcessMemory
    block: object
    defects: dict[str, str]


def find_facts(
    allgather: Callable[[object], list[object]],
    rank: int,
    node: Sequence[int],
    draw_key: Callable[[], str],
    place: tuple[int, int],
    defects: dict[str, str],
    *,
    named: bool = False,
) -> GroupFacts:
    """Return the facts about a group of which this process is `rank`. Collective. How the ranks reach each other's
    memory is found out by trying; `named` asks for shared memory with a name.

    ``allgather(value)`` returns the values of all ranks. `node` are the ranks on the node of this rank. The key is what
    `draw_key` returns on rank 0. `place` is the rank of this process in its job, and the number of ranks of the job.
    `defects` are those that this rank has found, on behalf of its node.

    Two exchanges are all that it takes: with more ranks than cores, each one takes several slices of the scheduler's
    time.
    """
    setting, missing = "named" if named else config().shared_memory, find_missing_reason()
    offers: list[_Offer] = []
    verdicts: list[tuple[str | None, str | None]] = []

    def exchange(value: object) -> list[object]:
        """Exchange the handles of memory, then the failures. Return those of the node, or one reason not to go on."""
        if not offers:
            memory = shm.describe_memory()
            mine = _Offer(node[0], draw_key() if rank == 0 else "", setting, missing, memory, value, defects)
            offers.extend(cast("list[_Offer]", allgather(mine)))
            reason = _find_common_reason(offers)
            return [offers[peer].block for peer in node] if reason is None else [reason]
        unread = _try_reading(rank, [offers[peer].memory for peer in node])
        verdicts.extend(cast("list[tuple[str | None, str | None]]", allgather((value or None, unread))))
        return [verdicts[peer][0] or "" for peer in node]

    failure = ""
    if missing is None and setting != "off":
        failure = record_file.share(exchange, node.index(rank), len(node), place, named=setting == "named")
    else:
        exchange(failure)
    reason = _find_common_reason(offers)
    if reason == _MIXED:
        return find_facts(allgather, rank, node, draw_key, place, defects, named=True)
    if reason is not None:
        verdicts = [(reason, reason)]
    elif not verdicts:  # a rank of this node has no memory
        exchange(failure)
    no_shm_reason, no_cma_reason = (next((one for one in why if one), None) for why in zip(*verdicts, strict=True))
    return GroupFacts(
        offers[0].key,
        renumber([one.leader for one in offers]),
        tuple(one.memory.pid for one in offers),
        {name: why for one in reversed(offers) for name, why in one.defects.items()},
        no_shm_reason,
        no_cma_reason,
        setting == "named",
    )


_MIXED = "some ranks share memory with a name, and others without"


def _find_common_reason(offers: Sequence[_Offer]) -> str | None:
    """Return the reason why no ranks can share memory as they have offered it, or None if that depends on the node."""
    for rank, one in enumerate(offers):
        if one.shared_memory == "off":
            return f"MPICOLL_SHARED_MEMORY=off on rank {rank}"
    for rank, one in enumerate(offers):
        if one.missing_extension is not None:
            return f"the extension mpicoll._shm can't be imported on rank {rank}: {one.missing_extension}"
    return None if len({one.shared_memory for one in offers}) == 1 else _MIXED


def _try_reading(rank: int, processes: Sequence[shm.ProcessMemory]) -> str | None:
    """Return why `rank` can't read the private memory of one of `processes`, or None if it can."""
    reason: str | None = None
    for process in processes:
        try:
            shm.ProcessReader(process).check()
        except OSError as error:
            reason = f"rank {rank} can't read the memory of its peers: {error.strerror}"
    return reason
