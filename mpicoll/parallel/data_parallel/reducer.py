"""Reduction of gradients during the backward pass."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias
from weakref import finalize, ref

import numpy as np
import torch
from torch.nn import Parameter

from mpicoll.collectives.allreduce import allreduce
from mpicoll.collectives.objects import allgather_object
from mpicoll.engine.core.communicator import Communicator
from mpicoll.errors import ArgumentError
from mpicoll.parallel.data_parallel.agreement import describe_tensors, digest, raise_mismatch
from mpicoll.parallel.data_parallel.buckets import Bucket, describe_order, divide
from mpicoll.parallel.data_parallel.compression import Compressor
from mpicoll.parallel.data_parallel.exchange import Exchange, SparseBucket, Waits
from mpicoll.parallel.groups import describe_rank

Pending: TypeAlias = "tuple[Waits, Callable[[], Any]]"


class Options(NamedTuple):
    """Options of a reducer, the same on all ranks."""

    op: str
    passes: int
    capacity: int
    compressor: Compressor
    scale_by_active: bool

    def describe(self) -> str:
        """Return the options as one line."""
        scaling = "by the ranks that have not joined" if self.scale_by_active else "by all ranks"
        return (
            f"op {self.op}, {self.passes} backward passes per step, buckets of {self.capacity} bytes,"
            f" {self.compressor}, division {scaling}"
        )


class Reducer:
    """Gradients of `named` parameters, reduced over the ranks of `comm` in buckets.

    In the first step gradients are reduced after the backward pass, and the ranks agree on the buckets: in the order in
    which gradients were complete on the first rank. From the second step on, a bucket is reduced in the background as
    soon as its gradients are complete after `passes` backward passes, and all earlier buckets are in progress: so the
    order of collectives is the same on all ranks. :meth:`synchronize` reduces the other buckets, and waits for all.
    """

    def __init__(self, named: Sequence[tuple[str, Parameter]], comm: Communicator, options: Options) -> None:
        self._names = [name for name, _ in named]
        self._parameters = [one for _, one in named]
        self._identities = {id(one) for one in self._parameters}
        self._comm = comm
        self._options = options
        self._passes = options.passes
        # Gradients of several devices are complete on several threads.
        self._lock = threading.Lock()
        self._passes_left = [options.passes] * len(named)
        self._arrived: list[int] = []
        self._joined = False
        # Empty until the first step. Then the bucket of each parameter, and how many buckets are in progress.
        self._buckets: list[Bucket | SparseBucket] = []
        self._exchanges: list[Exchange] = []
        self._bucket_of: list[Bucket | SparseBucket] = []
        self._pending: list[Pending] = []
        hook = partial(_call_hook, ref(self))
        handles = [
            one.register_post_accumulate_grad_hook(partial(hook, index)) for index, one in enumerate(self._parameters)
        ]
        self.remove_hooks = finalize(self, _remove, handles)
        self.remove_hooks.atexit = False

    @property
    def busy(self) -> bool:
        """True if there are gradients that have not been reduced."""
        return bool(self._pending or self._arrived) or any(left != self._passes for left in self._passes_left)

    @property
    def nbytes(self) -> int:
        """Bytes that this rank passes to collectives in a step; 0 before the first one."""
        return sum(one.nbytes for one in self._exchanges)

    def reduces(self, parameter: Parameter) -> bool:
        """Return True if the gradient of `parameter` is among those that are reduced."""
        return id(parameter) in self._identities

    def describe(self) -> list[str]:
        """Return what must be equal on all ranks."""
        facts = describe_tensors(zip(self._names, self._parameters, strict=True))
        orders = map(describe_order, self._parameters)
        return [self._options.describe(), *map("".join, zip(facts, orders, strict=True))]

    def accept(self, index: int) -> None:
        """Count a gradient that a backward pass has completed, and start to reduce the buckets that are complete."""
        with self._lock:
            self._passes_left[index] -= 1
            left = self._passes_left[index]
            if left > 0:
                return
            if left < 0:
                raise ArgumentError(
                    f"DistributedOptimizer: the gradient of {self._names[index]!r} was computed"
                    f" {self._passes - left} times since the last step, backward_passes_per_step is {self._passes};"
                    f" call step() or synchronize() earlier, or pass a larger number {describe_rank(self._comm)}"
                )
            if not self._buckets:
                self._arrived.append(index)
                return
            self._bucket_of[index].missing -= 1
            while len(self._pending) < len(self._buckets) and not self._buckets[len(self._pending)].missing:
                self._start_next()

    def synchronize(self, *, joined: bool = False, closure: bool = False, unfrozen: bool = False) -> int:
        """Reduce the gradients that are not yet being reduced, and wait for all. Collective.

        With `joined` this rank has no more data: its gradients count as zeros. With `closure` it needs the losses of
        all ranks afterwards, with `unfrozen` their gradients of further parameters. Return the number of ranks that
        have joined. Raises ArgumentError on all ranks, those that have joined included, if some need others for that.
        """
        self._joined = joined
        if not self._buckets:
            self._create_buckets()
        while len(self._pending) < len(self._buckets):
            self._start_next()
        pending: list[Pending] = self._pending
        while pending:
            pending = _resume(pending)
        any_joined = [one.read(joined=joined) for one in self._buckets]
        num_joined = 0
        if any(any_joined):
            own = np.array([joined, closure, unfrozen], np.int64)
            num_joined, num_closures, num_unfrozen = map(int, allreduce(own, comm=self._comm))
            if num_closures:
                self._reset_counts()
                raise ArgumentError(
                    f"DistributedOptimizer: step(closure) after {num_joined} of {self._comm.size} ranks have called"
                    " join(), which can't take part in the mean of the loss; call step() without a closure, or take the"
                    f" same number of steps on all ranks {describe_rank(self._comm)}"
                )
            if num_unfrozen:
                self._reset_counts()
                raise ArgumentError(
                    f"DistributedOptimizer: parameters were unfrozen after {num_joined} of {self._comm.size} ranks have"
                    " called join(), for which they are still frozen; unfreeze them on all ranks before any rank calls"
                    f" join() {describe_rank(self._comm)}"
                )
        if self._options.op == "avg" and self._options.scale_by_active and 0 < num_joined < self._comm.size:
            for one in self._buckets:
                one.scale(self._comm.size / (self._comm.size - num_joined))
        self._reset_counts()
        return num_joined

    def forget(self) -> None:
        """Drop all pending reductions and the buckets, without a message."""
        self._buckets, self._exchanges, self._bucket_of = [], [], []
        self._reset_counts()

    def _reset_counts(self) -> None:
        # Hooks of the next backward pass start buckets before `synchronize` is called.
        self._joined = False
        self._pending = []
        self._arrived = []
        self._passes_left = [self._passes] * len(self._parameters)
        for one in self._buckets:
            one.missing = len(one.indices)

    def _start_next(self) -> None:
        number = len(self._pending)
        self._buckets[number].fill(joined=self._joined)
        waits = self._exchanges[number].start()
        self._pending.append((waits, next(waits)))

    def _create_buckets(self) -> None:
        sparse = {
            index: one.grad.sparse_dim()
            for index, one in enumerate(self._parameters)
            if one.grad is not None and one.grad.layout is torch.sparse_coo
        }
        facts = self.describe()
        everyone = allgather_object((digest(facts), self._arrived, sparse), comm=self._comm)
        if len({theirs for theirs, _, _ in everyone}) > 1:
            raise_mismatch(
                "DistributedOptimizer",
                self._comm,
                facts,
                "add the same groups of parameters on all ranks before a step",
            )
        sparse = {index: dim for _, _, of_rank in reversed(everyone) for index, dim in of_rank.items()}
        arrived = dict.fromkeys(index for _, order, _ in everyone for index in order)
        # Where no rank has a gradient, one may come late or never: last, so that others don't wait for it.
        order = [*arrived, *(index for index in reversed(range(len(self._parameters))) if index not in arrived)]
        dense = divide((index for index in order if index not in sparse), self._parameters, self._options.capacity)
        # There is always a dense bucket, as it has the flag of ranks that have joined.
        dense = dense or [([], (torch.float32, torch.device("cpu")))]
        for indices, kind in dense:
            bucket = Bucket(indices, self._parameters, kind, self._comm)
            self._buckets.append(bucket)
            self._exchanges.append(self._options.compressor.make(bucket, self._options.op, self._comm))
        for index in (index for index in order if index in sparse):
            one = SparseBucket(index, self._parameters[index], sparse[index], self._options.op, self._comm)
            self._buckets.append(one)
            self._exchanges.append(one)
        bucket_of = {index: one for one in self._buckets for index in one.indices}
        self._bucket_of = [bucket_of[index] for index in range(len(self._parameters))]


def _resume(pending: Sequence[Pending]) -> list[Pending]:
    """Wait for each collective, and start the next one of the same bucket, if there is one."""
    further = []
    for waits, wait in pending:
        wait()
        following = next(waits, None)
        if following is not None:
            further.append((waits, following))
    return further


def _call_hook(reducer: ref[Reducer], index: int, parameter: Parameter) -> None:
    found = reducer()
    if found is not None:
        found.accept(index)


def _remove(handles: Sequence[Any]) -> None:
    for one in handles:
        one.remove()
