"""A tree of two levels: messages, deaths and farewells of members, leaders and the root, in random order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest
from support.star import SOON, Clock, Make, Star, until

from mpicoll.transport.control import shape, timing
from mpicoll.transport.control.events import Message, PeerExit
from mpicoll.transport.control.membership import Membership
from mpicoll.transport.control.shape import choose_shape, group_ranks


class Chance:
    """A tree of random size whose ranks one thread drives in random order, by a clock of its own."""

    def __init__(self, star: Make, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.random = Random(seed)
        self.clock = Clock()
        self.size = self.random.randint(3, 10)
        self.each = self.random.randint(1, 4)
        self.job: Star = star(self.size, clock=self.clock, shape=f"tree/{self.each}")
        self.running = list(range(self.size))
        self.weights = [self.random.choice([1.0, 1.0, 0.2, 0.05]) for _ in range(self.size)]
        self.pace = 0.002
        self.sent = 0
        self.deadline = time.monotonic() + SOON
        addresses = [line.address for line in self.job.lines]
        for line in self.job.lines:
            line.connect(addresses)
            monkeypatch.setattr(line._selector, "select", self._overtaken(line._selector.select))

    def describe(self) -> str:
        """Return what each rank has been told, for a failed assertion."""
        told = [
            " ".join(f"{one.rank}:{one.why}" if isinstance(one, PeerExit) else f"{one.source}" for one in heard)
            for heard in self.job.heard
        ]
        return f"groups of {self.each}, running {self.running}: {told}"

    def step(self) -> int:
        """One turn of a rank."""
        assert time.monotonic() < self.deadline, self.describe()
        self.clock.now += self.random.random() * self.pace
        rank = self.random.choices(self.running, [self.weights[rank] for rank in self.running])[0]
        self.job.drive(rank)
        end = self.job.lines[rank]._endpoint
        if end.members.hub >= 0 and not end.members.resigned:
            assert end._missing == set(end.members.children()) - set(end._links.clients)
        return rank

    def _overtaken(self, select: Callable[..., Any]) -> Callable[..., Any]:
        def call(timeout: float) -> Any:
            ready = select(timeout)
            if self.random.random() < 0.3:
                self.step()
            return ready

        return call

    def send(self, rank: int) -> None:
        """Send a message to all or to one."""
        self.sent += 1
        to = self.random.choice([None, *(other for other in range(self.size) if other != rank)])
        self.job.lines[rank].send({"number": self.sent, "text": "x" * self.random.choice([0, 10, 40_000])}, to)

    def end(self, rank: int) -> None:
        self.job.end(rank)
        self.running.remove(rank)

    def check(self, gone: dict[int, set[str]]) -> None:
        """Wait until each living rank has been told which ranks are `gone`, and check what it has been told.

        `gone` has the possible reasons of each.
        """
        while not all(len(self.job.gone(rank)) >= len(gone) for rank in self.running):
            self.step()
        for rank in self.running:
            self.job.lines[rank].send({"after": rank})
        while not all(
            {one.source for one in self.job.heard[rank] if isinstance(one, Message) and "after" in one.body}
            == {*self.running} - {rank}
            for rank in self.running
        ):
            self.step()
        for _ in range(20 * len(self.running)):
            self.step()
        for rank in self.running:
            assert [one for one, _ in self.job.gone(rank)] == sorted(gone), self.describe()
            assert all(why in gone[one] for one, why in self.job.gone(rank)), (gone, self.describe())
            self._check_messages(self.job.heard[rank])

    def _check_messages(self, heard: list[Message | PeerExit]) -> None:
        last: dict[int, int] = {}
        ended: set[int] = set()
        for one in heard:
            if isinstance(one, PeerExit):
                ended.add(one.rank)
                continue
            assert one.source not in ended, self.describe()
            if "number" in one.body:
                assert last.get(one.source, -1) < one.body["number"], self.describe()
                last[one.source] = one.body["number"]


@pytest.fixture
def chance(
    star: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[Callable[[int], Chance]]:
    """Makes trees, in which no rank may violate the protocol."""
    yield lambda seed: Chance(star, seed, monkeypatch)
    assert "closes its connection" not in caplog.text


@pytest.mark.parametrize("seed", range(5))
def test_messages_arrive_once_in_their_order(chance: Callable[[int], Chance], seed: int) -> None:
    tree = chance(seed)
    expected: dict[int, list[tuple[int, int]]] = {rank: [] for rank in range(tree.size)}
    for number in range(60):
        rank = tree.step()
        to = tree.random.choice([None, *(other for other in range(tree.size) if other != rank)])
        tree.job.lines[rank].send({"number": number, "text": "x" * tree.random.choice([0, 10, 40_000])}, to)
        for other in range(tree.size):
            if other != rank and to in (None, other):
                expected[other].append((rank, number))

    def received(rank: int) -> list[tuple[int, int]]:
        return sorted((one.source, one.body["number"]) for one in tree.job.heard[rank] if isinstance(one, Message))

    while not all(received(rank) == sorted(expected[rank]) for rank in range(tree.size)):
        tree.step()
    tree.check({})


@pytest.mark.parametrize("seed", range(15))
def test_leaving_in_any_order(chance: Callable[[int], Chance], seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody seems to have died, and that is no question of time."""
    monkeypatch.setattr(timing, "REPORT_WITHIN", 1e6)
    tree = chance(seed)
    leavers = set(tree.random.sample(range(tree.size), tree.random.randint(1, tree.size))) | {0}
    for _ in range(tree.random.choice([0, 10, 40]) * tree.size):
        tree.step()
    eager = tree.random.choice([1.0, 0.1, 0.01])
    left: set[int] = set()
    while leavers & set(tree.running):
        rank = tree.step()
        if rank in leavers - left and tree.random.random() < eager:
            tree.job.lines[rank].leave({"bye": rank}, timeout=0.0)
            left.add(rank)
        elif rank in left and tree.random.random() < 0.4 and tree.job.lines[rank].flush(0.0):
            tree.end(rank)
    for rank, heard in enumerate(tree.job.heard):
        assert all(why == "left" for _, why in tree.job.gone(rank)), heard
    tree.check({rank: {"left"} for rank in leavers})
    for heard in tree.job.heard:
        byes = [one.body["bye"] for one in heard if isinstance(one, Message) and "bye" in one.body]
        assert byes == [one.rank for one in heard if isinstance(one, PeerExit)]


