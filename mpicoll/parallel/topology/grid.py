"""This rank's place in a topology, and the groups of ranks along its axes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mpicoll.engine.communicator import Communicator
from mpicoll.errors import ArgumentError, CommunicatorError, ShapeError
from mpicoll.parallel import groups
from mpicoll.parallel.topology.process_topology import SHORT_NAMES, ProcessTopology, canonicalize_axis, format_extents
from mpicoll.torch import groups as torch_groups
from mpicoll.torch.process_group import ProcessGroupMpicoll

if TYPE_CHECKING:
    from typing_extensions import Self

_COMBINED_AXES = (("data", "context"), ("pipe", "model"))
"""Axes along which there are groups from the start, besides each by itself."""

_Key: TypeAlias = tuple[str, ...]


class PipelineParallelGrid:
    """This rank's place in a topology over the ranks of `group`, and the groups along its axes.

    `group` is a process group of mpicoll, a Communicator, an mpi4py communicator, or None for all ranks: torch's
    default process group if that is mpicoll's, else mpicoll's world. Ranks are counted in it, so they are the global
    ranks where it is everyone. Without `topology` there is data parallelism only (DeepSpeed shares the ranks out
    between stages and data there, by their number, which fits no model in particular).

    Making a grid is collective over `group`: it makes the groups along each axis, along data and context, and along
    pipe and model. Where `group` is a process group (or None, and torch's default group is mpicoll's) they are process
    groups, too, and :meth:`communicator` gives the communicators on which these run. So there is one set of them, and
    operations of torch and of mpicoll on the same ranks keep the order of their calls. `process_groups`, by axis, are
    taken instead of made. Axes of extent one cost nothing, and the group of all ranks is `group` itself.

    ``get_…_group()`` give the process groups, and raise CommunicatorError where there are none; ``get_…_rank()`` and
    ``get_…_world_size()`` are good without. An axis that the topology lacks is one of extent one.

    A context manager that frees what the grid has made. Attributes: ``freed``; ``before``, the grid that comes into use
    again when this one is freed while it is in use. Raises ShapeError if the topology has another number of ranks
    than `group`, ArgumentError if one of `process_groups` has not the ranks along its axis, in their order.
    """

    def __init__(
        self,
        topology: ProcessTopology | None = None,
        group: Any = None,
        *,
        process_groups: Mapping[str, dist.ProcessGroup] | None = None,
    ) -> None:
        self._comm = torch_groups.communicator(group)
        if group is None:
            group = torch_groups.default_group()
        self._group = group if isinstance(group, ProcessGroupMpicoll) else None
        self._topology = ProcessTopology(["data"], [self._comm.size]) if topology is None else topology
        if self._topology.world_size() != self._comm.size:
            raise ShapeError(
                f"PipelineParallelGrid: {self._topology!r} has {self._topology.world_size()} ranks, but the group has"
                f" {self._comm.size} (rank {self._comm.rank})"
            )
        self._coord = self._topology.get_coord(self._comm.rank)
        self.freed = False
        self.before: groups.Grid | None = None
        self._owned: list[Communicator | ProcessGroupMpicoll] = []
        # By the axes, of more than one rank, that they are along.
        self._process_groups: dict[_Key, ProcessGroupMpicoll] = {}
        self._communicators: dict[_Key, Communicator] = {}
        everyone = self._key(self._topology.axes)
        self._communicators[everyone] = self._comm
        if self._group is not None:
            self._process_groups[everyone] = self._group
        for axis, given in (process_groups or {}).items():
            self._adopt_process_group(axis, given)
        # All that is usually asked for, in one order on all ranks, so that nobody waits for others when it is.
        for axes in (*((axis,) for axis in self._topology.axes), *_COMBINED_AXES):
            key = self._key(axes)
            if self._group is None:
                self._communicator_along(key)
            elif key and key not in self._process_groups:
                self._process_groups[key] = self._new_group(key)

    # Where this rank is.

    def topology(self) -> ProcessTopology:
        """The topology."""
        return self._topology

    def __repr__(self) -> str:
        at = format_extents(self._topology.axes, self._coord)
        dims = format_extents(self._topology.axes, self._topology.dims)
        freed = ", freed" if self.freed else ""
        return f"<PipelineParallelGrid {dims}: rank {self._comm.rank} of {self._comm.size} at {at}{freed}>"

    def get_global_rank(self) -> int:
        """This rank, in the grid's group."""
        return self._comm.rank

    def get_stage_id(self) -> int:
        """The pipeline stage of this rank."""
        return self._rank_on("pipe")

    def get_data_parallel_id(self) -> int:
        """The coordinate of this rank on the data axis."""
        return self._rank_on("data")

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank is in the first pipeline stage."""
        return self.get_stage_id() == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank is in the last pipeline stage."""
        return self.get_stage_id() == self.get_pipe_parallel_world_size() - 1

    def stage_to_global(self, stage_id: int, **coords: int) -> int:
        """The rank in stage `stage_id` that agrees with this one on all other axes, but for those in `coords`. Raises
        RankError where there is no such stage or coordinate."""
        here = {canonicalize_axis(axis): at for axis, at in self._coord._asdict().items()}
        asked = {"pipe": stage_id} | {canonicalize_axis(axis): at for axis, at in coords.items()}
        # A grid without stages has one of them.
        if "pipe" not in here and stage_id == 0:
            del asked["pipe"]
        return self._topology.get_rank(**here | asked)

    # Sizes, ranks and groups along the axes.

    def get_pipe_parallel_rank(self) -> int:
        """The pipeline stage of this rank."""
        return self.get_stage_id()

    def get_pipe_parallel_world_size(self) -> int:
        """The number of pipeline stages."""
        return self._size_on("pipe")

    def get_pipe_parallel_group(self) -> dist.ProcessGroup:
        """The process group of the ranks that make one pipeline."""
        return self._process_group("get_pipe_parallel_group", "pipe")

    def get_data_parallel_rank(self, with_context_parallel: bool = False) -> int:
        """The rank in :meth:`get_data_parallel_group`."""
        return self._rank_on("data", "context") if with_context_parallel else self._rank_on("data")

    def get_data_parallel_world_size(self, with_context_parallel: bool = False) -> int:
        """The size of :meth:`get_data_parallel_group`."""
        return self._size_on("data", "context") if with_context_parallel else self._size_on("data")

    def get_data_parallel_group(self, with_context_parallel: bool = False) -> dist.ProcessGroup:
        """The process group of the ranks with the same parameters and different samples.

        `with_context_parallel` adds those with other parts of the same sample: gradients are averaged over these.
        """
        axes = ("data", "context") if with_context_parallel else ("data",)
        return self._process_group("get_data_parallel_group", *axes)

    def get_context_parallel_rank(self) -> int:
        """The coordinate of this rank on the context axis."""
        return self._rank_on("context")

    def get_context_parallel_world_size(self) -> int:
        """In how many parts sequences are divided."""
        return self._size_on("context")

    def get_context_parallel_group(self) -> dist.ProcessGroup:
        """The process group of the ranks with the parts of the same sequences."""
        return self._process_group("get_context_parallel_group", "context")

    def get_slice_parallel_rank(self) -> int:
        """The coordinate of this rank on the model axis."""
        return self._rank_on("model")

    def get_slice_parallel_world_size(self) -> int:
        """In how many shards tensor parallelism divides a layer."""
        return self._size_on("model")

    def get_slice_parallel_group(self) -> dist.ProcessGroup:
        """The process group of the ranks with the shards of the same layers (tensor parallelism)."""
        return self._process_group("get_slice_parallel_group", "model")

    def get_model_parallel_rank(self) -> int:
        """The rank in :meth:`get_model_parallel_group`."""
        return self._rank_on("pipe", "model")

    def get_model_parallel_world_size(self) -> int:
        """How many ranks share one copy of the model."""
        return self._size_on("pipe", "model")

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        """The process group of the ranks that share one copy of the model: all its stages and shards."""
        return self._process_group("get_model_parallel_group", "pipe", "model")

    def communicator(self, *axes: str) -> Communicator:
        """The communicator of the ranks that differ from this one in their coordinates on `axes` only, in the order of
        rank.

        An axis of those that this package knows counts as one of extent 1 if the topology lacks it. The communicator
        belongs to the grid. Asking for a single axis, for ("data", "context") or for ("pipe", "model") does not
        communicate; asking for others together for the first time is collective over the ranks of the result. Raises
        ArgumentError for unknown axes, CommunicatorError if the grid was freed.
        """
        if self.freed:
            raise CommunicatorError(f"communicator{axes}: {self!r} can't be used any more")
        unknown = [
            axis for axis in axes if canonicalize_axis(axis) not in SHORT_NAMES and not self._topology.get_dim(axis)
        ]
        if unknown or not axes:
            raise ArgumentError(
                f"communicator: axes are those of {self._topology!r} and {list(SHORT_NAMES)}, got {list(axes)}"
                f" (rank {self._comm.rank})"
            )
        return self._communicator_along(self._key(axes))

    def device_mesh(self, *axes: str, device_type: str = "cpu") -> DeviceMesh:
        """The torch DeviceMesh along `axes`, by default of the whole grid, on the grid's process groups.

        Its ranks differ from this one on `axes` only. Its dimensions are `axes` in the order given, named "pp", "dp",
        "cp" and "tp", or as the topology names others. No group is made but that of a single rank, for axes of extent
        one. Raises ArgumentError for axes that the topology lacks, CommunicatorError where the grid is not over a torch
        process group.
        """
        names = [canonicalize_axis(axis) for axis in axes or self._topology.axes]
        lacking = [axis for axis in names if not self._topology.get_dim(axis)]
        if lacking or len(set(names)) < len(names):
            raise ArgumentError(
                f"device_mesh: axes must be distinct and of {self._topology!r}, got {axes} (rank {self._comm.rank})"
            )
        members = [self._process_group("device_mesh", axis) for axis in names]
        order = self._key(names, alone=True)
        ranks = torch.tensor(self._to_global_ranks(self._ranks_along(order)))
        ranks = ranks.view([self._size_on(axis) for axis in order]).permute([order.index(axis) for axis in names])
        return DeviceMesh.from_group(
            members,
            device_type,
            ranks.contiguous(),
            mesh_dim_names=tuple(SHORT_NAMES.get(axis, axis) for axis in names),
        )

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh) -> PipelineParallelGrid:
        """The grid of a DeviceMesh: its axes are the mesh's dimensions, its groups are the mesh's own.

        Collective over the ranks of the mesh, and where these are all ranks of torch over all of them. The grid's ranks
        are the places in the mesh, in row-major order. Freeing the grid leaves the mesh's groups alone. Raises
        ArgumentError if the mesh has no dimension names, CommunicatorError if this rank is not in it or its groups are
        another backend's.
        """
        names = mesh.mesh_dim_names
        if names is None:
            raise ArgumentError(f"from_device_mesh: the mesh needs dimension names such as ('dp', 'tp'), got {mesh}")
        if mesh.get_coordinate() is None:
            raise CommunicatorError(f"from_device_mesh: rank {dist.get_rank()} is not in {mesh}, and may not call")
        along = {axis: mesh.get_group(axis) for axis in names}
        other = next((one for one in along.values() if not isinstance(one, ProcessGroupMpicoll)), None)
        if other is not None:
            raise CommunicatorError(
                f"from_device_mesh: a group of {mesh} is one of {dist.get_backend(other)}; make it after"
                " init_process_group('mpicoll')"
            )
        topology = ProcessTopology(names, list(mesh.shape))
        ranks = mesh.mesh.flatten().tolist()
        made = None
        if ranks == list(range(dist.get_world_size())) and torch_groups.default_group() is not None:
            group = torch_groups.default_group()
        elif mesh.ndim == 1 and ranks == dist.get_process_group_ranks(along[names[0]]):
            group = along[names[0]]
        else:
            backend = dist.get_backend(along[names[0]])
            group = made = torch_groups.new_group(ranks, backend=backend, use_local_synchronization=True)
        # Groups of torch are in the order of global ranks, which in a mesh may be another than that of coordinates.
        place = topology.get_comm_list
        me = ranks.index(dist.get_rank())
        fitting = {
            axis: one
            for axis, one in along.items()
            if dist.get_process_group_ranks(one) == [ranks[i] for i in place(me, axis)]
        }
        grid = cls(topology, group, process_groups=fitting)
        if made is not None:
            grid._owned.insert(0, made)
        return grid

    # How groups are made, and given back.

    def free(self) -> None:
        """Collective: give back the groups that the grid has made. If it is the one in use, what was in use before
        :func:`initialize_model_parallel` has made it is so again. Freeing it twice does nothing."""
        if self.freed:
            return
        self.freed = True
        self._restore_previous_grid()
        for one in self._owned:
            if isinstance(one, Communicator):
                one.free()
            elif not one.comm.freed:  # else torch.distributed.destroy_process_group() has taken all of them
                dist.destroy_process_group(one)
        self._owned.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._restore_previous_grid()
        # Freeing is collective: after an error on this rank alone it would wait for ranks that don't come.
        if kind is None:
            self.free()

    def _restore_previous_grid(self) -> None:
        if groups.current_grid() is self:
            before = self.before
            while isinstance(before, PipelineParallelGrid) and before.freed:
                before = before.before
            groups.use(before)

    def _key(self, axes: Collection[str], *, alone: bool = False) -> _Key:
        """These axes, each by one name and in the topology's order, without those of a single rank unless `alone`."""
        along = {canonicalize_axis(axis) for axis in axes}
        axes = [axis for axis in map(canonicalize_axis, self._topology.axes) if axis in along]
        return tuple(axis for axis in axes if alone or self._size_on(axis) > 1)

    def _size_on(self, *axes: str) -> int:
        return math.prod(max(self._topology.get_dim(axis), 1) for axis in axes)

    def _rank_on(self, *axes: str) -> int:
        rank = 0
        for axis, at in zip(map(canonicalize_axis, self._topology.axes), self._coord, strict=True):
            if axis in axes:
                rank = rank * self._topology.get_dim(axis) + at
        return rank

    def _to_global_ranks(self, ranks: Sequence[int]) -> list[int]:
        """Ranks of the grid as torch numbers them."""
        of = dist.get_process_group_ranks(self._group)
        return [of[rank] for rank in ranks]

    def _adopt_process_group(self, axis: str, given: dist.ProcessGroup) -> None:
        ranks = self._ranks_along((axis,))
        theirs = dist.get_process_group_ranks(given)
        if self._group is None or not isinstance(given, ProcessGroupMpicoll) or theirs != self._to_global_ranks(ranks):
            raise ArgumentError(
                f"PipelineParallelGrid: the process group for {axis!r} is of ranks {theirs}, but this axis of"
                f" {self._topology!r} has ranks {ranks}; all groups must be mpicoll's (rank {self._comm.rank})"
            )
        self._process_groups[self._key([axis])] = given

    def _ranks_along(self, key: _Key) -> list[int]:
        return self._topology.get_comm_list(self._comm.rank, *key)

    def _communicator_along(self, key: _Key) -> Communicator:
        """The communicator along `key`, made if it isn't there."""
        if key in self._process_groups:
            return self._process_groups[key].comm
        if key not in self._communicators:
            made = self._comm.group(self._ranks_along(key))
            assert made is not None
            self._owned.append(made)
            self._communicators[key] = made
        return self._communicators[key]

    def _process_group(self, operation: str, *axes: str) -> dist.ProcessGroup:
        if self.freed:
            raise CommunicatorError(f"{operation}: {self!r} can't be used any more")
        if self._group is None:
            raise CommunicatorError(
                f"{operation}: {self!r} is over {self._comm!r}, which torch does not know; make the grid after"
                " torch.distributed.init_process_group('mpicoll'), over all ranks or a process group, or use"
                f" grid.communicator({', '.join(map(repr, axes))})"
            )
        key = self._key(axes)
        if key not in self._process_groups:
            # What is not there from the start is a group of this rank alone.
            self._process_groups[key] = self._new_group(key)
        return self._process_groups[key]

    def _new_group(self, key: _Key) -> ProcessGroupMpicoll:
        backend = dist.get_backend(self._group)
        if key and self._group is torch_groups.default_group():
            # Made by all ranks, groups get names that are the same on all of them, and short.
            lists, local = self._topology.get_axis_comm_lists(*key), False
        else:
            lists, local = [self._ranks_along(key)], True
        for ranks in lists:
            group = torch_groups.new_group(
                self._to_global_ranks(ranks), backend=backend, use_local_synchronization=local
            )
            if self._comm.rank in ranks:
                mine = group
        assert isinstance(mine, ProcessGroupMpicoll)
        self._owned.append(mine)
        return mine


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    context_parallel_size: int = 1,
    *,
    group: Any = None,
) -> PipelineParallelGrid:
    """Make a grid of pipe x data x context x model over the ranks of `group`, and put it in use for this thread.

    Neighbouring ranks, which are mostly on one node, share layers (tensor parallelism); what the sizes leave is data
    parallelism. Collective over `group`, by default all ranks (see :class:`PipelineParallelGrid`). ``with
    initialize_model_parallel(...) as grid:`` puts back at the end what was in use before, and frees the grid, but after
    an error. Raises ShapeError if the sizes don't divide the number of ranks.
    """
    sizes = {
        "tensor_model_parallel_size": tensor_model_parallel_size,
        "pipeline_model_parallel_size": pipeline_model_parallel_size,
        "context_parallel_size": context_parallel_size,
    }
    comm = torch_groups.communicator(group)
    parts = math.prod(sizes.values())
    if any(size < 1 for size in sizes.values()) or comm.size % parts:
        named = " x ".join(f"{name}={size}" for name, size in sizes.items())
        raise ShapeError(
            f"initialize_model_parallel: sizes must be at least 1, and their product divide the {comm.size} ranks, got"
            f" {named} (rank {comm.rank} of {comm.size})"
        )
    topology = ProcessTopology(
        ["pipe", "data", "context", "model"],
        [
            pipeline_model_parallel_size,
            comm.size // parts,
            context_parallel_size,
            tensor_model_parallel_size,
        ],
    )
    grid = PipelineParallelGrid(topology, group)
    grid.before = groups.current_grid()
    groups.use(grid)
    return grid
