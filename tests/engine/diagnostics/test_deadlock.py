"""Deadlocks in states made by hand, and in those of random programs."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from support.machines import random_machine
from support.rank_states import (
    BARRIER,
    OTHER,
    PAIR,
    SUM,
    WORLD,
    State,
    at_work,
    begun,
    crossed,
    doing,
    in_message,
    message,
    said,
    state,
    waits,
)

from mpicoll.engine.core.queue import OperationQueue
from mpicoll.engine.diagnostics.analysis import analyse
from mpicoll.engine.diagnostics.deadlock import Deadlock, find_deadlock, open_questions
from mpicoll.engine.diagnostics.departures import make_departed_state
from mpicoll.engine.diagnostics.flight_recorder import Call, Group
from mpicoll.engine.diagnostics.rank_state import snapshot


def doomed(*states: State | None) -> tuple[int, ...]:
    """The ranks that are accused."""
    found = find_deadlock({rank: one for rank, one in enumerate(states) if one is not None}, len(states))
    return () if found is None else found.ranks


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
    assert doomed(first, make_departed_state(1, "died", "killed")) == ()
    assert doomed(first, make_departed_state(1, "left")) == ()
    assert doomed(first, second | {"queues": second["queues"][1:]}) == ()
    assert doomed(first, {"rank": 1, "failed": ["it was too late"]}) == ()


def test_left() -> None:
    first, _ = crossed()
    found = find_deadlock({0: first, 1: make_departed_state(1, "left", numbers={"0.1": 3})}, 2)
    assert found is not None
    assert str(found) == (
        "rank 0 waits in allreduce(float32[1000], op=sum) number 4 on world/pair at train.py:10 in step for rank 1,"
        " which has exited"
    )
    assert found.cycle == ()
    assert doomed(first, make_departed_state(1, "left", numbers={"0.1": 4})) == ()


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


def test_description_of_a_rank_that_waits_for_a_message() -> None:
    last = waits(17, call=BARRIER)
    assert said(in_message("recv", 1), last, last, last)[2] == (
        "rank 0 has been waiting for 30 s in recv(float64[3], peer=1, tag=5) at train.py:40 in step:"
        " rank 1 is in barrier() at train.py:10 in step"
    )
    assert said(in_message("recv", 1, seconds=2.0), make_departed_state(1, "left", numbers={"0.0": 16}))[0] == (
        "rank 0 has been waiting for 2 s in recv(float64[3], peer=1, tag=5) at train.py:40 in step: rank 1 has exited"
    )


def test_a_receive_from_any() -> None:
    group = ("0.3", "world/three", (0, 1, 2))
    anyone = state([], doing(group, 0, message("recv", None, 1)))
    assert doomed(anyone, anyone, anyone) == (0, 1, 2)
    assert doomed(anyone, anyone, state([])) == ()
    assert doomed(anyone, anyone, make_departed_state(2, "left")) == (0, 1)


def test_messages_in_transit_without_a_receiver() -> None:
    first, second = in_message("recv", 1), in_message("recv", 0, 6)
    sent = {"way": "send", "key": None, "peer": None, "tag": None}
    assert doomed(first, second | {"started": [sent]}) == ()
    awaited = {"way": "recv", "key": None, "peer": None, "tag": 5}
    assert doomed(first, second | {"started": [awaited]}) == (0, 1)
    assert doomed(in_message("send", 1), second | {"started": [awaited]}) == ()
    assert doomed(in_message("send", 1), second | {"started": [awaited | {"tag": 7}]}) == (0, 1)


def test_what_a_rank_has_sent_before_it_left() -> None:
    assert doomed(in_message("recv", 1), make_departed_state(1, "left")) == (0,)
    assert doomed(in_message("recv", 1, seconds=29.0), make_departed_state(1, "left")) == ()


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
    assert doomed(first, make_departed_state(1, "left", sent={"0.0": sent})) == ((0,) if accused else ())


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
        (make_departed_state(1, "left", numbers={"0.1": 3, DUPLICATE[0]: 1}), True),
        (make_departed_state(1, "left", numbers={"0.1": 3, DUPLICATE[0]: 2}), False),
        (make_departed_state(1, "left", numbers={"0.2": 3}), False),
        (make_departed_state(1, "died"), False),
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
    queue = OperationQueue(Group("0.0", "world", (0,), 0, 60.0), None, background=False, explain=lambda error: error)
    calls = [("0.0 agree", 9), ("0.0 shrink", 1), ("0.1 agree", 1), ("0.3 agree", 1), ("0.0", 2)]
    found = snapshot(0, 1, [queue], {}, full=False, calls=calls, met=met, retired={"0.1": 7, "0.2": 8})
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
        second = make_departed_state(1, "left", numbers={key: 17}, calls=[[key, 17, "bcast", 1]])
    else:
        call = {"name": "bcast", "root": 1, "text": "bcast(int8[8], root=1)"}
        second = at_work(17, called=[{"key": key, "number": 17, "call": call, "site": None}])
        assert open_questions({0: waits(), 1: at_work(17)}) == [(key, 17)]
    assert open_questions({0: waits(), 1: at_work(16), 2: waits()}) == []
    assert doomed(waits(), second) == (0,)
    assert doomed(waits(call=Call("broadcast", 8, root=1)), second) == ()
    assert "rank 1 has called bcast" in said(waits(), second)[0]


def test_what_a_rank_failed_in_never_ends_where_it_is_awaited() -> None:
    key = WORLD[0]
    call = {"name": "allreduce", "text": str(SUM)}
    ended = {"key": key, "number": 17, "call": call, "site": None}
    failed = at_work(17, called=[ended | {"failed": True}])
    waiting, other = waits(), waits()
    waiting["pending"][0]["waits_for"] = [2]
    found = find_deadlock({0: waiting, 1: other, 2: failed}, 3)
    assert found is not None
    assert (found.ranks, found.cycle, found.mismatches) == ((0,), (), ())
    assert str(found) == (
        "rank 0 waits in allreduce(float32[1000], op=sum) number 17 on world at train.py:10 in step for rank 2, which"
        " failed in it, as its own error explains"
    )
    # It may have sent all that the others need.
    assert doomed(waits(), other, failed) == ()
    assert doomed(waiting, other, at_work(17, called=[ended | {"failed": False}])) == ()
    assert doomed(waiting, other, at_work(18, called=[ended | {"number": 16, "failed": True}])) == ()


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
    assert doomed(first, make_departed_state(1, "left", sent={"0.4": []})) == (0,)
    assert doomed(first, make_departed_state(1, "left")) == ()
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
    assert doomed(both, make_departed_state(1, "left", sent={"0.4": []}), None) == (0,)


def test_a_wait_with_a_bound() -> None:
    assert doomed(in_message("irecv", 1, bounded=True), in_message("recv", 0)) == ()


def test_sendrecv() -> None:
    def exchange(dest: int, source: int) -> State:
        call = Call("sendrecv", parts=(message("send", dest, 1), message("recv", source, 1)), collective=False)
        return state([], doing(WORLD, 0, call))

    assert doomed(exchange(1, 1), exchange(0, 0)) == ()
    # A ring, and one that has been left by its last rank.
    assert doomed(exchange(1, 2), exchange(2, 0), exchange(0, 1)) == ()
    assert doomed(exchange(1, 2), exchange(2, 0), make_departed_state(2, "left")) == ()
    assert doomed(exchange(1, 1), in_message("recv", 0, 2)) == (0, 1)
    assert doomed(exchange(1, 1), in_message("recv", 0, 1)) == ()


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


PROGRAMS = 200


def accused_of(found: Deadlock) -> set[tuple[int, str, int]]:
    """The operations that can't end, as they are named in `Machine.done`."""
    return {(rank, key, number) if number else (rank, "", int(begin)) for rank, key, number, begin in found.waits}


@pytest.mark.parametrize("messages", [False, True], ids=["collectives", "messages"])
@pytest.mark.parametrize("background", [False, True], ids=["blocking", "background"])
@pytest.mark.parametrize("mixed", [False, True], ids=["allreduce", "mixed"])
def test_reported_ranks_never_continue(mixed: bool, background: bool, messages: bool) -> None:
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