@pytest.mark.parametrize("seed", range(30))
def test_deaths_and_farewells_in_any_order(chance: Callable[[int], Chance], seed: int) -> None:
    """Of members, leaders and the root, at any point of the start, of messages and of other deaths.

    A farewell may be lost with the one rank that has it: one that leaves relies on a rank that stays, or leaves too.
    """
    tree = chance(seed)
    gone: dict[int, set[str]] = {}
    deaths = 0
    for _ in range(tree.random.choice([0, 10, 40, 100]) * tree.size):
        tree.step()
    fates = tree.random.sample(range(tree.size), tree.random.randint(1, tree.size - 1))
    if tree.random.random() < 0.5:
        fates.sort()  # each rank that takes over goes next
    leaving: dict[int, int] = {}  # with the number of deaths before
    left: dict[int, int] = {}
    pause = tree.random.choice([1, 5, 30, 300])
    while fates or leaving:
        for _ in range(tree.random.randint(0, pause)):
            rank = tree.step()
            if tree.random.random() < 0.2 and rank not in leaving and rank in tree.running:
                tree.send(rank)
            if rank in leaving and tree.job.lines[rank].flush(0.0):
                left[rank] = leaving.pop(rank)
                tree.end(rank)
        if not fates:
            tree.step()
            continue
        rank = fates.pop(0)
        if tree.random.random() < 0.3:
            leaving[rank] = deaths
            tree.job.lines[rank].leave({"bye": rank}, timeout=0.0)
        else:
            gone[rank] = {"closed"}
            deaths += 1
            tree.end(rank)
    gone |= {rank: {"left"} if deaths == before else {"left", "closed"} for rank, before in left.items()}
    tree.pace = 0.02
    tree.check(gone)


def meet(job: Star) -> None:
    """Connect all ranks, until all have heard of all; this is then forgotten."""
    addresses = [line.address for line in job.lines]
    for line in job.lines:
        line.connect(addresses)
        line.send({"here": line.rank})
    ranks = range(len(job.lines))
    until(lambda: job.drive(*ranks) or all(len(heard) == len(ranks) - 1 for heard in job.heard), lambda: job.heard)
    for heard in job.heard:
        heard.clear()


