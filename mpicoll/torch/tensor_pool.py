"""Memory of tensors that torch allocates for the collectives of a group, such as the buffers of FSDP."""

from __future__ import annotations

import logging
from collections import defaultdict
from weakref import finalize

import torch

from mpicoll.buffers.dtypes import Array
from mpicoll.engine.core.call_comparison import compare_words
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.diagnostics.flight_recorder import Call
from mpicoll.errors import CommunicationError

_BLOCKS = 4
"""Shared blocks of each size: FSDP has two buffers of a kind in use, and the next one before the first is free."""

_COLLECTIVE_ALLOCATIONS = 8
"""Allocations of each size that may make blocks: as many as show how many buffers are in use at a time."""

_MIN_NBYTES = 4096

_log = logging.getLogger("mpicoll")


class TensorPool:
    """Memory that the ranks of a node share, for tensors on the CPU: their collectives need no copies.

    The sizes of blocks are powers of two. The first allocations of each size are collective, and make a block unless
    all ranks have one of a tensor that is gone. Later ones use such blocks, or ordinary memory where there is none;
    this may differ between ranks, as each collective compares where its tensors are.
    """

    def __init__(self, comm: CommunicatorCore) -> None:
        self._comm = comm
        # By size, and the same on all ranks: the blocks, and the collective allocations to come.
        self._num_blocks: dict[int, int] = defaultdict(int)
        self._num_left: dict[int, int] = defaultdict(lambda: _COLLECTIVE_ALLOCATIONS)
        self._free: dict[int, list[Array]] = defaultdict(list)

    @property
    def is_shared(self) -> bool:
        """True if the ranks can share memory. It is the same on all ranks: a failure at the first use of shared memory,
        of which they learn at different times, does not count."""
        return self._comm.no_shm_reason is None

    def allocate(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of `count` elements, which are undefined.

        Collective: all ranks must make the same calls, in the same order among their collectives.
        """
        nbytes = count * dtype.itemsize
        block = self._take(1 << (max(nbytes, _MIN_NBYTES) - 1).bit_length()) if nbytes else None
        if block is None:
            return torch.empty(count, dtype=dtype)
        # The tensor refers to this array, and nothing else does.
        memory = block[:nbytes]
        finalize(memory, self._free[len(block)].append, block).atexit = False
        return torch.from_numpy(memory).view(dtype)

    def _take(self, nbytes: int) -> Array | None:
        if not self.is_shared or self._comm.freed:
            return None
        # Not by whether a block is free, which may differ between ranks.
        if self._num_left[nbytes]:
            self._num_left[nbytes] -= 1
            block: Array | None = self._comm.queue.run(self._take_together, Call("empty"), nbytes)
            return block
        free = self._free[nbytes]
        try:
            return free.pop()
        except IndexError:
            return None

    def _take_together(self, nbytes: int) -> Array | None:
        """Return a free block if all ranks have one, otherwise a new one; None if there is too little shared memory.
        Collective, in queue order."""
        comm, free = self._comm, self._free[nbytes]
        if comm.arena() is None:
            self._num_left[nbytes] = 0
            return None
        # Words that are equal say that all ranks have a free block, or none of them has.
        alike = compare_words(comm.transport, comm.queue, comm.queue.current, bool(free) + 1, str) is None
        if alike and free:
            return free.pop()
        try:
            block = comm.allocate(nbytes)
        except CommunicationError as error:
            if type(error) is not CommunicationError:
                raise
            _log.warning("buffers of %d bytes are not shared among the ranks: %s", nbytes, error)
            self._num_left[nbytes] = 0
            return None
        self._num_blocks[nbytes] += 1
        if self._num_blocks[nbytes] == _BLOCKS:
            self._num_left[nbytes] = 0
        return block
