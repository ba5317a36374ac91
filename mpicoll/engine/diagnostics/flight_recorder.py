"""The flight recorder, which keeps the last operations of this process.

It is always on and costs 0.3 µs per operation, and a tenth of that for an operation that the extension carries out.
Call sites are recorded only where they are needed (``MPICOLL_CHECK``, ``MPICOLL_TRACE``), which costs 0.3 µs more.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from operator import mul
from types import FrameType
from typing import Any, TypeAlias
from zlib import crc32

from mpicoll.extension import make_recorder, set_recording
from mpicoll.named_tuple import NamedTuple
from mpicoll.transport.base import Traffic

HISTORY_LENGTH = 1000
"""Number of operations that are kept."""

_PACKAGE = __file__.rpartition("engine/diagnostics/")[0]

_OTHERS_INSIDE = (
    "/torch/distributed/",
    "/torch/nn/",
    "/torch/autograd/",
    "/torch/_",
    "/torch/utils/",
    "/typing_extensions.py",
    "<frozen ",
)
"""Paths of files, apart from those of this package, that lie between a program and its call of this package."""


class Call:
    """The arguments of a call that all ranks must pass alike, and `algorithm`, which all ranks choose alike.

    `shape` is that of this rank's array. `counts` are the rows of all ranks' blocks where they may differ (of
    alltoall the rows that this rank sends, and `arrivals` those that it receives). `nbytes` are the bytes by which
    bandwidth is computed (as in :func:`mpicoll.explain`), None if no rank knows those of the others. Messages have
    a `peer` (a rank of their communicator, None for any) and a `tag` (None for any). `parts` are the calls that
    were combined into one. `memory` is the kind of device on which the data lies, empty for the host. `collective`
    is False if not all ranks of the communicator take part. `takes` is not None for a wait that lasts until all of
    its `parts` have received: the ranks whose messages are received meanwhile; the name of such a wait describes it
    completely. `compression` is that of messages between nodes, empty without one.

    `operation` is the kind of operation, independent of its name. `signature` is compared between the ranks before
    the operation starts: 0 until :meth:`sign` has computed it, COMPARED_BY_EXECUTOR where the executor compares it. It
    stays 0 where there are `arrivals`, which :meth:`row_signature` covers. `summary` belongs to the recorder, which
    sets it.
    """

    __slots__ = (
        "_row_signature",
        "algorithm",
        "arrivals",
        "collective",
        "compression",
        "counts",
        "dtype",
        "memory",
        "name",
        "nbytes",
        "op",
        "operation",
        "parts",
        "peer",
        "root",
        "shape",
        "signature",
        "summary",
        "tag",
        "takes",
    )

    def __init__(
        self,
        name: str,
        nbytes: int | None = None,
        dtype: str = "",
        shape: tuple[int, ...] | None = None,
        *,
        op: str = "",
        root: int | None = None,
        counts: tuple[int, ...] = (),
        arrivals: tuple[int, ...] = (),
        algorithm: str = "",
        peer: int | None = None,
        tag: int | None = None,
        parts: tuple[Call, ...] = (),
        memory: str = "",
        collective: bool = True,
        takes: tuple[int, ...] | None = None,
        compression: str = "",
    ) -> None:
        self.name = name
        self.nbytes = nbytes
        self.dtype = dtype
        self.shape = shape
        self.op = op
        self.root = root
        self.counts = counts
        self.arrivals = arrivals
        self.algorithm = algorithm
        self.peer = peer
        self.tag = tag
        self.parts = parts
        self.memory = memory
        self.collective = collective
        self.takes = takes
        self.compression = compression
        self.operation = name
        self.signature = 0
        self.summary: bytes | None = None
        self._row_signature: tuple[int, int] | None = None

    def sign(self) -> int:
        """Return a number of 32 bits, never 0, that is equal on all ranks if they make the same call.

        Another operation, dtype, number of elements, op, root, algorithm, memory or compression gives another number,
        with a probability of nearly 1. Shapes with the same number of elements give the same number, and the rows that
        only some ranks know (alltoall's counts) are not included.
        """
        size: tuple[Any, ...]
        if self.arrivals:
            size = "row", None if self.shape is None else prod(self.shape[1:])
        else:
            uneven = len(set(self.counts)) > 1
            size = (self.shape if self.nbytes is None else self.nbytes), self.counts if uneven else ()
        # Without a compression the number is what it was before there were any.
        op = f"{self.op}, {self.compression}" if self.compression else self.op
        asked = self.operation, self.dtype, size, op, self.root, self.algorithm, self.memory
        signature = crc32(repr((asked, [one.sign() for one in self.parts])).encode()) or 1
        if not self.signature and not self.arrivals:
            self.signature = signature
        return signature

    def row_signature(self, rank: int) -> tuple[int, int]:
        """Return :meth:`sign`, and :func:`number_rows` of this call on `rank`."""
        if self._row_signature is None:
            self._row_signature = self.sign(), number_rows(rank, self.counts, self.arrivals)
        return self._row_signature

    def __str__(self) -> str:
        """Return the call in readable form, such as ``allreduce(float32[3, 4], op=sum) by ring``."""
        if self.takes is not None:
            return self.name
        words = []
        if self.shape is not None:
            words.append(f"{self.dtype}{list(self.shape)}" + (f" on {self.memory}" if self.memory else ""))
        elif self.nbytes:
            words.append(f"{self.nbytes} bytes")
        if self.op:
            words.append(f"op={self.op}")
        if self.compression:
            words.append(f"compression={self.compression}")
        if self.root is not None:
            words.append(f"root={self.root}")
        if self.counts:
            words.append(f"counts={list(self.counts)}")
        if self.arrivals:
            words.append(f"arrivals={list(self.arrivals)}")
        if not self.collective and (self.peer is not None or self.tag is not None):
            words.append(f"peer={'any' if self.peer is None else self.peer}")
            words.append(f"tag={'any' if self.tag is None else self.tag}")
        words += [str(part) for part in self.parts]
        by = f" by {self.algorithm}" if self.algorithm else ""
        if not words and self.name.endswith(")"):  # a name that has its arguments
            return f"{self.name}{by}"
        return f"{self.name}({', '.join(words)}){by}"


_BITS = (1 << 64) - 1

ROW_MODULUS = 1 << 62
"""The modulus of :func:`number_rows`."""


def number_rows(rank: int, counts: Sequence[int], arrivals: Sequence[int]) -> int:
    """Return a number of 62 bits for the rows that `rank` sends to and receives from each rank, which are alltoall's
    counts.

    The numbers of all ranks add up to 0 modulo ROW_MODULUS if every block has the rows that its receiver expects, and
    otherwise to another number with a probability of nearly 1.
    """
    outgoing, incoming = _number_blocks(rank, max(len(counts), len(arrivals)))
    number: int = sum(map(mul, outgoing, counts)) - sum(map(mul, incoming, arrivals))
    return number % ROW_MODULUS


@lru_cache(256)
def _number_blocks(rank: int, size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the factors of the rows that `rank` sends to, and receives from, each of `size` ranks."""
    # Not the hashes of tuples. They are nearly linear, so that errors of opposite sign would cancel out, such as those
    # of two ranks that both expect what they send.
    return tuple(_scramble(rank << 32 | dest) for dest in range(size)), tuple(
        _scramble(source << 32 | rank) for source in range(size)
    )


def _scramble(number: int) -> int:
    """Return the 64 bits that splitmix64 makes of `number`."""
    number = number + 0x9E3779B97F4A7C15 & _BITS
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & _BITS
    number = (number ^ number >> 27) * 0x94D049BB133111EB & _BITS
    return number ^ number >> 31


COMPARED_BY_EXECUTOR = -1
"""The ``signature`` of calls that their executor compares."""


class Group:
    """The description of a communicator for diagnostics.

    `key` is the same on all its ranks, and unique among communicators; `members` are ranks of the job; `timeout` is
    the number of seconds that an operation on it may take; `traffic` counts its messages.

    A sequence of meetings (:meth:`~mpicoll.engine.core.queue.OperationQueue.run_unqueued`) is a Group of its own. Its
    key is that of the communicator, a space and the name of the meetings; `members` are the ranks that meet.

    `number` identifies the communicator in the records that other processes read, and is the same on all ranks.
    """

    __slots__ = ("key", "members", "name", "number", "rank", "timeout", "traffic")

    def __init__(
        self, key: str, name: str, members: tuple[int, ...], rank: int, timeout: float, traffic: Traffic | None = None
    ) -> None:
        self.key = key
        self.name = name
        self.members = members
        self.rank = rank
        self.timeout = timeout
        self.traffic = traffic
        self.number = crc32(key.encode())

    def with_timeout(self, timeout: float) -> Group:
        """Return the same description with another timeout."""
        return Group(self.key, self.name, self.members, self.rank, timeout, self.traffic)

    def __str__(self) -> str:
        return f"{self.name} ({len(self.members)} ranks)"


class CallSite(NamedTuple):
    """A line of a program."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


class Entry(NamedTuple):
    """An operation that has begun.

    It is the `number`-th collective or meeting on `group` (0 for other operations), begun at `begin` on the
    monotonic clock. `site` is None where it was not recorded.
    """

    group: Group
    number: int
    call: Call
    begin: float
    site: CallSite | None


EntryTuple: TypeAlias = "tuple[Group, int, Call, float, CallSite | None]"
"""An Entry as a plain tuple, which is created in a fifth of the time; ``Entry._make`` converts it."""

Wait: TypeAlias = "tuple[EntryTuple, bool, bool]"
"""A wait outside of the queues: its entry, True if the program has given it a bound, and True if it polls.

A wait that polls checks from time to time if it can still complete, and raises if not.
"""

Record: TypeAlias = "tuple[EntryTuple, float | None, str]"
"""An operation, its end (None: a message that was only started), and its error."""

Sink: TypeAlias = Callable[[Record], None]

recorder = make_recorder(HISTORY_LENGTH)
"""The last operations of this process, and those that it is in."""

begin_entry: Callable[[EntryTuple], None] = recorder.begin_entry
"""Record that an operation begins."""


def list_history() -> list[Record]:
    """Return the last operations of this process, in the order in which they ended."""
    records: list[Record] = recorder.list_records(False)
    records.sort(key=lambda record: record[0][3] if record[1] is None else record[1])
    return records


class _Sinks:
    """The receivers of operations that have ended.

    ``emit`` is one function that is replaced as a whole, since it is called for each operation.
    """

    def __init__(self) -> None:
        self._more: tuple[Sink, ...] = ()
        self.emit: Sink = recorder.end_entry

    def add(self, sink: Sink) -> None:
        """Pass each operation that ends to `sink` too, from now on."""
        self._change((*self._more, sink))

    def remove(self, sink: Sink) -> None:
        """Pass no more operations to `sink`."""
        self._change(tuple(one for one in self._more if one is not sink))

    def _change(self, more: tuple[Sink, ...]) -> None:
        self._more = more
        set_recording(not more)
        if not more:
            self.emit = recorder.end_entry
            return

        def emit(one: Record) -> None:
            recorder.end_entry(one)
            for sink in more:
                sink(one)

        self.emit = emit


sinks = _Sinks()


def is_own_file(file: str) -> bool:
    """Return True for a file of this package."""
    return file.startswith(_PACKAGE)


def is_framework_file(file: str) -> bool:
    """Return True for a file of another package that lies between a program and its call of this package."""
    return any(part in file for part in _OTHERS_INSIDE)


def find_call_site(frame: FrameType | None = None) -> CallSite | None:
    """Return the line of the program that called this package, directly or through torch.

    The search begins at `frame`, by default at the caller.
    """
    frame = frame or sys._getframe(1)  # noqa: SLF001  there is no public interface
    outermost: CallSite | None = None
    while frame is not None:
        file = frame.f_code.co_filename
        if not is_own_file(file):
            site = CallSite(file, frame.f_lineno, frame.f_code.co_name)
            if not is_framework_file(file):
                return site
            outermost = outermost or site
        frame = frame.f_back
    return outermost


def serialize_call(call: Call) -> dict[str, Any]:
    """Return `call` for JSON, without empty fields."""
    inner = ("parts", "collective", "operation", "signature", "summary")
    fields = {name: getattr(call, name) for name in Call.__slots__ if name not in inner}
    return {name: value for name, value in fields.items() if value not in (None, "", ())} | {"text": str(call)}
