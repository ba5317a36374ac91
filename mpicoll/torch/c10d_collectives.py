"""torch's collectives in terms of the native ones.

Each function checks its arguments, which raises ShapeError, DTypeError, RankError or DeviceError before any message is
sent, and returns a Task that runs the collective. Ranks and roots are ranks of the communicator. This module only
converts between the conventions of torch and those of MPI.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from mpicoll.buffers.ops import OpLike, premul_sum
from mpicoll.collectives import (
    allgather,
    allreduce,
    alltoall,
    bcast,
)
from mpicoll.collectives import (
    barrier as barriers,
)
from mpicoll.collectives import (
    gather as gathers,
)
from mpicoll.collectives import (
    reduce as reduces,
)
from mpicoll.collectives import (
    reduce_scatter as reduce_scatters,
)
from mpicoll.collectives import (
    scatter as scatters,
)
from mpicoll.collectives.arguments import adds_rank_to_errors, check_rank, make_counts_key
from mpicoll.collectives.barrier import NOTHING
from mpicoll.collectives.call import UNCACHED, make_task
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.core.operation import Operation
from mpicoll.engine.diagnostics.flight_recorder import Call
from mpicoll.engine.dispatch import Task
from mpicoll.errors import DTypeError, ShapeError
from mpicoll.torch.tensors import (
    Restore,
    check_list,
    check_numel,
    check_pair,
    check_plain,
    copy_into,
    divide_integers,
    flatten_input,
    flatten_output,
    join_inputs,
    join_outputs,
    prepare_in_place,
    protect_inputs,
)

# Keyed by hash, which is the number of the operation: a ReduceOp and the corresponding member of its enumeration are
# not equal as keys, and converting one to the other takes longer than reducing a small tensor.
_OPS = {
    hash(dist.ReduceOp.SUM): "sum",
    hash(dist.ReduceOp.AVG): "avg",
    hash(dist.ReduceOp.PRODUCT): "prod",
    hash(dist.ReduceOp.MIN): "min",
    hash(dist.ReduceOp.MAX): "max",
    hash(dist.ReduceOp.BAND): "band",
    hash(dist.ReduceOp.BOR): "bor",
    hash(dist.ReduceOp.BXOR): "bxor",
    hash(dist.ReduceOp.PREMUL_SUM): "premul_sum",
}

# In torch the sum and the product of bool tensors are bool.
_BOOL_OPS = {"sum": "lor", "prod": "land"}

_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
"""Integer dtypes for which AVG is computed as a sum and a division."""


def get_op_name(op: Any) -> str | None:
    """Return the name of the native operation for torch's `op` where that does not depend on the dtype, as an entry of
    the cache of calls; None if there is none."""
    return _OPS.get(hash(op)) if isinstance(op, (dist.ReduceOp, dist.ReduceOp.RedOpType)) else None


def convert_reduce_op(operation: str, op: Any, dtype: torch.dtype) -> OpLike:
    """Return the native operation for torch's `op` (a ReduceOp, or one of its members) and `dtype`.

    Raises DTypeError if `op` is not a reduction that mpicoll supports.
    """
    name = get_op_name(op)
    if name is None:
        raise DTypeError(
            f"{operation}: {op!r} is not supported; use SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR or PREMUL_SUM of"
            " torch.distributed.ReduceOp"
        )
    if name == "premul_sum":
        # torch exposes the factor only in the pickle state.
        factor = op.__getstate__()[1]
        number = factor.item() if isinstance(factor, torch.Tensor) else factor
        # torch accepts only floats and tensors as factors, so an integer factor arrives as a float.
        whole = not (dtype.is_floating_point or dtype.is_complex) and isinstance(number, float) and number.is_integer()
        return premul_sum(int(number) if whole else number)
    return _BOOL_OPS.get(name, name) if dtype is torch.bool else name


def _bind_task(
    comm: CommunicatorCore, name: str, x: Any, out: Any, prepare: Callable[..., Operation], **options: Any
) -> Task:
    """Return the task of ``prepare(comm, x=x, out=out, **options)``, and cache it for later calls with this `name`.

    Reductions whose op is not a name are not cached.
    """

    def describe(x: Any, out: Any) -> Operation:
        return prepare(comm, x=x, out=out, algorithm=None, **options)

    op = options.get("op")
    key = (
        (name, op, options.get("root"), make_counts_key(options.get("counts")))
        if op is None or type(op) is str
        else (name, UNCACHED)
    )
    return make_task(comm, key, x, out, describe)


def chain_tasks(bodies: Sequence[Task]) -> Task:
    """Return a task that runs `bodies` in this order. If they may share memory, see ``protect_inputs``."""

    def run() -> None:
        for one in bodies:
            one()

    operations = [operation for one in bodies for operation in one.operations]
    return Task(run, Call("several", parts=tuple(one.call for one in bodies)), *operations)


def _add_restore(body: Task, restore: Restore) -> Task:
    if restore is None:
        return body

    def run() -> None:
        body()
        restore()

    return Task(run, body.call, *body.operations)


def _convert_reduction(
    operation: str, op: Any, result: torch.Tensor, restore: Restore, comm: CommunicatorCore
) -> tuple[OpLike, Restore]:
    """Return the native operation, and the function that postprocesses `result` (or None).

    AVG of integers is their sum (which wraps), divided and rounded towards zero, as NCCL computes it and as Lightning
    computes it with gloo, which rejects AVG. The native operations also reject AVG of integers, since a mean is not an
    integer.
    """
    native = convert_reduce_op(operation, op, result.dtype)
    if native != "avg" or result.dtype not in _INTEGERS:
        return native, restore

    def divide() -> None:
        divide_integers(result, comm.size)
        if restore is not None:
            restore()

    return "sum", divide


@adds_rank_to_errors
def all_reduce(comm: CommunicatorCore, tensor: torch.Tensor, op: Any) -> Task:
    """Reduce `tensor` in place."""
    plain, restore = prepare_in_place(tensor)
    native, restore = _convert_reduction("all_reduce", op, plain, restore, comm)
    return _add_restore(_bind_task(comm, "all_reduce", plain, plain, allreduce.prepare, op=native), restore)


@adds_rank_to_errors
def all_reduce_coalesced(comm: CommunicatorCore, tensors: Sequence[torch.Tensor], op: Any) -> Task:
    """Reduce each of `tensors` in place. Memory that several of them share is reduced once."""
    for one in tensors:
        check_plain("all_reduce_coalesced", one)
    tasks = []
    for source, target in zip(protect_inputs(tensors, [[one] for one in tensors]), tensors, strict=True):
        back = None if source is target else partial(copy_into, target.detach(), source)
        tasks.append(_add_restore(all_reduce(comm, source, op), back))
    return chain_tasks(tasks)


@adds_rank_to_errors
def reduce(comm: CommunicatorCore, tensor: torch.Tensor, op: Any, root: int) -> Task:
    """Reduce `tensor` in place at the root. On other ranks `tensor` does not change."""
    check_rank("reduce", "dst", root, comm)
    plain, restore = prepare_in_place(tensor)
    out = plain if comm.rank == root else None
    native, divided = _convert_reduction("reduce", op, plain, restore, comm)
    restore = restore if out is None else divided
    return _add_restore(_bind_task(comm, "reduce", plain, out, reduces.prepare, op=native, root=root), restore)


@adds_rank_to_errors
def broadcast(comm: CommunicatorCore, tensor: torch.Tensor, root: int) -> Task:
    """Broadcast the root's `tensor` in place."""
    check_rank("broadcast", "src", root, comm)
    plain, restore = prepare_in_place(tensor)
    return _add_restore(_bind_task(comm, "broadcast", plain, plain, bcast.prepare, root=root), restore)


