"""Arithmetic of ranks in a grid of named axes."""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Collection, Sequence
from typing import Any

from mpicoll.errors import ArgumentError, RankError, ShapeError

SHORT_NAMES = {"pipe": "pp", "data": "dp", "context": "cp", "model": "tp"}


_CANONICAL = {short: axis for axis, short in SHORT_NAMES.items()}


def canonicalize_axis(axis: str) -> str:
    """Return the name of an axis, given the name or its alias."""
    return _CANONICAL.get(axis, axis)


def format_extents(axes: Sequence[str], dims: Sequence[int]) -> str:
    return " ".join(f"{axis}={dim}" for axis, dim in zip(axes, dims, strict=True))


def _make_coord_type(axes: list[str]) -> Any:
    try:
        return namedtuple("ProcessCoord", axes)  # noqa: PYI024  the names are known only now
    except ValueError as error:
        raise ArgumentError(f"ProcessTopology: names of axes must be identifiers, got {axes}: {error}") from error


class ProcessTopology:
    """Ranks in a grid whose axes have names: ``ProcessTopology(["pipe", "data"], [2, 4])`` has 8 ranks.

    Row-major: ranks that differ by one are neighbours on the last axis. All methods are arithmetic on `dims`, so grids
    may have any size. Coordinates are named tuples with the names of `axes`; a name also finds an axis that was named
    by its alias, and vice versa.

    Args:
        axes: names of the axes, which are identifiers.
        dims: the extents of the axes.

    Attributes: ``axes``, ``dims``.

    Raises:
        ShapeError: an extent is below one, or there are more or fewer extents than axes.
        ArgumentError: a name is not an identifier, or appears twice.

    Example:
        ::

            topology = ProcessTopology(["pipe", "data"], [2, 4])
            topology.get_coord(5).data, topology.get_comm_list(5, "data")  # 1, [4, 5, 6, 7]
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        self.axes = list(axes)
        self.dims = [int(dim) for dim in dims]
        if len(self.axes) != len(self.dims):
            raise ShapeError(f"ProcessTopology: pass an extent for each axis, got axes {axes} and dims {dims}")
        if any(dim < 1 for dim in self.dims):
            raise ShapeError(f"ProcessTopology: extents must be at least 1, got {format_extents(self.axes, self.dims)}")
        self._index = {canonicalize_axis(axis): i for i, axis in enumerate(self.axes)}
        if len(self._index) < len(self.axes):
            raise ArgumentError(
                f"ProcessTopology: an axis is named twice (pp, dp, cp, tp are aliases), got axes {axes}"
            )
        self.ProcessCoord = _make_coord_type(self.axes)
        self._strides = [math.prod(self.dims[i + 1 :]) for i in range(len(self.dims))]

    def __repr__(self) -> str:
        return f"<ProcessTopology {format_extents(self.axes, self.dims)}>"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ProcessTopology):
            return NotImplemented
        return list(self._index) == list(other._index) and self.dims == other.dims

    def __hash__(self) -> int:
        return hash((*self._index, *self.dims))

    def world_size(self) -> int:
        """Return the number of ranks of the grid."""
        return math.prod(self.dims)

    def get_axis_names(self) -> list[str]:
        """Return the names of the axes, in order."""
        return self.axes

    def get_dim(self, axis: str) -> int:
        """Return the extent of `axis`; 0 if there is no such axis."""
        i = self._index.get(canonicalize_axis(axis))
        return 0 if i is None else self.dims[i]

    def get_rank(self, **coords: int) -> int:
        """Return the rank at `coords`, which name every axis: ``get_rank(pipe=1, data=0)``.

        Raises:
            RankError: an axis is missing or unknown, or a coordinate is out of range.
        """
        known = {canonicalize_axis(axis): at for axis, at in coords.items()}
        if known.keys() != self._index.keys() or len(known) != len(coords):
            raise RankError(
                f"get_rank: pass a coordinate for each axis of {self!r}, got {coords}; filter_match(**coords) lists the"
                " ranks with some given coordinates"
            )
        rank = 0
        for axis, i in self._index.items():
            if not 0 <= known[axis] < self.dims[i]:
                raise RankError(f"get_rank: {axis} must be in [0, {self.dims[i]}), got {known[axis]} in {coords}")
            rank += known[axis] * self._strides[i]
        return rank

    def get_coord(self, rank: int) -> Any:
        """Return the coordinates of `rank` as a named tuple.

        Raises:
            RankError: `rank` is out of range.
        """
        self._check("get_coord", rank)
        return self.ProcessCoord(*self._compute_coords(rank))

    def get_rank_repr(
        self,
        rank: int,
        omit_axes: Collection[str] = ("data", "pipe"),
        inner_sep: str = "_",
        outer_sep: str = "-",
    ) -> str:
        """Return the coordinates of `rank` as text, such as ``pipe_00-model_01``, without `omit_axes`."""
        self._check("get_rank_repr", rank)
        omitted = {canonicalize_axis(axis) for axis in omit_axes}
        return outer_sep.join(
            f"{axis}{inner_sep}{at:02d}"
            for axis, at in zip(self.axes, self._compute_coords(rank), strict=True)
            if canonicalize_axis(axis) not in omitted
        )

    def get_axis_comm_lists(self, *axes: str) -> list[list[int]]:
        """Return the lists of the ranks whose coordinates differ on `axes` only; together they contain every rank once.

        Each list is in ascending order, and the lists are in the order of their first ranks. Axes that the grid lacks
        are ignored; if it lacks all of them, there are no lists.
        """
        along = {self._index[axis] for axis in map(canonicalize_axis, axes) if axis in self._index}
        if not along:
            return []
        starts = self._compute_ranks({i: [0] for i in along})
        return [[start + offset for offset in self._compute_offsets(along)] for start in starts]

    def get_comm_list(self, rank: int, *axes: str) -> list[int]:
        """Return the list of :meth:`get_axis_comm_lists` that contains `rank`; ``[rank]`` if the grid has no such axis.

        Takes time proportional to the length of the list.
        """
        self._check("get_comm_list", rank)
        along = {self._index[axis] for axis in map(canonicalize_axis, axes) if axis in self._index}
        at = self._compute_coords(rank)
        start = rank - sum(at[i] * self._strides[i] for i in along)
        return [start + offset for offset in self._compute_offsets(along)]

    def filter_match(self, **coords: int) -> list[int]:
        """Return the ranks, ascending, that have the given coordinates: ``filter_match(pipe=0, data=1)``.

        Raises:
            RankError: the grid lacks an axis.
        """
        chosen = {}
        for axis, at in coords.items():
            i = self._index.get(canonicalize_axis(axis))
            if i is None:
                raise RankError(f"filter_match: {self!r} has no axis {axis!r}")
            chosen[i] = [at] if 0 <= at < self.dims[i] else []
        return self._compute_ranks(chosen)

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Return the ranks, ascending, whose coordinate on `axis` is `idx`.

        Raises:
            RankError: the grid lacks `axis`.
        """
        return self.filter_match(**{axis: idx})

    def _check(self, operation: str, rank: int) -> None:
        if not 0 <= rank < self.world_size():
            raise RankError(f"{operation}: rank must be in [0, {self.world_size()}) in {self!r}, got {rank}")

    def _compute_coords(self, rank: int) -> list[int]:
        return [rank // stride % dim for stride, dim in zip(self._strides, self.dims, strict=True)]

    def _compute_offsets(self, along: Collection[int]) -> list[int]:
        """Return the distances of the ranks along the axes numbered `along` from the first of them."""
        return self._compute_ranks({i: [0] for i in range(len(self.dims)) if i not in along})

    def _compute_ranks(self, chosen: dict[int, list[int]]) -> list[int]:
        """Return the ranks whose coordinates on the axes numbered in `chosen` are in the given lists."""
        ranks = [0]
        for i, (stride, dim) in enumerate(zip(self._strides, self.dims, strict=True)):
            ranks = [rank + at * stride for rank in ranks for at in chosen.get(i, range(dim))]
        return ranks


class PipeDataParallelTopology(ProcessTopology):
    """Pipeline stages, and data parallelism between neighbouring ranks.

    Example:
        ::

            PipeDataParallelTopology(num_pp=2, num_dp=4).get_coord(5)  # ProcessCoord(pipe=1, data=1)
    """

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Pipeline stages, data parallelism, and tensor parallelism between neighbouring ranks.

    Example:
        ::

            topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
            topology.get_coord(5)  # ProcessCoord(pipe=1, data=0, model=1)
    """

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])
