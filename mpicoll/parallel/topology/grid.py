"""Coordinates of this rank in a topology, and the groups of ranks along its axes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mpicoll.engine.core.communicator import Communicator, core_of
from mpicoll.errors import ArgumentError, CommunicatorError, ShapeError
from mpicoll.parallel import groups
from mpicoll.parallel.topology.process_topology import SHORT_NAMES, ProcessTopology, canonicalize_axis, format_extents
from mpicoll.torch import groups as torch_groups

if TYPE_CHECKING:
    from typing_extensions import Self


_COMBINED_AXES = (("data", "context"), ("pipe", "model"))
"""Sets of axes along which a grid makes groups when it is created, in addition to the groups along each single axis."""


_Axes: TypeAlias = tuple[str, ...]


class PipelineParallelGrid:
    """The place of this rank in a topology over the ranks of `group`, and the groups along its axes.

    Making a grid is collective over `group`: it makes the groups along each axis, along data and context, and along
    pipe and model. Where `group` is a process group (or None, and torch's default group is mpicoll's) they are process
    groups, too, and :meth:`communicator` returns the communicators of these. So operations of torch and of mpicoll on
    the same ranks share one communicator and keep the order of their calls. Axes of extent one cost nothing, and the
    group of all ranks is `group` itself.

    ``get_…_group()`` return the process groups, and raise CommunicatorError where there are none; ``get_…_rank()`` and
    ``get_…_world_size()`` work without. A missing axis is one of extent one.

    As a context manager, a grid frees the groups that it has made.

    Args:
        topology: by default a single axis "data" over all ranks. (DeepSpeed divides the ranks between stages and data
            by their number instead, which suits no model in particular.)
        group: a process group of mpicoll, a Communicator, an mpi4py communicator, or None for all ranks: torch's
            default process group if it is mpicoll's, else mpicoll's world. Ranks of the grid are ranks of this group.
        process_groups: process groups by axis, to be used instead of new ones.

    Attributes: ``freed``; ``before``, the grid that comes into use again when this one is freed while it is in use.

    Raises:
        ShapeError: the topology has another number of ranks than `group`.
        ArgumentError: one of `process_groups` does not have the ranks along its axis, in their order.

    Example:
        ::

            with PipelineParallelGrid() as grid:  # one axis, "data", over all ranks
                mean = torch.ones(3) / grid.get_data_parallel_world_size()
                comm = grid.communicator("data")
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
            group = torch_groups.get_default_group()
        self._group = group if torch_groups.find_operations(group) is not None else None
        self._topology = ProcessTopology(["data"], [self._comm.size]) if topology is None else topology
        if self._topology.world_size() != self._comm.size:
            raise ShapeError(
                f"PipelineParallelGrid: {self._topology!r} has {self._topology.world_size()} ranks, but the group has"
                f" {self._comm.size} (rank {self._comm.rank})"
            )
        self._coord = self._topology.get_coord(self._comm.rank)
        self.freed = False
        self.before: groups.Grid | None = None
        self._owned: list[Communicator | dist.ProcessGroup] = []
        # By their axes, without axes of extent one.
        self._process_groups: dict[_Axes, dist.ProcessGroup] = {}
        self._communicators: dict[_Axes, Communicator] = {}
        everyone = self._normalize_axes(self._topology.axes)
        self._communicators[everyone] = self._comm
        if self._group is not None:
            self._process_groups[everyone] = self._group
        for axis, given in (process_groups or {}).items():
            self._adopt_process_group(axis, given)
        # All groups that programs usually need, in one order on all ranks, so that getting one never communicates.
        for axes in (*((axis,) for axis in self._topology.axes), *_COMBINED_AXES):
            key = self._normalize_axes(axes)
            if self._group is None:
                self._get_communicator(key)
            elif key and key not in self._process_groups:
                self._process_groups[key] = self._create_group(key)

    # The position of this rank.

    def topology(self) -> ProcessTopology:
        """Return the topology."""
        return self._topology

    def __repr__(self) -> str:
        at = format_extents(self._topology.axes, self._coord)
        dims = format_extents(self._topology.axes, self._topology.dims)
        freed = ", freed" if self.freed else ""
        return f"<PipelineParallelGrid {dims}: rank {self._comm.rank} of {self._comm.size} at {at}{freed}>"

    def get_global_rank(self) -> int:
        """Return this rank, in the grid's group."""
        return self._comm.rank

    def get_stage_id(self) -> int:
        """Return the pipeline stage of this rank."""
        return self._get_rank("pipe")

    def get_data_parallel_id(self) -> int:
        """Return the coordinate of this rank on the data axis."""
        return self._get_rank("data")

    @property
    def is_first_stage(self) -> bool:
        """True if this rank is in the first pipeline stage."""
        return self.get_stage_id() == 0

    @property
    def is_last_stage(self) -> bool:
        """True if this rank is in the last pipeline stage."""
        return self.get_stage_id() == self.get_pipe_parallel_world_size() - 1

    def stage_to_global(self, stage_id: int, **coords: int) -> int:
        """Return the rank in stage `stage_id` with this rank's coordinates on the other axes, except those in `coords`.

        Raises:
            RankError: there is no such stage or coordinate.
        """
        here = {canonicalize_axis(axis): at for axis, at in self._coord._asdict().items()}
        asked = {"pipe": stage_id} | {canonicalize_axis(axis): at for axis, at in coords.items()}
        # A grid without the axis has one stage.
        if "pipe" not in here and stage_id == 0:
            del asked["pipe"]
        return self._topology.get_rank(**here | asked)

    # Sizes, ranks and groups along the axes.

    def get_pipe_parallel_rank(self) -> int:
        """Return the pipeline stage of this rank."""
        return self.get_stage_id()

    def get_pipe_parallel_world_size(self) -> int:
        """Return the number of pipeline stages."""
        return self._get_size("pipe")

    def get_pipe_parallel_group(self) -> dist.ProcessGroup:
        """Return the process group of the ranks that form one pipeline."""
        return self._get_process_group("get_pipe_parallel_group", "pipe")

    def get_data_parallel_rank(self, with_context_parallel: bool = False) -> int:
        """Return the rank in :meth:`get_data_parallel_group`."""
        return self._get_rank("data", "context") if with_context_parallel else self._get_rank("data")

    def get_data_parallel_world_size(self, with_context_parallel: bool = False) -> int:
        """Return the size of :meth:`get_data_parallel_group`."""
        return self._get_size("data", "context") if with_context_parallel else self._get_size("data")

    def get_data_parallel_group(self, with_context_parallel: bool = False) -> dist.ProcessGroup:
        """Return the process group of the ranks with the same parameters and different samples.

        `with_context_parallel` adds the ranks with other parts of the same samples: average gradients over this group.
        """
        axes = ("data", "context") if with_context_parallel else ("data",)
        return self._get_process_group("get_data_parallel_group", *axes)

    def get_context_parallel_rank(self) -> int:
        """Return the coordinate of this rank on the context axis."""
        return self._get_rank("context")

    def get_context_parallel_world_size(self) -> int:
        """Return the number of parts into which sequences are divided."""
        return self._get_size("context")

    def get_context_parallel_group(self) -> dist.ProcessGroup:
        """Return the process group of the ranks with the parts of the same sequences."""
        return self._get_process_group("get_context_parallel_group", "context")

    def get_slice_parallel_rank(self) -> int:
        """Return the coordinate of this rank on the model axis."""
        return self._get_rank("model")

    def get_slice_parallel_world_size(self) -> int:
        """Return the number of shards into which tensor parallelism divides a layer."""
        return self._get_size("model")

    def get_slice_parallel_group(self) -> dist.ProcessGroup:
        """Return the process group of the ranks with the shards of the same layers (tensor parallelism)."""
        return self._get_process_group("get_slice_parallel_group", "model")

    def get_model_parallel_rank(self) -> int:
        """Return the rank in :meth:`get_model_parallel_group`."""
        return self._get_rank("pipe", "model")

    def get_model_parallel_world_size(self) -> int:
        """Return the number of ranks that share one copy of the model."""
        return self._get_size("pipe", "model")

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        """Return the process group of the ranks that share one copy of the model: all its stages and shards."""
        return self._get_process_group("get_model_parallel_group", "pipe", "model")

    def communicator(self, *axes: str) -> Communicator:
        """Return the communicator of the ranks whose coordinates differ from this rank's on `axes` only, in rank order.

        The communicator belongs to the grid. A single axis, ("data", "context") and ("pipe", "model") need no
        communication; the first call with another set of axes is collective over the ranks of the result. The axes
        pipe, data, context and model have extent 1 if the topology lacks them.

        Raises:
            ArgumentError: an axis is unknown.
            CommunicatorError: the grid is freed.
        """
        if self.freed:
            raise CommunicatorError(f"communicator{axes}: {self!r} can't be used")
        unknown = [
            axis for axis in axes if canonicalize_axis(axis) not in SHORT_NAMES and not self._topology.get_dim(axis)
        ]
        if unknown or not axes:
            raise ArgumentError(
                f"communicator: axes must be of {self._topology!r} or {list(SHORT_NAMES)}, got {list(axes)} (rank"
                f" {self._comm.rank})"
            )
        return self._get_communicator(self._normalize_axes(axes))

    def device_mesh(self, *axes: str, device_type: str = "cpu") -> DeviceMesh:
        """Return the torch DeviceMesh along `axes`, by default of the whole grid, on the grid's process groups.

        Its ranks differ from this one on `axes` only. Its dimensions are `axes` in the given order, named "pp", "dp",
        "cp" and "tp", or as the topology names other axes. No group is made except that of this rank alone, for axes of
        extent one.

        Raises:
            ArgumentError: the topology lacks an axis.
            CommunicatorError: the grid is not over a torch process group.
        """
        names = [canonicalize_axis(axis) for axis in axes or self._topology.axes]
        lacking = [axis for axis in names if not self._topology.get_dim(axis)]
        if lacking or len(set(names)) < len(names):
            raise ArgumentError(
                f"device_mesh: axes must be distinct and of {self._topology!r}, got {axes} (rank {self._comm.rank})"
            )
        members = [self._get_process_group("device_mesh", axis) for axis in names]
        order = self._normalize_axes(names, keep_single=True)
        ranks = torch.tensor(self._to_global_ranks(self._find_ranks(order)))
        ranks = ranks.view([self._get_size(axis) for axis in order]).permute([order.index(axis) for axis in names])
        return DeviceMesh.from_group(
            members,
            device_type,
            ranks.contiguous(),
            mesh_dim_names=tuple(SHORT_NAMES.get(axis, axis) for axis in names),
        )

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh) -> PipelineParallelGrid:
        """Make the grid of a DeviceMesh: its axes are the mesh's dimensions, its groups are the mesh's own.

        Collective over the ranks of the mesh; where these are all ranks of torch, over all of them. The grid's ranks
        are the positions in the mesh, in row-major order. Freeing the grid does not free the mesh's groups.

        Raises:
            ArgumentError: the mesh has no dimension names.
            CommunicatorError: this rank is not in the mesh, or a group of the mesh is another backend's.
        """
        names = mesh.mesh_dim_names
        if names is None:
            raise ArgumentError(f"from_device_mesh: the mesh needs dimension names such as ('dp', 'tp'), got {mesh}")
        if mesh.get_coordinate() is None:
            raise CommunicatorError(
                f"from_device_mesh: rank {dist.get_rank()} is not in {mesh}; only its ranks may call this"
            )
        along = {axis: mesh.get_group(axis) for axis in names}
        other = next((one for one in along.values() if torch_groups.find_operations(one) is None), None)
        if other is not None:
            raise CommunicatorError(
                f"from_device_mesh: a group of {mesh} has the backend {dist.get_backend(other)}; create the mesh after"
                " init_process_group('mpicoll')"
            )
        topology = ProcessTopology(names, list(mesh.shape))
        ranks = mesh.mesh.flatten().tolist()
        made = None
        if ranks == list(range(dist.get_world_size())) and torch_groups.get_default_group() is not None:
            group = torch_groups.get_default_group()
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

    # Making and freeing groups.

    def free(self) -> None:
        """Free the groups that the grid has made. Collective; freeing it twice does nothing.

        If the grid is in use, the grid that was in use before :func:`initialize_model_parallel` made it is in use
        again.
        """
        if self.freed:
            return
        self.freed = True
        self._restore_previous_grid()
        for one in self._owned:
            if isinstance(one, Communicator):
                one.free()
            elif not core_of(
                torch_groups.communicator(one)
            ).freed:  # else torch.distributed.destroy_process_group() has destroyed it
                dist.destroy_process_group(one)
        self._owned.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._restore_previous_grid()
        # Freeing is collective: after an error on this rank alone, it would wait for ranks that don't call it.
        if kind is None:
            self.free()

    def _restore_previous_grid(self) -> None:
        if groups.get_current_grid() is self:
            before = self.before
            while isinstance(before, PipelineParallelGrid) and before.freed:
                before = before.before
            groups.use(before)

    def _normalize_axes(self, axes: Collection[str], *, keep_single: bool = False) -> _Axes:
        """Return canonical names of `axes` in the topology's order, without axes of extent one unless `keep_single`."""
        along = {canonicalize_axis(axis) for axis in axes}
        axes = [axis for axis in map(canonicalize_axis, self._topology.axes) if axis in along]
        return tuple(axis for axis in axes if keep_single or self._get_size(axis) > 1)

    def _get_size(self, *axes: str) -> int:
        return math.prod(max(self._topology.get_dim(axis), 1) for axis in axes)

    def _get_rank(self, *axes: str) -> int:
        rank = 0
        for axis, at in zip(map(canonicalize_axis, self._topology.axes), self._coord, strict=True):
            if axis in axes:
                rank = rank * self._topology.get_dim(axis) + at
        return rank

    def _to_global_ranks(self, ranks: Sequence[int]) -> list[int]:
        """Translate ranks of the grid to torch's global ranks."""
        of = dist.get_process_group_ranks(self._group)
        return [of[rank] for rank in ranks]

    def _adopt_process_group(self, axis: str, given: dist.ProcessGroup) -> None:
        ranks = self._find_ranks((axis,))
        theirs = dist.get_process_group_ranks(given)
        served = torch_groups.find_operations(given) is not None
        if self._group is None or not served or theirs != self._to_global_ranks(ranks):
            raise ArgumentError(
                f"PipelineParallelGrid: the process group for {axis!r} is of ranks {theirs}, but this axis of"
                f" {self._topology!r} has ranks {ranks}; all groups must be mpicoll's (rank {self._comm.rank})"
            )
        self._process_groups[self._normalize_axes([axis])] = given

    def _find_ranks(self, key: _Axes) -> list[int]:
        return self._topology.get_comm_list(self._comm.rank, *key)

    def _get_communicator(self, key: _Axes) -> Communicator:
        """Return the communicator along `key`; make it at the first call."""
        if key in self._process_groups:
            return torch_groups.communicator(self._process_groups[key])
        if key not in self._communicators:
            made = self._comm.group(self._find_ranks(key))
            assert made is not None
            self._owned.append(made)
            self._communicators[key] = made
        return self._communicators[key]

    def _get_process_group(self, operation: str, *axes: str) -> dist.ProcessGroup:
        if self.freed:
            raise CommunicatorError(f"{operation}: {self!r} can't be used")
        if self._group is None:
            raise CommunicatorError(
                f"{operation}: {self!r} is over {self._comm!r}, which is not a torch process group; create the grid"
                " after torch.distributed.init_process_group('mpicoll'), over all ranks or a process group, or use"
                f" grid.communicator({', '.join(map(repr, axes))})"
            )
        key = self._normalize_axes(axes)
        if key not in self._process_groups:
            # The only group that was not made at the start is that of this rank alone.
            self._process_groups[key] = self._create_group(key)
        return self._process_groups[key]

    def _create_group(self, key: _Axes) -> dist.ProcessGroup:
        backend = dist.get_backend(self._group)
        if key and self._group is torch_groups.get_default_group():
            # Made by all ranks, groups get names that are the same on all of them, and short.
            lists, local = self._topology.get_axis_comm_lists(*key), False
        else:
            lists, local = [self._find_ranks(key)], True
        for ranks in lists:
            group = torch_groups.new_group(
                self._to_global_ranks(ranks), backend=backend, use_local_synchronization=local
            )
            if self._comm.rank in ranks:
                mine: dist.ProcessGroup = group
        self._owned.append(mine)
        return mine