def barrier(comm: CommunicatorCore) -> Task:
    return _bind_task(comm, "barrier", NOTHING, None, lambda comm, **options: barriers.prepare(comm, None))


@adds_rank_to_errors
def all_gather(comm: CommunicatorCore, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Task:
    """Gather rank i's tensor into ``outputs[i]``.

    Tensors may differ in size from rank to rank, if the outputs on all ranks have these sizes.
    """
    check_list("all_gather", "the output list", outputs, comm.size)
    check_pair("all_gather", tensor, outputs[0])
    sizes = [one.numel() for one in outputs]
    check_numel("all_gather", "the input", tensor.numel(), sizes[comm.rank])
    whole, restore = join_outputs("all_gather", outputs)
    counts = sizes if len(set(sizes)) > 1 else None
    return _add_restore(
        _bind_task(comm, "all_gather", flatten_input(tensor), whole, allgather.prepare, counts=counts), restore
    )


@adds_rank_to_errors
def all_gather_coalesced(
    comm: CommunicatorCore, outputs: Sequence[Sequence[torch.Tensor]], tensors: Sequence[torch.Tensor]
) -> Task:
    """Gather rank i's ``tensors[j]`` into ``outputs[i][j]``."""
    if len(outputs) != comm.size or any(len(one) != len(tensors) for one in outputs):
        raise ShapeError(
            f"all_gather_coalesced: outputs must be a list for each of the {comm.size} ranks, each with {len(tensors)}"
            f" tensors, got lists of {[len(one) for one in outputs]}"
        )
    targets = list(zip(*outputs, strict=True))
    for one, several in zip(tensors, targets, strict=True):
        check_plain("all_gather_coalesced", one, *several)
    inputs = protect_inputs(tensors, targets)
    return chain_tasks([all_gather(comm, several, one) for several, one in zip(targets, inputs, strict=True)])


@adds_rank_to_errors
def all_gather_single(comm: CommunicatorCore, output: torch.Tensor, tensor: torch.Tensor) -> Task:
    """Gather the tensors of all ranks into `output`, in rank order."""
    check_pair("all_gather_single", tensor, output)
    check_numel("all_gather_single", "the output", output.numel(), tensor.numel() * comm.size)
    whole, restore = flatten_output("all_gather_single", output)
    return _add_restore(
        _bind_task(comm, "all_gather_single", flatten_input(tensor), whole, allgather.prepare, counts=None), restore
    )


@adds_rank_to_errors
def all_gather_single_coalesced(
    comm: CommunicatorCore, outputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
) -> Task:
    """Run :func:`all_gather_single` for each pair."""
    inputs = _check_pairs("all_gather_single_coalesced", outputs, tensors)
    return chain_tasks([all_gather_single(comm, output, one) for output, one in zip(outputs, inputs, strict=True)])


@adds_rank_to_errors
def gather(comm: CommunicatorCore, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, root: int) -> Task:
    """Gather rank i's tensor into the root's ``outputs[i]``. All tensors have the same size."""
    check_rank("gather", "dst", root, comm)
    check_plain("gather", tensor)
    whole, restore = None, None
    if comm.rank == root:
        check_list("gather", "the output list", outputs, comm.size)
        check_pair("gather", tensor, outputs[0])
        for i, one in enumerate(outputs):
            check_numel("gather", f"output {i}", one.numel(), tensor.numel())
        whole, restore = join_outputs("gather", outputs)
    return _add_restore(
        _bind_task(comm, "gather", flatten_input(tensor), whole, gathers.prepare, root=root, counts=None), restore
    )


@adds_rank_to_errors
def scatter(comm: CommunicatorCore, output: torch.Tensor, tensors: Sequence[torch.Tensor], root: int) -> Task:
    """Scatter the root's ``tensors[i]`` into rank i's `output`. All tensors have the same size."""
    check_rank("scatter", "src", root, comm)
    check_plain("scatter", output)
    whole = None
    if comm.rank == root:
        check_list("scatter", "the input list", tensors, comm.size)
        check_pair("scatter", tensors[0], output)
        for i, one in enumerate(tensors):
            check_numel("scatter", f"input {i}", one.numel(), output.numel())
        whole = join_inputs(tensors)
    target, restore = flatten_output("scatter", output)
    return _add_restore(_bind_task(comm, "scatter", whole, target, scatters.prepare, root=root, counts=None), restore)


@adds_rank_to_errors
def reduce_scatter(comm: CommunicatorCore, output: torch.Tensor, tensors: Sequence[torch.Tensor], op: Any) -> Task:
    """Reduce all ranks' ``tensors[i]`` into rank i's `output`. Sizes may differ between values of i."""
    check_list("reduce_scatter", "the input list", tensors, comm.size)
    check_pair("reduce_scatter", tensors[0], output)
    sizes = [one.numel() for one in tensors]
    check_numel("reduce_scatter", "the output", output.numel(), sizes[comm.rank])
    target, restore = flatten_output("reduce_scatter", output)
    native, restore = _convert_reduction("reduce_scatter", op, target, restore, comm)
    counts = sizes if len(set(sizes)) > 1 else None
    whole, prepare = join_inputs(tensors), reduce_scatters.prepare
    return _add_restore(_bind_task(comm, "reduce_scatter", whole, target, prepare, op=native, counts=counts), restore)


@adds_rank_to_errors
def reduce_scatter_single(comm: CommunicatorCore, output: torch.Tensor, tensor: torch.Tensor, op: Any) -> Task:
    """Reduce the i-th part of all ranks' tensors into rank i's `output`."""
    check_pair("reduce_scatter_single", tensor, output)
    check_numel("reduce_scatter_single", "the input", tensor.numel(), output.numel() * comm.size)
    target, restore = flatten_output("reduce_scatter_single", output)
    native, restore = _convert_reduction("reduce_scatter_single", op, target, restore, comm)
    whole, prepare = flatten_input(tensor), reduce_scatters.prepare
    return _add_restore(
        _bind_task(comm, "reduce_scatter_single", whole, target, prepare, op=native, counts=None), restore
    )


@adds_rank_to_errors
def reduce_scatter_single_coalesced(
    comm: CommunicatorCore, outputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], op: Any
) -> Task:
    """Run :func:`reduce_scatter_single` for each pair."""
    inputs = _check_pairs("reduce_scatter_single_coalesced", outputs, tensors)
    return chain_tasks(
        [reduce_scatter_single(comm, output, one, op) for output, one in zip(outputs, inputs, strict=True)]
    )


