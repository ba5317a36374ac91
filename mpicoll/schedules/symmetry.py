"""Profiles of algorithms in which all ranks do the same relative to their place: one rank represents all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice, zip_longest
from typing import NamedTuple, TypeAlias

from mpicoll.schedules.cost import chunks_reduced
from mpicoll.schedules.load_profile import Load, Profile, total_load
from mpicoll.schedules.patterns import power_below
from mpicoll.schedules.placement import Placement


class _RoundClass(NamedTuple):
    """A round without its chunks: distance and size of each message out and in, and the amount that is reduced."""

    outs: tuple[tuple[int, int], ...]
    ins: tuple[tuple[int, int], ...]
    reduced: int


def profile_by_symmetry(placement: Placement, budget: int) -> Profile | None:
    """Return the profile if ranks differ only by their place, else None."""
    symmetries = [_shift] if placement.size != power_below(placement.size) else [_shift, _flip]
    for distance in symmetries:
        if _are_symmetric(placement, distance):
            return _profile_rounds(placement, distance, budget)
    return None


def _shift(rank: int, peer: int, size: int) -> int:
    """Return the distance of `peer`, counted upwards from `rank` on a ring."""
    return (peer - rank) % size


def _flip(rank: int, peer: int, size: int) -> int:
    """Return the distance of `peer`, as the bits in which it differs from `rank`."""
    return rank ^ peer


_Distance: TypeAlias = Callable[[int, int, int], int]


def _round_classes(placement: Placement, rank: int, distance: _Distance) -> Iterator[_RoundClass]:
    size = placement.size
    for now in placement.steps(rank):
        yield _RoundClass(
            tuple([(distance(rank, send.to, size), len(send.chunks)) for send in now.sends]),
            tuple([(distance(rank, recv.source, size), len(recv.chunks)) for recv in now.recvs]),
            chunks_reduced(now),
        )


def _are_symmetric(placement: Placement, distance: _Distance) -> bool:
    """Return True if ranks have the same messages at the same distances. Small numbers of ranks are checked completely,
    otherwise some ranks, for their first rounds.

    Receives must mirror sends, so that ranks stay in step.
    """
    size = placement.size
    few = size <= 64
    others = range(1, size) if few else (1, 2, size // 3, size // 2, size - 2, size - 1)
    rounds = None if few else 64
    first = list(islice(_round_classes(placement, 0, distance), rounds))
    if any(sorted((distance(far, 0, size), n) for far, n in kind.outs) != sorted(kind.ins) for kind in first):
        return False
    return all(
        mine == theirs
        for rank in others
        for mine, theirs in zip_longest(first, islice(_round_classes(placement, rank, distance), rounds))
    )


def _profile_rounds(placement: Placement, distance: _Distance, budget: int) -> Profile | None:
    kinds: Counter[_RoundClass] = Counter()
    sent = messages = 0
    for kind in _round_classes(placement, 0, distance):
        sent += sum(n for _, n in kind.outs)
        messages += len(kind.outs)
        if messages > budget:
            raise placement.budget_error(budget)
        kinds[
            _RoundClass(
                tuple([(_hop(placement, distance, far), n) for far, n in kind.outs]),
                tuple([(_hop(placement, distance, far), n) for far, n in kind.ins]),
                kind.reduced,
            )
        ] += 1
    levels: Counter[frozenset[Load]] = Counter()
    rounds = crossing = 0
    for kind, count in kinds.items():
        if not kind.outs and not kind.reduced:
            continue
        rounds += count if kind.outs else 0
        out_of_node = sum(min(abs(hop), placement.per_node) * n for hop, n in kind.outs)
        crossing += count * out_of_node
        levels[frozenset(_loads(placement, kind, out_of_node))] += count
    return placement.profile(levels, rounds, sent, crossing, "one")


def _hop(placement: Placement, distance: _Distance, far: int) -> int:
    """Return `far` as steps along the ranks if it may stay in a node, 0 if it always does, else the ranks of a node."""
    per_node = placement.per_node
    if placement.nodes == 1:
        return 0
    if distance is _flip:
        return 0 if far < per_node else per_node
    if far < per_node:
        return far
    return far - placement.size if far > placement.size - per_node else per_node


def _loads(placement: Placement, kind: _RoundClass, out_of_node: int) -> Iterator[Load]:
    """Yield the loads of all ranks of a node in a round of this kind, and of its links."""
    per_node = placement.per_node
    # A message of hop h > 0 leaves the node from its last h places, one of h < 0 from its first |h|.
    hops = {hop for hop, _ in (*kind.outs, *kind.ins)}
    turns = {0} | {per_node - hop if hop > 0 else -hop for hop in hops}
    for seat in turns:
        if seat < per_node:
            for messages in (kind.outs, kind.ins):
                yield total_load([(not 0 <= seat + hop < per_node, n) for hop, n in messages], kind.reduced)
    if out_of_node:
        yield Load(net_messages=1, net_chunks=out_of_node / placement.links)
