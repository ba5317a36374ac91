"""Steps of schedules with large messages, in pieces: which messages each has, and which it has to wait for."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from mpicoll.engine.executors.bound_schedule import ChunkMap, Extent, get_piece_size
from mpicoll.schedules import Recv, Round, Schedule, Send

_INCOMING = -1
"""The region of extents in the memory for what is received to be reduced."""

INCOMING_STEPS = 16
"""Steps after which the memory for what is received to be reduced is used again, where the rank sends meanwhile: it
stays in the caches, and the kernel need not provide so much of it. Fewer sends to a rank are posted at a time."""

REUSING = frozenset(
    {
        "allreduce/halving_doubling",
        "allreduce/recursive_doubling",
        "allreduce/ring",
        "reduce/chain",
        "reduce/reduce_scatter_gather",
        "reduce_scatter/pairwise",
        "reduce_scatter/recursive_halving",
        "reduce_scatter/ring",
        "scan/linear",
    }
)
"""Algorithms that complete although such memory is used again. Other schedules may rely on all messages of a round
being posted at once: a rank that sends only what it has received whole would wait for the last ones without end."""

_PART_OF_PIECE = 4096
"""The first piece of a message lacks such a part of a piece for each piece of the message."""


class Part(NamedTuple):
    """A piece of a message."""

    step: int
    """The step of its round that it is in."""
    peer: int
    sends: bool
    runs: list[Extent]
    """The memory; none for a token."""
    incoming: Extent | None
    """The memory that it is received into if it is to be reduced."""
    cut: bool
    """True if the message has several pieces."""


class Step(NamedTuple):
    """The k-th pieces of the messages of a round."""

    round: int
    piece: int
    pieces: int
    needs: int
    """Number of steps that must have ended before it is posted."""
    parts: tuple[Part, ...]
    local: bool
    """True if it ends with the local steps of the round."""


@lru_cache(maxsize=64)
def lay_out(schedule: Schedule, offsets: tuple[tuple[int, ...], ...], itemsize: int) -> tuple[Step, ...]:
    """Return the steps of `schedule` for regions with these `offsets` and elements of `itemsize` bytes.

    They don't depend on the memory, so calls of one kind share them: making them takes longer than a piece travels.
    """
    return tuple(_Layout(schedule, offsets, itemsize).make_steps())


class _Layout:
    """Makes the steps of a schedule."""

    def __init__(self, schedule: Schedule, offsets: Sequence[Sequence[int]], itemsize: int) -> None:
        self._schedule = schedule
        self._chunks = ChunkMap(offsets)
        self._itemsize = itemsize

    def make_steps(self) -> list[Step]:
        steps: list[Step] = []
        earlier: list[tuple[int, int, int, int]] = []
        before = blocked = 0
        for number, one in enumerate(self._schedule.rounds):
            parts = list(self._make_parts(one))
            # Local steps, and messages that only synchronise, may concern any memory.
            opaque = bool(one.then) or any(not message.chunks for message in list_messages(one))
            if opaque or not _are_separate(parts):
                parts = [part._replace(step=0) for part in parts]
            reused = INCOMING_STEPS if self._may_reuse(number, parts) else len(parts)
            parts = _place_incoming(parts, reused)
            pieces = max((part.step + 1 for part in parts), default=int(bool(one.then)))
            if not pieces:
                continue
            by_step: list[list[Part]] = [[] for _ in range(pieces)]
            for part in parts:
                by_step[part.step].append(part)
            first = len(steps)
            for at, own in enumerate(by_step):
                # Only the round before may be in progress, and it has to use other memory.
                used = [extent for part in own for extent in _get_extents(part)]
                needs = first if opaque else max(blocked, before, _find_last(earlier, used))
                if at >= reused and any(part.incoming is not None for part in own):
                    needs = max(needs, first + at - reused + 1)
                local = bool(one.then) and at == pieces - 1
                steps.append(Step(number, at, pieces, needs, tuple(own), local))
            earlier = sorted((*extent, first + part.step + 1) for part in parts for extent in _get_extents(part))
            before = first
            if opaque:
                blocked = len(steps)
        return steps

    def _may_reuse(self, number: int, parts: Sequence[Part]) -> bool:
        """Return True if a round may use the memory for what is received to be reduced again. A later round may send
        what arrives in the first steps, and must not wait until the last ones can begin, unless all of them send."""
        if f"{self._schedule.collective}/{self._schedule.algorithm}" not in REUSING:
            return False
        is_last = number == len(self._schedule.rounds) - 1
        reducing = {part.step for part in parts if part.incoming is not None}
        return is_last or reducing <= {part.step for part in parts if part.sends}

    def _make_parts(self, one: Round) -> Iterator[Part]:
        """Yield the pieces of all messages of a round. Two messages to one rank are in steps one after the other, since
        the rank may receive them in different rounds."""
        next_step: dict[tuple[int, bool], int] = {}
        for message in list_messages(one):
            receives = isinstance(message, Recv)
            peer = message.source if isinstance(message, Recv) else message.to
            reduce = isinstance(message, Recv) and message.reduce
            step = next_step.get((peer, receives), 0)
            cut = self._is_cut(message.chunks)
            for runs in self._cut(message.chunks):
                incoming = (_INCOMING, 0, sum(stop - start for _, start, stop in runs)) if reduce and runs else None
                yield Part(step, peer, not receives, runs, incoming, cut)
                step += 1
            next_step[peer, receives] = step

    def _is_cut(self, chunks: Sequence[int]) -> bool:
        nbytes = self._chunks.count(chunks) * self._itemsize
        return nbytes > get_piece_size(nbytes)

    def _cut(self, chunks: Sequence[int]) -> Iterator[list[Extent]]:
        """Yield the memory of the pieces of a message with `chunks`; that of a token is one piece without memory.

        The first piece is smaller, the more the more pieces there are: so ranks that disagree about the size of the
        message get an error also where it is a multiple of that of the pieces.
        """
        if not chunks:
            yield []
            return
        nbytes = self._chunks.count(chunks) * self._itemsize
        nbytes_of_piece = get_piece_size(nbytes)
        size = max(1, nbytes_of_piece // self._itemsize)
        piece: list[Extent] = []
        room = size
        if nbytes > nbytes_of_piece:
            room -= -(-nbytes // nbytes_of_piece) * (size // _PART_OF_PIECE)
        for number, start, stop in self._chunks.find_runs(chunks):
            while start < stop:
                end = min(stop, start + room)
                piece.append((number, start, end))
                room -= end - start
                start = end
                if not room:
                    yield piece
                    piece, room = [], size
        if piece:
            yield piece


def list_messages(one: Round) -> list[Send | Recv]:
    return [*one.recvs, *one.sends]


def _place_incoming(parts: Sequence[Part], reused: int) -> list[Part]:
    """Return the parts of a round with places in the memory for what is received to be reduced, which is used again
    after so many steps."""
    used: dict[int, int] = {}
    within: list[int] = []
    for part in parts:
        within.append(used.get(part.step, 0))
        if part.incoming is not None:
            used[part.step] = within[-1] + part.incoming[2]
    stride = max(used.values(), default=0)
    placed: list[Part] = []
    for part, offset in zip(parts, within, strict=True):
        incoming = part.incoming
        if incoming is not None:
            start = part.step % reused * stride + offset
            incoming = (_INCOMING, start, start + incoming[2])
        placed.append(part._replace(incoming=incoming))
    return placed


def count_incoming(steps: Sequence[Step]) -> int:
    """Return the elements of the memory for what is received to be reduced."""
    ends = (part.incoming[2] for step in steps for part in step.parts if part.incoming is not None)
    return max(ends, default=0)


def _get_extents(part: Part) -> list[Extent]:
    return part.runs if part.incoming is None else [*part.runs, part.incoming]


def _are_separate(parts: Sequence[Part]) -> bool:
    """Return True if no part writes to memory that a part of another step of the round uses."""
    extents = sorted((*extent, part.step, not part.sends) for part in parts for extent in part.runs)
    active: list[tuple[int, int, bool]] = []
    region = 0
    for number, start, stop, step, writes in extents:
        active = [one for one in active if one[0] > start] if number == region else []
        if any(other != step and (writes or written) for _, other, written in active):
            return False
        region = number
        active.append((stop, step, writes))
    return True


def _find_last(earlier: Sequence[tuple[int, int, int, int]], own: Sequence[Extent]) -> int:
    """Return the largest last item of those in `earlier`, sorted extents with a further item, that overlap one of
    `own`; 0 if there are none."""
    longest = max((stop - start for _, start, stop, _ in earlier), default=0)
    last = 0
    for region, start, stop in own:
        for number, begin, end, item in reversed(earlier[: bisect_left(earlier, (region, stop))]):
            if number != region or begin <= start - longest:
                break
            if end > start:
                last = max(last, item)
    return last
