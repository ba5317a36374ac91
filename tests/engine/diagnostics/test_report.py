"""What a rank says of itself, and what the states of all ranks say together: who is missing, who can't go on."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mpicoll
from mpicoll.engine.core.queue import Progress, unmatched
from mpicoll.engine.diagnostics import flight_recorder, rank_state
from mpicoll.engine.diagnostics.analysis import analyse
from mpicoll.engine.diagnostics.call_facts import describe_call, messages_of, ranks_needed
from mpicoll.engine.diagnostics.deadlock import Deadlock, find_deadlock, open_questions
from mpicoll.engine.diagnostics.flight_recorder import Call, Group
from mpicoll.engine.diagnostics.rank_state import absent, own_state, unreached
from mpicoll.engine.diagnostics.report_file import text_of, words_of, write
from mpicoll.engine.diagnostics.wording import rank_list
from mpicoll.errors import ArgumentError

State = dict[str, Any]

WORLD = ("0.0", "world", (0, 1, 2, 3))
PAIR = ("0.1", "world/pair", (0, 1))


# --- states made by hand


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
BARRIER = Call("barrier", 0, algorithm="slots")


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


# --- the words


def said(*states: State | None) -> list[str]:
    """What is said of these ranks, after a journey as JSON."""
    return analyse({rank: json.loads(json.dumps(one)) for rank, one in enumerate(states)}, len(states)).words


def test_who_has_not_called() -> None:
    assert said(waits(), waits(), waits(), at_work()) == [
        (f"{WHAT} waits for rank 3, which has not called it: it runs its own program at train.py:33 in load")
    ]


def test_who_waits_elsewhere() -> None:
    assert said(waits(), at_work(), waits(), in_message("recv", 1)) == [
        (
            f"{WHAT} waits for ranks 1 and 3: rank 1 runs its own program at"
            " train.py:33 in load, rank 3 is in recv(float64[3], peer=1, tag=5) at train.py:40 in step"
        ),
        (
            "rank 3 has been waiting for 30 s in recv(float64[3], peer=1, tag=5) at train.py:40 in step: rank 1 runs"
            " its own program at train.py:33 in load"
        ),
    ]


def test_several_do_the_same() -> None:
    assert said(waits(), at_work(), at_work(), at_work()) == [
        (f"{WHAT} waits for ranks 1-3, which have not called it: they run their own program at train.py:33 in load")
    ]


def test_an_earlier_one_is_not_done() -> None:
    late = waits(16, call=BARRIER, line=9)
    assert said(waits(), late, late, late)[0] == (
        "barrier() number 16 on world was begun by all its ranks, and has not ended after 30 s"
    )
    assert said(waits(), late, late, late)[1] == (
        f"{WHAT} waits for ranks 1-3, which have not called it: they are"
        " still in number 16, barrier() at train.py:9 in step"
    )


def test_who_is_gone() -> None:
    waiting = waits()
    what = f"{WHAT} waits for rank 3"
    assert said(waiting, waiting, waiting, absent(3, "left", numbers={"0.0": 16}))[0] == (
        "ranks 0-2 wait in allreduce(float32[1000], op=sum) number 17 on world at"
        " train.py:10 in step for rank 3, which has left the program"
    )
    assert said(waiting, waiting, waiting, absent(3, "left", numbers={"0.0": 16}))[1] == (
        f"{what}, which has left the job without calling it"
    )
    assert said(waiting, waiting, waiting, absent(3, "left")) == [f"{what}, which has left the job"]
    assert said(waiting, waiting, waiting, absent(3, "died", "killed by SIGKILL")) == [
        f"{what}, which has died (killed by SIGKILL)",
        "rank 3 has died (killed by SIGKILL)",
    ]
    assert said(waiting, waiting, waiting, None) == [
        f"{what}, which has not answered",
        "rank 3 does not answer (stopped or frozen?)",
    ]


def test_how_far_it_has_come() -> None:
    first = waits(where="round 1 of 4 of allreduce/ring: sends chunk 0 to rank 1")
    second = waits(where="round 2 of 4 of allreduce/ring: sends chunk 1 to rank 2")
    assert said(first, second, first, second) == [
        (
            f"{WHAT} was begun by all its ranks, and has not ended after 30 s:"
            " ranks 0 and 2 are in round 1 of 4 of allreduce/ring: sends chunk 0 to rank 1;"
            " ranks 1 and 3 are in round 2 of 4 of allreduce/ring: sends chunk 1 to rank 2"
        )
    ]
    assert said(first, second, second, at_work())[1] == (
        f"{WHAT}:"
        " rank 0 is in round 1 of 4 of allreduce/ring: sends chunk 0 to rank 1;"
        " ranks 1 and 2 are in round 2 of 4 of allreduce/ring: sends chunk 1 to rank 2"
    )


def test_the_rank_where_it_begins_comes_first() -> None:
    """Rank 0 has waited longest, but for one that waits itself."""
    words = said(
        state([begun(PAIR, 1)], doing(PAIR, 1, BARRIER, seconds=90.0)),
        state([begun(PAIR, 0), begun(WORLD, 17)], doing(WORLD, 17, SUM)),
        at_work(),
        waits(),
    )
    assert [one.split(" waits for ")[0] for one in words] == [
        f"{WHAT}",
        "barrier() number 1 on world/pair",
    ]


def test_nobody_waits() -> None:
    assert said(at_work(), at_work()) == ["no rank waits in an operation"]
    assert said(at_work(), None) == ["rank 1 does not answer (stopped or frozen?)"]


def test_calls_that_differ() -> None:
    other = Call("allreduce", 4000, "float64", (500,), op="max", algorithm="ring")
    assert said(waits(), waits(), waits(call=other, line=12), waits())[0] == (
        "collective number 17 on world is not the same on all ranks: ranks 0, 1 and 3 call allreduce(float32[1000],"
        " op=sum) at train.py:10 in step, rank 2 calls allreduce(float64[500], op=max) at train.py:12 in step"
    )


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (
            Call("allgather", None, "int8", (2, 5), counts=(2, 4)),
            Call("allgather", None, "int8", (4, 5), counts=(2, 4)),
        ),
        (
            Call("alltoall", None, "int8", (2,), counts=(2, 0), arrivals=(2, 3)),
            Call("alltoall", None, "int8", (4,), counts=(3, 1), arrivals=(0, 1)),
        ),
        # torch's short way and its long one.
        (
            Call("broadcast", 32, root=1, algorithm="native"),
            Call("bcast", 32, "int32", (8,), root=1, algorithm="native"),
        ),
        (Call("all_reduce", 32, "int32", (2, 4), op="sum"), Call("allreduce", 32, "int32", (8,), op="sum")),
    ],
    ids=str,
)
def test_calls_that_may_differ(first: Call, second: Call) -> None:
    assert analyse({0: waits(3, PAIR, first), 1: waits(3, PAIR, second)}, 2).mismatches == []


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (
            Call("allgather", None, "int8", (2, 5), counts=(2, 4)),
            Call("allgather", None, "int8", (4, 5), counts=(2, 3)),
        ),
        (Call("allgather", None, "int8", (2, 5)), Call("alltoall", None, "int8", (2, 5))),
        (Call("bcast", 8, "int8", (8,), root=1), Call("bcast", 8, "int8", (8,), root=0)),
        (Call("bcast", 8, "int8", (8,), root=1), Call("bcast", 8, "int8", (9,), root=1)),
        (Call("bcast", 8, "int8", (8,), root=1), Call("bcast", 8, "int16", (8,), root=1)),
        (SUM, Call("allreduce", 4000, "float32", (1000,), op="max", algorithm="ring")),
        (SUM, Call("allreduce", 4000, "float32", (1000,), op="sum", algorithm="native")),
        (SUM, Call("several", parts=(SUM,))),
        (Call("several", parts=(SUM, BARRIER)), Call("several", parts=(SUM, SUM))),
    ],
    ids=str,
)
def test_calls_that_may_not(first: Call, second: Call) -> None:
    assert len(analyse({0: waits(3, PAIR, first), 1: waits(3, PAIR, second)}, 2).mismatches) == 1


def test_who_has_called_something_else_and_gone_on() -> None:
    """A root is done before anybody comes."""
    past = {"key": "0.1", "number": 17, "name": "bcast", "call": "bcast(int8[4], root=1)", "site": None}
    gone_on = state([begun(PAIR, 18)], past=[past, past | {"number": 18}, past | {"key": "0.0"}])
    assert analyse({0: waits(group=PAIR), 1: gone_on}, 2).mismatches == [
        (
            "collective number 17 on world/pair is not the same on all ranks: rank 0 calls allreduce(float32[1000],"
            " op=sum) on world/pair at train.py:10 in step, rank 1 has called bcast(int8[4], root=1)"
        )
    ]
    same = state([begun(PAIR, 18)], past=[past | {"name": "allreduce"}])
    assert analyse({0: waits(group=PAIR), 1: same}, 2).mismatches == []


def test_what_else_the_analysis_has() -> None:
    found = analyse({0: waits(), 1: waits(), 2: at_work(), 3: None}, 4)
    assert found.missing == [2, 3]
    assert found.silent == [3]
    assert found.waiting == [
        {
            "key": "0.0",
            "group": "world",
            "number": 17,
            "call": "allreduce(float32[1000], op=sum)",
            "begun": [0, 1],
            "missing": [2, 3],
        }
    ]


def test_a_silent_relay_is_the_suspect() -> None:
    """Ranks that could not be asked are not blamed, and may do anything."""
    found = analyse({0: None, 1: waits(), 2: unreached(2, 0), 3: unreached(3, 0)}, 4)
    assert found.words == [
        (
            "rank 0 does not answer (stopped or frozen?); it passes on what ranks tell each other, so nothing is known"
            " of ranks 2 and 3"
        ),
        f"{WHAT} waits for rank 0, which has not answered",
    ]
    assert (found.missing, found.silent, found.unreached) == ([0], [0], [2, 3])
    assert found.deadlock is None
    assert "Rank 3: could not be asked, since rank 0 does not answer" in text_of("x", {3: unreached(3, 0)}, found)


def test_what_is_said_of_many_ranks() -> None:
    size = 1000
    group = ("0.9", "world", tuple(range(size)))
    states: dict[int, State | None] = {rank: waits(group=group) for rank in range(size - 1)}
    (words,) = analyse(states | {999: state([begun(group, 3)])}, size).words
    assert words.startswith("allreduce(float32[1000], op=sum) number 17 on world waits for rank 999, which")
    # Each does something else.
    for rank in range(1, size):
        call = message("recv", rank - rank % 2, 7)
        states[rank] = state([begun(group, 16)], doing(group, 0, call, line=rank))
    found = analyse(states, size)
    assert found.deadlock is not None
    assert len(found.deadlock.words) == size
    assert len("".join(found.words)) < 10_000
    assert found.words[0].startswith("deadlock: ranks 0-999 wait for each other: rank ")
    assert found.words[0].endswith(", and 992 more")
    assert found.words[-1].endswith("more sentences")
    assert rank_list(range(0, size, 2)) == "500 ranks (0, 2, 4, 6, 8, 10, 12, 14, …)"


# --- deadlocks


def doomed(*states: State | None) -> tuple[int, ...]:
    """The ranks that are accused."""
    found = find_deadlock({rank: one for rank, one in enumerate(states) if one is not None}, len(states))
    return () if found is None else found.ranks


OTHER = ("0.2", "world/other", (0, 1))


def crossed() -> tuple[State, State]:
    """Two ranks that call the same collectives of two communicators in two orders."""
    return (
        state([begun(PAIR, 4), begun(OTHER, 7)], doing(PAIR, 4, SUM)),
        state([begun(PAIR, 3), begun(OTHER, 8)], doing(OTHER, 8, BARRIER, line=12)),
    )


def test_two_orders() -> None:
    found = find_deadlock(dict(enumerate(crossed())), 2)
    assert found is not None
    assert str(found) == (
        "deadlock: ranks 0 and 1 wait for each other:"
        " rank 0 waits in allreduce(float32[1000], op=sum) number 4 on world/pair at train.py:10 in step for rank 1,"
        " rank 1 waits in barrier() number 8 on world/other at train.py:12 in step for rank 0"
    )
    assert found.cycle == (0, 1)
    assert found.keys == ("0.1", "0.2")
    assert found.waits == ((0, "0.1", 4, 1.5), (1, "0.2", 8, 1.5))


def test_one_look_is_enough_after_some_time() -> None:
    first, second = crossed()
    assert analyse({0: first, 1: second}, 2).deadlock is not None
    second["pending"][0]["seconds"] = 1.0
    assert analyse({0: first, 1: second}, 2).deadlock is None
    assert find_deadlock({0: first, 1: second}, 2) is not None
    received = [in_message("recv", 1, seconds=1.0), in_message("recv", 0)]
    assert analyse(dict(enumerate(received)), 2).deadlock is None
    assert find_deadlock(dict(enumerate(received)), 2) is not None


def test_another_thread_may_call_it() -> None:
    first, second = crossed()
    assert doomed(first, second | {"others": ["loader"]}) == ()
    assert doomed(first, second, None) == (0, 1)


def test_what_is_not_known_is_no_reason() -> None:
    first, second = crossed()
    assert doomed(first, None) == ()
    assert doomed(first, absent(1, "died", "killed")) == ()
    assert doomed(first, absent(1, "left")) == ()
    assert doomed(first, second | {"queues": second["queues"][1:]}) == ()
    assert doomed(first, {"rank": 1, "failed": ["it was too late"]}) == ()


def test_left() -> None:
    first, _ = crossed()
    found = find_deadlock({0: first, 1: absent(1, "left", numbers={"0.1": 3})}, 2)
    assert found is not None
    assert str(found) == (
        "rank 0 waits in allreduce(float32[1000], op=sum) number 4 on world/pair at train.py:10 in step for rank 1,"
        " which has left the program"
    )
    assert found.cycle == ()
    assert doomed(first, absent(1, "left", numbers={"0.1": 4})) == ()


def test_in_the_background() -> None:
    """Rank 1 has started what rank 0 waits for."""
    first, second = crossed()
    queues = [begun(PAIR, 3, queued=1), second["queues"][1]]
    assert doomed(first, second | {"queues": queues}) == ()
    # Without threads somebody must wait for it.
    queues = [begun(PAIR, 3, queued=1, background=False), second["queues"][1]]
    assert doomed(first, second | {"queues": queues}) == (0, 1)
    # It is behind one that can't go on.
    stuck = doing(PAIR, 3, Call("bcast", 8, "int8", (8,), root=0), program=False)
    blocked = state([begun(PAIR, 3, queued=2), begun(OTHER, 8)], stuck, doing(OTHER, 8, BARRIER))
    behind = state([begun(PAIR, 2), begun(OTHER, 7)], doing(WORLD, 1, BARRIER))
    behind["queues"].append(begun(WORLD, 1, running=True))
    blocked["queues"].append(begun(WORLD, 0))
    assert doomed(behind, blocked) == (0, 1)


def test_behind_what_is_stuck_in_the_background() -> None:
    """The program of rank 2 is free, but what rank 0 waits for comes after a scan, for which rank 1 does not come."""
    group = ("0.3", "world/three", (0, 1, 2))
    first = waits(4, group, Call("bcast", 8, "int8", (8,), root=2))
    second = state([begun(group, 2)], doing(WORLD, 0, message("recv", 0, 3)))
    third = waits(3, group, Call("scan", 8, "int8", (8,)), program=False)
    found = find_deadlock({0: first, 1: second, 2: third}, 3)
    assert found is not None
    assert found.cycle == (0, 2, 1)
    assert doomed(first, second | {"pending": []}, third) == ()


def test_the_program_waits_for_what_it_has_started() -> None:
    """Its own thread runs nothing, but waits for the worker, which waits for rank 1."""
    first, second = crossed()
    first["pending"][0]["program"] = False
    assert doomed(first, second) == (0, 1)
    first["program"]["waits"] = ""
    assert doomed(first, second) == ()


def test_the_end_of_an_operation_may_start_others() -> None:
    """Rank 1 runs another operation in the background, whose callback might call what rank 0 waits for."""
    first, second = crossed()
    third = ("0.3", "world/third", (1, 2))
    second["queues"].append(begun(third, 5, running=True))
    second["pending"].append(doing(third, 5, SUM, program=False))
    assert doomed(first, second, state([begun(third, 4)])) == ()
    stuck = state([begun(third, 4)], doing(WORLD, 0, message("recv", 1, 3)))
    assert doomed(first, second, stuck) == (0, 1, 2)


def test_two_receives() -> None:
    found = find_deadlock({0: in_message("recv", 1), 1: in_message("recv", 0, 6)}, 2)
    assert found is not None
    assert str(found) == (
        "deadlock: ranks 0 and 1 wait for each other:"
        " rank 0 waits in recv(float64[3], peer=1, tag=5) on world at train.py:40 in step for rank 1,"
        " rank 1 waits in recv(float64[3], peer=0, tag=6) on world at train.py:40 in step for rank 0"
    )


@pytest.mark.parametrize(
    ("first", "second", "accused"),
    [
        (("send", 1, 5), ("send", 0, 5), True),
        (("send", 1, 5), ("recv", 0, 5), False),  # it may be on its way
        (("send", 1, 5), ("recv", 0, None), False),
        (("send", 1, 5), ("recv", None, 5), False),
        (("send", 1, 5), ("recv", 0, 6), True),
        (("send", 1, 5), ("recv", 2, 5), False),  # from a rank that nothing is known of
        (("recv", None, None), ("recv", None, None), False),  # from any rank, of which one is not known
        (("probe", 1, 5), ("irecv", 0, 5), True),
        (("isend", 1, 5), ("isend", 0, 5), True),
        (("duplicate", None, None), ("recv", 0, 5), False),  # nobody knows what that waits for
    ],
)
def test_messages(first: tuple[Any, ...], second: tuple[Any, ...], accused: bool) -> None:
    assert doomed(in_message(*first), in_message(*second)) == ((0, 1) if accused else ())
    assert doomed(None, in_message(*second)) == ()


def test_what_is_said_of_who_waits_for_a_message() -> None:
    last = waits(17, call=BARRIER)
    assert said(in_message("recv", 1), last, last, last)[2] == (
        "rank 0 has been waiting for 30 s in recv(float64[3], peer=1, tag=5) at train.py:40 in step:"
        " rank 1 is in barrier() at train.py:10 in step"
    )
    assert said(in_message("recv", 1, seconds=2.0), absent(1, "left", numbers={"0.0": 16}))[0] == (
        "rank 0 has been waiting for 2 s in recv(float64[3], peer=1, tag=5) at train.py:40 in step:"
        " rank 1 has left the job"
    )


def test_a_receive_from_any() -> None:
    group = ("0.3", "world/three", (0, 1, 2))
    anyone = state([], doing(group, 0, message("recv", None, 1)))
    assert doomed(anyone, anyone, anyone) == (0, 1, 2)
    assert doomed(anyone, anyone, state([])) == ()
    assert doomed(anyone, anyone, absent(2, "left")) == (0, 1)


def test_messages_under_way_nobody_waits_for() -> None:
    first, second = in_message("recv", 1), in_message("recv", 0, 6)
    sent = {"way": "send", "key": None, "peer": None, "tag": None}
    assert doomed(first, second | {"started": [sent]}) == ()
    awaited = {"way": "recv", "key": None, "peer": None, "tag": 5}
    assert doomed(first, second | {"started": [awaited]}) == (0, 1)
    assert doomed(in_message("send", 1), second | {"started": [awaited]}) == ()
    assert doomed(in_message("send", 1), second | {"started": [awaited | {"tag": 7}]}) == (0, 1)


def test_what_a_rank_has_sent_before_it_left() -> None:
    assert doomed(in_message("recv", 1), absent(1, "left")) == (0,)
    assert doomed(in_message("recv", 1, seconds=29.0), absent(1, "left")) == ()


def counted(one: State, sent: Sequence[Any] = (), received: Sequence[Any] = (), key: str = "0.0") -> State:
    """The state of a rank that has sent and received these messages, as (rank, tag, number), on a communicator."""
    queues = [
        queue | ({"sent": list(sent), "received": list(received), "answered": False} if queue["key"] == key else {})
        for queue in one["queues"]
    ]
    return one | {"queues": queues}


@pytest.mark.parametrize(
    ("sent", "received", "tag", "accused"),
    [
        ([[0, 5, 2]], [[1, 5, 2]], 5, True),
        ([[0, 5, 3]], [[1, 5, 2]], 5, False),  # one is under way
        ([[0, 5, 2], [0, 6, 1]], [[1, 5, 2]], 5, True),  # it has another tag
        ([[0, 5, 2], [0, 6, 1]], [[1, 5, 2]], None, False),
        ([[0, 5, 2], [0, 6, 1]], [[1, 5, 2], [1, 6, 1]], None, True),
        ([[0, 5, 2], [0, None, 1]], [[1, 5, 2]], 5, False),  # some whose tags are not known, a moment ago
        ([], [], 5, True),
    ],
)
def test_messages_are_counted(sent: Any, received: Any, tag: int | None, accused: bool) -> None:
    """Whether the message may be under way that rank 0 waits for, be it that rank 1 waits, too, or that it has left."""
    first = counted(in_message("recv", 1, tag, seconds=1.0), received=received)
    assert doomed(first, counted(in_message("recv", 0, 9), sent=sent)) == ((0, 1) if accused else ())
    assert doomed(first, absent(1, "left", sent={"0.0": sent})) == ((0,) if accused else ())


DUPLICATE = ("0.1 duplicate(tag=0)", "world/pair", (0, 1))


@pytest.mark.parametrize(
    ("other", "accused"),
    [
        (at_work(), False),
        (state([begun(PAIR, 3)], met={DUPLICATE[0]: 1}), False),
        (state([begun(PAIR, 3)], met={DUPLICATE[0]: 2}), False),
        (waits(4, PAIR) | {"met": {DUPLICATE[0]: 2}}, False),
        (waits(4, PAIR) | {"met": {}}, False),
        (waits(4, PAIR) | {"met": {DUPLICATE[0]: 1}}, True),
        (state([begun(PAIR, 3)], met={DUPLICATE[0]: 1}, retired={"0.1": 3}), True),
        (state([], met={DUPLICATE[0]: 1}, retired={"0.1": 3}), True),
        (state([], met={DUPLICATE[0]: 2}, retired={"0.1": 3}), False),
        (absent(1, "left", numbers={"0.1": 3, DUPLICATE[0]: 1}), True),
        (absent(1, "left", numbers={"0.1": 3, DUPLICATE[0]: 2}), False),
        (absent(1, "left", numbers={"0.2": 3}), False),
        (absent(1, "died"), False),
    ],
)
def test_meetings(other: State, accused: bool) -> None:
    first = state([begun(PAIR, 3)], doing(DUPLICATE, 2, Call("duplicate(tag=0)", collective=False)))
    found = find_deadlock({0: first | {"met": {DUPLICATE[0]: 2}}, 1: other}, 2)
    assert (found is not None) == accused
    assert open_questions({0: first, 1: at_work()}) == [(DUPLICATE[0], 2)]
    assert found is None or "rank 0 waits in duplicate(tag=0) number 2 on world/pair" in str(found)


def test_what_is_known_of_meetings() -> None:
    met = {"0.0 agree": 3, "0.1 agree": 4, "0.2 agree": 5}
    queue = Progress(Group("0.0", "world", (0,), 0, 60.0), None, background=False, explain=lambda error: error)
    calls = [("0.0 agree", 9), ("0.0 shrink", 1), ("0.1 agree", 1), ("0.3 agree", 1), ("0.0", 2)]
    found = own_state(0, 1, [queue], {}, full=False, calls=calls, met=met, retired={"0.1": 7, "0.2": 8})
    assert found["met"] == {"0.0 agree": 3, "0.0 shrink": 0, "0.1 agree": 4}
    assert found["retired"] == {"0.1": 7, "0.2": 8}


def test_calls_of_one_number_that_differ_never_complete() -> None:
    bcast = Call("bcast", 8, "int8", (8,), root=0)
    second, third = waits(call=bcast, line=12), waits(seconds=3.0)
    found = find_deadlock({0: waits(), 1: second, 2: third, 3: at_work(16)}, 4)
    assert found is not None
    mismatch = (
        "collective number 17 on world is not the same on all ranks:"
        " ranks 0 and 2 call allreduce(float32[1000], op=sum) at train.py:10 in step,"
        " rank 1 calls bcast(int8[8], root=0) at train.py:12 in step"
    )
    assert (found.ranks, found.mismatches, str(found)) == ((0, 1, 2), (mismatch,), mismatch)
    # Others wait because of that.
    found = find_deadlock({0: waits(), 1: second, 2: third, 3: in_message("recv", 0)}, 4)
    assert found is not None
    assert str(found) == (
        f"{mismatch}; rank 3 waits in recv(float64[3], peer=0, tag=5) on world at train.py:40 in step for rank 0"
    )
    assert said(waits(), second, third, at_work(16))[0] == mismatch


@pytest.mark.parametrize("gone", [False, True], ids=["at work", "left"])
def test_calls_that_have_ended_differ(gone: bool) -> None:
    """Rank 1 has called a bcast as number 17, from which it is back; what it has called is asked for."""
    key = WORLD[0]
    if gone:
        second = absent(1, "left", numbers={key: 17}, calls=[[key, 17, "bcast", 1]])
    else:
        call = {"name": "bcast", "root": 1, "text": "bcast(int8[8], root=1)"}
        second = at_work(17, called=[{"key": key, "number": 17, "call": call, "site": None}])
        assert open_questions({0: waits(), 1: at_work(17)}) == [(key, 17)]
    assert open_questions({0: waits(), 1: at_work(16), 2: waits()}) == []
    assert doomed(waits(), second) == (0,)
    assert doomed(waits(call=Call("broadcast", 8, root=1)), second) == ()
    assert "rank 1 has called bcast" in said(waits(), second)[0]


PIPE = ("0.4", "world/duplicate", (0, 1, 2))


def stage(*awaited: int, takes: Sequence[int] = ()) -> State:
    """A pipeline stage that waits for a message of each of these stages, and takes those of `takes` meanwhile."""
    parts = tuple(Call("recv", peer=peer, collective=False) for peer in awaited)
    call = Call("PipeP2P.recv", parts=parts, takes=tuple(takes), collective=False)
    return state([begun(PIPE, 2), begun(WORLD, 3)], doing(PIPE, 0, call))


def test_stages_of_a_pipeline() -> None:
    def piped(one: State, sent: Sequence[Any] = (), received: Sequence[Any] = ()) -> State:
        return counted(one, sent, received, key="0.4")

    first, second = piped(stage(1, takes=[1])), piped(stage(0, takes=[0]))
    assert doomed(first, second) == (0, 1)
    assert doomed(first, second | {"others": ["loader"]}) == ()
    assert doomed(first, absent(1, "left", sent={"0.4": []})) == (0,)
    assert doomed(first, absent(1, "left")) == ()
    # Rank 1 has sent something, which rank 0 takes, or does not take meanwhile.
    sends = piped(stage(0, takes=[0]), sent=[[0, 33, 1]])
    assert doomed(first, sends) == ()
    assert doomed(piped(stage(1, takes=[1]), received=[[1, 33, 1]]), sends) == (0, 1)
    # It waits for rank 2, and answers rank 0 only if it takes what that sends.
    sender = piped(stage(1, takes=[1]), sent=[[1, 33, 1]])
    last = state([begun(PIPE, 2), begun(WORLD, 4)], doing(WORLD, 4, SUM))
    assert doomed(sender, piped(stage(2, takes=[2])), piped(last)) == (0, 1, 2)
    assert doomed(sender, piped(stage(2, takes=[0, 2])), piped(last)) == (1, 2)
    # Of several that must come one is enough that never does.
    both = piped(stage(1, 2, takes=[1, 2]))
    assert doomed(both, absent(1, "left", sent={"0.4": []}), None) == (0,)


def test_a_wait_with_a_bound() -> None:
    assert doomed(in_message("irecv", 1, bounded=True), in_message("recv", 0)) == ()


def test_sendrecv() -> None:
    def exchange(dest: int, source: int) -> State:
        call = Call("sendrecv", parts=(message("send", dest, 1), message("recv", source, 1)), collective=False)
        return state([], doing(WORLD, 0, call))

    assert doomed(exchange(1, 1), exchange(0, 0)) == ()
    # A ring, and one that has been left by its last rank.
    assert doomed(exchange(1, 2), exchange(2, 0), exchange(0, 1)) == ()
    assert doomed(exchange(1, 2), exchange(2, 0), absent(2, "left")) == ()
    assert doomed(exchange(1, 1), in_message("recv", 0, 2)) == (0, 1)
    assert doomed(exchange(1, 1), in_message("recv", 0, 1)) == ()


@pytest.mark.parametrize(
    ("call", "rank", "needed"),
    [
        (SUM, 1, {0, 1, 2, 3}),
        (Call("all_reduce", 8, "int8", (8,), op="sum"), 1, {0, 1, 2, 3}),
        (Call("broadcast", 8, root=3), 1, {3}),
        (BARRIER, 1, {0, 1, 2, 3}),
        (Call("split"), 1, {0, 1, 2, 3}),
        (Call("allreduce", 0, "int8", (0,)), 1, set()),
        (Call("scan", 8, "int8", (8,)), 2, {0, 1}),
        (Call("exscan", 8, "int8", (8,)), 0, set()),
        (Call("bcast", 8, "int8", (8,), root=1), 2, {1}),
        (Call("bcast", 8, "int8", (8,), root=1), 1, {1}),
        (Call("gather", 8, "int8", (8,), root=1), 1, {0, 1, 2, 3}),
        (Call("gather", 8, "int8", (8,), root=1), 2, set()),
        (Call("gather", None, "int8", (8,), root=1, counts=(8, 8, 0, 1)), 1, {0, 1, 3}),
        (Call("reduce", 8, "int8", (8,), root=0), 0, {0, 1, 2, 3}),
        (Call("scatter", None, "int8", (8,), root=1, counts=(8, 8, 0, 1)), 2, set()),
        (Call("scatter", None, "int8", (8,), root=1, counts=(8, 8, 0, 1)), 3, {1}),
        (Call("allgather", None, "int8", (0, 2), counts=(1, 2, 0, 0)), 3, {0, 1}),
        (Call("alltoall", None, "int8", (4,), counts=(1, 1, 1, 1), arrivals=(0, 1, 2, 0)), 1, {1, 2}),
        (Call("alltoall", 4, "int8", (4,)), 1, {0, 1, 2, 3}),
        (Call("reduce_scatter", None, "int8", (4,), counts=(0, 1, 2, 1)), 0, set()),
        (Call("reduce_scatter", None, "int8", (4,), counts=(0, 1, 2, 1)), 1, {0, 1, 2, 3}),
        (Call("free"), 1, set()),
        (Call("several", parts=(Call("scan", 8, "int8", (8,)), Call("bcast", 8, "int8", (8,), root=3))), 1, {0, 3}),
    ],
    ids=str,
)
def test_whose_data_a_rank_needs(call: Call, rank: int, needed: set[int]) -> None:
    assert ranks_needed(doing(WORLD, 1, call)["call"], (0, 1, 2, 3), rank) == needed


def test_who_gives_may_be_done_at_once() -> None:
    """Rank 0 gives to ranks 1 and 2, of which one waits for a message from it."""
    group = ("0.3", "world/three", (0, 1, 2))
    root = waits(5, group, Call("bcast", 8, "int8", (8,), root=0))
    other = state([begun(group, 4)], doing(WORLD, 0, message("recv", 0, 1)))
    assert doomed(root, other, waits(5, group, Call("bcast", 8, "int8", (8,), root=0))) == ()
    assert doomed(root, other, state([begun(group, 4)])) == ()
    # With nobody there to take it, it was not done at once.
    assert doomed(root, other, other) == (0, 1, 2)
    # What the algorithm waits for at this moment counts.
    root = waits(5, group, Call("bcast", 8, "int8", (8,), root=0), waits_for=[1])
    assert doomed(root, other, waits(5, group, Call("bcast", 8, "int8", (8,), root=0))) == (0, 1)


# --- deadlocks of random programs, held against a simulation of them


PROGRAMS = 200


@dataclass
class Op:
    """A statement. `needs` are the ranks without which this rank's part of a collective is not done; of a send whether
    it waits for its receiver."""

    kind: str
    key: str = ""
    call: Call = SUM
    needs: frozenset[int] = frozenset()
    waits: bool = True


@dataclass
class Rank:
    program: list[Op]
    at: int = 0
    met: Counter[str] = field(default_factory=Counter)
    number: dict[str, int] = field(default_factory=dict)
    queue: dict[str, list[Op]] = field(default_factory=dict)
    running: dict[str, Op] = field(default_factory=dict)

    @property
    def now(self) -> Op | None:
        return self.program[self.at] if self.at < len(self.program) else None

    def busy(self, key: str) -> bool:
        return key in self.running or bool(self.queue.get(key))


class Machine:
    """Ranks that carry out their programs, one small step of one of them after the other."""

    def __init__(self, groups: Mapping[str, tuple[int, ...]], programs: Sequence[Sequence[Op]]) -> None:
        self.groups = groups
        self.ranks = [
            Rank(list(program), number={key: 0 for key, members in groups.items() if rank in members})
            for rank, program in enumerate(programs)
        ]
        self.letters: list[tuple[int, int, int]] = []  # (source, dest, tag), on their way
        self.done: set[tuple[int, str, int]] = set()  # (rank, key or "", number or statement)
        self.called: dict[tuple[str, int], dict[int, Call]] = {}  # by (key, number), then rank
        self.sent: Counter[tuple[int, int, int]] = Counter()  # by source, dest, tag
        self.received: Counter[tuple[int, int, int]] = Counter()

    def steps(self) -> list[Callable[[], None]]:
        """What could happen next."""
        return [step for me in range(len(self.ranks)) for step in (*self._in_queues(me), *self._in_program(me))]

    def _in_queues(self, me: int) -> Iterator[Callable[[], None]]:
        rank = self.ranks[me]
        for key, number in rank.number.items():
            if key in rank.running:
                come = all(self.ranks[peer].number[key] >= number for peer in rank.running[key].needs)
                if come and not self._mismatched(key, number):
                    yield partial(self._end, me, key)
            elif rank.queue.get(key):
                yield partial(self._begin, me, key)

    def _mismatched(self, key: str, number: int) -> bool:
        """Whether ranks call different collectives as this one: then those that have not ended never do."""
        return len({(call.name, call.root) for call in self.called[key, number].values()}) > 1

    def _in_program(self, me: int) -> Iterator[Callable[[], None]]:
        rank = self.ranks[me]
        op = rank.now
        if op is None:
            return
        if op.kind in ("start", "block"):
            yield partial(self._submit, me)
        elif op.kind == "wait" and not rank.busy(op.key):
            yield partial(self._next, me)
        elif op.kind == "meet":
            yield partial(self._come, me)
        elif op.kind == "met" and all(self.ranks[peer].met[op.key] >= rank.met[op.key] for peer in op.needs):
            yield partial(self._leave, me)
        elif op.kind == "recv":
            for letter in self._fitting(me, op):
                yield partial(self._take, me, letter)
        elif op.kind == "send":
            assert op.call.peer is not None
            assert op.call.tag is not None
            if not op.waits or self._takes(op.call.peer, me, op.call.tag):
                yield partial(self._send, me, op.call.peer, op.call.tag)

    def _takes(self, peer: int, source: int, tag: int) -> bool:
        op = self.ranks[peer].now
        waiting = op is not None and op.kind == "recv" and not self._fitting(peer, op)
        return waiting and op is not None and op.call.peer in (None, source) and op.call.tag in (None, tag)

    def _fitting(self, me: int, op: Op) -> list[tuple[int, int, int]]:
        """The letters that a receive could take: of each sender the first that fits."""
        fits = [
            (source, dest, tag)
            for source, dest, tag in self.letters
            if dest == me and op.call.peer in (None, source) and op.call.tag in (None, tag)
        ]
        return list({source: (source, dest, tag) for source, dest, tag in reversed(fits)}.values())

    def arriving(self) -> bool:
        """Whether somebody can take a letter."""
        return any(
            (op := rank.now) is not None and op.kind == "recv" and bool(self._fitting(me, op))
            for me, rank in enumerate(self.ranks)
        )

    def _next(self, me: int) -> None:
        self.done.add((me, "", self.ranks[me].at))
        self.ranks[me].at += 1

    def _send(self, me: int, peer: int, tag: int) -> None:
        self.letters.append((me, peer, tag))
        self.sent[me, peer, tag] += 1
        self._next(me)

    def _take(self, me: int, letter: tuple[int, int, int]) -> None:
        self.letters.remove(letter)
        self.received[letter] += 1
        self._next(me)

    def _come(self, me: int) -> None:
        rank = self.ranks[me]
        op = rank.program[rank.at]
        rank.met[op.key] += 1
        rank.program[rank.at] = Op("met", op.key, op.call, op.needs)

    def _leave(self, me: int) -> None:
        rank = self.ranks[me]
        key = rank.program[rank.at].key
        self.done.add((me, key, rank.met[key]))
        rank.at += 1

    def _submit(self, me: int) -> None:
        rank = self.ranks[me]
        op = rank.program[rank.at]
        rank.queue.setdefault(op.key, []).append(op)
        if op.kind == "start":
            rank.at += 1
        else:
            rank.program[rank.at] = Op("wait", op.key)

    def _begin(self, me: int, key: str) -> None:
        rank = self.ranks[me]
        rank.number[key] += 1
        op = rank.queue[key].pop(0)
        self.called.setdefault((key, rank.number[key]), {})[me] = op.call
        if op.needs:
            rank.running[key] = op
        else:
            self.done.add((me, key, rank.number[key]))

    def _end(self, me: int, key: str) -> None:
        rank = self.ranks[me]
        del rank.running[key]
        self.done.add((me, key, rank.number[key]))

    def finished(self, me: int) -> bool:
        rank = self.ranks[me]
        return rank.now is None and not any(rank.busy(key) for key in rank.number)

    def states(self, *, counted: bool) -> dict[int, State]:
        """What the ranks would say of themselves, with their numbers of messages if these are `counted`."""
        return {me: self._state(me, counted=counted) for me in range(len(self.ranks))}

    def _state(self, me: int, *, counted: bool) -> State:
        rank, op = self.ranks[me], self.ranks[me].now
        # A message counts as sent before its send waits for the receiver.
        waiting = op is not None and op.kind == "send" and op.waits
        leaving = Counter([(me, op.call.peer, op.call.tag)] if waiting and op is not None else [])
        sent = [[to, tag, number] for (of, to, tag), number in (self.sent + leaving).items() if of == me]
        received = [[of, tag, number] for (of, to, tag), number in self.received.items() if to == me]
        if self.finished(me):
            calls = [[key, number, by[me].name, by[me].root] for (key, number), by in self.called.items() if me in by]
            numbers = rank.number | rank.met
            return absent(me, "left", numbers=numbers, sent={"world": sent} if counted else None, calls=calls)
        queues = [
            begun((key, key, self.groups[key]), number, queued=len(rank.queue.get(key, [])))
            | {"running": key in rank.running}
            | ({"sent": sent, "received": received} if counted and key == "world" else {})
            for key, number in rank.number.items()
        ]
        called = [
            {"key": key, "number": number, "call": describe_call(by[me], Group(key, key, (), 0, 60.0))}
            for (key, number), by in self.called.items()
            if me in by and (key not in rank.running or rank.number[key] != number)
        ]
        pending = [
            doing((key, key, self.groups[key]), rank.number[key], op.call, program=False, begin=float(rank.number[key]))
            for key, op in rank.running.items()
        ]
        program: State = {"waits": "", "site": None}
        if op is not None and op.kind == "wait":
            program |= {"waits": "queue", "key": op.key}
        elif op is not None and op.kind == "met":
            program |= {"waits": "queue", "key": op.key}
            pending.append(doing((op.key, "world", tuple(sorted(op.needs))), rank.met[op.key], op.call))
        elif op is not None and op.kind in ("send", "recv") and (op.waits or op.kind == "recv"):
            program |= {"waits": "message"}
            world = ("world", "world", tuple(range(len(self.ranks))))
            pending.append(doing(world, 0, op.call, begin=float(rank.at)))
        known: State = {"queues": queues, "pending": pending, "program": program, "others": [], "started": []}
        # Of the meetings that there may be, those that nobody has asked about are not told.
        keys = {one.program[one.at].key for one in self.ranks if one.now is not None and one.now.kind == "met"}
        return known | {"called": called, "met": {key: rank.met[key] for key in keys}}


def random_groups(random: Random, size: int) -> dict[str, tuple[int, ...]]:
    groups = {"world": tuple(range(size))}
    for i in range(random.randint(1, 3)):
        groups[f"g{i}"] = tuple(random.sample(range(size), random.randint(2, size)))
    return groups


def random_collective(
    random: Random, members: tuple[int, ...], mixed: bool
) -> Callable[[int], tuple[Call, frozenset[int]]]:
    """A call, and who is needed for it on each rank: at least those whose data it is, and others as an algorithm
    pleases."""
    name = random.choice(("allreduce", "barrier", "bcast", "reduce", "scan")) if mixed else "allreduce"
    root = random.randrange(len(members))
    call = Call(name, 8, "int8", (8,), root=root if name in ("bcast", "reduce") else None)

    def on(rank: int) -> tuple[Call, frozenset[int]]:
        me, everyone = members.index(rank), set(members)
        least = {
            "allreduce": everyone,
            "barrier": everyone,
            "bcast": {members[root]},
            "reduce": everyone if me == root else set(),
            "scan": set(members[:me]),
        }[name] - {rank}
        more = {peer for peer in members if random.random() < 0.3} if random.random() < 0.5 else set()
        return call, frozenset((least | more) - {rank})

    return on


def random_machine(random: Random, *, mixed: bool, background: bool, messages: bool) -> Machine:
    """A right program, with some mistakes."""
    size = random.randint(2, 5)
    groups = random_groups(random, size)
    programs: list[list[Op]] = [[] for _ in range(size)]
    for _ in range(random.randint(1, 8)):
        if messages and random.random() < 0.5:
            source, dest = random.sample(range(size), 2)
            tag, large = random.randrange(2), random.random() < 0.6
            programs[source].append(Op("send", call=message("send", dest, tag), waits=large))
            free = random.random() < 0.2
            programs[dest].append(Op("recv", call=message("recv", None if free else source, None if free else tag)))
            continue
        if random.random() < 0.2:
            meets = frozenset(random.sample(range(size), random.randint(2, size)))
            call = Call(f"group({random.randrange(2)})", collective=False)
            for rank in meets:
                programs[rank].append(Op("meet", f"world {call.name} of {sorted(meets)}", call, meets))
            continue
        key = random.choice(list(groups))
        on = random_collective(random, groups[key], mixed)
        for rank in groups[key]:
            call, needs = on(rank)
            later = background and random.random() < 0.5
            programs[rank].append(Op("start" if later else "block", key, call, needs))
            if later and random.random() < 0.3:
                programs[rank].append(Op("wait", key))
    for _ in range(random.randint(0, 3)):
        program = random.choice(programs)
        if len(program) > 1:
            i = random.randrange(len(program))
            if random.random() < 0.7:
                j = random.randrange(len(program))
                program[i], program[j] = program[j], program[i]
            else:
                del program[i]
    for rank, program in enumerate(programs):
        program += [Op("wait", key) for key, members in groups.items() if rank in members]
    return Machine(groups, programs)


def accused_of(found: Deadlock) -> set[tuple[int, str, int]]:
    """The operations that can't end, as they are named in `Machine.done`."""
    return {(rank, key, number) if number else (rank, "", int(begin)) for rank, key, number, begin in found.waits}


