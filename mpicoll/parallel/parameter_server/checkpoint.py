"""State of the servers as a checkpoint of torch (DCP), which any number of servers can load.

The keys are those of :mod:`mpicoll.parallel.checkpoint`: ``model.<name>``, ``optimizer.state.<name>.<entry>`` and
``optimizer.param_groups.<name>.<option>``, with the shapes of the model, so that other programs can read the weights.
A part of a tensor, which is a range of the flat tensor, is saved as the boxes of which it consists.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from mpicoll.collectives.objects import allgather_object
from mpicoll.engine.core.communicator import Communicator
from mpicoll.errors import ArgumentError, CommunicationError
from mpicoll.parallel.parameter_server.plan import Part, TensorSpec

if TYPE_CHECKING:
    from mpicoll.parallel.parameter_server.torch_updater import TorchUpdater


def _boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield offsets and sizes of boxes that consist of elements [start, stop) of a tensor, in their order."""
    if not shape:
        yield (), ()
        return
    row = 1
    for extent in shape[1:]:
        row *= extent
    (first, begin), (last, end) = divmod(start, row), divmod(stop, row)
    zeros = (0,) * (len(shape) - 1)
    if first == last:
        yield from (((first, *offsets), (1, *sizes)) for offsets, sizes in _boxes(shape[1:], begin, end))
        return
    if begin:
        yield from (((first, *offsets), (1, *sizes)) for offsets, sizes in _boxes(shape[1:], begin, row))
        first += 1
    if first < last:
        yield (first, *zeros), (last - first, *shape[1:])
    if end:
        yield from (((last, *offsets), (1, *sizes)) for offsets, sizes in _boxes(shape[1:], 0, end))


class _PartialTensor(Tensor):
    """Tensor of which this rank has some boxes. DCP calls the methods between double underscores."""

    boxes: dict[tuple[int, ...], Tensor]

    @classmethod
    def make(cls, spec: TensorSpec, dtype: torch.dtype) -> _PartialTensor:
        # One element in memory, with the shape of the whole.
        made = torch.zeros((), dtype=dtype).expand(spec.shape).as_subclass(cls)
        made.boxes = {}
        return made

    def add_part(self, spec: TensorSpec, part: Part, values: Tensor) -> None:
        """Add the `values` of a part, whose memory is that of the boxes."""
        flat, at = values.detach().view(-1), 0
        for offsets, sizes in _boxes(spec.shape, part.start, part.stop):
            count = torch.Size(sizes).numel()
            self.boxes[offsets] = flat[at : at + count].view(sizes)
            at += count

    def _chunks(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(key), one.size()) for key, one in self.boxes.items()]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(key), index),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(key), one.size()),
                    properties=TensorProperties.create_from_tensor(one),
                    size=self.size(),
                ),
            )
            for index, (key, one) in enumerate(self.boxes.items())
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self._chunks()

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.boxes[tuple(index.offset or ())]


def build_state(updater: TorchUpdater, updates: int) -> dict[str, Any]:
    """Return the state of a server, in its own memory."""
    state: dict[str, Any] = {"server.updates": updates}
    if updater.scheduler is not None:
        # A dict would be saved entry by entry.
        state["server.scheduler"] = pickle.dumps(updater.scheduler.state_dict())

    def add(key: str, spec: TensorSpec, part: Part, values: Tensor) -> None:
        if key not in state:
            state[key] = _PartialTensor.make(spec, values.dtype)
        state[key].add_part(spec, part, values)

    for spec, part, parameter in updater.list_parts():
        add(f"model.{spec.name}", spec, part, parameter)
        for entry, value in updater.optimizer.state.get(parameter, {}).items():
            key = f"optimizer.state.{spec.name}.{entry}"
            if isinstance(value, Tensor) and value.is_sparse:
                # As the momentum of sparse gradients.
                value = value.to_dense()
            if isinstance(value, Tensor) and value.shape == parameter.shape and parameter.dim():
                add(key, spec, part, value)
            else:
                state.setdefault(key, value)
    for group in [] if updater.optimizer is None else updater.optimizer.param_groups:
        names = {updater.spec_of(parameter).name for parameter in group["params"]}
        for option, value in group.items():
            if option not in ("params", "param_names"):
                state.update((f"optimizer.param_groups.{name}.{option}", value) for name in names)
    return state


