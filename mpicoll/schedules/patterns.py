"""Arithmetic on ranks that the generators share: trees, folds, halvings and sets of blocks.

`vrank` is a rank counted from the root, so that the root is 0.
"""

from __future__ import annotations

from typing import NamedTuple

from mpicoll.schedules.model import Chunks


def ceil_log2(size: int) -> int:
    """Return the number of doublings from 1 to `size` or more."""
    return (size - 1).bit_length()


def power_below(size: int) -> int:
    """Return the largest power of two up to `size`."""
    return 1 << (size.bit_length() - 1)


def wrap(start: int, count: int, size: int) -> Chunks:
    """Return `count` consecutive indices from `start` on, modulo `size`; a range unless they wrap round."""
    start %= size
    if start + count <= size:
        return range(start, start + count)
    return (*range(start, size), *range(start + count - size))


def binomial_parent(vrank: int) -> int:
    """Return the parent of `vrank` > 0 in a binomial tree."""
    return vrank & (vrank - 1)


def binomial_children(vrank: int, size: int) -> tuple[int, ...]:
    """Return the children of `vrank` in a binomial tree, the smallest subtree first."""
    reach = vrank & -vrank or size
    return tuple(vrank + (1 << k) for k in range(ceil_log2(size)) if 1 << k < reach and vrank + (1 << k) < size)


def binomial_subtree(vrank: int, size: int) -> range:
    """Return the ranks in the binomial subtree of `vrank`."""
    return range(vrank, min(vrank + (vrank & -vrank), size) if vrank else size)


class FoldedRank(NamedTuple):
    """The role of a rank when the first 2r ranks form pairs, so that the number of active ranks is a power of two.

    Odd ranks below 2r are guests of the rank before them, their host; partners differ in the last bit. Only neighbours
    form pairs, which preserves the order of ranks. `virtual` numbers the active ranks; a guest has its host's number.
    """

    virtual: int
    host: bool
    guest: bool


def fold(rank: int, size: int) -> FoldedRank:
    """Return the role of `rank` in a fold of `size` ranks."""
    paired = 2 * (size - power_below(size))
    if rank >= paired:
        return FoldedRank(rank - paired // 2, host=False, guest=False)
    return FoldedRank(rank // 2, host=rank % 2 == 0, guest=rank % 2 == 1)


def unfold(virtual: int, size: int) -> int:
    """Return the rank of `virtual`: the host if `virtual` stands for a pair."""
    return virtual + min(virtual, size - power_below(size))


class Halving(NamedTuple):
    """A step between peers that differ in `mask`: they split their chunks, and each keeps one part."""

    mask: int
    keep: range
    give: range


def halvings(virtual: int, count: int) -> list[Halving]:
    """Return the steps of a recursive halving of `count` chunks over `count` ranks, a power of two.

    The nearest peer comes first, so that neighbouring intervals of ranks meet and order survives.
    """
    steps = []
    low, high = 0, count
    for k in range(ceil_log2(count)):
        middle = (low + high) // 2
        lower, upper = range(low, middle), range(middle, high)
        keep, give = (upper, lower) if virtual >> k & 1 else (lower, upper)
        steps.append(Halving(1 << k, keep, give))
        low, high = keep.start, keep.stop
    return steps


class Node(NamedTuple):
    """Position of a rank in a binary tree; `height` is that of the whole tree."""

    parent: int | None
    children: tuple[int, ...]
    depth: int
    height: int


def double_tree(rank: int, size: int) -> tuple[Node, Node]:
    """Return the positions of `rank` in two in-order binary trees such that no rank has children in both.

    Sanders, Speck and Träff 2009 shift or mirror one tree to get the other. Both trees here are in-order, the second
    shifted by one place with nothing wrapped round, so operands stay in the order of ranks for every size.
    """
    return _inorder(rank, size, first=1), _inorder(rank, size, first=2)


def _inorder(rank: int, size: int, first: int) -> Node:
    """Return the position of `rank` if ranks are numbered from `first` (1 or 2): the lowest set bit is the level."""
    number, last = rank + first, size + first - 1
    top = power_below(last)
    depth, parent = 0, number
    above = []
    while parent != top:
        low = parent & -parent
        parent = (parent ^ low) | low << 1
        if parent <= last:  # numbers beyond the last one are omitted, and their left children replace them
            depth += 1
            above.append(parent)
    step = (number & -number) >> 1
    children = []
    if step and number - step >= first:
        children.append(number - step)
    while step and number + step > last:
        step >>= 1
    if step:
        children.append(number + step)
    return Node(
        parent=above[0] - first if above else None,
        children=tuple(child - first for child in children),
        depth=depth,
        height=top.bit_length() - 1,
    )
