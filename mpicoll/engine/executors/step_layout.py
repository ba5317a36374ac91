"""Steps of schedules with large messages, in pieces: which messages each has, and which it has to wait for."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from mpicoll.engine.executors.bound_schedule import ChunkMap, Extent, get_piece_size
from mpicoll.schedules import Local, Recv, Round, Schedule, Send

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


class LocalPart(NamedTuple):
    """A piece of a local step."""

    step: int
    """The step of its round after whose messages it runs."""
    kind: Local
    src: Extent
    dst: Extent


class Step(NamedTuple):
    """The k-th pieces of the messages of a round, and the local steps for which they were the last ones to complete."""

    round: int
    piece: int
    pieces: int
    needs: int
    """Number of steps that must have ended before it is posted."""
    parts: tuple[Part, ...]
    then: tuple[LocalPart, ...]


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
        earlier = _UsedMemory([])
        before = blocked = 0
        for number, one in enumerate(self._schedule.rounds):
            parts = list(self._make_parts(one))
            # Messages that only synchronise may concern any memory.
            opaque = any(not message.chunks for message in list_messages(one))
            if opaque or not _are_separate(parts):
                parts = [part._replace(step=0) for part in parts]
            reused = INCOMING_STEPS if self._may_reuse(number, parts) else len(parts)
            parts = _place_incoming(parts, reused)
            then = self._make_local_parts(one.then, parts)
            ends = [part.step + 1 for part in parts] + [local.step + 1 for local in then]
            pieces = max(ends, default=0)
            if not pieces:
                continue
            by_step: list[tuple[list[Part], list[LocalPart]]] = [([], []) for _ in range(pieces)]
            for part in parts:
                by_step[part.step][0].append(part)
            for local in then:
                by_step[local.step][1].append(local)
            first = len(steps)
            for at, (own, own_then) in enumerate(by_step):
                # Only the round before may be in progress, and it has to use other memory.
                used = [extent for part in own for extent in _get_extents(part)]
                needs = first if opaque else max(blocked, before, earlier.find_last(used))
                if at >= reused and any(part.incoming is not None for part in own):
                    needs = max(needs, first + at - reused + 1)
                steps.append(Step(number, at, pieces, needs, tuple(own), tuple(own_then)))
            used_by = [(extent, part.step) for part in parts for extent in _get_extents(part)]
            used_by += [(extent, local.step) for local in then for extent in (local.src, local.dst)]
            earlier = _UsedMemory((extent, first + step + 1) for extent, step in used_by)
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

    def _make_local_parts(self, then: Sequence[Local], parts: Sequence[Part]) -> list[LocalPart]:
        """Return the local steps of a round, in pieces where the messages that they read arrive in pieces. Each is in
        the first step with which all that it concerns is final."""
        if not then:
            return []
        arriving = _UsedMemory((extent, part.step) for part in parts if not part.sends for extent in part.runs)
        used = _UsedMemory((extent, part.step) for part in parts for extent in part.runs)
        made: list[LocalPart] = []
        for one in then:
            # The local steps of a round run in the order of the schedule.
            read = _UsedMemory((part.src, part.step) for part in made)
            written = _UsedMemory((part.dst, part.step) for part in made)
            whole, (region, begin, _) = self._chunks.find_operands(one)
            for src in arriving.cut(whole):
                dst = (region, begin + src[1] - whole[1], begin + src[2] - whole[1])
                after_messages = max(arriving.find_last([src]), used.find_last([dst]))
                after_others = max(written.find_last([src, dst]), read.find_last([dst]))
                made.append(LocalPart(max(after_messages, after_others), one, src, dst))
        return made

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


class _UsedMemory:
    """Extents of memory that are used, with numbers that say when."""

    def __init__(self, used: Iterable[tuple[Extent, int]]) -> None:
        self._used = sorted((*extent, number) for extent, number in used)
        self._longest = max((stop - start for _, start, stop, _ in self._used), default=0)

    def find_last(self, extents: Sequence[Extent]) -> int:
        """Return the largest number of those that overlap one of `extents`; 0 if there are none."""
        last = 0
        for region, start, stop in extents:
            for at in range(bisect_left(self._used, (region, stop)) - 1, -1, -1):
                number, begin, end, item = self._used[at]
                if number != region or begin <= start - self._longest:
                    break
                if end > start:
                    last = max(last, item)
        return last

    def cut(self, extent: Extent) -> Iterator[Extent]:
        """Yield `extent` in pieces, so that each lies within each of those that are used, or beside it."""
        region, start, stop = extent
        ends = {end for number, *both, _ in self._used if number == region for end in both if start < end < stop}
        for end in sorted((*ends, stop)):
            if start < end:
                yield region, start, end
            start = end
