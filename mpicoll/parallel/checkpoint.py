"""Checkpoints that can be loaded at another layout: other numbers of shards, stages and copies, also in one process.

The files are those of torch's distributed checkpoint (:mod:`torch.distributed.checkpoint`, DCP), with the keys
``model.<name>``, ``optimizer.state.<name>.<entry>``, ``optimizer.param_groups.<name>.<option>`` (as torch flattens an
optimizer's state) and ``extra``. So ``torch.distributed.checkpoint.load`` reads them, too. They hold full parameters;
loading takes the part that the current layout needs.

Parts of a model on several ranks are related by names. Under pipeline parallelism each rank knows its parameters by
names of its own module; `names` maps them to those of the full model, and must map the copies of a tied parameter to
one name. Without it names are used unchanged, which is right if the names of stages differ already. A parameter that a
module has under several names is saved under the first.
"""

from __future__ import annotations

import io
import math
import os
import shutil
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, Metadata, TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Along
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from mpicoll.collectives.allgather import allgather
from mpicoll.engine.core.communicator import Communicator
from mpicoll.engine.world import world
from mpicoll.errors import ArgumentError, CommunicatorError, ShapeError
from mpicoll.parallel.layers.base import restore_shard_marks
from mpicoll.parallel.shards import shard_of
from mpicoll.torch.process_group import ProcessGroupMpicoll

__all__ = ["load", "model_state", "optimizer_state", "save"]

