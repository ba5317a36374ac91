"""Algorithms by name: the MPI library's own, those of shared memory, of nodes, of devices, and the schedules."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

from mpicoll.engine.selection.nbytes import parse_bytes
from mpicoll.errors import AlgorithmError
from mpicoll.named_tuple import NamedTuple

if TYPE_CHECKING:
    from mpicoll.schedules import Algorithm

NATIVE = "native"

HIERARCHICAL = "hierarchical"

NCCL, IPC = "nccl", "ipc"

DEVICE = (NCCL, IPC)
"""Algorithms for data on devices: NVIDIA's library, and direct access to device memory of other ranks on the node."""

_HIERARCHICAL_COLLECTIVES = (
    "allreduce",
    "reduce",
    "bcast",
    "reduce_scatter",
    "allgather",
    "gather",
    "scatter",
    "alltoall",
)
"""Collectives that have the hierarchical algorithm and those of devices."""

SHARED_MEMORY = {
    "allreduce": ("shm_flat", "shm_pipelined", "cma", "shm_or_cma"),
    "reduce": ("shm_flat", "shm_pipelined", "cma", "shm_or_cma"),
    "reduce_scatter": ("shm_pipelined", "cma", "shm_or_cma"),
    "bcast": ("shm_pipelined", "cma", "shm_or_cma"),
    "allgather": ("shm_pipelined", "cma", "shm_or_cma"),
    "gather": ("shm_pipelined", "cma", "shm_or_cma"),
    "scatter": ("shm_pipelined", "cma", "shm_or_cma"),
    "alltoall": ("shm_pipelined", "cma", "shm_or_cma"),
    "scan": ("shm_pipelined", "cma", "shm_or_cma"),
    "exscan": ("shm_pipelined", "cma", "shm_or_cma"),
    "barrier": ("shm_flat",),
}
"""Algorithms of each collective in memory that ranks share (:mod:`mpicoll.engine.executors.shared_memory`)."""

_SCHEDULES = {
    "allreduce": ("master_worker", "ring", "tree", "double_tree", "recursive_doubling", "halving_doubling"),
    "reduce": ("linear", "chain", "binomial", "reduce_scatter_gather"),
    "reduce_scatter": ("ring", "pairwise", "recursive_halving", "linear"),
    "bcast": ("binomial", "chain", "scatter_allgather"),
    "allgather": ("ring", "bruck", "recursive_doubling"),
    "gather": ("linear", "binomial"),
    "scatter": ("linear", "binomial"),
    "alltoall": ("pairwise", "bruck"),
    "scan": ("linear", "recursive_doubling"),
    "exscan": ("linear", "recursive_doubling"),
    "barrier": ("dissemination",),
}
"""Names of the schedules of each collective that are built in, known without loading them."""

FORMER_NAMES = {"slots": "shm_flat", "pieces": "shm_pipelined"}
"""Former names of algorithms, by which users, their scripts and their tuned tables may still name them."""

MAX_FLAT_BYTES = 256 * 1024
"""Largest vector for ``shm_flat``, in bytes of the dtype of the reduction, which may be wider than the caller's."""

SLOT_BYTES = 1 << 21
"""Size of a slot of shared memory, and so of the largest piece."""


MAX_SEGMENTS = 4096
"""Largest number of segments of a schedule: each rank has as many rounds, which are kept."""


class SharedMemoryAlgorithm(NamedTuple):
    """An algorithm of :mod:`mpicoll.engine.executors.shared_memory`."""

    name: str


class DeviceAlgorithm(NamedTuple):
    """``nccl`` or ``ipc`` (see :mod:`mpicoll.engine.executors.device`)."""

    name: str


class HierarchicalAlgorithm:
    """Phases within the nodes and between them (see :mod:`mpicoll.engine.executors.hierarchical`)."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HierarchicalAlgorithm)

    def __hash__(self) -> int:
        return hash(HierarchicalAlgorithm)


class CompressedAlgorithm(NamedTuple):
    """All-reduce with messages that are compressed by the method `compression` (see
    :mod:`mpicoll.engine.executors.compressed`). It is not selected, but follows from an argument of the call."""

    compression: str


AnyAlgorithm: TypeAlias = (
    "Algorithm | SharedMemoryAlgorithm | DeviceAlgorithm | HierarchicalAlgorithm | CompressedAlgorithm | None"
)
"""None is the MPI library's own."""


