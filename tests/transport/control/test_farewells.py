"""The end of a program, at which all ranks leave within a moment: its cost, and what the ranks that stay receive."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.star import Clock, Make, Star, until

from mpicoll.transport.control import farewells, timing
from mpicoll.transport.control.connection import ALL, FAREWELL, FAREWELLS, Connection, Packet, encode
from mpicoll.transport.control.events import Message, PeerExit
from mpicoll.transport.control.farewells import Farewells, read_farewells
from mpicoll.transport.control.membership import Membership

SHAPES = ["star", "tree/6"]


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Counter[bytes]:
    """Counts the packets that ranks of this process queue, by kind."""
    found: Counter[bytes] = Counter()
    enqueue = Connection.enqueue

    def counting(connection: Connection, packets: Any) -> None:
        packets = list(packets)
        found.update(packet[0] for packet in packets)
        enqueue(connection, packets)

    monkeypatch.setattr(Connection, "enqueue", counting)
    return found


def meet(job: Star) -> Callable[..., Any]:
    """Connect all ranks of `job`; return a function that drives those that have not ended."""
    ranks = range(len(job.lines))
    addresses = [line.address for line in job.lines]
    for line in job.lines:
        line.connect(addresses)
        line.send({"here": line.rank})
    until(lambda: job.drive(*ranks) or all(len(heard) == len(ranks) - 1 for heard in job.heard))
    for heard in job.heard:
        heard.clear()
    return lambda: job.drive(*(rank for rank in ranks if not job.over[rank]))


def leave(job: Star, ranks: Iterator[int], clock: Clock, turn: Callable[..., Any]) -> None:
    """Let `ranks` leave at once, and end when they may."""
    waiting = list(ranks)
    for rank in waiting:
        job.lines[rank].leave({"done": True}, timeout=0.0)

    def step() -> bool:
        clock.now += 0.001
        turn()
        for rank in list(waiting):
            if job.lines[rank].flush(0.0):
                job.end(rank)
                waiting.remove(rank)
        return not waiting

    until(step, lambda: waiting)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_cost_of_the_end_is_a_few_packets_for_each_rank(
    star: Make, shape: str, count: Counter[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one from each rank to each other one, nor a new hub for each that leaves."""
    monkeypatch.setattr(timing, "LINGER_AT_MOST", 1e6)
    monkeypatch.setattr(timing, "LINGER", 1e6)
    size, clock = 36, Clock()
    job = star(size, clock=clock, shape=shape)
    turn = meet(job)
    count.clear()
    begin = clock.now
    leave(job, iter(range(size)), clock, turn)
    assert count.total() <= 4 * size, count
    assert clock.now - begin < 1.0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("stay", [{0, 20}, {1, 5, 35}, {7, 8}], ids=str)
def test_ranks_that_stay_receive_all_farewells_in_few_packets(
    star: Make, shape: str, stay: set[int], count: Counter[bytes]
) -> None:
    size, clock = 36, Clock()
    job = star(size, clock=clock, shape=shape)
    turn = meet(job)
    count.clear()
    gone = sorted(set(range(size)) - stay)
    leave(job, iter(gone), clock, turn)

    def step() -> bool:
        clock.now += 0.001
        turn()
        return all(len(job.gone(rank)) == len(gone) for rank in stay)

    until(step, lambda: [job.gone(rank) for rank in stay])
    for rank in stay:
        assert job.gone(rank) == [(one, "left") for one in gone]
        for before, after in zip(job.heard[rank][::2], job.heard[rank][1::2], strict=True):
            assert isinstance(before, Message)
            assert isinstance(after, PeerExit)
            assert (before.source, before.body) == (after.rank, {"done": True})
    assert count[FAREWELL] + count[FAREWELLS] <= 5 * size, count


def test_a_hub_that_leaves_reports_deaths_until_it_is_none(star: Make) -> None:
    clock = Clock()
    job = star(4, clock=clock)
    turn = meet(job)
    job.lines[0].leave({"bye": 0}, timeout=0.0)
    job.end(2)
    until(lambda: turn() or (job.gone(1) and job.gone(3)))
    assert job.gone(1) == job.gone(3) == [(2, "closed")]
    assert not job.lines[0].flush(0.0)
    clock.now += timing.LINGER
    until(lambda: turn() or (len(job.gone(1)) == len(job.gone(3)) == 2))
    assert job.gone(1) == job.gone(3) == [(0, "left"), (2, "closed")]
    until(lambda: turn() or job.lines[0].flush(0.0))


def test_a_hub_waits_for_a_bounded_time(star: Make) -> None:
    """Also if one rank after the other leaves."""
    clock = Clock()
    size = 20
    job = star(size, clock=clock)
    turn = meet(job)
    job.lines[0].leave({}, timeout=0.0)
    for rank in range(size - 1, 1, -1):
        clock.now += 0.5 * timing.LINGER
        job.lines[rank].leave({}, timeout=0.0)
        for _ in range(5):
            turn()
        if job.lines[0]._endpoint.members.resigned:
            break
    assert timing.LINGER_AT_MOST <= clock.now < timing.LINGER_AT_MOST + timing.LINGER


def packet_of(rank: int, **body: Any) -> Packet:
    return FAREWELL, rank, ALL, encode(body)


def test_farewells_in_one_packet(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = {3: {"a": 1}, 4: {"a": 1}, 2: {"a": 1}, 5: {"b": 2}, 6: {"a": 1}}
    some = Farewells(0)
    for rank, body in bodies.items():
        some.receive(packet_of(rank, **body))
    [packet] = some.make_packets(bodies)
    kind, source, dest, payload = packet
    assert (kind, source, dest) == (FAREWELLS, 0, ALL)
    assert len(json.loads(payload)["bodies"]) == 2
    read = list(read_farewells(json.loads(payload), 7))
    assert [(one[1], body) for one, body in read] == list(bodies.items())
    assert [one for one, _ in read] == [some.received[rank] for rank in bodies]
    assert some.make_packets([5]) == [packet_of(5, b=2)]
    assert some.make_packets([]) == []
    monkeypatch.setattr(farewells, "_BATCH_LIMIT", 20)
    parts = some.make_packets(bodies)
    assert [len(list(read_farewells(json.loads(one[3]), 7))) if one[0] == FAREWELLS else 1 for one in parts] == [
        2,
        2,
        1,
    ]


@pytest.mark.parametrize(
    "ranges",
    [[[0, 7, 0]], [[-1, 2, 0]], [[2, 1, 0]], [[0, 1, 1]], [[0, 1, 2]], [[0, 1]], [["0", 1, 0]], 5, None],
    ids=str,
)
def test_packets_that_are_none(ranges: Any) -> None:
    with pytest.raises((ValueError, TypeError, LookupError)):
        list(read_farewells({"bodies": [{}, 3], "ranges": ranges}, 7))


def test_exits_that_a_peer_does_not_know() -> None:
    members = Membership(9, 100)
    for rank in [*range(9), *range(20, 99, 2)]:
        members.record(PeerExit(rank, "left", "", 0, ""))
    ranges = members.list_ranges()
    assert ranges[0] == (0, 8)
    assert 20 < len(ranges) < 30
    assert len(encode({"exits": ranges})) < 500
    unknown = [one.rank for one in members.list_unknown_exits(ranges)]
    assert sorted([*unknown, *(rank for first, last in ranges for rank in range(first, last + 1))]) == sorted(
        members.exits
    )
    assert len(members.list_unknown_exits([])) == len(members.exits)
    assert members.list_unknown_exits([(-5, 10**12)]) == []