@pytest.mark.parametrize("messages", [False, True], ids=["collectives", "messages"])
@pytest.mark.parametrize("background", [False, True], ids=["blocking", "background"])
@pytest.mark.parametrize("mixed", [False, True], ids=["allreduce", "mixed"])
def test_who_is_accused_never_goes_on(mixed: bool, background: bool, messages: bool) -> None:
    """At any moment of a random program: what is said to be stuck is not done, however the program goes on."""
    random, accusations = Random(f"{mixed} {background} {messages}"), 0
    for _ in range(PROGRAMS):
        machine = random_machine(random, mixed=mixed, background=background, messages=messages)
        looks: list[set[tuple[int, str, int]]] = []
        while steps := machine.steps():
            # What has been sent arrives before anybody looks for a second time, unless messages are counted.
            counted = random.random() < 0.5
            if random.random() < 0.3 and (counted or not machine.arriving()):
                found = find_deadlock(machine.states(counted=counted), len(machine.ranks))
                looks += [] if found is None else [accused_of(found)]
            random.choice(steps)()
        for accused in looks:
            assert not accused & machine.done
        found = find_deadlock(machine.states(counted=True), len(machine.ranks))
        accusations += len(looks) + (found is not None)
        stuck = {rank for rank in range(len(machine.ranks)) if not machine.finished(rank)}
        if not mixed:
            # Then what an algorithm needs is what the data needs, and all that is stuck is found.
            assert set(found.ranks if found is not None else ()) == stuck, machine.states(counted=True)
    assert accusations > PROGRAMS / 10


