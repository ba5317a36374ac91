"""The operations of all ranks of a trace, as the columns of a table."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

VERSION = 1
"""Version of the format of parts and files."""

_MAX_RANKS = 1 << 24
"""Upper limit of ranks in a file, which bounds the memory of columns by rank."""

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

    def check(self) -> None:
        """Raise ValueError, TypeError or KeyError if a field has not the type or the range stated above, as in a file
        that was changed by hand. All columns but `wait` and `last` are read."""
        if not self.job or Path(self.job).name != self.job:
            raise ValueError(f"{self.job!r} is not the name of a job")
        for rank in self.ranks:
            _check_types(asdict(rank), host=str, pid=int, node=int)
        _check_ranks([*(rank.rank for rank in self.ranks), *self.missing])
        for comm in self.comms:
            _check_types(asdict(comm), key=str, name=str)
            _check_ranks(comm.members)
            if not comm.members:
                raise ValueError(f"communicator {comm.key} has no members")
        for call in self.calls:
            _check_call(call)
            for one in call.get("parts", [call]):
                _check_call(one)
        _check_list(self.texts, str)
        _check_range(self.rank, 0, max((one.rank for one in self.ranks), default=-1))
        for column, items in ((self.comm, self.comms), (self.call, self.calls)):
            _check_range(column, 0, len(items) - 1)
        for column in (self.site, self.error):
            _check_range(column, -1, len(self.texts) - 1)
        _check_range(self.number, 0, 1 << 40)
        if not np.isfinite(self.begin).all() or np.isinf(self.end).any():
            raise ValueError("a time is not finite")


def _check_call(call: dict[str, Any]) -> None:
    _check_types(call, name=str)
    optional = {"nbytes": int, "dtype": str, "algorithm": str, "peer": int, "tag": int, "text": str, "parts": list}
    _check_types(call, **{name: kind for name, kind in optional.items() if call.get(name) is not None})
    if call.get("parts") == []:
        raise ValueError("a call without its parts")


def _check_types(values: dict[str, Any], **kinds: type) -> None:
    for name, kind in kinds.items():
        if type(values[name]) is not kind:
            raise TypeError(f"{name} is a {type(values[name]).__name__}")
        if kind is int and not -1 << 63 <= values[name] < 1 << 63:
            raise ValueError(f"{name} has more than 64 bits")


def _check_list(values: list[Any], kind: type) -> None:
    if type(values) is not list or any(type(value) is not kind for value in values):
        raise TypeError(f"a list of {kind.__name__} contains something else")


def _check_ranks(ranks: list[int]) -> None:
    _check_list(ranks, int)
    if any(not 0 <= rank < _MAX_RANKS for rank in ranks):
        raise ValueError(f"a rank is not between 0 and {_MAX_RANKS}")


def _check_range(column: Ints, least: int, most: int) -> None:
    if len(column) and not least <= column.min() <= column.max() <= most:
        raise ValueError(f"an index is not between {least} and {most}")


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
