"""Topologies of communicators: which ranks are neighbours, and in which order their blocks lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from operator import index
from typing import Any

from mpicoll.engine.core.proc_null import PROC_NULL
from mpicoll.errors import ArgumentError, RankError


class Topology:
    """The neighbours of one rank.

    The k-th block that it sends goes to ``destinations[k]``, and the l-th block that it receives is from
    ``sources[l]``; either may be PROC_NULL. Of the blocks between two ranks, the first that one sends is the first in
    the other's `arrivals`, which are all indices of its `sources`, and so on.
    """

    __slots__ = ("arrivals", "destinations", "sources")

    def __init__(self, sources: Sequence[int], destinations: Sequence[int], arrivals: Sequence[int]) -> None:
        self.sources = tuple(sources)
        self.destinations = tuple(destinations)
        self.arrivals = tuple(arrivals)


class CartesianTopology(Topology):
    """A grid of `dims` ranks, numbered in C order: the last coordinate changes fastest."""

    __slots__ = ("coords", "dims", "periods", "strides")

    def __init__(self, dims: Sequence[int], periods: Sequence[bool], rank: int) -> None:
        self.dims = tuple(dims)
        self.periods = tuple(periods)
        self.strides = tuple(prod(self.dims[axis + 1 :]) for axis in range(len(self.dims)))
        self.coords = self.find_coords(rank)
        ranks = [rank for axis in range(len(self.dims)) for rank in self.shift(axis, 1)]
        # What a rank sends in one direction arrives from the other one. This matters where both neighbours in a
        # dimension are the same rank.
        super().__init__(ranks, ranks, [at ^ 1 for at in range(len(ranks))])

    def find_coords(self, rank: int) -> tuple[int, ...]:
        """Return the coordinates of `rank`."""
        return tuple(rank // stride % extent for stride, extent in zip(self.strides, self.dims, strict=True))

    def find_rank(self, coords: Sequence[int]) -> int:
        """Return the rank at `coords`; PROC_NULL beyond a border."""
        rank = 0
        for at, extent, stride, periodic in zip(coords, self.dims, self.strides, self.periods, strict=True):
            if not (periodic or 0 <= at < extent):
                return PROC_NULL
            rank += at % extent * stride
        return rank

    def shift(self, axis: int, displacement: int) -> tuple[int, int]:
        """Return the ranks at the negative and the positive `displacement` along `axis`."""
        source, dest = (
            self.find_rank([*self.coords[:axis], self.coords[axis] + step, *self.coords[axis + 1 :]])
            for step in (-displacement, displacement)
        )
        return source, dest


def complete_dims(operation: str, size: int, dims: Any) -> tuple[int, ...]:
    """Return `dims`, a number of dimensions or their extents, in which each 0 is replaced as
    :func:`dims_create` describes."""
    extents = (0,) * dims if isinstance(dims, int) and dims >= 0 else list_integers(dims)
    if extents is None or min(extents, default=0) < 0:
        raise ArgumentError(
            f"{operation}: dims must be a number of dimensions or their extents, numbers >= 0 (0: chosen here),"
            f" got {dims!r}"
        )
    free = extents.count(0)
    if not free:
        return extents
    rest, left = divmod(size, prod(extent for extent in extents if extent))
    if left or not rest:
        raise ArgumentError(
            f"{operation}: {size} ranks can't be divided by the extents in dims={list(extents)}; state all extents"
        )
    found = iter(next(_find_factors(rest, free, rest)))
    return tuple(extent or next(found) for extent in extents)


def _find_factors(number: int, count: int, most: int) -> Iterator[list[int]]:
    """Find `count` factors of `number`, none larger than `most`, in descending order; the lists with the smallest
    first factors come first."""
    if count == 0:
        if number == 1:
            yield []
        return
    for factor in range(1, min(number, most) + 1):
        if number % factor == 0 and factor**count >= number:
            yield from ([factor, *rest] for rest in _find_factors(number // factor, count - 1, factor))


def check_cart(operation: str, size: int, dims: Any, periods: Any) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Return the extents and the periods of a grid of at most `size` ranks. Raises ArgumentError."""
    extents = complete_dims(operation, size, dims)
    if not 1 <= prod(extents) <= size:
        raise ArgumentError(
            f"{operation}: dims={list(extents)} are {prod(extents)} ranks, but the communicator has {size}"
        )
    return extents, check_flags(operation, "periods", periods, len(extents))


