"""Common parts of parallel layers: marks of sharded parameters, shards of weights, sums of gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from mpicoll.collectives.allgather import allgather
from mpicoll.engine.core.communicator import Communicator
from mpicoll.errors import ArgumentError, ShapeError
from mpicoll.parallel.groups import describe_rank
from mpicoll.parallel.mappings import (
    copy_to_tensor_model_parallel_region,
)
from mpicoll.parallel.shards import get_shard, mark
from mpicoll.torch.no_compile import disable_compile

if TYPE_CHECKING:
    from typing_extensions import Self


InitMethod: TypeAlias = Callable[[Tensor], Any]


class ParallelModule(nn.Module):
    """A module on the ranks of a group: ``group`` is the user's argument, ``comm`` the communicator.

    ``_shard_dims`` maps the names of sharded parameters to the sharded dimension. These parameters are marked (see
    :mod:`mpicoll.parallel.shards`), also when torch replaces them.
    """

    _shard_dims: ClassVar[Mapping[str, int]] = {}

    group: Any
    comm: Communicator

    def register_parameter(self, name: str, param: Parameter | None) -> None:
        super().register_parameter(name, param)
        self.mark_parameters()

    def __delattr__(self, name: str) -> None:
        if name in self._shard_dims and self._parameters.get(name) is not None and self.comm.size > 1:
            raise ArgumentError(
                f"{type(self).__name__}: {name} can't be deleted or parametrized (for example by weight_norm): it is"
                " this rank's shard of a parameter, so a norm would be that of the shard only"
                f" {describe_rank(self.comm)}"
            )
        super().__delattr__(name)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.mark_parameters()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo[id(self.group)], memo[id(self.comm)] = self.group, self.comm
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__dict__ = copy.deepcopy(self.__dict__, memo)
        new.mark_parameters()
        return new

    def mark_parameters(self) -> None:
        """Mark the sharded parameters (see :mod:`mpicoll.parallel.shards`). Call it after replacing parameters."""
        for name, dim in self._shard_dims.items():
            param = self._parameters.get(name)
            if param is not None and get_shard(param) is None:
                mark(param, dim, self.group, self.comm)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"a {type(self).__name__} can't be pickled, because it is bound to the ranks of a running job; save its"
            " state_dict(), or whole_state_dict(module)"
        )


def divide_extent(layer: str, name: str, extent: int, comm: Communicator) -> int:
    """Return the extent of a rank's shard of `extent`. Raise ShapeError if the number of ranks does not divide it."""
    if extent % comm.size:
        above = -(-extent // comm.size) * comm.size
        raise ShapeError(
            f"{layer}: {name} {extent} can't be divided equally among {comm.size} ranks; {above} can (rank {comm.rank}"
            f" of {comm.size})"
        )
    return extent // comm.size


def copy_local_block(param: Tensor, dim: int, comm: Communicator) -> Parameter:
    """Return a copy of this rank's shard of `param` along `dim`."""
    share = param.shape[dim] // comm.size
    block = param.detach().narrow(dim, comm.rank * share, share).clone(memory_format=torch.contiguous_format)
    return Parameter(block, param.requires_grad)


def restore_shard_marks(module: nn.Module) -> None:
    """Mark the sharded parameters of the layers in `module` again, after fully_shard has replaced them."""
    for layer in module.modules():
        if isinstance(layer, ParallelModule):
            layer.mark_parameters()


def gather_full(param: Tensor, dim: int, comm: Communicator) -> Tensor:
    """Return the full parameter of which each rank passes its shard. Collective."""
    block = to_full_tensor(param.detach())
    if comm.size == 1:
        return block.clone()
    counts = allgather(torch.tensor([block.shape[dim]]), comm=comm).tolist()
    joined: Tensor = allgather(block.movedim(dim, 0), counts=counts, comm=comm)
    return joined.movedim(0, dim).contiguous()


def to_full_tensor(x: Tensor) -> Tensor:
    """Return `x`; gather it first if fully_shard has made it a DTensor."""
    if isinstance(x, DTensor):
        x = x.full_tensor()
    return x


def copy_parameter(param: Tensor | None) -> Parameter | None:
    return None if param is None else Parameter(param.detach().clone(), param.requires_grad)


@disable_compile
def sum_gradients_in_backward(comm: Communicator, *params: Tensor | None) -> list[Tensor | None]:
    """Return `params`, which are replicated, for use on sharded activations: one all-reduce sums their gradients."""
    trained = [one for one in params if one is not None and one.requires_grad]
    if comm.size == 1 or not trained or not torch.is_grad_enabled():
        return list(params)
    if len(trained) == 1:
        used = iter([copy_to_tensor_model_parallel_region(trained[0], comm)])
    else:
        flat = copy_to_tensor_model_parallel_region(torch.cat([one.reshape(-1) for one in trained]), comm)
        parts = flat.split([one.numel() for one in trained])
        used = iter([part.view(one.shape) for part, one in zip(parts, trained, strict=True)])
    return [next(used) if one is not None and one.requires_grad else one for one in params]
