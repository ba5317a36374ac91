"""Comparison of what must be equal on all ranks, such as the parameters of a model."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from torch import Tensor

from mpicoll.collectives.objects import allgather_object
from mpicoll.engine.core.communicator import Communicator
from mpicoll.errors import ArgumentError, MismatchError
from mpicoll.parallel.groups import describe_rank
from mpicoll.wording import ranks_and_verb


def check_agreement(operation: str, comm: Communicator, facts: Sequence[str], remedy: str) -> None:
    """Raise MismatchError on all ranks unless they pass equal `facts`. Collective.

    A second exchange, of the facts themselves, is made only if they differ.
    """
    digests = allgather_object(digest(facts), comm=comm)
    if len(set(digests)) > 1:
        raise_mismatch(operation, comm, facts, remedy)


def digest(facts: Sequence[str]) -> bytes:
    """Return a short value that is equal for equal `facts`."""
    return hashlib.sha256("\n".join(facts).encode()).digest()


def raise_mismatch(operation: str, comm: Communicator, facts: Sequence[str], remedy: str) -> None:
    """Raise MismatchError that names the first of `facts` that differs between ranks. Collective."""
    by_rank = allgather_object(list(facts), comm=comm)
    for number, values in enumerate(zip_longest(*by_rank)):
        if len(set(values)) == 1:
            continue
        lines = []
        for value in dict.fromkeys(values):
            holders = [rank for rank, other in enumerate(values) if other == value]
            lines.append(f"  {ranks_and_verb(holders, 'has', 'have')} {'nothing more' if value is None else value}")
        usual = Counter(values).most_common(1)[0][0]
        raise MismatchError(
            f"{operation}: the ranks disagree from entry {number} on; {remedy}:\n" + "\n".join(lines),
            tuple(rank for rank, value in enumerate(values) if value != usual),
            ("parameters",),
        )


def list_named(operation: str, named: Any, comm: Communicator) -> list[tuple[str, Any]]:
    """Return the pairs of name and value in `named`, a dict or an iterable of pairs. Raises ArgumentError otherwise."""
    if isinstance(named, Iterable):
        pairs = [*(named.items() if isinstance(named, Mapping) else named)]
        # A tensor of two rows would pass for a pair.
        if all(isinstance(one, tuple | list) and len(one) == 2 for one in pairs):
            return [(name, value) for name, value in pairs]
    raise ArgumentError(
        f"{operation}: names and tensors are needed, such as model.named_parameters(), got a {type(named).__name__}"
        f" {describe_rank(comm)}"
    )


def check_optimizer(operation: str, optimizer: Any, comm: Communicator) -> None:
    """Raise ArgumentError unless `optimizer` has groups of parameters, as those of torch.optim have."""
    if not hasattr(optimizer, "param_groups"):
        raise ArgumentError(
            f"{operation}: pass an optimizer of torch.optim, got {type(optimizer).__name__} {describe_rank(comm)}"
        )


def describe_tensors(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Return one line for each tensor, with its name, dtype and shape."""
    return [f"{name!r}, {str(one.dtype).removeprefix('torch.')} of shape {tuple(one.shape)}" for name, one in named]
