"""The operations of all ranks of a trace, as the columns of a table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

VERSION = 1
"""Version of the format of parts and files."""

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]


@dataclass(slots=True)
class TracedRank:
    """Rank of the world, with the host and the process that it ran on."""

    rank: int
    host: str
    pid: int
    node: int = 0


@dataclass(slots=True)
class TracedComm:
    """Communicator of the job. `members` are ranks of the world."""

    key: str
    name: str
    members: list[int]


@dataclass(slots=True)
class TraceTable:
    """Operations of all ranks.

    Each operation has a row in these columns: `rank` (of the world), `comm` (index into `comms`), `number` (index of
    the collective on the communicator, from 1; 0 for other operations), `call` (index into `calls`), `begin` and `end`
    in microseconds since the first operation began (`end` is NaN for an operation that was only started), `site` and
    `error` (indices into `texts`, -1 for none). Added by
    :func:`~mpicoll.engine.tracing.wait_analysis.add_wait_times`: `wait`, the microseconds until the last of the ranks
    entered (NaN for operations other than collectives), and `last`, that rank.

    `missing` are the ranks without a part.
    """

    job: str
    ranks: list[TracedRank] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    comms: list[TracedComm] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    rank: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    comm: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    number: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    call: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    begin: Floats = field(default_factory=lambda: np.empty(0))
    end: Floats = field(default_factory=lambda: np.empty(0))
    site: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    error: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    wait: Floats = field(default_factory=lambda: np.empty(0))
    last: Ints = field(default_factory=lambda: np.empty(0, np.int64))

    def __len__(self) -> int:
        return len(self.rank)


class Interned:
    """List of distinct objects, each of which is identified by its index."""

    def __init__(self) -> None:
        self.all: list[Any] = []
        self._index: dict[str, int] = {}

    def add(self, item: Any, key: str) -> int:
        """Add `item` if no item with this `key` is listed, and return the index of the item with this key."""
        index = self._index.get(key)
        if index is None:
            index = self._index[key] = len(self.all)
            self.all.append(item)
        return index
