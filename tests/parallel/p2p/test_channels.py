"""Which receive gets which value, over wires that can be held up and cut."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from support.stage_values import same

from mpicoll.errors import CommunicationError, RankError, RankFailed, TruncationError
from mpicoll.parallel.p2p.channels import (
    BACKWARD,
    FORWARD,
    PLAIN,
    ChannelMux,
    line_key,
)
from mpicoll.parallel.p2p.message_format import flatten
from mpicoll.parallel.p2p.operations import PendingOperation, PendingRecv, PendingSend
from mpicoll.transport.base import Envelope, Memory


@dataclass
class Slow:
    """A message that has been asked for, and arrives when it is let go."""

    source: bytes
    target: Memory
    wire: Loop

    def test(self) -> bool:
        if self.wire.held:
            return False
        self.target[:] = np.frombuffer(self.source, np.uint8)
        return True


class Sent:
    def test(self) -> bool:
        return True


@dataclass
class Loop:
    """One end of a wire between stages 0 and 1."""

    stage: int
    peers: list[int] = field(init=False)
    incoming: deque[tuple[int, bytes]] = field(default_factory=deque)
    other: Loop = field(init=False, repr=False)
    held: bool = False
    probes: int = 0
    sent: list[int] = field(default_factory=list)
    lose: set[int] = field(default_factory=set)
    error: CommunicationError | None = None

    def __post_init__(self) -> None:
        self.peers = [1 - self.stage]

    def isend(self, data: Memory, dest: int, tag: int) -> Sent:
        if len(self.sent) not in self.lose:
            self.other.incoming.append((tag, data.tobytes()))
        self.sent.append(tag)
        return Sent()

    def iprobe(self, source: int, tag: None) -> Envelope | None:
        self.probes += 1
        if self.error is not None:
            raise self.error
        return Envelope(source, self.incoming[0][0], len(self.incoming[0][1])) if self.incoming else None

    def irecv(self, data: Memory, source: int, tag: int) -> Slow:
        found, message = self.incoming.popleft()
        assert found == tag
        assert data.size == len(message)
        return Slow(message, data, self)

    def announce(self, *args: Any, **options: Any) -> None:
        """There is no device."""

    find_announced = announce

    def bind_end(self, *args: Any) -> None:
        """There is no MPI between these stages."""

    def check(self, peer: int) -> None:
        if self.error is not None:
            raise self.error

    def free(self) -> None: ...


@dataclass
class Ends:
    left: Loop
    right: Loop
    here: ChannelMux
    there: ChannelMux

    def send(self, value: Any, key: int = 0, *, sync: bool = False, back: bool = False) -> PendingSend:
        tensors: list[torch.Tensor] = []
        spec = flatten("send", value, tensors)
        lines = self.there if back else self.here
        sending = PendingSend("send", next(iter(lines.peers.values())), key, spec, sync=sync)
        lines.post_send(sending, tensors)
        return sending

    def post_recv(self, key: int = 0, **options: Any) -> PendingRecv:
        receiving = PendingRecv("recv", self.there.peers[0], key, **options)
        self.there.post_recv(receiving)
        return receiving

    def pump(self) -> None:
        for _ in range(3):
            self.here.pump()
            self.there.pump()


@pytest.fixture
def ends() -> Ends:
    left, right = Loop(0), Loop(1)
    left.other, right.other = right, left
    return Ends(
        left, right, ChannelMux(left, "stage 0", "stage {}".format), ChannelMux(right, "stage 1", "stage {}".format)
    )


def got(receiving: PendingRecv) -> Any:
    assert receiving.has_ended()
    if receiving.error is not None:
        raise receiving.error
    return receiving.value


def wants(ends: Ends) -> list[int]:
    return [ends.here.peers[1].num_needed, ends.there.peers[0].num_needed]


def test_nothing_is_received_without_a_request(ends: Ends) -> None:
    ends.send(torch.ones(3))
    ends.send(torch.ones(3))
    ends.pump()
    assert ends.right.probes == 0
    first = ends.post_recv()
    ends.pump()
    assert same(got(first), torch.ones(3))
    assert len(ends.right.incoming) == 1
    assert wants(ends) == [0, 0]


def test_what_comes_before_what_is_wanted_is_kept(ends: Ends) -> None:
    ends.send(torch.ones(1), line_key("send", PLAIN, 3))
    ends.send([torch.ones(2), torch.ones(9_000)])
    assert same(got_after_pump(ends, ends.post_recv()), [torch.ones(2), torch.ones(9_000)])
    assert list(ends.there.peers[0].describe_unreceived()) == ["float32 (1,), channel 3"]
    assert same(got(ends.post_recv(line_key("recv", PLAIN, 3))), torch.ones(1))
    assert wants(ends) == [0, 0]


def got_after_pump(ends: Ends, receiving: PendingRecv) -> Any:
    ends.pump()
    return got(receiving)


def test_lines_have_tags_of_their_own(ends: Ends) -> None:
    keys = [line_key("send", line, channel) for line in (PLAIN, FORWARD, BACKWARD) for channel in (0, 1, 7, 255)]
    for number, key in enumerate(keys):
        ends.send(torch.full((number,), number), key)
    for number, key in reversed(list(enumerate(keys))):
        assert same(got_after_pump(ends, ends.post_recv(key)), torch.full((number,), number))
    assert max(ends.left.sent) < 2**15
    assert min(ends.left.sent) >= 0
    for channel in (-1, 256, 1.0, "1", None):
        with pytest.raises(RankError, match=r"send: channel must be in \[0, 256\), got"):
            line_key("send", PLAIN, channel)  # type: ignore[arg-type]


def test_a_blocking_send_is_over_when_it_is_received(ends: Ends) -> None:
    first, second = ends.send(torch.ones(2), sync=True), ends.send(torch.ones(2), sync=True)
    other = ends.send(None, 4, sync=True)
    ends.pump()
    assert not any(one.has_ended() for one in (first, second, other))
    ends.post_recv(4)
    ends.pump()
    assert [one.has_ended() for one in (first, second, other)] == [False, False, True]
    ends.post_recv()
    ends.pump()
    assert [one.has_ended() for one in (first, second)] == [True, False]
    ends.post_recv(shape=(3,))
    ends.pump()
    assert second.has_ended()
    assert str(second.error) == (
        "stage 0: send of float32 (2,) to stage 1: stage 0 sent float32 (2,),"
        " but stage 1 expected a tensor of shape (3,)"
    )
    assert wants(ends) == [0, 0]


def test_slow_messages_delay_no_rank(ends: Ends) -> None:
    ends.right.held = True
    ends.send([torch.ones(2), torch.ones(9_000)])
    ends.send(torch.zeros(4))
    first, second = ends.post_recv(), ends.post_recv()
    ends.pump()
    assert len(ends.right.incoming) == 4  # the header comes first
    assert not first.has_ended()
    ends.right.held = False
    ends.pump()
    assert same(got(second), torch.zeros(4))
    assert same(got(first), [torch.ones(2), torch.ones(9_000)])


def test_data_under_way_does_not_keep_later_values_back(ends: Ends) -> None:
    ends.send(torch.ones(4))
    got_after_pump(ends, ends.post_recv())
    ends.right.held = True
    ends.send(torch.ones(4) * 2)
    ends.send(torch.ones(4) * 3)
    both = [ends.post_recv(), ends.post_recv()]
    ends.pump()
    assert not ends.right.incoming
    assert not any(one.has_ended() for one in both)
    ends.right.held = False
    assert [got(one)[0] for one in both] == [2, 3]


def test_a_receive_may_be_withdrawn(ends: Ends) -> None:
    first, second = ends.post_recv(), ends.post_recv()
    ends.there.cancel(first)
    ends.there.cancel(first)
    assert wants(ends) == [0, 1]
    ends.send(torch.ones(2))
    assert same(got_after_pump(ends, second), torch.ones(2))
    assert not first.has_ended()


# The program of these: header, data, data, header, two messages of one value
@pytest.mark.parametrize("lost", range(6))
def test_a_lost_message_is_noticed(ends: Ends, lost: int) -> None:
    ends.left.lose = {lost}
    program = [torch.ones(2), torch.zeros(2), (torch.ones(9_000), torch.ones(2))]
    for value in program:
        ends.send(value)
    ends.send(torch.ones(5), 4)
    receivings = [ends.post_recv() for _ in program]
    other = ends.post_recv(4)
    ends.send(torch.ones(3))  # after the last message there must be another one to tell
    ends.pump()
    assert same(got(other), torch.ones(5))
    whole = {0: 0, 1: 0, 2: 1, 3: 2, 4: 2, 5: 2}[lost]
    for value, receiving in zip(program[:whole], receivings, strict=False):
        assert same(got(receiving), value)
    ends.post_recv(6)
    ends.pump()
    for receiving in receivings[whole:]:
        with pytest.raises(CommunicationError, match="stage 1: recv from stage 0: a message was lost;"):
            got(receiving)
    with pytest.raises(CommunicationError, match="the line is no longer usable"):
        got(ends.post_recv())
    assert wants(ends) == [0, 1]


def test_a_message_of_a_wrong_size_is_noticed(ends: Ends) -> None:
    ends.send(torch.ones(2))
    got_after_pump(ends, ends.post_recv())
    ends.left.isend(np.zeros(5, np.uint8), 1, 2 << 3 | 1)
    with pytest.raises(CommunicationError, match="received a message of unexpected size, 5 bytes"):
        got_after_pump(ends, ends.post_recv())
    assert wants(ends) == [0, 0]


@pytest.mark.parametrize("error", [RankFailed("it is gone", (7,)), TruncationError("too long")])
@pytest.mark.parametrize("way", ["pump", "look"])
def test_errors_of_the_transport_name_the_operation(ends: Ends, error: CommunicationError, way: str) -> None:
    ends.send([torch.ones(2), torch.ones(9_000)])
    ends.right.incoming.pop()
    operations: list[PendingOperation] = [ends.post_recv(), ends.post_recv(4), ends.send(None, 8, sync=True, back=True)]
    ends.there.pump()
    ends.right.error = error
    if way == "pump":
        ends.there.pump()
    else:
        ends.there.check_peer(ends.there.peers[0])
    texts = ["recv from stage 0", "recv from stage 0, channel 1", "send of None to stage 0, channel 2"]
    for operation, text in zip(operations, texts, strict=True):
        assert operation.has_ended()
        assert type(operation.error) is type(error)
        assert str(operation.error) == f"stage 1: {text}: {error}"
        assert operation.error.__cause__ is error
        assert getattr(operation.error, "ranks", (7,)) == (7,)
    assert wants(ends) == [0, 0]


def test_an_object_that_can_t_be_unpickled(ends: Ends) -> None:
    sending = PendingSend("send_obj", ends.here.peers[1], 0, 3, sync=False)
    ends.here.post_send(sending, np.frombuffer(b"bad", np.uint8))
    with pytest.raises(
        CommunicationError,
        match=r"recv from stage 0: the received value can't be unpickled \(UnpicklingError",
    ):
        got_after_pump(ends, ends.post_recv(objects=True))


def test_a_sender_that_is_gone_needs_no_answer(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    ends.send(torch.ones(3))
    ends.send(torch.ones(3), 4, sync=True)
    one = ends.post_recv()
    ends.pump()
    assert same(got(one), torch.ones(3))

    def gone(*_: Any) -> Any:
        raise RankFailed("it is gone", (0,))

    monkeypatch.setattr(ends.right, "isend", gone)
    assert same(got_after_pump(ends, ends.post_recv(4)), torch.ones(3))


def test_leaving(ends: Ends) -> None:
    ends.send(torch.ones(2))
    waiting = [ends.send(torch.ones(3), sync=True, back=True), ends.post_recv(), ends.post_recv()]
    ends.here.send_close()
    ends.pump()
    assert ends.there.peers[0].closed
    assert not ends.here.peers[1].closed
    with pytest.raises(
        CommunicationError,
        match=r"send of .* to stage 0: stage 0 has closed its pipe",
    ):
        raise waiting[0].error or AssertionError
    assert waiting[1].has_ended()
    with pytest.raises(
        CommunicationError, match="recv from stage 0: stage 0 has closed its pipe and sends no more values"
    ):
        got(waiting[2])  # type: ignore[arg-type]
    with pytest.raises(CommunicationError, match="sends no more values"):
        got(ends.post_recv())
    later = ends.send(torch.ones(3), back=True)
    assert "closed its pipe without receiving the value" in str(later.error)
    ends.there.send_close()
    ends.pump()
    assert ends.here.peers[1].closed
    assert list(ends.here.peers[1].describe_unreceived()) == ["float32 (3,)"]


def test_what_no_rank_receives_names_its_line(ends: Ends) -> None:
    """Who waits on the wrong line must see how the value was sent."""
    ends.send(torch.ones(1), FORWARD)
    ends.send(torch.ones(2), BACKWARD | 3 << 2)
    plain = ends.post_recv(PLAIN)
    ends.pump()
    assert list(ends.there.peers[0].describe_unreceived()) == [
        "float32 (1,) by a send_forward form",
        "float32 (2,) by a send_backward form, channel 3",
    ]
    assert plain.expected == "tensors, sent by send or isend"
    assert ends.post_recv(BACKWARD).expected == "tensors, sent by a send_backward form"
