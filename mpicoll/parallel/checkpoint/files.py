"""Saving and loading of a checkpoint: the folder, and its replacement."""

from __future__ import annotations

import io
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.serialization import default_restore_location

from mpicoll.engine.world import world
from mpicoll.errors import ArgumentError, CommunicatorError
from mpicoll.parallel.checkpoint.agreement import check_copies, gather_objects, run_on_all_ranks
from mpicoll.parallel.checkpoint.state import (
    ExtraState,
    Names,
    build_model_state,
    build_optimizer_state,
    collect_named_values,
    find_shardings,
)
from mpicoll.parallel.checkpoint.template import (
    check_entries,
    make_optimizer_template,
    merge_options,
    restore_optimizer,
)


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
        >>> import tempfile
        >>> model = torch.nn.Linear(2, 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     mpicoll.parallel.checkpoint.save(f"{folder}/step-1", model, extra={"step": 1})
        ...     mpicoll.parallel.checkpoint.load(f"{folder}/step-1", model)
        {'step': 1}
    """
    if world().size > 1 and not dist.is_initialized():
        raise CommunicatorError(
            f"save: there are {world().size} ranks, but torch has no process group; call"
            " torch.distributed.init_process_group('mpicoll') before the model is created"
        )
    path = Path(path)
    first = not dist.is_initialized() or dist.get_rank(group) == 0
    # As the first rank sees it: on file systems of several hosts, others may be late to see it.
    folder, replaced = gather_objects((str(path), _is_checkpoint(path)), group)[0]
    target, old = (_add_suffix(path, "new") if replaced else path), _add_suffix(path, "old")
    named: dict[str, Any] = {}
    state: dict[str, Any] = {}

    def prepare() -> None:
        if str(path) != folder:
            raise ArgumentError(
                f"save: path is {folder} on the first rank and {path} on this rank; pass the same path on all ranks"
            )
        if replaced and not overwrite:
            raise ArgumentError(
                f"save: {path} already contains a checkpoint; choose another folder, or pass overwrite=True"
            )
        if replaced and first:
            shutil.rmtree(target, ignore_errors=True)  # left by an interrupted save
        if first:
            state["extra"] = _pickle(extra)
        named.update(collect_named_values(model, names))

    def collect() -> None:
        shardings = find_shardings(named)
        others = {name: one for name, one in named.items() if isinstance(one, ExtraState)}
        state["model"] = build_model_state({name: named[name] for name in named if name not in others}, shardings)
        state["extra_states"] = {name: _pickle(one.value) for name, one in others.items()}
        if optimizer is not None:
            state["optimizer"] = build_optimizer_state(named, shardings, optimizer)

    def replace() -> None:
        if replaced and first:
            # At each moment a complete checkpoint is there, if not in path.
            shutil.rmtree(old, ignore_errors=True)
            path.rename(old)
            target.rename(path)
            shutil.rmtree(old)

    run_on_all_ranks("save", prepare, group)
    run_on_all_ranks("save", collect, group)
    check_copies(named, group)
    with _translate_errors("save", target):
        dcp.save(state, storage_writer=dcp.FileSystemWriter(target), process_group=group)
    run_on_all_ranks("save", replace, group)


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
    Tensors in extra states of modules are passed on the model's device, or on the CPU if they were saved from it. Other
    entries of the checkpoint are ignored. Each rank reads only its entries, which are unpickled: load trusted files
    only.

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
            of the model or of the kind of optimizer, or has several options for the parameters of one group; on all
            ranks, with nothing changed.
        ShapeError: an entry has another shape; on all ranks, with nothing changed.
        OSError: files can't be read.

    Example:
        >>> import tempfile
        >>> model = torch.nn.Linear(2, 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     mpicoll.parallel.checkpoint.save(f"{folder}/last", model, extra="note")
        ...     mpicoll.parallel.checkpoint.load(f"{folder}/last", model)
        'note'
    """
    named: dict[str, Any] = {}
    others: dict[str, ExtraState] = {}
    metadata: list[Metadata] = []
    wanted: dict[str, Any] = {}
    options: dict[int, dict[str, Any]] = {}

    def prepare() -> None:
        metadata.append(_read_metadata(path))
        named.update(collect_named_values(model, names))
        others.update((name, one) for name, one in named.items() if isinstance(one, ExtraState))

    def collect() -> None:
        entries = metadata[0].state_dict_metadata
        shardings = find_shardings(named)
        wanted["extra_states"] = {name: None for name in others if f"extra_states.{name}" in entries}
        # Extra states of checkpoints of torch, and of older versions, are among the parameters.
        in_place = {name: value for name, value in named.items() if name not in wanted["extra_states"]}
        wanted["model"] = build_model_state(in_place, shardings)
        check_entries(wanted["model"], entries)
        if optimizer is not None:
            template, wanted["optimizer"] = make_optimizer_template(named, shardings, optimizer, entries)
            # Before the model is overwritten, because they may not fit.
            with _translate_errors("load", path):
                read = {"optimizer": template}
                dcp.load(read, storage_reader=dcp.FileSystemReader(path), no_dist=True)
            options.update(merge_options(named, optimizer, read["optimizer"]))
        if "extra" in entries:
            wanted["extra"] = None

    run_on_all_ranks("load", prepare, group)
    run_on_all_ranks("load", collect, group)
    with _translate_errors("load", path):
        dcp.load(wanted, storage_reader=dcp.FileSystemReader(path), process_group=group)
    if others:
        _restore_extra_states(model, named, wanted)
    if optimizer is not None:
        restore_optimizer(named, optimizer, wanted["optimizer"], options)
    extra = wanted.get("extra")
    return None if extra is None else torch.load(io.BytesIO(extra), weights_only=False)


def _restore_extra_states(model: nn.Module, named: Mapping[str, Any], loaded: Mapping[str, Any]) -> None:
    model = model.module if isinstance(model, DistributedDataParallel) else model
    device = next((str(one.device) for one in named.values() if isinstance(one, Tensor)), "cpu")

    def place(storage: Any, saved: str) -> Any:
        # The device of the rank that has saved it may not be there, or be another rank's.
        return default_restore_location(storage, "cpu" if saved == "cpu" else device)

    states = {}
    for name, one in named.items():
        if isinstance(one, ExtraState):
            pickled = loaded["extra_states"].get(name)
            states[one.name] = (
                loaded["model"][name]
                if pickled is None
                else torch.load(io.BytesIO(pickled), map_location=place, weights_only=False)
            )
    model.load_state_dict(states, strict=False)


def _read_metadata(path: str | os.PathLike[str]) -> Metadata:
    try:
        return dcp.FileSystemReader(path).read_metadata()
    except FileNotFoundError as error:
        others = [
            str(one) for one in (_add_suffix(Path(path), "new"), _add_suffix(Path(path), "old")) if _is_checkpoint(one)
        ]
        hint = f"; an interrupted save left a checkpoint in {' and in '.join(others)}" if others else ""
        raise ArgumentError(f"load: {os.fspath(path)} does not contain a checkpoint ({error}){hint}") from error


def _add_suffix(path: Path, which: str) -> Path:
    return path.with_name(f"{path.name}.{which}")


def _is_checkpoint(path: Path) -> bool:
    return (path / ".metadata").exists()  # which is written last


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
