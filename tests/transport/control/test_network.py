"""Connections beside MPI: messages, deaths of real processes, last words, strangers, a network that is cut."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.descriptors import count_descriptors
from support.launch import ROOT
from support.star import SOON, TOKEN, Clock, Make, until

from mpicoll.transport.control import timing
from mpicoll.transport.control.events import Message, PeerExit
from mpicoll.transport.control.network import ControlNetwork


@pytest.mark.parametrize("size", [2, 3, 5])
def test_messages_reach_their_destinations(star: Make, size: int) -> None:
    job = star(size).start()
    for rank, line in enumerate(job.lines):
        line.send({"from": rank, "to": "all"})
        for to in range(size):
            if to != rank:
                line.send({"from": rank, "to": to}, to)
    for rank in range(size):
        until(lambda rank=rank: len(job.messages(rank)) == 2 * (size - 1), lambda rank=rank: job.heard[rank])
        for source in range(size):
            expected = [{"from": source, "to": "all"}, {"from": source, "to": rank}] if source != rank else []
            assert job.messages(rank, source) == expected
        assert job.gone(rank) == []
        assert job.lines[rank].exits == {}


def test_messages_of_a_megabyte_from_several_threads_keep_their_order(star: Make) -> None:
    job = star(3).start()
    big = "x" * 1_000_000

    def talk(rank: int, thread: int) -> None:
        for number in range(34):
            text = big if number == 17 else "y" * (number * 400)
            job.lines[rank].send({"thread": thread, "number": number, "text": text})

    threads = [threading.Thread(target=talk, args=(rank, thread)) for rank in range(3) for thread in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in range(3):
        until(lambda rank=rank: len(job.messages(rank)) == 2 * 2 * 34, lambda rank=rank: len(job.messages(rank)))
        for source in {0, 1, 2} - {rank}:
            for number in range(2):
                part = [one for one in job.messages(rank, source) if one["thread"] == number]
                assert [one["number"] for one in part] == list(range(34))
                assert all(one["text"] == (big if i == 17 else "y" * (i * 400)) for i, one in enumerate(part))


def test_what_is_sent_before_there_are_connections_arrives(star: Make) -> None:
    job = star(3)
    for rank, line in enumerate(job.lines):
        line.send({"early": rank})
    job.lines[2].send({"early": "1 only"}, 1)
    job.start()
    until(lambda: len(job.messages(1)) == 3 and len(job.messages(0)) == 2 and len(job.messages(2)) == 2)
    assert job.messages(1, 2) == [{"early": 2}, {"early": "1 only"}]
    assert job.messages(1, 0) == [{"early": 0}]


@pytest.mark.parametrize("leaver", [0, 1, 2])
def test_goodbye(star: Make, leaver: int) -> None:
    job = star(3).start().meet()
    job.lines[leaver].send({"last": "word"})
    job.lines[leaver].leave({"done": True})
    job.end(leaver)
    others = {0, 1, 2} - {leaver}
    for rank in others:
        until(lambda rank=rank: job.gone(rank), lambda rank=rank: job.heard[rank])
        assert job.heard[rank] == [
            Message(leaver, {"last": "word"}),
            Message(leaver, {"done": True}),
            PeerExit(leaver, "left", "", os.getpid(), socket.gethostname()),
        ]
    # The star goes on without it.
    first, second = sorted(others)
    job.lines[first].send({"still": "here"})
    job.lines[second].send({"me": "too"})
    until(lambda: len(job.heard[first]) == len(job.heard[second]) == 4)
    assert job.messages(second)[-1] == {"still": "here"}
    assert job.messages(first)[-1] == {"me": "too"}
    assert job.heard[leaver] == []


def test_all_leave_one_after_the_other(star: Make) -> None:
    job = star(4).start().meet()
    for rank in range(4):
        # Whoever has left hears nothing any more.
        expected = [(other, "left") for other in range(rank)]
        until(lambda rank=rank, expected=expected: job.gone(rank) == expected, lambda rank=rank: job.heard[rank])
        job.lines[rank].leave({"rank": rank})


@pytest.mark.parametrize("stay", [set(), {0, 3}, {4, 5}], ids=str)
def test_many_leave_at_once(star: Make, stay: set[int]) -> None:
    """And end as soon as they have, as at the end of a program: nobody seems to have died."""
    size = 6
    leavers = set(range(size)) - stay
    job = star(size).start().meet()
    together = threading.Barrier(len(leavers))

    def leave(rank: int) -> None:
        together.wait()
        job.lines[rank].leave({}, timeout=SOON)
        job.end(rank)

    threads = [threading.Thread(target=leave, args=(rank,)) for rank in leavers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON / 2)
        assert not thread.is_alive()
    for rank in stay:
        until(lambda rank=rank: len(job.gone(rank)) == len(leavers), lambda rank=rank: job.heard[rank])
    for rank in range(size):
        assert all(why == "left" for _, why in job.gone(rank)), job.heard[rank]
        assert len(job.messages(rank)) == len(job.gone(rank))  # each with its goodbye


def test_two_that_leave_do_not_rely_on_each_other(star: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the hub has left, each is welcome at the other in the same moment. Who is let go has told one who is not."""
    job = star(4)
    addresses = [line.address for line in job.lines]
    for line in job.lines:
        line.connect(addresses)
        line.send({"here": line.rank})
    until(lambda: job.drive(0, 1, 2, 3) or all(len(heard) == 3 for heard in job.heard))
    job.lines[0].leave({}, timeout=SOON)
    job.end(0)
    for rank in (1, 2):
        job.lines[rank].leave({}, timeout=0.0)
    select = job.lines[1]._selector.select

    def meanwhile(timeout: float) -> Any:
        ready = select(timeout)
        job.drive(2)
        return ready

    with monkeypatch.context() as patch:
        patch.setattr(job.lines[1]._selector, "select", meanwhile)
        until(lambda: job.drive(1) or job.lines[1].flush(0.0) or job.lines[2].flush(0.0))
        assert job.lines[1].flush(0.0)
        job.end(1)
    for _ in range(100):  # rank 3 does nothing
        job.drive(2)
        assert not job.lines[2].flush(0.0)
        time.sleep(0.002)
    until(lambda: job.drive(2, 3) or job.lines[2].flush(0.0))
    job.end(2)
    until(lambda: job.drive(3) or len(job.gone(3)) == 3, lambda: job.heard[3])
    assert job.gone(3) == [(0, "left"), (1, "left"), (2, "left")]