# --- what a rank says of itself


class Bench:
    """Ranks on threads, of which the last one looks at the others. `look` is called on it over and over, with the
    states of all, until it gives something."""

    def __init__(self, size: int, ranks_per_node: int | None = None) -> None:
        self.size = size
        self._nodes = ranks_per_node
        self._comms: dict[int, tuple[mpicoll.Communicator, int]] = {}
        self._active: dict[int, dict[int, Any]] = {rank: {} for rank in range(size)}

    def run(
        self, body: Callable[[int], object], ready: Callable[[dict[int, State]], bool], *, warm: bool = False
    ) -> dict[int, State]:
        """Carry out ``body(rank)`` on all ranks, on the last one after the states of the others are `ready`; these.
        With `warm` once before, too: the first time, communicators and memory are made."""

        def main() -> dict[int, State] | None:
            comm = mpicoll.world()
            # Threads have no watch, but its dictionary is where messages are seen.
            watch = SimpleNamespace(active=self._active[comm.rank], bounded=[], check=lambda entry: None)
            comm.progress._watch = watch  # type: ignore[assignment]
            body(comm.rank) if warm else mpicoll.barrier()
            self._comms[comm.rank] = comm, threading.get_ident()
            states = self._look(ready) if comm.rank == self.size - 1 else None
            body(comm.rank)
            return states

        found = mpicoll.run_local(main, self.size, ranks_per_node=self._nodes)[-1]
        assert found is not None
        return found

    def _look(self, ready: Callable[[dict[int, State]], bool]) -> dict[int, State]:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            states = self.states()
            if len(states) == self.size and ready(states):
                return states
            time.sleep(0.01)
        raise AssertionError(text_of("never ready", states, analyse(states, self.size)))

    def states(self, *, full: bool = False) -> dict[int, State]:
        found = {}
        for rank, (comm, thread) in self._comms.copy().items():
            queues = [comm.progress, *(level.progress for level in comm._levels or ())]
            found[rank] = own_state(rank, self.size, queues, self._active[rank], full=full, program=thread)
            assert "failed" not in found[rank], found[rank]["failed"]
        return json.loads(json.dumps(found), object_hook=_with_ranks)


