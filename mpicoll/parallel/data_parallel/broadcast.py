"""Values of one rank on all ranks: parameters, and the state of an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from mpicoll.collectives.bcast import bcast
from mpicoll.collectives.objects import bcast_object
from mpicoll.engine.core.communicator import Communicator
from mpicoll.errors import ArgumentError, DTypeError, ShapeError
from mpicoll.parallel.data_parallel.agreement import check_agreement, check_optimizer, describe_tensors, list_named
from mpicoll.parallel.gradients import get_replica_communicator, iterate_buckets
from mpicoll.parallel.groups import describe_rank
from mpicoll.torch.tensors import overlaps_itself


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any]], root: int = 0, *, group: Any = None
) -> None:
    """Copy the tensors of rank `root` to all ranks, in place. Collective.

    Tensors are sent in buckets of 25 MiB of one dtype and device.

    Args:
        params: ``model.state_dict()``, which includes buffers, or ``model.named_parameters()``: the same names, shapes
            and dtypes on all ranks.
        root: the rank whose values are sent, the same on all ranks.
        group: the data parallel ranks, by default the ``data`` and ``context`` axes of the grid in use; without a grid,
            all ranks.

    Raises:
        ArgumentError, DTypeError: a value is not a dense tensor; raised before any message leaves.
        ShapeError: elements of a tensor share memory (an expanded tensor); raised before any message leaves.
        MismatchError: the names, shapes or dtypes differ between ranks; raised on all ranks.

    Example:
        ::

            model = nn.Linear(4, 2)
            broadcast_parameters(model.state_dict())
    """
    comm = get_replica_communicator(group)
    named = list_named("broadcast_parameters", params, comm)
    for name, one in named:
        if not isinstance(one, Tensor):
            raise ArgumentError(
                f"broadcast_parameters: {name!r} is a {type(one).__name__}, not a tensor; leave it out, and pass it to"
                f" broadcast_object {describe_rank(comm)}"
            )
        if isinstance(one, DTensor) or one.layout is not torch.strided:
            raise DTypeError(
                f"broadcast_parameters: {name!r} is a {'DTensor' if isinstance(one, DTensor) else one.layout} tensor;"
                f" pass dense tensors, which have the same shape on all ranks {describe_rank(comm)}"
            )
        if overlaps_itself(one):
            raise ShapeError(
                f"broadcast_parameters: elements of {name!r} share memory (an expanded tensor), so it can't be written"
                f" to; let the model have a clone() of it, or leave it out {describe_rank(comm)}"
            )
    check_agreement(
        "broadcast_parameters", comm, describe_tensors(named), "pass the state_dict of the same model on all ranks"
    )
    _bcast_tensors([one.detach() for _, one in named], root, comm)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root: int = 0, *, group: Any = None) -> None:
    """Load the state of the optimizer of rank `root` into the optimizers of all ranks. Collective.

    The state is all that ``optimizer.state_dict()`` returns: tensors, numbers, options of parameter groups, and any
    other values that :mod:`pickle` supports. The optimizers of other ranks need no state: neither step nor gradient is
    needed to create it. Tensors keep their dtypes, other than by ``load_state_dict``, which gives them those of the
    parameters.

    Args:
        optimizer: of the same parameters, in the same groups, on all ranks.
        root: the rank whose state is sent, the same on all ranks.
        group: as of :func:`broadcast_parameters`.

    Raises:
        ArgumentError: `optimizer` is not one; raised before any message leaves.
        MismatchError: the parameters differ between ranks; raised on all ranks.
        DTypeError, ArgumentError: a value of the state can't be pickled; raised on all ranks.

    Example:
        ::

            optimizer = torch.optim.AdamW(nn.Linear(4, 2).parameters())
            broadcast_optimizer_state(optimizer)
    """
    comm = get_replica_communicator(group)
    check_optimizer("broadcast_optimizer_state", optimizer, comm)
    facts = describe_tensors(
        (f"group {number}, parameter {index}", one)
        for number, of_group in enumerate(optimizer.param_groups)
        for index, one in enumerate(of_group["params"])
    )
    check_agreement("broadcast_optimizer_state", comm, facts, "make the same optimizer on all ranks")
    is_root = comm.rank == root
    tensors: list[Tensor] = []
    state = _map_leaves(optimizer.state_dict(), lambda one: _take_out(one, tensors)) if is_root else None
    state = bcast_object(state, root, comm=comm)
    if not is_root:
        device = next((one.device for of_group in optimizer.param_groups for one in of_group["params"]), "cpu")
        state = _map_leaves(state, lambda one: _make_tensor(one, tensors, device))
    _bcast_tensors(tensors, root, comm)
    if not is_root:
        _load(optimizer, state)


def _load(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load `state` as it is, although torch casts it to the dtypes of the parameters.

    The hooks see what torch's own method loads also where a class of optimizers extends it.
    """
    given: dict[str, Any] = {}
    before = optimizer.register_load_state_dict_pre_hook(lambda _, loaded: given.update(loaded))
    after = optimizer.register_load_state_dict_post_hook(lambda one: _restore_dtypes(one, given))
    try:
        optimizer.load_state_dict(state)
    finally:
        before.remove()
        after.remove()


def _restore_dtypes(optimizer: torch.optim.Optimizer, given: Mapping[str, Any]) -> None:
    """Replace the tensors of the state that torch has cast by those of `given`, from which it was loaded."""
    numbers = [number for of_group in given["param_groups"] for number in of_group["params"]]
    parameters = [one for of_group in optimizer.param_groups for one in of_group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        if number in given["state"]:
            cast, structure = tree_flatten(optimizer.state[parameter])
            exact, loaded = tree_flatten(given["state"][number])
            if structure == loaded:  # else the class has its own form of the state
                leaves = [_restore_dtype(left, right) for left, right in zip(cast, exact, strict=True)]
                optimizer.state[parameter] = tree_unflatten(leaves, structure)


def _restore_dtype(cast: Any, exact: Any) -> Any:
    is_other = isinstance(cast, Tensor) and isinstance(exact, Tensor) and cast.dtype != exact.dtype
    return exact.to(cast.device) if is_other else cast


class _Place(NamedTuple):
    """Place of a tensor in a state that is sent without it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_device: bool


def _take_out(value: Any, tensors: list[Tensor]) -> Any:
    # A sparse tensor, such as the momentum of an embedding, is sent in the pickled state.
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return value
    tensors.append(value.detach())
    return _Place(tuple(value.shape), value.dtype, not value.is_cpu)


def _make_tensor(value: Any, tensors: list[Tensor], device: Any) -> Any:
    if not isinstance(value, _Place):
        return value
    tensors.append(torch.empty(value.shape, dtype=value.dtype, device=device if value.on_device else "cpu"))
    return tensors[-1]


def _map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return a copy of `value` with `function` applied to all that is not a dict, list or tuple, in order."""
    if isinstance(value, dict):
        return {key: _map_leaves(one, function) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_map_leaves(one, function) for one in value)
    return function(value)


def _bcast_tensors(tensors: list[Tensor], root: int, comm: Communicator) -> None:
    """Copy `tensors` of rank `root` to those of all ranks, which have the same shapes and dtypes."""
    for bucket in iterate_buckets(tensors):
        flat = torch.cat([one.reshape(-1) for one in bucket])
        bcast(flat, root, out=flat, comm=comm)
        if comm.rank != root:
            for one, part in zip(bucket, flat.split([one.numel() for one in bucket]), strict=True):
                one.copy_(part.view(one.shape))
