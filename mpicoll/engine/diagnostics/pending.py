"""The operations in which ranks wait, according to the states of all ranks."""

from __future__ import annotations

from collections.abc import Mapping

from mpicoll.engine.diagnostics.call_facts import (
    State,
    at_site,
    call_text,
    call_with_site,
    comm_key,
    group_matching,
    is_meeting,
    kind_of,
    messages_of,
)
from mpicoll.wording import inflect, rank_list, ranks_and_verb, shorten


def pending_operations(known: Mapping[int, State]) -> tuple[list[State], list[State]]:
    """Return the operations in which ranks wait, the longest waits first: collectives, and others."""
    collectives: dict[tuple[str, int], State] = {}
    messages: list[State] = []
    for rank, state in sorted(known.items()):
        for one in state.get("pending", []):
            if not one["number"]:
                peers = [way["peer"] for way in messages_of(one["call"], one["key"])]
                missing = list(dict.fromkeys(peer for peer in peers if peer is not None))
                messages.append(_wait(one) | {"by": {rank: one}, "begun": [rank], "missing": missing})
                continue
            wait = collectives.setdefault((one["key"], one["number"]), _wait(one) | {"by": {}})
            wait["by"][rank] = one
    for (key, number), wait in collectives.items():
        numbers = {rank: number_begun(known.get(rank), key) for rank in wait["members"]}
        wait["missing"] = [
            rank
            for rank, at in numbers.items()
            if (at is None or at < number) and "unreached" not in known.get(rank, ())
        ]
        wait["begun"] = [rank for rank, at in numbers.items() if at is not None and at >= number]
    return sorted(collectives.values(), key=_longest_wait), sorted(messages, key=_longest_wait)


def _longest_wait(wait: State) -> float:
    return -max(float(one["seconds"]) for one in wait["by"].values())


def _wait(one: State) -> State:
    return {name: one[name] for name in ("key", "group", "members", "number")} | {"call": call_text(one["call"])}


def find_queue(state: State | None, key: str) -> State | None:
    return next((one for one in (state or {}).get("queues", []) if one["key"] == key), None)


def number_begun(state: State | None, key: str) -> int | None:
    """Return the number of collectives of a communicator, or meetings of a sequence, that a rank has begun.

    Returns None if the number is not known.
    """
    if state is not None and "numbers" in state:
        none = 0 if is_meeting(key) and comm_key(key) in state["numbers"] else None
        number: int | None = state["numbers"].get(key, none)
        return number
    if is_meeting(key):
        return None if state is None else state.get("met", {}).get(key)
    queue = find_queue(state, key)
    return (state or {}).get("retired", {}).get(key) if queue is None else int(queue["number"])


def describe_mismatches(wait: State, known: Mapping[int, State]) -> list[str]:
    """Return sentences about ranks that called different collectives under one number, also if these have ended."""
    ended = {
        rank: one
        for rank in wait["begun"]
        if rank not in wait["by"]
        for one in known[rank].get("called", [])
        if (one["key"], one["number"]) == (wait["key"], wait["number"])
    }
    kinds = group_matching({rank: one["call"] for rank, one in [*wait["by"].items(), *ended.items()]})
    each = []
    for alike in kinds:
        running = [rank for rank in alike if rank in wait["by"]]
        if running:
            each.append(f"{ranks_and_verb(running, 'calls', 'call')} {call_with_site(wait['by'][running[0]])}")
        else:
            one = ended[alike[0]]
            has = inflect(alike, "has", "have")
            each.append(f"{rank_list(alike)} {has} called {call_text(one['call'])}{at_site(one.get('site'))}")
    names = {kind_of(one["call"]["name"]) for one in wait["by"].values()}
    each += [
        f"rank {rank} has called {one['call']}{at_site(one['site'])}"
        for rank in wait["begun"]
        if rank not in wait["by"] and rank not in ended
        for one in known[rank].get("past", [])
        if (one["key"], one["number"]) == (wait["key"], wait["number"]) and kind_of(one["name"]) not in names
    ]
    if len(each) < 2:
        return []
    which = f"collective number {wait['number']} on {wait['group']}"
    return [f"{which} is not the same on all ranks: {', '.join(shorten(each))}"]