def _with_ranks(found: State) -> Any:
    """JSON's keys are strings."""
    return {int(key) if key.isdigit() else key: value for key, value in found.items()}


def standing(states: dict[int, State], *ranks: int) -> bool:
    """Whether these are somewhere in an operation."""
    return all(states[rank]["pending"] and states[rank]["pending"][0]["where"] for rank in ranks)


@pytest.mark.usefixtures("uncompared")
def test_in_a_round_of_a_schedule() -> None:
    def body(rank: int) -> None:
        mpicoll.allreduce(np.ones(6, np.float32), algorithm="ring")

    # On one node they would wait for the last rank before the first round.
    bench = Bench(3, 1)
    states = bench.run(body, lambda states: standing(states, 0, 1) and "round 2" in states[1]["pending"][0]["where"])
    first, second = (states[rank]["pending"][0] for rank in (0, 1))
    assert first["where"] == (
        "round 1 of 4 of allreduce/ring: sends chunk 0 to rank 1, waits for chunk 2 from rank 2 (reduce)"
    )
    assert second["where"] == (
        "round 2 of 4 of allreduce/ring: sends chunk 0 to rank 2, waits for chunk 2 from rank 0 (reduce)"
    )
    assert (first["waits_for"], second["waits_for"]) == ([2], [0])
    assert first["call"]["text"] == "allreduce(float32[6], op=sum) by ring"
    assert (first["number"], first["thread"], first["program"]) == (2, "mpicoll-rank-0", True)
    assert Path(first["site"]["file"]).name == "test_report.py"
    assert first["site"]["function"] == "body"
    assert states[0]["program"]["waits"] == "queue"
    assert states[2]["pending"] == []
    assert states[2]["program"]["waits"] == ""
    words = analyse(states, 3).words[0]
    line = states[2]["program"]["site"]["line"]
    assert words == (
        "allreduce(float32[6], op=sum) number 2 on world waits for rank 2, which has not called it: it runs its own"
        f" program at test_report.py:{line} in states"
    )