@adds_rank_to_errors
def all_to_all(comm: CommunicatorCore, outputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> Task:
    """Send ``tensors[i]`` to rank i, and receive from rank j into ``outputs[j]``. Sizes may differ."""
    check_list("all_to_all", "the output list", outputs, comm.size)
    check_list("all_to_all", "the input list", tensors, comm.size)
    check_pair("all_to_all", tensors[0], outputs[0])
    # Pass counts even if all sizes are equal on this rank: they may differ on other ranks, and all ranks must choose
    # the same algorithm.
    counts = [one.numel() for one in tensors], [one.numel() for one in outputs]
    whole, restore = join_outputs("all_to_all", outputs)
    return _add_restore(
        _bind_task(comm, "all_to_all", join_inputs(tensors), whole, alltoall.prepare, counts=counts), restore
    )


@adds_rank_to_errors
def all_to_all_single(
    comm: CommunicatorCore,
    output: torch.Tensor,
    tensor: torch.Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
) -> Task:
    """Send ``input_splits[i]`` rows of `tensor` to rank i, and receive ``output_splits[j]`` rows from rank j.

    Without splits the rows are divided evenly, which then holds on all ranks.
    """
    operation = "all_to_all_single"
    check_pair(operation, tensor, output)
    counts = None
    if output_splits or input_splits:
        counts = (
            _convert_splits(operation, "input", tensor, input_splits, comm),
            _convert_splits(operation, "output", output, output_splits, comm),
        )
    else:
        check_numel(operation, "the output", output.numel(), tensor.numel())
        for name, one in (("input", tensor), ("output", output)):
            if one.ndim and one.shape[0] % comm.size:
                raise ShapeError(
                    f"{operation}: the {one.shape[0]} rows of the {name} can't be divided evenly among"
                    f" {comm.size} ranks; pass split sizes"
                )
    whole, restore = flatten_output(operation, output)
    return _add_restore(
        _bind_task(comm, operation, flatten_input(tensor), whole, alltoall.prepare, counts=counts), restore
    )


def _check_pairs(operation: str, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the inputs, copied where the output of an earlier pair overlaps them."""
    if len(outputs) != len(inputs):
        raise ShapeError(f"{operation}: {len(inputs)} inputs need the same number of outputs, got {len(outputs)}")
    for output, one in zip(outputs, inputs, strict=True):
        check_pair(operation, one, output)
    return protect_inputs(inputs, [[output] for output in outputs])


def _convert_splits(
    operation: str, name: str, tensor: torch.Tensor, splits: Sequence[int], comm: CommunicatorCore
) -> list[int]:
    """Convert `splits` from rows to elements. Empty `splits` mean an even division."""
    rows = tensor.shape[0] if tensor.ndim else 1
    row = prod(tensor.shape[1:])
    if not splits:
        if rows % comm.size:
            raise ShapeError(
                f"{operation}: the {rows} rows of the {name} can't be divided evenly among {comm.size} ranks;"
                f" pass {name}_split_sizes"
            )
        return [rows // comm.size * row] * comm.size
    if len(splits) != comm.size or min(splits) < 0 or sum(splits) != rows:
        raise ShapeError(
            f"{operation}: {name}_split_sizes={list(splits)} must be {comm.size} numbers >= 0 that add up to the"
            f" {rows} rows of the {name}"
        )
    return [count * row for count in splits]
