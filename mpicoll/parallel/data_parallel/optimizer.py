"""DistributedOptimizer: a torch optimizer whose gradients are reduced over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from mpicoll.collectives.objects import allgather_object
from mpicoll.engine.core.communicator import Communicator
from mpicoll.engine.core.process_local import refuse_pickling
from mpicoll.errors import ArgumentError, DTypeError, MismatchError
from mpicoll.parallel.data_parallel.agreement import check_agreement, check_optimizer, list_named
from mpicoll.parallel.data_parallel.broadcast import broadcast_optimizer_state, broadcast_parameters
from mpicoll.parallel.data_parallel.compression import Compression, Compressor
from mpicoll.parallel.data_parallel.metrics import metric_average
from mpicoll.parallel.data_parallel.reducer import Options, Reducer
from mpicoll.parallel.gradients import get_replica_communicator
from mpicoll.parallel.groups import describe_rank

_REMEDY = "make the same model and optimizer, with the same options, on all ranks"


class DistributedOptimizer(torch.optim.Optimizer):
    """Optimizer that reduces gradients over the ranks, in buckets and during the backward pass, before each step.

    Wraps a torch optimizer, of which it shares the parameter groups and the state; learning rate schedules accept it.
    All ranks must take the same number of steps, or call :meth:`join`. After ``step`` parameters are equal on all
    ranks, bit by bit, if they were before: call :func:`broadcast_parameters` first. Gradients must not be read before
    ``step`` or :meth:`synchronize`.

    A parameter without a gradient on this rank counts as zeros; where no rank has one, its gradient stays None.
    Gradients are views of buckets, as DistributedDataParallel's with ``gradient_as_bucket_view=True``. The ranks of a
    node share the memory of these. Sparse gradients stay sparse.

    ``step(closure)``, which LBFGS needs, reduces the gradients after each evaluation and averages the loss. It can't be
    combined with :meth:`join`.

    A parameter may be frozen or unfrozen between two steps, on all ranks: its gradient is reduced from then on. After
    one was unfrozen, or :meth:`add_param_group`, the ranks agree on new buckets; what compression has kept of the
    gradients of earlier steps is dropped.

    Args:
        optimizer: of the same parameters, in the same groups, on all ranks.
        named_parameters: ``model.named_parameters()``, for names in errors.
        op: "avg" or "sum" of the ranks' gradients. Adasum is not supported.
        backward_passes_per_step: backward passes whose gradients are added up before they are reduced. Divide the loss
            by their number for the mean. A step after fewer passes reduces what there is.
        compression: of :class:`Compression`.
        bucket_cap_mb: size of the buckets in MiB; the first has at most 1 MiB.
        divide_by_initial_world_size: divide by the number of all ranks also after some have joined, as
            DistributedDataParallel does by default; otherwise by the number of those that have not. Of no effect with
            ``op="sum"``.
        group: the data parallel ranks, by default the ``data`` and ``context`` axes of the grid in use; without a grid,
            all ranks. The optimizer communicates on a duplicate of its communicator.

    Raises:
        ArgumentError, DTypeError: an argument is invalid; raised before any message leaves.
        MismatchError: names, shapes or dtypes of parameters, or options, differ between ranks; raised on all ranks.

    Example:
        ::

            model = nn.Linear(4, 2)
            optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            broadcast_parameters(model.state_dict())
            model(torch.ones(3, 4)).sum().backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
    """

    # A GradScaler then divides the gradients itself instead of passing the scale to `step`.
    _step_supports_amp_scaling = False

    __reduce_ex__ = refuse_pickling(
        "DistributedOptimizer", "pass on its state_dict(), and wrap a copy of the optimizer of torch.optim"
    )

    _comm: Communicator
    _num_steps: int

    def __init__(  # the state is that of the optimizer it wraps
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, Parameter]] | None = None,
        *,
        op: str = "avg",
        backward_passes_per_step: int = 1,
        compression: Compressor = Compression.none,
        bucket_cap_mb: float = 25.0,
        divide_by_initial_world_size: bool = True,
        group: Any = None,
    ) -> None:
        comm = get_replica_communicator(group)
        check_optimizer("DistributedOptimizer", optimizer, comm)
        self._optimizer = optimizer
        named = list_named("DistributedOptimizer", () if named_parameters is None else named_parameters, comm)
        self._names = {id(one): name for name, one in named}
        self._options = Options(
            op, backward_passes_per_step, int(bucket_cap_mb * (1 << 20)), compression, not divide_by_initial_world_size
        )
        self._reducer: Reducer | None = None
        self._check_arguments(comm)
        self._bind(comm)

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":  # not yet set
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self._optimizer!r})"

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the wrapped optimizer."""
        return self._optimizer.param_groups

    @property
    def state(self) -> Any:
        """The state of the wrapped optimizer."""
        return self._optimizer.state

    @property
    def bytes_per_step(self) -> int:
        """Bytes of gradients that this rank passes to collectives in a step, flags included; 0 before the first one."""
        return 0 if self._reducer is None else self._reducer.nbytes

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce the gradients, unless :meth:`synchronize` has, and let the wrapped optimizer take a step. Collective.

        Raises:
            ArgumentError: within :meth:`skip_synchronize`, if there are gradients that have not been reduced; if a rank
                has joined, with `closure` or after a parameter was unfrozen.
        """
        if closure is not None:
            return self._step_with(closure)
        if self._skips:
            if self._reducer is not None and self._reducer.busy:
                raise ArgumentError(
                    "DistributedOptimizer: step() within skip_synchronize() after a backward pass; call synchronize()"
                    f" before {describe_rank(self._comm)}"
                )
        else:
            self._synchronize_once()
        self._synchronized = False
        self._num_steps += 1
        return self._optimizer.step()

    def _step_with(self, closure: Callable[[], Any]) -> Any:
        def evaluate() -> Any:
            with torch.enable_grad():
                loss = closure()
            self._reduce(closure=True)
            self._synchronized = False
            return loss if loss is None else metric_average(loss, group=self._comm)

        self._num_steps += 1
        self._had_closure = True
        return self._optimizer.step(evaluate)

    def synchronize(self) -> None:
        """Reduce the gradients now, for example to clip them or to test them before ``step``. Collective.

        Raises:
            RankFailed, Timeout: as of :func:`mpicoll.allreduce`.
        """
        self._reduce()

    def _reduce(self, *, closure: bool = False) -> None:
        if self._reducer is not None:
            unfrozen = not all(map(self._reducer.reduces, self._list_parameters()))
            self._reducer.synchronize(closure=closure, unfrozen=unfrozen)
            if unfrozen:
                self._add_unfrozen(self._reducer)
        self._synchronized = True

    def _add_unfrozen(self, reducer: Reducer) -> None:
        """Reduce the gradients of parameters that were frozen when `reducer` was made, and make one that has them."""
        unfrozen = [(name, one) for name, one in self._name_parameters() if not reducer.reduces(one)]
        once = Reducer(unfrozen, self._comm, self._options)
        once.synchronize()
        once.remove_hooks()
        self._set_reducer()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let ``step`` reduce nothing, in a ``with`` block. For programs that call :meth:`synchronize` themselves;
        without the block ``step`` finds that out."""
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Reduce the gradients, and scale them so that the norm of all is at most `max_norm`. Collective. Return the
        norm before, the same on all ranks. With tensor parallel layers, call :meth:`synchronize` and
        :func:`mpicoll.parallel.clip_grad_norm_` instead."""
        self._synchronize_once()
        return torch.nn.utils.clip_grad_norm_(map(_stand_in, self._list_parameters()), max_norm, norm_type)

    def join(self) -> int:
        """Take part in the steps of other ranks, with zeros, until all ranks have called this. Collective.

        For ranks that have different numbers of batches: each calls it after its last step, and the ranks need no other
        collective until then. Afterwards parameters and the optimizer's state are those of the last rank to join.

        Returns:
            The last rank to join, the same on all ranks: broadcast other values from it, such as buffers of the model.

        Raises:
            ArgumentError: there are gradients that have not been reduced, or this optimizer has taken a step with a
                closure, which can't be combined with join; or, then on all ranks, another rank takes one, or a step
                with parameters that it has unfrozen.
        """
        if self._reducer is None:
            return 0
        if self._had_closure:
            raise ArgumentError(
                "DistributedOptimizer: join() after step(closure), whose mean of the loss a rank that has joined can't"
                " take part in; call step() without a closure, or take the same number of steps on all ranks"
                f" {describe_rank(self._comm)}"
            )
        if self._reducer.busy or self._synchronized:
            raise ArgumentError(
                "DistributedOptimizer: join() after a backward pass without a step; call step() or zero_grad() before"
                f" {describe_rank(self._comm)}"
            )
        while self._reducer.synchronize(joined=True) < self._comm.size:
            pass
        steps = allgather_object(self._num_steps, comm=self._comm)
        last = max(range(len(steps)), key=lambda rank: (steps[rank], rank))
        if len(set(steps)) > 1:
            broadcast_parameters(self._name_parameters(), last, group=self._comm)
            broadcast_optimizer_state(self._optimizer, last, group=self._comm)
        self._num_steps = 0
        return last

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of the wrapped optimizer.

        Raises:
            ArgumentError: there are gradients that have not been reduced.
        """
        if self._reducer is not None and self._reducer.busy:
            raise ArgumentError(
                "DistributedOptimizer: zero_grad() after a backward pass without a step; call step() or synchronize()"
                f" before {describe_rank(self._comm)}"
            )
        self._synchronized = False
        self._optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped optimizer. The errors that compression keeps are not part of it."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of the wrapped optimizer."""
        self._optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, the same on all ranks, between two steps. Collective with the next step, which agrees on new
        buckets."""
        self._optimizer.add_param_group(param_group)
        self._check_arguments(self._comm)
        self._set_reducer()

    def reset(self, group: Any = None) -> None:
        """Continue on other ranks, the survivors after the death of some. Collective over them. Drops pending
        reductions; parameters and state stay as they are on each rank."""
        self._bind(get_replica_communicator(group))

    def close(self) -> None:
        """Reduce gradients no longer, and free the communicator. Collective."""
        if self._reducer is not None:
            self._reducer.remove_hooks()
            self._reducer = None
            self._comm.free()

    def _check_arguments(self, comm: Communicator) -> None:
        problem = None
        op, passes, capacity = self._options[:3]
        compressor: Any = self._options.compressor
        if type(self._optimizer) is DistributedOptimizer:
            problem = "the optimizer is a DistributedOptimizer already; pass the one of torch.optim"
        elif op not in ("avg", "sum"):
            problem = f"op must be 'avg' or 'sum', got {op!r}"
        elif passes < 1 or capacity < 1:
            problem = (
                f"backward_passes_per_step must be at least 1, bucket_cap_mb above 0, got {passes} and {capacity >> 20}"
            )
        elif not isinstance(compressor, Compressor):
            problem = f"compression must be one of parallel.Compression, got {compressor!r}"
        elif not self._list_parameters():
            problem = "the optimizer has no parameters that require gradients"
        if problem is not None:
            raise ArgumentError(f"DistributedOptimizer: {problem} {describe_rank(comm)}")
        for name, one in self._name_parameters():
            if isinstance(one, DTensor):
                raise DTypeError(
                    f"DistributedOptimizer: {name!r} is a DTensor; fully_shard reduces its gradients itself"
                    f" {describe_rank(comm)}"
                )

    def _bind(self, comm: Communicator) -> None:
        self._skips = self._synchronized = self._had_closure = False
        self._num_steps = 0
        # Its own order of collectives: those of the program may come in between at any time.
        self._comm = comm.duplicate() if comm.size > 1 else comm
        self._set_reducer()
        if self._reducer is not None:
            try:
                check_agreement("DistributedOptimizer", self._comm, self._reducer.describe(), _REMEDY)
            except MismatchError:  # on all ranks
                self.close()
                raise

    def _set_reducer(self) -> None:
        if self._reducer is not None:
            self._reducer.remove_hooks()
        alone = self._comm.size == 1
        self._reducer = None if alone else Reducer(self._name_parameters(), self._comm, self._options)

    def _synchronize_once(self) -> None:
        if not self._synchronized or (self._reducer is not None and self._reducer.busy):
            self.synchronize()

    def _list_parameters(self) -> list[Parameter]:
        return [one for group in self.param_groups for one in group["params"] if one.requires_grad]

    def _name_parameters(self) -> list[tuple[str, Parameter]]:
        return [
            (self._names.get(id(one), f"group {number}, parameter {index}"), one)
            for number, group in enumerate(self.param_groups)
            for index, one in enumerate(group["params"])
            if one.requires_grad
        ]


def _stand_in(parameter: Parameter) -> Tensor:
    """Return a tensor whose gradient is the memory of that of `parameter`, but dense, as torch clips no sparse one."""
    if parameter.grad is None or parameter.grad.layout is torch.strided:
        return parameter
    parameter.grad = parameter.grad.coalesce()
    values = parameter.grad.values()
    stand_in = torch.empty_like(values)
    stand_in.grad = values
    return stand_in