Names: TypeAlias = "Callable[[str], str] | None"


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    extra: Any = None,
    names: Names = None,
    *,
    overwrite: bool = False,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Save `model`, the state of `optimizer`, and `extra` in the folder `path`.

    Collective over `group`. Each rank passes its part of the model and its optimizer. Data that several ranks hold,
    such as data parallel copies, is written once: n bytes in all, a part of them by each rank. Where buffers differ
    among ranks, such as the running statistics of copies, those of one unspecified rank are saved.

    Args:
        path: a folder that all ranks see.
        model: this rank's part of the model.
        optimizer: its optimizer.
        extra: any object that can be pickled, such as the number of steps; that of the first rank is saved.
        names: maps local names of parameters to those of the full model, as described above.
        overwrite: replace a checkpoint in `path`, once the new one is complete in ``<path>.new``. If the job ends
            during the exchange, ``<path>.old`` and ``<path>.new`` are both complete, and the error of :func:`load`
            names them.
        group: by default all ranks of torch's default process group; without one, this process alone.

    Raises:
        ArgumentError: `path` holds a checkpoint and `overwrite` is False, two parameters have one name, or the state of
            the optimizer does not have the layout of its parameters.
        CommunicatorError: there are several ranks without a process group.
        OSError: files can't be written.

        All are raised on all ranks.

    Example:
        ::

            checkpoint.save("step_100", model, optimizer, extra=100)
            step = checkpoint.load("step_100", model, optimizer)
    """
    if world().size > 1 and not dist.is_initialized():
        raise CommunicatorError(
            f"save: there are {world().size} ranks, but torch has no process group; call"
            " torch.distributed.init_process_group('mpicoll') before the model is made"
        )
    path = Path(path)
    first = not dist.is_initialized() or dist.get_rank(group) == 0
    # As the first rank sees it: on file systems of several hosts, others may be late to see it.
    folder, replaced = _gather_objects((str(path), _is_checkpoint(path)), group)[0]
    target, old = (_sibling(path, "new") if replaced else path), _sibling(path, "old")
    named: dict[str, Any] = {}
    state: dict[str, Any] = {}

    def prepare() -> None:
        if str(path) != folder:
            raise ArgumentError(f"save: the first rank saves in {folder}, this one in {path}; pass one path")
        if replaced and not overwrite:
            raise ArgumentError(f"save: {path} holds a checkpoint already; take another folder, or pass overwrite=True")
        if replaced and first:
            shutil.rmtree(target, ignore_errors=True)  # what an earlier attempt has left
        if first:
            state["extra"] = _pickle(extra)
        named.update(_named_values(model, names))

    def collect() -> None:
        cuts = _find_shardings(named)
        state["model"] = _model_state(named, cuts)
        if optimizer is not None:
            state["optimizer"] = _optimizer_state(named, cuts, optimizer)

    def replace() -> None:
        if replaced and first:
            # At each moment a complete checkpoint is there, if not in path.
            shutil.rmtree(old, ignore_errors=True)
            path.rename(old)
            target.rename(path)
            shutil.rmtree(old)

    _run_on_all_ranks("save", prepare, group)
    _run_on_all_ranks("save", collect, group)
    _check_copies(named, group)
    with _translate_errors("save", target):
        dcp.save(state, storage_writer=dcp.FileSystemWriter(target), process_group=group)
    _run_on_all_ranks("save", replace, group)


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    names: Names = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> Any:
    """Load a checkpoint of :func:`save` into `model` and `optimizer`, at any layout.

    Collective over `group`. Parameters and buffers are overwritten in place, and converted where dtypes differ. The
    optimizer need not have made a step: its state becomes that of the checkpoint, bit by bit except for entries that
    must have the dtype of a converted parameter, as do the options of its parameter groups (learning rate, betas, ...).
    Other entries of the checkpoint are ignored. Reads what each rank needs, and unpickles it: load trusted files only.

    Args:
        path: the folder of the checkpoint.
        model: this rank's part of the model.
        optimizer: its optimizer.
        names: maps local names of parameters to those of the full model.
        group: by default all ranks of torch's default process group.

    Returns:
        The `extra` that was saved.

    Raises:
        ArgumentError: there is no checkpoint, or it lacks an entry that `model` or `optimizer` needs, as after a change
            of the model or of the kind of optimizer; on all ranks, with nothing changed.
        ShapeError: an entry has another shape; on all ranks, with nothing changed.
        OSError: files can't be read.
    """
    named: dict[str, Any] = {}
    metadata: list[Metadata] = []
    wanted: dict[str, Any] = {}

    def prepare() -> None:
        metadata.append(_metadata(path))
        named.update(_named_values(model, names))

    def collect() -> None:
        entries = metadata[0].state_dict_metadata
        cuts = _find_shardings(named)
        wanted["model"] = _model_state(named, cuts)
        _check_entries(wanted["model"], entries)
        if optimizer is not None:
            wanted["optimizer"] = _optimizer_template(named, cuts, optimizer, entries)
        if "extra" in entries:
            wanted["extra"] = None

    _run_on_all_ranks("load", prepare, group)
    _run_on_all_ranks("load", collect, group)
    with _translate_errors("load", path):
        dcp.load(wanted, storage_reader=dcp.FileSystemReader(path), process_group=group)
    _restore_non_tensors(model, names, wanted["model"])
    if optimizer is not None:
        _restore_optimizer(named, optimizer, wanted["optimizer"])
    extra = wanted.get("extra")
    return None if extra is None else torch.load(io.BytesIO(extra), weights_only=False)


def model_state(model: nn.Module, names: Names = None) -> dict[str, Any]:
    """Return the parameters and persistent buffers of `model` by their names in the full model, in their own memory.

    Parameters that parallel layers have sharded (:mod:`mpicoll.parallel.shards`) are DTensors over the process group of
    their ranks; the others are plain tensors. DCP saves and loads such a dict at any layout. Collective over the ranks
    of each sharded parameter: one all-gather of 8 bytes for each of them.

    Raises:
        ArgumentError: two parameters have one name.
        CommunicatorError: a parameter is sharded among ranks for which torch has no process group.
        ShapeError: the shards have other sizes than a DTensor's.
    """
    named = _named_values(model, names)
    return _model_state(named, _find_shardings(named))


def optimizer_state(model: nn.Module, optimizer: Optimizer, names: Names = None) -> dict[str, Any]:
    """Return the state of `optimizer` and the options of its parameters.

    The keys are ``state.<name>.<entry>`` and ``param_groups.<name>.<option>``. Entries of the shape of their parameter
    are sharded like it; numbers are the same on all ranks.

    Raises:
        ArgumentError: an entry of a sharded parameter has another shape, an entry is a list (as LBFGS keeps), or a
            parameter is not `model`'s.
    """
    named = _named_values(model, names)
    return _optimizer_state(named, _find_shardings(named), optimizer)


# --- what a model holds, and how it is cut


@dataclass(frozen=True)
class _Sharding:
    """The layout of a parameter on the ranks of a mesh."""

    mesh: DeviceMesh
    dim: int
    extent: int

    def whole(self, shape: torch.Size) -> torch.Size:
        return torch.Size([*shape[: self.dim], self.extent, *shape[self.dim + 1 :]])


_Shardings: TypeAlias = Mapping[str, _Sharding]


def _model_state(named: Mapping[str, Any], cuts: _Shardings) -> dict[str, Any]:
    return {name: _to_dtensor(value, cuts.get(name)) for name, value in named.items()}


def _optimizer_state(named: Mapping[str, Any], cuts: _Shardings, optimizer: Optimizer) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for _, name, param, group in _optimizer_parameters(named, optimizer):
        cut = cuts.get(name)
        for entry, value in optimizer.state.get(param, {}).items():
            alike = isinstance(value, Tensor) and value.shape == param.shape
            if isinstance(value, list | tuple | dict):
                raise ArgumentError(
                    f"optimizer_state: {type(optimizer).__name__} keeps {entry!r}, a {type(value).__name__}, for"
                    f" {name!r}; only tensors and single values can be saved"
                )
            if cut is not None and not alike and isinstance(value, Tensor) and value.numel() > 1:
                raise ArgumentError(
                    f"optimizer_state: {type(optimizer).__name__} keeps {entry!r} of shape {tuple(value.shape)} for"
                    f" {name!r}, of which this rank has a part of shape {tuple(param.shape)}; only entries of that"
                    f" shape and single numbers can be saved (rank {cut.mesh.get_local_rank()} of {cut.mesh.size()})"
                )
            state[f"state.{name}.{entry}"] = _to_dtensor(value, cut if alike else None)
        for option, value in group.items():
            if option != "params":
                state[f"param_groups.{name}.{option}"] = _to_dtensor(value, None)
    return state


def _named_values(model: nn.Module, names: Names) -> dict[str, Any]:
    """Return the parameters, persistent buffers and extra states of `model` by their names in the full model."""
    model = model.module if isinstance(model, DistributedDataParallel) else model
    restore_shard_marks(model)
    named: dict[str, Any] = {}
    local: dict[str, str] = {}
    seen = set()
    for here, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            if id(value) in seen:
                continue
            seen.add(id(value))
        name = here if names is None else names(here)
        if name in named:
            raise ArgumentError(
                f"{here!r} and {local[name]!r} are both named {name!r} in the whole model; on one rank, parameters that"
                " are tied must be one"
            )
        named[name], local[name] = value, here
    return named


def _find_shardings(named: Mapping[str, Any]) -> dict[str, _Sharding]:
    """Return the layouts of the values in `named` that are sharded among several ranks."""
    shards = {name: shard_of(value) for name, value in named.items() if isinstance(value, Tensor)}
    by_comm: dict[Communicator, list[tuple[str, int]]] = {}
    for name, shard in shards.items():
        if shard is not None and shard.comm.size > 1:
            if isinstance(named[name], DTensor):
                raise ArgumentError(
                    f"{name!r} is cut by a parallel layer and is a DTensor besides, as fully_shard makes; this can't be"
                    " saved or loaded here; use DistributedDataParallel, or save whole_state_dict(model)"
                    f" (rank {shard.comm.rank} of {shard.comm.size})"
                )
            by_comm.setdefault(shard.comm, []).append((name, shard.dim))
    cuts = {}
    for comm, cut in by_comm.items():
        mesh = _make_mesh(comm, cut[0][0], named[cut[0][0]].device.type)
        own = torch.tensor([named[name].shape[dim] for name, dim in cut])
        extents = torch.as_tensor(allgather(own.unsqueeze(0), comm=comm)).view(comm.size, len(cut))
        for (name, dim), parts in zip(cut, extents.T.tolist(), strict=True):
            chunk = math.ceil(sum(parts) / comm.size)
            if parts != [max(0, min(chunk, sum(parts) - rank * chunk)) for rank in range(comm.size)]:
                raise ShapeError(
                    f"{name!r} is cut along dim {dim} in parts of {parts}, which no DTensor can be; cut it as"
                    f" torch.chunk does (rank {comm.rank} of {comm.size})"
                )
            cuts[name] = _Sharding(mesh, dim, sum(parts))
    return cuts


def _make_mesh(comm: Communicator, name: str, device_type: str) -> DeviceMesh:
    for group in c10d._world.pg_map:  # noqa: SLF001  torch has no other list of its groups
        if isinstance(group, ProcessGroupMpicoll) and group.comm is comm:
            return DeviceMesh.from_group(group, device_type)
    raise CommunicatorError(
        f"{name!r} is cut among the ranks of {comm!r}, for which torch has no process group; make the grid after"
        " torch.distributed.init_process_group('mpicoll'), or give the layers a process group"
    )


def _to_dtensor(value: Any, cut: _Sharding | None) -> Any:
    if not isinstance(value, Tensor):
        return value
    value = value.detach()
    if cut is None:
        return value
    shape = cut.whole(value.shape)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(value, cut.mesh, [Along(cut.dim)], run_check=False, shape=shape, stride=stride)


def _optimizer_parameters(
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
                    f" {tuple(param.shape)} that is not the model's; make the optimizer from the parameters of the"
                    " model as it is now"
                )
            yield number, name, param, group


# --- what is in a checkpoint

_Entries: TypeAlias = Mapping[str, STORAGE_TYPES]


def _metadata(path: str | os.PathLike[str]) -> Metadata:
    try:
        return dcp.FileSystemReader(path).read_metadata()
    except FileNotFoundError as error:
        others = [str(one) for one in (_sibling(Path(path), "new"), _sibling(Path(path), "old")) if _is_checkpoint(one)]
        hint = f"; there is one in {' and in '.join(others)}, left by a save that was cut off" if others else ""
        raise ArgumentError(f"load: {os.fspath(path)} holds no checkpoint ({error}){hint}") from error


def _sibling(path: Path, which: str) -> Path:
    return path.with_name(f"{path.name}.{which}")


def _is_checkpoint(path: Path) -> bool:
    return (path / ".metadata").exists()  # which is written last


def _check_entries(wanted: Mapping[str, Any], entries: _Entries) -> None:
    """Raise unless the tensors `wanted` can be loaded. DCP checks the other values."""
    tensors = {f"model.{name}": value for name, value in wanted.items() if isinstance(value, Tensor)}
    missing = [key for key in tensors if not isinstance(entries.get(key), TensorStorageMetadata)]
    if missing:
        raise ArgumentError(f"load: the checkpoint lacks {_join_first(missing)}")
    other = [
        f"{key} of shape {tuple(found.size)}, here {tuple(value.shape)}"
        for key, value in tensors.items()
        if isinstance(found := entries[key], TensorStorageMetadata) and found.size != value.shape
    ]
    if other:
        raise ShapeError(f"load: the checkpoint has {_join_first(other)}")


def _join_first(texts: Collection[str]) -> str:
    texts = list(texts)
    return ", ".join(texts[:5]) + (f" and {len(texts) - 5} more" if len(texts) > 5 else "")


def _optimizer_template(
    named: Mapping[str, Any], cuts: _Shardings, optimizer: Optimizer, entries: _Entries
) -> dict[str, Any]:
    """Return the values of the checkpoint for the parameters of `optimizer`, to be overwritten by DCP.

    The options determine the state: where all options are present, the state is what this kind of optimizer needs.
    """
    prefix = "optimizer.state."
    states: dict[str, list[str]] = {}
    for key in entries:
        if key.startswith(prefix):
            name, _, entry = key.removeprefix(prefix).rpartition(".")
            states.setdefault(name, []).append(entry)
    template: dict[str, Any] = {}
    missing = []
    for _, name, param, group in _optimizer_parameters(named, optimizer):
        for option in (key for key in group if key != "params"):
            key = f"param_groups.{name}.{option}"
            if f"optimizer.{key}" not in entries:
                missing.append(f"optimizer.{key}")
            else:
                template[key] = _template_entry(entries[f"optimizer.{key}"])
        saved = entries.get(f"model.{name}")
        for entry in states.get(name, []):
            template[f"state.{name}.{entry}"] = _template_entry(
                entries[f"{prefix}{name}.{entry}"], param, cuts.get(name), saved
            )
    if missing:
        raise ArgumentError(
            f"load: the checkpoint lacks {_join_first(missing)}; was it saved with an optimizer of another kind than"
            f" {type(optimizer).__name__}, or of other parameters?"
        )
    return template


def _template_entry(
    found: STORAGE_TYPES,
    param: Tensor | None = None,
    cut: _Sharding | None = None,
    saved: STORAGE_TYPES | None = None,
) -> Any:
    """Return a value for DCP to overwrite.

    It is a tensor like `param`, with its layout, if the entry has the full shape of `param`. An entry with the dtype of
    the `saved` parameter gets that of `param`, as optimizers require.
    """
    if not isinstance(found, TensorStorageMetadata):
        return None
    dtype = found.properties.dtype
    if param is not None and found.size == (param.shape if cut is None else cut.whole(param.shape)):
        if isinstance(saved, TensorStorageMetadata) and dtype == saved.properties.dtype:
            dtype = param.dtype
        return _to_dtensor(torch.empty_like(param, dtype=dtype), cut)
    return torch.empty(found.size, dtype=dtype)


def _restore_non_tensors(model: nn.Module, names: Names, loaded: Mapping[str, Any]) -> None:
    """Load values that are not tensors, such as extra states, into `model`; tensors were overwritten in place."""
    model = model.module if isinstance(model, DistributedDataParallel) else model
    others = {
        here: loaded[here if names is None else names(here)]
        for here, value in model.state_dict(keep_vars=True).items()
        if not isinstance(value, Tensor)
    }
    if others:
        model.load_state_dict(others, strict=False)


def _restore_optimizer(named: Mapping[str, Any], optimizer: Optimizer, loaded: Mapping[str, Any]) -> None:
    states: dict[str, dict[str, Any]] = {}
    for key, value in loaded.items():
        if key.startswith("state."):
            name, _, entry = key.removeprefix("state.").rpartition(".")
            states.setdefault(name, {})[entry] = value.to_local() if isinstance(value, DTensor) else value
    of_group: dict[int, dict[str, Any]] = {}
    for number, name, param, group in _optimizer_parameters(named, optimizer):
        options = {option: loaded[f"param_groups.{name}.{option}"] for option in group if option != "params"}
        for option, value in of_group.setdefault(number, options).items():
            if not bool(options[option] == value):
                raise ArgumentError(
                    f"load: the checkpoint has {option}={options[option]!r} for {name!r} and {value!r} for others of"
                    f" its parameter group {number}; group parameters as they were when it was saved"
                )
        state = states.get(name, {})
        if options.get("capturable") or options.get("fused"):  # which keep the number of steps beside the parameter
            state = {entry: value.to(param.device) for entry, value in state.items()}
        optimizer.state.pop(param, None)
        if state:
            optimizer.state[param] = state
    for number, options in of_group.items():
        optimizer.param_groups[number].update(options)


# --- ranks that agree


def _run_on_all_ranks(operation: str, collect: Callable[[], None], group: dist.ProcessGroup | None) -> None:
    """Call `collect`, and raise its exception on all ranks: ranks without an error would wait for the others."""
    problem: Exception | None = None
    try:
        collect()
    except Exception as error:  # noqa: BLE001  raised below
        problem = error
    mine = None if problem is None else (_kind(problem), str(problem))
    problems = _gather_objects(mine, group)
    if problem is not None:
        raise problem
    for rank, other in enumerate(problems):
        if other is not None:
            raise other[0](f"{operation}: on rank {rank}: {other[1]}")


def _kind(problem: Exception) -> type[Exception]:
    kinds = (ShapeError, ArgumentError, CommunicatorError)
    return next((kind for kind in kinds if isinstance(problem, kind)), RuntimeError)


def _gather_objects(mine: Any, group: dist.ProcessGroup | None) -> list[Any]:
    if not dist.is_initialized():
        return [mine]
    all_of_them: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(all_of_them, mine, group=group)
    return all_of_them


def _check_copies(named: Mapping[str, Any], group: dist.ProcessGroup | None) -> None:
    """Raise if ranks hold parameters of one name that are not copies of each other: one of them would be lost.

    Copies may differ by rounding, so this compares their shapes, and their sums approximately.
    """
    if not dist.is_initialized():
        return
    mine = {}
    for name, value in named.items():
        if isinstance(value, nn.Parameter) and not isinstance(value, DTensor) and value.is_floating_point():
            shard = shard_of(value)
            size = torch.linalg.vector_norm(value.detach(), dtype=torch.float64).item()
            total = value.detach().sum(dtype=torch.float64).item()
            mine[name, 0 if shard is None else shard.comm.rank] = (tuple(value.shape), total, size)
    first: dict[Any, tuple[int, Any]] = {}
    for rank, theirs in enumerate(_gather_objects(mine, group)):
        for key, sketch in theirs.items():
            owner, other = first.setdefault(key, (rank, sketch))
            if sketch[0] != other[0] or abs(sketch[1] - other[1]) > 1e-2 * max(sketch[2], other[2]):
                raise ArgumentError(
                    f"save: ranks {owner} and {rank} hold different parameters of the name {key[0]!r}, of shapes"
                    f" {other[0]} and {sketch[0]} and sums {other[1]:.6g} and {sketch[1]:.6g}; stages of a pipeline"
                    " need names= that tell their parameters apart, and copies must be equal"
                )


@contextmanager
def _translate_errors(operation: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn failures of DCP into OSError, and suppress its warning about a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        try:
            yield
        except CheckpointException as error:
            rank, (first, _) = next(iter(error.failures.items()))
            raise OSError(f"{operation}: {os.fspath(path)}: {type(first).__name__} on rank {rank}: {first}") from error


def _pickle(extra: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(extra, buffer)
    return buffer.getvalue()
