"""Deadlock detection: cycles of waits, and waits for ranks that have left, or have failed in the operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from mpicoll.engine.diagnostics.call_facts import (
    FROM_ROOT,
    TO_ROOT,
    State,
    at_site,
    call_with_number,
    comm_key,
    is_empty,
    is_meeting,
    kind_of,
    messages_of,
    ranks_needed,
)
from mpicoll.engine.diagnostics.pending import describe_mismatches, number_begun, pending_operations
from mpicoll.engine.diagnostics.rank_state import IN_TRANSIT
from mpicoll.wording import inflect, rank_list, ranks_and_verb, shorten


@dataclass(frozen=True, slots=True)
class Deadlock:
    """Ranks that wait for each other, none of which can continue.

    `waits` are the operations in which they wait, as (rank, key of the communicator, number, begin): equal at two
    looks if and only if the operations are the same. `keys` are the communicators of these operations. `cycle` are
    ranks each of which waits for the next, and the last for the first (empty where all wait for a rank that has
    left or failed). `words` has a sentence for each operation, those of the cycle first. `mismatches` are sentences
    about collectives that ranks have called differently; their operations have no other sentence. `left` is True if
    all wait for ranks that have left, or failed in the operation, directly or not.
    """

    ranks: tuple[int, ...]
    cycle: tuple[int, ...]
    keys: tuple[str, ...]
    waits: tuple[tuple[int, str, int, float], ...]
    words: tuple[str, ...]
    mismatches: tuple[str, ...] = ()
    left: bool = False

    def __str__(self) -> str:
        """Return the description as one sentence."""
        words = ", ".join(shorten(self.words))
        if self.mismatches:
            return "; ".join([*self.mismatches, *([words] if words else [])])
        if self.left:
            return words
        who = rank_list(self.ranks)
        head = f"{who} wait for each other" if len(self.ranks) > 1 and self.cycle else f"{who} can't continue"
        return f"deadlock: {head}: {words}"


MIN_WAIT = 2.0
"""Minimum seconds of a wait to count if there is only one look: longer than a look at all ranks takes."""


_Agent: TypeAlias = tuple[str, int, str]
"""An entity that waits for one thing at a time: ("queue", rank, key), or ("program", rank, "")."""


def find_deadlock(states: Mapping[int, State], size: int) -> Deadlock | None:
    """Return the ranks that can't continue since each waits for others that can't continue either, or None.

    The result is None if there are no such ranks, or if that is not certain. Call it when the same operations were
    pending at two looks 2 s or more apart.

    A collective is assumed to wait only for the ranks whose data it needs, and for those that its algorithm is
    waiting for at the moment. A message may be in transit if its other side has been started. Ranks without a state
    may do anything, and so may a rank with threads of the program beside the main one.
    """
    return DeadlockSearch(states, 0.0).find()


def open_questions(states: Mapping[int, State]) -> list[tuple[str, int]]:
    """Return collectives that have ended on some ranks while others wait in them, and meetings.

    They are given by key of the communicator and number. The calls of the ranks for these, and the numbers of
    meetings, are to be requested from :func:`snapshot`.
    """
    collectives, _ = pending_operations(states)
    return [
        (wait["key"], wait["number"])
        for wait in collectives
        if any(
            rank not in wait["by"] and "queues" in states.get(rank, {})
            for rank in (wait["members"] if is_meeting(wait["key"]) else wait["begun"])
        )
    ]


class DeadlockSearch:
    """A search for deadlocks. `least` are the seconds that an operation must have been pending to count."""

    def __init__(self, states: Mapping[int, State], least: float) -> None:
        # A rank that was not queried may do anything, as a rank that has not responded.
        self._states = {rank: state for rank, state in states.items() if "unreached" not in state}
        self._least = least
        self._absent: dict[tuple[str, int], list[int]] = {}
        self._mismatched: dict[tuple[str, int], str] = {}
        waits, _ = pending_operations(states)
        for wait in waits:
            for words in describe_mismatches(wait, states):
                self._mismatched[wait["key"], wait["number"]] = words
        self._queues = {
            (rank, queue["key"]): queue for rank, state in self._states.items() for queue in state.get("queues", [])
        }

    def find(self) -> Deadlock | None:
        released: dict[_Agent, _Wait] = {}
        for rank, state in self._states.items():
            for one in state.get("pending", []):
                if one["number"] and one["seconds"] >= self._least:
                    released["queue", rank, one["key"]] = self._collective(rank, one)
                elif not one["number"] and not one["program"]:
                    wait = self._message(rank, one)
                    if wait is not None:
                        released["thread", rank, one["thread"]] = wait
            wait = self._program(rank, state)
            if wait is not None:
                released["program", rank, ""] = wait
        stuck = set(released)
        while True:
            free = {agent for agent in stuck if released[agent].may_continue(stuck)}
            if not free:
                break
            stuck -= free
        return self._describe({agent: released[agent] for agent in sorted(stuck)}, stuck) if stuck else None

    def _collective(self, rank: int, one: State) -> _Wait:
        members, number, key = one["members"], one["number"], one["key"]
        if (key, number) in self._mismatched:
            return _Wait(rank, one, lambda stuck: False, lambda stuck: [])
        failed = [peer for peer in one.get("waits_for", []) if self._has_failed(peer, key, number)]
        if failed:
            return _Wait(rank, one, lambda stuck: False, lambda stuck: failed)
        absent = self._absent.get((key, number))
        if absent is None:
            absent = [peer for peer in members if not self._has_begun(peer, key, number)]
            self._absent[key, number] = absent
        call = one["call"]
        if is_meeting(key):
            needed = {peer for peer in members if "died" not in self._states.get(peer, {})}
        else:
            needed = ranks_needed(call, members, members.index(rank)) | set(one.get("waits_for", []))
        needs = [peer for peer in absent if peer in needed]
        # A rank that only sends may complete without the others, but not while no other rank has begun to receive.
        gives = kind_of(call["name"]) in (*FROM_ROOT, *TO_ROOT, "scan", "exscan") and not is_empty(call)
        some = absent if gives and not needs and len(absent) == len(members) - 1 else []

        def may_continue(stuck: set[_Agent]) -> bool:
            if needs:
                return all(self._may_begin(peer, key, stuck) for peer in needs)
            return not some or any(self._may_begin(peer, key, stuck) for peer in some)

        return _Wait(
            rank,
            one,
            may_continue,
            lambda stuck: [peer for peer in needs or some if not self._may_begin(peer, key, stuck)],
        )

    def _has_begun(self, rank: int, key: str, number: int) -> bool:
        queue = self._queues.get((rank, key))
        begun = number_begun(self._states.get(rank), key) or 0 if queue is None else queue["number"]
        return bool(begun >= number)

    def _has_failed(self, rank: int, key: str, number: int) -> bool:
        """Return True if a collective has ended on `rank` by an error, so that it sends nothing more there."""
        called = self._states.get(rank, {}).get("called", [])
        return any(one.get("failed") and (one["key"], one["number"]) == (key, number) for one in called)

    def _may_begin(self, rank: int, key: str, stuck: set[_Agent]) -> bool:
        """Return True if `rank` may still begin another collective of a communicator, or meeting of a sequence."""
        state, whole = self._states.get(rank, {}), comm_key(key)
        if "left" in state:
            return whole not in state["numbers"]  # a communicator that was dropped long ago has no record
        if is_meeting(key) and number_begun(state, key) is None:
            return True
        if whole in state.get("retired", ()):
            return False
        if (rank, whole) not in self._queues:
            return True
        return ("queue", rank, key) not in stuck and self._may_call(rank, stuck)

    def _may_call(self, rank: int, stuck: set[_Agent]) -> bool:
        """Return True if `rank` may still make a call."""
        state = self._states.get(rank, {})
        if "left" in state:
            return False
        if ("program", rank, "") not in stuck or state.get("others", True):
            return True
        # An operation in the background may be the awaited one, and its callbacks may start others.
        return any(
            (one["running"] or (one["queued"] and one["background"])) and ("queue", rank, one["key"]) not in stuck
            for one in state.get("queues", [])
        )

    def _program(self, rank: int, state: State) -> _Wait | None:
        """Return the wait of the program of `rank`, or None if it has a bound."""
        program = state.get("program", {})
        if program.get("waits") == "queue":
            agent = ("queue", rank, program["key"])
            return _Wait(rank, None, lambda stuck: agent not in stuck, lambda stuck: [])
        if program.get("waits") != "message":
            return None
        one = next((one for one in state.get("pending", []) if one["program"] and not one["number"]), None)
        return None if one is None else self._message(rank, one)

    def _message(self, rank: int, one: State) -> _Wait | None:
        """Return a wait for messages; None if the messages are not known or the wait has a bound."""
        if one.get("bounded") or one["seconds"] < self._least:
            return None
        ways = messages_of(one["call"], one["key"])
        if not ways:
            return None
        others = [peer for peer in one["members"] if peer != rank]
        takes = one["call"].get("takes")

        def peers(way: State) -> list[int]:
            return others if way["peer"] is None else [way["peer"]]

        def may_come(way: State, stuck: set[_Agent]) -> bool:
            if takes is not None:
                return any(self._may_answer(rank, way["key"], peer, stuck) for peer in peers(way))
            return any(
                self._may_be_in_transit(rank, way, peer, one["seconds"]) or self._may_call(peer, stuck)
                for peer in peers(way)
            )

        def may(stuck: set[_Agent]) -> bool:
            # Of a sendrecv, either direction may be the one that is still pending.
            return (any if takes is None else all)(may_come(way, stuck) for way in ways)

        def find_awaited(stuck: set[_Agent]) -> list[int]:
            return [peer for way in ways if takes is None or not may_come(way, stuck) for peer in peers(way)]

        return _Wait(rank, one, may, find_awaited)

    def _count(self, rank: int, key: str, what: str, peer: int, tag: int | None) -> int | None:
        """Return the number of messages with `tag` (None: any) that `rank` has "sent" to or "received" from `peer`.

        The messages are those of one communicator. Returns None if the number is not known.
        """
        state = self._states.get(rank, {})
        queue = self._queues.get((rank, key))
        tally = (state.get("sent", {}).get(key) if what == "sent" else None) if queue is None else queue.get(what)
        if tally is None:
            return None
        of_peer = [(other, number) for to, other, number in tally if to == peer]
        if tag is not None and any(other is None for other, _ in of_peer):
            return None
        found: int = sum(number for other, number in of_peer if tag in (None, other))
        return found

    def _all_received(self, source: int, dest: int, key: str, tag: int | None = None) -> bool | None:
        """Return True if no message with `tag` (None: any) from `source` to `dest` is in transit; None if not known."""
        sent = self._count(source, key, "sent", dest, tag)
        received = self._count(dest, key, "received", source, tag)
        return None if sent is None or received is None else sent == received

    def _may_answer(self, rank: int, key: str, peer: int, stuck: set[_Agent]) -> bool:
        """Return True if a message from `peer` may still arrive for a wait that lasts until one arrives.

        The message may be in transit, be sent by `peer` later, or answer a message that `peer` receives while
        it waits.
        """
        if not self._all_received(peer, rank, key) or self._may_call(peer, stuck):
            return True
        state = self._states[peer]
        waits = [one for one in state.get("pending", []) if one["key"] == key and "takes" in one["call"]]
        takes = any(rank in (one["members"][stage] for stage in one["call"]["takes"]) for one in waits)
        takes = takes or self._queues.get((peer, key), {}).get("answered", False)
        return takes and not self._all_received(rank, peer, key)

    def _may_be_in_transit(self, rank: int, way: State, peer: int, waited: float) -> bool:
        """Return True if the other side of a message may have been started, so that the message may be in transit."""
        state = self._states.get(peer)
        if state is None:
            return True
        if way["way"] == "recv":
            received = self._all_received(peer, rank, way["key"], way["tag"])
            if received is None:  # there may have been too many tags to count apart
                received = self._all_received(peer, rank, way["key"])
            if received is not None:
                return not received
        started = list(state.get("started", []))
        for one in state.get("pending", []):
            started += messages_of(one["call"], one["key"])
        if "left" in state and waited < IN_TRANSIT:
            return True
        return any(
            other["key"] in (None, way["key"])
            and other["way"] != way["way"]
            and other["peer"] in (None, rank)
            and (other["tag"] is None or way["tag"] is None or other["tag"] == way["tag"])
            for other in started
        )

    def _describe(self, waits: dict[_Agent, _Wait], stuck: set[_Agent]) -> Deadlock:
        """Return the description of the stuck agents."""
        edges: dict[int, list[int]] = {}
        same: dict[tuple[str, tuple[int, ...], str], list[int]] = {}
        found = []
        for wait in waits.values():
            one = wait.one
            if one is None:
                continue
            on = tuple(dict.fromkeys(wait.find_awaited(stuck)))
            edges.setdefault(wait.rank, []).extend(on)
            found.append((wait.rank, one["key"], one["number"], one["begin"]))
            if (one["key"], one["number"]) not in self._mismatched:
                what = f"{call_with_number(one)}{at_site(one.get('site'))}"
                same.setdefault((what, on, self._describe_gone(on, one["key"], one["number"])), []).append(wait.rank)
        cycle = _cycle(edges)
        mismatched = {(key, number) for _, key, number, _ in found} & self._mismatched.keys()
        return Deadlock(
            ranks=tuple(sorted(edges)),
            cycle=cycle,
            keys=tuple(sorted({key for _, key, _, _ in found})),
            waits=tuple(sorted(found)),
            words=tuple(
                f"{ranks_and_verb(ranks, 'waits', 'wait')} in {what} for {rank_list(on)}{gone}"
                for (what, on, gone), ranks in sorted(
                    same.items(), key=lambda one: (not set(one[1]) & set(cycle), one[1])
                )
            ),
            mismatches=tuple(self._mismatched[one] for one in sorted(mismatched)),
            left=not mismatched and not cycle,
        )

    def _describe_gone(self, ranks: Sequence[int], key: str, number: int) -> str:
        """Return the part of a sentence about awaited ranks that have left, or else have failed in the operation."""
        gone = [rank for rank in ranks if "left" in self._states.get(rank, {})]
        verb = inflect(gone, "has exited", "have exited")
        if not gone:
            gone = [rank for rank in ranks if self._has_failed(rank, key, number)]
            verb = f"failed in it, as {inflect(gone, 'its', 'their')} own error explains"
        if not gone:
            return ""
        who = "which" if len(gone) == len(ranks) else f"of which {rank_list(gone)}"
        return f", {who} {verb}"


@dataclass(slots=True)
class _Wait:
    """A waiting agent.

    `one` is the operation. `may_continue` and `find_awaited` (which returns ranks) depend on which agents are stuck.
    """

    rank: int
    one: State | None
    may_continue: Callable[[set[_Agent]], bool]
    find_awaited: Callable[[set[_Agent]], list[int]]


def _cycle(edges: Mapping[int, Sequence[int]]) -> tuple[int, ...]:
    """Return ranks each of which waits for the next, and the last for the first.

    The result is empty if there is no cycle, as when all wait for a rank that has left.
    """
    left = dict(edges)
    while idle := [rank for rank, peers in left.items() if not any(peer in left for peer in peers)]:
        for rank in idle:
            del left[rank]
    if not left:
        return ()
    path = [min(left)]
    while (following := next(peer for peer in left[path[-1]] if peer in left)) not in path:
        path.append(following)
    found = path[path.index(following) :]
    first = found.index(min(found))
    return (*found[first:], *found[:first])
