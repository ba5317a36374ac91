"""The input of selection: the collective, the data, and the capabilities of the communicator."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from mpicoll.engine.selection.costs import TYPICAL, Costs
from mpicoll.engine.selection.layout import NodeLayout
from mpicoll.engine.selection.rules import Rules
from mpicoll.named_tuple import NamedTuple

KINDS = ("float", "half", "integer", "complex", "moved", "other")
"""Classes of dtypes that are tuned separately, since their reductions differ in speed. ``moved`` is for operations that
only move bytes, for any dtype. Data on devices is tuned separately from the host's; see :func:`tuned_class`."""

_SUBSTITUTES = {"integer": "float", "complex": "float"}
"""Classes whose rules are used if a class itself was not tuned: they reduce bytes about as fast."""

_DEVICE_SEPARATOR = " on "
"""Text between a class and the models of devices."""


class TunedTable:
    """Results of tuning on a machine: rules by layout and class of dtypes, and the measured costs of messages.

    `text` is the JSON that it was made of, `source` the file that this came from.
    """

    __slots__ = ("costs", "rules", "source", "text")

    def __init__(
        self,
        text: str = "",
        source: str = "",
        rules: Mapping[NodeLayout, Mapping[str, Rules]] | None = None,
        costs: Costs = TYPICAL,
    ) -> None:
        self.text = text
        self.source = source
        self.rules = rules or {}
        self.costs = costs


UNTUNED = TunedTable()
"""The table where nothing was tuned."""


class SelectionContext:
    """Layout of the ranks of a communicator, the tuned table that applies to it, and whether nodes have connections,
    as :attr:`mpicoll.transport.base.Transport.connects`. Equal contexts are one object (see :func:`selection_context`),
    so that a cache compares them by identity."""

    __slots__ = ("connects", "layout", "table")

    def __init__(self, layout: NodeLayout, table: TunedTable, connects: bool) -> None:
        self.layout = layout
        self.table = table
        self.connects = connects


def selection_context(layout: NodeLayout, table: TunedTable = UNTUNED, *, connects: bool = False) -> SelectionContext:
    """Return the context of communicators of `layout` to which `table` applies."""
    return _context(layout, table, connects)


_context = lru_cache(maxsize=1024)(SelectionContext)


class DeviceCapabilities(NamedTuple):
    """Reasons why data on a device can't be served, or None where it can: by NCCL (`nccl`), by direct access to device
    memory of other ranks (`ipc`), by MPI's own collective (`native`), and by shared memory of the host, where the
    processor reduces (`host`). `models` names the devices of the ranks, and how many ranks share one, if they do; None
    until the ranks have exchanged this."""

    nccl: str | None = None
    ipc: str | None = None
    native: str | None = None
    host: str | None = None
    models: str | None = None


class SelectionQuery(NamedTuple):
    """Requirements on an algorithm. Equal on every rank, since all ranks must make the same choice.

    `nbytes` is the size by which the collective's cost is counted: the vector, or all blocks of one buffer; None if the
    ranks can't know it from each other (alltoall with counts). `kind` is one of KINDS. `has_kernel` is
    True unless functions of Python carry out the reduction. `native` says why the MPI library can't serve it, or is
    None.
    """

    collective: str
    nbytes: int | None
    context: SelectionContext
    kind: str = "moved"
    root: int = 0
    commutative: bool = True
    elementwise: bool = True
    has_kernel: bool = True
    uneven: bool = False
    native: str | None = None
    no_shm_reason: str | None = "there is no shared memory"
    no_cma_reason: str | None = "there is no shared memory"
    shm_failed_reason: str | None = None
    """The reason why shared memory failed when it was first used."""
    allocated: bool = False
    """True if buffers may lie in memory of :func:`mpicoll.empty`."""
    device: DeviceCapabilities | None = None
    """Set for data on a device."""


def get_tuned_class(query: SelectionQuery, *, substitute: bool = False) -> str | None:
    """Return the name under which tuned tables hold rules for such queries: the class of dtypes (or the one whose rules
    serve `substitute`) and, for data on devices, their models; None while these are unknown."""
    kind = _SUBSTITUTES.get(query.kind, query.kind) if substitute else query.kind
    if query.device is None:
        return kind
    return None if query.device.models is None else f"{kind}{_DEVICE_SEPARATOR}{query.device.models}"


def is_dtype_class(text: str) -> bool:
    """Return True if tuned tables may hold rules under this name."""
    return text.partition(_DEVICE_SEPARATOR)[0] in KINDS