def canonical_name(text: str) -> str:
    """Return the name of an algorithm, perhaps with a part behind a slash, with a former name replaced."""
    name, slash, detail = text.partition("/")
    return f"{FORMER_NAMES.get(name, name)}{slash}{detail}"


def check_name(collective: str, text: str) -> None:
    """Raise AlgorithmError if `text` names no algorithm. Does not load the schedules, which takes tens of milliseconds,
    unless it may name one that is not built in, or its segments."""
    if text not in _SCHEDULES.get(collective, ()):
        resolve_name(collective, text)


@lru_cache(maxsize=256)
def resolve_name(collective: str, text: str) -> tuple[AnyAlgorithm, int | None]:
    """Return the algorithm that `text` names, and the number after the slash if there is one: of a schedule the
    segments, of a shared-memory algorithm the bytes of a piece. Raises AlgorithmError if there is no such algorithm."""
    text = canonical_name(text)
    name, slash, detail = text.partition("/")
    if name == NATIVE and not slash:
        return None, None
    if name == HIERARCHICAL and collective in _HIERARCHICAL_COLLECTIVES:
        if slash:
            raise AlgorithmError(f"{collective} algorithm {text!r}: {name} has no pieces")
        return HierarchicalAlgorithm(), None
    if name in DEVICE and collective in _HIERARCHICAL_COLLECTIVES:
        if slash:
            raise AlgorithmError(f"{collective} algorithm {text!r}: {name} has no pieces")
        return DeviceAlgorithm(name), None
    if name in SHARED_MEMORY.get(collective, ()):
        return SharedMemoryAlgorithm(name), _piece_bytes(collective, name, detail) if slash else None
    if (algorithm := schedules_of(collective).get(name)) is None:
        raise AlgorithmError(
            f"{collective} has no algorithm {name!r}; there are {', '.join(algorithms_of(collective))}"
        )
    if not slash:
        return algorithm, None
    if not algorithm.segmented:
        raise AlgorithmError(f"{collective} algorithm {text!r}: {name} has no segments")
    segments = int(detail) if re.fullmatch("[0-9]{1,9}", detail) else 0
    if not 1 <= segments <= MAX_SEGMENTS:
        raise AlgorithmError(
            f"{collective} algorithm {text!r}: the part behind / must be a number of segments, from 1 to {MAX_SEGMENTS}"
        )
    return algorithm, segments


def _piece_bytes(collective: str, name: str, text: str) -> int:
    """Return the bytes of a piece of the shared-memory algorithm `name`."""
    if name == "shm_flat":
        raise AlgorithmError(f"{collective} algorithm {name}/{text}: {name} has no pieces")
    try:
        nbytes = parse_bytes(text)
    except AlgorithmError:
        nbytes = 0
    if not 4096 <= nbytes <= SLOT_BYTES:
        raise AlgorithmError(
            f"{collective} algorithm {name}/{text}: the part behind / must be the bytes of a piece, from 4k to"
            f" {SLOT_BYTES >> 10}k"
        )
    return int(nbytes)


def algorithms_of(collective: str) -> tuple[str, ...]:
    """Return the names of all algorithms of a collective: native, shared memory, hierarchical, devices, schedules."""
    by_nodes = (HIERARCHICAL, *DEVICE) if collective in _HIERARCHICAL_COLLECTIVES else ()
    return (NATIVE, *SHARED_MEMORY.get(collective, ()), *by_nodes, *schedules_of(collective))


def schedules_of(collective: str) -> dict[str, Algorithm]:
    """Return all schedules of `collective` by name."""
    # Not at module level: most calls need no schedule, and all of them take tens of milliseconds to load.
    from mpicoll import schedules

    return schedules.algorithms_of(collective)


def collectives() -> tuple[str, ...]:
    """Return the collectives that have schedules."""
    from mpicoll import schedules

    return schedules.collectives()
