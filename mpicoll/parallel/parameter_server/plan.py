"""Division of a model among servers: which part of which tensor is where, and which parts travel in one message.

Dense tensors are laid one after the other in the reverse of their order, the order in which backward produces their
gradients, and are cut into buckets; each bucket is cut into one slice for each server. So all servers hold the same
number of bytes, except for some elements, and all take part in each moment of a step. The last buckets get shorter and
shorter: what backward computes last still has to be sent, and its weights to come back. Tensors with sparse gradients
are cut between rows. Where an optimizer needs whole tensors, each tensor is on the server that has the least bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

BUCKET_BYTES = 1 << 19
"""Default size of a message in bytes: long enough for the bandwidth of a network, short enough that the server updates
one bucket while the next one arrives."""


_LAST_BYTES = 1 << 16
"""Size of the last message, where there are many."""

_MANY = 4
"""Messages of the full size from which the last ones are shorter: a small model is sent at once."""


class TensorSpec(NamedTuple):
    """A tensor of the model. `dtype` is the name that numpy and torch give to it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    sparse: bool = False

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def row(self) -> int:
        """Number of elements of a row."""
        return math.prod(self.shape[1:])


class Part(NamedTuple):
    """Elements [start, stop) of a flattened tensor, which are at `offset` in their bucket."""

    tensor: int
    start: int
    stop: int
    offset: int


class Bucket(NamedTuple):
    """Parts that one server holds next to each other, and that one message carries. A `sparse` bucket is one part,
    whose gradients arrive as rows of `row` elements."""

    dtype: str
    itemsize: int
    parts: tuple[Part, ...]
    sparse: bool = False
    row: int = 1

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.parts[-1].offset + self.parts[-1].stop - self.parts[-1].start

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.size * self.itemsize


def make_plan(
    specs: Sequence[TensorSpec], servers: int, bucket_bytes: int = BUCKET_BYTES, *, whole_tensors: bool = False
) -> list[list[Bucket]]:
    """Return the buckets of each server.

    Args:
        specs: the tensors of the model.
        servers: the number of servers.
        bucket_bytes: the size of a message. A tensor that is not cut may exceed it.
        whole_tensors: leave each tensor on one server.
    """
    dense = [index for index in reversed(range(len(specs))) if specs[index].size and not specs[index].sparse]
    plan: list[list[Bucket]] = [[] for _ in range(servers)]
    # The order of dtypes is that of their first tensors, which is the same on all ranks.
    for dtype in dict.fromkeys(specs[index].dtype for index in dense):
        indices = [index for index in dense if specs[index].dtype == dtype]
        per_server = (
            _divide_by_tensors(specs, indices, bucket_bytes, plan)
            if whole_tensors
            else _divide_by_bytes(specs, indices, bucket_bytes, servers)
        )
        for buckets, more in zip(plan, per_server, strict=True):
            buckets.extend(more)
    for index, spec in enumerate(specs):
        if spec.sparse and spec.size:
            _divide_rows(spec, index, plan)
    return plan


def _divide_by_bytes(
    specs: Sequence[TensorSpec], indices: Sequence[int], bucket_bytes: int, servers: int
) -> list[list[Bucket]]:
    itemsize = specs[indices[0]].itemsize
    total = sum(specs[index].size for index in indices)
    length = max(1, servers * (bucket_bytes // itemsize))
    found: list[list[Bucket]] = [[] for _ in range(servers)]
    last = min(length, servers * (_LAST_BYTES // itemsize))
    begin = 0
    for count in _divide_length(total, length, last):
        for server, buckets in enumerate(found):
            first, stop = (begin + count * edge // servers for edge in (server, server + 1))
            if stop > first:
                parts = tuple(_cut(specs, indices, first, stop))
                buckets.append(Bucket(specs[indices[0]].dtype, itemsize, parts))
        begin += count
    return found


def _divide_length(total: int, length: int, last: int) -> Iterator[int]:
    """Yield the numbers of elements of buckets, at most `length`. Where there are many, the last ones halve what is
    left, down to about `last`."""
    left = total
    while left:
        halve = total >= _MANY * length and last < left < 2 * length
        count = min(length, max(last, left // 2) if halve else left)
        yield count
        left -= count


def _cut(specs: Sequence[TensorSpec], indices: Sequence[int], first: int, last: int) -> Iterator[Part]:
    """Yield the parts of elements [first, last) of the tensors laid one after the other."""
    at = 0
    for index in indices:
        size = specs[index].size
        start, stop = max(first - at, 0), min(last - at, size)
        if start < stop:
            yield Part(index, start, stop, at + start - first)
        at += size


def _divide_by_tensors(
    specs: Sequence[TensorSpec], indices: Sequence[int], bucket_bytes: int, plan: Sequence[Sequence[Bucket]]
) -> list[list[Bucket]]:
    held = [sum(bucket.nbytes for bucket in buckets) for buckets in plan]
    owned: list[list[int]] = [[] for _ in plan]
    for index in sorted(indices, key=lambda index: (-specs[index].size, index)):
        server = held.index(min(held))
        held[server] += specs[index].size * specs[index].itemsize
        owned[server].append(index)
    found: list[list[Bucket]] = []
    for mine in owned:
        buckets: list[list[Part]] = []
        space = 0
        for index in sorted(mine, reverse=True):
            nbytes = specs[index].size * specs[index].itemsize
            if nbytes > space:
                buckets.append([])
                space = bucket_bytes
            last = buckets[-1]
            offset = last[-1].offset + last[-1].stop if last else 0
            last.append(Part(index, 0, specs[index].size, offset))
            space -= nbytes
        found.append([Bucket(specs[mine[0]].dtype, specs[mine[0]].itemsize, tuple(parts)) for parts in buckets])
    return found


def _divide_rows(spec: TensorSpec, index: int, plan: list[list[Bucket]]) -> None:
    rows, row = spec.shape[0], spec.size // spec.shape[0]
    for server, buckets in enumerate(plan):
        first, last = (rows * edge // len(plan) for edge in (server, server + 1))
        if last > first:
            part = Part(index, first * row, last * row, 0)
            buckets.append(Bucket(spec.dtype, spec.itemsize, (part,), sparse=True, row=row))
