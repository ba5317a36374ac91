"""What a turn of the hub costs does not depend on the number of connections that have nothing to do."""

from __future__ import annotations

import socket
import sys
from types import FrameType
from typing import Any

import pytest
from support.sockets import wait_readable
from support.star import Clock, Make, Star, until

from mpicoll.transport.control import dialer, timing
from mpicoll.transport.control.endpoint import Endpoint

SIZES = 12, 120


def count_instructions(job: Star) -> int:
    """Return the number of instructions of Python's virtual machine in one turn of the hub."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        job.heard[0] += job.lines[0].poll(0.0)
    finally:
        sys.settrace(before)
    return count


def connect(job: Star, clock: Clock) -> Star:
    """Connect all ranks of `job`, and let the kernels acknowledge everything."""
    ranks = range(len(job.lines))
    addresses = [line.address for line in job.lines]
    for line in job.lines:
        line.connect(addresses)
        line.send({"here": line.rank})
    until(lambda: job.drive(*ranks) or all(len(heard) == len(ranks) - 1 for heard in job.heard))
    for _ in range(3):
        clock.now += timing.SILENCE_CHECK_INTERVAL
        job.drive(*ranks)
    until(lambda: job.drive(0) or job.lines[0].flush(0))
    clock.now += timing.SILENCE_CHECK_INTERVAL
    for _ in range(3):
        job.drive(0)
    return job


def measure(job: Star) -> dict[str, int]:
    """Return the cost of some turns of the hub, of which no more than one connection has something to do."""
    costs = {"nothing": count_instructions(job)}
    job.lines[1].send({"question": 1}, 0)
    job.drive(1)
    costs["a message arrives"] = count_instructions(job)
    assert {"question": 1} in job.messages(0, 1)
    job.lines[0].send({"answer": 1}, 1)
    costs["a message is sent"] = count_instructions(job)
    job.drive(1)
    assert {"answer": 1} in job.messages(1, 0)
    with socket.create_connection(("127.0.0.1", job.lines[0].address["port"])):
        costs["a stranger connects"] = count_instructions(job)
    costs["the stranger ends"] = count_instructions(job)
    assert not job.lines[0]._endpoint._links.unproven()
    return costs


def test_a_turn_of_the_hub(star: Make) -> None:
    small, large = (measure(connect(star(size, clock=clock), clock)) for size in SIZES for clock in [Clock()])
    for what, cost in small.items():
        assert cost > 100, what
        assert abs(large[what] - cost) <= 0.15 * cost, (what, small, large)


def test_a_turn_while_ranks_are_missing(star: Make) -> None:
    costs = []
    for size in SIZES:
        job = star(size, clock=Clock())
        job.lines[0].connect([line.address for line in job.lines])
        job.drive(0)
        costs.append(count_instructions(job))
    assert costs[0] > 50
    assert abs(costs[1] - costs[0]) <= 0.15 * costs[0]


def test_the_hub_probes_a_limited_number_of_ports_at_a_time(star: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """And all of them in the end: of 7 other ranks, 3 have died before they were connected."""
    monkeypatch.setattr(dialer, "_MAX_PROBES", 2)
    most = 0
    clock = Clock()
    job = star(8, clock=clock)
    addresses = [line.address for line in job.lines]
    for rank in (2, 4, 7):
        job.end(rank)
    job.lines[0].connect(addresses)

    def step() -> None:
        nonlocal most
        clock.now += 0.05
        job.drive(0)
        most = max(most, len(job.lines[0]._endpoint._links.probes))

    until(lambda: step() or job.gone(0) == [(rank, "closed") for rank in (2, 4, 7)], lambda: job.heard[0])
    assert most == 2


def test_an_answer_that_is_handled_late_counts(star: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub accepts a rank, and then does not get round to its connections before its time is over."""
    clock = Clock()
    job = star(2, clock=clock)
    addresses = [line.address for line in job.lines]
    for line in job.lines:
        line.connect(addresses)
    hub = job.lines[0]._endpoint
    until(lambda: job.drive(1, 0) or hub._links.strangers)
    [stranger] = hub._links.strangers
    until(lambda: job.drive(1) or wait_readable([stranger.sock], 0))
    monkeypatch.setattr(Endpoint, "serve", lambda endpoint, key, mask: None)
    clock.now += 2 * timing.PROVE_WITHIN
    job.drive(0)
    monkeypatch.undo()
    assert list(hub._links.strangers) == [stranger]
    assert stranger.rank == 1
    until(lambda: job.drive(1, 0) or 1 in hub._links.clients)
    assert hub._links.clients[1] is stranger


def test_the_hub_knows_which_ranks_are_missing(star: Make) -> None:
    """After each of many changes, of the hub itself too."""
    clock = Clock()
    job = star(7, clock=clock)
    addresses = [line.address for line in job.lines]
    ended: set[int] = set()

    def step() -> None:
        clock.now += 0.02
        job.drive(*(rank for rank in range(7) if rank not in ended))
        for line in job.lines:
            end = line._endpoint
            clients = end._links.clients
            expected = {rank for rank in end.members.others() if rank not in clients} if end.members.is_hub else set()
            assert line.rank in ended or end._missing == expected

    for rank in (0, 3, 1, 6):
        job.lines[rank].connect(addresses)
        step()
    for rank in (3, 0, 6):  # 0 is the hub
        for _ in range(5):
            step()
        job.end(rank)
        ended.add(rank)
    job.end(5)  # before it has connected to any hub
    ended.add(5)
    for rank in (2, 4):
        job.lines[rank].connect(addresses)
        step()
    living = [1, 2, 4]
    until(lambda: step() or all({one for one, _ in job.gone(rank)} == ended for rank in living), lambda: job.heard)
    until(lambda: step() or set(job.lines[1]._endpoint._links.clients) == {2, 4})
    assert not job.lines[1]._endpoint._expects_connections()
