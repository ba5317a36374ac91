"""What a function of mpicoll.parallel takes for its ranks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import pytest
import torch.distributed as dist
from support.ranks import Ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import mpicoll
from mpicoll.engine.core.communicator import Communicator
from mpicoll.errors import ArgumentError, CommunicatorError
from mpicoll.parallel import groups
from mpicoll.torch import communicator as torch_communicator


class Grid:
    """Says which axes it was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []

    def communicator(self, *axes: str) -> Communicator:
        self.asked.append(axes)
        return mpicoll.world()


def test_nothing_is_in_use_at_first(ranks: Ranks) -> None:
    def body() -> None:
        assert groups.get_current_grid() is None
        assert groups.communicator(mpicoll.world()) is mpicoll.world()
        assert groups.communicator().size == mpicoll.world().size

    ranks(body)


def test_the_grid_in_use_answers_where_no_group_is_passed(some: Ranks) -> None:
    def body() -> None:
        grid = Grid()
        with groups.use(grid) as used:
            assert used is grid
            assert groups.get_current_grid() is grid
            assert groups.communicator() is mpicoll.world()
            groups.communicator(None, "pipe")
            groups.communicator(axis="cp")
            assert groups.communicator(mpicoll.world(), "data") is mpicoll.world()
            assert grid.asked == [("model",), ("pipe",), ("cp",)]
        assert groups.get_current_grid() is None

    some(body)


def test_what_was_in_use_before_comes_back(some: Ranks) -> None:
    def body() -> None:
        outer, inner = Grid(), Grid()
        with groups.use(outer):
            with groups.use(inner):
                assert groups.get_current_grid() is inner
                with groups.use(None):
                    assert groups.get_current_grid() is None
                assert groups.get_current_grid() is inner
            assert groups.get_current_grid() is outer
            with pytest.raises(KeyError), groups.use(inner):
                raise KeyError
            assert groups.get_current_grid() is outer
        assert groups.get_current_grid() is None

    some(body)


def test_from_now_on_without_a_block() -> None:
    grid = Grid()
    groups.use(grid)
    try:
        assert groups.get_current_grid() is grid
        # Each rank of threads has its own.
        assert mpicoll.run_local(groups.get_current_grid, 2) == [None, None]
    finally:
        groups.use(None)
    assert groups.get_current_grid() is None


def test_other_threads_have_their_own() -> None:
    """Such as those of a pool, unless they are given the caller's context."""
    with groups.use(Grid()) as grid, ThreadPoolExecutor(1) as pool:
        assert pool.submit(groups.get_current_grid).result() is None
        assert pool.submit(copy_context().run, groups.get_current_grid).result() is grid


def test_what_is_no_group(some: Ranks) -> None:
    def body() -> None:
        for wrong in (3, "model", object()):
            with pytest.raises(CommunicatorError, match=f"got {type(wrong).__name__}"):
                groups.communicator(wrong)
        alone = mpicoll.world().split(mpicoll.world().rank)
        assert alone is not None
        alone.free()
        with pytest.raises(CommunicatorError, match="it was freed"):
            groups.communicator(alone)

    some(body)


@pytest.mark.mpi
@pytest.mark.usefixtures("default_group")
class TestTorch:
    def test_process_groups(self) -> None:
        default: Any = dist.group.WORLD
        assert groups.communicator() is torch_communicator(default)
        assert groups.communicator(default) is torch_communicator(default)
        with pytest.raises(CommunicatorError, match="has the backend gloo"):
            groups.communicator(dist.new_group(backend="gloo"))
        part = dist.new_group([0])
        if dist.get_rank() == 0:
            assert groups.communicator(part).size == 1
        else:
            with pytest.raises(CommunicatorError, match="not a member"):
                groups.communicator(part)

    def test_meshes_of_one_dimension(self) -> None:
        size = dist.get_world_size()
        mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("dp", "tp"))
        assert groups.communicator(mesh["dp"]) is torch_communicator(mesh.get_group("dp"))
        assert groups.communicator(mesh["tp"]).size == 1
        with pytest.raises(
            ArgumentError,
            match=r"pass a DeviceMesh of one dimension, such as mesh\['tp'\]",
        ):
            groups.communicator(mesh)
        last = DeviceMesh("cpu", [size - 1])
        if dist.get_rank() == size - 1:
            assert groups.communicator(last).size == 1
        else:
            with pytest.raises(CommunicatorError, match="this process is not in DeviceMesh"):
                groups.communicator(last)

    def test_communicators_of_mpi4py(self) -> None:
        from mpi4py import MPI

        part = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank % 2)
        assert groups.communicator(part).size == part.size
        part.Free()
