"""States of ranks, as snapshots of them would be."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from mpicoll.engine.diagnostics.analysis import analyse
from mpicoll.engine.diagnostics.call_facts import describe_call
from mpicoll.engine.diagnostics.flight_recorder import Call, Group

State = dict[str, Any]


WORLD = ("0.0", "world", (0, 1, 2, 3))


PAIR = ("0.1", "world/pair", (0, 1))
OTHER = ("0.2", "world/other", (0, 1))


def doing(
    group: tuple[str, str, tuple[int, ...]],
    number: int,
    call: Call,
    *,
    line: int = 10,
    seconds: float = 30.0,
    **more: Any,
) -> State:
    """A pending operation."""
    key, name, members = group
    described = describe_call(call, Group(key, name, members, 0, 60.0))
    site = {"file": "/home/me/train.py", "line": line, "function": "step"}
    found = {"key": key, "group": name, "members": list(members), "number": number, "call": described, "site": site}
    return found | {"begin": 1.5, "seconds": seconds, "thread": "MainThread", "program": True, "where": ""} | more


def begun(group: tuple[str, str, tuple[int, ...]], number: int, **more: Any) -> State:
    """The queue of a communicator."""
    key, name, members = group
    found = {"key": key, "name": name, "members": list(members), "number": number}
    return found | {"running": False, "queued": 0, "background": True} | more


def state(queues: Sequence[State] = (), *pending: State, **more: Any) -> State:
    """A rank whose program runs what is pending, or else itself."""
    running = {(one["key"], one["number"]) for one in pending}
    program: State = {"waits": "", "site": {"file": "/home/me/train.py", "line": 33, "function": "load"}}
    for one in pending:
        if one["program"]:
            program |= {"waits": "queue", "key": one["key"]} if one["number"] else {"waits": "message"}
    found: State = {
        "queues": [one | {"running": (one["key"], one["number"]) in running} for one in queues],
        "pending": list(pending),
        "program": program,
        "others": [],
        "started": [],
    }
    return found | more


WHAT = "allreduce(float32[1000], op=sum) number 17 on world"


SUM = Call("allreduce", 4000, "float32", (1000,), op="sum", algorithm="ring")


BARRIER = Call("barrier", 0, algorithm="shm_flat")


def message(name: str, peer: int | None, tag: int | None) -> Call:
    return Call(name, 24, "float64", (3,), peer=peer, tag=tag, collective=False)


def waits(number: int = 17, group: Any = WORLD, call: Call = SUM, **more: Any) -> State:
    """A rank that waits in a collective."""
    return state([begun(group, number)], doing(group, number, call, **more))


def in_message(name: str, peer: int | None, tag: int | None = 5, number: int = 16, **more: Any) -> State:
    """A rank that has begun `number` collectives on the world, and waits for a message."""
    return state([begun(WORLD, number)], doing(WORLD, 0, message(name, peer, tag), line=40, **more))


def at_work(number: int = 16, **more: Any) -> State:
    """A rank that waits for nobody."""
    return state([begun(WORLD, number)], **more)


def said(*states: State | None) -> list[str]:
    """What is said of these ranks, after a journey as JSON."""
    return analyse({rank: json.loads(json.dumps(one)) for rank, one in enumerate(states)}, len(states)).words


def crossed() -> tuple[State, State]:
    """Two ranks that call the same collectives of two communicators in two orders."""
    return (
        state([begun(PAIR, 4), begun(OTHER, 7)], doing(PAIR, 4, SUM)),
        state([begun(PAIR, 3), begun(OTHER, 8)], doing(OTHER, 8, BARRIER, line=12)),
    )
