"""The records of a rank's operations as other processes read them, from the memory that ``csrc/records.h`` describes.

The rank may be writing, and it may have been killed while it was. Nothing in the memory is trusted: another process of
the same user may have written to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from struct import Struct

_MAGIC = b"mpicoll\0"

_VERSION = 1

_HEADER = Struct("=8s5I3iQQ2I64s")

_COMMUNICATOR = Struct("=I60s")

_RECORD = Struct("=QQQQIBBH4HQI3i20s12s8s16s")

_ALIGNMENT = 128

_UNKNOWN = (1 << 64) - 1
"""Bytes of a call that has no known size."""

STATES = {1: "running", 2: "waiting", 3: "done", 4: "failed", 5: "started"}
"""States of operations: `waiting` for ranks that have not reached its step, or a message that was only `started`."""


@dataclass(frozen=True, slots=True)
class RecordedOperation:
    """An operation of a rank.

    It is the `number`-th collective on `communicator` (0 for other operations), whose name is `group`. `begin` and
    `end` are seconds of the monotonic clock; `end` is None as long as the operation has not ended. Of the ranks of the
    job that it waits for in `step`, `late` has the first ones, and `late_count` is their number. `nbytes` is None where
    it is not known; `root`, `peer` and `tag` are None where there is none.
    """

    order: int
    state: str
    name: str
    dtype: str
    op: str
    algorithm: str
    nbytes: int | None
    root: int | None
    peer: int | None
    tag: int | None
    communicator: int
    group: str
    number: int
    step: int
    begin: float
    end: float | None
    late: tuple[int, ...]
    late_count: int

    @property
    def is_running(self) -> bool:
        """True if the operation has not ended."""
        return self.state in ("running", "waiting")

    def __str__(self) -> str:
        """Return the operation in readable form, such as ``allreduce(float32, op=sum) by ring number 17 on world``."""
        words = [self.dtype] if self.dtype else []
        words += [f"op={self.op}"] if self.op else []
        words += [
            f"{name}={value}"
            for name, value in (("root", self.root), ("peer", self.peer), ("tag", self.tag))
            if value is not None
        ]
        number = f" number {self.number}" if self.number else ""
        # Some names have their arguments.
        arguments = f"({', '.join(words)})" if words or not self.name.endswith(")") else ""
        return f"{self.name}{arguments}{self.algorithm and f' by {self.algorithm}'}{number} on {self.group}"


@dataclass(frozen=True, slots=True)
class RecordedRank:
    """A rank: the number of its process (in the PID namespace of its job) and when that has started, as in
    ``/proc/PID/stat``; and its last operations, in the order in which they began. `left` is True if it has announced
    that it makes no more calls."""

    rank: int
    size: int
    pid: int
    process_start: int
    job: str
    left: bool
    operations: tuple[RecordedOperation, ...]


def read_ranks(memory: bytes, again: bytes) -> Iterator[RecordedRank]:
    """Yield the ranks whose areas are in `memory`. `again` is the same memory, read later: records that differ, which
    were being written, are left out."""
    first, second = memoryview(memory), memoryview(again)
    offset = 0
    while offset + _HEADER.size <= len(first):
        # A rank may not have placed its records yet.
        is_placed = first[offset : offset + len(_MAGIC)] == _MAGIC
        area = _read_area(first[offset:], second[offset:]) if is_placed else None
        if area is None:
            offset += _ALIGNMENT
            continue
        nbytes, rank = area
        yield rank
        offset += nbytes


def _read_area(memory: memoryview, again: memoryview) -> tuple[int, RecordedRank] | None:
    """Return the bytes of the area at the beginning of `memory`, and the rank."""
    fields = _HEADER.unpack_from(memory)
    _, version, nbytes, count, record_bytes, communicators, pid, rank, size, start, _, left, _, job = fields
    records = _HEADER.size + communicators * _COMMUNICATOR.size
    records += -records % _ALIGNMENT
    if (
        version != _VERSION
        or record_bytes != _RECORD.size
        or nbytes != records + count * record_bytes
        or nbytes > len(memory)
    ):
        return None
    names = dict(_COMMUNICATOR.iter_unpack(memory[_HEADER.size : _HEADER.size + communicators * _COMMUNICATOR.size]))
    operations = []
    for at in range(records, records + count * record_bytes, record_bytes):
        one = memory[at : at + record_bytes]
        if one == again[at : at + record_bytes] and any(one[:8]):
            operations.append(_read_operation(one, names))
    operations.sort(key=lambda operation: operation.order)
    return nbytes, RecordedRank(rank, size, pid, start, _read_text(job), left != 0, tuple(operations))


def _read_operation(record: memoryview, names: dict[int, bytes]) -> RecordedOperation:
    order, begin, end, number, step, state, _, count, *rest = _RECORD.unpack(record)
    late, (nbytes, communicator, root, peer, tag, name, dtype, op, algorithm) = rest[:4], rest[4:]
    word = STATES.get(state, "unknown")
    return RecordedOperation(
        order,
        word,
        _read_text(name),
        _read_text(dtype),
        _read_text(op),
        _read_text(algorithm),
        None if nbytes == _UNKNOWN else nbytes,
        None if root < 0 else root,
        None if peer < 0 else peer,
        None if tag < 0 else tag,
        communicator,
        _read_text(names.get(communicator, b"?")),
        number,
        step,
        1e-9 * begin,
        1e-9 * end if end else None,
        tuple(late[:count]) if word == "waiting" else (),
        count if word == "waiting" else 0,
    )


def _read_text(field: bytes) -> str:
    text = field.partition(b"\0")[0].decode("utf-8", "replace")
    return "".join(character if character.isprintable() else "?" for character in text)