@pytest.mark.parametrize(("source", "receiver"), [(4, 0), (5, 4)], ids=["at the root", "at the next leader"])
def test_what_came_through_a_dead_leader_comes_first(
    star: Make, source: int, receiver: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the receiver reads the connection to the dead leader, rank 3, last."""
    job = star(6, shape="tree/3", clock=Clock())
    meet(job)
    job.lines[source].send({"number": 1}, receiver)
    until(lambda: job.drive(source) or job.lines[source].flush(0.0))
    until(lambda: job.drive(3) or job.lines[3].flush(0.0))
    end = job.lines[receiver]._endpoint
    serve = end._serve_connection
    with monkeypatch.context() as patch:
        patch.setattr(end, "_serve_connection", lambda one, mask: None if one.rank == 3 else serve(one, mask))
        job.end(3)
        until(lambda: job.drive(0, source, receiver) or end._waiting)
        job.lines[source].send({"number": 2}, receiver)
        for _ in range(20):
            job.drive(source, receiver)
        assert job.heard[receiver] == []
    until(lambda: job.drive(*{0, source, receiver}) or len(job.heard[receiver]) == 3, lambda: job.heard[receiver])
    assert job.messages(receiver) == [{"number": 1}, {"number": 2}]
    assert job.gone(receiver) == [(3, "closed")]


def test_a_leader_leaves_when_the_root_has_its_farewell(star: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the root has sent before goes to the group, which then connects to another leader."""
    monkeypatch.setattr(timing, "LINGER", 0.0)
    job = star(6, shape="tree/3", clock=Clock())
    meet(job)
    job.lines[3].leave({"bye": 3}, timeout=0.0)
    job.lines[0].send({"before": 0})
    until(lambda: job.lines[0].flush(0.0) or job.drive(3), lambda: "not sent")
    for _ in range(20):
        job.drive(3, 4, 5)
    assert job.messages(4) == job.messages(5) == [{"before": 0}]
    assert job.gone(4) == job.gone(5) == []
    assert not job.lines[3].flush(0.0)
    until(lambda: job.drive(0, 3, 4, 5) or job.lines[3].flush(0.0))
    job.end(3)
    until(lambda: job.drive(0, 1, 2, 4, 5) or all(job.gone(rank) == [(3, "left")] for rank in (0, 1, 2, 4, 5)))
    job.lines[0].send({"after": 0})
    until(lambda: job.drive(0, 4, 5) or job.messages(5)[-1] == {"after": 0})
    assert job.messages(5) == [{"before": 0}, {"bye": 3}, {"after": 0}]


def test_what_is_sent_after_the_death_of_a_leader_comes_after_it(star: Make) -> None:
    """To the group of the leader, which connects again later."""
    job = star(6, shape="tree/3", clock=Clock())
    meet(job)
    job.end(3)
    until(lambda: job.drive(0, 1) or job.gone(1))
    job.lines[1].send({"known": 3})
    until(lambda: job.drive(0, 1) or job.messages(0))
    until(lambda: job.drive(0, 4, 5) or (job.messages(4) and job.messages(5)), lambda: job.heard)
    for rank in (0, 4, 5):
        assert [type(one) for one in job.heard[rank]] == [PeerExit, Message]


@pytest.mark.parametrize("victim", [3, 4], ids=["a leader", "a member"])
def test_a_death_before_there_was_a_connection(star: Make, victim: int) -> None:
    """It is established when all living ranks have reported that they have no farewell: that is no question of time."""
    clock = Clock()
    job = star(6, shape="tree/3", clock=clock)
    addresses = [line.address for line in job.lines]
    job.end(victim)
    living = [rank for rank in range(6) if rank != victim]
    for rank in living:
        job.lines[rank].connect(addresses)

    def step() -> None:
        clock.now += 0.01
        job.drive(*living)

    until(lambda: step() or all(job.gone(rank) == [(victim, "closed")] for rank in living), lambda: job.heard)
    assert clock.now < timing.PROBE_AFTER + timing.REPORT_WITHIN


def test_groups() -> None:
    places = ["a", "b", "a", "c", "b"]
    assert group_ranks("star", places) == []
    assert group_ranks("tree", places) == [0, 1, 0, 2, 1]
    assert group_ranks("tree/2", places) == [0, 0, 1, 1, 2]
    assert group_ranks("tree", ["a"] * 3) == group_ranks("tree/3", ["a"] * 3) == []


def test_the_shape_of_a_large_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shape, "query_hard_descriptor_limit", lambda: 1 << 20)
    assert [choose_shape("auto", size) for size in (2, 4096, 4097)] == ["star", "star", "tree"]
    assert [choose_shape(one, 100_000) for one in ("star", "tree/2")] == ["star", "tree/2"]
    monkeypatch.setattr(shape, "query_hard_descriptor_limit", lambda: 1024)
    assert [choose_shape("auto", size) for size in (896, 897)] == ["star", "tree"]


def test_the_hub_of_each_rank_of_a_tree() -> None:
    def elect(rank: int, *exits: int) -> tuple[int, list[int]]:
        members = Membership(rank, 6)
        members.set_groups([0, 1, 0, 1, 2, 1])
        for gone in exits:
            members.record(PeerExit(gone, "closed", "", 0, ""))
        assert members.elect(0.0)
        return members.hub, sorted(members.children())

    assert [elect(rank) for rank in range(6)] == [(0, [1, 2, 4]), (0, [3, 5]), (0, []), (1, []), (0, []), (1, [])]
    assert [elect(rank, 0) for rank in (1, 2, 4)] == [(1, [2, 3, 4, 5]), (1, []), (1, [])]
    assert [elect(rank, 1) for rank in (0, 3, 5)] == [(0, [2, 3, 4]), (0, [5]), (3, [])]
    assert [elect(rank, 0, 1) for rank in (2, 3, 5)] == [(2, [3, 4]), (2, [5]), (3, [])]
    assert elect(5, 0, 1, 2, 3, 4) == (5, [])
