"""Groups of ranks along the axes of a grid."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.process_group import in_given_order
from support.ranks import Ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import mpicoll
from mpicoll.engine.core.communicator import Communicator
from mpicoll.errors import ArgumentError, CommunicatorError, RankError, ShapeError
from mpicoll.parallel import groups
from mpicoll.parallel.topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    ProcessTopology,
    initialize_model_parallel,
)
from mpicoll.torch import communicator

AXES = ("pipe", "data", "context", "model")


def layouts(size: int) -> list[tuple[int, ...]]:
    """Extents of pipe, data, context and model whose product is `size`."""
    return [dims for dims in itertools.product(range(1, size + 1), repeat=4) if math.prod(dims) == size]


def members(comm: Communicator, value: int) -> list[int]:
    whole = mpicoll.allgather(np.array([value]), comm=comm)
    return np.asarray(whole).ravel().tolist()


SETS = [tuple(axes) for count in range(1, 5) for axes in itertools.combinations(AXES, count)]


def check_grid(grid: PipelineParallelGrid, rank: int) -> None:
    """The communicators of `grid` are of the right ranks, in order, and its numbers agree with them."""
    topology = grid.topology()
    for axes in SETS:
        comm = grid.communicator(*axes)
        ranks = topology.get_comm_list(rank, *axes)
        assert members(comm, rank) == ranks
        assert comm.rank == ranks.index(rank)
        assert grid.communicator(*reversed(axes)) is comm
    for name, axes in (
        ("pipe", ("pipe",)),
        ("data", ("data",)),
        ("context", ("context",)),
        ("slice", ("model",)),
        ("model", ("pipe", "model")),
    ):
        comm = grid.communicator(*axes)
        assert getattr(grid, f"get_{name}_parallel_rank")() == comm.rank
        assert getattr(grid, f"get_{name}_parallel_world_size")() == comm.size
    both = grid.communicator("data", "context")
    assert grid.get_data_parallel_rank(with_context_parallel=True) == both.rank
    assert grid.get_data_parallel_world_size(with_context_parallel=True) == both.size
    assert grid.get_global_rank() == rank
    assert grid.get_stage_id() == grid.get_pipe_parallel_rank()
    assert grid.get_data_parallel_id() == grid.get_data_parallel_rank()
    stages = grid.get_pipe_parallel_world_size()
    assert grid.is_first_stage == (grid.get_stage_id() == 0)
    assert grid.is_last_stage == (grid.get_stage_id() == stages - 1)
    assert [grid.stage_to_global(stage) for stage in range(stages)] == topology.get_comm_list(rank, "pipe")


def test_grids_of_every_shape(ranks: Ranks) -> None:
    def body() -> None:
        rank = mpicoll.world().rank
        for dims in layouts(ranks.size):
            with PipelineParallelGrid(ProcessTopology(AXES, dims), mpicoll.world()) as grid:
                check_grid(grid, rank)
                assert grid.communicator("tp") is grid.communicator("model")

    ranks(body)


def test_a_grid_over_some_of_the_ranks_in_another_order(several: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        part = world.group(range(world.size - 1, 0, -1))
        if part is None:
            return
        with PipelineParallelGrid(ProcessTopology(["dp", "tp"], [1, part.size]), part) as grid:
            check_grid(grid, part.rank)
            assert members(grid.communicator("tp"), world.rank) == list(range(world.size - 1, 0, -1))
            assert grid.communicator("tp") is part  # the group of all ranks is the group itself
        part.free()

    several(body)


def test_without_a_topology_all_ranks_are_data_parallel(ranks: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        grid = PipelineParallelGrid()
        assert grid.topology() == ProcessTopology(["data"], [world.size])
        check_grid(grid, world.rank)
        assert grid.stage_to_global(0) == world.rank
        assert grid.stage_to_global(0, data=world.size - 1) == world.size - 1
        grid.free()

    ranks(body)


def test_stage_to_global_with_other_coordinates(ranks: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        with PipelineParallelGrid(PipeDataParallelTopology(1, world.size), world) as grid:
            assert [grid.stage_to_global(0, dp=at) for at in range(world.size)] == list(range(world.size))
            with pytest.raises(RankError, match=r"pipe must be in \[0, 1\), got 1"):
                grid.stage_to_global(1)
            with pytest.raises(RankError, match=rf"data must be in \[0, {world.size}\), got {world.size}"):
                grid.stage_to_global(0, data=world.size)
            with pytest.raises(RankError, match="a coordinate for each axis"):
                grid.stage_to_global(0, model=0)

    ranks(body)


def test_axes_of_one_s_own(ranks: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        with PipelineParallelGrid(ProcessTopology(["expert", "dp"], [world.size, 1]), world) as grid:
            assert members(grid.communicator("expert"), world.rank) == list(range(world.size))
            assert grid.communicator("data").size == grid.communicator("cp").size == 1
            for axes in (("experts",), ("data", "x"), ()):
                with pytest.raises(ArgumentError, match=r"axes must be of .*expert=.*got \["):
                    grid.communicator(*axes)

    ranks(body)


def test_repr_of_a_grid(some: Ranks) -> None:
    def body() -> None:
        size, rank = mpicoll.world().size, mpicoll.world().rank
        grid = PipelineParallelGrid(PipeDataParallelTopology(size, 1), mpicoll.world())
        text = f"<PipelineParallelGrid pipe={size} data=1: rank {rank} of {size} at pipe={rank} data=0"
        assert repr(grid) == f"{text}>"
        grid.free()
        assert repr(grid) == f"{text}, freed>"

    some(body)


def test_a_topology_of_another_size(some: Ranks) -> None:
    def body() -> None:
        size = mpicoll.world().size
        with pytest.raises(ShapeError, match=rf"pipe=2 data={size}> has {2 * size} ranks, but the group has {size} "):
            PipelineParallelGrid(PipeDataParallelTopology(2, size))

    some(body)


def test_a_freed_grid(some: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        with groups.use(None):
            grid = PipelineParallelGrid(PipeDataParallelTopology(1, world.size), world)
            groups.use(grid)
            whole, alone = grid.communicator("data"), grid.communicator("pipe")
            grid.free()
            grid.free()
            assert groups.get_current_grid() is None
            assert whole is world
            assert not whole._core.freed
            assert alone._core.freed or world.size == 1
            with pytest.raises(CommunicatorError, match="freed> can't be used"):
                grid.communicator("data")
            with pytest.raises(CommunicatorError, match="freed> can't be used"):
                grid.get_data_parallel_group()
            assert grid.get_data_parallel_rank() == world.rank

    some(body)


def test_an_error_in_a_block_is_not_followed_by_waiting_for_others(some: Ranks) -> None:
    def body() -> None:
        grid = PipelineParallelGrid(group=mpicoll.world())
        with pytest.raises(KeyError), grid:
            raise KeyError
        assert grid.communicator("data").size == mpicoll.world().size
        grid.free()

    some(body)


def test_torch_s_groups_need_torch_s_process_group(some: Ranks) -> None:
    def body() -> None:
        with PipelineParallelGrid(group=mpicoll.world()) as grid:
            for name in ("pipe", "data", "context", "slice", "model"):
                with pytest.raises(CommunicatorError, match=r"init_process_group\('mpicoll'\).*or use.*communicator\("):
                    getattr(grid, f"get_{name}_parallel_group")()
            with pytest.raises(CommunicatorError, match=r"device_mesh: .*data="):
                grid.device_mesh()

    some(body)


def test_initialize_model_parallel(ranks: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        for pipe, data, context, model in layouts(world.size):
            with initialize_model_parallel(model, pipe, context, group=world) as grid:
                assert grid.topology() == ProcessTopology(AXES, [pipe, data, context, model])
                assert groups.get_current_grid() is grid
                for axis in AXES:
                    assert groups.communicator(None, axis) is grid.communicator(axis)
            assert groups.get_current_grid() is None

    ranks(body)


def test_what_was_in_use_before_comes_back(some: Ranks) -> None:
    def body() -> None:
        with initialize_model_parallel() as outer:
            with initialize_model_parallel() as inner:
                assert groups.get_current_grid() is inner
            assert groups.get_current_grid() is outer
            with pytest.raises(KeyError), initialize_model_parallel() as failed:
                raise KeyError
            assert groups.get_current_grid() is outer
            failed.free()
            first = initialize_model_parallel()
            last = initialize_model_parallel()
            first.free()
            assert groups.get_current_grid() is last
            last.free()
            assert groups.get_current_grid() is outer, "not a grid that was freed"
        assert groups.get_current_grid() is None

    some(body)


@pytest.mark.parametrize("sizes", [(5, 1, 1), (1, 3, 2), (0, 1, 1), (-1, 1, -1)])
def test_sizes_that_do_not_fit(some: Ranks, sizes: tuple[int, int, int]) -> None:
    def body() -> None:
        size = mpicoll.world().size
        named = "tensor_model_parallel_size={} x pipeline_model_parallel_size={} x context_parallel_size={}"
        with pytest.raises(ShapeError, match=f"divide the {size} ranks, got {named.format(*sizes)}"):
            initialize_model_parallel(*sizes)
        assert groups.get_current_grid() is None

    some(body)


def check_group(group: Any, comm: Communicator) -> None:
    """`group` is a process group on `comm`, named alike on all its ranks."""
    assert communicator(group) is comm
    assert dist.get_world_size(group) == comm.size
    assert dist.get_rank(group) == comm.rank
    total = torch.tensor([2**comm.rank])
    dist.all_reduce(total, group=group)
    assert total.item() == 2**comm.size - 1
    names: list[Any] = [None] * comm.size
    dist.all_gather_object(names, group.group_name, group=group)
    assert len(set(names)) == 1


def groups_of(grid: PipelineParallelGrid) -> list[tuple[Any, tuple[str, ...]]]:
    return [
        (grid.get_pipe_parallel_group(), ("pipe",)),
        (grid.get_data_parallel_group(), ("data",)),
        (grid.get_data_parallel_group(with_context_parallel=True), ("data", "context")),
        (grid.get_context_parallel_group(), ("context",)),
        (grid.get_slice_parallel_group(), ("model",)),
        (grid.get_model_parallel_group(), ("pipe", "model")),
    ]


@pytest.mark.mpi
@pytest.mark.usefixtures("default_group")
class TestTorch:
    def test_groups_and_communicators_are_one_set(self) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        for pipe, _, context, model in layouts(size):
            before = len(dist.distributed_c10d._world.pg_names)
            with initialize_model_parallel(model, pipe, context) as grid:
                check_grid(grid, rank)
                for group, axes in groups_of(grid):
                    check_group(group, grid.communicator(*axes))
                    assert dist.get_process_group_ranks(group) == grid.topology().get_comm_list(rank, *axes)
            assert len(dist.distributed_c10d._world.pg_names) == before

    @in_given_order
    def test_a_grid_over_a_process_group_in_another_order(self) -> None:
        size = dist.get_world_size()
        order = list(range(size))[::-1]
        group = dist.new_group(order, sort_ranks=False)
        with PipelineParallelGrid(ProcessTopology(["pp", "tp"], [1, size]), group) as grid:
            assert grid.get_slice_parallel_group() is group
        for pipe, model in ((size, 1), (2, size // 2)):
            if pipe * model != size:
                continue
            with PipelineParallelGrid(ProcessTopology(["pp", "tp"], [pipe, model]), group) as grid:
                check_grid(grid, order.index(dist.get_rank()))
                for one, axes in groups_of(grid):
                    check_group(one, grid.communicator(*axes))
                mesh = grid.device_mesh()
                assert mesh.mesh.tolist() == torch.tensor(order).view(pipe, model).tolist()
        dist.destroy_process_group(group)

    def test_a_grid_over_some_ranks(self) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        part = dist.new_group(list(range(1, size)) or [0])
        if rank in (dist.get_process_group_ranks(part) if part is not dist.GroupMember.NON_GROUP_MEMBER else []):
            with PipelineParallelGrid(PipeDataParallelTopology(1, dist.get_world_size(part)), part) as grid:
                check_grid(grid, dist.get_rank(part))
                assert grid.get_data_parallel_group() is part
                assert grid.device_mesh("dp").mesh.tolist() == dist.get_process_group_ranks(part)
            dist.destroy_process_group(part)

    def test_ddp_over_the_data_axis(self) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        pipe = 2 if size % 2 == 0 else 1
        with initialize_model_parallel(pipeline_model_parallel_size=pipe) as grid:
            torch.manual_seed(0)
            model = DistributedDataParallel(torch.nn.Linear(2, 1), process_group=grid.get_data_parallel_group())
            model(torch.full((1, 2), float(rank))).sum().backward()
            mean = np.mean(grid.topology().get_comm_list(rank, "data"))
            assert model.module.weight.grad is not None
            assert model.module.weight.grad.tolist() == [[mean, mean]]
            del model

    def test_to_a_device_mesh_and_back(self) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        for pipe, data, context, model in layouts(size):
            with initialize_model_parallel(model, pipe, context) as grid:
                mesh = grid.device_mesh()
                assert mesh.mesh_dim_names == ("pp", "dp", "cp", "tp")
                assert mesh.mesh.tolist() == torch.arange(size).view(pipe, data, context, model).tolist()
                for name in ("pp", "dp", "cp", "tp"):
                    assert communicator(mesh.get_group(name)).size == grid.communicator(name).size
                    if grid.communicator(name).size > 1:
                        assert communicator(mesh[name].get_group()) is grid.communicator(name)
                before = len(dist.distributed_c10d._world.pg_names)
                with PipelineParallelGrid.from_device_mesh(mesh) as back:
                    assert back.topology() == grid.topology()
                    check_grid(back, rank)
                    for name in ("pp", "dp", "cp", "tp"):
                        assert back.communicator(name).size == 1 or back.communicator(name) is grid.communicator(name)
                assert len(dist.distributed_c10d._world.pg_names) == before
                check_grid(grid, rank)  # what the mesh and the grid share is still there

    def test_part_of_a_grid_as_a_mesh(self) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        pipe = 2 if size % 2 == 0 else 1
        with initialize_model_parallel(size // pipe, pipe) as grid:
            mesh = grid.device_mesh("tp", "pipe")  # in another order than the grid
            assert mesh.mesh_dim_names == ("tp", "pp")
            assert mesh.mesh.tolist() == torch.arange(size).view(pipe, size // pipe).T.tolist()
            assert grid.device_mesh("model").mesh.tolist() == grid.topology().get_comm_list(rank, "model")
            with PipelineParallelGrid.from_device_mesh(mesh) as back:
                assert back.topology() == ProcessTopology(["model", "pipe"], [size // pipe, pipe])
                for axis in ("model", "pipe"):
                    assert back.communicator(axis).size == 1 or back.communicator(axis) is grid.communicator(axis)
                check_grid(back, mesh.mesh.flatten().tolist().index(rank))
            for axes in (("pipe", "pp"), ("pipe", "expert")):
                with pytest.raises(ArgumentError, match=r"must be distinct and of <ProcessTopology pipe="):
                    grid.device_mesh(*axes)

    def test_dtensors_on_the_mesh_of_a_grid(self) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        data = 2 if size % 2 == 0 else 1
        with initialize_model_parallel(size // data) as grid:
            mesh = grid.device_mesh("data", "model")
            shards = grid.get_slice_parallel_world_size()
            local = torch.full((1, 3), float(grid.get_slice_parallel_rank()))
            whole = DTensor.from_local(local, mesh, [Replicate(), Shard(0)]).full_tensor()
            assert whole.tolist() == [[float(i)] * 3 for i in range(shards)]
            summed = DTensor.from_local(torch.tensor([2.0**rank]), mesh["dp"], [Partial()]).full_tensor()
            assert summed.tolist() == [sum(2.0**one for one in grid.topology().get_comm_list(rank, "data"))]
            x = torch.arange(12.0).view(4, 3)
            given = distribute_tensor(x, mesh, [Shard(0), Shard(1)])
            assert torch.equal(given.full_tensor(), x)

    def test_from_meshes_that_torch_has_made(self) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        for shape in {(size, 1), (1, size), (2, size // 2)}:
            if math.prod(shape) != size:
                continue
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
            with PipelineParallelGrid.from_device_mesh(mesh) as grid:
                check_grid(grid, rank)
                for name, group in zip(("data", "slice"), mesh.get_all_groups(), strict=True):
                    assert getattr(grid, f"get_{name}_parallel_group")() is group
            with PipelineParallelGrid.from_device_mesh(mesh["tp"]) as grid:
                assert grid.topology() == ProcessTopology(["tp"], [shape[1]])
                assert grid.get_slice_parallel_group() is mesh.get_group("tp")
                check_grid(grid, mesh.get_local_rank("tp"))

    @in_given_order
    def test_from_a_mesh_whose_ranks_are_in_another_order(self) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        for shape in ((size,), (2, size // 2)):
            if math.prod(shape) != size:
                continue
            order = torch.arange(size - 1, -1, -1).view(shape)
            mesh = DeviceMesh("cpu", order, mesh_dim_names=("dp", "tp")[: len(shape)])
            with PipelineParallelGrid.from_device_mesh(mesh) as grid:
                check_grid(grid, size - 1 - rank)
                for group, axes in groups_of(grid):
                    check_group(group, grid.communicator(*axes))

    def test_from_meshes_that_can_not_be_a_grid(self) -> None:
        size = dist.get_world_size()
        with pytest.raises(ArgumentError, match=r"needs dimension names such as \('dp', 'tp'\)"):
            PipelineParallelGrid.from_device_mesh(init_device_mesh("cpu", (size,)))
        theirs = DeviceMesh.from_group(dist.new_group(backend="gloo"), "cpu", mesh_dim_names=("dp",))
        with pytest.raises(CommunicatorError, match=r"a group of DeviceMesh.* has the backend gloo"):
            PipelineParallelGrid.from_device_mesh(theirs)
        first = DeviceMesh("cpu", [0], mesh_dim_names=("dp",))
        if dist.get_rank() == 0:
            PipelineParallelGrid.from_device_mesh(first).free()
        else:
            with pytest.raises(CommunicatorError, match=r"rank \d is not in DeviceMesh"):
                PipelineParallelGrid.from_device_mesh(first)

    def test_process_groups_that_are_there_already(self) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        mine = dist.new_group(list(range(size)))
        with PipelineParallelGrid(process_groups={"dp": mine}) as grid:
            assert grid.get_data_parallel_group() is mine
            assert grid.communicator("data") is communicator(mine)
        topology = PipeDataParallelTopology(size, 1)
        if size > 1:
            with pytest.raises(ArgumentError, match=rf"for 'data' is of ranks \[0, .*has ranks \[{rank}\]"):
                PipelineParallelGrid(topology, process_groups={"data": mine})
        with pytest.raises(ArgumentError, match="all groups must be mpicoll's"):
            PipelineParallelGrid(topology, communicator(mine), process_groups={"pipe": mine})
        dist.destroy_process_group(mine)