def check_flags(operation: str, name: str, flags: Any, count: int) -> tuple[bool, ...]:
    """Return `flags`, one bool or one for each of `count` dimensions."""
    if isinstance(flags, bool):
        return (flags,) * count
    given = list_integers(flags)
    if given is None or len(given) != count or not set(given) <= {0, 1}:
        raise ArgumentError(f"{operation}: {name} must be a bool, or one for each of {count} dimensions, got {flags!r}")
    return tuple(map(bool, given))


def list_integers(values: Any) -> tuple[int, ...] | None:
    """Return `values` as integers; None if they are none."""
    try:
        return tuple(index(value) for value in values)
    except TypeError:
        return None


def check_coords(operation: str, coords: Any, dims: Sequence[int]) -> tuple[int, ...]:
    """Return `coords` as integers, one for each of `dims`."""
    found = list_integers(coords)
    if found is None or len(found) != len(dims):
        raise ArgumentError(f"{operation}: coords must be {len(dims)} integers, got {coords!r}; dims are {list(dims)}")
    return found


def check_shift(operation: str, dimension: Any, displacement: Any, dims: Sequence[int]) -> tuple[int, int]:
    """Return `dimension` and `displacement` as integers."""
    found = list_integers([dimension, displacement])
    if found is None or not 0 <= found[0] < len(dims):
        raise ArgumentError(
            f"{operation}: dimension must be in [0, {len(dims)}) and displacement an integer, got {dimension!r} and"
            f" {displacement!r}"
        )
    return found[0], found[1]


def check_neighbours(operation: str, name: str, ranks: Any, size: int) -> tuple[int, ...]:
    """Return `ranks` as ranks of a communicator of `size`. Raises RankError if they are not."""
    found = list_integers(ranks)
    if found is None or not all(0 <= rank < size for rank in found):
        raise RankError(f"{operation}: {name} must be ranks in [0, {size}), got {ranks!r}")
    return found


def find_unmatched_edge(lists: Sequence[tuple[Sequence[int], Sequence[int]]]) -> str | None:
    """Return a description of the first edge that only one of its two ranks has passed; None if there is none. `lists`
    has the sources and the destinations that each rank has passed."""
    for one, other in product(range(len(lists)), repeat=2):
        sent, received = lists[one][1].count(other), lists[other][0].count(one)
        if sent != received:
            return (
                f"rank {one} passed rank {other} {sent} times in destinations, but rank {other} passed rank {one}"
                f" {received} times in sources"
            )
    return None


def dims_create(size: int, dims: int | Sequence[int]) -> tuple[int, ...]:
    """Divide a number of ranks into the extents of a grid, as equal as possible, as MPI_Dims_create does.

    Args:
        size: the number of ranks.
        dims: the number of dimensions; or the extents, of which each 0 is replaced.

    Returns:
        The extents, whose product is `size`. Those that were replaced are in descending order.

    Raises:
        ArgumentError: `size` is not a positive number, `dims` is neither of these, or `size` is not divisible by the
            extents that it contains.

    Example:
        >>> mpicoll.dims_create(12, 2), mpicoll.dims_create(12, [0, 2, 0])
        ((4, 3), (3, 2, 2))
    """
    ranks = list_integers([size])
    if ranks is None or ranks[0] < 1:
        raise ArgumentError(f"dims_create: size must be a number of ranks >= 1, got {size!r}")
    extents = complete_dims("dims_create", size, dims)
    if prod(extents) != size:
        raise ArgumentError(f"dims_create: dims={list(extents)} are {prod(extents)} ranks, not {size}")
    return extents
