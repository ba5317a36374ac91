"""Collectives of the ranks of one node through shared memory.

Four methods, which are algorithms for the selection:

* ``shm_flat``: every rank writes its vector to a slot, and reads those of all others after one synchronisation;
* ``shm_pipelined``: the vector goes through the slots in pieces that stay in the caches, double-buffered, so that one
  synchronisation a piece is enough; for reductions each rank reduces its share of every piece;
* ``cma``: ranks read and write each other's private memory (cross-memory attach). While the kernel forbids
  that to one rank, all ranks do what ``shm_pipelined`` does instead;
* ``shm_or_cma``: what of these two took less time in earlier calls of the kind, on the slowest rank, which depends on
  whether a program passes a new input in each call.

Where the buffers of all ranks lie in memory of :func:`mpicoll.empty`, all of them read and write the buffers
themselves.

Operands are combined in the order of ranks by every method, each element by one rank or by all alike: results have the
same bits on every rank and in every run, and with each method (except for products of complex numbers, whose last bit
depends on where numpy's vector loops end).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from mpicoll.buffers.dtypes import Array
from mpicoll.engine.core.arrays import CollectiveArrays, do_nothing
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.core.operation import Operation
from mpicoll.engine.diagnostics.flight_recorder import COMPARED_BY_EXECUTOR, Call, number_rows
from mpicoll.engine.executors.collective_spec import CollectiveSpec, Program, get_piece_bytes
from mpicoll.engine.selection.catalogue import SLOT_BYTES, DeviceAlgorithm, SharedMemoryAlgorithm
from mpicoll.engine.selection.selector import Choice

if TYPE_CHECKING:
    from mpicoll._shm import Collective
    from mpicoll.engine.core.arena import Arena


def make_collective(arena: Arena, spec: CollectiveSpec, signature: int) -> Collective | None:
    """Return the compiled collective for host memory; None for reductions that are carried out in Python."""
    from mpicoll._shm import Collective  # there is an arena, so there is the extension

    op, dtype = "", ""
    if spec.fold is not None:
        if spec.fold.fused is None:
            return None
        op, dtype = spec.fold.fused
    return Collective(
        arena,
        spec.collective,
        op,
        dtype,
        spec.dtype.itemsize,
        spec.counts,
        spec.root,
        min(SLOT_BYTES, spec.segment or get_piece_bytes(arena.size, arena.has_own_core)),
        spec.method == "shm_flat",
        signature,
        spec.identity,
        spec.method in ("cma", "shm_or_cma"),
        spec.segment or 0,
        spec.arrivals or None,
        spec.rows,
        spec.method == "shm_or_cma",
    )


class SharedMemoryLost(Exception):
    """Raised if shared memory turns out to be unavailable at its first use, or was found to be in another collective
    after this one was bound. No rank has exchanged data."""

    def __init__(self) -> None:
        super().__init__("shared memory is not available; another algorithm is used")


class SharedMemoryCollective:
    """Collective through shared memory, on any arrays of one kind.

    `call` is the call that the queue records, if only the queue calls the object. The comparison of the ranks' calls is
    then done here. `bind` binds collectives on the memory of a device to the arena. `rows` is not None where each rank
    has its own counts (see :func:`~mpicoll.engine.diagnostics.flight_recorder.number_rows`).
    """

    __slots__ = ("_arena", "_bind", "_comm", "_compiled", "_program", "_signature", "_spec")

    def __init__(
        self,
        comm: CommunicatorCore,
        choice: Choice,
        arrays: CollectiveArrays,
        dtype: np.dtype[Any],
        bind: Callable[[Arena, CollectiveSpec], Program] | None = None,
        call: Call | None = None,
        rows: int | None = None,
    ) -> None:
        assert isinstance(choice.algorithm, SharedMemoryAlgorithm | DeviceAlgorithm)
        self._comm = comm
        self._bind = bind
        self._spec = CollectiveSpec(
            arrays.collective, choice.algorithm.name, dtype, arrays.counts, arrays.root, arrays.fold, choice.segment
        )
        if arrays.identity is not None:
            self._spec = self._spec._replace(identity=np.asarray(arrays.identity, dtype).tobytes())
        if rows is not None:
            self._spec = self._spec._replace(arrivals=arrays.arrivals, rows=rows)
        self._signature = self._spec.signature
        if call is not None:
            self._signature ^= call.sign()
            call.signature = COMPARED_BY_EXECUTOR
        self._signature = self._signature or 1  # 0 is that of a failure
        self._arena: Arena | None = None
        self._program: Program | None = None
        # The compiled collective, where nothing but that is to be done.
        self._compiled: Collective | None = None

    @classmethod
    def of(
        cls,
        operation: Operation,
        choice: Choice,
        arrays: CollectiveArrays,
        bind: Callable[[Arena, CollectiveSpec], Program] | None = None,
        call: Call | None = None,
    ) -> SharedMemoryCollective:
        """Return the collective for `operation`, which works on arrays like `arrays`."""
        some = arrays.target if arrays.source is None else arrays.source
        dtype = np.dtype(np.uint8) if some is None else some.dtype
        rows = None
        if operation.arrivals:
            rows = number_rows(operation.comm.rank, operation.counts, operation.arrivals)
        return cls(operation.comm, choice, arrays, dtype, bind, call, rows)

    def __call__(
        self,
        source: Array | None,
        target: Array | None,
        load: Callable[[], None] = do_nothing,
        synchronize: Callable[[], None] | None = None,
    ) -> None:
        """Carry out the collective, in queue order, after `load`. `synchronize` waits for asynchronous work of this
        rank to complete before the other ranks read its results. Raises SharedMemoryLost before any data has been
        exchanged."""
        arena = self._arena
        if arena is None:
            arena = self._prepare()
        if self._compiled is not None and load is do_nothing:
            self._compiled.carry_out(source, target)
            return
        assert self._program is not None
        body, steps = self._program
        arena.run(body, steps, source, target, load, self._signature, synchronize)

    def find_compiled(self) -> Collective | None:
        """Return what carries out the collective in C alone; None if that takes Python too. There is an arena."""
        if self._arena is None:
            self._prepare()
        return self._compiled

    def _prepare(self) -> Arena:
        """Bind the collective to the arena, at the first run."""
        arena = self._comm.arena()
        if arena is None:
            raise SharedMemoryLost
        self._arena = arena
        if self._bind is not None:
            self._program = self._bind(arena, self._spec)
            return arena
        self._compiled = make_collective(arena, self._spec, self._signature)
        if self._compiled is None:
            # Not at module level: most reductions have a kernel in C.
            from mpicoll.engine.executors import slots

            self._program = slots.bind(arena, self._spec)
        else:
            self._program = self._compiled.run, self._compiled.step_count
        return arena
