"""Comparison of what must be equal on all ranks, such as the parameters of a model."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import zip_longest

from torch import Tensor

from mpicoll.collectives.objects import allgather_object
from mpicoll.engine.core.communicator import Communicator
from mpicoll.errors import MismatchError
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


def describe_tensors(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Return one line for each tensor, with its name, dtype and shape."""
    return [f"{name!r}, {str(one.dtype).removeprefix('torch.')} of shape {tuple(one.shape)}" for name, one in named]
