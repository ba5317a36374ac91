"""State of a model and its optimizer on this rank, by names of the full model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Along
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from mpicoll.collectives.allgather import allgather
from mpicoll.engine.core.communicator import Communicator
from mpicoll.errors import ArgumentError, CommunicatorError, ShapeError
from mpicoll.parallel.layers.base import restore_shard_marks
from mpicoll.parallel.shards import get_shard
from mpicoll.torch.groups import find_operations

Names: TypeAlias = "Callable[[str], str] | None"


def model_state(model: nn.Module, names: Names = None) -> dict[str, Any]:
    """Return the parameters and persistent buffers of `model` by their names in the full model, in their own memory.

    Parameters that parallel layers have sharded (:mod:`mpicoll.parallel.shards`) are DTensors over the process group of
    their ranks; the others are plain tensors. DCP saves and loads such a dict at any layout. Collective over the ranks
    of each sharded parameter: one all-gather of 8 bytes for each of them.

    Raises:
        ArgumentError: two parameters have one name.
        CommunicatorError: a parameter is sharded among ranks for which torch has no process group.
        ShapeError: the shards have other sizes than a DTensor's.

    Example:
        >>> sorted(mpicoll.parallel.checkpoint.model_state(torch.nn.Linear(2, 1)))
        ['bias', 'weight']
    """
    named = collect_named_values(model, names)
    return build_model_state(named, find_shardings(named))


def optimizer_state(model: nn.Module, optimizer: Optimizer, names: Names = None) -> dict[str, Any]:
    """Return the state of `optimizer` and the options of its parameters.

    The keys are ``state.<name>.<entry>`` and ``param_groups.<name>.<option>``. Entries of the shape of their parameter
    are sharded like it; numbers are the same on all ranks.

    Raises:
        ArgumentError: an entry of a sharded parameter has another shape, an entry is a list (as LBFGS keeps), or a
            parameter is not `model`'s.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> state = mpicoll.parallel.checkpoint.optimizer_state(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> state["param_groups.weight.lr"]
        0.1
    """
    named = collect_named_values(model, names)
    return build_optimizer_state(named, find_shardings(named), optimizer)


@dataclass(frozen=True)
class Sharding:
    """The layout of a parameter on the ranks of a mesh."""

    mesh: DeviceMesh
    dim: int
    extent: int

    def full_shape(self, shape: torch.Size) -> torch.Size:
        return torch.Size([*shape[: self.dim], self.extent, *shape[self.dim + 1 :]])


Shardings: TypeAlias = Mapping[str, Sharding]


@dataclass(frozen=True)
class ExtraState:
    """A value of a state dict that cannot be loaded in place, such as an extra state of a module, and its name there.

    That of another module may be a tensor of another shape, or a dict with other keys.
    """

    name: str
    value: Any


def build_model_state(named: Mapping[str, Any], shardings: Shardings) -> dict[str, Any]:
    values = {name: value.value if isinstance(value, ExtraState) else value for name, value in named.items()}
    return {name: to_dtensor(value, shardings.get(name)) for name, value in values.items()}


def build_optimizer_state(named: Mapping[str, Any], shardings: Shardings, optimizer: Optimizer) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for _, name, param, group in iterate_optimizer_parameters(named, optimizer):
        sharding = shardings.get(name)
        for entry, value in optimizer.state.get(param, {}).items():
            alike = isinstance(value, Tensor) and value.shape == param.shape
            if isinstance(value, list | tuple | dict):
                raise ArgumentError(
                    f"optimizer_state: {type(optimizer).__name__} keeps {entry!r}, a {type(value).__name__}, for"
                    f" {name!r}; only tensors and single values can be saved"
                )
            if sharding is not None and not alike and isinstance(value, Tensor) and value.numel() > 1:
                raise ArgumentError(
                    f"optimizer_state: {type(optimizer).__name__} keeps {entry!r} of shape {tuple(value.shape)} for"
                    f" {name!r}, of which this rank has a part of shape {tuple(param.shape)}; only entries of that"
                    " shape and single numbers can be saved"
                    f" (rank {sharding.mesh.get_local_rank()} of {sharding.mesh.size()})"
                )
            state[f"state.{name}.{entry}"] = to_dtensor(value, sharding if alike else None)
        for option in list_options(group):
            state[f"param_groups.{name}.{option}"] = to_dtensor(group[option], None)
    return state


def list_options(group: Mapping[str, Any]) -> list[str]:
    """Return the options of a parameter group. The names of its parameters are those of one layout."""
    return [key for key in group if key not in ("params", "param_names")]


def collect_named_values(model: nn.Module, names: Names) -> dict[str, Any]:
    """Return the parameters, persistent buffers and extra states of `model` by their names in the full model."""
    model = model.module if isinstance(model, DistributedDataParallel) else model
    restore_shard_marks(model)
    named: dict[str, Any] = {}
    local: dict[str, str] = {}
    seen = set()
    for here, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor) or here.rpartition(".")[2] == "_extra_state":
            value = ExtraState(here, value)
        elif id(value) in seen:
            continue
        else:
            seen.add(id(value))
        name = here if names is None else names(here)
        if name in named:
            raise ArgumentError(
                f"{here!r} and {local[name]!r} have the same name {name!r} in the full model; on one rank, tied"
                " parameters must be one object"
            )
        named[name], local[name] = value, here
    return named


def find_shardings(named: Mapping[str, Any]) -> dict[str, Sharding]:
    """Return the layouts of the values in `named` that are sharded among several ranks."""
    shards = {name: get_shard(value) for name, value in named.items() if isinstance(value, Tensor)}
    by_comm: dict[Communicator, list[tuple[str, int]]] = {}
    for name, shard in shards.items():
        if shard is not None and shard.comm.size > 1:
            if isinstance(named[name], DTensor):
                raise ArgumentError(
                    f"{name!r} is sharded by a parallel layer and also a DTensor, such as fully_shard creates; this"
                    " combination can't be saved or loaded; use DistributedDataParallel, or save"
                    f" whole_state_dict(model) (rank {shard.comm.rank} of {shard.comm.size})"
                )
            by_comm.setdefault(shard.comm, []).append((name, shard.dim))
    shardings = {}
    for comm, sharded in by_comm.items():
        mesh = _make_mesh(comm, sharded[0][0], named[sharded[0][0]].device.type)
        own = torch.tensor([named[name].shape[dim] for name, dim in sharded])
        extents = torch.as_tensor(allgather(own.unsqueeze(0), comm=comm)).view(comm.size, len(sharded))
        for (name, dim), parts in zip(sharded, extents.T.tolist(), strict=True):
            chunk = math.ceil(sum(parts) / comm.size)
            if parts != [max(0, min(chunk, sum(parts) - rank * chunk)) for rank in range(comm.size)]:
                raise ShapeError(
                    f"{name!r} is sharded along dim {dim} in parts of {parts}, which a DTensor can't represent; shard"
                    f" it as torch.chunk does (rank {comm.rank} of {comm.size})"
                )
            shardings[name] = Sharding(mesh, dim, sum(parts))
    return shardings


def _make_mesh(comm: Communicator, name: str, device_type: str) -> DeviceMesh:
    for group in c10d._world.pg_map:  # noqa: SLF001  torch has no other list of its groups
        operations = find_operations(group)
        if operations is not None and operations.comm is comm:
            return DeviceMesh.from_group(group, device_type)
    raise CommunicatorError(
        f"{name!r} is sharded among the ranks of {comm!r}, for which torch has no process group; create the grid after"
        " torch.distributed.init_process_group('mpicoll'), or pass a process group to the layers"
    )


def to_dtensor(value: Any, sharding: Sharding | None) -> Any:
    if not isinstance(value, Tensor):
        return value
    value = value.detach()
    if sharding is None:
        return value
    shape = sharding.full_shape(value.shape)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(value, sharding.mesh, [Along(sharding.dim)], run_check=False, shape=shape, stride=stride)


def iterate_optimizer_parameters(
    named: Mapping[str, Any], optimizer: Optimizer
) -> Iterator[tuple[int, str, Tensor, dict[str, Any]]]:
    """Yield the number of the group, the name, the parameter and the group of each parameter of `optimizer`."""
    known = {id(value): name for name, value in named.items() if isinstance(value, Tensor)}
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            name = known.get(id(param))
            if name is None:
                raise ArgumentError(
                    f"parameter group {number} of the {type(optimizer).__name__} has a parameter of shape"
                    f" {tuple(param.shape)} that does not belong to the model; create the optimizer from the current"
                    " parameters of the model"
                )
            yield number, name, param, group
