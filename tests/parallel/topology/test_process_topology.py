"""The arithmetic of ranks in a grid, against a list of all ranks."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpicoll.errors import ArgumentError, RankError, ShapeError
from mpicoll.parallel.topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
)


class Listed:
    """A topology by brute force: all coordinates, in the order of ranks."""

    def __init__(self, axes: list[str], dims: list[int]) -> None:
        self.coords = [dict(zip(axes, at, strict=True)) for at in itertools.product(*map(range, dims))]

    def match(self, **wanted: int) -> list[int]:
        return [rank for rank, at in enumerate(self.coords) if wanted.items() <= at.items()]

    def lists(self, along: list[str]) -> list[list[int]]:
        lines: dict[Any, list[int]] = {}
        for rank, at in enumerate(self.coords):
            lines.setdefault(tuple(i for axis, i in at.items() if axis not in along), []).append(rank)
        return list(lines.values())


@st.composite
def grids(draw: st.DrawFn) -> tuple[list[str], list[int]]:
    axes = draw(st.permutations(["x", "y", "data", "tp"]))[: draw(st.integers(1, 4))]
    return axes, [draw(st.integers(1, 4)) for _ in axes]


@given(grids(), st.data())
def test_topology_against_the_list_of_all_ranks(shape: tuple[list[str], list[int]], data: st.DataObject) -> None:
    axes, dims = shape
    topology, listed = ProcessTopology(axes, dims), Listed(axes, dims)
    assert topology.world_size() == len(listed.coords) == math.prod(dims)
    assert topology.get_axis_names() == axes
    assert [topology.get_dim(axis) for axis in axes] == dims
    for rank, at in enumerate(listed.coords):
        assert topology.get_rank(**at) == rank
        assert topology.get_coord(rank)._asdict() == at
    along = data.draw(st.lists(st.sampled_from(axes), min_size=1, unique=True))
    lists = topology.get_axis_comm_lists(*along)
    assert lists == listed.lists(along)
    for line in lists:
        for rank in line:
            assert topology.get_comm_list(rank, *along) == line
    axis = along[0]
    for i in range(topology.get_dim(axis)):
        assert topology.get_axis_list(axis, i) == listed.match(**{axis: i})
    wanted = {axis: data.draw(st.integers(0, 4)) for axis in along}
    assert topology.filter_match(**wanted) == listed.match(**wanted)


def test_what_deepspeed_documents() -> None:
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert topology.get_axis_names() == ["pipe", "data", "model"]
    assert topology.get_axis_comm_lists("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert topology.get_axis_comm_lists("model") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert topology.get_axis_comm_lists("data", "model") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert topology.filter_match(pipe=0, data=1) == [2, 3]
    assert topology.filter_match() == list(range(8))
    assert topology.get_coord(rank=5) == (1, 0, 1)
    assert topology.get_coord(5).model == 1
    small = ProcessTopology(axes=["x", "y"], dims=[2, 3])
    assert small.get_rank(x=0, y=1) == 1
    assert small.get_axis_list(axis="x", idx=0) == [0, 1, 2]
    assert small.get_axis_list(axis="y", idx=0) == [0, 3]
    assert PipeDataParallelTopology(num_pp=2, num_dp=3).get_axis_comm_lists("pipe") == [[0, 3], [1, 4], [2, 5]]
    assert repr(topology) == "<ProcessTopology pipe=2 data=2 model=2>"


def test_a_rank_as_text() -> None:
    topology = PipeModelDataParallelTopology(2, 2, 2)
    assert topology.get_rank_repr(5) == "model_01"
    assert topology.get_rank_repr(5, omit_axes=[]) == "pipe_01-data_00-model_01"
    assert topology.get_rank_repr(5, ["tp"], "=", " ") == "pipe=01 data=00"
    assert PipeDataParallelTopology(2, 2).get_rank_repr(3) == ""


def test_an_alias_means_its_axis_both_ways() -> None:
    long, short = ProcessTopology(["pipe", "model"], [2, 3]), ProcessTopology(["pp", "tp"], [2, 3])
    for topology in (long, short):
        for pipe, model in (("pipe", "model"), ("pp", "tp"), ("pp", "model")):
            assert topology.get_rank(**{pipe: 1, model: 2}) == 5
            assert topology.get_dim(model) == 3
            assert topology.get_axis_comm_lists(pipe) == [[0, 3], [1, 4], [2, 5]]
            assert topology.get_axis_list(model, 1) == [1, 4]
            assert topology.get_rank_repr(4, [pipe]).endswith("_01")
    assert long == short
    assert hash(long) == hash(short)
    assert short.get_coord(4)._fields == ("pp", "tp")
    assert long != ProcessTopology(["model", "pipe"], [2, 3])
    assert long != ProcessTopology(["pipe", "model"], [3, 2])
    assert long != (2, 3)


def test_axes_that_are_not_there() -> None:
    topology = PipeDataParallelTopology(2, 2)
    assert topology.get_dim("model") == 0
    assert topology.get_axis_comm_lists("model") == []
    assert topology.get_axis_comm_lists("data", "context") == topology.get_axis_comm_lists("data")
    assert topology.get_comm_list(3, "model") == [3]


def test_nothing_takes_time_or_memory_by_the_number_of_ranks() -> None:
    wide = 10**9
    topology = ProcessTopology(["pipe", "data", "model"], [wide, wide, 4])
    rank = topology.get_rank(pipe=wide - 1, data=7, model=3)
    assert rank == (wide - 1) * wide * 4 + 7 * 4 + 3
    assert topology.get_coord(rank) == (wide - 1, 7, 3)
    assert topology.get_comm_list(rank, "model") == [rank - 3, rank - 2, rank - 1, rank]
    assert topology.filter_match(pipe=1, data=0) == [4 * wide, 4 * wide + 1, 4 * wide + 2, 4 * wide + 3]
    assert topology.world_size() == 4 * wide**2


@pytest.mark.parametrize(
    ("axes", "dims", "error", "text"),
    [
        (["x", "y"], [2], ShapeError, r"\['x', 'y'\] and dims \[2\]"),
        (["x", "y"], [2, 0], ShapeError, "x=2 y=0"),
        (["x", "x"], [2, 2], ArgumentError, "named twice"),
        (["dp", "data"], [2, 2], ArgumentError, "named twice"),
        (["x y"], [2], ArgumentError, "identifiers, got .'x y'."),
    ],
)
def test_topologies_that_are_none(axes: list[str], dims: list[int], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        ProcessTopology(axes, dims)


def test_wrong_coordinates() -> None:
    topology = PipeDataParallelTopology(2, 3)
    for coords in ({"pipe": 1}, {"pipe": 1, "data": 1, "model": 0}, {"pipe": 0, "model": 0}, {"pipe": 1, "pp": 1}):
        with pytest.raises(RankError, match="a coordinate for each axis of <ProcessTopology pipe=2 data=3>"):
            topology.get_rank(**coords)
    with pytest.raises(RankError, match=r"data must be in \[0, 3\), got 3"):
        topology.get_rank(pipe=1, dp=3)
    with pytest.raises(RankError, match=r"pipe must be in \[0, 2\), got -1"):
        topology.get_rank(pipe=-1, data=0)
    for ask in (topology.get_coord, topology.get_rank_repr, lambda rank: topology.get_comm_list(rank, "data")):
        for rank in (-1, 6):
            with pytest.raises(RankError, match=rf"\[0, 6\) in <ProcessTopology pipe=2 data=3>, got {rank}"):
                ask(rank)
    with pytest.raises(RankError, match="has no axis 'model'"):
        topology.filter_match(model=0)
    assert topology.filter_match(data=3) == []
    assert topology.get_axis_list("pipe", -1) == []