@pytest.mark.parametrize(
    ("ranks_per_node", "where"), [(3, "shared memory: waits for rank 2"), (1, "the comparison of the ranks' calls")]
)
def test_before_the_first_round(ranks_per_node: int, where: str) -> None:
    """All ranks come before anything is sent."""

    def body(rank: int) -> None:
        mpicoll.allreduce(np.ones(6, np.float32), algorithm="ring")

    def ready(states: dict[int, State]) -> bool:
        return standing(states, 0, 1) and {states[rank]["pending"][0]["where"] for rank in (0, 1)} == {where}

    states = Bench(3, ranks_per_node).run(body, ready)
    assert [states[rank]["pending"][0]["polls"] for rank in (0, 1)] == [True, True]


@pytest.mark.usefixtures("uncompared")
def test_rounds_without_data_are_left_out() -> None:
    """One element in three chunks: only the first of them has data, and the number is that of the algorithm's round."""

    def body(rank: int) -> None:
        mpicoll.allreduce(np.ones(1, np.float32), algorithm="ring")

    def ready(states: dict[int, State]) -> bool:
        return standing(states, 0, 1) and "round 4" in states[1]["pending"][0]["where"]

    states = Bench(3, 1).run(body, ready)
    assert [states[rank]["pending"][0]["where"] for rank in (0, 1)] == [
        "round 3 of 4 of allreduce/ring: waits for chunk 0 from rank 2",
        "round 4 of 4 of allreduce/ring: waits for chunk 0 from rank 0",
    ]