def save(path: Path, updater: TorchUpdater, updates: int, comm: Communicator) -> None:
    """Save the state of all servers. Collective over `comm`, the servers."""
    planner, writer = dcp.DefaultSavePlanner(), dcp.FileSystemWriter(path)
    coordinator = comm.rank == 0

    def plan() -> Any:
        if coordinator and (path / ".metadata").exists():
            raise ArgumentError(f"ParameterServer.save: {path} already contains a checkpoint; choose another folder")
        planner.set_up_planner(build_state(updater, updates), writer.storage_meta(), coordinator)
        writer.set_up_storage_writer(coordinator)
        return writer.prepare_local_plan(planner.create_local_plan())

    plans = _exchange(comm, plan)
    # Each server makes the same plan of all, so it need not be sent.
    merged, metadata = planner.create_global_plan(plans)
    final = planner.finish_plan(writer.prepare_global_plan(merged)[comm.rank])
    results = _exchange(comm, lambda: writer.write_data(final, planner).wait())
    _exchange(comm, lambda: writer.finish(metadata, results) if coordinator else None)


def _exchange(comm: Communicator, action: Any) -> list[Any]:
    """Return what `action` returns on each server. If it raises on one, all servers raise."""
    failure, value = None, None
    try:
        value = action()
    except Exception as error:  # noqa: BLE001  raised below
        failure = error
    found = allgather_object((None if failure is None else f"{type(failure).__name__}: {failure}", value), comm=comm)
    if failure is not None:
        raise failure
    for rank, (text, _) in enumerate(found):
        if text is not None:
            raise CommunicationError(f"ParameterServer.save: server {rank} has failed: {text}")
    return [one for _, one in found]


def load(path: str | os.PathLike[str], updater: TorchUpdater) -> int:
    """Load the state of this server. Return the number of updates."""
    reader = dcp.FileSystemReader(path)
    try:
        metadata = reader.read_metadata()
    except FileNotFoundError as error:
        raise ArgumentError(
            f"ParameterServer.load: {os.fspath(path)} does not contain a checkpoint ({error})"
        ) from error
    entries = metadata.state_dict_metadata
    # The entries of the optimizer's state may come with its first update.
    for key, value in build_state(updater, 0).items():
        entry = entries.get(key)
        if entry is None and not key.startswith("optimizer.state."):
            raise ArgumentError(
                f"ParameterServer.load: the checkpoint in {os.fspath(path)} lacks {key}; it is of another model,"
                " optimizer or scheduler"
            )
        shape = tuple(getattr(entry, "size", ()))
        if isinstance(value, Tensor) and shape != tuple(value.shape):
            raise ArgumentError(
                f"ParameterServer.load: {key} has shape {shape} in the checkpoint in {os.fspath(path)}, and"
                f" {tuple(value.shape)} here"
            )
    _make_optimizer_state(updater, entries)
    state = build_state(updater, 0)
    # The steps of dcp.load, which warns where torch has no process group.
    planner = dcp.DefaultLoadPlanner()
    planner.set_up_planner(state, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plans = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    reader.read_data(planner.finish_plan(reader.prepare_global_plan(plans)[0]), planner).wait()
    _restore(updater, state)
    updates: int = state["server.updates"]
    return updates


def _make_optimizer_state(updater: TorchUpdater, entries: Any) -> None:
    """Give the optimizer of this server entries of the kinds that the checkpoint has."""
    for spec, _, parameter in updater.list_parts():
        prefix = f"optimizer.state.{spec.name}."
        for key, entry in entries.items():
            if key.startswith(prefix) and "." not in key[len(prefix) :]:
                size = getattr(entry, "size", None)
                value: Any = None
                if size is not None:
                    elementwise = tuple(size) == spec.shape and bool(spec.shape)
                    value = torch.zeros(parameter.shape if elementwise else size, dtype=entry.properties.dtype)
                updater.optimizer.state[parameter][key[len(prefix) :]] = value


def _restore(updater: TorchUpdater, state: dict[str, Any]) -> None:
    for spec, _, parameter in updater.list_parts():
        entries = updater.optimizer.state.get(parameter, {})
        for entry in entries:
            value = state[f"optimizer.state.{spec.name}.{entry}"]
            if not isinstance(value, _PartialTensor):
                # Each part has its own.
                entries[entry] = value.clone() if isinstance(value, Tensor) else value
    for group in [] if updater.optimizer is None else updater.optimizer.param_groups:
        if not group["params"]:
            continue  # all of them are on other servers
        name = updater.spec_of(next(iter(group["params"]))).name
        for option in group:
            if option not in ("params", "param_names"):
                group[option] = state[f"optimizer.param_groups.{name}.{option}"]
    if updater.scheduler is not None:
        updater.scheduler.load_state_dict(pickle.loads(state["server.scheduler"]))
