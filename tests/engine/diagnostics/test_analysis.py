"""The sentences of an analysis."""

from __future__ import annotations

from support.rank_states import (
    BARRIER,
    PAIR,
    SUM,
    WHAT,
    WORLD,
    State,
    at_work,
    begun,
    doing,
    in_message,
    message,
    said,
    state,
    waits,
)

from mpicoll.engine.diagnostics.analysis import analyse
from mpicoll.engine.diagnostics.departures import make_departed_state, make_unreached_state
from mpicoll.engine.diagnostics.flight_recorder import Call
from mpicoll.engine.diagnostics.report_file import format_report
from mpicoll.wording import rank_list


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
    assert said(waiting, waiting, waiting, make_departed_state(3, "left", numbers={"0.0": 16}))[0] == (
        "ranks 0-2 wait in allreduce(float32[1000], op=sum) number 17 on world at"
        " train.py:10 in step for rank 3, which has exited"
    )
    assert said(waiting, waiting, waiting, make_departed_state(3, "left", numbers={"0.0": 16}))[1] == (
        f"{what}, which has exited without calling it"
    )
    assert said(waiting, waiting, waiting, make_departed_state(3, "left")) == [f"{what}, which has exited"]
    assert said(waiting, waiting, waiting, make_departed_state(3, "died", "killed by SIGKILL")) == [
        f"{what}, which has died (killed by SIGKILL)",
        "rank 3 has died (killed by SIGKILL)",
    ]
    assert said(waiting, waiting, waiting, None) == [
        f"{what}, which has not responded",
        "rank 3 does not respond (stopped, frozen or without a core?)",
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


def test_no_rank_waits() -> None:
    assert said(at_work(), at_work()) == ["no rank waits in an operation"]
    assert said(at_work(), None) == ["rank 1 does not respond (stopped, frozen or without a core?)"]


def test_ranks_without_a_core() -> None:
    late = waits() | {"run_delay": [(40.0, 9.0), (20.0, 7.0), (1.0, 2.5)]}
    little = waits() | {"run_delay": [(1.0, 7.0)]}
    why = "other processes use the cores, or a cgroup limits"
    assert said(late, little, waits())[1:] == [
        f"rank 0 was ready to run, but had no core, for 9.5 of the last 30 s: {why} its time"
    ]
    # It began before the operation.
    earlier = at_work() | {"run_delay": [(29.0, 80.0)]}
    assert said(late, earlier, waits())[1:] == [
        f"ranks 0 and 1 were ready to run, but had no core, for up to 30 of the last 30 s: {why} their time"
    ]
    # The operations have ended since then.
    assert said(at_work() | {"run_delay": [(20.0, 9.0), (1.0, 7.0)]}, at_work()) == [
        f"rank 0 was ready to run, but had no core, for 7 of the last 8 s: {why} its time"
    ]
    assert said(at_work() | {"run_delay": [(6.0, 7.0)]}, at_work()) == ["no rank waits in an operation"]


def test_calls_that_differ() -> None:
    other = Call("allreduce", 4000, "float64", (500,), op="max", algorithm="ring")
    assert said(waits(), waits(), waits(call=other, line=12), waits())[0] == (
        "collective number 17 on world is not the same on all ranks: ranks 0, 1 and 3 call allreduce(float32[1000],"
        " op=sum) at train.py:10 in step, rank 2 calls allreduce(float64[500], op=max) at train.py:12 in step"
    )


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
    found = analyse({0: None, 1: waits(), 2: make_unreached_state(2, 0), 3: make_unreached_state(3, 0)}, 4)
    assert found.words == [
        (
            "rank 0 does not respond (stopped, frozen or without a core?); it relays the messages of the watchdogs,"
            " so nothing is known about ranks 2 and 3"
        ),
        f"{WHAT} waits for rank 0, which has not responded",
    ]
    assert (found.missing, found.silent, found.unreached) == ([0], [0], [2, 3])
    assert found.deadlock is None
    assert "Rank 3: could not be queried, because rank 0 does not respond" in format_report(
        "x", {3: make_unreached_state(3, 0)}, found
    )


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
