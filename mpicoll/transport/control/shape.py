"""The shape of the control network: a star, or a tree of two levels for jobs that are too large for one."""

from __future__ import annotations

from collections.abc import Sequence

from mpicoll.transport.control.sockets import RESERVED_DESCRIPTORS, query_hard_descriptor_limit

_STAR_LIMIT = 4096
"""Ranks of the largest job with a star: as many connections wait in the accept queue of most hosts."""


def choose_shape(setting: str, size: int) -> str:
    """Return the shape for a job of `size` ranks, if this process is its hub: "star", "tree" or "tree/N".

    `setting` is one of these, which is returned, or "auto".
    """
    if setting != "auto":
        return setting
    return "tree" if size > min(_STAR_LIMIT, query_hard_descriptor_limit() - RESERVED_DESCRIPTORS) else "star"


def group_ranks(shape: str, places: Sequence[str]) -> list[int]:
    """Return the number of the group of each rank, by rank; an empty list if there is only one group.

    `places` has the host of each rank. The groups of a "tree" are the ranks of a host, those of "tree/N" are N ranks in
    their order.
    """
    if shape == "star":
        return []
    _, _, each = shape.partition("/")
    numbers: dict[str, int] = {}
    groups = (
        [rank // int(each) for rank in range(len(places))]
        if each
        else [numbers.setdefault(place, len(numbers)) for place in places]
    )
    return groups if any(groups) else []
