from __future__ import annotations

import pytest

from mpicoll.schedules import patterns

SIZES = (*range(1, 70), 127, 128, 129, 1000)


@pytest.mark.parametrize(("size", "log"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (1024, 10), (1025, 11)])
def test_ceil_log2(size: int, log: int) -> None:
    assert patterns.ceil_log2(size) == log


@pytest.mark.parametrize(("size", "power"), [(1, 1), (2, 2), (3, 2), (4, 4), (7, 4), (1023, 512), (1024, 1024)])
def test_power_below(size: int, power: int) -> None:
    assert patterns.power_below(size) == power


def test_wrap() -> None:
    assert patterns.wrap(1, 3, 5) == range(1, 4)
    assert patterns.wrap(2, 3, 5) == range(2, 5)
    assert patterns.wrap(3, 4, 5) == (3, 4, 0, 1)
    assert patterns.wrap(8, 2, 5) == range(3, 5)
    assert patterns.wrap(2, 0, 5) == range(2, 2)


@pytest.mark.parametrize("size", SIZES)
def test_binomial_tree(size: int) -> None:
    for vrank in range(size):
        children = patterns.binomial_children(vrank, size)
        assert [patterns.binomial_parent(child) for child in children] == [vrank] * len(children)
        below = [rank for child in children for rank in patterns.binomial_subtree(child, size)]
        assert [vrank, *below] == list(patterns.binomial_subtree(vrank, size))
    assert patterns.binomial_subtree(0, size) == range(size)


@pytest.mark.parametrize("size", SIZES)
def test_fold_leaves_a_power_of_two_in_order(size: int) -> None:
    folds = [patterns.fold(rank, size) for rank in range(size)]
    left = [rank for rank, part in enumerate(folds) if not part.guest]
    assert [folds[rank].virtual for rank in left] == list(range(patterns.power_below(size)))
    assert [patterns.unfold(virtual, size) for virtual in range(len(left))] == left
    assert patterns.unfold(len(left), size) == size
    for rank, part in enumerate(folds):
        assert not (part.host and part.guest)
        if part.host or part.guest:
            assert folds[rank ^ 1].virtual == part.virtual
            assert folds[rank ^ 1].guest == part.host


@pytest.mark.parametrize("count", [1, 2, 4, 8, 64])
def test_halvings_end_with_a_chunk_each(count: int) -> None:
    kept: list[int] = []
    for virtual in range(count):
        now = range(count)
        for mask, keep, give in patterns.halvings(virtual, count):
            assert sorted((*keep, *give)) == list(now)
            peer = patterns.halvings(virtual ^ mask, count)[mask.bit_length() - 1]
            assert (peer.keep, peer.give) == (give, keep)
            now = keep
        kept += now
    assert sorted(kept) == list(range(count))


@pytest.mark.parametrize("size", [size for size in SIZES if size > 1])
def test_double_tree(size: int) -> None:
    nodes = [patterns.double_tree(rank, size) for rank in range(size)]
    assert not any(first.children and second.children for first, second in nodes)
    for which in (0, 1):
        tree = [pair[which] for pair in nodes]
        assert [node.parent for node in tree].count(None) == 1
        assert max(node.depth for node in tree) == tree[0].height
        for rank, node in enumerate(tree):
            assert len(node.children) <= 2
            assert [tree[child].parent for child in node.children] == [rank] * len(node.children)
            assert all(tree[child].depth == node.depth + 1 for child in node.children)
            # In-order: what hangs below a rank is an interval around it, so order survives.
            under = sorted((rank, *below(tree, rank)))
            assert under == list(range(under[0], under[-1] + 1))


def below(tree: list[patterns.Node], rank: int) -> list[int]:
    return [x for child in tree[rank].children for x in (child, *below(tree, child))]