def test_in_shared_memory() -> None:
    def body(rank: int) -> None:
        mpicoll.allreduce(np.ones(6, np.float32), algorithm="slots")

    def ready(states: dict[int, State]) -> bool:
        return standing(states, 0, 1) and [states[rank]["pending"][0]["waits_for"] for rank in (0, 1)] == [[2], [2]]

    states = Bench(3).run(body, ready, warm=True)
    one = states[1]["pending"][0]
    assert one["where"] == "shared memory: waits for rank 2"


@pytest.mark.usefixtures("uncompared")
def test_in_a_phase_of_an_operation_of_nodes() -> None:
    def body(rank: int) -> None:
        mpicoll.allreduce(np.ones(8, np.float32), algorithm="hierarchical")

    def ready(states: dict[int, State]) -> bool:
        return standing(states, 0, 1, 2) and all(states[rank]["pending"][0]["waits_for"] for rank in (0, 1, 2))

    states = Bench(4, ranks_per_node=2).run(body, ready, warm=True)
    assert states[2]["pending"][0]["waits_for"] == [3]
    assert states[2]["pending"][0]["where"].startswith("phase 1 of 3: ")


def test_in_a_message() -> None:
    def body(rank: int) -> None:
        if rank == 0:
            mpicoll.recv(np.zeros(3), source=2, tag=7)
        elif rank == 2:
            mpicoll.send(np.zeros(3), 0, 7)

    states = Bench(3).run(body, lambda states: bool(states[0]["pending"]))
    (one,) = states[0]["pending"]
    assert one["call"]["world"] == 2
    assert (one["number"], one["bounded"], one["program"]) == (0, False, True)
    assert states[0]["program"]["waits"] == "message"
    line = states[2]["program"]["site"]["line"]
    (words,) = analyse(states, 3).words
    assert words.startswith("rank 0 has been waiting for ")
    assert words.endswith(
        f" s in recv(float64[3], peer=2, tag=7) at test_report.py:{one['site']['line']} in body: rank 2 runs its own"
        f" program at test_report.py:{line} in states"
    )