def test_a_late_hub_waits_for_those_that_have_a_farewell(star: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 has never been connected with rank 0, finds it gone, and is the next hub."""
    monkeypatch.setattr(timing, "LINGER", 0.0)
    clock = Clock()
    job = star(3, clock=clock)
    addresses = [line.address for line in job.lines]
    for rank in (0, 2):
        job.lines[rank].connect(addresses)
        job.lines[rank].send({"here": rank})
    until(lambda: job.drive(0, 2) or (job.messages(0) and job.messages(2)))
    job.lines[0].leave({"bye": 0}, timeout=SOON)
    job.end(0)
    job.lines[1].connect(addresses)
    until(lambda: job.drive(1) or job.lines[1].hub == 1)
    while clock.now < 0.9 * timing.REPORT_WITHIN:
        job.drive(1)
        clock.now += 0.1
    assert job.heard[1] == []
    until(lambda: job.drive(1, 2) or (job.gone(1) and job.gone(2)), lambda: job.heard)
    assert job.gone(1) == job.gone(2) == [(0, "left")]
    assert job.messages(1) == [{"bye": 0}]


def test_a_hub_decides_alone_without_reports(star: Make) -> None:
    """Rank 0 is gone without a farewell before rank 1 has found it, and rank 2 does not connect: that must not last."""
    clock = Clock()
    job = star(3, clock=clock)
    addresses = [line.address for line in job.lines]
    job.end(0)
    job.lines[1].connect(addresses)
    until(lambda: job.drive(1) or job.lines[1].hub == 1)
    assert job.heard[1] == []
    clock.now += timing.REPORT_WITHIN
    until(lambda: job.drive(1) or job.gone(1) == [(0, "closed")], lambda: job.heard[1])
    job.lines[2].connect(addresses)
    until(lambda: job.drive(1, 2) or job.gone(2) == [(0, "closed")], lambda: job.heard[2])


@pytest.mark.parametrize("seed", range(100))
def test_leaving_in_any_order(star: Make, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of the ranks leave while others are slow, or not yet connected. One thread drives all, in random order and
    by a clock of its own; a rank may be overtaken between seeing that something has come and reading it. Nobody seems
    to have died, and that is no question of time."""
    clock = Clock()
    monkeypatch.setattr(timing, "REPORT_WITHIN", 1e6)
    random = Random(seed)
    size = random.randint(2, 7)
    leavers = set(random.sample(range(size), random.randint(1, size))) | {0}
    job = star(size, clock=clock)
    running = list(range(size))
    weights = [random.choice([1.0, 1.0, 0.2, 0.05]) for _ in range(size)]

    def step() -> int:
        clock.now += random.random() * 0.002
        rank = random.choices(running, [weights[rank] for rank in running])[0]
        job.drive(rank)
        return rank

    def overtaken(select: Callable[..., Any]) -> Callable[..., Any]:
        def call(timeout: float) -> Any:
            ready = select(timeout)
            if random.random() < 0.3:
                step()
            return ready

        return call

    addresses = [line.address for line in job.lines]
    for line in job.lines:
        line.connect(addresses)
        monkeypatch.setattr(line._selector, "select", overtaken(line._selector.select))
    for _ in range(random.choice([0, 10, 40]) * size):
        step()
    eager = random.choice([1.0, 0.1, 0.01])
    left: set[int] = set()
    deadline = time.monotonic() + SOON
    while leavers & set(running):
        assert time.monotonic() < deadline, (job.heard, running)
        rank = step()
        if rank in leavers - left and random.random() < eager:
            job.lines[rank].leave({"bye": rank}, timeout=0.0)
            left.add(rank)
        elif rank in left and random.random() < 0.4 and job.lines[rank].flush(0.0):
            job.end(rank)
            running.remove(rank)
    while not all(len(job.gone(rank)) == len(leavers) for rank in running):
        assert time.monotonic() < deadline, (job.heard, running)
        step()
    for rank, heard in enumerate(job.heard):
        assert all(why == "left" for _, why in job.gone(rank)), heard
        assert [one["bye"] for one in job.messages(rank)] == [one.rank for one in heard if isinstance(one, PeerExit)]


def test_a_late_rank_receives_an_earlier_farewell(star: Make) -> None:
    """Rank 0 lives on after it has left, and rank 2 has never been connected with it."""
    job = star(3)
    addresses = [line.address for line in job.lines]
    for rank in (0, 1):
        job.lines[rank].connect(addresses)
        job.threads[rank].start()
    job.lines[0].leave({"bye": 0}, timeout=0.2)
    until(lambda: job.gone(1) == [(0, "left")])
    job.lines[2].connect(addresses)
    job.threads[2].start()
    until(lambda: job.gone(2) == [(0, "left")], lambda: job.heard[2])
    assert job.messages(2) == [{"bye": 0}]
    job.lines[2].send({"hello": 2})
    until(lambda: job.messages(1)[-1] == {"hello": 2}, lambda: job.heard[1])
    assert job.gone(1) == [(0, "left")]


def test_flush_says_whether_all_has_gone(star: Make) -> None:
    job = star(2)
    addresses = [line.address for line in job.lines]
    assert job.lines[0].flush(0.0)
    job.lines[0].send({"text": "x" * 500_000})
    assert not job.lines[0].flush(0.05)
    for line in job.lines:
        line.connect(addresses)
    job.threads[1].start()
    # Nobody polls rank 0: flush does the work by itself.
    assert job.lines[0].flush(SOON)
    until(lambda: job.messages(1) == [{"text": "x" * 500_000}])


def test_what_flush_receives_is_not_lost(star: Make) -> None:
    job = star(2)
    addresses = [line.address for line in job.lines]
    for line in job.lines:
        line.connect(addresses)
    job.threads[1].start()
    job.lines[1].send({"to": "zero"})
    job.lines[0].send({"to": "one"})
    assert job.lines[0].flush(SOON)
    assert job.lines[1].flush(SOON)
    heard: list[Message | PeerExit] = []
    until(lambda: heard.extend(job.lines[0].poll(0.1)) or heard)
    assert heard == [Message(1, {"to": "zero"})]


def test_poll_waits_no_longer_than_it_may_and_wakes() -> None:
    line = ControlNetwork(0, 2, TOKEN)
    assert line.poll(0.0) == []
    woken = threading.Event()

    def poll() -> None:
        line.poll(SOON * 10)
        woken.set()

    thread = threading.Thread(target=poll)
    thread.start()
    line.wake()
    assert woken.wait(SOON)
    thread.join()
    line.close()


def test_poll_returns_once_when_a_descriptor_can_be_read() -> None:
    network = ControlNetwork(0, 1, TOKEN)
    reader, writer = os.pipe()
    for _ in range(2):
        network.wake_once(reader)
        network.wake_once(reader)
        begin = time.monotonic()
        network.poll(0.05)
        assert time.monotonic() - begin > 0.03
        os.write(writer, b"x")
        begin = time.monotonic()
        network.poll(SOON)
        assert time.monotonic() - begin < SOON / 2
        begin = time.monotonic()
        network.poll(0.05)  # though it can still be read
        assert time.monotonic() - begin > 0.03
        os.read(reader, 1)
    network.close()
    network.wake_once(reader)
    os.close(reader)
    os.close(writer)


def test_at_rest_nothing_wakes(star: Make) -> None:
    """Two ranks that know each other and have nothing to say: one turn of poll per time that it is given."""
    job = star(2)
    addresses = [line.address for line in job.lines]
    for line in job.lines:
        line.connect(addresses)
    job.threads[1].start()
    job.lines[0].send({})
    until(lambda: job.lines[0].poll(0.05) == [] and job.messages(1))
    while job.lines[0].poll(0.2):
        pass
    turns = 0
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        job.lines[0].poll(0.5)
        turns += 1
    assert turns <= 3


def test_a_world_of_one() -> None:
    line = ControlNetwork(0, 1, TOKEN)
    line.connect([line.address])
    line.send({"to": "nobody"})
    assert line.flush(1.0)
    assert line.poll(0.0) == []
    assert line.crash_fd is None
    line.leave({})
    line.close()


def test_arguments() -> None:
    with pytest.raises(ValueError, match="rank 2 is not one of 2"):
        ControlNetwork(2, 2, TOKEN)
    line = ControlNetwork(1, 3, TOKEN)
    with pytest.raises(ValueError, match="1 addresses for 3 ranks"):
        line.connect([line.address])
    for to in (-1, 1, 3):
        with pytest.raises(ValueError, match=f"can't send to rank {to}"):
            line.send({}, to)
    with pytest.raises(ValueError, match="the limit is 16777216"):
        line.send({"text": "x" * (16 << 20)})
    with pytest.raises(TypeError, match="JSON"):
        line.send({"bytes": b""})
    line.close()
    line.close()
    line.wake()
    assert line.poll(1.0) == []


def test_addresses() -> None:
    line = ControlNetwork(0, 2, TOKEN)
    address = line.address
    line.close()
    assert json.loads(json.dumps(address)) == address
    assert address["pid"] == os.getpid()
    assert address["host"] == socket.gethostname()
    assert not any(re.match(r"127\.|169\.254\.", one) for one in address["addresses"])


def test_closed_descriptors_are_given_back(star: Make) -> None:
    stderr = Path("/proc/self/fd/2").readlink()

    def descriptors() -> int:
        return count_descriptors(rf"socket:|eventpoll|eventfd|^{re.escape(str(stderr))}$")

    before = descriptors()
    job = star(3).start()
    job.lines[2].send({})
    until(lambda: job.messages(0) and job.messages(1))
    for rank in range(3):
        job.end(rank)
    for thread in job.threads:
        thread.join()
    job.lines.clear()
    until(lambda: descriptors() <= before)


# --- ranks that are processes

RANK = """
import ctypes, faulthandler, json, os, resource, signal, socket, sys, threading, time, logging
from mpicoll.transport.control import events, network, timing

rank, size, constants, prelude, shape = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]), *sys.argv[4:]
for name, value in constants.items():
    assert hasattr(timing, name)
    setattr(timing, name, value)
exec(prelude)
line = network.ControlNetwork(rank, size, b"token of these processes", shape=shape)
faulthandler.enable(file=line.crash_fd)

def tell(*what):
    os.write(1, (json.dumps(what) + "\\n").encode())

def watch():
    while True:
        for one in line.poll(10.0):
            if isinstance(one, events.Message):
                tell("message", one.source, one.body)
            else:
                tell("gone", one.rank, one.why, one.crash_output, one.pid, one.host)

def crash():
    ctypes.string_at(0)

tell("address", line.address)
line.connect(json.loads(sys.stdin.readline()))
threading.Thread(target=watch, daemon=True).start()
for command in sys.stdin:
    exec(json.loads(command))
os._exit(0)
"""

DEATHS = {
    "segv": "crash()",
    "abort": "os.abort()",
    "bus": "os.kill(os.getpid(), signal.SIGBUS)",
    "kill": "os.kill(os.getpid(), signal.SIGKILL)",
    "exit": "os._exit(0)",
}
SPEAKING = {"segv": "Segmentation fault", "abort": "Aborted", "bus": "Bus error"}


class Process:
    """A rank in a process of its own, which does what it is told."""

    def __init__(
        self, rank: int, size: int, constants: dict[str, float], prelude: str, within: list[str], shape: str
    ) -> None:
        command = [*within, sys.executable, "-c", RANK, str(rank), str(size), json.dumps(constants), prelude, shape]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.rank = rank
        self.told: list[list[Any]] = []
        self.stderr = ""
        self.threads = [threading.Thread(target=self._hear), threading.Thread(target=self._hear_stderr)]
        for thread in self.threads:
            thread.start()

    def _hear(self) -> None:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            if text.endswith("\n"):  # else it was killed before it had written all
                self.told.append(json.loads(text))

    def _hear_stderr(self) -> None:
        assert self.process.stderr is not None
        for text in self.process.stderr:
            self.stderr += text

    def write(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def do(self, program: str) -> None:
        self.write(json.dumps(program))

    def of(self, kind: str) -> list[list[Any]]:
        return [one[1:] for one in self.told if one[0] == kind]

    def gone(self) -> list[tuple[int, str]]:
        return sorted((one[0], one[1]) for one in self.of("gone"))

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for thread in self.threads:
            thread.join()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


class Job:
    """Ranks in processes of their own."""

    def __init__(
        self,
        size: int,
        constants: dict[str, float],
        preludes: dict[int, str],
        within: dict[int, list[str]],
        shape: str = "star",
    ) -> None:
        self.ranks = [
            Process(rank, size, constants, preludes.get(rank, ""), within.get(rank, []), shape) for rank in range(size)
        ]

    def connect(self) -> Job:
        for rank in self.ranks:
            until(lambda rank=rank: rank.of("address"), lambda rank=rank: rank.stderr)
        addresses = json.dumps([rank.of("address")[0][0] for rank in self.ranks])
        for rank in self.ranks:
            rank.write(addresses)
        return self

    def meet(self) -> Job:
        """Until all have heard of all."""
        for rank in self.ranks:
            rank.do("line.send({'here': rank})")
        for rank in self.ranks:
            until(lambda rank=rank: len(rank.of("message")) == len(self.ranks) - 1, self.said)
        return self

    def __getitem__(self, rank: int) -> Process:
        return self.ranks[rank]

    def said(self) -> str:
        return "\n".join(f"{rank.rank}: {rank.told} {rank.stderr}" for rank in self.ranks)

    def survivors(self, *dead: int) -> list[Process]:
        return [rank for rank in self.ranks if rank.rank not in dead]

    def expect(self, expected: dict[int, str]) -> None:
        """Every survivor is told exactly this of exactly these."""
        want = sorted(expected.items())
        for rank in self.survivors(*expected):
            until(lambda rank=rank: rank.gone() == want, self.said)
        for rank in self.survivors(*expected):
            for number, _, _, pid, host in rank.of("gone"):
                address = self[number].of("address")[0][0]
                assert (pid, host) == (address["pid"], address["host"])

    def talk(self, *dead: int) -> None:
        """The survivors' messages still reach all."""
        living = self.survivors(*dead)
        for rank in living:
            rank.do("line.send({'after': rank})")
        for rank in living:
            want = {other.rank for other in living} - {rank.rank}
            until(
                lambda rank=rank, want=want: {s for s, body in rank.of("message") if "after" in body} == want, self.said
            )


Start = Callable[..., Job]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts jobs of processes, and ends them."""
    jobs: list[Job] = []

    def begin(
        size: int,
        constants: dict[str, float] | None = None,
        preludes: dict[int, str] | None = None,
        within: dict[int, list[str]] | None = None,
        shape: str = "star",
    ) -> Job:
        jobs.append(Job(size, constants or {}, preludes or {}, within or {}, shape))
        return jobs[-1].connect()

    yield begin
    for job in jobs:
        for rank in job.ranks:
            rank.end()


@pytest.mark.parametrize(
    ("size", "victims", "death", "shape"),
    [
        (2, [0], "segv", "star"),
        (2, [1], "abort", "star"),
        (3, [0], "exit", "star"),
        (3, [2], "bus", "star"),
        (3, [0, 1], "kill", "star"),
        (4, [0, 3], "kill", "star"),
        (8, [0, 1], "kill", "star"),
        (8, [2, 7], "segv", "star"),
        (6, [0], "segv", "tree/2"),
        (6, [2], "segv", "tree/2"),
        (6, [3], "abort", "tree/2"),
        (6, [0, 1, 2], "kill", "tree/2"),
        (6, [2, 3], "exit", "tree/2"),
    ],
)
def test_death(start: Start, size: int, victims: list[int], death: str, shape: str) -> None:
    job = start(size, shape=shape).meet()
    for victim in victims:
        job[victim].do(DEATHS[death])
    job.expect(dict.fromkeys(victims, "closed"))
    for rank in job.survivors(*victims):
        for number, _, words, *_ in rank.of("gone"):
            # Each hub had another rank to hear its words, except if that died with it.
            if death in SPEAKING:
                assert f"Fatal Python error: {SPEAKING[death]}" in words, number
                assert 'File "<string>"' in words
            else:
                assert words == ""
    job.talk(*victims)
    job.expect(dict.fromkeys(victims, "closed"))


@pytest.mark.parametrize("shape", ["star", "tree/2"])
def test_one_hub_after_the_other_dies(start: Start, shape: str) -> None:
    job = start(5, shape=shape).meet()
    dead: dict[int, str] = {}
    for victim in range(4):
        job[victim].do(DEATHS["segv"])
        dead[victim] = "closed"
        job.expect(dead)
        for rank in job.survivors(*dead):
            assert all("Segmentation fault" in words for _, _, words, *_ in rank.of("gone"))
        job.talk(*dead)
        for rank in job.ranks:
            rank.told = [one for one in rank.told if one[0] != "message"]


@pytest.mark.parametrize("victim", [0, 1])
def test_what_was_sent_before_a_death_comes_before_it(start: Start, victim: int) -> None:
    job = start(3).meet()
    job[victim].do(
        "for number in range(50): line.send({'number': number, 'text': 'x' * 20_000})\n"
        "line.send({'number': 50}, 2)\n"
        "assert line.flush(10.0)\n"
        "crash()"
    )
    job.expect({victim: "closed"})
    told = job[2].told
    numbers = [one[2]["number"] for one in told if one[0] == "message" and one[1] == victim and "number" in one[2]]
    assert numbers == list(range(51))
    assert told[-1][0] == "gone"
    assert "Segmentation fault" in told[-1][3]


@pytest.mark.parametrize("size", [2, 4])
def test_goodbye_of_processes(start: Start, size: int) -> None:
    job = start(size).meet()
    for leaver in range(size - 1):
        job[leaver].do("line.leave({'bye': rank}); os._exit(3)")
        job.expect(dict.fromkeys(range(leaver + 1), "left"))
        for rank in job.survivors(*range(leaver + 1)):
            assert rank.told[-2][:3] == ["message", leaver, {"bye": leaver}]
            assert rank.told[-1][:3] == ["gone", leaver, "left"]


def test_goodbye_before_all_are_connected(start: Start) -> None:
    job = start(4)
    for rank in (0, 1, 3):
        job[rank].do("line.leave({'bye': rank}); os._exit(0)")
    until(lambda: job[2].gone() == [(0, "left"), (1, "left"), (3, "left")], job.said)
    assert sorted(job[2].of("message")) == [[rank, {"bye": rank}] for rank in (0, 1, 3)]


@pytest.mark.parametrize("victims", [[0], [2], [0, 1]])
def test_death_before_there_was_a_connection(start: Start, victims: list[int]) -> None:
    """These die while they still import, so to say: they listen, but nobody has ever driven them."""
    constants = {"PROBE_AFTER": 0.2}
    job = Job(4, constants, {}, {})
    try:
        for rank in job.ranks:
            until(lambda rank=rank: rank.of("address"), lambda rank=rank: rank.stderr)
        addresses = json.dumps([rank.of("address")[0][0] for rank in job.ranks])
        for victim in victims:
            job[victim].signal(signal.SIGKILL)
            job[victim].process.wait()
        for rank in job.survivors(*victims):
            rank.write(addresses)
        job.expect(dict.fromkeys(victims, "closed"))
        job.talk(*victims)
        job.expect(dict.fromkeys(victims, "closed"))
    finally:
        for rank in job.ranks:
            rank.end()


QUICK = {"KEEPALIVE_IDLE": 1, "KEEPALIVE_INTERVAL": 1, "OUTAGE": 0.2, "PROBE_AFTER": 0.3, "CONNECT_WITHIN": 1}


def test_a_stopped_process_is_not_dead(start: Start) -> None:
    """Nor when much more is sent to it than its kernel can hold, nor when it is the hub, or the next one."""
    job = start(4, QUICK).meet()
    for rank in (0, 2):
        job[rank].signal(signal.SIGSTOP)
    for rank in (1, 3):
        job[rank].do("for number in range(3): line.send({'number': number, 'text': 'x' * 1_000_000})")
    time.sleep(3.5)  # a host has 3.2 s
    for rank in (0, 2):
        job[rank].signal(signal.SIGCONT)
    for rank in job.ranks:
        want = [(source, number) for source in (1, 3) if source != rank.rank for number in range(3)]
        until(
            lambda rank=rank, want=want: (
                sorted((s, b["number"]) for s, b in rank.of("message") if "number" in b) == want
            ),
            lambda: "not all has arrived",
        )
    job[1].signal(signal.SIGSTOP)
    job[0].signal(signal.SIGKILL)
    time.sleep(3.0)
    assert all(number != 1 for rank in job.survivors(0, 1) for number, _ in rank.gone())
    job[1].signal(signal.SIGCONT)
    job.expect({0: "closed"})
    job.talk(0)
    job.expect({0: "closed"})


def test_what_was_queued_goes_through_the_next_hub(start: Start) -> None:
    job = start(4).meet()
    job[0].signal(signal.SIGSTOP)
    job[3].do("for number in range(5): line.send({'number': number, 'text': 'x' * 300_000}, 2 if number % 2 else None)")
    time.sleep(0.3)
    job[0].signal(signal.SIGKILL)
    job.expect({0: "closed"})
    for rank, want in ((1, [0, 2, 4]), (2, [0, 1, 2, 3, 4])):
        until(
            lambda rank=rank, want=want: [b["number"] for s, b in job[rank].of("message") if "number" in b] == want,
            lambda rank=rank: [b.get("number") for _, b in job[rank].of("message")],
        )


_FORK = """
import subprocess
sleeper = subprocess.Popen(["sleep", "60"])
child = os.fork()
if child == 0:
    links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if int(fd) > 2
             and os.path.lexists(f"/proc/self/fd/{fd}")]
    line.send({"from": "a child"})
    line.leave({"from": "a child"})
    tell("child", os.getpid(), [link for link in links if link.startswith(("socket:", "anon_inode:"))], line.poll(0))
    if "crash" in MODE:
        crash()
    time.sleep(60)
    os._exit(0)
tell("sleeper", sleeper.pid)
"""


@pytest.mark.parametrize("victim", [0, 1])
def test_children_hide_no_death(start: Start, victim: int) -> None:
    job = start(3).meet()
    job[victim].do(_FORK.replace("MODE", '"sleep"'))
    until(lambda: job[victim].of("child") and job[victim].of("sleeper"), job.said)
    child, kept, heard = job[victim].of("child")[0]
    try:
        assert kept == []
        assert heard == []
        job[victim].do("line.send({'parent': 'still here'})")
        until(lambda: job[2].of("message")[-1] == [victim, {"parent": "still here"}])
        job[victim].signal(signal.SIGKILL)
        job.expect({victim: "closed"})
    finally:
        os.kill(child, signal.SIGKILL)
        os.kill(job[victim].of("sleeper")[0][0], signal.SIGKILL)


def test_a_child_has_its_own_last_words(start: Start) -> None:
    job = start(2).meet()
    job[1].do(_FORK.replace("MODE", '"crash"'))
    until(lambda: "Segmentation fault" in job[1].stderr and job[1].of("sleeper"), job.said)
    os.kill(job[1].of("sleeper")[0][0], signal.SIGKILL)
    job.talk()
    assert job[0].gone() == []


def test_no_thread_is_started_and_words_go_to_stderr_while_there_is_no_connection(start: Start) -> None:
    job = start(2)
    job[1].signal(signal.SIGKILL)
    job.expect({1: "closed"})
    job[0].do("tell('threads', threading.active_count()); crash()")
    until(lambda: "Segmentation fault" in job[0].stderr, job.said)
    until(lambda: job[0].of("threads") == [[2]], job.said)


def test_too_few_descriptors(start: Start) -> None:
    """The hub says so, works without the others, and takes nobody for dead."""
    few = "resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60)); logging.basicConfig(level=logging.INFO)"
    job = start(3, {"LOG_MISSING_AFTER": 0.5}, {0: few})
    until(lambda: "can't accept all connections" in job[0].stderr, job.said)
    until(lambda: "is not connected with ranks 1 and 2 yet" in job[0].stderr, job.said)
    job[0].do("before = time.process_time(); time.sleep(1); tell('cpu', time.process_time() - before)")
    until(lambda: job[0].of("cpu"))
    assert job[0].of("cpu")[0][0] < 0.5
    assert [rank.gone() for rank in job.ranks] == [[], [], []]


def test_more_descriptors_are_allowed_when_needed(start: Start) -> None:
    few = "resource.setrlimit(resource.RLIMIT_NOFILE, (60, 4000))"
    job = start(3, preludes={0: few}).meet()
    job[0].do("tell('limit', resource.getrlimit(resource.RLIMIT_NOFILE))")
    until(lambda: job[0].of("limit"))
    [[[soft, hard]]] = job[0].of("limit")
    assert 500 < soft < hard == 4000


# --- hosts


def _can_make_hosts() -> bool:
    try:
        return subprocess.run(["unshare", "--net", "ip", "link"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


class Hosts:
    """Two hosts: network namespaces with a wire between them that passes through two switches."""

    def __init__(self) -> None:
        self.holders = [
            subprocess.Popen(
                ["unshare", "--net", "sh", "-c", "ip link set lo up && echo ready && exec sleep 100"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(3)
        ]
        for holder in self.holders:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "ready\n"
        self.run(2, "ip link add name switch type bridge")
        self.run(2, "ip link set switch up")
        for host in (0, 1):
            pid = self.holders[host].pid
            self.run(2, f"ip link add port{host} type veth peer name eth0 netns {pid}")
            self.run(2, f"ip link set port{host} master switch up")
            self.run(host, f"ip addr add 10.79.0.{host + 1}/24 dev eth0")
            self.run(host, "ip link set eth0 up")

    def run(self, host: int, command: str) -> None:
        subprocess.run([*self.within(host), *command.split()], check=True)

    def within(self, host: int) -> list[str]:
        return ["nsenter", "--target", str(self.holders[host].pid), "--net"]

    def cut(self) -> None:
        """Nothing comes through any more, and no host is told."""
        self.run(2, "ip link set port1 nomaster")

    def heal(self) -> None:
        self.run(2, "ip link set port1 master switch")

    def end(self) -> None:
        for holder in self.holders:
            holder.kill()
            holder.wait()
            assert holder.stdout is not None
            holder.stdout.close()


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if not _can_make_hosts():
        pytest.skip("network namespaces can't be made: this needs root and iproute2")
    made = Hosts()
    yield made
    made.end()


def test_an_outage_ends_nothing(start: Start, hosts: Hosts) -> None:
    """Nor when it begins after a silence, and data is sent meanwhile, which the kernel sends again ever later."""
    quick = QUICK | {"OUTAGE": 2.0}
    job = start(2, quick, within={rank: hosts.within(rank) for rank in range(2)}).meet()
    time.sleep(0.8)
    hosts.cut()
    for rank in job.ranks:
        rank.do("line.send({'over': rank})")
    time.sleep(1.9)
    hosts.heal()
    for rank in job.ranks:
        until(lambda rank=rank: rank.of("message")[-1] == [1 - rank.rank, {"over": 1 - rank.rank}], job.said)
    assert [rank.gone() for rank in job.ranks] == [[], []]


def test_the_network_is_cut(start: Start, hosts: Hosts) -> None:
    """Each side is told that the other is out of reach, and goes on by itself."""
    job = start(5, QUICK, within={rank: hosts.within(int(rank in (2, 3, 4))) for rank in range(5)}).meet()
    job[3].do(DEATHS["segv"])
    job.expect({3: "closed"})
    job[1].do("line.send({'text': 'x' * 1_000_000})")
    until(lambda: len(job[4].of("message")) == 5)
    hosts.cut()
    job[0].do("line.send({'nobody': 'hears it'})")  # to rank 2 and 4: not even questions, only lost data
    for side, others in (((0, 1), (2, 4)), ((2, 4), (0, 1))):
        want = sorted([(3, "closed"), *((other, "unreachable") for other in others)])
        for rank in side:
            until(lambda rank=rank, want=want: job[rank].gone() == want, job.said)
    for first, second in ((0, 1), (2, 4)):
        job[first].do("line.send({'side': rank})")
        job[second].do("line.send({'side': rank})")
        until(lambda first=first, second=second: job[first].of("message")[-1] == [second, {"side": second}])
        until(lambda first=first, second=second: job[second].of("message")[-1] == [first, {"side": first}])


def test_a_host_of_a_tree_is_cut_off(start: Start, hosts: Hosts) -> None:
    """The root has a connection to one of its ranks only, and yet all of them are unreachable."""
    within = {rank: hosts.within(int(rank >= 2)) for rank in range(5)}
    job = start(5, QUICK, within=within, shape="tree").meet()
    hosts.cut()
    for side, others in (((0, 1), (2, 3, 4)), ((2, 3, 4), (0, 1))):
        want = [(other, "unreachable") for other in others]
        for rank in side:
            until(lambda rank=rank, want=want: job[rank].gone() == want, job.said)
    for side in ((0, 1), (2, 3, 4)):
        job[side[0]].do("line.send({'side': rank})")
        for rank in side[1:]:
            until(lambda rank=rank, side=side: job[rank].of("message")[-1] == [side[0], {"side": side[0]}], job.said)


@pytest.mark.parametrize("victims", [[0], [2], [2, 3], [0, 1]], ids=str)
def test_deaths_on_a_host_of_a_tree(start: Start, hosts: Hosts, victims: list[int]) -> None:
    within = {rank: hosts.within(int(rank >= 2)) for rank in range(5)}
    job = start(5, QUICK, within=within, shape="tree").meet()
    for victim in victims:
        job[victim].do(DEATHS["kill"])
    job.expect(dict.fromkeys(victims, "closed"))
    job.talk(*victims)
    job.expect(dict.fromkeys(victims, "closed"))