@pytest.mark.parametrize("timeout", [None, 20.0])
def test_a_wait_for_a_request(timeout: float | None) -> None:
    def body(rank: int) -> None:
        if rank == 0:
            mpicoll.irecv(np.zeros(3), 1, 7).wait(timeout)
        else:
            mpicoll.send(np.zeros(3), 0, 7)

    states = Bench(2).run(body, lambda states: bool(states[0]["pending"]))
    assert states[0]["pending"][0]["bounded"] == (timeout is not None)


def test_a_wait_that_polls() -> None:
    """It is seen as what it is whenever the look comes."""
    looks: list[tuple[str, bool, tuple[int, ...]]] = []

    def body(rank: int) -> None:
        if rank == 0:
            mpicoll.waitany([mpicoll.irecv(np.zeros(3), 1, tag) for tag in (7, 8)])
        else:
            mpicoll.send(np.zeros(3), 0, 7)

    def ready(states: dict[int, State]) -> bool:
        if states[0]["pending"]:
            (one,) = states[0]["pending"]
            tags = tuple(way["tag"] for way in messages_of(one["call"], one["key"]))
            looks.append((states[0]["program"]["waits"], one["polls"], tags))
        return len(looks) > 20

    Bench(2).run(body, ready)
    assert set(looks[1:]) == {("message", True, (7, 8))}


@pytest.mark.usefixtures("uncompared")
@pytest.mark.parametrize("timeout", [None, 20.0])
def test_the_program_waits_for_the_background(timeout: float | None) -> None:
    def body(rank: int) -> None:
        first = mpicoll.iallreduce(np.ones(6), algorithm="ring")
        second = mpicoll.iallreduce(np.ones(6), algorithm="ring")
        second.wait(timeout)
        first.wait()

    def ready(states: dict[int, State]) -> bool:
        waits = states[0]["program"]["site"]["line"] == body.__code__.co_firstlineno + 3
        return waits and standing(states, 0) and states[0]["queues"][0]["queued"] == 1

    states = Bench(2, 1).run(body, ready)
    (one,) = states[0]["pending"]
    # Who waits without a bound helps.
    if one["program"]:
        assert (timeout, one["thread"], one["site"]["function"]) == (None, "mpicoll-rank-0", "body")
    else:
        assert (one["thread"], one["site"]) == ("mpicoll-world", None)
    assert one["where"].startswith("round 1 of 2 of allreduce/ring")
    assert states[0]["program"].get("waits") == ("queue" if timeout is None else "")
    assert states[0]["queues"][0] | {"key": ""} == {
        "key": "",
        "name": "world",
        "members": [0, 1],
        "number": 2,
        "running": True,
        "queued": 1,
        "background": True,
    }


def test_behind_an_operation_in_the_background() -> None:
    """The program's own thread waits for the lock that the worker holds."""

    def body(rank: int) -> None:
        first = mpicoll.iallreduce(np.ones(6), algorithm="ring")
        while rank == 0 and not mpicoll.world().progress.lock.locked():
            time.sleep(1e-3)
        mpicoll.barrier()
        first.wait()

    states = Bench(2).run(
        body, lambda states: states[0]["program"]["waits"] == "queue" and not states[0]["pending"][0]["program"]
    )
    assert states[0]["program"]["key"] == states[0]["queues"][0]["key"]
    words = analyse({0: states[0], 1: at_work()}, 2).words
    assert words[0].startswith("allreduce(float64[6], op=sum) number 2 on world waits for rank 1")


def test_everything_about_a_rank() -> None:
    bench, found = Bench(2), {}

    def body(rank: int) -> None:
        mpicoll.allreduce(np.ones(3, np.int16))

    def ready(states: dict[int, State]) -> bool:
        if not states[0]["pending"]:
            return False
        found.update(bench.states(full=True))
        return True

    flight_recorder.past.clear()
    bench.run(body, ready)
    one = found[0]
    assert (one["rank"], one["size"]) == (0, 2)
    assert one["process"]["versions"]["mpicoll"] == mpicoll.__version__
    assert abs(one["process"]["clock"] - time.monotonic()) < 60
    names = [thread["name"] for thread in one["threads"]]
    assert names[0] == "mpicoll-rank-0"
    assert "MainThread" in names
    assert any("mpicoll.allreduce(np.ones(3, np.int16))" in line for line in one["threads"][0]["stack"])
    (past,) = one["past"]
    assert (past["call"].split("(")[0], past["state"], past["number"], past["group"]) == ("barrier", "ok", 1, "world")
    # Not the other rank's.
    assert found[1]["past"] == [] or found[1]["past"][0]["number"] == 1
    text = text_of("asked for", found, analyse(found, 2))
    assert "  Thread mpicoll-rank-0 (most recent call first):\n" in text
    assert "  Last 1 operations, the last one first:\n    barrier()" in text


def test_threads_that_may_call_something() -> None:
    """Those of the program, and ours while they run the program's code; not those that only others can wake."""
    end = threading.Event()

    def wait() -> None:
        end.wait(20)

    with ThreadPoolExecutor(1, "pool") as pool:
        pool.submit(int).result()
        targets: dict[str, Callable[[], object]] = {"loader": wait, "event": end.wait}
        targets |= {"mpicoll-callback": wait, "mpicoll-idle": partial(end.wait, 20)}
        threads = [threading.Thread(target=target, name=name) for name, target in targets.items()]
        for thread in threads:
            thread.start()
        others = own_state(0, 1, [], {}, full=False)["others"]
        end.set()
        for thread in threads:
            thread.join()
    assert {"loader", "mpicoll-callback"} <= set(others)
    assert not set(others) & {"event", "mpicoll-idle", "pool_0", "MainThread"}


def test_what_can_not_be_found_out() -> None:
    class Broken:
        current = None

        @property
        def group(self) -> Group:
            raise RuntimeError("it is being freed")

        def waiting_threads(self) -> set[int]:
            return set()

    found = own_state(1, 2, [Broken()], {}, full=True)  # type: ignore[list-item]
    assert found["failed"] == ["queues: RuntimeError: it is being freed"]
    assert found["threads"]
    assert said(waits(), found)[0].startswith(f"{WHAT} waits for ranks 1-3")
    assert "  could not be found out: queues: RuntimeError: it is being freed" in text_of(
        "x", {1: found}, analyse({}, 2)
    )


def test_numbers_of_numpy() -> None:
    """Whoever calls something may pass them."""
    one = np.int64(1)
    call = Call("send", 8, "int8", (np.int32(8),), peer=one, tag=one, counts=(one,), collective=False)  # type: ignore[arg-type]
    group = Group("0.0", "world", (0, 1), 0, 60.0)
    found = own_state(0, 2, [], {threading.get_ident(): ((group, 0, call, 1.0, None), False, False)}, full=True)
    (one,) = json.loads(json.dumps(found))["pending"]
    assert (one["call"]["world"], one["call"]["tag"], one["call"]["shape"]) == (1, 1, [8])


def test_a_state_is_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_state, "LIMIT", 60_000)
    group = Group("0.0", "world", (0, 1), 1, 60.0)
    call = Call("allgather", None, "int8", (4, 5), counts=tuple(range(1000)))
    for number in range(1000):
        flight_recorder.past.append(((group, number, call, 1.0, None), 2.0, ""))

    def deep(depth: int) -> State:
        return deep(depth - 1) if depth else own_state(1, 2, [], {}, full=True)

    found = deep(100)
    flight_recorder.past.clear()
    assert len(json.dumps(found)) <= 60_000
    assert found["past"][-1]["number"] == 999
    assert len(found["past"]) > 50


# --- files


def test_files(tmp_path: Path) -> None:
    states = {0: waits(), 1: at_work(), 2: absent(2, "died", "killed by SIGKILL"), 3: None}
    found = analyse(states, 4)
    text, data = write(tmp_path / "new", "prterun-host-1@1", "timeout of 30 s", states, found)
    assert (text.name, data.name) == ("mpicoll-report-prterun-host-1_1.txt", "mpicoll-report-prterun-host-1_1.json")
    assert text.read_text() == text_of("timeout of 30 s", states, found)
    content = json.loads(data.read_text())
    assert content["states"]["0"] == json.loads(json.dumps(states[0]))
    assert content["states"]["3"] is None
    assert content["analysis"]["words"] == found.words
    # The next one of the same job, and that of another.
    again, _ = write(tmp_path / "new", "prterun-host-1@1", "asked for", states, found)
    other, _ = write(tmp_path / "new", "prterun-host-2@1", "asked for", states, found)
    assert (again.name, other.name) == ("mpicoll-report-prterun-host-1_1-2.txt", "mpicoll-report-prterun-host-2_1.txt")
    assert "timeout of 30 s" in text.read_text()
    assert len(list((tmp_path / "new").iterdir())) == 6


def test_files_where_there_are_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr("os.link", refuse)
    names = [write(tmp_path, "job", "asked for", {0: at_work()}, analyse({0: at_work()}, 1))[1].name for _ in range(2)]
    assert names == ["mpicoll-report-job.json", "mpicoll-report-job-2.json"]
    assert len(list(tmp_path.iterdir())) == 4
    assert "Rank 0" in words_of(tmp_path / names[1])


def test_the_text_of_a_report() -> None:
    past = {"key": "0.0", "group": "world", "number": 16, "name": "barrier", "call": "barrier() by slots", "begin": 1.0}
    past |= {"seconds": 0.002, "state": "ok", "error": "", "site": {"file": "/home/a.py", "line": 3, "function": "f"}}
    threads = [{"name": "MainThread", "ident": 1, "program": True, "stack": ["a.py:1 in f\n    f()", "b.py:2 in g"]}]
    process = {"pid": 77, "host": "here", "versions": {"python": "3.11.7", "mpicoll": "0.1"}}
    first = waits(where="the MPI library") | {"process": process, "threads": threads}
    failed = past | {"number": 0, "call": "irecv()", "state": "failed", "error": "Timeout: late", "seconds": None}
    first["past"] = [past, failed | {"site": None}]
    last = at_work(process=process, failed=["others: KeyError: 3"])
    states = {0: first, 1: None, 2: absent(2, "left"), 3: last}
    lines = text_of("timeout", states, analyse(states, 4)).splitlines()
    assert lines.pop(5).startswith("Written 20")
    assert lines == [
        (
            f"{WHAT} waits for ranks 1-3: rank 1 has not answered, rank 2"
            " has left the job, rank 3 runs its own program at train.py:33 in load"
        ),
        f"{WHAT}: rank 0 is in the MPI library",
        "rank 1 does not answer (stopped or frozen?)",
        "",
        "Reason: timeout",
        "",
        "Rank 0: pid 77 on here (python 3.11.7, mpicoll 0.1)",
        (
            "  in allreduce(float32[1000], op=sum) by ring number 17 on world for 30 s at train.py:10 in step"
            " [MainThread]; the MPI library"
        ),
        "  world: 17 collectives begun, one runs",
        "",
        "  Thread MainThread (most recent call first):",
        "    a.py:1 in f",
        "        f()",
        "    b.py:2 in g",
        "",
        "  Last 2 operations, the last one first:",
        "    irecv() on world: failed: Timeout: late",
        "    barrier() by slots number 16 on world: ok in 2 ms at a.py:3 in f",
        "",
        "Rank 1: no answer",
        "",
        "Rank 2: has left the job",
        "",
        "Rank 3: pid 77 on here (python 3.11.7, mpicoll 0.1)",
        "  runs its own program at train.py:33 in load",
        "  world: 16 collectives begun",
        "  could not be found out: others: KeyError: 3",
    ]


def test_words_of_a_report(tmp_path: Path) -> None:
    first, second = crossed()
    states = {0: first, 1: second}
    _, data = write(tmp_path, "job", "asked for", states, analyse(states, 2))
    lines = words_of(data).splitlines()
    assert lines[0] == str(find_deadlock(states, 2))
    assert lines[4].startswith("Job job, 20")
    assert lines[4].endswith(" UTC: asked for")
    assert "Rank 0: pid None on None ()" in lines


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"format": "another 7"}'])
def test_what_is_no_report(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "some.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ArgumentError, match=r"some\.json is no report"):
        words_of(path)


# --- under MPI


@pytest.mark.mpi
def test_messages_under_way() -> None:
    comm = mpicoll.world()
    if comm.size == 1:
        return
    assert comm.watch is not None
    request, queues = None, comm.watch.queues()
    mpicoll.barrier()
    if comm.rank == 0:
        request = mpicoll.isend(np.zeros(1 << 20), 1, tag=3)
        found = own_state(0, comm.size, queues, comm.watch.active.copy(), full=False, started=comm.watch.started)
        assert {"way": "send", "key": None, "peer": None, "tag": None} in found["started"]
        assert "failed" not in found
    mpicoll.barrier()
    if comm.rank == 1:
        mpicoll.recv(np.zeros(1 << 20), 0, 3)
    if request is not None:
        request.wait()
        found = own_state(0, comm.size, queues, comm.watch.active.copy(), full=True)
        key = comm.progress.group.key
        assert {"way": "send", "key": key, "peer": 1, "tag": 3} in found["started"]
        assert found["past"][-1]["call"] == "isend(float64[1048576], peer=1, tag=3)"
    mpicoll.barrier()


@pytest.mark.mpi
def test_in_the_mpi_library() -> None:
    if mpicoll.world().size == 1:
        return
    comm = mpicoll.world().duplicate()
    assert comm.watch is not None
    watch, found = comm.watch, []

    def look() -> None:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            one = own_state(0, comm.size, watch.queues(), watch.active.copy(), full=False)
            if one["pending"]:
                found.append(one)
                break
            time.sleep(0.01)
        mpicoll.isend(np.zeros(1), 1, tag=4, comm=comm).wait()

    # Otherwise the ranks of a node compare their calls before MPI is called.
    comm.progress.match = unmatched
    mpicoll.barrier(algorithm="native", comm=comm)
    if comm.rank == 0:
        thread = threading.Thread(target=look)
        thread.start()
        mpicoll.allreduce(np.ones(3), algorithm="native", comm=comm)
        thread.join()
        comm.free()
        (one,) = found[0]["pending"]
        assert one["where"] == "the MPI library"
        assert one["call"]["text"] == "allreduce(float64[3], op=sum) by native"
        assert found[0]["program"]["waits"] == "queue"
        return
    if comm.rank == 1:
        mpicoll.recv(np.zeros(1), 0, 4, comm=comm)
    mpicoll.allreduce(np.ones(3), algorithm="native", comm=comm)
    comm.free()
